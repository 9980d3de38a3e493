"""The page of attention: a row of maps over the photograph for each layer, a map for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from hookscope.attention.run import AttentionMap
from hookscope.drawing import (
    DARK,
    Heading,
    Heat,
    HeatPanel,
    HeatRow,
    Origin,
    draw_heat_page,
    seen_part,
    with_provenance,
)
from hookscope.errors import UsageError, all_of
from hookscope.findings import counted, percent
from hookscope.hooks import MODEL
from hookscope.images import AnyImage, as_picture
from hookscope.models import LoadedModel

_CELL, _COLUMNS = 112, 16  # shorter side of a map, and maps in a row, unless the caller says otherwise
_LEGEND = "Positions: how many a head looks at, as the exponential of the entropy."


def draw_attention(
    maps: AttentionMap | Sequence[AttentionMap],
    photograph: AnyImage,
    net: LoadedModel | nn.Module | None = None,
    *,
    columns: int | None = None,
    cell: int | None = None,
    cmap: str | None = None,
    head_mean: bool = False,
    one_scale: bool = False,
) -> Image.Image:
    """Draw what each head looks at over the photograph: a row for each layer, from the first to the last.

    Each map has its own scale, from 0 to its highest weight, which stands under it, or all have
    ``one_scale``. A cross marks the query if it has a position. The photograph is cut to what the network saw. The
    image holds the facts of its maps as JSON in ``image.info["hookscope"]``.

    Args:
        maps: What `attention_maps` returns.
        photograph: The photograph that the input was made of.
        net: The model. A `LoadedModel` says which part of the photograph the network saw, and weights and
            preprocessing; with other models the maps cover the whole photograph.
        columns: Maps in a row; None for 16 at most.
        cell: Shorter side of a map in pixels; None for 112.
        cmap: A colour map of matplotlib; None for inferno.
        head_mean: Whether the mean of the heads stands before them.
        one_scale: Whether all maps have the scale of the highest weight of the page, so that heads can be compared.

    Raises:
        UsageError: for no maps, an unknown colour map, or a page of more than 200 million pixels.

    Example:
        >>> import numpy as np
        >>> from PIL import Image
        >>> from hookscope.hooks import Call
        >>> values = np.full((2, 4, 4), 1 / 16, np.float32)
        >>> call = Call("attention", "MultiheadAttention", 0, 0)
        >>> maps = [AttentionMap(call, values, values[:, 0, 0] * 0, "class token", None, 1, (64, 64))]
        >>> draw_attention(maps, Image.new("RGB", (64, 64)), cell=100).width > 200
        True
    """
    maps, photograph = all_of(AttentionMap, maps, "attention_maps"), as_picture(photograph)
    if not maps:
        raise UsageError("no map of attention to draw", do="choose layers with attention")
    (whole, box), origin, cmap = seen_part(photograph, net), Origin.of(net, photograph), cmap or "inferno"
    corner = max(0, round(box[0])), max(0, round(box[1]))
    picture = whole.crop((*corner, min(whole.width, round(box[2])), min(whole.height, round(box[3]))))
    factor = (cell or _CELL) / min(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    small = picture.resize(size, Image.Resampling.BILINEAR if factor < 1 else Image.Resampling.NEAREST)
    left, top, right, bottom = (
        (side - corner[at % 2]) * size[at % 2] / picture.size[at % 2] for at, side in enumerate(box)
    )
    stills = [[*([grid.stills.mean(0)] if head_mean else []), *grid.stills] for grid in maps]
    finite = [float(still.max()) for heads in stills for still in heads if np.isfinite(still).all()]
    most = max(finite, default=0.0) if one_scale else None
    drawn = zip(maps, stills, strict=True)
    rows = [row for grid, heads in drawn for row in _rows_of(grid, heads, (left, top, right, bottom), columns, most)]
    queries = list(dict.fromkeys(grid.query for grid in maps))
    query = queries[0] if len(queries) == 1 else "the position at the cross" if maps[0].at else "mean of all queries"
    title = f"attention of {counted(len(maps), 'call')}: {query}"
    scale = "Each map has its own scale, up to its highest weight." if most is None else "All maps have one scale."
    words = [title, ", ".join(filter(None, [origin.model, *origin.words])), f"{scale} {_LEGEND}"]
    unit = "share of the map's highest" if most is None else f"share of the highest weight of all maps, {most:.3g}"
    heading = Heading([word for word in words if word], origin.alarm, scale=unit)
    page = draw_heat_page(small, heading, rows, cmap, size[0], DARK)
    return with_provenance(page, _provenance(maps, origin, box, cmap, page))


def _rows_of(
    grid: AttentionMap,
    stills: Sequence[NDArray[np.float32]],
    box: tuple[float, float, float, float],
    columns: int | None,
    most: float | None,
) -> list[HeatRow]:
    """The maps of one call in rows of about the same length: its heads, with their mean before them or without."""
    left, top, right, bottom = box
    at = grid.at and (left + grid.at[1] * (right - left), top + grid.at[0] * (bottom - top))
    panels = []
    for head, values in enumerate(stills, grid.heads - len(stills)):
        highest = float(values.max())
        words = ["mean of heads" if head < 0 else f"head {head}", f"up to {highest:.3g}"]
        words += [f"{grid.effective_positions[head]:.0f} positions"] if head >= 0 else []
        alarm = "" if math.isfinite(highest) else "NaN or Inf"
        heat = Heat(values if not alarm else values * 0, box, highest if most is None else most, at)
        panels.append(HeatPanel(heat, words, alarm))
    *frames, height, width = grid.values.shape[1:]
    words = [grid.call.type, f"{counted(grid.heads, 'head')} of {height}×{width}", grid.query]
    words += [f"sum of {counted(frames[0], 'frame')}"] if frames else []
    words += [f"in {grid.windows:,} windows"] if grid.windows > 1 else []
    words += [f"{percent(float(grid.non_patch_weight.mean()))} on no patch"] if grid.non_patch_weight.any() else []
    index = "" if grid.call.index is None else f"{grid.call.index}  "
    above = [f"{index}{grid.call.key or MODEL}", ", ".join(words)]
    across = columns or math.ceil(len(panels) / math.ceil(len(panels) / _COLUMNS))
    return [HeatRow(panels[at : at + across], () if at else above) for at in range(0, len(panels), across)]


def _provenance(
    maps: Sequence[AttentionMap], origin: Origin, box: Sequence[float], cmap: str, page: Image.Image
) -> dict[str, Any]:
    facts = [
        {
            "index": grid.call.index,
            "layer": grid.call.name,
            "call": grid.call.call,
            "type": grid.call.type,
            "query": grid.query,
            "at": grid.at and list(grid.at),
            "windows": grid.windows,
            "shape": list(grid.values.shape),
            "high": [float(high) if math.isfinite(high) else None for high in grid.stills.max((1, 2))],
        }
        for grid in maps
    ]
    corners = [round(side, 3) for side in box]
    return {**origin.facts(), "seen": corners, "cmap": cmap, "size": list(page.size), "attention": facts}
