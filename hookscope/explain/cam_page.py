"""Class activation maps as pages: the overlay of one class, and the sheet of several classes and layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import MOST_PIXELS, Heat, Panel, draw_page
from hookscope.explain.cam import ClassActivationMap
from hookscope.explain.overlay_source import OverlaySource, answer_facts, answer_lines
from hookscope.findings import counted, percent

_CELL = 300  # width of a panel of the sheet, in pixels
_SCALE = "value of the map"
_LARGEST = MOST_PIXELS * 3 // 4  # of all panels together: words and gaps take up to a third more
_BESIDE = 4  # so many maps stand side by side; more of them make rows


def draw_overlay(
    subject: OverlaySource, maps: Sequence[ClassActivationMap], cmap: str = "inferno", fused: bool = False
) -> tuple[Image.Image, dict[str, Any]]:
    """The maps of one class, side by side over the photograph, and their provenance.

    The photograph has its own size, unless that makes several maps more than 60 million pixels together; then
    the page says how large it is drawn.

    Args:
        subject: The photograph and where it comes from.
        maps: Of one class.
        cmap: Colour map.
        fused: Whether they are made by `fused`, so that their values are shares.

    Raises:
        UsageError: for a colour map that does not exist.
    """
    photograph = subject.photograph
    columns = len(maps) if len(maps) <= _BESIDE else _columns(len(maps), photograph.width, photograph.height)
    scale = "mean, each map 0..1" if fused else _SCALE
    panels = [_panel(subject, one, [one.call.key, _shape_line(one)], scale) for one in maps]
    width = _width_of(photograph, len(maps))
    origin = subject.lines(maps[0].method)
    if width is not None:
        origin[-1] += f"  drawn at {percent(width / photograph.width)} of its size"
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    page = draw_page(
        photograph, [*answer_lines(maps[0].prediction), *origin], rows, cmap, width, warning=subject.warning
    )
    return page, {**_provenance(subject, maps, cmap, page), "fused": fused}


def draw_sheet(
    subject: OverlaySource, maps: Sequence[ClassActivationMap], cmap: str = "inferno"
) -> tuple[Image.Image, dict[str, Any]]:
    """One page: a row for each layer, in it the photograph and the maps of all classes on one scale; and provenance.

    Raises:
        UsageError: for a colour map that does not exist, or more maps than a page can hold.
    """
    by_layer: dict[str, list[ClassActivationMap]] = {}
    for one in maps:
        by_layer.setdefault(one.call.key, []).append(one)
    rows = []
    for layer, found in by_layer.items():
        first = Panel(None, [layer, _shape_line(found[0])])
        # one scale for the classes of a layer: with a scale of its own, a class that is hardly there looks as strong
        top = max(float(still_of(one).max()) for one in found)
        rows.append([first, *(_panel(subject, one, _with_highest(one), _SCALE, top) for one in found)])
    classes = len({one.prediction.index for one in maps})
    heading = f"{subject.image}  {counted(len(by_layer), 'layer')}, {classes} {'class' if classes == 1 else 'classes'}"
    page = draw_page(
        subject.photograph, [heading, *subject.lines(maps[0].method)], rows, cmap, _CELL, warning=subject.warning
    )
    return page, _provenance(subject, maps, cmap, page)


def _columns(count: int, width: int, height: int) -> int:
    """How many of ``count`` panels stand beside each other on a page of about 3:2."""
    return max(1, min(count, round(math.sqrt(count * 1.5 * height / width))))


def _width_of(photograph: Image.Image, count: int) -> int | None:
    """How wide each of several panels is where their own size is too much, None where it is not."""
    pixels = count * photograph.width * photograph.height
    return int(photograph.width * math.sqrt(_LARGEST / pixels)) if count > 1 and pixels > _LARGEST else None


def still_of(one: ClassActivationMap) -> NDArray[np.float32]:
    """The map ``(h, w)`` that is drawn; of a clip the mean over its frames."""
    values: NDArray[np.float32] = one.values.mean(0) if one.values.ndim == 3 else one.values
    return values


def why_empty(one: ClassActivationMap) -> str:
    """What to say of a map in which nothing is above 0, empty for the others."""
    if still_of(one).max() > 0:
        return ""
    if one.unreached:
        return "all zero: the score does not depend on any place of this map"
    zero = "nothing is above 0" if one.values.any() else "all zero"
    return f"{zero}: no place of this layer speaks for this class"


def _with_highest(one: ClassActivationMap) -> list[str]:
    highest = float(still_of(one).max()) + 0.0  # no -0
    return [*answer_lines(one.prediction), f"highest {highest:.3g}"]


def _panel(
    subject: OverlaySource, one: ClassActivationMap, words: Sequence[str], scale: str = _SCALE, top: float | None = None
) -> Panel:
    values = still_of(one)
    low, high = float(values.min()), float(values.max())
    below = [f"lowest {low:.3g}, not drawn"] if low < 0 else []
    heat = Heat(values, subject.box, high if top is None else top, subject.peak_in(values))
    return Panel(heat, [*words, *below], why_empty(one), scale if high > 0 else "")


def _shape_line(one: ClassActivationMap) -> str:
    *frames, high, wide = one.values.shape
    clip = [f"mean of {counted(frames[0], 'frame')}"] if frames else []
    return "  ".join([one.call.type, f"{counted(one.channels, 'channel')} of {high}×{wide}", *clip])


def _provenance(
    subject: OverlaySource, maps: Iterable[ClassActivationMap], cmap: str, page: Image.Image
) -> dict[str, Any]:
    maps = list(maps)
    return {**subject.provenance(maps[0].method, cmap, page.size), "maps": [_one_map(one) for one in maps]}


def _one_map(one: ClassActivationMap) -> dict[str, Any]:
    return {
        "layer": one.call.name,
        "call": one.call.call,
        "type": one.call.type,
        **answer_facts(one.prediction),
        "shape": list(one.values.shape),
        "low": float(one.values.min()),
        "high": float(one.values.max()),
    }
