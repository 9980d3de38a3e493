"""One file of HTML from a template: styles and scripts in it, and a policy that forbids every request.

A page of a result that is too large leaves pictures out until it fits (`fit_page`). `section` adds a table to a page.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hookscope.display import words
from hookscope.errors import WriteError, printable
from hookscope.report.charts import chart_data, chart_labels, chart_svg, panel_svg

MAX_SIZE = 50_000_000
"""The largest size of a page in bytes that browsers open at once."""

_FOLDER = Path(__file__).parent
_SPARE = 2_000  # bytes: digits of numbers of what is left out

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    """A table of a page: its title, a line of explanation, and the rows that a result has."""

    title: str
    hint: str
    rows: Callable[[Any], Rows]


SECTIONS: dict[type, list[Section]] = {}
"""What `section` added to the page of each kind of result."""


def section(kind: type, title: str) -> Callable[[Callable[[Any], Rows]], Callable[[Any], Rows]]:
    """Add a table to the page of results of a kind, such as `Inspection`; without rows it is not shown.

    The decorated function makes rows of a result, and its docstring explains the table.
    """

    def add(rows: Callable[[Any], Rows]) -> Callable[[Any], Rows]:
        SECTIONS.setdefault(kind, []).append(Section(title, rows.__doc__ or "", rows))
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


def added_sections(result: Any) -> list[tuple[Section, Rows]]:
    """The sections that were added to the page of this kind of result, and their rows."""
    return [(each, rows) for each in SECTIONS.get(type(result), ()) if (rows := each.rows(result))]


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
        finalize=_as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = {"panel_svg": panel_svg, "chart_svg": chart_svg, "chart_labels": chart_labels, "chart_data": chart_data}
    environment.globals |= {"words": words, **drawn}
    return environment


def _as_text(value: Any) -> Any:
    if value is None:
        return ""
    return printable(value) if type(value) is str else value


@cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
