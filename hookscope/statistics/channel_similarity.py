"""Similarity of channels: a random projection finds duplicates, the covariance gives the effective rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks import merge_moments
from hookscope.statistics.moments import Accumulator, ChannelMoments, Floats

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
        """A sketch of no values."""
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
        """Add the values of ``other``."""
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
        unit = own[chosen] / length[chosen, None]
        pairs = np.argwhere(unit @ unit.T >= least - _ROUNDING)
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
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
        """The covariance of no values."""
        return cls(0, np.zeros(channels), np.zeros((channels, channels)))

    def update(self, values: Tensor) -> None:
        """Add finite ``values`` ``(N, C, P)``."""
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
        """Add the values of ``other``."""
        with np.errstate(over="ignore", invalid="ignore"):  # doubles beyond 1e154
            self.count, self.mean, self.products = merge_moments(
                (self.count, self.mean, self.products), (other.count, other.mean, other.products), outer=True
            )

    @property
    def covariance(self) -> Floats:
        """``(C, C)`` population covariance."""
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
