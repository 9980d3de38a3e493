"""The columns of a comparison: of a pair of calls, of the answer, and of what has no partner. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hookscope.columns import Column, Columns, Row
from hookscope.comparison.similarities import SIMILARITIES, Similarity

if TYPE_CHECKING:
    from hookscope.comparison.facts import Comparison, PairedCall


def _of_a(name: str, **more: Any) -> Column:
    return Column(name, lambda pair: getattr(pair.a, name), **more)


def _of_difference(name: str, help: str = "", **more: Any) -> Column:
    return Column(name, lambda pair: getattr(pair.difference, name, None), help, **more)


def _of_largest(name: str, attribute: str, help: str = "", **more: Any) -> Column:
    def value(pair: PairedCall) -> Any:
        return getattr(pair.difference and pair.difference.largest, attribute, None)

    return Column(name, value, help, **more)


def _similarity(name: str, kind: Similarity) -> Column:
    return Column(name, lambda pair: pair.similarities.get(name), kind.help, kind.need, "unknown")


PAIRS = Columns(
    _of_a("index", need=1, hide="unknown"),
    Column("layer", lambda pair: pair.a.key),
    Column("part", hide="zero", where="table"),
    Column("layer_b", hide="zero", where="table"),
    _of_a("type", need=7),
    _of_a("call", where="rows"),
    _of_a("order", where="rows"),
    Column("part", where="rows"),
    Column("layer_b", lambda pair: pair.b.key, where="rows"),
    Column("type_b", lambda pair: pair.b.type, where="rows"),
    Column("paired_by", help="name, order, map, or folded: one layer does the work of more", where="rows"),
    Column("shape", lambda pair: pair.shape_a, need=4),
    Column("shape_b", where="rows"),
    _of_difference("relative_l2", "norm of B - A, divided by the norm of A"),
    Column("isolated_l2", help="relative_l2 when B's layer runs on A's inputs: what it alone adds", hide="unknown"),
    Column("noise", help="relative_l2 of A against itself", where="rows"),
    Column("differs", help="true above ten times the noise, or if one side has NaN", where="rows"),
    _of_difference("cosine", "of both outputs", need=5, hide="unknown"),
    *(_similarity(name, kind) for name, kind in SIMILARITIES.items()),
    _of_largest("max_abs", "value", "largest difference; image, place, value_a and value_b say where", need=2),
    _of_largest("image", "image", where="rows"),
    _of_largest("place", "place", where="rows"),
    _of_largest("value_a", "a", where="rows"),
    _of_largest("value_b", "b", where="rows"),
    _of_difference("values", "number of values", where="rows"),
    _of_difference("equal", "number of values that are the same to the bit", where="rows"),
    _of_difference("nonfinite_a", "values that are NaN or Inf in A only; nonfinite_b: in B only", hide="zero"),
    _of_difference("nonfinite_b", hide="zero"),
    Column("dead_a", help="share of channels that are dead in A only; dead_b: in B only", need=3, hide="zero"),
    Column("dead_b", need=3, hide="zero"),
    Column("parameters", help="relative change of the layer's parameters", need=9, hide="zero"),
    Column("buffers", help="relative change of the layer's buffers", need=6, hide="zero"),
)
"""What ``compare`` says of a pair of calls, a `PairedCall`."""

ANSWER = Columns(
    *("kind", "sentence", "advice", "first", "most", "same_before", "images", "top1", "top5", "changed", "a", "b")
)
UNPAIRED = Columns("side", "index", Column("layer", lambda call: call.key), "type", "call", "order")
CHANGED_IMAGES = Columns(
    Column("image", lambda image: image.name), "class_a", "class_b", "probability_a", "probability_b"
)
BROKEN_LIMITS = Columns(
    *("limit", Column("index", need=1), "layer", "order", Column("part", hide="zero"), "value"),
    *(Column("allowed", need=2), "evidence"),
)


def pair_row(pair: PairedCall, names: Sequence[str]) -> Row:
    row = PAIRS.row(pair)
    return {**row, "image": None if row["image"] is None else names[row["image"]]}


def answer_row(found: Comparison) -> Row:
    changed = len(found.agreement.changed) if found.agreement else None
    sides = {"a": asdict(found.a), "b": asdict(found.b)}
    return ANSWER.row(found.answer, found.agreement, images=len(found.names), changed=changed, **sides)
