"""Streaming, mergeable statistics of the output of one layer call."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks import OPERATION, Call, Operation, activation_class, class_names, key_of
from hookscope.statistics.channel_similarity import ChannelCovariance, PatternSketch, effective_rank
from hookscope.statistics.columns import QUANTILES
from hookscope.statistics.layer_statistics import LayerStatistics, ValueHistogram, ValuePosition
from hookscope.statistics.moments import ChannelMoments, MapSums, sums_of_maps

NEAR_A_BOUND = 0.01
"""A value is saturated within this share of the distance between the bounds, or between 0 and the only bound."""

Bounds = tuple[float | None, float | None]

_BOUNDS: dict[str, Bounds] = {
    "Hardsigmoid": (0.0, 1.0),
    "ReLU6": (None, 6.0),
    "SELU": (-1.0507009873554805 * 1.6732632423543772, None),  # scale times alpha
    "Sigmoid": (0.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "Tanh": (-1.0, 1.0),
}


def bounds_of(layer: Any) -> Bounds:
    """The bounds at which an activation function, a layer or an `Operation`, saturates; None on a side without one.

    A ReLU6 saturates at 6 only: the share of zeros describes the other side.
    """

    def given(name: str, position: int, default: float) -> float:
        if not isinstance(layer, Operation):
            return float(getattr(layer, name, default))
        return float(layer.kwargs.get(name, layer.args[position] if len(layer.args) > position else default))

    for name in [activation_class(layer.type)] if isinstance(layer, Operation) else class_names(layer):
        if name in _BOUNDS:
            return _BOUNDS[name]
        if name == "Hardtanh":
            return given("min_val", 1, -1.0) or None, given("max_val", 2, 1.0) or None
        if name in ("ELU", "CELU"):
            return -given("alpha", 1, 1.0) or None, None
    return None, None


def margins(bounds: Bounds) -> tuple[float, float]:
    """Values up to the first number and from the second number are saturated."""
    low, high = bounds
    margin = NEAR_A_BOUND * ((high or 0.0) - (low or 0.0))
    return -math.inf if low is None else low + margin, math.inf if high is None else high - margin


_LEAST_PATTERN = 16  # with fewer nonzero values two channels may be alike by chance
_PLACES = ("low_at", "high_at", "nonfinite_at")
_PARTS: dict[str, Any] = {
    "moments": ChannelMoments,
    "image_means": ChannelMoments,
    "histogram": ValueHistogram,
    "patterns": PatternSketch,
    "covariance": ChannelCovariance,
}


@dataclass
class LayerAccumulator:
    """Accumulators of one layer call over all images; `update` adds a batch, `merge` another accumulator.

    Results do not depend on the batch size. They depend on the order of images only in the position of an extreme that
    occurs twice. `ChannelMoments` has means, variances and extremes, `ValueHistogram` quantiles, `PatternSketch`
    duplicates, and `ChannelCovariance` the effective rank, which costs as much as a 1x1 convolution. The call saturates
    at ``bounds``, see `bounds_of`; ``part`` is the name of the tensor if the output has several.
    """

    call: Call
    channels: int
    bounds: Bounds = (None, None)
    with_rank: bool = False
    part: str = ""
    items: int = 0
    shape: tuple[int | None, ...] = ()
    low: float = math.inf
    high: float = -math.inf
    low_at: ValuePosition | None = None
    high_at: ValuePosition | None = None
    nonfinite_at: ValuePosition | None = None

    def __post_init__(self) -> None:
        self.moments = ChannelMoments.empty(self.channels)
        self.image_means = ChannelMoments.empty(self.channels)
        self.histogram = ValueHistogram()
        self.patterns = PatternSketch.empty(self.channels)
        self.covariance = ChannelCovariance.empty(self.channels) if self.with_rank else None
        self.saturated: NDArray[np.int64] = np.zeros(self.channels, np.int64)

    def update(self, values: Tensor, images: Sequence[str | None], rotations: Tensor) -> ChannelMoments:
        """Add outputs ``(N, C, *positions)``, float32 or float64, and return the moments of this batch alone.

        Each item has an image, None if it is unknown, and a rotation of its own from `rotations_of`.
        """
        grid = tuple(values.shape[2:])
        flat = values.detach().reshape(values.shape[0], self.channels, math.prod(grid))
        self.shape = _common(self.shape, tuple(values.shape[1:]))
        if not flat.numel():
            return ChannelMoments.empty(self.channels)
        with torch.autocast(flat.device.type, enabled=False):  # half precision is for the model, not for its statistics
            sums = sums_of_maps(flat, lambda part, piece, finite: self._visit(piece, finite, rotations[part]))
        self._find_places(flat, sums, images, grid)
        self.items += len(flat)
        batch = ChannelMoments.of(sums)
        self.moments.merge(batch)
        self.image_means.merge(ChannelMoments.of_map_means(sums))
        return batch

    def _visit(self, values: Tensor, finite: Tensor, rotations: Tensor) -> None:
        self.histogram.update(_as_float32(values))
        self.patterns.update(finite, rotations)
        if self.covariance is not None:
            self.covariance.update(finite)
        below, above = margins(self.bounds)
        if below > -math.inf or above < math.inf:
            self.saturated = self.saturated + ((values <= below) | (values >= above)).sum((0, 2)).cpu().numpy()

    def _find_places(self, flat: Tensor, sums: MapSums, images: Sequence[str | None], grid: tuple[int, ...]) -> None:
        def first(at: tuple[int, int], mask: Tensor) -> ValuePosition:
            position = np.unravel_index(int(mask.int().argmax()), grid) if grid else ()
            return ValuePosition(images[at[0]], at[1], tuple(int(axis) for axis in position))

        low, high = float(sums.low.min()), float(sums.high.max())
        if low < self.low:
            at = _where(sums.low == low)
            self.low, self.low_at = low, first(at, flat[at] == low)
        if high > self.high:
            at = _where(sums.high == high)
            self.high, self.high_at = high, first(at, flat[at] == high)
        if self.nonfinite_at is None and (bad := sums.nan + sums.inf).any():
            at = _where(bad > 0)
            self.nonfinite_at = first(at, ~flat[at].isfinite())

    def merge(self, other: LayerAccumulator) -> None:
        """Add an accumulator of the same call; channels whose number differs become one."""
        if self.channels != other.channels:
            other = copy.copy(other)
            self._become_one_channel()
            other._become_one_channel()
        self.items += other.items
        self.shape = _common(self.shape, other.shape)
        if other.low < self.low:
            self.low, self.low_at = other.low, other.low_at
        if other.high > self.high:
            self.high, self.high_at = other.high, other.high_at
        self.nonfinite_at = self.nonfinite_at or other.nonfinite_at
        if other.covariance is None:
            self.covariance = None
        for name in _PARTS:
            if (part := getattr(self, name)) is not None:
                part.merge(getattr(other, name))
        self.saturated = self.saturated + other.saturated

    def _become_one_channel(self) -> None:
        self.moments, self.image_means = self.moments.as_one(), self.image_means.as_one()
        self.patterns, self.covariance = PatternSketch.empty(1), None
        self.saturated = self.saturated.sum(keepdims=True)
        self.channels, self.shape = 1, (None, *self.shape[1:])

    def statistics(self, calls: int = 1, duplicate_correlation: float = 0.9999) -> LayerStatistics:
        """The statistics so far; the layer runs ``calls`` times in a pass."""
        m, whole = self.moments, self.moments.as_one()
        count, nan, inf = int(whole.count[0]), int(whole.nan[0]), int(whole.inf[0])
        values, some = count + nan + inf, count > 0
        mean, variance = (float(whole.mean[0]), float(whole.variance[0])) if some else (None, None)
        bounded = self.bounds != (None, None)
        totals = (m.count + m.nan + m.inf).clip(min=1)
        constant = (m.low == m.high) & (m.nan + m.inf == 0) & (m.count > 1)
        patterned = (m.count - m.zeros >= _LEAST_PATTERN) & ~constant
        quantiles = [min(max(value, self.low), self.high) for value in self.histogram.quantiles(QUANTILES)]
        own = ("call", "part", "items", "shape", "low_at", "high_at", "nonfinite_at", "channels")
        return LayerStatistics(
            **{name: getattr(self, name) for name in own},
            calls=calls,
            values=values,
            mean=mean,
            std=None if variance is None else math.sqrt(variance),
            min=self.low if some else None,
            max=self.high if some else None,
            rms=None if variance is None or mean is None else math.hypot(math.sqrt(variance), mean),
            zeros=float(m.zeros.sum() / max(values, 1)),
            nan=nan,
            inf=inf,
            quantiles=dict(zip(QUANTILES, quantiles, strict=True)) if some else {},
            dead_channels=tuple(int(at) for at in np.flatnonzero(constant)),
            saturated=float(self.saturated.sum() / max(values, 1)) if bounded else None,
            duplicate_channels=tuple(self.patterns.groups(m, patterned, duplicate_correlation)),
            rank=effective_rank(self.covariance.covariance) if self.covariance is not None else None,
            between_images=float(np.sqrt(self.image_means.variance.mean())) if self.items > 1 else None,
            by_channel=copy.copy(m),
            saturated_by_channel=self.saturated / totals if bounded else None,
            histogram=copy.deepcopy(self.histogram),
        )

    @property
    def key(self) -> str:
        """``name`` or ``name#call``, and the part if there are several."""
        return key_of(self.call, self.part)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, arrays and dictionaries of these, for `from_state`."""
        parts = {name: getattr(self, name) for name in _PARTS}
        states = {name: None if part is None else part.state_dict() for name, part in parts.items()}
        return vars(self) | {"call": astuple(self.call)} | states

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned."""
        restored = cls(Call(*state["call"]), int(state["channels"]), tuple(state["bounds"]), bool(state["with_rank"]))
        restored.part, restored.items = state["part"], int(state["items"])
        restored.shape = tuple(state["shape"])
        restored.low, restored.high = float(state["low"]), float(state["high"])
        for name in _PLACES:
            if (place := state[name]) is not None:
                setattr(restored, name, ValuePosition(place[0], place[1], tuple(place[2])))
        for name, part in _PARTS.items():
            setattr(restored, name, None if state[name] is None else part.from_state(state[name]))
        restored.saturated = np.array(state["saturated"], np.int64)
        return restored


def has_fixed_channels(call: Call) -> bool:
    """Whether the number of channels may not change: it may in the model's output and in operations."""
    return bool(call.name) and OPERATION not in call.name


def _common(old: tuple[int | None, ...], new: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The lengths that two shapes have in common, None on other axes."""
    if not old or not new or len(old) != len(new):
        return old or new
    return tuple(a if a == b else None for a, b in zip(old, new, strict=True))


def _where(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """Item and channel of the first True in ``(N, C)``."""
    item, channel = divmod(int(mask.argmax()), mask.shape[1])
    return item, channel


def _as_float32(values: Tensor) -> Tensor:
    """``values`` in float32; finite values beyond its range become its largest value."""
    if values.dtype == torch.float32:
        return values
    largest = torch.finfo(torch.float32).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).float()
