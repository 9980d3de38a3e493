"""Pages of results: what is wrong first, then a table that can be sorted and filtered, and a view of each row."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from hookscope.display import words
from hookscope.findings import Finding, ranked, single, verdict
from hookscope.models import is_random
from hookscope.report.charts import Chart
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


@dataclass(frozen=True)
class ResultPage:
    """What a page of results shows.

    Attributes:
        kind: The question, such as ``Statistics of activations``.
        title: The model.
        summary: Facts in the head, by name.
        weights: Label of the weights; random ones are named in red at the top. Empty for a training run.
        findings: What is wrong.
        lines: Lines under the verdict.
        charts: Curves of all rows.
        tables: The tables.
        provenance: Versions and the like.
    """

    kind: str
    title: str
    summary: Mapping[str, Any]
    weights: str
    findings: Sequence[Finding]
    tables: Sequence[ResultTable]
    lines: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_random(self) -> bool:
        """Whether the weights are random."""
        return is_random(self.weights)


def draw_result_page(page: ResultPage) -> str:
    """The page, one self-contained file."""
    views = [view for table in page.tables for view in table.rows]
    offsets = [0, *accumulate(len(table.rows) for table in page.tables)]
    places: dict[str, int] = {}
    about: dict[str, list[Finding]] = {}
    for number, view in enumerate(views):
        places.setdefault(view.key, number)
    for finding in single(page.findings):
        about.setdefault(finding.layer, []).append(finding)
    return render(
        "results.html",
        ("page.css", "charts.css", "results.css"),
        ("page.js", "list.js", "charts.js", "results.js"),
        kind=page.kind,
        title=page.title,
        is_random=page.is_random,
        provenance=page.provenance,
        summary=page.summary,
        page=page,
        findings=ranked(page.findings),
        verdict=verdict(page.findings),
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
