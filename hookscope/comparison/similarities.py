"""How alike the outputs of two layers are over a set of images: the measures that ``compare`` has. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Similarity:
    """A measure of similarity, with ``help`` and ``need`` of its `Column`.

    ``make`` makes the measurement of one pair of layers. Its ``add(features_a, features_b)`` gets a batch of outputs
    ``(n, ...)`` of the same images on both sides, whose shapes may differ. Its ``value`` is the similarity over all
    batches so far; None where it is not defined.
    """

    make: Callable[[], Any]
    help: str
    need: int = 8


def _cka() -> Any:
    from hookscope.comparison.cka import PairCka

    return PairCka()


SIMILARITIES = {"cka": Similarity(_cka, "linear CKA over the images, if there are 4 or more")}
"""The measures by the name of their column."""
