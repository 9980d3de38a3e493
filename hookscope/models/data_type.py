"""The data types in which models compute, without torch; a new one is one line."""

from __future__ import annotations

from typing import NamedTuple


class DataType(NamedTuple):
    """A floating-point type of torch.

    Attributes:
        spacing: The distance of numbers near 1.
        in_files: Whether NumPy and files of features have it.
        in_autocast: Whether `torch.autocast` takes it.
    """

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
AUTOCAST_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.in_autocast)
FILE_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.in_files)
DTYPE_WORDS = (*DTYPES, AUTOCAST, *(f"{AUTOCAST}:{name}" for name in AUTOCAST_DTYPES))
"""What parse_dtype reads."""
