"""Values of rows as JSON has them, and as text."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any

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


def text_of(value: Plain, number: Callable[[int | float], str] = repr) -> str:
    """``value`` as one text; ``number`` writes a number that stands alone (repr: the shortest exact one)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, dict):
        return " ".join(f"{key}:{text_of(item)}" for key, item in value.items())
    if isinstance(value, list):
        if all(item is None or (isinstance(item, int) and not isinstance(item, bool)) for item in value):
            return "x".join("?" if item is None else text_of(item) for item in value)
        return (" " if any(isinstance(item, list | dict) for item in value) else ",").join(map(text_of, value))
    return value


def rounded(value: int | float) -> str:
    """A number for people; up to 9999 an integer is read whole: 2048 channels."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if abs(value) >= 10_000 else str(value)
