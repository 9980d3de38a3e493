"""The images with the largest values of each channel, found in a stream; near-duplicates of an image count once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hookscope.exemplars.duplicates import Duplicates, Ints, Prints

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
    near-duplicates is transitive. `Duplicates` is not for images that change little by little, as those of a film.
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
