"""The page of a saliency map: the photograph, the map over it, and the map smoothed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from hookscope.drawing import DARK, LIGHT, Heat, Panel, Row, draw_page, with_provenance
from hookscope.explain.page import ONE_COLOUR, VALUE, OverlaySource, answer_facts, answer_lines, why_unseen
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.images import InputImage
from hookscope.models import LoadedModel

_TOP = 0.995  # share of the pixels below the strongest colour: single pixels are much higher than all others
_WIDTH = 640  # of a panel; a wider photograph would show no more of a map, which is coarser
TWO_COLOURS = "RdBu_r"


def draw_saliency(
    saliency: Saliency,
    photograph: Image.Image | InputImage,
    net: LoadedModel | nn.Module | None = None,
    *,
    scale_of: Sequence[Saliency] = (),
    cmap: str | None = None,
    smooth: float | None = None,
) -> Image.Image:
    """Draw a saliency map over the grey photograph, beside the photograph itself and the smoothed map.

    Methods that multiply by the image have two colours about 0, on a scale as wide below 0 as above it; 0 is
    transparent. Other methods have one colour, from 0. The scale is clipped at the 99.5th percentile of the absolute
    values. A cross marks the highest absolute value. Random weights and a class that the model does not see are named
    in red.

    The image holds the facts of the map as JSON in ``image.info["hookscope"]``.

    Args:
        saliency: One of the maps that `saliency_maps` returns.
        photograph: The photograph that the input was made of.
        net: The model. A `LoadedModel` says which part of the photograph the network saw, and weights and
            preprocessing; with other models the map covers the whole photograph.
        scale_of: Further maps of the same method that the scale includes, such as those of other classes.
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
    source, how = OverlaySource.of(photograph, net), SALIENCY_METHODS[saliency.method]
    cmap = cmap or (TWO_COLOURS if how.signed else ONE_COLOUR)
    sigma = saliency.usual_smoothing if smooth is None else smooth
    others = [saliency, *scale_of]
    top = max(percentile(other.drawn) for other in others)
    panels = [source.panel, _panel(source, saliency, saliency.drawn, top, _raw_words(saliency, top, cmap))]
    facts = {"top": top, "high": float(saliency.drawn.max()), "low": float(saliency.drawn.min())}
    if sigma and saliency.drawn.any():
        smoothed = saliency.smoothed(sigma)
        smooth_top = max(percentile(other.smoothed(sigma)) for other in others)
        words = [f"smoothed: Gaussian, sigma {sigma:.3g} pixels of the input", _scale_words(smoothed, smooth_top)]
        panels.append(_panel(source, saliency, smoothed, smooth_top, words))
        facts |= {"smooth": sigma, "smooth_top": smooth_top}
    photograph = source.photograph
    rows = [Row(panels)] if photograph.width <= 2 * photograph.height else [Row([panel]) for panel in panels]
    heading = source.heading(answer_lines(saliency.prediction), saliency.method, why_unseen(saliency.prediction))
    width = _width(source, saliency)
    page = draw_page(photograph, heading, rows, cmap, width, LIGHT if how.signed else DARK)
    about = source.provenance(saliency.method, cmap, page.size) | answer_facts(saliency.prediction)
    return with_provenance(page, {**about, "shape": list(saliency.values.shape), **facts})


def _width(source: OverlaySource, saliency: Saliency) -> int | None:
    """The width of a panel, at least a pixel for each of the map; None for that of a photograph that is narrow."""
    left, _, right, _ = source.box
    width = max(_WIDTH, math.ceil(saliency.drawn.shape[1] * source.photograph.width / max(right - left, 1.0)))
    return width if source.photograph.width > width else None


def percentile(values: NDArray[np.float32]) -> float:
    """The absolute value below which 99.5 % of the pixels lie; the highest one where all but a few pixels are 0."""
    sizes = np.abs(values).ravel()
    rank = max(0, round(_TOP * sizes.size) - 1)
    return float(np.partition(sizes, rank)[rank]) or float(sizes.max())


def _panel(
    source: OverlaySource, saliency: Saliency, values: NDArray[np.float32], top: float, words: Sequence[str]
) -> Panel:
    signed, any_value = SALIENCY_METHODS[saliency.method].signed, bool(values.any())
    alarm = "" if any_value else "all zero: the score does not depend on any pixel"
    frame = source.frame_of(saliency.prediction, saliency.seen)
    heat = Heat(values, source.box, top, source.peak_in(np.abs(values)), signed, frame)
    return Panel(heat, words, alarm, VALUE if any_value else "")


def _raw_words(saliency: Saliency, top: float, cmap: str) -> list[str]:
    values, how = saliency.drawn, SALIENCY_METHODS[saliency.method]
    frames = f", mean of {saliency.map.shape[0]} frames" if saliency.map.dim() == 3 else ""
    words = [how.caption + frames]
    if how.signed:
        above, below = ("red", "blue") if cmap == TWO_COLOURS else ("the right half of the colours", "the left half")
        words.append(f"{above} raises the score, {below} lowers it")
    if values.any():
        words.append(_scale_words(values, top))
    if saliency.steps is not None and saliency.expected is not None:
        total = float(saliency.values.double().sum())
        words.append(f"{saliency.steps:,} steps; the shares add up to {total:.4g} of {saliency.expected:.4g}")
    return words


def _scale_words(values: NDArray[np.float32], top: float) -> str:
    own, highest = percentile(values), float(np.abs(values).max())
    end = "99.5th percentile" + ("" if top == own else f" of the class with the widest scale, here {own:.3g}")
    return f"scale clipped at the {end}; highest {'|value|' if values.min() < 0 else 'value'} {highest:.3g}"
