"""What a run over images calls while it goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hookscope.errors import HookscopeError, printable
from hookscope.images.reader import ImageWarning


def raise_error(position: int, name: str, error: HookscopeError) -> None:
    """The default of ``Listener.skipped``, which ends the run."""
    raise error


def warn_of_image(name: str, text: str) -> None:
    """The default of ``Listener.note``, which issues an `ImageWarning`."""
    warnings.warn(f"{printable(name)}: {text}", ImageWarning, stacklevel=2)


def _ignore(*arguments: Any) -> None:
    pass


@dataclass(frozen=True)
class Listener:
    """Functions that a run over images calls while it goes on.

    Attributes:
        start: Gets the number of images that an earlier run has done.
        progress: Gets the number of images in each batch, skipped ones included.
        skipped: Gets position, name and error of an image that cannot be used; raises the error by default.
        note: Gets a name and a note on it; warns by default.
        interrupt: Gets the number of images that are saved when an exception ends a run with a file.

    Example:
        >>> Listener(skipped=lambda position, name, error: print(f"{position}: {error}")).skipped(3, "a.png", "empty")
        3: empty
    """

    start: Callable[[int], None] = _ignore
    progress: Callable[[int], None] = _ignore
    skipped: Callable[[int, str, HookscopeError], None] = raise_error
    note: Callable[[str, str], None] = warn_of_image
    interrupt: Callable[[int], None] = _ignore
