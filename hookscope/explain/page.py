"""What the pages of class activation maps and of saliency maps share: the photograph and its network, and words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from hookscope.drawing import (
    DARK,
    LIGHT,
    MOST_PIXELS,
    PALE,
    Ground,
    Heading,
    Heat,
    HeatPanel,
    HeatRow,
    Origin,
    draw_heat_page,
    seen_part,
    with_provenance,
)
from hookscope.errors import UsageError, all_of, one_of
from hookscope.explain.cam_maps import ClassActivationMap, maps_by_class, peak_of, shared_tops
from hookscope.explain.cam_methods import ATTENTION_METHODS
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.findings import counted, percent
from hookscope.images import AnyImage, as_picture
from hookscope.models import LoadedModel, note_input
from hookscope.scores import Score

Box = tuple[float, float, float, float]
VALUE, ONE_COLOUR = "value of the map", "inferno"
_LARGEST = MOST_PIXELS * 3 // 4  # of all panels together: text and gaps take up to a third more


@dataclass(frozen=True)
class OverlaySource:
    """A photograph, the ``box`` (left, top, right, bottom) of it that the network saw, and the network."""

    photograph: Image.Image
    box: Box
    origin: Origin

    @classmethod
    def of(cls, picture: AnyImage, net: LoadedModel | nn.Module | None = None, seen: Any = None) -> OverlaySource:
        """The source of ``picture``, of which a `LoadedModel` saw a part; warns if that is not ``seen`` ``(H, W)``."""
        picture = as_picture(picture)
        if isinstance(net, LoadedModel) and seen and (made := tuple(net.prepare(picture).shape[-2:])) != seen:
            own, other = ("x".join(map(str, size)) for size in (seen, made))
            note_input(f"the maps are of an input of {own}, and {net.name} makes one of {other} from the photograph")
        return cls(*seen_part(picture, net), Origin.of(net, picture))

    def lines(self, method: str) -> list[str]:
        """The model and the method, the image and its preprocessing; what is not known is left out."""
        origin = self.origin
        weights = f"weights: {origin.weights}" if origin.weights else ""
        preprocess = f"preprocessing: {origin.preprocess.removeprefix('preprocess ')}" if origin.preprocess else ""
        lines = [(origin.model, weights, f"method: {method}"), (origin.images, preprocess)]
        return [", ".join(filter(None, words)) for words in lines if any(words)]

    @property
    def panel(self) -> HeatPanel:
        """The photograph without a map."""
        size = f"{self.photograph.width}×{self.photograph.height} pixels"
        return HeatPanel(None, [self.origin.images or "photograph", size])

    def has_probability(self, answer: Score) -> bool:
        """Whether the probability of ``answer`` says anything: not with random weights."""
        return answer.probability is not None and not self.origin.is_random

    def answer_lines(self, answer: Score) -> list[str]:
        name = f"{answer.label} ({answer.index})" if answer.label and not answer.target else answer.name
        share = f", probability {100 * (answer.probability or 0):.3g} %" if self.has_probability(answer) else ""
        return [name, f"score {answer.score:.4g}{share}"]

    def heading(self, words: Sequence[str], method: str, alarm: str = "", **more: Any) -> Heading:
        """A heading with ``words``, then model and image. Alarms are random weights, first of all, and ``alarm``."""
        first = "the weights are random: class and map mean nothing" if self.origin.is_random else ""
        return Heading([*words, *self.lines(method)], alarm, first, **more)

    def peak_in(self, values: NDArray[np.float32]) -> tuple[float, float] | None:
        """``(x, y)`` of the cell of ``values`` ``(h, w)`` with the highest value, in pixels of the photograph.

        None where no value is above 0. The point may lie outside the photograph: the network may have seen a border.
        """
        peak = peak_of(values)
        return peak and self.in_photograph(peak[1], peak[0])

    def in_photograph(self, x: float, y: float) -> tuple[float, float]:
        """A point of the network's input, as shares 0..1 of its sides, in pixels of the photograph."""
        left, top, right, bottom = self.box
        return left + x * (right - left), top + y * (bottom - top)

    def in_input(self, x: float, y: float) -> tuple[float, float]:
        """A point of the photograph in pixels, as shares of the sides of the network's input."""
        left, top, right, bottom = self.box
        return (x - left) / (right - left), (y - top) / (bottom - top)

    def frame_of(self, answer: Score, seen: tuple[int, int]) -> Box | None:
        """The box of ``answer`` in pixels of the photograph; the network saw ``seen`` ``(H, W)``. None without one."""
        if answer.box is None:
            return None
        (height, width), (left, top, right, bottom) = seen, answer.box
        return *self.in_photograph(left / width, top / height), *self.in_photograph(right / width, bottom / height)

    def heat(self, values: NDArray[np.float32], top: float, signed: bool = False, frame: Box | None = None) -> Heat:
        """The heat of a map ``(h, w)`` on a scale up to ``top``, with its peak and the box of what it explains."""
        return Heat(values, self.box, top, self.peak_in(values), signed, frame)

    def page(
        self,
        heading: Heading,
        rows: Sequence[HeatRow],
        method: str,
        cmap: str,
        facts: Mapping[str, Any],
        width: int | None = None,
        ground: Ground = PALE,
    ) -> Image.Image:
        """The page of ``rows``, which carries its origin and ``facts``."""
        page = draw_heat_page(self.photograph, heading, rows, cmap, width, ground)
        corners = [round(side, 3) for side in self.box]
        about = {**self.origin.facts(), "seen": corners, "method": method, "cmap": cmap, "size": list(page.size)}
        return with_provenance(page, {**about, **facts})


