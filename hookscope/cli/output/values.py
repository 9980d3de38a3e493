"""Values of rows as JSON has them."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

from hookscope.display import rounded as rounded, text_of as text_of

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
