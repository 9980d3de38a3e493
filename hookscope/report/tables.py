"""Pages of results: what is wrong first, then a table that can be sorted and filtered, and a view of each row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
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
        charts: Curves of its channels, or over the steps of a run.
    """

    row: Mapping[str, Any]
    key: str
    values: Distribution | None = None
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


@dataclass(frozen=True)
class ResultPage:
    """What a page shows of a result.

    Attributes:
        kind: The question, such as ``Statistics of activations``.
        summary: Facts in the head, by name; ``weights`` that are random are named in red at the top.
        findings: What is wrong.
        tables: The tables.
        charts: Curves of all rows.
        plot: All rows on one page, as the figure draws it.
        title: The first line, and ``lines`` under the verdict, unless the caller has others.
    """

    kind: str
    summary: Mapping[str, Any]
    findings: Sequence[Finding]
    tables: Sequence[ResultTable]
    charts: Sequence[Chart] = ()
    plot: RowPlot | None = None
    title: str = ""
    lines: Sequence[str] = ()


def draws_page(build: Callable[..., ResultPage]) -> Callable[..., str]:
    """From a function that makes a `ResultPage` to one that draws it: one self-contained file.

    The caller may give ``title``, ``lines`` (under the verdict) and ``provenance`` (versions and the like) too.
    """

    @wraps(build)
    def draw(
        result: Any,
        *args: Any,
        title: str = "",
        lines: Sequence[str] = (),
        provenance: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        page = build(result, *args, **options)
        page = replace(page, title=title or page.title, lines=lines or page.lines)
        return _drawn_page(page, provenance or {})

    return draw


def _drawn_page(page: ResultPage, provenance: Mapping[str, Any]) -> str:
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
        **{field.name: getattr(page, field.name) for field in fields(page)}
        | {"findings": ranked(page.findings), "verdict": verdict(page.findings)},
        is_random=is_random(page.summary.get("weights", "")),
        provenance=provenance,
        views=views,
        offsets=offsets,
        places=places,
        about=about,
        outline=outline,
        sortable=sortable,
    )


def sortable(value: Any) -> str:
    """What a column is sorted by: a number as it is, and the number of values for a shape."""
    if isinstance(value, bool | int | float):
        return json.dumps(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, list | tuple) and value and all(isinstance(part, int) for part in value):
        return str(math.prod(value))
    return words(value)
