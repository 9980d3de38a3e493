"""The page of a comparison: where two sides part, difference by difference, with maps and CKA."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
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
from hookscope.report.network import MAPS, ModuleRow, module_rows
from hookscope.report.page import MAX_SIZE, added_sections, fit_page, items_that_fit, render

_SIGNED = "RdBu_r"
_DIGITS = 4  # of the CKA that the page holds


def draw_comparison_page(comparison: Comparison, *, max_size: int | None = MAX_SIZE) -> str:
    """The page of a comparison: one self-contained file of HTML.

    A page larger than ``max_size`` bytes (None for any) keeps the channels that changed most, and says how many it left
    out. If it does not fit even without maps, there is a WriteError.
    """
    maps = [MapsView.of(comparison, kept) for kept in comparison.maps]
    rows = _pair_rows(comparison)
    untrained = [name for name, side in (("A", comparison.a), ("B", comparison.b)) if is_random(side.weights)]
    facts = {
        "kind": "Comparison",
        "title": f"{comparison.a.model} and {comparison.b.model}",
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
        "matrix": None if comparison.matrix is None else MatrixView(comparison.matrix),
        "added": added_sections(comparison),
    }
    sizes = [[channel.size for channel in view.channels] for view in maps]

    def draw(room: float) -> tuple[str, int]:
        most = items_that_fit(sizes, room)
        page = render(
            "comparison.html",
            ("page.css", "charts.css", "results.css", "comparison.css"),
            ("page.js", "list.js", "comparison.js"),
            maps=[replace(view, channels=view.channels[:most]) for view in maps],
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


@dataclass
class PairRow(ModuleRow[tuple[int, PairedCall]]):
    """A line of the list of pairs; ``facts`` are the position of a pair, and the pair itself.

    Attributes:
        link: The part of the page that shows its maps; empty without maps.
        role: What the answer says of it.
    """

    link: str = ""
    role: str = ""

    @property
    def is_call(self) -> bool:
        return self.facts is not None

    @property
    def calls(self) -> int:
        return len(self.parts)

    @property
    def orders(self) -> str:
        first, last = self.parts[0][0], self.parts[-1][0]
        return str(first) if first == last else f"{first}–{last}"

    @property
    def pair(self) -> PairedCall:
        """The pair, of a module the last one in it."""
        return (self.facts or self.parts[-1])[1]

    @property
    def cells(self) -> Mapping[str, Any]:
        """The fields of `PAIRS`; of a module only what is true for what leaves it."""
        row = dict(PAIRS.row(self.pair))
        if self.facts is None:
            alone = [inside.isolated_l2 for _, inside in self.parts if inside.isolated_l2 is not None]
            kept = {name: row[name] for name in ("relative_l2", *self.pair.similarities)}
            return kept | {"isolated_l2": max(alone, default=None)}
        shapes = dict.fromkeys(shape_text(row[name]).replace("x", "×") for name in ("shape", "shape_b"))
        types = dict.fromkeys((row["type"], row["type_b"]))
        other = None if row["layer_b"] == row["layer"] else row["layer_b"]
        return row | {"shape": " / ".join(shapes), "type": " / ".join(types), "layer_b": other}

    @property
    def largest(self) -> str:
        largest = self.facts and self.pair.difference and self.pair.difference.largest
        if not largest:
            return ""
        return f"image {largest.image}, at {largest.place}: A {largest.a:.4g}, B {largest.b:.4g}"

    @property
    def state(self) -> str:
        states = {_state(pair) for _, pair in ([self.facts] if self.facts else self.parts)}
        return next(state for state in _STATES if state in states)


_STATES = ("NaN or Inf", "other shapes", "differs", "noise", "same")


def _state(pair: PairedCall) -> str:
    difference = pair.difference
    if difference is None:
        return "other shapes"
    if difference.nonfinite_a or difference.nonfinite_b:
        return "NaN or Inf"
    return "same" if difference.is_same else "differs" if pair.differs else "noise"


def _columns(comparison: Comparison) -> list[str]:
    cells = [PairRow(0, (), "", (at, pair), [(at, pair)]).cells for at, pair in enumerate(comparison.calls)]
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


def _pair_rows(comparison: Comparison) -> list[PairRow]:
    rows = module_rows(
        PairRow, enumerate(comparison.calls), lambda numbered: numbered[1].a, lambda numbered: numbered[1].key
    )
    links = {kept.key: f"maps={at}" for at, kept in reversed(list(enumerate(comparison.maps)))}
    answer = comparison.answer
    for row in rows:
        if row.is_call:
            row.link = links.get(row.name, "")
            roles = (("first difference", answer.first), ("adds most", answer.most))
            row.role = ", ".join(role for role, key in roles if key == row.name)
            if row.role:
                for parent in row.parents:
                    rows[parent].is_open = True
    return rows


@dataclass(frozen=True)
class ChannelView:
    """The maps of a channel: the addresses of A, B and B − A, or their values where a map is one value."""

    channel: int
    change: float
    addresses: tuple[str, ...]
    values: tuple[float, ...]

    @property
    def size(self) -> int:
        """About how many bytes it takes on the page."""
        return sum(map(len, self.addresses)) + 500


@dataclass(frozen=True)
class MapsView:
    """The maps of a pair for one image, and the ends of their two scales."""

    maps: ComparedMaps
    image: str
    pair: PairedCall | None
    high: float
    largest: float
    nonfinite: str
    channels: tuple[ChannelView, ...]

    @classmethod
    def of(cls, comparison: Comparison, maps: ComparedMaps) -> MapsView:
        difference = map_difference(maps)
        tiles = difference.tiles or ()
        channels = tuple(
            ChannelView(
                channel,
                difference.distances[at],
                () if tiles[0].values else tuple(_map_address(each.levels[at]) for each in tiles),
                tuple(each.values[at] for each in tiles) if tiles[0].values else (),
            )
            for at, channel in enumerate(difference.channels)
        )
        name = comparison.names[maps.image] if maps.image < len(comparison.names) else ""
        spoiled = (f"{count:,} in {side}" for side, count in zip("AB", difference.nonfinite, strict=False) if count)
        return cls(
            maps,
            os.path.basename(name) or f"image {maps.image + 1}",
            next((pair for pair in comparison.calls if pair.key == maps.key), None),
            float(tiles[0].high[0]) if tiles else 0.0,
            float(tiles[2].high[0]) if tiles else 0.0,
            " and ".join(spoiled),
            channels,
        )

    @property
    def ramp(self) -> str:
        return _map_address(np.arange(colours.LEVELS, dtype=np.uint8)[None])

    @property
    def left_out(self) -> int:
        return len(self.maps.channels) - len(self.channels)


def _map_address(levels: np.ndarray[Any, Any], cmap: str = _SIGNED) -> str:
    return png_address(to_image(np.ascontiguousarray(levels), cmap))


@dataclass(frozen=True)
class MatrixView:
    """CKA of all against all as a picture of one pixel for each pair, and as numbers."""

    matrix: CkaMatrix

    @property
    def address(self) -> str:
        """The address of the picture: dark 0, bright 1, and grey where there is no value."""
        shares = np.nan_to_num(self.matrix.values).clip(0, 1) * (colours.LEVELS - 1)
        levels = np.where(np.isnan(self.matrix.values), colours.CONSTANT, np.rint(shares)).astype(np.uint8)
        return _map_address(levels, MAPS)

    @property
    def ramp(self) -> str:
        return _map_address(np.arange(colours.LEVELS, dtype=np.uint8)[None], MAPS)

    @property
    def data(self) -> dict[str, Any]:
        values = [
            [None if value is None else round(value, _DIGITS) for value in finite_or_none(row)]
            for row in self.matrix.values
        ]
        return {"a": self.matrix.names_a, "b": self.matrix.names_b, "values": values}

    @property
    def best(self) -> Iterator[tuple[str, str, float]]:
        """The layer of B that is most like each layer of A, and their CKA."""
        for name, row in zip(self.matrix.names_a, self.matrix.values, strict=True):
            if not np.isnan(row).all():
                at = int(np.nanargmax(row))
                yield name, self.matrix.names_b[at], float(row[at])
