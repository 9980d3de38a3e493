"""The page of exemplars: a table of channels for each layer, with crops, values, classes and histograms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from hookscope.hooks import AnyModel
from hookscope.models import as_loaded, is_random, short_name
from hookscope.report.charts import jpeg_address, png_address
from hookscope.report.page import MAX_SIZE, fit_page, items_that_fit, render

_SHARP = 48  # pixels of the longer side up to which a crop is a PNG: the squares of a magnified JPEG show its blocks
_QUALITY = 75  # of JPEG
_SHOWN = 76  # pixels of a cell on the page
_ROW = 1_200  # about so many bytes has a row beside its pictures


def draw_exemplars_page(
    layers: Sequence[LayerExemplars],
    net: AnyModel,
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
    net, images = as_loaded(net), max(layer.images for layer in layers)
    views = exemplar_views(layers, cut_crops(net, layers) if crops is None else crops)

    def draw(room: float) -> tuple[str, int]:
        some = fewer_exemplars(views, room)
        page = render(
            "exemplars.html",
            ("page.css", "exemplars.css"),
            ("page.js", "list.js"),
            kind="Exemplars",
            title=title or f"{short_name(net.name)}, {counted(images, 'image')}",
            is_random=is_random(net.weights),
            summary={"weights": net.weights, "images": f"{images:,}", "preprocessing": net.preprocess.describe()},
            views=some,
            provenance=provenance or {},
        )
        return page, sum(_weight(channel) for view in some for channel in view["channels"])

    return fit_page(draw, max_size, "with one channel of each layer", "choose fewer layers, or a larger size")


View = dict[str, Any]


def exemplar_views(layers: Sequence[LayerExemplars], crops: Crops) -> list[View]:
    """The exemplars of each layer as a page shows them."""
    addresses: dict[int, str] = {}
    return [
        {
            "layer": layer,
            "channels": [_channel_view(layer, channel, crops, addresses) for channel in layer.channels],
            "has_rings": any(crops[layer.key, exemplar].dot for channel in layer.channels for exemplar in channel.most),
        }
        for layer in layers
    ]


def fewer_exemplars(views: Sequence[View], room: float) -> list[View]:
    """The views with as many of their first channels as fit into ``room`` bytes, and one at least."""
    most = max(1, items_that_fit([list(map(_weight, view["channels"])) for view in views], room))
    return [view | {"channels": view["channels"][:most], "words": _words(view, most)} for view in views]


def _words(view: View, most: int) -> list[str]:
    """What stands above the table of a layer with ``most`` channels."""
    layer, ring = view["layer"], f" A ring{RING_WORDS.removeprefix('a ring')}." if view["has_rings"] else ""
    lines = [f"{measure_words(layer.measure).capitalize()}. {field_words(layer.field).capitalize()}.{ring}"]
    if most < (total := len(layer.channels)):
        lines.append(f"The page has the first {most:,} of {total:,} channels, to keep it small.")
    return lines


def _weight(channel: View) -> int:
    """About how many bytes the row takes."""
    return _ROW + sum(len(cell["address"]) + 300 for _, cells in channel["groups"] for cell in cells)


def _channel_view(layer: LayerExemplars, channel: ChannelExemplars, crops: Crops, addresses: dict[int, str]) -> View:
    """A row: the channel, what is said of it, and its pictures in groups with their names."""
    classes, counts, edges = class_words(channel), channel.counts, channel.edges
    whose = f" for {channel.best_class}" if channel.best_class else ""
    selectivity = "" if channel.selectivity is None else f"selectivity {channel.selectivity:.2f}{whose}"
    words = [f"classes of the strongest: {classes}" if classes else "", selectivity]
    distribution = None
    if len(counts):
        mean = float(((edges[:-1] + edges[1:]) / 2 * counts).sum() / max(1, counts.sum()))
        ends = {"low": float(edges[0]), "mean": mean, "high": float(edges[-1])}
        distribution = {"histogram": counts.tolist(), **ends}
    most, least = ([_cell(layer, image, crops, addresses) for image in best] for best in (channel.most, channel.least))
    groups = ("", most), ("excite it least", least), ("synthesized", list(map(_synthesized, channel.synthesized)))
    return {
        "channel": channel,
        "classes": classes,
        "words": "; ".join(filter(None, words)),
        "distribution": distribution,
        "groups": [(name, cells) for name, cells in groups if cells],
    }


def _cell(layer: LayerExemplars, exemplar: Exemplar, crops: Crops, addresses: dict[int, str]) -> View:
    """A picture of a row: its address, or why it is missing, its size on the page, and the words under it."""
    crop = crops[layer.key, exemplar]
    place = "" if exemplar.place is None else f", unit {exemplar.place[0]}, {exemplar.place[1]}"
    about = f"{os.path.basename(exemplar.name) or exemplar.name}{place}"
    address = "" if crop.image is None else addresses.get(id(crop.image), "")
    if crop.dot is not None and (drawn := crop.drawn()) is not None:
        address = jpeg_address(drawn, _QUALITY)
    elif crop.image is not None and not address:
        sharp = max(crop.image.size) <= _SHARP
        address = addresses[id(crop.image)] = png_address(crop.image) if sharp else jpeg_address(crop.image, _QUALITY)
    return _shown(address, crop.size, exemplar.value, exemplar.label, about, crop.missing)


def _synthesized(made: SynthesizedImage) -> View:
    drawn = fitted(made.image)
    return _shown(
        jpeg_address(drawn, _QUALITY), drawn.size, made.value, times_best(made), f"synthesized, seed {made.seed}"
    )


def _shown(address: str, size: tuple[int, int], value: float, words: str, about: str, missing: str = "") -> View:
    width, height = (max(1, round(side * _SHOWN / CELL)) for side in size)
    more = {"value": value, "words": words, "about": about, "missing": missing}
    return {"address": address, "width": width, "height": height, **more}
