"""How alike the outputs of two layers are over a set of images: the measures that ``compare`` has. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PairSimilarity(Protocol):
    """Measures one pair of layers, batch by batch."""

    def add(self, features_a: Tensor, features_b: Tensor) -> None:
        """Add a batch of outputs ``(n, ...)``, of the same images on both sides; the shapes may differ."""

    @property
    def value(self) -> float | None:
        """The similarity over all batches so far; None where it is not defined."""


@dataclass(frozen=True)
class Similarity:
    """A measure of similarity: what makes the measurement of one pair, and ``help`` and ``need`` of its `Column`."""

    make: Callable[[], PairSimilarity]
    help: str
    need: int = 8


def _cka() -> PairSimilarity:
    from hookscope.comparison.cka import PairCka

    return PairCka()


SIMILARITIES = {"cka": Similarity(_cka, "linear CKA over the images, of 4 or more")}
"""The measures by the name of their column."""
