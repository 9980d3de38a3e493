"""Pictures of a comparison: differences by depth, maps of both sides, and CKA of all layers against all."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from PIL import Image

from hookscope.comparison.facts import TIMES_NOISE, CkaMatrix, ComparedMaps, Comparison, PairedCall
from hookscope.drawing import (
    MOST_PIXELS,
    Colour,
    DifferencePage,
    DrawnDifference,
    MapDifference,
    Mark,
    Panel,
    RowPlot,
    colours,
    compare_maps,
    draw_difference,
    layer_label,
    palette,
    row_plot,
    shape_text,
    short_label,
)
from hookscope.errors import NoMapError, one_of
from hookscope.findings import counted
from hookscope.hooks import Maps
from hookscope.models import is_random

_MOST_ROWS = 100  # of the strip; longer networks are folded by module
_MOST_TOGETHER = 40  # calls of a run without modules, and of a module of the answer that has a row for each call

# of the matrix, in inches
_NARROWEST, _WIDEST, _CELL, _LABEL = 1.5, 9.0, 0.16, 0.13
_LONGEST_LABEL = 40
_GREY = (190, 190, 190)  # no value
_BEST = ((Colour.INK, "", 4.4), ("white", "", 3.4))  # a white dot with an edge


def differences_plot(comparison: Comparison) -> RowPlot:
    """How far the outputs of each pair of calls are apart, from the input to the output.

    The relative L2 differences are on a logarithmic scale: accumulated, and of each layer alone. The grey bar ends at
    ten times the noise of A. Linear CKA has a panel of its own. More than 100 pairs are folded by module, and the
    answer stands beside its rows.
    """
    rows = _rows(comparison.calls, {comparison.answer.first, comparison.answer.most})
    folded = any(len(row.pairs) > 1 for row in rows)
    return row_plot(
        rows,
        DIFFERENCE_PANELS,
        [row.label for row in rows],
        _marked(comparison, rows),
        [*_side_lines(comparison), *_answer_lines(comparison)],
        keys=["a row of several calls: ● the last, line from least to most, grey and ◆ the most"] if folded else [],
        title=_title(comparison),
    )


@dataclass(frozen=True)
class DifferenceRow:
    """A pair of calls, or several that stand in one module."""

    label: str
    pairs: Sequence[PairedCall]

    def values(self, name: str) -> list[float]:
        """The finite ones; the last one is of what leaves the module."""
        known = (getattr(pair, name) for pair in self.pairs)
        return [value for value in known if value is not None and math.isfinite(value)]

    def span(self, name: str) -> tuple[float, float] | None:
        values = self.values(name)
        return (min(values), max(values)) if len(values) > 1 and any(values) else None

    def last(self, name: str) -> float | None:
        return next(reversed(self.values(name)), None)

    @property
    def noise(self) -> float:
        return TIMES_NOISE * max(self.values("noise"), default=0.0)

    @property
    def state(self) -> str:
        """What no point on a logarithmic scale says: ``same``, ``spoiled`` or ``shapes``."""
        known = [pair.difference for pair in self.pairs if pair.difference is not None]
        if any(change.nonfinite or change.relative_l2 == math.inf for change in known):
            return "spoiled"
        if not known:
            return "shapes"
        return "same" if all(change.is_same for change in known) else ""


DIFFERENCE_PANELS = [
    Panel(
        "relative L2 difference",
        6.0,
        [
            Mark("bar", lambda row: row.noise or None, Colour.GRID, f"grey up to {TIMES_NOISE} x noise of A", 1.0),
            Mark("line", lambda row: row.span("relative_l2"), Colour.SKY, size=1.6),
            Mark("path", lambda row: row.last("relative_l2") or None, Colour.BLUE, "blue ● accumulated up to here"),
            Mark(
                "dot",
                lambda row: max(row.values("isolated_l2"), default=0.0) or None,
                Colour.ORANGE,
                "orange ◆ the layer of B alone, on the inputs of A",
                3.0,
                marker="D",
            ),
            Mark("left", lambda row: row.state == "same", Colour.GREEN, "◂ the same to the bit", marker="<"),
            Mark("right", lambda row: row.state == "spoiled", Colour.ALARM, "▸ NaN or Inf on one side", marker=">"),
            Mark("left", lambda row: row.state == "shapes", Colour.INK, "× other shapes", marker="x"),
        ],
        "log",
        decades=20,
        include=[1.0],  # where nothing is left of A
    ),
    Panel(
        "linear CKA",  # an unbiased estimate, which may be below 0
        1.8,
        [
            Mark("line", lambda row: row.span("cka"), Colour.SKY, size=1.5),
            Mark("dot", lambda row: row.last("cka"), Colour.BLUE, size=3.0),
        ],
        include=[1.0],
    ),
]
"""The panels of `differences_plot`; each reads a `DifferenceRow`."""


def _rows(pairs: Sequence[PairedCall], keys: Collection[str]) -> list[DifferenceRow]:
    """A row for each pair; where these are too many, one for each module at the depth that leaves few enough.

    The pairs ``keys`` and those beside them in their modules keep their own rows, unless these are too many.
    """
    if len(pairs) <= _MOST_ROWS:
        return _single(pairs)
    paths = [pair.a.name.split(".") for pair in pairs]
    runs: Sequence[tuple[str, Sequence[PairedCall]]]
    runs = [("", pairs[at : at + _MOST_TOGETHER]) for at in range(0, len(pairs), _MOST_TOGETHER)]
    for depth in range(max(map(len, paths)) - 1, 0, -1):
        modules = [".".join(path[:depth]) for path in paths]
        by_module = [(name, [pairs[at] for at in run]) for name, run in groupby(range(len(pairs)), modules.__getitem__)]
        if len(by_module) <= _MOST_ROWS:
            runs = by_module
            break
    rows = list[DifferenceRow]()
    for module, run in runs:
        is_answer = len(run) <= _MOST_TOGETHER and any(pair.key in keys for pair in run)
        name = module or f"{run[0].key} … {run[-1].key}"
        rows += _single(run) if is_answer or len(run) == 1 else [DifferenceRow(f"{name}  {len(run)} calls", run)]
    return rows


def _single(pairs: Sequence[PairedCall]) -> list[DifferenceRow]:
    return [DifferenceRow(layer_label(pair.key, pair.a.type), [pair]) for pair in pairs]


def _title(comparison: Comparison) -> str:
    a, b = comparison.models
    return f"{a} (A) and {b} (B), {counted(len(comparison.names), 'image')}"


def _side_lines(comparison: Comparison) -> list[tuple[str, str]]:
    """A line for each side, in red if its weights are random."""
    lines = []
    for name, model, side in zip("AB", comparison.models, (comparison.a, comparison.b), strict=True):
        weights = f"weights: {side.weights}" if side.weights else ""
        words = filter(None, [model, weights, side.dtype, side.device, side.preprocess, side.special])
        lines.append((f"{name}: {', '.join(words)}", Colour.ALARM if is_random(side.weights) else Colour.FAINT))
    return lines


def _answer_lines(comparison: Comparison) -> list[tuple[str, str]]:
    answer = comparison.answer
    lines = [answer.sentence, answer.advice]
    for name, calls in (("A", comparison.unpaired_a), ("B", comparison.unpaired_b)):
        lines.append(f"{counted(len(calls), 'call')} of {name} without a partner" if calls else "")
    return [(line, Colour.INK) for line in lines if line]


def _marked(comparison: Comparison, rows: Sequence[DifferenceRow]) -> dict[int, str]:
    answer, words = comparison.answer, dict[int, list[str]]()
    for key, what in ((answer.first, "first difference"), (answer.most, "adds most")):
        at = next((at for at, row in enumerate(rows) if key and any(pair.key == key for pair in row.pairs)), None)
        if at is not None:
            words.setdefault(at, []).append(what if len(rows[at].pairs) == 1 else f"{what}: {key}")
    return {at: ", ".join(parts) for at, parts in words.items()}


def draw_compared_maps(comparison: Comparison, *, cmap: str = "RdBu_r") -> Image.Image:
    """Draw the kept feature maps of A, of B, and B - A, of the channels that changed most.

    The scales are symmetric about 0: one for A and B, and one for the difference. NaN and Inf have colours of their
    own. `read_sheet` gives the values of a file of such a picture, and the image holds its facts as JSON in
    ``image.info["hookscope"]``.

    Args:
        comparison: What `compare` returns, with the layers that it kept.
        cmap: A colour map of matplotlib.

    Raises:
        NoMapError: if no maps were kept.
        UsageError: for an unknown colour map, or a page of more than 160 million pixels.

    Example:
        >>> import hookscope, torch
        >>> nets = [torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)) for _ in range(2)]
        >>> comparison = hookscope.compare(*nets, torch.rand(1, 3, 8, 8), keep="0")
        >>> draw_compared_maps(comparison).mode
        'P'
    """
    comparison = one_of(Comparison, comparison, "compare")
    if not comparison.maps:
        raise NoMapError("the comparison has no feature maps", do="compare keeps the maps of keep=")
    many = len(comparison.maps)
    bands = [(maps, draw_difference(map_difference(maps), MOST_PIXELS // many)) for maps in comparison.maps]
    page = DifferencePage([drawn for _, drawn in bands])
    page.add_text(_title(comparison), size=15, bold=True)
    for line, colour in [*_side_lines(comparison), *_answer_lines(comparison)]:
        page.add_text(line, 2, alarm=colour == Colour.ALARM)
    hint = "The channels that changed most come first. Bar: root mean square of the map, one measure for all three."
    page.add_text(hint, 2)
    keys = Counter(maps.key for maps in comparison.maps)
    pairs = {pair.key: pair for pair in comparison.calls}
    for maps, drawn in bands:
        name = maps.key if keys[maps.key] == 1 else f"{maps.key}, image {maps.image}"
        for line, bold in zip(_band_lines(comparison, maps, drawn, pairs.get(maps.key)), (True, False), strict=True):
            page.add_text(line, 18 if bold else 2, 13 if bold else 12, bold=bold)
        page.add_difference(drawn, name)
    shown = [{"layer": maps.key, "image": maps.image, **drawn.maps.facts(drawn.drawn)} for maps, drawn in bands]
    return page.image(many, cmap, comparison.provenance, shown)


def map_difference(maps: ComparedMaps) -> MapDifference:
    """The maps of A and B on one scale, and B - A on its own; of the channels that differ."""
    a, b = (Maps("", torch.from_numpy(np.ascontiguousarray(values)), "N C H W") for values in (maps.a, maps.b))
    difference = compare_maps(a, b, ("A", "B", "difference"), len(maps.channels))
    numbers = [maps.channels[at] for at in difference.channels]
    tiles = difference.tiles and tuple(replace(tile, channels=numbers) for tile in difference.tiles)
    return replace(difference, channels=tuple(numbers), tiles=tiles)


def _band_lines(
    comparison: Comparison, maps: ComparedMaps, drawn: DrawnDifference, pair: PairedCall | None
) -> tuple[str, str]:
    name = comparison.names[maps.image] if maps.image < len(comparison.names) else f"image {maps.image}"
    title, words = maps.key, list[str]()
    if pair is not None:
        title += f"   {pair.a.type}   {shape_text(pair.shape_a)}"
        title += f"   B: {pair.key_b}" if pair.key_b != pair.key else ""
        measures = {"relative L2": pair.relative_l2, "isolated_l2": pair.isolated_l2}
        words += [f"{measure} {value:.4g}" for measure, value in measures.items() if value is not None]
    channels = counted(drawn.drawn, "channel") if drawn.drawn else "no channel differs in this image"
    return f"{title}   {os.path.basename(name)}", "   ".join([*words, channels])


def matrix_plot(matrix: CkaMatrix, a: str = "A", b: str = "B") -> RowPlot:
    """Linear CKA of every layer of A, the rows, against every layer of B, the columns, dark 0 and bright 1.

    A dot marks the layer of B that is most similar to each layer of A. ``a`` and ``b`` name the sides.
    """
    columns = matrix.values.shape[1]
    width = max(_NARROWEST, min(_WIDEST, columns * _CELL))
    levels = np.rint(np.nan_to_num(matrix.values).clip(0, 1) * (colours.LEVELS - 1)).astype(int)
    cells = palette("viridis")[levels]
    cells[np.isnan(matrix.values)] = _GREY
    best = {at: int(np.nanargmax(row)) for at, row in enumerate(matrix.values) if not np.isnan(row).all()}
    nothing = int(np.isnan(matrix.values).sum())
    lines = ["White dot: the layer of B that is most like the layer of A in this row."]
    lines += [f"Grey: {counted(nothing, 'pair')} with a layer that is alike for all images."] if nothing else []
    marks = [Mark("cells", cells.__getitem__, ""), *(Mark("dot", best.get, *dot) for dot in _BEST)]
    step = math.ceil(columns * _LABEL / width)
    ticks = [(at, short_label(matrix.names_b[at], _LONGEST_LABEL)) for at in range(0, columns, step)]
    ramp = "viridis", ("0", "0.5", "1")
    panel = Panel("", width, marks, limits=(-0.5, columns - 0.5), ticks=ticks, ramp=ramp, upright=True)
    title = f"Linear CKA of {a} (A, rows) against {b} (B, columns), {counted(matrix.images, 'image')}"
    labels = [short_label(name, _LONGEST_LABEL) for name in matrix.names_a]
    return row_plot(
        range(len(labels)), [panel], labels, lines=[(line, Colour.INK) for line in lines], title=title, tallest=_WIDEST
    )
