"""The palette of a channel grid: levels of a colour map, then the fixed colours for all that is no value."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hookscope.errors import UsageError, nearest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import ImageFont

__all__ = ["LEVELS", "colour_map_names", "font", "palette"]

# A palette picture has 256 colours: these many for values, the others for what must never look like one.
LEVELS = 244
BACKGROUND, TEXT_FAINT, TEXT_HALF, TEXT_STRONG, TEXT, BAR, TRACK, CONSTANT, NAN, PLUS_INF, MINUS_INF, SPARE = range(
    LEVELS, 256
)
_FIXED = {
    BACKGROUND: (255, 255, 255),
    TEXT_FAINT: (200, 200, 200),
    TEXT_HALF: (140, 140, 140),
    TEXT_STRONG: (80, 80, 80),
    TEXT: (20, 20, 20),
    BAR: (214, 93, 14),
    TRACK: (228, 228, 228),
    CONSTANT: (190, 190, 190),
    NAN: (255, 0, 255),
    PLUS_INF: (255, 0, 0),
    MINUS_INF: (0, 200, 255),
    SPARE: (0, 0, 0),
}


@contextmanager
def _matplotlib_by_itself() -> Iterator[None]:
    """Import matplotlib without the settings around us: a Jupyter backend in MPLBACKEND makes the import fail, a
    ``matplotlibrc`` in the current folder may not even parse."""
    spec = find_spec("matplotlib")
    own = os.path.join(os.path.dirname(spec.origin), "mpl-data", "matplotlibrc") if spec and spec.origin else None
    kept = {name: os.environ.pop(name, None) for name in ("MPLBACKEND", "MATPLOTLIBRC")}
    if own:
        os.environ["MATPLOTLIBRC"] = own
    exists = os.path.exists  # matplotlib looks into the current folder before it asks MATPLOTLIBRC
    os.path.exists = lambda path: path != "matplotlibrc" and exists(path)
    try:
        yield
    finally:
        os.path.exists = exists
        os.environ.pop("MATPLOTLIBRC", None)
        os.environ.update({name: value for name, value in kept.items() if value is not None})


def _matplotlib() -> Any:
    if "matplotlib" not in sys.modules:
        backend = os.environ.get("MPLBACKEND")
        with _matplotlib_by_itself():
            import matplotlib
        _give_back_settings(matplotlib, backend)
    import matplotlib

    return matplotlib


def _give_back_settings(matplotlib: Any, backend: str | None) -> None:
    """Read the settings around us after all, as the import would have: the person's own plots depend on them."""
    logging.disable(logging.CRITICAL)
    try:
        with suppress(Exception):
            found = matplotlib.rc_params_from_file(matplotlib.matplotlib_fname(), use_default_template=False)
            backend = backend or dict.pop(found, "backend", None)  # to look at it would import pyplot
            matplotlib.rcParams.update(found)
        with suppress(ValueError):
            matplotlib.rcParams.update({"backend": backend} if backend else {})
    finally:
        logging.disable(logging.NOTSET)


def colour_map_names() -> list[str]:
    """Every colour map matplotlib knows."""
    return list(_matplotlib().colormaps)


@cache
def palette(cmap: str) -> NDArray[np.uint8]:
    """256 colours ``(256, 3)``: ``LEVELS`` of the colour map, then the fixed ones.

    Raises:
        UsageError: for a colour map matplotlib does not have.

    Example:
        >>> palette("gray")[[0, LEVELS - 1]].tolist()
        [[0, 0, 0], [255, 255, 255]]
    """
    import numpy as np

    matplotlib = _matplotlib()
    if cmap not in matplotlib.colormaps:
        raise UsageError(f"no colour map '{cmap}'", nearest(cmap, colour_map_names()), "take one of matplotlib's names")
    colours = np.zeros((256, 3), np.uint8)
    colours[:LEVELS] = matplotlib.colormaps[cmap](np.linspace(0, 1, LEVELS), bytes=True)[:, :3]
    for at, colour in _FIXED.items():
        colours[at] = colour
    return colours


@cache
def font(size: int, bold: bool = False) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings along: it has the letters that layer and file names may hold."""
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    try:
        return ImageFont.truetype(os.path.join(_matplotlib().get_data_path(), "fonts", "ttf", name), size)
    except (OSError, ImportError):
        return ImageFont.load_default()
