"""Running statistics of every layer of a model, which can be merged, saved and resumed."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
from torch import Tensor

from hookscope.display import NOTHING_MEASURED, Cells, Rows, Shown
from hookscope.errors import InputError
from hookscope.findings import counted, listed
from hookscope.hooks import Call, as_float, in_order, was_trained, was_updated
from hookscope.statistics.accumulator import LayerAccumulator, has_fixed_channels
from hookscope.statistics.facts import LayerStatistics
from hookscope.statistics.moments import Accumulator, ChannelMoments, Floats, sums_of_maps
from hookscope.statistics.ranges import CallRange

BATCH_NORMS = ("_BatchNorm", "FrozenBatchNorm2d")
"""Classes of layers with running statistics."""
_VARIED = 0.4  # spread of the running means, below which their correlation says little


@dataclass(frozen=True)
class BatchNormDrift:
    """Distance of the inputs of a BatchNorm from its running statistics.

    Attributes:
        layer: Key of the call.
        items: Number of values in a channel.
        updated: Whether the running statistics were ever updated.
        shift: ``(C,)`` mean of the inputs minus running mean, in running standard deviations.
        ratio: ``(C,)`` variance of the inputs over running variance.
        running: ``(C,)`` running mean in running standard deviations.
        trained: Whether its scales and biases were trained.
    """

    layer: str
    items: int
    updated: bool
    shift: Floats
    ratio: Floats
    running: Floats
    trained: bool = False

    @property
    def median_shift(self) -> float:
        """Median over the channels of the absolute ``shift``."""
        return float(np.median(np.abs(self.shift)))

    @property
    def median_ratio(self) -> float:
        """Median over the channels of ``ratio`` or its inverse, whichever is larger."""
        return float(np.exp(np.median(np.abs(self._logs))))

    @property
    def _logs(self) -> Floats:
        logs: Floats = np.log(self.ratio.clip(1e-30, 1e30))
        return logs

    @property
    def fit(self) -> float:
        """How far the inputs are from the statistics: 0.1 to 0.5 in sound networks, on a few images."""
        return float(np.mean(np.abs(self.shift)) + np.std(self._logs) + abs(np.mean(self._logs)))

    @property
    def correlation(self) -> float:
        """Correlation of the means of the inputs with the running means, over the channels."""
        means = self.running + self.shift
        return float(np.corrcoef(self.running, means)[0, 1]) if min(self.running.std(), means.std()) > 0 else 0.0

    def distances(self) -> dict[str, float]:
        """How far the inputs are from the statistics, by the names of the thresholds of ``sudden-drift``."""
        return {
            "sudden_shift": self.median_shift,
            "sudden_variance": float(np.median(np.abs(self._logs))),
            "sudden_ratio": float(np.exp(abs(np.median(self._logs)))),
            "sudden_channel": float(np.abs(self.shift).max()),
            "sudden_profile": 1 - self.correlation if self.running.std() > _VARIED else 0.0,
        }


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
        if inputs.numel():
            values = as_float(inputs)
            sums = sums_of_maps(values.reshape(values.shape[0], values.shape[1], -1))
            self.moments.merge(ChannelMoments.of(sums))

    def merge(self, other: BatchNormAccumulator) -> None:
        self.moments.merge(other.moments)

    def drift(self, layer: str) -> BatchNormDrift:
        variance = self.running_var + self.eps
        with np.errstate(invalid="ignore", divide="ignore"):  # a damaged file may have variances of 0 or below
            shift = (self.moments.mean - self.running_mean) / variance**0.5
            ratio = (self.moments.variance + self.eps) / variance
            running = self.running_mean / variance**0.5
        items = int(self.moments.count.max(initial=0))
        return BatchNormDrift(layer, items, self.updated, shift, ratio, running, self.trained)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        return super().from_state({**state, "moments": ChannelMoments.from_state(state["moments"])})


@dataclass
class Coverage:
    """What a `StatisticsCollector` did not measure.

    Attributes:
        left_out: How many layers of each class the default selection leaves out.
        operations: How often each function ran that is not a module, by torch's internal names, in one pass.
        idle: The selected layers that no pass has reached.
        unused: The layers among them whose parameters no operation took either.
        with_channels: Keys of calls that compute channels: of convolutions, Linear layers, activation functions, and
            the model.
        unmeasured: Why a call, or a part of its output, has no statistics.
        handed_on: Keys of calls that returned the very tensor of another measured call.
        is_empty: Whether no other was merged into it.
    """

    left_out: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    idle: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    with_channels: set[str] = field(default_factory=set)
    unmeasured: dict[tuple[Call, str], str] = field(default_factory=dict)
    handed_on: set[str] = field(default_factory=set)
    is_empty: bool = True

    def merge(self, other: Coverage) -> None:
        """Add what another run of the same job did not measure; adding the same twice changes nothing."""
        first, self.is_empty = self.is_empty, False
        self.left_out |= other.left_out
        self.operations |= other.operations
        self.idle = tuple(name for name in other.idle if first or name in self.idle)
        self.unused = tuple(name for name in other.unused if first or name in self.unused)
        self.with_channels |= other.with_channels
        self.unmeasured |= other.unmeasured
        self.handed_on |= other.handed_on

    def words(self) -> str:
        """What was left out, in a line; empty where that is nothing."""
        parts = [f"{count:,} {name}" for name, count in self.left_out.most_common()]
        return f"not measured: {listed(parts, 6)}" if parts else ""


_NO_IMAGE = f"{NOTHING_MEASURED}: no image passed through the model"
_Part = TypeVar("_Part", LayerAccumulator, BatchNormAccumulator, CallRange)


@dataclass(repr=False)
class RunningStatistics(Shown, rows="statistics()"):
    """Accumulators of layer calls and BatchNorms, in order of execution, over ``images`` images.

    Attributes:
        images: Number of images.
        layers: The accumulators of layer calls by name.
        batch_norms: The accumulators of BatchNorms by name.
        pictures: 64 bits of the SHA-256 of each image file; empty for tensors, and unknown in files of version 0.1.0.
        ranges: How each call varies from image to image, by name; empty where that was not wanted.
        held: Sketches of its weights and settings of its layers by name, as ``ranges``.

    Raises:
        InputError: `merge` is given statistics of other layers, of the same images, or the object itself.

    Example:
        >>> import torch
        >>> from hookscope import StatisticsCollector
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1))
        >>> halves = []
        >>> for half in torch.rand(8, 3, 5, 5).split(4):
        ...     with StatisticsCollector(net) as collector, torch.no_grad():
        ...         _ = net(half)
        ...     halves.append(collector.totals)
        >>> halves[0].merge(halves[1])
        >>> halves[0].images, halves[0].statistics()[0].items
        (8, 8)
    """

    images: int = 0
    layers: dict[str, LayerAccumulator] = field(default_factory=dict)
    batch_norms: dict[str, BatchNormAccumulator] = field(default_factory=dict)
    pictures: array[int] = field(default_factory=lambda: array("q"))
    ranges: dict[str, CallRange] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    def _cells(self) -> Cells:
        return {"images": self.images, "calls": len(self.layers), "note": "" if self.images else _NO_IMAGE}

    def statistics(self, duplicate_correlation: float = 0.9999) -> Rows[LayerStatistics]:
        """Statistics of each call so far, in order of execution.

        Args:
            duplicate_correlation: Pearson correlation from which two channels are duplicates.
        """
        calls: dict[str, int] = {}
        for layer in self.layers.values():
            calls[layer.call.name] = max(calls.get(layer.call.name, 0), layer.call.call + 1)
        rows = Rows(layer.statistics(calls[layer.call.name], duplicate_correlation) for layer in self.layers.values())
        rows.nothing = rows.nothing if self.images else _NO_IMAGE
        return rows

    def drifts(self) -> list[BatchNormDrift]:
        """Distance of the inputs of each BatchNorm from its running statistics."""
        return [norm.drift(name) for name, norm in self.batch_norms.items()]

    def merge(self, other: RunningStatistics) -> None:
        """Add ``other``, which shares no state with this object afterwards."""
        common = len(set(self.pictures).intersection(other.pictures))
        if common or other is self:
            asked = f"they have {counted(common, 'image')} in common" if common else "these are the same statistics"
            raise InputError(f"cannot merge: {asked}", "an image would count twice", "merge statistics of other images")
        for key, layer in other.layers.items():
            mine = self.layers.get(key, layer)
            same = mine.channels == layer.channels or not has_fixed_channels(layer.call)
            if not same or mine.call.type != layer.call.type:
                raise InputError(
                    f"{key} has {mine.channels} channels of {mine.call.type} and {layer.channels} of {layer.call.type}",
                    do="merge statistics of one model",
                )
        for name, norm in other.batch_norms.items():
            channels = self.batch_norms.get(name, norm).channels
            if channels != norm.channels:
                raise InputError(
                    f"{name} has {channels} channels and {norm.channels}", do="merge statistics of one model"
                )
        self.images += other.images
        self.pictures.extend(other.pictures)
        self.layers = _merged(self.layers, other.layers)
        self.batch_norms = _merged(self.batch_norms, other.batch_norms)
        self.ranges = _merged(self.ranges, other.ranges)
        self.held = self.held or dict(other.held)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, arrays, lists and dictionaries of these, for `from_state`."""
        return {
            "images": self.images,
            "pictures": np.array(self.pictures, np.int64),
            "layers": [layer.state_dict() for layer in self.layers.values()],
            "batch_norms": [[name, norm.state_dict()] for name, norm in self.batch_norms.items()],
            "ranges": [each.state_dict() for each in self.ranges.values()],
            "held": dict(self.held),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned."""
        layers = [LayerAccumulator.from_state(layer) for layer in state["layers"]]
        norms = {name: BatchNormAccumulator.from_state(norm) for name, norm in state["batch_norms"]}
        pictures = array("q", np.asarray(state.get("pictures", ()), np.int64).tobytes())
        ranges = [CallRange.from_state(each) for each in state.get("ranges", ())]
        keyed = {layer.key: layer for layer in layers}, norms, pictures, {each.key: each for each in ranges}
        return cls(int(state["images"]), *keyed, dict(state.get("held", {})))


def _merged(mine: dict[str, _Part], theirs: Mapping[str, _Part]) -> dict[str, _Part]:
    merged = mine | {key: deepcopy(part) for key, part in theirs.items() if key not in mine}
    for key in mine.keys() & theirs.keys():
        merged[key].merge(theirs[key])
    return {key: merged[key] for key in in_order(mine, theirs)}
