"""A plot of a plan: memory by kind down the network, and what each call keeps, computes, moves and takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from hookscope.drawing import Colour, Mark, Panel, RowPlot, layer_label, row_plot
from hookscope.hooks import MODEL
from hookscope.planning.facts import CallCost, Plan

_HELD = {
    "parameters": ("#0072b2", "blue"),
    "buffers": ("#8c8c8c", "grey"),
    "optimizer": ("#cc79a7", "pink"),
    "input": ("#56b4e9", "light blue"),
}
_KEPT = "#009e73"


@dataclass(frozen=True)
class PlanRow:
    """A call, and the bytes that autograd keeps from the first call to this one."""

    call: CallCost
    so_far: int

    @property
    def quartiles(self) -> list[tuple[float, float]]:
        """The first and third quartile of forward, and of backward on top of it."""
        forward, backward = self.call.forward, self.call.backward
        spans = [(forward.low, forward.high)] if forward else []
        before = forward.median if forward else 0.0
        return [*spans, (before + backward.low, before + backward.high)] if backward else spans


def _bars(name: str) -> list[Mark]:
    """Bars of the attribute ``name`` of a call, in the colour of what the call is bound by."""
    kinds = ((Colour.ORANGE, True, "orange bound by memory"), (Colour.BLUE, False, "blue by arithmetic"))
    return [Mark("bar", _bound_by(name, memory), colour, words, 0.75) for colour, memory, words in kinds]


def _bound_by(name: str, memory: bool) -> Callable[[PlanRow], int | None]:
    return lambda row: getattr(row.call, name) if (row.call.bound == "memory") == memory else None


def _backward(row: PlanRow) -> tuple[float, float] | None:
    forward, backward = row.call.forward, row.call.backward
    before = forward.median if forward else 0.0
    return (before, before + backward.median) if backward else None


PLAN_PANELS = [
    Panel("kept", 1.7, [Mark("bar", lambda row: row.call.saved, _KEPT, "", 0.75)], "bytes"),
    Panel("MACs", 1.7, _bars("macs"), "count"),
    Panel("bytes moved", 1.7, _bars("bytes_moved"), "bytes"),
    Panel(
        "time",
        2.6,
        [
            Mark(
                "bar",
                lambda row: row.call.forward and row.call.forward.median,
                Colour.BLUE,
                "blue forward (median)",
                0.75,
            ),
            Mark("bar", _backward, Colour.ORANGE, "orange backward (median)", 0.75),
            Mark("line", lambda row: row.quartiles, Colour.INK, "line from the first to the third quartile", 0.7),
        ],
        "seconds",
    ),
]
"""The panels of `plan_plot` after the memory so far, from left to right; each reads a `PlanRow`."""


def plan_plot(plan: Plan) -> RowPlot:
    """A row for each call: memory so far by kind, bytes kept, multiply-accumulates, bytes moved, time."""
    rows = [PlanRow(*row) for row in zip(plan.calls, accumulate(call.saved for call in plan.calls), strict=True)]
    marks, start = list[Mark](), 0
    for kind, (colour, name) in _HELD.items():
        end = start + getattr(plan.memory, kind)
        if end > start and any(call.saved for call in plan.calls):
            marks.append(Mark("bar", partial(lambda ends, row: ends, (start, end)), colour, f"{kind} {name}", 1))
            start = end
    words = "activations kept by the forward pass green"
    kept = Mark("bar", lambda row: (start, start + row.so_far), _KEPT, words, 1)
    so_far = Panel("memory so far", 3.4, [*marks, kept] if marks or plan.memory.saved else [], "bytes")
    labels = [layer_label(row.call.call.key, row.call.call.type) or MODEL for row in rows]
    return row_plot(rows, [so_far, *PLAN_PANELS], labels, title=plan.model)
