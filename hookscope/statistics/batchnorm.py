"""Inputs of BatchNorm layers compared with their running statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from hookscope.hooks import as_float, was_trained, was_updated
from hookscope.statistics.moments import ChannelMoments, Floats, sums_of_maps
from hookscope.statistics.state import Accumulator

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
        trained: Whether its scales and biases were trained.
    """

    layer: str
    items: int
    updated: bool
    shift: Floats
    ratio: Floats
    trained: bool = False

    @property
    def median_shift(self) -> float:
        """Median over the channels of the absolute ``shift``."""
        return float(np.median(np.abs(self.shift)))

    @property
    def median_ratio(self) -> float:
        """Median over the channels of ``ratio`` or its inverse, whichever is larger."""
        return float(np.exp(np.median(np.abs(np.log(self.ratio.clip(min=1e-30))))))


@dataclass
class BatchNormAccumulator(Accumulator):
    """Moments of the inputs of a BatchNorm, and its running statistics."""

    running_mean: Floats
    running_var: Floats
    eps: float
    updated: bool
    moments: ChannelMoments
    trained: bool = False

    @classmethod
    def of(cls, module: Any) -> Self:
        """An accumulator of no inputs for a BatchNorm."""
        # copies: training changes a float64 buffer in place
        mean, variance = (
            buffer.detach().double().cpu().numpy().copy() for buffer in (module.running_mean, module.running_var)
        )
        eps, updated = float(getattr(module, "eps", 0.0)), was_updated(module)
        return cls(mean, variance, eps, updated, ChannelMoments.empty(len(mean)), was_trained(module))

    @property
    def channels(self) -> int:
        return len(self.running_mean)

    def update(self, inputs: Tensor) -> None:
        """Add a batch ``(N, C, *positions)``."""
        if inputs.numel():
            values = as_float(inputs)
            sums = sums_of_maps(values.reshape(values.shape[0], values.shape[1], -1))
            self.moments.merge(ChannelMoments.of(sums))

    def merge(self, other: BatchNormAccumulator) -> None:
        """Add an accumulator of the same layer."""
        self.moments.merge(other.moments)

    def drift(self, layer: str) -> BatchNormDrift:
        """Distance of the inputs so far from the running statistics."""
        variance = self.running_var + self.eps
        with np.errstate(invalid="ignore", divide="ignore"):  # a damaged file may have variances of 0 or below
            shift = (self.moments.mean - self.running_mean) / variance**0.5
            ratio = (self.moments.variance + self.eps) / variance
        return BatchNormDrift(layer, int(self.moments.count.max(initial=0)), self.updated, shift, ratio, self.trained)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        return super().from_state({**state, "moments": ChannelMoments.from_state(state["moments"])})
