"""Pages of results: what is wrong first, then a table that can be sorted and filtered, and a view of each row."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hookscope.display import words
from hookscope.drawing import Chart, RowPlot
from hookscope.findings import Finding, ranked, single, verdict
from hookscope.models import is_random
from hookscope.report.network import outline
from hookscope.report.page import render


@dataclass(frozen=True)
class Distribution:
    """Numbers of values in equal intervals from ``low`` to ``high``."""

    low: float
    mean: float
    high: float
    histogram: Sequence[int]


@dataclass(frozen=True)
class RowView:
    """A row of a table, and what its view shows beside its fields.

    Attributes:
        row: The fields, as the command prints them.
        key: What findings on it name.
        values: Its values in equal intervals.
        size: A number for a bar on the axis that all rows of the table share; above 0.
        charts: Curves of its channels, or over the steps of a run.
    """

    row: Mapping[str, Any]
    key: str
    values: Distribution | None = None
    size: float | None = None
    charts: Sequence[Chart] = ()


@dataclass(frozen=True)
class ResultTable:
    """A table of the page: ``columns`` are fields of the rows that it shows, and ``noun`` names many rows."""

    title: str
    noun: str
    columns: Sequence[str]
    rows: Sequence[RowView]

    @property
    def shown(self) -> list[str]:
        """The columns in which a row says something, without those that are for every table."""
        said = {name for view in self.rows for name, value in view.row.items() if words(value)}
        return [name for name in self.columns if name in said and name not in ("name", "type", "findings")]

    @property
    def has_values(self) -> bool:
        """Whether rows have distributions."""
        return any(view.values for view in self.rows)

    def rows_with(self, findings: Container[str]) -> bool:
        """Whether a row has findings."""
        return any(view.key in findings for view in self.rows)

    @property
    def sizes(self) -> tuple[float, float] | None:
        """The least and the largest size."""
        sizes = [view.size for view in self.rows if view.size]
        return (min(sizes), max(sizes)) if sizes else None


def draw_result_page(
    kind: str,
    title: str,
    summary: Mapping[str, Any],
    findings: Sequence[Finding],
    tables: Sequence[ResultTable],
    lines: Sequence[str] = (),
    charts: Sequence[Chart] = (),
    plot: RowPlot | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> str:
    """The page, one self-contained file.

    Args:
        kind: The question, such as ``Statistics of activations``.
        title: The model.
        summary: Facts in the head, by name; ``weights`` that are random are named in red at the top.
        findings: What is wrong.
        tables: The tables.
        lines: Lines under the verdict.
        charts: Curves of all rows.
        plot: All rows on one page, as the figure draws it.
        provenance: Versions and the like.
    """
    views = [view for table in tables for view in table.rows]
    offsets = [0, *accumulate(len(table.rows) for table in tables)]
    places: dict[str, int] = {}
    about: dict[str, list[Finding]] = {}
    for number, view in enumerate(views):
        places.setdefault(view.key, number)
    for finding in single(findings):
        about.setdefault(finding.layer, []).append(finding)
    return render(
        "results.html",
        ("page.css", "charts.css", "results.css"),
        ("page.js", "list.js", "charts.js", "results.js"),
        kind=kind,
        title=title,
        is_random=is_random(summary.get("weights", "")),
        provenance=provenance or {},
        summary=summary,
        tables=tables,
        lines=lines,
        charts=charts,
        plot=plot,
        findings=ranked(findings),
        verdict=verdict(findings),
        views=views,
        offsets=offsets,
        places=places,
        about=about,
        outline=outline,
        share=share_of_bar,
        sortable=sortable,
    )


def share_of_bar(size: float, sizes: tuple[float, float]) -> str:
    """How long the bar of a size is, in percent, on a logarithmic axis of a table."""
    low, high = map(math.log10, sizes)
    return f"{2 + 98 * (math.log10(size) - low) / (high - low):.3g}" if high > low else "100"


def sortable(value: Any) -> str:
    """What a column is sorted by: a number as it is, and the number of values for a shape."""
    if isinstance(value, bool | int | float):
        return json.dumps(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, list | tuple) and value and all(isinstance(part, int) for part in value):
        return str(math.prod(value))
    return words(value)
