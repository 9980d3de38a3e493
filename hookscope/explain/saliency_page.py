"""A saliency map as a page: which pixels count, over the photograph in grey."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import Heat, Panel, draw_page
from hookscope.explain.overlay_source import OverlaySource, answer_facts, answer_lines
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS

_TOP = 0.995  # of the pixels lie below the value drawn strongest: single ones are much higher than all the others


def draw_saliency(subject: OverlaySource, found: Saliency, cmap: str = "inferno") -> tuple[Image.Image, dict[str, Any]]:
    """The map over the faded photograph at its own size, and its provenance.

    The colours end where 99.5 % of the pixels lie below; the page says the highest value.

    Raises:
        UsageError: for a colour map that does not exist.
    """
    values = saliency_still(found)
    highest, top = float(values.max()), _strongest(values)
    frames = f", mean of {found.map.shape[0]} frames" if found.map.dim() == 3 else ""
    words = [
        SALIENCY_METHODS[found.method].caption + frames,
        f"colours end at {top:.3g}, {100 * _TOP:g} % of the pixels; highest {highest:.3g}",
    ]
    panel = Panel(
        Heat(values, subject.box, top, subject.peak_in(values)),
        words if highest else words[:1],
        "" if highest else "all zero: the score does not depend on any pixel",
        "value of the map" if highest else "",
    )
    heading = [*answer_lines(found.prediction), *subject.lines(found.method)]
    page = draw_page(subject.photograph, heading, [[panel]], cmap, faded=True, warning=subject.warning)
    told = {
        **subject.provenance(found.method, cmap, page.size),
        **answer_facts(found.prediction),
        "shape": list(found.values.shape),
        "top": top,
        "high": highest,
    }
    return page, told


def saliency_still(found: Saliency) -> NDArray[np.float32]:
    """The map ``(H, W)`` that is drawn; of a clip the mean over its frames."""
    still = found.map.float()
    values: NDArray[np.float32] = (still.mean(0) if still.dim() == 3 else still).cpu().numpy()
    return values


def _strongest(values: NDArray[np.float32]) -> float:
    """The value drawn strongest; the highest where so few pixels count that the others are all 0."""
    at = max(0, round(_TOP * values.size) - 1)
    return float(np.partition(values.ravel(), at)[at]) or float(values.max())
