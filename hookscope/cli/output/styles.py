"""The colours of tables: the styles, and which cells have one."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import click

from hookscope import models
from hookscope.display import rounded as rounded, text_of as text_of
from hookscope.findings import CATALOGUE, SEVERITIES

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def plain(value: Any, finite: bool = False) -> Plain:
    """``value`` in the types of JSON, numbers of numpy too; with ``finite``, NaN and Inf become None."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) or not finite else None
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item, finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, finite) for item in value]
    raise TypeError(f"no format can write a value of type {type(value).__name__}")


def plain_json(value: Any) -> Plain:
    """``value`` as JSON holds it; NaN and Inf, which JSON does not have, become None."""
    return plain(value, finite=True)


STYLES: Mapping[str, Mapping[str, Any]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "note": {"fg": "cyan"},
    "good": {"fg": "green"},
    "faint": {"dim": True},
}
"""What a style looks like; each severity is a style."""


def _worst(findings: list[str]) -> str:
    severities = {CATALOGUE[name].severity for name in findings if name in CATALOGUE}
    return next((severity for severity in SEVERITIES if severity in severities), "")


def _if(style: str) -> Callable[[Any], str]:
    return lambda value: style if value else ""


CELLS: Mapping[str, Callable[[Any], str]] = {
    "severity": str,
    "findings": _worst,
    "finding": lambda name: _worst([name]),
    "weights": lambda text: "error" if models.is_random(str(text)) else "",
    "holds": lambda holds: "good" if holds else "error",
    "dead": _if("warning"),
    "low_probability": _if("warning"),
    "collapsed": _if("warning"),
    **dict.fromkeys(("nan", "inf", "nonfinite", "output_nonfinite"), _if("error")),
}
"""The style of a cell by field and value, in every table and caption. The value is not None."""


def cell_style(field: str, value: Any) -> str:
    """One of `STYLES`, or "" for a cell without colour; NaN and Inf are errors in every column."""
    if isinstance(value, float) and not math.isfinite(value):
        return "error"
    return CELLS[field](value) if field in CELLS and value is not None else ""


def styled(text: str, style: str, colours: bool = True) -> str:
    """``text`` in one of `STYLES`; as it is for an unknown style and without ``colours``."""
    return click.style(text, **STYLES[style]) if colours and style in STYLES and text else text


def has_colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with colours; NO_COLOR and, after it, FORCE_COLOR decide for any stream."""
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"
