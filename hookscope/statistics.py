"""Streaming, mergeable statistics of what one layer call puts out: nothing is kept but accumulators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hookscope.layers import Call
from hookscope.moments import ChannelMoments, MapSums, sums_of_maps
from hookscope.patterns import ChannelCovariance, PatternSketch, effective_rank, signs_of
from hookscope.quantiles import ValueHistogram

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

__all__ = ["QUANTILES", "LayerAccumulator", "LayerStatistics", "Place", "bounds_of"]

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The shares whose quantiles a row of statistics has."""

NEAR_A_BOUND = 0.01
"""A value is saturated within this share of the distance between the bounds."""

_LEAST_PATTERN = 16  # with fewer values away from 0 two channels are alike by chance


class Place(NamedTuple):
    """Where a value was seen: the image (None where an item is no image), the channel, the position in its map."""

    image: str | None
    channel: int
    position: tuple[int, ...]


def bounds_of(module: nn.Module) -> tuple[float | None, float | None]:
    """The bounds at which an activation function saturates; None on a side where it does not.

    A ReLU6 saturates at 6: 0 is where it rests, which the share of zeros tells.

    Example:
        >>> import torch
        >>> bounds_of(torch.nn.Sigmoid()), bounds_of(torch.nn.ReLU6()), bounds_of(torch.nn.ReLU())
        ((0.0, 1.0), (None, 6.0), (None, None))
    """
    name = type(module).__name__
    if name in ("Sigmoid", "Hardsigmoid"):
        return 0.0, 1.0
    if name in ("Tanh", "Softsign"):
        return -1.0, 1.0
    if name == "ReLU6":
        return None, 6.0
    if name == "Hardtanh":
        low, high = float(getattr(module, "min_val", -1.0)), float(getattr(module, "max_val", 1.0))
        return (None if low == 0 else low), high
    return None, None


def _margins(bounds: tuple[float | None, float | None]) -> tuple[float, float]:
    """Below the first and above the second a value is saturated."""
    low, high = bounds
    if low is None and high is None:
        return -math.inf, math.inf
    margin = NEAR_A_BOUND * ((high or 0.0) - (low or 0.0))
    return -math.inf if low is None else low + margin, math.inf if high is None else high - margin


@dataclass(frozen=True)
class LayerStatistics:
    """What is known of one layer call over all images.

    Attributes:
        call: Which call.
        part: Which tensor of an output that has several, else empty.
        calls: How often the layer ran in a pass.
        items: How many items (images, mostly) its outputs held.
        shape: ``(C, *positions)`` of one item, None on an axis that varies.
        values: How many values, NaN and Inf included.
        mean, std, min, max, rms: Of the finite values; None where there are none. ``std`` is the population's.
        low_at, high_at, nonfinite_at: Where the lowest, the highest and the first NaN or Inf were seen.
        zeros: Share of values that are exactly 0, from 0 to 1.
        nan, inf: How many.
        quantiles: By share, see `QUANTILES`; relative error at most 2^-8.
        channels: C.
        dead_channels: Those that never left their constant, over all images and positions.
        saturated: Share of values within 1 % of a bound, None for an unbounded function.
        duplicate_channels: Groups of channels that are the same up to a factor and an offset.
        rank: Effective rank of the channel covariance, from 0 to C; None where it was not asked for.
        between_images: Standard deviation of the channels' image means (root mean square); None for a single image.
        by_channel: Moments of each channel.
        saturated_by_channel: ``(C,)`` share of each channel, None for an unbounded function.
        histogram: Of all values.
    """

    call: Call
    part: str
    calls: int
    items: int
    shape: tuple[int | None, ...]
    values: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    rms: float | None
    low_at: Place | None
    high_at: Place | None
    nonfinite_at: Place | None
    zeros: float
    nan: int
    inf: int
    quantiles: Mapping[float, float]
    channels: int
    dead_channels: tuple[int, ...]
    saturated: float | None
    duplicate_channels: tuple[tuple[int, ...], ...]
    rank: float | None
    between_images: float | None
    by_channel: ChannelMoments
    saturated_by_channel: NDArray[np.float64] | None
    histogram: ValueHistogram

    @property
    def key(self) -> str:
        """``name``, ``name#call``, and the part where there are several."""
        return f"{self.call.key} {self.part}" if self.part else self.call.key


