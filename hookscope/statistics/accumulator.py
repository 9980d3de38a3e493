"""Streaming, mergeable statistics of the output of one layer call, and how similar its channels are."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks import OPERATION, Call, Operation, activation_class, class_names, key_of, merge_moments, one_thread
from hookscope.statistics.facts import QUANTILES, LayerStatistics, ValuePosition
from hookscope.statistics.moments import (
    Accumulator,
    ChannelMoments,
    Floats,
    MapSums,
    ValueHistogram,
    sums_of_maps,
)

_LENGTH = 16
_MOST_POSITIONS = 1024  # of a map
_ROUNDING = 1e-6  # relative error of float32 products
_SAMPLED = 0.05  # share of its variance that a channel must have at the sampled positions to be compared


@dataclass
class PatternSketch(Accumulator):
    """A random projection of each channel, whose angles estimate correlations of whole maps.

    The values of a channel, over all images and up to 1024 positions of a map, form one long vector. The sketch keeps
    its scalar products with 16 random vectors. After the mean is subtracted, the cosine of two sketches estimates the
    Pearson correlation of two channels (Johnson and Lindenstrauss 1984). A random rotation for each image keeps images
    from cancelling, like the signs of Alon, Matias, Szegedy 1996. The cosine is exactly 1 for channels that are equal
    up to a positive factor and an offset. Otherwise ``1 - correlation`` is known to within a third: a correlation of
    0.999 passes for 0.9999 once in 25,000 pairs, 0.998 once in five million. Sketches add up in any order of images.
    NaN and Inf count as 0. The exact covariance costs a 1x1 convolution instead, see `ChannelCovariance`.

    Attributes:
        products: ``(C, 16)`` scalar products of the channels.
        ones: ``(16,)`` scalar products of a channel that is 1 everywhere.
        positions: Number of sampled positions in all images.
    """

    products: Floats
    ones: Floats
    positions: int = 0

    @classmethod
    def empty(cls, channels: int) -> Self:
        return cls(np.zeros((channels, _LENGTH)), np.zeros(_LENGTH))

    def update(self, values: Tensor, rotations: Tensor) -> None:
        """Add finite ``values`` ``(N, C, P)`` with the `rotations_of` the images, ``(N, 16, 16)``."""
        values = values[:, :, :: _stride(values.shape[2])]
        vectors, ones = _vectors(values.shape[2])
        products = values @ vectors.to(values.device, values.dtype)
        if not math.isfinite(float(products.sum())):  # near the limit of float32
            products = values.double() @ vectors.to(values.device).double()
        turned = products @ rotations.to(products.device, products.dtype)
        self.products += turned.sum(0, dtype=torch.float64).cpu().numpy()
        self.ones += (ones @ rotations.sum(0)).numpy()
        self.positions += values.shape[0] * values.shape[2]

    def merge(self, other: PatternSketch) -> None:
        self.products += other.products
        self.ones += other.ones
        self.positions += other.positions

    def groups(self, moments: ChannelMoments, candidates: NDArray[np.bool_], least: float) -> list[tuple[int, ...]]:
        """Groups of ``candidates`` ``(C,)`` whose correlation is at least ``least``, 0 to 1.

        The extremes of correlated channels are equally far from the mean, in standard deviations. They are known
        exactly, and distinguish channels that are active at few positions. Two such channels, divided by their
        standard deviations, differ by ``sqrt(2 (1 - correlation))`` in the root mean square, and by more at extremes.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # doubles beyond 1e154
            own = self.products - moments.mean[:, None] * self.ones
            length = np.linalg.norm(own, axis=1)
            share = self.positions / (moments.count + moments.nan + moments.inf).clip(min=1)
            # channels that are constant at the sampled positions would all look alike
            sampled = length > np.sqrt(_SAMPLED * _LENGTH * share) * np.sqrt(moments.m2)
        chosen = np.flatnonzero(candidates & sampled & np.isfinite(length) & (moments.m2 > 0))
        unit = torch.from_numpy(own[chosen] / length[chosen, None])
        with one_thread():  # the threads of NumPy wait for each other longer than they multiply
            pairs = (unit @ unit.T >= least - _ROUNDING).triu_(1).nonzero().numpy()
        spread = np.sqrt(moments.variance[chosen])
        slack = max(0.01, (2.5 * (1 - least)) ** 0.5)
        for extreme in (moments.low[chosen], moments.high[chosen]):
            far = (extreme - moments.mean[chosen]) / spread
            apart = np.abs(far[pairs[:, 0]] - far[pairs[:, 1]])
            pairs = pairs[apart <= slack * (1 + np.abs(far[pairs[:, 0]]))]
        return _joined(chosen, pairs)


