"""What the user chooses of the data type and the preprocessing as types, parsed once, without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookscope.errors import UsageError, nearest


class DataType(NamedTuple):
    """A floating-point type of torch; ``spacing`` is the distance of numbers near 1."""

    spacing: float
    in_files: bool = True
    in_autocast: bool = False


DTYPES = {
    "float16": DataType(2**-10, in_autocast=True),
    "bfloat16": DataType(2**-7, in_files=False, in_autocast=True),
    "float32": DataType(2**-23),
    "float64": DataType(2**-52),
}
AUTOCAST = "autocast"


def autocast_dtypes() -> list[str]:
    return [name for name, dtype in DTYPES.items() if dtype.in_autocast]


def file_dtypes() -> list[str]:
    return [name for name, dtype in DTYPES.items() if dtype.in_files]


def dtype_words() -> list[str]:
    """What parse_dtype reads."""
    return [*DTYPES, AUTOCAST, *(f"{AUTOCAST}:{name}" for name in autocast_dtypes())]


PREPROCESS_WORDS = ("weights", "imagenet", "half", "stretch", "none")
"""The words for preprocessing, beside ``file.py:function``."""
RESIZE_WORDS = ("shorter", "stretch", "pad")

LARGEST_SIDE = 16384


@dataclass(frozen=True)
class PreprocessChoice:
    """How pictures become inputs; None for what the model says.

    Attributes:
        base: ``weights``: as the model says; ``imagenet``: resize 256, crop 224, ImageNet's mean and standard
            deviation; ``half``: the same with 0.5 and 0.5; ``stretch``: to the input size, range 0..1; ``none``: the
            picture's own size, range 0..1; ``file.py:function``, or what that name means.
        mean: What is subtracted, one number or one for each channel.
        std: What divides afterwards, in the same form.
        range: What black and white become before mean and std.
        resize: ``shorter``, ``stretch`` or ``pad``, and the shorter side before the crop, 0 for the side of the input.
        name: How pictures call a function.
    """

    base: Any = "weights"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    range: tuple[float, float] | None = None
    resize: tuple[str, int] | None = None
    name: str = ""

    @classmethod
    def parse(
        cls, preprocess: Any = "weights", mean: Any = None, std: Any = None, range: Any = None, resize: Any = None
    ) -> PreprocessChoice:
        """Read the texts of the options, or the same as numbers and functions; else a UsageError."""
        if isinstance(preprocess, cls):
            return preprocess
        base, name = preprocess, f"preprocess {getattr(preprocess, '__name__', type(preprocess).__name__)}"
        if isinstance(preprocess, str) or not callable(preprocess):
            base = name = parse_preprocess(preprocess)
        choice = cls(
            base,
            None if mean is None else parse_numbers(mean, "mean"),
            None if std is None else parse_numbers(std, "std"),
            None if range is None else parse_range(range),
            None if resize is None else parse_resize(resize),
            name,
        )
        if (choice.mean is None) != (choice.std is None):
            given, missing, usual = ("mean", "std", 1) if choice.std is None else ("std", "mean", 0)
            asked = f"‹{given}|--{given}› needs ‹{missing}|--{missing}›"
            raise UsageError(asked, do=f"add ‹{missing}={usual}|--{missing} {usual}›")
        return choice

    def check(self, input_size: Sequence[int] | None) -> None:
        """Refuse parts that contradict each other."""
        given = "an input size" if input_size is not None else "‹resize|--resize›" if self.resize is not None else ""
        if self.base == "none" and given:
            do = f"leave {given} out, or use ‹preprocess='stretch'|--preprocess stretch›"
            raise UsageError("‹preprocess='none'|--preprocess none› keeps the image's own size", do=do)
        if self.base == "stretch" and self.resize is not None and self.resize[0] != "stretch":
            asked = f"‹preprocess='stretch'|--preprocess stretch› contradicts ‹resize|--resize› {self.resize[0]}"
            raise UsageError(asked, do="leave one of them out")


def parse_preprocess(text: Any) -> str:
    """A word, or ``file.py:function``."""
    if isinstance(text, str) and (text in PREPROCESS_WORDS or re.fullmatch(r".+:\w+", text)):
        return text
    words = f"{', '.join(PREPROCESS_WORDS)} and file.py:function"
    near = nearest(text, PREPROCESS_WORDS) if isinstance(text, str) else ""
    raise UsageError(f"no preprocessing '{text}'", f"there are {words}" + (f" ({near})" if near else ""))


def parse_numbers(value: Any, name: str) -> tuple[float, ...]:
    """``0.5`` or ``0.485,0.456,0.406``; ``std`` is above 0."""
    parts = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else value
    try:
        numbers = tuple(map(_number, parts if isinstance(parts, Sequence) else [parts]))
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or (name == "std" and min(numbers) <= 0):
        asked = f"‹{name}|--{name}› '{value}' is not a list of numbers" + (" above 0" if name == "std" else "")
        raise UsageError(asked, do="give one number, or one for each channel, such as 0.485,0.456,0.406")
    return numbers


def parse_range(value: Any) -> tuple[float, float]:
    """``0..1``, ``-1..1`` or ``0..255``."""
    try:
        low, high = map(_number, value.split("..") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        low = high = 0.0
    if not low < high:
        do = "write LOW..HIGH, such as 0..1, -1..1 or 0..255"
        raise UsageError(f"‹range|--range› '{value}' is not a range", do=do)
    return low, high


def parse_resize(value: Any) -> tuple[str, int]:
    """``shorter``, ``shorter:256``, ``stretch`` or ``pad``."""
    if isinstance(value, tuple):
        return value
    match = re.fullmatch(r"(shorter|stretch|pad)|(shorter):(\d{1,5})", str(value))
    shorter = int(match[3] or 0) if match else 0
    if match is None or shorter > LARGEST_SIDE or (match[3] and not shorter):
        raise UsageError(f"no resize '{value}'", f"there are {', '.join(RESIZE_WORDS)} and shorter:PIXELS")
    return match[1] or match[2], shorter


def _number(part: Any) -> float:
    number = float(part.replace("−", "-") if isinstance(part, str) else part)
    if not math.isfinite(number):
        raise ValueError(part)
    return number