def answer_facts(answer: Score) -> dict[str, Any]:
    """The class, its score and probability for a text chunk: None where they are not finite."""
    return {
        "class": answer.index,
        "label": answer.label,
        "score": answer.score if math.isfinite(answer.score) else None,
        "probability": answer.probability if math.isfinite(answer.probability or 0) else None,
        **({"target": answer.target} if answer.target else {}),
        **({"box": list(answer.box)} if answer.box else {}),
    }


def why_unseen(answer: Score) -> str:
    """A line that says that the model does not see the class; empty if it does."""
    if answer.probability is None or not answer.low_probability:
        return ""
    shares = f"it has {100 * answer.probability:.2g} %, the best class {100 * answer.best:.3g} %"
    return f"the model does not see this class: {shares}"


_TOP = 0.995  # share of the pixels below the strongest colour: single pixels are much higher than all others
_WIDTH = 640  # of a panel; a wider photograph would show no more of a map, which is coarser
TWO_COLOURS = "RdBu_r"


def draw_saliency(
    saliency: Saliency | Sequence[Saliency],
    photograph: AnyImage,
    net: LoadedModel | nn.Module | None = None,
    *,
    scale_of: Sequence[Saliency] = (),
    cmap: str | None = None,
    smooth: float | None = None,
) -> Image.Image:
    """Draw a saliency map over the grey photograph, beside the photograph itself and the smoothed map.

    Methods that multiply by the image have two colours about 0, on a scale as wide below 0 as above it; 0 is
    transparent. Other methods have one colour, from 0. The scale is clipped at the 99.5th percentile of the absolute
    values. A cross marks the highest value above 0. A map without one, random weights and a class that the model does
    not see are named in red.

    The image holds the facts of the map as JSON in ``image.info["hookscope"]``.

    Args:
        saliency: What `saliency_maps` returns; several maps stand one below the other. Maps of a method share a
            scale.
        photograph: The photograph that the input was made of.
        net: The model. A `LoadedModel` says which part of the photograph the network saw, and weights and
            preprocessing; with other models the map covers the whole photograph.
        scale_of: Further maps of the same method that the scale includes, such as maps of other classes.
        cmap: A colour map of matplotlib; None for inferno, and for two colours RdBu_r: red above 0, blue below.
        smooth: Standard deviation of the Gaussian that smooths, in pixels of the input; None for a 64th of its shorter
            side, 0 for no smoothed map.

    Raises:
        UsageError: for an unknown colour map, or a negative ``smooth``.

    Example:
        >>> import hookscope, torch
        >>> from PIL import Image
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
        >>> [saliency] = hookscope.saliency_maps(net, torch.ones(1, 3, 8, 8), target=0)
        >>> draw_saliency(saliency, Image.new("RGB", (400, 400)), net).width > 3 * 400
        True
    """
    maps = all_of(Saliency, saliency, "saliency_maps")
    if len(maps) > 1:
        others = [*maps, *scale_of]
        like = [[other for other in others if other.method == each.method] for each in maps]
        draw = partial(draw_saliency, photograph=photograph, net=net, cmap=cmap, smooth=smooth)
        return _stacked([draw(each, scale_of=same) for each, same in zip(maps, like, strict=True)])
    saliency = one_of(Saliency, maps, "saliency_maps")
    source, how = OverlaySource.of(photograph, net, saliency.seen), SALIENCY_METHODS[saliency.method]
    cmap = cmap or (TWO_COLOURS if how.signed else ONE_COLOUR)
    sigma = saliency.usual_smoothing if smooth is None else smooth
    others = [saliency, *scale_of]
    top = max(percentile(other.still) for other in others)
    panels = [source.panel, _saliency_panel(source, saliency, saliency.still, top, _raw_words(saliency, top, cmap))]
    facts = {"top": top, "high": float(saliency.still.max()), "low": float(saliency.still.min())}
    if sigma and saliency.still.any():
        smoothed = saliency.smoothed(sigma)
        smooth_top = max(percentile(other.smoothed(sigma)) for other in others)
        words = [f"smoothed: Gaussian, sigma {sigma:.3g} pixels of the input", _scale_words(smoothed, smooth_top)]
        panels.append(_saliency_panel(source, saliency, smoothed, smooth_top, words))
        facts |= {"smooth": sigma, "smooth_top": smooth_top}
    photograph = source.photograph
    rows = [HeatRow(panels)] if photograph.width <= 2 * photograph.height else [HeatRow([panel]) for panel in panels]
    heading = source.heading(source.answer_lines(saliency.prediction), saliency.method, why_unseen(saliency.prediction))
    left, _, right, _ = source.box  # a panel has at least a pixel for each of the map
    width = max(_WIDTH, math.ceil(saliency.still.shape[1] * photograph.width / max(right - left, 1.0)))
    about = {**answer_facts(saliency.prediction), "shape": list(saliency.values.shape), **facts}
    narrower, ground = width if photograph.width > width else None, LIGHT if how.signed else DARK
    return source.page(heading, rows, saliency.method, cmap, about, narrower, ground)


