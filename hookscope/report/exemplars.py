"""The page of exemplars: a table of channels for each layer, with crops, values, classes and histograms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hookscope.errors import UsageError
from hookscope.exemplars import (
    CELL,
    RING_WORDS,
    ChannelExemplars,
    Crops,
    Exemplar,
    LayerExemplars,
    SynthesizedImage,
    class_words,
    cut_crops,
    field_words,
    fitted,
    measure_words,
    times_best,
)
from hookscope.findings import counted
from hookscope.models import LoadedModel, is_random
from hookscope.report.charts import jpeg_address, png_address
from hookscope.report.page import MAX_SIZE, fit_page, items_that_fit, render

_SHARP = 48  # pixels of the longer side up to which a crop is a PNG: the squares of a magnified JPEG show its blocks
_QUALITY = 75  # of JPEG
_SHOWN = 76  # pixels of a cell on the page
_ROW = 1_200  # about so many bytes has a row beside its pictures


def draw_exemplars_page(
    layers: Sequence[LayerExemplars],
    net: LoadedModel,
    crops: Crops | None = None,
    title: str = "",
    *,
    provenance: Mapping[str, Any] | None = None,
    max_size: int | None = MAX_SIZE,
) -> str:
    """A page of HTML with a table for each layer: the exemplars of each channel, their values, classes and histograms.

    A table can be sorted by selectivity, and filtered by class. ``crops`` are cut from the files if they are not given.
    A page larger than ``max_size`` bytes (None for any) has the first channels of each layer, and says how many; if not
    even one channel fits, there is a WriteError.
    """
    if not layers:
        raise UsageError("there is no layer to draw", do="give the result of find_exemplars")
    images = max(layer.images for layer in layers)
    views = exemplar_views(layers, cut_crops(net, layers) if crops is None else crops)

    def draw(room: float) -> tuple[str, int]:
        some = fewer_exemplars(views, room)
        page = render(
            "exemplars.html",
            ("page.css", "exemplars.css"),
            ("page.js", "list.js"),
            kind="Exemplars",
            title=title or f"{net.name}, {counted(images, 'image')}",
            is_random=is_random(net.weights),
            summary={"weights": net.weights, "images": f"{images:,}", "preprocessing": net.preprocess.describe()},
            views=some,
            provenance=provenance or {},
        )
        return page, sum(channel.weight for view in some for channel in view.channels)

    return fit_page(draw, max_size, "with one channel of each layer", "choose fewer layers, or a larger size")


@dataclass(frozen=True)
class Cell:
    """A picture of a row: its address, size on the page, the words under it, and where it comes from."""

    address: str
    width: int
    height: int
    value: float
    words: str
    about: str
    missing: str = ""


@dataclass(frozen=True)
class ChannelView:
    """A row: the channel, and its pictures in groups with their names."""

    channel: ChannelExemplars
    groups: tuple[tuple[str, tuple[Cell, ...]], ...]

    @property
    def classes(self) -> str:
        return class_words(self.channel)

    @property
    def words(self) -> str:
        channel, classes = self.channel, f"classes of the strongest: {self.classes}" if self.classes else ""
        whose = f" for {channel.best_class}" if channel.best_class else ""
        selectivity = "" if channel.selectivity is None else f"selectivity {channel.selectivity:.2f}{whose}"
        return "; ".join(filter(None, [classes, selectivity]))

    @property
    def distribution(self) -> dict[str, Any] | None:
        counts, edges = self.channel.counts, self.channel.edges
        if not len(counts):
            return None
        middle = (edges[:-1] + edges[1:]) / 2
        mean = float((middle * counts).sum() / max(1, counts.sum()))
        return {"histogram": counts.tolist(), "low": float(edges[0]), "mean": mean, "high": float(edges[-1])}

    @cached_property
    def weight(self) -> int:
        """About how many bytes the row takes."""
        return _ROW + sum(len(cell.address) + 300 for _, cells in self.groups for cell in cells)


@dataclass(frozen=True)
class ExemplarsView:
    """The exemplars of a layer as a page shows them; it may have fewer channels than ``layer``."""

    layer: LayerExemplars
    channels: tuple[ChannelView, ...]
    has_rings: bool

    @property
    def words(self) -> list[str]:
        ring = f" A ring{RING_WORDS.removeprefix('a ring')}." if self.has_rings else ""
        lines = [
            f"{measure_words(self.layer.measure).capitalize()}. {field_words(self.layer.field).capitalize()}.{ring}"
        ]
        count, total = len(self.channels), len(self.layer.channels)
        if count < total:
            lines.append(f"The page has the first {count:,} of {total:,} channels, to keep it small.")
        return lines


def exemplar_views(layers: Sequence[LayerExemplars], crops: Crops) -> list[ExemplarsView]:
    return [_view(layer, crops) for layer in layers]


def fewer_exemplars(views: Sequence[ExemplarsView], room: float) -> list[ExemplarsView]:
    """The views with as many of their first channels as fit into ``room`` bytes, and one at least."""
    most = items_that_fit([[channel.weight for channel in view.channels] for view in views], room)
    return [replace(view, channels=view.channels[: max(1, most)]) for view in views]


def _view(layer: LayerExemplars, crops: Crops) -> ExemplarsView:
    addresses: dict[int, str] = {}
    channels = []
    for channel in layer.channels:
        most, least = (
            tuple(_cell(layer, each, crops, addresses) for each in group) for group in (channel.most, channel.least)
        )
        made = tuple(map(_synthesized, channel.synthesized))
        groups = (("", most), ("excite it least", least), ("synthesized", made))
        channels.append(ChannelView(channel, tuple((words, cells) for words, cells in groups if cells)))
    has_rings = any(crops[layer.key, each].dot for channel in layer.channels for each in channel.most)
    return ExemplarsView(layer, tuple(channels), has_rings)


def _cell(layer: LayerExemplars, exemplar: Exemplar, crops: Crops, addresses: dict[int, str]) -> Cell:
    crop = crops[layer.key, exemplar]
    place = "" if exemplar.place is None else f", unit {exemplar.place[0]}, {exemplar.place[1]}"
    about = f"{os.path.basename(exemplar.name) or exemplar.name}{place}"
    if crop.image is None:
        return Cell("", _SHOWN, _SHOWN, exemplar.value, exemplar.label, about, crop.missing)
    if crop.dot is not None:
        drawn = crop.drawn()
        assert drawn is not None
        address = jpeg_address(drawn, _QUALITY)
    elif (address := addresses.get(id(crop.image), "")) == "":
        sharp = max(crop.image.size) <= _SHARP
        address = addresses[id(crop.image)] = png_address(crop.image) if sharp else jpeg_address(crop.image, _QUALITY)
    return Cell(address, *_shown(crop.size), exemplar.value, exemplar.label, about)


def _synthesized(made: SynthesizedImage) -> Cell:
    drawn, about = fitted(made.image), f"synthesized, seed {made.seed}"
    address, size = jpeg_address(drawn, _QUALITY), _shown(drawn.size)
    return Cell(address, *size, made.value, times_best(made), about)


def _shown(size: tuple[int, int]) -> tuple[int, int]:
    width, height = (max(1, round(side * _SHOWN / CELL)) for side in size)
    return width, height