@dataclass
class LayerAccumulator:
    """Everything that is counted of one layer call, over all images; `update` adds a batch, `merge` another's count.

    The accumulators are float64 and independent of the batch size; of the order of images only places depend, where
    the same extreme was seen twice. See `ChannelMoments` (mean, variance, extremes: Chan's formula), `ValueHistogram`
    (quantiles), `PatternSketch` (duplicates) and `ChannelCovariance` (effective rank) for how each is computed.

    Args:
        call: Which call it is.
        channels: C.
        bounds: Where it saturates, see `bounds_of`.
        with_rank: Whether to keep the covariance of the channels, which costs as much as a 1x1 convolution.
        part: Which tensor of an output that has several.

    Example:
        >>> import torch
        >>> accumulator = LayerAccumulator(Call("relu", "ReLU", 0, None), channels=2)
        >>> _ = accumulator.update(torch.tensor([[[[0.0, 4.0]], [[0.0, 0.0]]]]), ["cat.jpg"])
        >>> found = accumulator.statistics()
        >>> found.mean, found.high_at, found.dead_channels
        (1.0, Place(image='cat.jpg', channel=0, position=(0, 1)), (1,))
    """

    call: Call
    channels: int
    bounds: tuple[float | None, float | None] = (None, None)
    with_rank: bool = False
    part: str = ""
    items: int = 0
    shape: tuple[int | None, ...] = ()
    low: float = math.inf
    high: float = -math.inf
    low_at: Place | None = None
    high_at: Place | None = None
    nonfinite_at: Place | None = None

    def __post_init__(self) -> None:
        import numpy as np

        self.moments = ChannelMoments(self.channels)
        self.image_means = ChannelMoments(self.channels)
        self.histogram = ValueHistogram()
        self.patterns = PatternSketch(self.channels)
        self.covariance = ChannelCovariance(self.channels) if self.with_rank else None
        self.saturated: NDArray[np.int64] = np.zeros(self.channels, np.int64)

    def update(self, values: Tensor, images: Sequence[str | None], signs: Tensor | None = None) -> ChannelMoments:
        """Add ``values`` ``(N, C, *positions)``, float32 or float64; returns the moments of this batch alone.

        Args:
            values: What the layer put out, channels on the second axis.
            images: For each of N where it comes from, None where that is not known.
            signs: ``signs_of(images)``, where it is at hand.
        """
        batch = ChannelMoments(self.channels)
        self.shape = _common(self.shape, tuple(values.shape[1:]))
        flat = values.detach().reshape(values.shape[0], self.channels, -1)
        if not flat.numel():
            return batch
        signs = signs_of([name or str(at) for at, name in enumerate(images)]) if signs is None else signs
        sums = sums_of_maps(flat, lambda part, piece, finite: self._visit(piece, finite, signs[part]))
        self._find_places(flat, sums, images, tuple(values.shape[2:]))
        batch.update(sums)
        self.items += len(flat)
        self.moments.merge(batch)
        self.image_means.merge(ChannelMoments.of_rows(sums.total / sums.count.clip(min=1)))
        return batch

    def _visit(self, values: Tensor, finite: Tensor, signs: Tensor) -> None:
        self.histogram.update(_as_float32(values))
        self.patterns.update(finite, signs)
        if self.covariance is not None:
            self.covariance.update(finite)
        below, above = _margins(self.bounds)
        if below > -math.inf or above < math.inf:
            self.saturated += ((values <= below) | (values >= above)).sum((0, 2)).cpu().numpy()

    def _find_places(self, flat: Tensor, sums: MapSums, images: Sequence[str | None], grid: tuple[int, ...]) -> None:
        import numpy as np

        def first(at: tuple[int, int], found: Tensor) -> Place:
            position = np.unravel_index(int(found.int().argmax()), grid) if grid else ()
            return Place(images[at[0]], at[1], tuple(int(axis) for axis in position))

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

    def empty(self) -> LayerAccumulator:
        """One for the same call that has counted nothing yet."""
        return LayerAccumulator(self.call, self.channels, self.bounds, self.with_rank, self.part)

    def merge(self, other: LayerAccumulator) -> None:
        """Add what ``other`` has counted of the same call."""
        self.items += other.items
        self.shape = _common(self.shape, other.shape)
        if other.low < self.low:
            self.low, self.low_at = other.low, other.low_at
        if other.high > self.high:
            self.high, self.high_at = other.high, other.high_at
        self.nonfinite_at = self.nonfinite_at or other.nonfinite_at
        self.moments.merge(other.moments)
        self.image_means.merge(other.image_means)
        self.histogram.merge(other.histogram)
        self.patterns.merge(other.patterns)
        if self.covariance is not None and other.covariance is not None:
            self.covariance.merge(other.covariance)
        else:
            self.covariance = None
        self.saturated = self.saturated + other.saturated

    def statistics(self, calls: int = 1, duplicate_correlation: float = 0.999) -> LayerStatistics:
        """What has been counted so far, as numbers.

        Args:
            calls: How often the layer runs in a pass.
            duplicate_correlation: From this Pearson correlation on two channels are duplicates.
        """
        import numpy as np

        m = self.moments
        count, nan, inf = int(m.count.sum()), int(m.nan.sum()), int(m.inf.sum())
        values, some = count + nan + inf, count > 0
        mean = float((m.mean * m.count).sum() / count) if some else None
        variance = float((m.m2 + m.count * (m.mean - (mean or 0.0)) ** 2).sum() / count) if some else None
        bounded = self.bounds != (None, None)
        totals = (m.count + m.nan + m.inf).clip(min=1)
        constant = (m.low == m.high) & (m.nan + m.inf == 0) & (m.count > 1)
        patterned = (m.count - m.zeros >= _LEAST_PATTERN) & ~constant
        quantiles = [min(max(value, self.low), self.high) for value in self.histogram.quantiles(QUANTILES)]
        return LayerStatistics(
            call=self.call,
            part=self.part,
            calls=calls,
            items=self.items,
            shape=self.shape,
            values=values,
            mean=mean,
            std=None if variance is None else math.sqrt(variance),
            min=self.low if some else None,
            max=self.high if some else None,
            rms=None if variance is None or mean is None else math.sqrt(variance + mean * mean),
            low_at=self.low_at,
            high_at=self.high_at,
            nonfinite_at=self.nonfinite_at,
            zeros=float(m.zeros.sum() / max(values, 1)),
            nan=nan,
            inf=inf,
            quantiles=dict(zip(QUANTILES, quantiles, strict=True)) if some else {},
            channels=self.channels,
            dead_channels=tuple(int(at) for at in np.flatnonzero(constant)),
            saturated=float(self.saturated.sum() / max(values, 1)) if bounded else None,
            duplicate_channels=tuple(self.patterns.groups(m, patterned, duplicate_correlation)),
            rank=effective_rank(self.covariance.covariance) if self.covariance is not None else None,
            between_images=float(np.sqrt(self.image_means.variance.mean())) if self.items > 1 else None,
            by_channel=m,
            saturated_by_channel=self.saturated / totals if bounded else None,
            histogram=self.histogram,
        )

    @property
    def key(self) -> str:
        """``name``, ``name#call``, and the part where there are several."""
        return f"{self.call.key} {self.part}" if self.part else self.call.key

    def state_dict(self) -> dict[str, Any]:
        """Everything counted so far: numbers, texts, arrays and dictionaries of these; `from_state` takes it back."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        state["call"] = [self.call.name, self.call.type, self.call.call, self.call.index]
        for name in _PLACES:
            place = getattr(self, name)
            state[name] = None if place is None else [place.image, place.channel, list(place.position)]
        state["saturated"] = self.saturated
        for name in _PARTS:
            part = getattr(self, name)
            state[name] = None if part is None else part.state_dict()
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The accumulator that `state_dict` told of."""
        import numpy as np

        found = cls(Call(*state["call"]), int(state["channels"]), tuple(state["bounds"]), bool(state["with_rank"]))
        found.part, found.items = state["part"], int(state["items"])
        found.shape = tuple(state["shape"])
        found.low, found.high = float(state["low"]), float(state["high"])
        for name in _PLACES:
            place = state[name]
            setattr(found, name, None if place is None else Place(place[0], place[1], tuple(place[2])))
        found.saturated = np.array(state["saturated"], np.int64)
        found.moments = ChannelMoments.from_state(state["moments"])
        found.image_means = ChannelMoments.from_state(state["image_means"])
        found.histogram = ValueHistogram.from_state(state["histogram"])
        found.patterns = PatternSketch.from_state(state["patterns"])
        covariance = state["covariance"]
        found.covariance = None if covariance is None else ChannelCovariance.from_state(covariance)
        return found


_PLAIN = ("channels", "bounds", "with_rank", "part", "items", "shape", "low", "high")
_PLACES = ("low_at", "high_at", "nonfinite_at")
_PARTS = ("moments", "image_means", "histogram", "patterns", "covariance")


def _common(old: tuple[int | None, ...], new: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """What two shapes have in common: None on an axis on which they differ."""
    if not old or not new or len(old) != len(new):
        return old or new
    return tuple(a if a == b else None for a, b in zip(old, new, strict=True))


def _where(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """Item and channel of the first True in ``(N, C)``."""
    item, channel = divmod(int(mask.argmax()), mask.shape[1])
    return item, channel


def _as_float32(values: Tensor) -> Tensor:
    """``values`` in float32; doubles beyond its range go to its ends, so that no finite value becomes infinite."""
    import torch

    if values.dtype == torch.float32:
        return values
    largest = torch.finfo(torch.float32).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).float()