def _stacked(pages: Sequence[Image.Image]) -> Image.Image:
    """The pages one below the other, with the facts of each."""
    whole = Image.new("RGB", (max(page.width for page in pages), sum(page.height for page in pages)), "white")
    for at, page in enumerate(pages):
        whole.paste(page, (0, sum(before.height for before in pages[:at])))
    return with_provenance(whole, {"pages": [json.loads(page.info["hookscope"]) for page in pages]})


def percentile(values: NDArray[np.float32]) -> float:
    """The absolute value below which 99.5 % of the pixels lie; the highest one where all but a few pixels are 0."""
    sizes = np.abs(values).ravel()
    rank = max(0, round(_TOP * sizes.size) - 1)
    return float(np.partition(sizes, rank)[rank]) or float(sizes.max())


def _saliency_panel(
    source: OverlaySource, saliency: Saliency, values: NDArray[np.float32], top: float, words: Sequence[str]
) -> HeatPanel:
    signed, any_value = SALIENCY_METHODS[saliency.method].signed, bool(values.any())
    alarm = "" if values.max() > 0 else "no value is above 0: no pixel raises the score"
    alarm = alarm if any_value else "all zero: the score does not depend on any pixel"
    frame = source.frame_of(saliency.prediction, saliency.seen)
    return HeatPanel(source.heat(values, top, signed, frame), words, alarm, VALUE if any_value else "")


def _raw_words(saliency: Saliency, top: float, cmap: str) -> list[str]:
    values, how = saliency.still, SALIENCY_METHODS[saliency.method]
    frames = f", mean of {saliency.map.shape[0]} frames" if saliency.map.dim() == 3 else ""
    words = [how.caption + frames]
    if how.signed:
        above, below = ("red", "blue") if cmap == TWO_COLOURS else ("the right half of the colours", "the left half")
        words.append(f"{above} raises the score, {below} lowers it")
    if values.any():
        words.append(_scale_words(values, top))
    if saliency.expected is not None:
        steps = f"{saliency.steps:,} steps; " if saliency.steps is not None else ""
        total = float(saliency.values.double().sum())
        words.append(f"{steps}the shares add up to {total:.4g} of {saliency.expected:.4g}")
    return words


def _scale_words(values: NDArray[np.float32], top: float) -> str:
    own, lowest = percentile(values), float(values.min())
    end = "99.5th percentile" + ("" if top == own else f" of the class with the widest scale, here {own:.3g}")
    extremes = f"highest value {float(values.max()):.3g}" + (f", lowest {lowest:.3g}" if lowest < 0 else "")
    return f"scale clipped at the {end}; {extremes}"


_BESIDE = 4  # more panels than this make several rows
_CLASSES = 5  # classes of a layer in a row, at most
_OF_POSITIONS = ("hirescam", "layercam")
_SHARE = "share of the layer's highest value"


