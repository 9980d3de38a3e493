"""Say where what a command line did now differs from what it did when the golden file was written."""

import base64
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
RELATIVE, ABSOLUTE = 1e-4, 1e-6
TOLERANCES = {"shares": {"absolute": 0.001}, "edges": {"relative": 0.003}}  # of pictures
MEAN_LEVELS, MOST_LEVELS = 1.0, 12.0  # of grey, of 255, in a thumbnail


def differences(golden: Any, now: Any, place: str = "") -> Iterator[str]:
    """A line for each difference: numbers within a tolerance, all else exactly, the order of keys too."""
    if place.endswith("thumbnail") and isinstance(golden, str) and isinstance(now, str):
        yield from _thumbnail_differences(golden, now, place)
    elif isinstance(golden, dict) and isinstance(now, dict):
        if list(golden) != list(now):
            yield f"{place}: keys were {list(golden)}, are {list(now)}"
        for key in golden.keys() & now.keys():
            yield from differences(golden[key], now[key], f"{place}.{key}")
    elif isinstance(golden, list) and isinstance(now, list):
        if len(golden) != len(now):
            yield f"{place}: {len(golden)} items, now {len(now)}"
        for number, (before, after) in enumerate(zip(golden, now, strict=False)):
            yield from differences(before, after, f"{place}[{number}]")
    elif not _equal(golden, now, next((within for name, within in TOLERANCES.items() if f".{name}[" in place), {})):
        yield f"{place}: was {golden!r}, is {now!r}"


def _equal(golden: Any, now: Any, within: dict[str, float]) -> bool:
    if type(golden) is not type(now):
        return False
    if isinstance(golden, float):
        return _close(golden, now, **within) or (math.isnan(golden) and math.isnan(now))
    if isinstance(golden, str) and golden != now:
        return _same_text(golden, now)
    return bool(golden == now)


def _close(golden: float, now: float, absolute: float = ABSOLUTE, relative: float = RELATIVE) -> bool:
    return math.isclose(golden, now, rel_tol=relative, abs_tol=absolute)


def _same_text(golden: str, now: str) -> bool:
    """Equal but for decimals that are close; columns may be wider for them. Whole numbers must be equal."""
    words = [re.sub("(?<=#) +| +(?=#)", " ", re.sub("  +", "  ", NUMBER.sub("#", text))) for text in (golden, now)]
    if words[0] != words[1]:
        return False
    before, after = NUMBER.findall(golden), NUMBER.findall(now)
    return len(before) == len(after) and all(map(_same_number, before, after))


def _same_number(golden: str, now: str) -> bool:
    if golden == now:
        return True
    if not any(mark in number for mark in ".e" for number in (golden, now)):
        return False
    rounding = max(_last_place(golden), _last_place(now)) if len(golden) < 8 else 0.0
    return _close(float(golden.replace(",", "")), float(now.replace(",", "")), max(ABSOLUTE, 1.01 * rounding))


def _last_place(number: str) -> float:
    """What 1 in the last digit is worth: 0.01 of 5.25."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def _thumbnail_differences(golden: str, now: str, place: str) -> Iterator[str]:
    before, after = (np.frombuffer(base64.b64decode(text), np.uint8).astype(float) for text in (golden, now))
    if before.shape != after.shape:
        yield f"{place}: of another size"
        return
    moved = np.abs(before - after)
    if moved.mean() > MEAN_LEVELS or moved.max() > MOST_LEVELS:
        yield f"{place}: colours moved by {moved.mean():.1f} levels in the mean, {moved.max():.0f} at most"
