"""Channels and positions of an intervention, parsed from text or Python values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import index as as_index
from typing import Any

from hookscope.errors import UsageError

_MOST = 10_000_000
_EXAMPLE = {"positions": "write 0-9x5-14, a range for each axis", "channels": "write 0-31 or 0-31,40"}
_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")


class Ranges(tuple[int, ...]):
    """Sorted distinct integers; ``str`` shows them as ranges."""

    __slots__ = ()

    def __new__(cls, numbers: Iterable[int]) -> Ranges:
        return super().__new__(cls, sorted(set(numbers)))

    def __str__(self) -> str:
        runs: list[list[int]] = []
        for number in self:
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        return ",".join(f"{first}-{last}" if first != last else f"{first}" for first, last in runs)


def parse_channels(value: Any) -> Ranges | None:
    """Parse ``"0-31,40"``, a number, or several of either."""
    if value is None:
        return None
    if isinstance(value, str):
        spans = [_span("channels", value, part) for part in value.split(",")]
        if sum(last - first for first, last in spans) > _MOST:
            raise UsageError(f"channels '{value}' are too many for a tensor")
        return Ranges(number for first, last in spans for number in range(first, last + 1))
    try:
        number = as_index(value)  # first: a tensor of one number cannot be iterated
    except TypeError:
        if isinstance(value, Iterable) and getattr(value, "ndim", None) != 0:
            return Ranges(number for item in value for number in parse_channels(item) or ())
        raise UsageError(f"channels cannot be {type_with_article(value)}", do=_EXAMPLE["channels"]) from None
    if number < 0:
        raise UsageError(f"bad channels {number}", do="channels count from 0")
    return Ranges([number])


def parse_positions(value: Any) -> tuple[tuple[int, int], ...] | None:
    """Parse ``"0-9x5-14"`` into first and last position of each axis; pairs of numbers are checked."""
    if value is None:
        return None
    if isinstance(value, str):
        return tuple(_span("positions", value, part) for part in re.split("[x×]", value))
    try:
        spans = [(as_index(first), as_index(last)) for first, last in value]
    except (TypeError, ValueError):
        asked = f"positions cannot be {type_with_article(value)}"
        raise UsageError(asked, do="give (first, last) for each axis, or a text such as 0-9x5-14") from None
    return tuple(_span("positions", str(value), f"{first}-{last}") for first, last in spans)


def type_with_article(value: Any) -> str:
    """The class name of ``value`` with its article, for an error."""
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _span(what: str, whole: str, part: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(part)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"bad {what} '{whole}'", do=_EXAMPLE[what])
    return int(match[1]), int(match[2] or match[1])