def draw_cam(
    maps: ClassActivationMap | Sequence[ClassActivationMap],
    photograph: AnyImage,
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
        scale_of: Further maps that the scale includes, such as maps of classes on other pages.
        cmap: A colour map of matplotlib; None for inferno.
        width: Width of a map in pixels; None for the photograph's, as far as the page has room.

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
    maps = all_of(ClassActivationMap, maps, "class_activation_maps")
    if not maps:
        raise UsageError("no class activation map to draw", do="choose layers that have maps")
    source, cmap = OverlaySource.of(photograph, net, maps[0].seen), cmap or ONE_COLOUR
    tops = shared_tops([*maps, *scale_of])
    heading, rows = (_rows_of_class if len(maps_by_class(maps)) == 1 else _rows_of_classes)(source, maps, tops)
    panels = sum(len(row.panels) for row in rows) + heading.photograph
    pixels = panels * source.photograph.width * source.photograph.height
    if width is None and panels > 1 and pixels > _LARGEST:
        width = int(source.photograph.width * math.sqrt(_LARGEST / pixels))
        words = f"drawn at {percent(width / source.photograph.width)} of its size"
        heading = replace(heading, words=[*heading.words[:-1], f"{heading.words[-1]}, {words}"])
    facts = {"maps": [_facts(cam, tops[cam.call.key]) for cam in maps], "fused": maps[0].fused}
    facts |= {"variants": maps[0].variants} if maps[0].variants > 1 else {}
    return source.page(heading, rows, maps[0].method, cmap, facts, width)


def _rows_of_class(
    source: OverlaySource, maps: Sequence[ClassActivationMap], tops: Mapping[str, float]
) -> tuple[Heading, list[HeatRow]]:
    """The maps of one class side by side, several after the photograph."""
    panels = [_cam_panel(source, cam, [cam.call.key, _shape_line(cam)], tops[cam.call.key]) for cam in maps]
    panels = [source.panel, *panels] if len(panels) > 1 else panels
    answer, photograph, columns = maps[0].prediction, source.photograph, len(panels)
    heading = source.heading(source.answer_lines(answer), maps[0].method, why_unseen(answer))
    if len(panels) > _BESIDE:  # a page of about 3:2
        columns = max(1, min(len(panels), round(math.sqrt(len(panels) * 1.5 * photograph.height / photograph.width))))
    return heading, [HeatRow(panels[at : at + columns]) for at in range(0, len(panels), columns)]


def _rows_of_classes(
    source: OverlaySource, maps: Sequence[ClassActivationMap], tops: Mapping[str, float]
) -> tuple[Heading, list[HeatRow]]:
    """A row for each layer with the maps of all classes, below the photograph."""
    rows, by_layer = [], dict[str, list[ClassActivationMap]]()
    for cam in maps:
        by_layer.setdefault(cam.call.key, []).append(cam)
    for layer, cams in by_layer.items():
        words = [layer, f"{_shape_line(cams[0])}, highest value of all {_things(cams[0])} {max(tops[layer], 0.0):.3g}"]
        about = [
            [*source.answer_lines(cam.prediction), f"highest {float(cam.still.max()) + 0.0:.3g}"] for cam in cams
        ]  # no -0
        panels = [_cam_panel(source, cam, said, tops[layer], True) for cam, said in zip(cams, about, strict=True)]
        columns = math.ceil(len(panels) / math.ceil(len(panels) / _CLASSES))  # rows of about the same length
        for at in range(0, len(panels), columns):
            rows.append(HeatRow(panels[at : at + columns], () if at else words))
    classes = len(maps_by_class(maps))
    title = f"{maps[0].method} of {classes} {_things(maps[0])} in {counted(len(by_layer), 'layer')}"
    return source.heading([title], maps[0].method, photograph=True, scale=_SHARE), rows


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


def _cam_panel(
    source: OverlaySource, cam: ClassActivationMap, words: Sequence[str], top: float, of_classes: bool = False
) -> HeatPanel:
    """A map on a scale from 0 to ``top``; one ``of_classes`` has its scale in the heading."""
    values = cam.still
    low, high = float(values.min()), float(values.max())
    extremes = [f"highest {high:.3g}, of all {_things(cam)} {top:.3g}"] if 0 < high < top and not of_classes else []
    extremes += [f"lowest {low:.3g}, not drawn"] if low < 0 else []
    alarm = why_empty(cam) or (why_unseen(cam.prediction) if of_classes else "")
    unit = "mean, each map 0..1" if cam.fused else VALUE
    heat = source.heat(values, top, frame=source.frame_of(cam.prediction, cam.seen))
    extremes += ["hardly visible on this scale"] if heat.peak and not heat.mark else []
    return HeatPanel(heat, [*words, *extremes], alarm, unit if high > 0 and not of_classes else "")


def _shape_line(cam: ClassActivationMap) -> str:
    *frames, height, width = cam.values.shape
    clip = [f"mean of {counted(frames[0], 'frame')}"] if frames else []
    clip += [f"mean of {cam.variants} variants of the image"] if cam.variants > 1 else []
    parts = counted(cam.channels, "head" if cam.method in ATTENTION_METHODS else "channel")
    return ", ".join([cam.call.type, f"{parts} of {height}×{width}", *clip])


def _facts(cam: ClassActivationMap, top: float) -> dict[str, Any]:
    return {
        "index": cam.call.index,
        "order": cam.call.order,
        "layer": cam.call.name,
        "call": cam.call.call,
        "type": cam.call.type,
        **answer_facts(cam.prediction),
        "shape": list(cam.values.shape),
        "low": float(cam.values.min()),
        "high": float(cam.values.max()),
        "top": top,
    }
