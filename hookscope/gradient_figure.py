"""The way of a gradient through a model on one page: activations, weights and biases, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookscope.figures import SMALL, Colour, RowPage, page_of_rows, plain_settings, write
from hookscope.findings import Finding
from hookscope.gradient_sizes import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hookscope.gradients import GradientReport, LayerGradient, ParameterGradient

__all__ = ["gradient_figure"]

_MOST_LINES = 8
_MOST_DECADES = 40  # beyond, what single precision can hold is drawn at the edge
_MOST_MARKED = 12

_Sizes = list[tuple[int, Size]]


@dataclass
class _Row:
    """One row of the page: a layer call, or a layer that was not asked for but has parameters."""

    label: str
    name: str
    layer: LayerGradient | None = None
    weights: list[ParameterGradient] = field(default_factory=list)
    biases: list[ParameterGradient] = field(default_factory=list)


def gradient_figure(
    report: GradientReport, findings: Sequence[Finding], heading: str, lines: Sequence[str] = ()
) -> Figure:
    """A page with a row for each layer in order of execution: mean and largest gradient, on a logarithmic scale.

    Panels: the gradient of what a layer puts out, that of its weights, that of its biases; what was changed stands
    below what was there before. Rows with a finding are marked and name it.

    Args:
        report: As `hookscope.gradients.layer_gradients` made it.
        findings: As `hookscope.gradient_findings.gradient_findings` made them.
        heading: Which model with which weights.
        lines: Further lines below the heading, such as totals.

    Example:
        >>> import torch
        >>> from hookscope.gradients import layer_gradients
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Flatten())
        >>> figure = gradient_figure(layer_gradients(net, torch.ones(1, 1, 1, 1)), [], "a net")
        >>> [axes.texts[0].get_text() for axes in figure.axes]
        ['gradient of the activations', 'gradient of the weights', 'gradient of the biases']
    """
    rows = _rows(report)
    told = _told(findings)
    panels: list[tuple[str, _Sizes, _Sizes, list[int]]] = [
        ("gradient of the activations", _of_layers(rows), [], _without(rows, "layer"))
    ]
    for title, which in (("gradient of the weights", "weights"), ("gradient of the biases", "biases")):
        if any(getattr(row, which) for row in rows):
            before, after = _of_parameters(rows, which)
            panels.append((title, before, after, _without(rows, which)))
    with plain_settings():
        page = page_of_rows(
            [row.label for row in rows],
            [title for title, *_ in panels],
            heading,
            [*lines, *told],
            [2.9] * len(panels),
            _marked(rows, findings),
            range(len(lines), len(lines) + len(told)) if findings else (),
        )
        for (_, before, after, without), axes in zip(panels, page.panels, strict=True):
            _draw(axes, before, after, without)
        _legend(page, changed=any(after for _, _, after, _ in panels))
    return page.figure


def _rows(report: GradientReport) -> list[_Row]:
    """Calls in order of execution, each followed by the layers that were registered after it and were not asked for."""
    by_layer: dict[str, list[ParameterGradient]] = {}
    for parameter in report.parameters:
        by_layer.setdefault(parameter.layer, []).append(parameter)
    called = {layer.call.name for layer in report.layers}
    following: dict[str, list[str]] = {"": []}
    last = ""
    for name in by_layer:
        last = name if name in called else last
        following.setdefault(last, []).extend([] if name in called else [name])
    rows = [_Row(name or "(model)", name) for name in following.pop("")]
    for layer in report.layers:
        rows.append(_Row(layer.call.key or layer.call.type, layer.call.name, layer))
        rows += [_Row(name, name) for name in following.pop(layer.call.name, [])]
    for row in rows:
        for parameter in by_layer.pop(row.name, []):  # a layer that ran twice shows them once
            kind = row.biases if parameter.name.rpartition(".")[2].endswith("bias") else row.weights
            kind.append(parameter)
    return rows


def _of_layers(rows: Sequence[_Row]) -> _Sizes:
    found = [(at, row.layer.grad_output) for at, row in enumerate(rows) if row.layer is not None]
    return [(at, size) for at, size in found if size is not None]


def _of_parameters(rows: Sequence[_Row], which: str) -> tuple[_Sizes, _Sizes]:
    """The gradients before and after; ``after`` only where something was changed."""
    own = [(at, parameter) for at, row in enumerate(rows) for parameter in getattr(row, which)]
    before = [(at, p.gradient) for at, p in own if p.gradient is not None]
    after = [(at, p.after) for at, p in own if p.after is not None and p.after != p.gradient]
    return before, after


def _without(rows: Sequence[_Row], which: str) -> list[int]:
    """Rows that no gradient reaches."""
    if which == "layer":
        return [at for at, row in enumerate(rows) if row.layer is not None and row.layer.grad_output is None]
    return [at for at, row in enumerate(rows) if any(p.gradient is None for p in getattr(row, which))]


def _marked(rows: Sequence[_Row], findings: Sequence[Finding]) -> dict[int, str]:
    """What stands beside a row: the finding whose chain begins there."""
    found: dict[int, list[str]] = {}
    places = {row.name: at for at, row in reversed(list(enumerate(rows)))}
    keys = {row.label: at for at, row in enumerate(rows)}
    for finding in findings[:_MOST_MARKED]:
        at = keys.get(finding.layer, places.get(finding.layer.partition("#")[0]))
        if at is not None:
            reason = finding.numbers.get("reason")
            found.setdefault(at, []).append(f"{finding.finding}: {reason}" if reason else finding.finding)
    return {at: ", ".join(dict.fromkeys(words)) for at, words in found.items()}


def _told(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["no findings"]
    lines = [f"{f.finding}  {f.layer}: {f.evidence}" if f.layer else f"{f.finding}: {f.evidence}" for f in findings]
    more = len(lines) - _MOST_LINES
    return lines[:_MOST_LINES] + ([f"... and {more} more"] if more > 0 else [])


def _draw(axes: Axes, before: _Sizes, after: _Sizes, without: Sequence[int]) -> None:
    left, right = _limits([size for _, size in [*before, *after]])
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    _ticks(axes, left, right)
    _spans(axes, before, left, -0.18 if after else 0.0, Colour.BLUE, Colour.SKY)
    _spans(axes, after, left, 0.22, Colour.ORANGE, "#f3d28a")
    edge: dict[str, Any] = {"clip_on": False, "linestyle": "none", "zorder": 6}
    lost = set(without)
    axes.plot([left] * len(lost), sorted(lost), marker="x", ms=3.6, color=Colour.FAINT, mew=1.1, **edge)
    zero = [at for at, size in before if size.max_abs == 0 and not size.nan and not size.inf]
    axes.plot([left] * len(zero), zero, marker="<", ms=4, color=Colour.ALARM, **edge)
    bad = [at for at, size in before if size.nan or size.inf]
    axes.plot([right] * len(bad), bad, marker=">", ms=4.4, color=Colour.ALARM, **edge)


def _spans(axes: Axes, sizes: _Sizes, left: float, shift: float, dark: str, light: str) -> None:
    """The mean absolute value a dot, a line from it to the largest."""
    known = [(at + shift, size) for at, size in sizes if size.max_abs > 0]
    if not known:
        return
    at = [place for place, _ in known]
    means = [max(size.mean_abs, left) for _, size in known]
    largest = [max(size.max_abs, left) for _, size in known]
    axes.hlines(at, means, largest, colors=light, linewidth=1.6, zorder=2)
    axes.plot(largest, at, "|", ms=4, color=dark, mew=1.0, zorder=3)
    axes.plot(means, at, "o", ms=2.8, color=dark, zorder=4)


def _limits(sizes: Iterable[Size]) -> tuple[float, float]:
    values = [value for size in sizes for value in (size.mean_abs, size.max_abs) if value > 0]
    if not values:
        return 1e-3, 1.0
    most = max(values)
    least = max(min(values), most * 10.0**-_MOST_DECADES)
    return least / 1.8, most * 1.8


def _ticks(axes: Axes, left: float, right: float) -> None:
    """About four powers of ten that can be read without touching; below two decades also 2 and 5 times a power."""
    low, high = math.ceil(math.log10(left)), math.floor(math.log10(right))
    step = max(1, -(-(high - low) // 4))
    digits = (1, 2, 5) if right < 100 * left else (1,)
    marks = [(digit, power) for power in range(low - (step == 1), high + 1, step) for digit in digits]
    marks = [(digit, power) for digit, power in marks if left <= digit * 10.0**power <= right]
    axes.set_xticks([digit * 10.0**power for digit, power in marks])
    axes.set_xticklabels([f"{digit}e{power}" for digit, power in marks])
    axes.set_xticks([], minor=True)


def _legend(page: RowPage, changed: bool) -> None:
    width, height = page.figure.get_size_inches()
    words = "absolute values: dot mean, line to the largest; < 0 everywhere, x no gradient, > NaN or Inf"
    words += "; blue before, orange after the change" if changed else ""
    write(page.figure, 0.2 / width, 0.13 / height, words, fontsize=SMALL - 0.5, color=Colour.FAINT)
