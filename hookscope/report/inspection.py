"""The page of an inspection, its list of calls and graphs, and a small picture of it for a terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from markupsafe import Markup
from PIL import Image, ImageOps

from hookscope.drawing import class_colour, draw_boxes, draw_classes, shape_text
from hookscope.exemplars import Crops, LayerExemplars
from hookscope.explain import why_empty
from hookscope.findings import ranked, severity_counts
from hookscope.inspection import CallFacts, InspectedImage, Inspection, Place
from hookscope.models import short_name
from hookscope.report.charts import jpeg_address, png_address
from hookscope.report.exemplars import exemplar_views, fewer_exemplars
from hookscope.report.layers import (
    COLOUR_MAPS,
    colour_tables,
    fewer_channels,
    layer_views,
    map_or_cam,
    over_image,
    seen_image,
    small_cam,
)
from hookscope.report.page import MAX_SIZE, added_sections, fit_page, module_rows, render
from hookscope.structure import GraphNode, Marks, NetworkGraph, draw_graph, network_graph, size_of

_MOST_NODES = 250  # of a graph that is not the first
_MOST_REASONS = 3
_SIDE, _GAP, _GROUND = 256, 8, (128, 128, 128)  # visible on light and dark terminals
_IMAGES, _PLACES = 3, 4


def draw_page(
    inspection: Inspection,
    exemplars: Sequence[LayerExemplars] = (),
    crops: Crops | None = None,
    *,
    max_size: int | None = MAX_SIZE,
) -> str:
    """The page of an inspection: one self-contained file of HTML.

    ``exemplars`` of layers of the inspection, and their ``crops``, stand in the views of these layers; they take at
    most half of ``max_size``. A page larger than ``max_size`` bytes (None for any) keeps the channels with
    the largest share in the answer, and says how many it left out; if not even one fits, there is a WriteError.
    """
    rows = network_rows(inspection)
    facts = {
        "kind": "Inspection",
        "title": short_name(inspection.model),
        "is_random": inspection.is_random,
        "provenance": inspection.provenance,
        "inspection": inspection,
        "images": [_image_view(number, image) for number, image in enumerate(inspection.images)],
        "places": [_place_view(inspection, rows, place) for place in inspection.places],
        "total": _sums(inspection.calls),
        "rows": rows,
        "graphs": graph_views(inspection, rows),
        "count": severity_counts(inspection.places),
        "colour_maps": COLOUR_MAPS,
        "colour_tables": colour_tables(),
        "exemplars": {
            view["layer"].key: view
            for view in fewer_exemplars(
                exemplar_views(exemplars, crops or {}), math.inf if max_size is None else max_size // 2
            )
        },
        "added": added_sections(inspection),
    }

    whole = layer_views(inspection)

    def draw(room: float) -> tuple[str, int]:
        views = fewer_channels(whole, room)
        page = render(
            "page.html",
            ("page.css", "graph.css", "layer.css", "exemplars.css"),
            ("page.js", "list.js", "graph.js", "layer.js"),
            layers=views,
            **facts,
        )
        return page, sum(view.weight for view in views)

    least = f"with one channel of each of its {len(whole):,} layers"
    return fit_page(draw, max_size, least, "choose fewer layers, or a larger size")


def _sums(parts: Sequence[CallFacts]) -> dict[str, Any]:
    """Calls, from the first to the last, parameters and MACs; a layer that is called twice has its parameters once."""
    orders = [part.call.order for part in parts if part.call.order is not None]
    return {
        "calls": len(orders),
        "orders": "–".join(map(str, sorted({min(orders), max(orders)}))) if orders else "",
        "params": sum({part.call.name: part.params for part in parts}.values()),
        "macs": sum(part.macs for part in parts),
    }


def network_rows(inspection: Inspection) -> list[SimpleNamespace]:
    """The rows of `module_rows` for all calls, with what was measured.

    A row also has the number of the view of its ``layer``, None without one, and the address of a Grad-CAM. A module
    shows the Grad-CAM of the last layer in it.
    """
    rows = module_rows((facts.call.name, facts.call.key, facts) for facts in inspection.calls)
    numbers = {layer.call.key: number for number, layer in reversed(list(enumerate(inspection.layers)))}
    for row in rows:
        facts: CallFacts | None = row.facts
        vars(row).update(_sums(row.parts), type="", shape="", values=None, largest=None)
        row.layer, row.cam, row.cam_of, row.is_call = None, "", "", False
        if facts is None:
            continue
        row.layer, row.is_call = numbers.get(facts.call.key), facts.call.order is not None
        row.type, row.shape = facts.call.type, shape_text(facts.shape).replace("x", "×")
        row.values = None if facts.shape is None else size_of(facts.shape)
        row.largest = None if facts.low is None or facts.high is None else max(abs(facts.low), abs(facts.high))
        if row.layer is not None and (cam := small_cam(inspection, row.layer)):
            for shown in (row, *(rows[parent] for parent in row.parents if rows[parent].layer is None)):
                shown.cam, shown.cam_of = cam, row.name
    return rows


def _image_view(number: int, image: InspectedImage) -> dict[str, Any]:
    """An image with the addresses of its pictures, and the rows of its answer; without a name it has its position."""
    shown, cam, answer = seen_image(image.seen), image.cam, image.answer
    drawn = answer_picture(image, shown)
    rows = []
    for row in answer.rows if answer else ():
        share = None if answer and answer.kind == "numbers" else row.score
        colour = "" if row.index is None else "#{:02x}{:02x}{:02x}".format(*class_colour(row.index))
        rows.append({"name": row.name.removeprefix("box "), "share": share, "score": row.score, "colour": colour})
    return {
        "answer": "" if drawn is None else jpeg_address(drawn),
        "rows": rows,
        "number": number,
        "image": image,
        "seen": jpeg_address(shown),
        "cam": "" if cam is None else jpeg_address(over_image(shown, cam.still, shown.width)),
        "without_cam": image.without_cam if cam is None else why_empty(cam),
        "name": os.path.basename(image.name) or f"image {number}",
        "best": cam.prediction.name if cam else "",
    }


def answer_picture(image: InspectedImage, shown: Image.Image) -> Image.Image | None:
    """The classes of pixels, or the boxes, over what the network saw; None for other answers."""
    answer, ground = image.answer, shown.convert("RGB")
    if answer is None or answer.kind == "numbers":
        return None
    if answer.mask is not None:
        return draw_classes(ground, answer.mask)
    boxes = [row for row in answer.rows if row.box is not None]
    colours = [class_colour(row.index or 0) for row in boxes]
    return draw_boxes(ground, [row.box for row in boxes if row.box], colours, shown.width / image.seen.width)


def _place_view(inspection: Inspection, rows: Sequence[SimpleNamespace], place: Place) -> dict[str, Any]:
    """A place with the part of the page that shows more, the channel to show there, and a thumbnail.

    The distribution of ``facts`` stands in place of a thumbnail.
    """
    layer = drawn_layer(inspection, place.layer)
    by_name = {row.name: row for row in reversed(rows)}
    row = (by_name.get(place.layer) or by_name.get(place.layer.rpartition(".")[0])) if place.layer else None
    picture, about = _thumbnail(inspection, layer, place)
    return {
        "place": place,
        "link": f"layer={layer}" if layer is not None else f"call={row.number}" if row else "",
        "channel": place.channels[0] if place.channels and layer is not None else None,
        "picture": picture,
        "about": about,
        "facts": row.facts if row else None,
    }


def drawn_layer(inspection: Inspection, name: str) -> int | None:
    """The position of the layer with this key, or that has the parameter of this name."""
    for number, layer in enumerate(inspection.layers):
        if name in (layer.key, layer.call.key):
            return number
    owner = name.rpartition(".")[0]
    return next((number for number, layer in enumerate(inspection.layers) if owner and layer.call.key == owner), None)


def _thumbnail(inspection: Inspection, layer: int | None, place: Place) -> tuple[str, str]:
    """The address of a picture of a place, and what it shows: for its image, else for the first that has maps."""
    if layer is None:
        return "", ""
    images = range(len(inspection.images)) if place.image is None else (place.image, *range(len(inspection.images)))
    image = next(at for at in images if inspection.layers[layer].images[at] is not None)
    picture, channel = map_or_cam(inspection, layer, place, image)
    if picture is None:
        return "", ""
    if channel is not None:
        return png_address(picture), f"Feature map of channel {channel}"
    return jpeg_address(picture, 80), "Grad-CAM of the layer over the image"


def graph_views(inspection: Inspection, rows: Sequence[SimpleNamespace]) -> list[dict[str, Any]]:
    """The graphs of each depth that are not too large; none where the calls were not followed."""
    if inspection.trace is None:
        return []
    first, graphs = network_graph(inspection.trace), list[NetworkGraph]()
    while len((graph := network_graph(inspection.trace, len(graphs) + 1)).nodes) <= _MOST_NODES or not graphs:
        if graphs and graph.nodes == graphs[-1].nodes:
            break
        graphs.append(graph)
    title = f"graph of {short_name(inspection.model)}"
    return [
        {
            "blocks": sum(node.kind in ("layer", "block") for node in graph.nodes),
            "picture": Markup(
                draw_graph(graph, title, marks=_marks(inspection, graph), links=_links(inspection, rows, graph))
            ),
            "is_first": graph.nodes == first.nodes,
        }
        for graph in graphs
    ]


def _links(inspection: Inspection, rows: Sequence[SimpleNamespace], graph: NetworkGraph) -> dict[int, str]:
    """The view of the layer of each node, or of the last drawn layer in it; else its row in the list."""
    drawn = list(reversed(list(enumerate(inspection.layers))))
    views = {layer.call.name: number for number, layer in drawn}
    links = {row.name: f"#call={row.number}" for row in reversed(rows)}
    keys = {layer.call.key: f"#layer={number}" for number, layer in drawn}
    targets: dict[int, str] = {}
    for at, node in enumerate(graph.nodes):
        if node.layers and node.kind != "operation":
            inside = [number for name, number in views.items() if _is_in(name, node)]
            link = keys.get(node.key) or (f"#layer={max(inside)}" if inside else links.get(node.key))
            targets |= {at: link} if link else {}
    return targets


def _is_in(name: str, node: GraphNode) -> bool:
    return any(f"{name}.".startswith(f"{layer}.") for layer in node.layers)


def _marks(inspection: Inspection, graph: NetworkGraph) -> Marks:
    """The most severe finding of each node, and the first reasons."""
    reasons = [(finding.layer, finding.severity, finding.evidence) for finding in ranked(inspection.findings)]
    marks: dict[int, tuple[str, str]] = {}
    for at, node in enumerate(graph.nodes):
        if node.kind not in ("layer", "block"):
            continue
        own = [(layer, severity, words) for layer, severity, words in reasons if _is_in(layer.partition("#")[0], node)]
        if own:
            lines = [f"{layer}: {words}" for layer, _, words in own[:_MOST_REASONS]]
            lines += [f"and {len(own) - _MOST_REASONS} more"] if len(own) > _MOST_REASONS else []
            marks[at] = own[0][1], "\n".join(lines)
    return marks


def draw_overview(inspection: Inspection) -> Image.Image:
    """A row for each of the first images: as the network saw it, with its Grad-CAM, and the first places with maps."""
    rows = [_overview_row(inspection, number) for number in range(min(_IMAGES, len(inspection.images)))]
    width, step = max(row.width for row in rows), _SIDE + _GAP
    overview = Image.new("RGB", (width, len(rows) * step - _GAP), _GROUND)
    for number, row in enumerate(rows):
        overview.paste(row, (0, number * step))
    return overview


def _overview_row(inspection: Inspection, number: int) -> Image.Image:
    image = inspection.images[number]
    pictures = [image.seen.convert("RGB")]
    if (answer := answer_picture(image, seen_image(pictures[0]))) is not None:
        pictures.append(answer)
    if image.cam is not None:
        pictures.append(over_image(pictures[0], image.cam.still, max(_SIDE, image.seen.width)))
    thumbnails = list[Image.Image]()  # of the first places: the map of the channel, else the Grad-CAM of the layer
    for place in inspection.places:
        layer = drawn_layer(inspection, place.layer) if place.image in (None, number) else None
        if layer is not None and len(thumbnails) < _PLACES:
            thumbnails += filter(None, map_or_cam(inspection, layer, place, number, _SIDE)[:1])
    step = _SIDE + _GAP
    row = Image.new("RGB", ((len(pictures) + bool(thumbnails)) * step - _GAP, _SIDE), _GROUND)
    for at, picture in enumerate(pictures):
        row.paste(_in_square(picture, _SIDE), (at * step, 0))
    small = (_SIDE - _GAP) // 2
    for at, thumbnail in enumerate(thumbnails):
        where = len(pictures) * step + at % 2 * (small + _GAP), at // 2 * (small + _GAP)
        row.paste(_in_square(thumbnail, small), where)
    return row


def _in_square(image: Image.Image, side: int) -> Image.Image:
    """The whole image in a square; maps smaller than it keep their pixels visible."""
    smaller = max(image.size) < side
    way = Image.Resampling.NEAREST if smaller else Image.Resampling.BOX
    return ImageOps.pad(image.convert("RGB"), (side, side), way, _GROUND)
