"""A plot of the weights of a model: the distribution for each layer, with the findings beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hookscope.drawing import Colour, Mark, Panel, RowPlot, finding_lines, layer_label, row_plot
from hookscope.findings import Finding, counted, single
from hookscope.parameters.findings import ParameterStatistics

_IN_ROW_OF_LAYER = {"weight", "bias", "running_mean", "running_var"}


def _of(part: str, *names: str) -> Callable[[WeightRow], Any]:
    """From a row to the numbers ``names`` of its weight or running variance, None where they are unknown."""

    def values(row: WeightRow) -> Any:
        facts = getattr(row, part)
        numbers = tuple(getattr(facts, name) for name in names) if facts is not None else (None,)
        return None if None in numbers else numbers if len(names) > 1 else numbers[0]

    return values


def _spread(row: WeightRow) -> tuple[float, float] | None:
    weight = row.weight
    if weight is None or weight.mean is None or weight.std is None:
        return None
    return weight.mean - weight.std, weight.mean + weight.std


@dataclass
class WeightRow:
    """One row of the plot: a layer, or a parameter with another name than the usual ones, such as a class token."""

    label: str
    weight: ParameterStatistics | None = None
    variance: ParameterStatistics | None = None
    notes: list[str] = field(default_factory=list)


WEIGHT_PANELS = [
    Panel(
        "weights",
        3.4,
        [
            Mark("line", _of("weight", "min", "max"), Colour.FAINT, "thin line lowest to highest"),
            Mark("line", _spread, Colour.SKY, "thick line mean ± standard deviation", 4.0),
            Mark("dot", _of("weight", "mean"), Colour.BLUE, "dot mean"),
        ],
        "symlog",
    ),
    Panel(
        "norms of filters",
        2.2,
        [
            Mark("line", _of("weight", "filter_norm_min", "filter_norm_max"), Colour.FAINT, "line least to largest"),
            Mark("dot", _of("weight", "filter_norm_mean"), Colour.GREEN, "dot mean"),
        ],
        "log",
    ),
    Panel("zeros", 1.0, [Mark("bar", _of("weight", "zeros"), Colour.ORANGE)], "share"),
    Panel(
        "running variance",
        2.2,
        [
            Mark("line", _of("variance", "min", "max"), Colour.FAINT, "line least to largest"),
            Mark("dot", _of("variance", "mean"), Colour.GREEN, "dot mean"),
        ],
        "log",
    ),
]
"""The panels of `weights_plot`, from left to right; each reads a `WeightRow`."""


def weights_plot(rows: Sequence[ParameterStatistics], findings: Sequence[Finding] | None = None) -> RowPlot:
    """A row for each layer: its weights, norms of filters, zeros and running variances, with ``findings`` beside it."""
    page_rows = _page_rows(rows, findings or ())
    typical = sorted(row.weight.std for row in page_rows if row.weight is not None and row.weight.std)
    panels = [
        replace(panel, typical=typical[len(typical) // 2]) if panel.axis == "symlog" and typical else panel
        for panel in WEIGHT_PANELS
    ]
    marked = {at: "; ".join(row.notes) for at, row in enumerate(page_rows) if row.notes}
    return row_plot(page_rows, panels, [row.label for row in page_rows], marked, finding_lines(findings))


def _page_rows(rows: Sequence[ParameterStatistics], findings: Sequence[Finding]) -> list[WeightRow]:
    page_rows: dict[str, WeightRow] = {}
    # if no BatchNorm was ever updated, as with random weights, only the lines below the heading mention it
    some_updated = any(row.updated for row in rows)
    for row in rows:
        leaf = row.name.rpartition(".")[2]
        key = (row.layer or row.type) if leaf in _IN_ROW_OF_LAYER else row.name
        place = page_rows.setdefault(key, WeightRow(layer_label(key, row.type) if key == row.layer else key))
        if leaf == "running_var":
            place.variance = row
        elif leaf == "weight" or leaf not in _IN_ROW_OF_LAYER:
            place.weight = row
        notes = [_note(finding, leaf) for finding in single(findings) if finding.layer == row.name]
        notes += ["never updated"] if row.updated is False and some_updated else []
        place.notes += [note for note in notes if note not in place.notes]
    return list(page_rows.values())


def _note(finding: Finding, leaf: str) -> str:
    channels = finding.channels or ()
    match finding.finding:
        case "non-finite":
            count = sum(int(finding.numbers[name] or 0) for name in ("nan", "inf"))
            return f"{count:,} NaN or Inf" + ("" if leaf == "weight" else f" in {leaf}")
        case "dead-filters":
            return f"{counted(len(channels), 'dead filter')}: {_few(channels)}"
        case "duplicate-filters":
            return "duplicates: " + _few(["=".join(map(str, group[:3])) for group in finding.groups or ()])
        case "collapsed-variance":
            return f"{len(channels)} collapsed: {_few(channels)}"
    return finding.finding


def _few(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:3])) + (", ..." if len(items) > 3 else "")
