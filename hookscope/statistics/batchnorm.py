"""Inputs of BatchNorm layers compared with their running statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.hooks import as_float
from hookscope.statistics.moments import ChannelMoments, sums_of_maps

BATCH_NORMS = ("_BatchNorm", "FrozenBatchNorm2d")
"""Classes of layers with running statistics."""


@dataclass(frozen=True)
class BatchNormDrift:
    """Distance of the inputs of a BatchNorm from its running statistics.

    Attributes:
        layer: Key of the call.
        items: Number of values in a channel.
        updated: Whether the running statistics were ever updated.
        shift: ``(C,)`` mean of the inputs minus running mean, in running standard deviations.
        ratio: ``(C,)`` variance of the inputs over running variance.
    """

    layer: str
    items: int
    updated: bool
    shift: NDArray[np.float64]
    ratio: NDArray[np.float64]

    @property
    def median_shift(self) -> float:
        """Median over the channels of the absolute ``shift``."""
        return float(np.median(np.abs(self.shift)))

    @property
    def median_ratio(self) -> float:
        """Median over the channels of ``ratio`` or its inverse, whichever is larger."""
        return float(np.exp(np.median(np.abs(np.log(self.ratio.clip(min=1e-30))))))


class BatchNormAccumulator:
    """Moments of the inputs of a BatchNorm, and its running statistics."""

    def __init__(self, module: nn.Module) -> None:
        self.running_mean: NDArray[np.float64] = _as_array(module.running_mean)
        self.running_var: NDArray[np.float64] = _as_array(module.running_var)
        self.eps = float(getattr(module, "eps", 0.0))
        self.updated = was_updated(module)
        self.moments = ChannelMoments(self.channels)

    @property
    def channels(self) -> int:
        return len(self.running_mean)

    def update(self, inputs: Tensor) -> None:
        """Add a batch ``(N, C, *positions)``."""
        if inputs.numel():
            values = as_float(inputs)
            self.moments.update(sums_of_maps(values.reshape(values.shape[0], values.shape[1], -1)))

    def empty(self) -> BatchNormAccumulator:
        """An empty accumulator of the same layer."""
        state = self.state_dict() | {"moments": ChannelMoments(self.channels).state_dict()}
        return self.from_state(state)

    def merge(self, other: BatchNormAccumulator) -> None:
        """Add an accumulator of the same layer."""
        self.moments.merge(other.moments)

    def drift(self, layer: str) -> BatchNormDrift:
        """Distance of the inputs so far from the running statistics."""
        variance = self.running_var + self.eps
        return BatchNormDrift(
            layer,
            int(self.moments.count.max(initial=0)),
            self.updated,
            (self.moments.mean - self.running_mean) / variance**0.5,
            (self.moments.variance + self.eps) / variance,
        )

    def state_dict(self) -> dict[str, Any]:
        """Arrays and numbers for `from_state`."""
        return {
            "running_mean": self.running_mean,
            "running_var": self.running_var,
            "eps": self.eps,
            "updated": self.updated,
            "moments": self.moments.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> BatchNormAccumulator:
        """Restore what `state_dict` returned."""
        found = cls.__new__(cls)
        found.running_mean = np.array(state["running_mean"], np.float64)
        found.running_var = np.array(state["running_var"], np.float64)
        found.eps, found.updated = float(state["eps"]), bool(state["updated"])
        found.moments = ChannelMoments.from_state(state["moments"])
        return found


def _as_array(tensor: Any) -> NDArray[np.float64]:
    # copy: training changes a float64 buffer in place
    array: NDArray[np.float64] = tensor.detach().double().cpu().numpy().copy()
    return array


def was_updated(module: nn.Module) -> bool:
    """Whether training updated the running statistics: batches were counted, or they differ from 0 and 1.

    Older checkpoints of torchvision have no count.
    """
    counted: Any = getattr(module, "num_batches_tracked", None)
    if counted is not None and int(counted) > 0:
        return True
    mean, variance = _as_array(module.running_mean), _as_array(module.running_var)
    return bool(mean.any() or (variance != 1).any())
