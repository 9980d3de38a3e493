"""A plot of a plan: memory by kind down the network, and what each call keeps, computes, moves and takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.drawing import Colour, layer_label, page_of_rows, plain_settings, plain_ticks
from hookscope.hooks import MODEL
from hookscope.planning.facts import Plan, Timing

_KINDS = {
    "parameters": "#0072b2",
    "buffers": "#8c8c8c",
    "optimizer": "#cc79a7",
    "input": "#56b4e9",
    "activations": "#009e73",
}
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
_MACS = ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"), (1, "1"))
_SECONDS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
_Draw = Callable[[Axes, float], None]


def plot_plan(plan: Plan, title: str = "", *, lines: Sequence[str] = ()) -> Figure:
    """A page with a row for each call: memory so far by kind, bytes kept, multiply-accumulates, bytes moved, time.

    A panel without values is left out. The figure is none of pyplot's: nothing has to be closed, and no setting of
    matplotlib changes.

    Args:
        plan: The result of `plan`.
        title: The first line; by default the name of the model.
        lines: Lines below the title.

    Example:
        >>> import torch
        >>> from hookscope import plan
        >>> from hookscope.planning import plot_plan
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Sigmoid())
        >>> figure = plot_plan(plan(net, input_size=(9, 9), train=True))
        >>> [axes.texts[0].get_text() for axes in figure.axes]
        ['memory so far (kB)', 'kept (kB)', 'MACs (thousand)', 'bytes moved (kB)']
    """
    calls, memory = plan.calls, plan.memory
    kept = [call.saved for call in calls]
    held = {kind: getattr(memory, kind) for kind in _KINDS if kind != "activations" and getattr(memory, kind)}
    so_far = [sum(held.values()) + size for size in accumulate(kept)]
    bound = [Colour.ORANGE if call.bound == "memory" else Colour.BLUE for call in calls]
    times = [[each for each in (call.forward, call.backward) if each is not None] for call in calls]
    panels: dict[str, tuple[float, float, _Draw]] = {}

    def add(name: str, width: float, values: Sequence[float], units: Sequence[tuple[float, str]], draw: _Draw) -> None:
        if any(values):
            factor, unit = next((each for each in units if max(values) >= each[0]), units[-1])
            panels[f"{name} ({unit})"] = width, factor, draw

    if any(kept):
        add("memory so far", 3.4, so_far, _BYTES, lambda axes, unit: _stack(axes, held, so_far, unit))
        add("kept", 1.7, kept, _BYTES, lambda axes, unit: _bars(axes, kept, unit, [_KINDS["activations"]] * len(calls)))
    macs, moved = [call.macs for call in calls], [call.bytes_moved for call in calls]
    add("MACs", 1.7, macs, _MACS, lambda axes, unit: _bars(axes, macs, unit, bound))
    add("bytes moved", 1.7, moved, _BYTES, lambda axes, unit: _bars(axes, moved, unit, bound))
    ends = [sum(each.high for each in row) for row in times]
    add("time", 2.6, ends, _SECONDS, lambda axes, unit: _times(axes, times, unit))
    with plain_settings():
        figure = page_of_rows(
            [layer_label(call.call.key, call.call.type) or MODEL for call in calls],
            {name: width for name, (width, _, _) in panels.items()},
            title or plan.model,
            [(line, Colour.INK) for line in lines],
            legend=_legend(plan, held),
        )
        for (_, unit, draw), axes in zip(panels.values(), figure.axes, strict=True):
            draw(axes, unit)
            axes.set_xlim(0, None)
            axes.set_xticks(*plain_ticks(axes.get_xlim(), 5))
    return figure


def _legend(plan: Plan, held: Iterable[str]) -> list[str]:
    """What the colours mean that are drawn."""
    names = {"#0072b2": "blue", "#8c8c8c": "grey", "#cc79a7": "pink", "#56b4e9": "light blue"}
    legend = []
    if plan.memory.saved:
        parts = [f"{kind} {names[_KINDS[kind]]}" for kind in held]
        legend.append(f"memory so far in the forward pass: {', '.join([*parts, 'activations kept green'])}")
    legend.append("MACs, bytes moved: orange bound by memory, blue by arithmetic")
    if plan.measured is not None:
        backward = ", orange backward" if plan.measured.backward else ""
        legend.append(f"time: blue forward{backward}, median; line from the first to the third quartile")
    return legend


def _bars(axes: Axes, values: Sequence[float], unit: float, colours: Sequence[str], left: Sequence[float] = ()) -> None:
    rows = range(len(values))
    axes.barh(rows, [value / unit for value in values], 0.75, left or 0, color=colours, zorder=2)


def _stack(axes: Axes, held: dict[str, int], so_far: Sequence[float], unit: float) -> None:
    """Draw what is there from the beginning, and on it the activations that autograd keeps down to each row."""
    at = 0.0
    for kind, size in held.items():
        axes.axvspan(at / unit, (at + size) / unit, color=_KINDS[kind], linewidth=0, zorder=2)
        at += size
    rows = range(len(so_far))
    colour = _KINDS["activations"]
    axes.barh(rows, [(end - at) / unit for end in so_far], 1, at / unit, color=colour, edgecolor=colour, zorder=2)


def _times(axes: Axes, times: Sequence[Sequence[Timing]], unit: float) -> None:
    """Draw forward and on it backward, each with a line between its quartiles."""
    before = [0.0] * len(times)
    for place, colour in enumerate((Colour.BLUE, Colour.ORANGE)):
        rows = [row[place] if place < len(row) else Timing(0, 0, 0) for row in times]
        _bars(axes, [row.median for row in rows], unit, [colour] * len(rows), before)
        low = [left + row.low / unit for left, row in zip(before, rows, strict=True)]
        high = [left + row.high / unit for left, row in zip(before, rows, strict=True)]
        axes.hlines(range(len(rows)), low, high, colors=Colour.INK, linewidth=0.7, zorder=3)
        before = [left + row.median / unit for left, row in zip(before, rows, strict=True)]
