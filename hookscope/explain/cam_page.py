"""The page of class activation maps: maps over the photograph, by layer and class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image
from torch import nn

from hookscope.drawing import Heading, Heat, Panel, Row, draw_page, with_provenance
from hookscope.errors import UsageError
from hookscope.explain.attention_methods import ATTENTION_METHODS
from hookscope.explain.cam_maps import ClassActivationMap, maps_by_class, shared_tops
from hookscope.explain.page import ONE_COLOUR, VALUE, OverlaySource, answer_facts, answer_lines, why_unseen
from hookscope.findings import counted, percent
from hookscope.images import InputImage
from hookscope.models import LoadedModel

_BESIDE = 4  # more panels than this make several rows
_CLASSES = 5  # classes of a layer in a row, at most
_OF_POSITIONS = ("hirescam", "layercam")
_SHARE = "share of the layer's highest value"


def draw_cam(
    maps: Sequence[ClassActivationMap],
    photograph: Image.Image | InputImage,
    net: LoadedModel | nn.Module | None = None,
    *,
    scale_of: Sequence[ClassActivationMap] = (),
    cmap: str | None = None,
    width: int | None = None,
) -> Image.Image:
    """Draw class activation maps of one image over the photograph, which is grey and pale under them.

    Several maps of one class stand side by side after the photograph. Of several classes there is a row for each layer,
    below the photograph. The classes of a layer share a scale, and values of 0 and below are not drawn. A cross marks
    the highest value, where it has at least a tenth of the scale. A class that the model does not see, a map without a
    value above 0 and random weights are named in red.

    The image holds the facts of its maps as JSON in ``image.info["hookscope"]``.

    Args:
        maps: What `class_activation_maps` returns, or `fuse_maps` makes of it.
        photograph: The photograph that the input was made of.
        net: The model. A `LoadedModel` says which part of the photograph the network saw, and weights and
            preprocessing; with other models the maps cover the whole photograph.
        scale_of: Further maps that the scale includes, such as those of classes on other pages.
        cmap: A colour map of matplotlib; None for inferno.
        width: Width of a map in pixels; None for that of the photograph, as far as the page has room.

    Raises:
        UsageError: for no maps, an unknown colour map, or a page of more than 200 million pixels.

    Example:
        >>> import hookscope, torch
        >>> from PIL import Image
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> maps = hookscope.class_activation_maps(net, torch.ones(1, 3, 8, 8), target="top:2")
        >>> draw_cam(maps, Image.new("RGB", (400, 400)), net, width=200).size[0] > 2 * 200
        True
    """
    if not maps:
        raise UsageError("no class activation map to draw")
    source, tops, cmap = OverlaySource.of(photograph, net), shared_tops([*maps, *scale_of]), cmap or ONE_COLOUR
    if len(maps_by_class(maps)) == 1:
        page = _page_of_class(source, maps, tops, cmap, width)
    else:
        page = _page_of_classes(source, maps, tops, cmap, width)
    return with_provenance(page, _provenance(source, maps, cmap, page, tops))


def _page_of_class(
    source: OverlaySource, maps: Sequence[ClassActivationMap], tops: Mapping[str, float], cmap: str, width: int | None
) -> Image.Image:
    """The maps of one class side by side, several after the photograph."""
    panels = [_panel(source, cam, [cam.call.key, _shape_line(cam)], tops[cam.call.key]) for cam in maps]
    panels = [source.panel, *panels] if len(panels) > 1 else panels
    answer, photograph, columns = maps[0].prediction, source.photograph, len(panels)
    heading = source.heading(answer_lines(answer), maps[0].method, why_unseen(answer))
    if len(panels) > _BESIDE:  # a page of about 3:2
        columns = max(1, min(len(panels), round(math.sqrt(len(panels) * 1.5 * photograph.height / photograph.width))))
    rows = [Row(panels[at : at + columns]) for at in range(0, len(panels), columns)]
    return _drawn(source, heading, rows, cmap, width, len(panels))


def _page_of_classes(
    source: OverlaySource, maps: Sequence[ClassActivationMap], tops: Mapping[str, float], cmap: str, width: int | None
) -> Image.Image:
    """A row for each layer with the maps of all classes, below the photograph."""
    rows, by_layer = [], dict[str, list[ClassActivationMap]]()
    for cam in maps:
        by_layer.setdefault(cam.call.key, []).append(cam)
    for layer, cams in by_layer.items():
        words = [layer, f"{_shape_line(cams[0])}, highest value of all {_things(cams[0])} {max(tops[layer], 0.0):.3g}"]
        panels = [_panel(source, cam, _class_lines(cam), tops[layer], True) for cam in cams]
        columns = math.ceil(len(panels) / math.ceil(len(panels) / _CLASSES))  # rows of about the same length
        for at in range(0, len(panels), columns):
            rows.append(Row(panels[at : at + columns], () if at else words))
    classes = len(maps_by_class(maps))
    title = f"{maps[0].method} of {classes} {_things(maps[0])} in {counted(len(by_layer), 'layer')}"
    heading = source.heading([title], maps[0].method, photograph=True, scale=_SHARE)
    return _drawn(source, heading, rows, cmap, width, len(maps) + 1)


def _drawn(
    source: OverlaySource, heading: Heading, rows: Sequence[Row], cmap: str, width: int | None, panels: int
) -> Image.Image:
    if width is None and (width := source.fitting_width(panels)) is not None:
        words = f"drawn at {percent(width / source.photograph.width)} of its size"
        heading = replace(heading, words=[*heading.words[:-1], f"{heading.words[-1]}, {words}"])
    return draw_page(source.photograph, heading, rows, cmap, width)


def _things(cam: ClassActivationMap) -> str:
    return "targets" if cam.prediction.target else "classes"


def why_empty(cam: ClassActivationMap) -> str:
    """Why no value of the map is above 0; empty if one is."""
    if cam.still.max() > 0:
        return ""
    if cam.unreached:
        return "all zero: the score does not depend on any position of this map"
    zero = "no value is above 0" if cam.values.any() else "all zero"
    return f"{zero}: no position of this layer raises the score"


def why_outside(cam: ClassActivationMap) -> str:
    """That the highest cell of the map of a detected box lies outside the box; empty if it does not."""
    answer = cam.prediction
    if cam.peak is None or answer.box is None or answer.index is None or answer.probability is not None:
        return ""  # around a region: what its pixels depend on may lie elsewhere
    (height, width), (high, wide) = cam.seen, cam.values.shape[-2:]
    y, x, half = cam.peak[0] * height, cam.peak[1] * width, (height / high / 2, width / wide / 2)
    left, top, right, bottom = answer.box
    if left <= x + half[1] and x - half[1] <= right and top <= y + half[0] and y - half[0] <= bottom:
        return ""
    do = "" if cam.method in _OF_POSITIONS else f"; {' and '.join(_OF_POSITIONS)} show only what its score depends on"
    return f"the highest value lies outside the box{do}"


def _class_lines(cam: ClassActivationMap) -> list[str]:
    highest = float(cam.still.max()) + 0.0  # no -0
    return [*answer_lines(cam.prediction), f"highest {highest:.3g}"]


def _panel(
    source: OverlaySource, cam: ClassActivationMap, words: Sequence[str], top: float, of_classes: bool = False
) -> Panel:
    """A map on a scale from 0 to ``top``; one ``of_classes`` has its scale in the heading."""
    values = cam.still
    low, high = float(values.min()), float(values.max())
    extremes = [f"highest {high:.3g}, of all {_things(cam)} {top:.3g}"] if 0 < high < top and not of_classes else []
    extremes += [f"lowest {low:.3g}, not drawn"] if low < 0 else []
    alarm = why_empty(cam) or (why_unseen(cam.prediction) if of_classes else "")
    unit = "mean, each map 0..1" if cam.fused else VALUE
    heat = Heat(values, source.box, top, source.peak_in(values), frame=source.frame_of(cam.prediction, cam.seen))
    extremes += ["hardly visible on this scale"] if heat.peak and not heat.mark else []
    return Panel(heat, [*words, *extremes], alarm, unit if high > 0 and not of_classes else "")


def _shape_line(cam: ClassActivationMap) -> str:
    *frames, height, width = cam.values.shape
    clip = [f"mean of {counted(frames[0], 'frame')}"] if frames else []
    clip += [f"mean of {cam.variants} variants of the image"] if cam.variants > 1 else []
    parts = counted(cam.channels, "head" if cam.method in ATTENTION_METHODS else "channel")
    return ", ".join([cam.call.type, f"{parts} of {height}×{width}", *clip])


def _provenance(
    source: OverlaySource,
    maps: Sequence[ClassActivationMap],
    cmap: str,
    page: Image.Image,
    tops: Mapping[str, float],
) -> dict[str, Any]:
    facts = [
        {
            "index": cam.call.index,
            "order": cam.call.order,
            "layer": cam.call.name,
            "call": cam.call.call,
            "type": cam.call.type,
            **answer_facts(cam.prediction),
            "shape": list(cam.values.shape),
            "low": float(cam.values.min()),
            "high": float(cam.values.max()),
            "top": tops[cam.call.key],
        }
        for cam in maps
    ]
    how = {"fused": maps[0].fused} | ({"variants": maps[0].variants} if maps[0].variants > 1 else {})
    return {**source.provenance(maps[0].method, cmap, page.size), "maps": facts, **how}
