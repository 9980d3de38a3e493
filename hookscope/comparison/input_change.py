"""How the input of B follows from that of A: by other channels, factors and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

_EXACT = 1e-4  # of the variance: a channel of B follows from one of A but for rounding
_MOST_PERMUTED = 4  # channels
_SCALED = 0.01  # a factor or an offset that is further from 1 or 0 is one
_IMAGENET = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])


class InputChange:
    """Sums over the values of each channel of both inputs, over all images.

    Attributes:
        other_images: Whether B has images of its own.
    """

    def __init__(self, other_images: bool = False) -> None:
        self.other_images = other_images
        self._count = 0
        self._sums: dict[str, Floats] = {}

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a batch of both inputs ``(N, C, ...)``; inputs of different shapes or without channels add nothing."""
        if a.shape != b.shape or a.ndim < 3:
            return
        x, y = (value.detach().to("cpu", torch.float64).movedim(1, 0).flatten(1) for value in (a, b))
        sums = {"a": x.sum(1), "b": y.sum(1), "aa": (x * x).sum(1), "bb": (y * y).sum(1), "ab": x @ y.T}
        self._count += x.shape[1]
        self._sums = {name: self._sums.get(name, 0.0) + value.numpy() for name, value in sums.items()}

    @property
    def words(self) -> str:
        """How channels of B follow from those of A; empty if they do not, or are the same but for rounding."""
        lines = self._lines()
        return _words(*lines) if lines else ""

    def _lines(self) -> tuple[tuple[int, ...], Floats, Floats] | None:
        """``(order, factors, offsets)``: channel ``c`` of B is ``factors[c]`` times channel ``order[c]`` of A plus
        ``offsets[c]``; None if B does not follow from A in this way."""
        if not self._count:
            return None
        mean_a, mean_b, aa, bb, ab = (self._sums[name] / self._count for name in ("a", "b", "aa", "bb", "ab"))
        variance_a, variance_b, covariance = aa - mean_a**2, bb - mean_b**2, ab - np.outer(mean_a, mean_b)
        if not (variance_a > 0).all() or not (variance_b > 0).all():  # constant, or NaN
            return None
        follows = (covariance**2 > (1 - _EXACT) * np.outer(variance_a, variance_b)) & (covariance > 0)
        channels = range(len(mean_a))
        # the first permutation is the order as it is
        for order in permutations(channels) if len(channels) <= _MOST_PERMUTED else [tuple(channels)]:
            if follows[order, channels].all():
                factors = covariance[order, channels] / variance_a[list(order)]
                return order, factors, mean_b - factors * mean_a[list(order)]
        return None


def _words(order: Sequence[int], factors: Floats, offsets: Floats) -> str:
    words = []
    if list(order) != list(range(len(order))):
        rgb = " (RGB in one, BGR in the other)" if list(order) == [2, 1, 0] else ""
        words.append(f"Channels {_numbers(range(len(order)))} of B's input are channels {_numbers(order)} of A's{rgb}")
    scaled = bool((abs(factors - 1) > _SCALED).any() or (abs(offsets) > _SCALED * max(1.0, abs(factors).max())).any())
    if scaled and (not words or abs(factors - 1).max() > 0.1):  # after other channels, std differs by 2 %
        words.append(f"B's input is {_numbers(factors)} times A's plus {_numbers(offsets)}{_known(factors, offsets)}")
    return ", and ".join(words)


def _known(factors: Floats, offsets: Floats) -> str:
    """The usual steps that make such factors and offsets."""
    mean, std = _IMAGENET if len(factors) == 3 else _IMAGENET.mean(1, keepdims=True)
    for one, other, forth, back in (("B", "A", factors, offsets), ("A", "B", 1 / factors, -offsets / factors)):
        for scale, end in ((1, ""), (255, ", and has colours 0..255")):
            if _are(forth / scale, std) and _are(back / scale, mean):
                return f": {one} lacks the ImageNet mean and std of {other}{end}"
        if _are(forth / 255, 1.0) and _are(back / 255, 0.0):
            return f": {one} has colours 0..255 where {other} has 0..1"
    return ""


def _are(numbers: Floats, wanted: Floats | float) -> bool:
    return numbers.shape in (np.shape(wanted), (len(numbers),)) and np.allclose(numbers, wanted, rtol=0.02, atol=0.01)


def _numbers(values: Sequence[float] | Floats | range) -> str:
    """Numbers in words; one number where all are the same."""
    words = [f"{round(float(value), 6) + 0.0:.4g}" for value in values]  # no minus before a 0
    return words[0] if len(set(words)) == 1 else ", ".join(words)
