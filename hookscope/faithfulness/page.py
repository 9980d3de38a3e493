"""The page of maps side by side, each with its faithfulness."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image
from torch import nn

from hookscope.drawing import Heat, Panel, Row, draw_page, with_provenance
from hookscope.errors import UsageError
from hookscope.explain import OverlaySource, why_unseen
from hookscope.faithfulness.answer import compare_maps, is_no_better
from hookscope.faithfulness.facts import BASELINES, NUMBERS, Faithfulness
from hookscope.findings import percent
from hookscope.images import InputImage
from hookscope.models import LoadedModel

_SHAPE = 1.6  # width of the page by its height, about
_NARROWEST, _WIDEST = 220, 320  # pixels of a map: the page has a dozen


def draw_faithfulness(
    measured: Sequence[Faithfulness],
    photograph: Image.Image | InputImage,
    net: LoadedModel | nn.Module | None = None,
    *,
    cmap: str | None = None,
    width: int | None = None,
) -> Image.Image:
    """Draw the maps of one image side by side over the photograph, each with its numbers, the verdict first.

    Each map has its own scale from 0, and a cross at its highest value. A map that is no better on this image than a
    baseline says so in red.

    Args:
        measured: What `cam_faithfulness` or `measure_faithfulness` returns.
        photograph: The photograph that the input was made of.
        net: The model, see `draw_cam`.
        cmap: A colour map of matplotlib; None for inferno.
        width: Width of a map in pixels; None for 220 to 320.

    Raises:
        UsageError: for no maps, or an unknown colour map.

    Example:
        >>> import hookscope, torch
        >>> from PIL import Image
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> found = hookscope.cam_faithfulness(net, torch.rand(1, 3, 16, 16), methods=["gradcam", "layercam"])
        >>> draw_faithfulness(found, Image.new("RGB", (64, 64)), net, width=200).size[0] > 2 * 200
        True
    """
    if not measured:
        raise UsageError("no map to draw")
    cmap = cmap or "inferno"
    found = compare_maps([measured])
    source, answer = OverlaySource.of(photograph, net), measured[0].prediction
    best_first = [each.name for each in found.maps]
    ordered = sorted(measured, key=lambda each: best_first.index(each.name))
    panels = [source.panel, *(_panel(source, each, _worse_than(each, measured, found.by)) for each in ordered)]
    picture = source.photograph
    rows = max(1, round(math.sqrt(len(panels) * picture.width / (_SHAPE * picture.height))))
    columns = math.ceil(len(panels) / rows)
    own = picture.width * math.ceil(_NARROWEST / picture.width)  # magnified by a whole number
    width = min(_WIDEST, own) if width is None else width
    what = answer.name if answer.probability is None else f"{answer.name}, probability {percent(answer.probability)}"
    heading = source.heading([*found.verdict, f"This image: {what}"], "one for each map", why_unseen(answer))
    lines = [Row(panels[at : at + columns]) for at in range(0, len(panels), columns)]
    page = draw_page(picture, heading, lines, cmap, width)
    facts = [
        {"map": each.name, **{name: getattr(each, name) for name in NUMBERS}, "shape": list(each.values.shape)}
        for each in ordered
    ]
    more = {"verdict": list(found.verdict), "maps": facts, **answer.cells()}
    return with_provenance(page, {**source.provenance("comparison", cmap, page.size), **more})


def _worse_than(each: Faithfulness, measured: Sequence[Faithfulness], by: str) -> list[str]:
    """The baselines than which a map is no better, in words."""
    baselines = [base for base in measured if base.name in BASELINES]
    return [BASELINES[base.name] for base in baselines if each.name not in BASELINES and is_no_better(each, base, by)]


def _panel(source: OverlaySource, each: Faithfulness, worse: Sequence[str]) -> Panel:
    still = each.still
    words = [each.name, f"ROAD {each.road:.3f}", f"insertion {each.insertion:.3f}, deletion {each.deletion:.3f}"]
    words.append("score rises under the map" if each.increase else f"drop {percent(each.drop)}")
    if each.in_box is not None:
        words.append(f"{percent(each.in_box)} in the box, highest value {'inside' if each.points else 'outside'}")
    if each.randomized is not None:
        words.append(f"random weights: correlation {each.randomized:.2f}")
    alarm = f"no better than {' or '.join(worse)}" if worse else ""
    heat = Heat(still, source.box, max(float(still.max()), 0.0), source.peak_in(still))
    return Panel(heat, words, alarm)
