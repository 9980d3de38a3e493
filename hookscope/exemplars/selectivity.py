"""How selective the channels are for the classes of the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_LABELS = 5000
"""With more labels there is no selectivity: the mean values of each class would take too much memory."""


class ClassMeans:
    """The mean value of each channel over the images of each class."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.too_many = False
        self._sums: dict[str, Floats] = {}
        self._images: dict[str, int] = {}

    def update(self, values: Floats, labels: Sequence[str]) -> None:
        """Add ``values`` ``(N, C)`` of images with these labels; those with an empty label are left out."""
        for label in filter(None, dict.fromkeys(labels)):
            rows = [at for at, other in enumerate(labels) if other == label]
            self._add(label, values[rows].sum(0), len(rows))

    def merge(self, other: ClassMeans) -> None:
        """Add the images of ``other``."""
        for label, sums in other._sums.items():
            self._add(label, sums, other._images[label])
        if other.too_many:
            self._give_up()

    def _add(self, label: str, sums: Floats, images: int) -> None:
        if self.too_many:
            return
        self._sums[label] = self._sums[label] + sums if label in self._sums else sums
        self._images[label] = self._images.get(label, 0) + images
        if len(self._sums) > MOST_LABELS:
            self._give_up()

    def _give_up(self) -> None:
        self.too_many = True
        self._sums.clear()
        self._images.clear()

    def selectivity(self) -> list[tuple[str, float | None]]:
        """The best class of each channel and its selectivity index, see `ChannelExemplars`.

        None with fewer than two classes, for negative means, and where a value is NaN or Inf.
        """
        labels = sorted(self._sums)
        if len(labels) < 2:
            return [("", None)] * self.channels
        means = np.stack([self._sums[label] / self._images[label] for label in labels])
        best, at = means.max(0), means.argmax(0)
        with np.errstate(all="ignore"):
            others = (means.sum(0) - best) / (len(labels) - 1)
            index = (best - others) / (best + others)
        valid = (means >= 0).all(0) & np.isfinite(index)
        return [
            (labels[where], float(value)) if known else ("", None)
            for where, value, known in zip(at, index, valid, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and arrays for `from_state`."""
        labels = list(self._sums)
        sums = np.stack(list(self._sums.values())) if labels else np.zeros((0, self.channels))
        images = [self._images[label] for label in labels]
        return {"labels": labels, "images": images, "sums": sums, "too_many": self.too_many}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], channels: int) -> Self:
        """Restore what `state_dict` returned."""
        restored = cls(channels)
        for label, images, sums in zip(state["labels"], state["images"], np.array(state["sums"]), strict=True):
            restored._add(label, sums.reshape(channels), int(images))
        restored.too_many = bool(state["too_many"])
        return restored
