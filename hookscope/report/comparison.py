"""The page of a comparison: where two sides part, difference by difference, with maps and CKA."""

from __future__ import annotations

import os
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np

from hookscope.comparison import (
    PAIRS,
    CkaMatrix,
    ComparedMaps,
    Comparison,
    PairedCall,
    SideFacts,
    differences_plot,
    map_difference,
)
from hookscope.drawing import colours, finite_or_none, shape_text, to_image
from hookscope.findings import counted, percent
from hookscope.models import is_random
from hookscope.report.charts import png_address
from hookscope.report.layers import MAPS
from hookscope.report.page import MAX_SIZE, added_sections, fit_page, items_that_fit, module_rows, render

_SIGNED = "RdBu_r"
_RAMP = np.arange(colours.LEVELS, dtype=np.uint8)[None]
_DIGITS = 4  # of the CKA that the page holds
_CHANNEL = 500  # about so many bytes has a channel beside its maps


def draw_comparison_page(comparison: Comparison, *, max_size: int | None = MAX_SIZE) -> str:
    """The page of a comparison: one self-contained file of HTML.

    A page larger than ``max_size`` bytes (None for any) keeps the channels that changed most, and says how many it left
    out. If it does not fit even without maps, there is a WriteError.
    """
    maps = [_maps_view(comparison, kept) for kept in comparison.maps]
    rows = _pair_rows(comparison)
    untrained = [name for name, side in (("A", comparison.a), ("B", comparison.b)) if is_random(side.weights)]
    facts = {
        "kind": "Comparison",
        "title": " and ".join(comparison.models),
        "is_random": bool(untrained),
        "untrained": untrained,
        "summary": _summary(comparison),
        "provenance": comparison.provenance,
        "comparison": comparison,
        "sides": _sides(comparison),
        "places": {row.name: row.number for row in reversed(rows) if row.is_call},
        "plot": differences_plot(comparison),
        "rows": rows,
        "columns": _columns(comparison),
        "matrix": comparison.matrix and _matrix_view(comparison.matrix),
        "added": added_sections(comparison),
    }
    sizes = [[sum(map(len, channel["addresses"])) + _CHANNEL for channel in view["channels"]] for view in maps]

    def draw(room: float) -> tuple[str, int]:
        most = items_that_fit(sizes, room)
        page = render(
            "comparison.html",
            ("page.css", "charts.css", "results.css", "comparison.css"),
            ("page.js", "list.js", "comparison.js"),
            maps=[view | {"channels": view["channels"][:most]} for view in maps],
            **facts,
        )
        return page, sum(sum(own[:most]) for own in sizes)

    return fit_page(draw, max_size, "without maps", "compare fewer layers")


def _summary(comparison: Comparison) -> dict[str, Any]:
    agreement = comparison.agreement
    return {
        "images": counted(len(comparison.names), "image"),
        "pairs of calls": len(comparison.calls),
        "without a partner": len(comparison.unpaired_a) + len(comparison.unpaired_b) or None,
        "same best class": percent(agreement.top1) if agreement else None,
    }


def _sides(comparison: Comparison) -> list[tuple[str, str, str]]:
    """What each side was: name, of A, of B."""
    words = {"dtype": "data type", "special": "runs with"}
    names = [field.name for field in fields(SideFacts)]
    rows = [(words.get(name, name), getattr(comparison.a, name), getattr(comparison.b, name)) for name in names]
    return [row for row in rows if row[1] or row[2]]


_STATES = ("NaN or Inf", "other shapes", "differs", "noise", "same")


def _state(pair: PairedCall) -> str:
    difference = pair.difference
    if difference is None:
        return "other shapes"
    if difference.nonfinite:
        return "NaN or Inf"
    return "same" if difference.is_same else "differs" if pair.differs else "noise"


def _cells(pair: PairedCall) -> dict[str, Any]:
    """The fields of `PAIRS`, what is alike on both sides said once."""
    row = dict(PAIRS.row(pair))
    shapes = dict.fromkeys(shape_text(row[name]).replace("x", "×") for name in ("shape", "shape_b"))
    types = dict.fromkeys((row["type"], row["type_b"]))
    other = None if row["layer_b"] == row["layer"] else row["layer_b"]
    return row | {"shape": " / ".join(shapes), "type": " / ".join(types), "layer_b": other}