@lru_cache(maxsize=16)
def _stride(positions: int) -> int:
    """Distance of sampled positions; it shares no divisor with their number, or it would keep to columns of a map."""
    stride = -(-positions // _MOST_POSITIONS)
    while stride > 1 and math.gcd(stride, positions) > 1:
        stride += 1
    return stride


@lru_cache(maxsize=16)
def _vectors(positions: int) -> tuple[Tensor, Tensor]:
    """``(P, 16)`` random numbers, equal for maps of equal size, and their sums ``(16,)``."""
    generator = torch.Generator("cpu").manual_seed(positions)
    # independent of the caller's defaults, because sketches of several processes are merged
    vectors = torch.randn(positions, _LENGTH, generator=generator, dtype=torch.float32, device="cpu")
    return vectors, vectors.sum(0, dtype=torch.float64)


def rotations_of(names: Sequence[str]) -> Tensor:
    """``(N, 16, 16)`` random rotations, equal for equal names.

    Each is a Hadamard matrix between two diagonals of random signs, which a digest of the name provides.
    """
    digests = (hashlib.blake2s(name.encode("utf-8", "surrogatepass"), digest_size=4).digest() for name in names)
    bits = np.unpackbits(np.frombuffer(b"".join(digests), np.uint8)).reshape(len(names), 2, _LENGTH)
    before, after = (1.0 - 2.0 * bits).swapaxes(0, 1)
    hadamard = np.ones((1, 1))
    while len(hadamard) < _LENGTH:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return torch.from_numpy(before[:, :, None] * hadamard * after[:, None, :] / _LENGTH**0.5)


def _joined(chosen: NDArray[np.intp], pairs: NDArray[np.intp]) -> list[tuple[int, ...]]:
    """Group pairs so that every member of a group is paired with its first member."""
    alike: dict[int, list[int]] = {}
    for first, second in pairs:
        alike.setdefault(int(first), []).append(int(second))
    taken: set[int] = set()
    groups = []
    for first in sorted(alike):
        members = [] if first in taken else [at for at in alike[first] if at not in taken]
        if members:
            taken |= {first, *members}
            groups.append(tuple(int(chosen[at]) for at in (first, *members)))
    return groups


@dataclass
class ChannelCovariance(Accumulator):
    """The covariance of C channels over all images and positions, ``(C, C)``, from batches in any split.

    Batches are centred on their own mean and joined by `merge_moments`. Products of float32 are taken in float32:
    covariances are exact to six digits of the largest. NaN and Inf count as 0.
    """

    count: int
    mean: Floats
    products: Floats

    @classmethod
    def empty(cls, channels: int) -> Self:
        return cls(0, np.zeros(channels), np.zeros((channels, channels)))

    def update(self, values: Tensor) -> None:
        flat = values.movedim(1, 0).flatten(1)
        largest = float(torch.linalg.vector_norm(flat, math.inf))
        # a power of two keeps squares within the range of the numbers and changes no digit
        scale = 2.0 ** -math.frexp(largest)[1] if largest and not 1e-15 < largest < 1e15 else 1.0
        flat = flat * scale if scale != 1.0 else flat
        mean = flat.mean(1, dtype=torch.float64)
        centred = flat - mean.to(flat.dtype)[:, None]
        products = (centred @ centred.T).double()
        # the rest of the rounded mean
        rest = centred.mean(1, dtype=torch.float64)
        products -= flat.shape[1] * rest[:, None] * rest
        mean, products = mean / scale, products / scale / scale
        self.merge(ChannelCovariance(flat.shape[1], mean.cpu().numpy(), products.cpu().numpy()))

    def merge(self, other: ChannelCovariance) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # doubles beyond 1e154
            self.count, self.mean, self.products = merge_moments(
                (self.count, self.mean, self.products), (other.count, other.mean, other.products), outer=True
            )

    @property
    def covariance(self) -> Floats:
        return self.products / max(self.count, 1)


def effective_rank(covariance: Floats) -> float:
    """Effective number of directions of the channels, 0 (constant) to C: ``exp(-Σ p log p)``, p the eigenvalue shares.

    The effective rank of Roy and Vetterli, EUSIPCO 2007, of the covariance ``(C, C)``; NaN if that is not finite.
    """
    if not np.isfinite(covariance).all():
        return float("nan")
    eigenvalues = np.linalg.eigvalsh(covariance).clip(min=0)
    total = eigenvalues.sum()
    if not total > 0:
        return 0.0
    shares = eigenvalues[eigenvalues > 0] / total
    return float(np.exp(-(shares * np.log(shares)).sum()))


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
class LayerAccumulator(Accumulator):
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
        m, whole = self.moments, self.moments.as_one()
        count, nan, inf = int(whole.count[0]), int(whole.nan[0]), int(whole.inf[0])
        values, some = count + nan + inf, count > 0
        mean, variance = (float(whole.mean[0]), float(whole.variance[0])) if some else (None, None)
        bounded = self.bounds != (None, None)
        totals = (m.count + m.nan + m.inf).clip(min=1)
        # of the wider channels: one of another scale than all others says nothing about these
        spreads = (m.high - m.low)[np.isfinite(m.low) & np.isfinite(m.high)]
        rounding = _ROUNDING * float(np.quantile(spreads, 0.9)) if spreads.size else 0.0
        constant = (m.high <= m.low + rounding) & (m.nan + m.inf == 0) & (m.count > 1)
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
        return key_of(self.call, self.part)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"call": astuple(self.call)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        about = Call(*state["call"]), state["channels"], tuple(state["bounds"]), state["with_rank"], state["part"]
        found = [state[name] for name in _PLACES]
        places = (place and ValuePosition(place[0], place[1], tuple(place[2])) for place in found)
        restored = cls(*about, state["items"], tuple(state["shape"]), state["low"], state["high"], *places)
        for name, part in _PARTS.items():
            setattr(restored, name, None if state[name] is None else part.from_state(state[name]))
        restored.saturated = np.array(state["saturated"], np.int64)
        return restored


_MOVING = {"Transpose", "Reshape", "Gather", "Slice", "Split", "Squeeze", "Unsqueeze"}


def has_fixed_channels(call: Call) -> bool:
    """Whether the number of channels may not change.

    It may in the model's output, in operations, and in ONNX nodes that only move values: their second axis may be the
    batch.
    """
    return bool(call.name) and OPERATION not in call.name and not {*call.type.split("+")} <= _MOVING


def _common(old: tuple[int | None, ...], new: tuple[int | None, ...]) -> tuple[int | None, ...]:
    if not old or not new or len(old) != len(new):
        return old or new
    return tuple(a if a == b else None for a, b in zip(old, new, strict=True))


def _where(mask: NDArray[np.bool_]) -> tuple[int, int]:
    item, channel = divmod(int(mask.argmax()), mask.shape[1])
    return item, channel


def _as_float32(values: Tensor) -> Tensor:
    """``values`` in float32; finite values beyond its range become its largest value."""
    if values.dtype == torch.float32:
        return values
    largest = torch.finfo(torch.float32).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).float()
