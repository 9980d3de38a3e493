"""The images with the largest values of each channel, found in a stream; near-duplicates of an image count once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from hookscope.hooks import as_float

_SIDE = 12  # with 8, small objects on one background are near-duplicates; with 16, JPEG files of low quality are none
_CLIP = (3, 7, 7)
_TOLERANCE = 0.3
_FLAT = 2e-3  # for images of one colour, in units of the input
_LARGEST = 6e4  # of float16
_PAIRS = 4096  # of images, compared at a time

Ints = NDArray[np.int64]

Prints = NDArray[np.float16]
"""``(N, D)``: a small picture of each image, see `prints_of`."""


def prints_of(images: Any) -> Prints:
    """A block mean value hash of each prepared image: the means of its colours in 12 x 12 blocks, not rounded to bits.

    ``images`` are the first input of the model, a tensor or a list of tensors. A clip has 7 x 7 blocks of 3 moments.
    The hash is by Yang, Gu and Niu (Block Mean Value Based Image Perceptual Hashing, 2006) before its last step: a
    bit of a smooth background is a matter of chance, its mean is not.
    """
    parts = list(images) if isinstance(images, (list, tuple)) else [images]
    listed = parts[0] is not images
    prints = [_print_of(as_float(part)[None] if listed else as_float(part)) for part in parts]
    return np.concatenate(prints)


def _print_of(images: Tensor) -> Prints:
    if images.dim() == 5:
        blocks = F.adaptive_avg_pool3d(images, _CLIP)
    elif images.dim() == 4:
        blocks = F.adaptive_avg_pool2d(images, _SIDE)
    else:
        blocks = images
    flat: Prints = blocks.flatten(1).clamp(-_LARGEST, _LARGEST).to("cpu", torch.float16).numpy()
    return flat


class Duplicates:
    """Which of some images, with hashes ``(U, D)``, are near-duplicates.

    No mean may differ by more than 0.3 standard deviations of the means, the larger one of the two images. Of drawings
    and photographs, copies in JPEG of quality 50 to 95, of half to twice the size, or one level brighter differ by 0.27
    at most, other images by 1.6 at least, and two objects drawn on one background by 0.33 at least.
    """

    def __init__(self, prints: Prints) -> None:
        self._prints = prints.astype(np.float32)
        self._most = _TOLERANCE * self._prints.std(1) + _FLAT
        self._mean = self._prints.mean(1)

    def __call__(self, images: Ints, others: Ints) -> NDArray[np.bool_]:
        """Whether the images ``(E,)`` are near-duplicates of ``others`` ``(E,)``, by their rows; one is of itself."""
        near: NDArray[np.bool_] = images == others
        most = np.maximum(self._most[images], self._most[others])
        perhaps = np.flatnonzero(~near & (np.abs(self._mean[images] - self._mean[others]) <= most))
        pairs, at = np.unique(images[perhaps] * len(self._mean) + others[perhaps], return_inverse=True)
        same = np.zeros(len(pairs), bool)
        for first in range(0, len(pairs), _PAIRS):
            one, other = np.divmod(pairs[first : first + _PAIRS], len(self._mean))
            apart = np.abs(self._prints[one] - self._prints[other]).max(1, initial=0)
            same[first : first + _PAIRS] = apart <= np.maximum(self._most[one], self._most[other])
        near[perhaps] = same[at]
        return near


Floats = NDArray[np.float64]
PrintsOf = Callable[[Ints], Prints]
"""Gives the hashes of the images at these positions."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Values ``(E,)`` of channels on images, by the positions of both; rows and columns are -1 without places."""

    channel: Ints
    value: Floats
    image: Ints
    row: Ints
    column: Ints

    @classmethod
    def empty(cls) -> Self:
        """No candidates."""
        none = np.zeros(0, np.int64)
        return cls(none, np.zeros(0), none, none, none)

    @classmethod
    def joined(cls, parts: list[Candidates]) -> Self:
        """All candidates of ``parts``."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.channel)

    def __getitem__(self, chosen: Any) -> Candidates:
        return Candidates(*(getattr(self, field.name)[chosen] for field in fields(self)))


class BestImages:
    """The ``top`` images of each channel with the largest values, or with the smallest if ``least``.

    Of equal values the image that comes first in the list wins. Of near-duplicates the best counts, so copies of one
    image do not push out others. The result does not depend on the order in which candidates come, as long as being
    near-duplicates is transitive. `Duplicates` is not for images that change little by little, as in a film.
    """

    def __init__(self, channels: int, top: int, least: bool = False) -> None:
        self.channels, self.top, self.least = channels, top, least
        self._kept, self._waiting = Candidates.empty(), list[Candidates]()
        self._bounds = np.full(channels, np.inf if least else -np.inf), np.full(channels, np.iinfo(np.int64).max)

    def may_enter(self, values: Floats, images: Ints) -> NDArray[np.bool_]:
        """Which finite ``values`` ``(N, C)`` of ``images`` ``(N,)`` may be among the best, as far as is known."""
        bound, image = self._bounds
        better = values < bound if self.least else values > bound
        may: NDArray[np.bool_] = better | ((values == bound) & (images[:, None] < image))
        return may & np.isfinite(values)

    def add(self, found: Candidates) -> None:
        """Add ``found``."""
        if len(found):
            self._waiting.append(found)

    def merge(self, other: BestImages, prints_of: PrintsOf) -> None:
        """Add what another has found; sorted when as many wait as may be kept, which is seldom in a long run."""
        for found in (other._kept, *other._waiting):
            self.add(found)
        if sum(map(len, self._waiting)) >= self.channels * self.top:
            self.best(prints_of)

    def best(self, prints_of: PrintsOf) -> Candidates:
        """The best so far, by channel and then from the best to the worst."""
        if self._waiting:
            self._kept = self._without_worse(Candidates.joined([self._kept, *self._waiting]), prints_of)
            self._waiting.clear()
            counts = np.bincount(self._kept.channel, minlength=self.channels)
            full = counts == self.top
            last = np.cumsum(counts)[full] - 1
            self._bounds[0][full], self._bounds[1][full] = self._kept.value[last], self._kept.image[last]
        return self._kept

    def _without_worse(self, found: Candidates, prints_of: PrintsOf) -> Candidates:
        found = found[np.lexsort((found.image, found.value if self.least else -found.value, found.channel))]
        kept, left = np.zeros(len(found), bool), np.arange(len(found))
        images, image = np.unique(found.image, return_inverse=True)
        are_near = Duplicates(prints_of(images))
        for _ in range(self.top):  # each time the best of each channel that is left, and not its near-duplicates
            if not left.size:
                break
            channel = found.channel[left]
            first = np.concatenate([[True], channel[1:] != channel[:-1]])
            best = left[first]
            kept[best] = True
            left = left[~are_near(image[left], image[best][np.cumsum(first) - 1])]
        return found[kept]

    @property
    def images(self) -> Ints:
        """The positions of all images that are kept or wait."""
        return np.unique(np.concatenate([part.image for part in (self._kept, *self._waiting)]))

    def state_dict(self, prints_of: PrintsOf) -> dict[str, Any]:
        """Arrays for `from_state`."""
        best = self.best(prints_of)
        return {field.name: getattr(best, field.name) for field in fields(best)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], channels: int, top: int, least: bool = False) -> Self:
        """Restore what `state_dict` returned."""
        restored = cls(channels, top, least)
        found = Candidates(**{field.name: np.array(state[field.name]) for field in fields(Candidates)})
        if len(found) and not 0 <= found.channel.min() <= found.channel.max() < channels:
            raise ValueError("a channel that the layer does not have")
        restored.add(found)
        return restored