def _columns(comparison: Comparison) -> list[str]:
    cells = list(map(_cells, comparison.calls))
    shown = {*PAIRS.page, "layer_b", "noise", "paired_by"} - {"index", "layer"}
    if all(pair.paired_by == "name" for pair in comparison.calls):
        shown.discard("paired_by")
    hidden = {
        column.name for column in PAIRS if column.hides([row[column.name] for row in cells if column.name in row])
    }
    return [
        name
        for name in dict.fromkeys(column.name for column in PAIRS)
        if name in shown - hidden and any(row[name] not in (None, "") for row in cells)
    ]


def _pair_rows(comparison: Comparison) -> list[SimpleNamespace]:
    """The rows of `module_rows` for all pairs.

    A row also has the part of the page that shows its maps as ``link``, and as ``role`` what the answer says of it. A
    module has the last pair in it, and of its fields only what is true for what leaves it.
    """
    rows = module_rows((pair.a.name, pair.key, (at, pair)) for at, pair in enumerate(comparison.calls))
    links = {kept.key: f"maps={at}" for at, kept in reversed(list(enumerate(comparison.maps)))}
    roles = (("first difference", comparison.answer.first), ("adds most", comparison.answer.most))
    for row in rows:
        pairs: list[PairedCall] = [pair for _, pair in ([row.facts] if row.facts else row.parts)]
        row.is_call, row.calls = row.facts is not None, len(row.parts)
        row.orders = "–".join(map(str, dict.fromkeys(row.parts[at][0] for at in (0, -1))))
        row.state = min(map(_state, pairs), key=_STATES.index)
        row.link, row.role, row.largest = "", "", ""
        if not row.is_call:
            whole, alone = PAIRS.row(pairs[-1]), [pair.isolated_l2 for pair in pairs if pair.isolated_l2 is not None]
            row.cells = {name: whole[name] for name in ("relative_l2", *pairs[-1].similarities)}
            row.cells["isolated_l2"] = max(alone, default=None)
            continue
        row.cells, row.link = _cells(pairs[0]), links.get(row.name, "")
        row.role = ", ".join(role for role, key in roles if key == row.name)
        for parent in row.parents if row.role else ():
            rows[parent].is_open = True
        if (difference := pairs[0].difference) and (most := difference.largest):
            row.largest = f"image {most.image}, at {most.place}: A {most.a:.4g}, B {most.b:.4g}"
    return rows


def _maps_view(comparison: Comparison, maps: ComparedMaps) -> dict[str, Any]:
    """The maps of a pair for one image, and the ends of their two scales.

    A channel has the addresses of A, B and B − A, or the values where a map is one value.
    """
    difference = map_difference(maps)
    tiles = difference.tiles or ()
    name = comparison.names[maps.image] if maps.image < len(comparison.names) else ""
    spoiled = (f"{count:,} in {side}" for side, count in zip("AB", difference.nonfinite, strict=False) if count)
    channels = [
        {
            "channel": channel,
            "addresses": [] if tiles[0].values else [_map_address(tile.levels[at]) for tile in tiles],
            "numbers": [tile.values[at] for tile in tiles] if tiles[0].values else [],
        }
        for at, channel in enumerate(difference.channels)
    ]
    return {
        "maps": maps,
        "image": os.path.basename(name) or f"image {maps.image + 1}",
        "high": float(tiles[0].high[0]) if tiles else 0.0,
        "largest": float(tiles[2].high[0]) if tiles else 0.0,
        "nonfinite": " and ".join(spoiled),
        "channels": channels,
        "ramp": _map_address(_RAMP),
    }


def _map_address(levels: np.ndarray[Any, Any], cmap: str = _SIGNED) -> str:
    return png_address(to_image(np.ascontiguousarray(levels), cmap))


def _matrix_view(matrix: CkaMatrix) -> dict[str, Any]:
    """CKA of all against all as a picture of one pixel for each pair, and as numbers.

    In the picture 0 is dark, 1 is bright, and grey means no value. ``best`` is the layer of B that is most like each
    layer of A, and their CKA.
    """
    values, names_b = matrix.values, matrix.names_b
    shares = np.nan_to_num(values).clip(0, 1) * (colours.LEVELS - 1)
    levels = np.where(np.isnan(values), colours.CONSTANT, np.rint(shares)).astype(np.uint8)
    numbers = [[None if cka is None else round(cka, _DIGITS) for cka in finite_or_none(row)] for row in values]
    some = [
        (name, row, int(np.nanargmax(row)))
        for name, row in zip(matrix.names_a, values, strict=True)
        if (row == row).any()
    ]
    return {
        "matrix": matrix,
        "address": _map_address(levels, MAPS),
        "ramp": _map_address(_RAMP, MAPS),
        "data": {"a": matrix.names_a, "b": names_b, "values": numbers},
        "best": [(name, names_b[at], float(row[at])) for name, row, at in some],
    }
