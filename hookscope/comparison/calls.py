"""Which calls of both sides are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hookscope.comparison.pairing import Pair, Pairing
from hookscope.hooks import Call, Selection


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller of `compare` wants to know, in its words."""

    layers: Selection | None
    types: tuple[Any, ...] | None
    ops: bool
    names: Mapping[str, str]
    alone: bool
    matrix: bool
    keep: Selection | None


@dataclass
class ComparedCalls:
    """The calls that are compared.

    Attributes:
        pairing: The pairs that are wanted, and the calls without a partner.
        with_alone: Keys of the calls of A on whose inputs the layer of B runs too.
        with_maps: Keys of the calls of A whose maps are kept.
        matrix_a: Calls of A for the CKA of all against all, by key.
        matrix_b: Likewise of B.
        bytes: What is kept of A for one image.
        ops: Whether operations may be among the calls.
    """

    pairing: Pairing
    with_alone: set[str]
    with_maps: set[str]
    matrix_a: dict[str, Call]
    matrix_b: dict[str, Call]
    bytes: float
    ops: bool

    @cached_property
    def by_a(self) -> dict[str, Pair]:
        return {pair.a.key: pair for pair in self.pairing.pairs}

    @cached_property
    def by_b(self) -> dict[str, Pair]:
        return {pair.b.key: pair for pair in self.pairing.pairs}
