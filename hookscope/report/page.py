"""One file of HTML from a template, with a policy that forbids every request; tables that sort and fold by module.

A page of a result that is too large leaves pictures out until it fits (`fit_page`). `section` adds a table to a page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import accumulate, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hookscope.display import engineering, words
from hookscope.drawing import Chart, RowPlot
from hookscope.errors import WriteError, printable
from hookscope.findings import Finding, counted, percent, ranked, single, verdict
from hookscope.hooks import MODEL
from hookscope.models import is_random
from hookscope.report.charts import chart_data, chart_labels, chart_svg, outline, panel_svg

MAX_SIZE = 50_000_000
"""The largest size of a page in bytes that browsers open at once."""

_FOLDER = Path(__file__).parent
_SPARE = 2_000  # bytes: digits of numbers of what is left out
_UNFOLDED = 40  # rows of a list that are open at first, at most

Rows = Sequence[Mapping[str, Any]]


SECTIONS: dict[type, list[dict[str, Any]]] = {}
"""What `section` added to the page of each kind of result: a title, a line of explanation, and what makes the rows."""


def section(kind: type, title: str) -> Callable[[Callable[[Any], Rows]], Callable[[Any], Rows]]:
    """Add a table to the page of results of a kind, such as `Inspection`; without rows it is not shown.

    The decorated function makes rows of a result, and its docstring explains the table.
    """

    def add(rows: Callable[[Any], Rows]) -> Callable[[Any], Rows]:
        SECTIONS.setdefault(kind, []).append({"title": title, "hint": rows.__doc__ or "", "rows": rows})
        return rows

    return add


def render(template: str, styles: Sequence[str], scripts: Sequence[str], **values: Any) -> str:
    """The page of ``template`` with ``values``; ``styles`` and ``scripts`` are files of this folder.

    Text in ``values`` stays text: markup is escaped, and control characters and marks of direction are written out.
    """
    style, script = _joined(tuple(styles)), _joined(tuple(scripts))
    policy = (
        "default-src 'none'; img-src data:; "
        f"style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = _environment().get_template(template)
    return page.render(style=Markup(style), script=Markup(script), policy=policy, **{"added": (), **values})


def added_sections(result: Any) -> list[tuple[dict[str, Any], Rows]]:
    """The sections that were added to the page of this kind of result, and their rows."""
    return [(entry, rows) for entry in SECTIONS.get(type(result), ()) if (rows := entry["rows"](result))]


def fit_page(draw: Callable[[float], tuple[str, int]], max_size: int | None, least: str, do: str) -> str:
    """The page that ``draw`` makes, with as many pictures as fit into ``max_size`` bytes; None for any size.

    ``draw`` gets the number of bytes for pictures, and returns the page and the bytes of its pictures. With 0 bytes it
    draws the smallest page. If that is too large, a WriteError says so: ``least`` names the page, ``do`` is the advice.
    """
    room: float = math.inf if max_size is None else max_size
    while True:
        page, taken = draw(room)
        if max_size is None or (size := len(page.encode())) <= max_size:
            return page
        if room <= 0:
            raise WriteError(f"the page does not fit into {max_size:,} bytes", f"{least} it takes {size:,} bytes", do)
        room = max(0, min(room, taken) - (size - max_size) - _SPARE)


def items_that_fit(sizes: Sequence[Sequence[int]], room: float) -> int:
    """How many first items of each list fit into ``room`` bytes together."""
    total, longest = 0, max(map(len, sizes), default=0)
    for count in range(longest):
        total += sum(own[count] for own in sizes if count < len(own))
        if total > room:
            return count
    return longest


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: "" if value is None else printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (
        words,
        counted,
        percent,
        engineering,
        sortable,
        outline,
        panel_svg,
        chart_svg,
        chart_labels,
        chart_data,
    )
    environment.globals |= {function.__name__: function for function in functions} | {"file_name": os.path.basename}
    return environment


@cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@dataclass(frozen=True)
class RowView:
    """A row of a table, and what its view shows beside its fields.

    Attributes:
        row: The fields, as the command prints them.
        key: What findings on it name.
        values: Their ``histogram`` in equal intervals from ``low`` to ``high``, and the ``mean``.
        charts: Curves of its channels, or over the steps of a run.
    """

    row: Mapping[str, Any]
    key: str
    values: Mapping[str, Any] | None = None
    charts: Sequence[Chart] = ()


def result_table(title: str, noun: str, columns: Sequence[str], rows: Sequence[RowView]) -> dict[str, Any]:
    """A table of the page; ``columns`` are fields of the rows, shown if a row says something, ``noun`` names many rows.

    Some columns are for every table.
    """
    said = {name for view in rows for name, value in view.row.items() if words(value)} - {"name", "type", "findings"}
    shown = [name for name in columns if name in said]
    return {"title": title, "noun": noun, "shown": shown, "rows": rows, "has_values": any(view.values for view in rows)}


@dataclass(frozen=True)
class ResultPage:
    """What a page shows of a result.

    Attributes:
        kind: The question, such as ``Statistics of activations``.
        summary: Facts in the head, by name; ``weights`` that are random are named in red at the top.
        findings: What is wrong.
        tables: What `result_table` returns.
        charts: Curves of all rows.
        plot: All rows on one page, as the figure draws it.
        title: The first line, and ``lines`` under the verdict, unless the caller has others.
        judged: What the findings are about, see `verdict`.
    """

    kind: str
    summary: Mapping[str, Any]
    findings: Sequence[Finding]
    tables: Sequence[Mapping[str, Any]]
    charts: Sequence[Chart] = ()
    plot: RowPlot | None = None
    title: str = ""
    lines: Sequence[str] = ()
    judged: str = ""


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
        views = [view for table in page.tables for view in table["rows"]]
        about: dict[str, list[Finding]] = {}
        for finding in single(page.findings):
            about.setdefault(finding.layer, []).append(finding)
        own = {"title": title or page.title, "lines": lines or page.lines, "findings": ranked(page.findings)}
        return render(
            "results.html",
            ("page.css", "charts.css", "results.css"),
            ("page.js", "list.js", "charts.js", "results.js"),
            **vars(page) | own,
            verdict=verdict(page.findings, page.judged),
            is_random=is_random(page.summary.get("weights", "")),
            provenance=provenance or {},
            views=views,
            offsets=[0, *accumulate(len(table["rows"]) for table in page.tables)],
            places={view.key: number for number, view in reversed(list(enumerate(views)))},
            about=about,
        )

    return draw


def sortable(value: Any) -> str:
    """What a column is sorted by: a number as it is, and the number of values for a shape."""
    if isinstance(value, bool | int | float):
        return json.dumps(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, list | tuple) and value and all(isinstance(part, int) for part in value):
        return str(math.prod(value))
    return words(value)


def module_rows(items: Iterable[tuple[str, str, Any]]) -> list[SimpleNamespace]:
    """A row for each call in order of execution, each module before the calls in it.

    ``items`` are the path of the layer of each call, the name of the call, and facts. A row has its ``number`` in the
    list, the numbers of its ``parents`` from the outermost on, and its ``name``: of ``layer1.0.conv1`` the ``path`` is
    ``layer1.0.`` and the ``label`` is ``conv1``. The ``facts`` of a module are of its own call, None without one;
    ``parts`` are the facts of all calls in the row. A module that ``is_open`` shows them at first.
    """
    rows: list[SimpleNamespace] = []

    def append(name: str, parents: tuple[int, ...], facts: Any, parts: list[Any], is_module: bool = False) -> None:
        path = name[: name.rfind(".") + 1]
        words = {"name": name, "path": path, "label": name.removeprefix(path) or MODEL}
        place = {"number": len(rows), "parents": parents, "depth": len(parents)}
        rows.append(SimpleNamespace(**words, **place, facts=facts, parts=parts, is_module=is_module, is_open=False))

    def add(items: Iterable[tuple[str, str, Any]], depth: int, parents: tuple[int, ...]) -> None:
        """Append the rows of ``items``, whose paths share their first ``depth`` parts."""
        for path, run in groupby(items, key=lambda item: item[0].split(".")[: depth + 1]):
            inside = list(run)
            deeper = [item for item in inside if item[0].count(".") > depth]
            if not deeper or len(inside) == 1:
                for _, name, facts in inside:
                    append(name, parents, facts, [facts])
                continue
            own = [item for item in inside if item[0].count(".") <= depth]
            _, name, facts = own.pop() if own else ("", ".".join(path), None)  # a block ends after the layers in it
            below = (*parents, len(rows))
            append(name, parents, facts, [part for *_, part in inside], is_module=True)
            add(own, depth, below)
            add(deeper, depth + 1, below)

    add(items, 0, ())
    for depth in range(max((row.depth for row in rows), default=0)):  # level after level as long as the list is short
        if sum(row.depth <= depth + 1 for row in rows) > _UNFOLDED:
            break
        for row in rows:
            row.is_open |= row.is_module and row.depth == depth
    return rows
