"""Pages of class activation maps and saliency maps: the maps over the photograph, with facts and provenance."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import MOST_PIXELS, Heat, Origin, Panel, draw_page
from hookscope.explain.cam import ClassActivationMap, peak_of, shared_tops
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.findings import counted, percent
from hookscope.scores import Prediction

_CELL = 300  # width of a panel of the sheet, in pixels
_VALUE = "value of the map"
_LARGEST = MOST_PIXELS * 3 // 4  # of all panels together: text and gaps take up to a third more
_BESIDE = 4  # more maps than this make several rows
_TOP = 0.995  # share of the pixels below the strongest colour: single pixels are much higher than all others


@dataclass(frozen=True)
class OverlaySource:
    """A photograph, the ``box`` (left, top, right, bottom) of it that the network saw, and the network."""

    photograph: Image.Image
    box: tuple[float, float, float, float]
    origin: Origin

    @property
    def image(self) -> str:
        return os.path.basename(self.origin.image) or self.origin.image

    def lines(self, method: str) -> list[str]:
        network = f"{self.origin.model}  {method}  weights: {self.origin.weights}"
        return [network, f"{self.image}  input: {self.origin.preprocess}"]

    @property
    def warning(self) -> str:
        """A warning of random weights, empty for trained ones."""
        weights = self.origin.weights
        return "the weights are random: class and map mean nothing" if weights.startswith("random") else ""

    def peak_in(self, values: NDArray[np.float32]) -> tuple[float, float] | None:
        """``(x, y)`` of the cell of ``values`` ``(h, w)`` with the highest value, in pixels of the photograph.

        None where no value is above 0. The point may lie outside the photograph: the network may have seen a border.
        """
        left, top, right, bottom = self.box
        peak = peak_of(values)
        return peak and (left + peak[1] * (right - left), top + peak[0] * (bottom - top))

    def provenance(self, method: str, cmap: str, size: tuple[int, int]) -> dict[str, Any]:
        return {
            **self.origin.facts(),
            "seen": [round(side, 3) for side in self.box],
            "method": method,
            "cmap": cmap,
            "size": list(size),
        }


def answer_lines(answer: Prediction) -> list[str]:
    name = f"{answer.label} ({answer.index})" if answer.label else f"class {answer.index}"
    return [name, f"score {answer.score:.4g}  probability {100 * answer.probability:.3g} %"]


def answer_facts(answer: Prediction) -> dict[str, Any]:
    """The class, its score and probability for a text chunk: None where they are not finite."""
    return {
        "class": answer.index,
        "label": answer.label,
        "score": answer.score if math.isfinite(answer.score) else None,
        "probability": answer.probability if math.isfinite(answer.probability) else None,
    }


def why_unseen(answer: Prediction) -> str:
    """A line that says that the model does not see the class; empty if it does."""
    if not answer.unseen:
        return ""
    shares = f"it has {100 * answer.probability:.2g} %, the best class {100 * answer.best:.3g} %"
    return f"the model does not see this class: {shares}"


def why_empty(cam: ClassActivationMap) -> str:
    """Why no value of the map is above 0; empty if one is."""
    if cam.still.max() > 0:
        return ""
    if cam.unreached:
        return "all zero: the score does not depend on any position of this map"
    zero = "no value is above 0" if cam.values.any() else "all zero"
    return f"{zero}: no position of this layer raises the score of this class"


def draw_overlay(
    source: OverlaySource,
    maps: Sequence[ClassActivationMap],
    cmap: str = "inferno",
    fused: bool = False,
    tops: Mapping[str, float] | None = None,
) -> tuple[Image.Image, dict[str, Any]]:
    """Draw the maps of one class side by side over the photograph; the page and its provenance.

    The photograph keeps its size, unless several maps would exceed 60 million pixels; the page then says its scale.
    ``fused`` says that the values are shares, as `fused` gives them. ``tops`` are the ends of the scales, as
    `shared_tops` gives them; by default those of these maps.
    """
    tops = shared_tops(maps) if tops is None else tops
    photograph, count = source.photograph, len(maps)
    pixels, columns = count * photograph.width * photograph.height, count
    if count > _BESIDE:  # a page of about 3:2
        columns = max(1, min(count, round(math.sqrt(count * 1.5 * photograph.height / photograph.width))))
    scale = "mean, each map 0..1" if fused else _VALUE
    panels = [_panel(source, cam, [cam.call.key, _shape_line(cam)], scale, tops[cam.call.key]) for cam in maps]
    heading, width = [*answer_lines(maps[0].prediction), *source.lines(maps[0].method)], None
    if count > 1 and pixels > _LARGEST:
        width = int(photograph.width * math.sqrt(_LARGEST / pixels))
        heading[-1] += f"  drawn at {percent(width / photograph.width)} of its size"
    rows = [panels[at : at + columns] for at in range(0, count, columns)]
    warning = "; ".join(filter(None, [source.warning, why_unseen(maps[0].prediction)]))
    page = draw_page(photograph, heading, rows, cmap, width, warning=warning)
    return page, {**_provenance(source, maps, cmap, page, tops), "fused": fused}


def draw_sheet(
    source: OverlaySource, maps: Sequence[ClassActivationMap], cmap: str = "inferno"
) -> tuple[Image.Image, dict[str, Any]]:
    """Draw a row for each layer with the photograph and the maps of all classes; the page and its provenance."""
    by_layer: dict[str, list[ClassActivationMap]] = {}
    for cam in maps:
        by_layer.setdefault(cam.call.key, []).append(cam)
    rows, tops = [], shared_tops(maps)
    for layer, cams in by_layer.items():
        panels = [_panel(source, cam, _class_lines(cam), _VALUE, tops[layer], True) for cam in cams]
        rows.append([Panel(None, [layer, _shape_line(cams[0])]), *panels])
    classes = len({cam.prediction.index for cam in maps})
    heading = f"{source.image}  {counted(len(by_layer), 'layer')}, {classes} {'class' if classes == 1 else 'classes'}"
    lines = [heading, *source.lines(maps[0].method)]
    page = draw_page(source.photograph, lines, rows, cmap, _CELL, warning=source.warning)
    return page, _provenance(source, maps, cmap, page, tops)


def saliency_top(saliency: Saliency) -> float:
    """The value below which 99.5 % of the pixels lie; the highest one where all but a few pixels are 0."""
    values = saliency.still
    rank = max(0, round(_TOP * values.size) - 1)
    return float(np.partition(values.ravel(), rank)[rank]) or float(values.max())


def draw_saliency(
    source: OverlaySource, saliency: Saliency, cmap: str = "inferno", top: float | None = None
) -> tuple[Image.Image, dict[str, Any]]:
    """Draw the map over the faded photograph; the colours end at ``top``, by default `saliency_top`."""
    values, own = saliency.still, saliency_top(saliency)
    highest = float(values.max())
    top = own if top is None else top
    frames = f", mean of {saliency.map.shape[0]} frames" if saliency.map.dim() == 3 else ""
    words = [SALIENCY_METHODS[saliency.method].caption + frames]
    if highest:
        end = f"{100 * _TOP:g} % of the pixels" if top == own else f"as for the other classes, here {own:.3g}"
        words.append(f"colours end at {top:.3g}, {end}; highest {highest:.3g}")
    if saliency.steps is not None and saliency.expected is not None:
        total = float(saliency.values.double().sum())
        words.append(f"{saliency.steps:,} steps; the shares add up to {total:.4g} of {saliency.expected:.4g}")
    alarm = "" if highest else "all zero: the score does not depend on any pixel"
    heat = Heat(values, source.box, top, source.peak_in(values))
    panel = Panel(heat, words, alarm, _VALUE if highest else "")
    heading = [*answer_lines(saliency.prediction), *source.lines(saliency.method)]
    warning = "; ".join(filter(None, [source.warning, why_unseen(saliency.prediction)]))
    page = draw_page(source.photograph, heading, [[panel]], cmap, faded=True, warning=warning)
    return page, {
        **source.provenance(saliency.method, cmap, page.size),
        **answer_facts(saliency.prediction),
        "shape": list(saliency.values.shape),
        "top": top,
        "high": highest,
    }


def _class_lines(cam: ClassActivationMap) -> list[str]:
    highest = float(cam.still.max()) + 0.0  # no -0
    return [*answer_lines(cam.prediction), f"highest {highest:.3g}"]


def _panel(
    source: OverlaySource, cam: ClassActivationMap, words: Sequence[str], scale: str, top: float, sheet: bool = False
) -> Panel:
    """A map on a scale from 0 to ``top``; a ``sheet`` says more of each class, because it has several."""
    values = cam.still
    low, high = float(values.min()), float(values.max())
    extremes = [f"highest {high:.3g}, of all classes {top:.3g}"] if 0 < high < top and not sheet else []
    extremes += [f"lowest {low:.3g}, not drawn"] if low < 0 else []
    alarm = why_empty(cam) or (why_unseen(cam.prediction) if sheet else "")
    heat = Heat(values, source.box, top, source.peak_in(values))
    return Panel(heat, [*words, *extremes], alarm, scale if high > 0 else "")


def _shape_line(cam: ClassActivationMap) -> str:
    *frames, height, width = cam.values.shape
    clip = [f"mean of {counted(frames[0], 'frame')}"] if frames else []
    return "  ".join([cam.call.type, f"{counted(cam.channels, 'channel')} of {height}×{width}", *clip])


def _provenance(
    source: OverlaySource,
    maps: Sequence[ClassActivationMap],
    cmap: str,
    page: Image.Image,
    tops: Mapping[str, float],
) -> dict[str, Any]:
    facts = [
        {
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
    return {**source.provenance(maps[0].method, cmap, page.size), "maps": facts}
