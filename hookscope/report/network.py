"""The network as a list: the calls of an inspection in order of execution, folded by module, and their pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import Heat, draw_heat, shape_text, to_image
from hookscope.hooks import MODEL, Call
from hookscope.inspection import CallFacts, Inspection, Place
from hookscope.report.charts import jpeg_address
from hookscope.structure import size_of

_UNFOLDED = 40  # rows that are open at first, at most

Facts = TypeVar("Facts")


@dataclass
class ModuleRow(Generic[Facts]):
    """A line of a list: a call, or a module with the calls in it.

    Attributes:
        number: Its position in the list.
        parents: Positions of the modules that it is in, the outermost first.
        name: Key of the call, or path of the module.
        facts: What was measured; None for a module without a call of its own.
        parts: The facts of all calls in the row.
        is_module: Whether there are calls in it.
        is_open: Whether these are shown at first.
    """

    number: int
    parents: tuple[int, ...]
    name: str
    facts: Facts | None
    parts: Sequence[Facts]
    is_module: bool = False
    is_open: bool = False

    @property
    def path(self) -> str:
        """The name without its last part: ``layer1.0.`` of ``layer1.0.conv1``."""
        return self.name[: self.name.rfind(".") + 1]

    @property
    def label(self) -> str:
        return self.name.removeprefix(self.path) or MODEL

    @property
    def depth(self) -> int:
        return len(self.parents)


_AnyRow = TypeVar("_AnyRow", bound=ModuleRow)  # type: ignore[type-arg]  # of any facts


def module_rows(
    row: Callable[..., _AnyRow],
    items: Iterable[Facts],
    call_of: Callable[[Facts], Call],
    key_of: Callable[[Facts], str],
) -> list[_AnyRow]:
    """A ``row`` for each of ``items`` in order of execution, each module before the calls in it."""
    rows: list[_AnyRow] = []

    def add(items: Iterable[Facts], depth: int, parents: tuple[int, ...]) -> None:
        """Append the rows of ``items``, whose names share their first ``depth`` parts."""
        for path, run in groupby(items, key=lambda facts: call_of(facts).name.split(".")[: depth + 1]):
            inside = list(run)
            deeper = [facts for facts in inside if call_of(facts).name.count(".") > depth]
            own = [facts for facts in inside if call_of(facts).name.count(".") <= depth]
            if not deeper or len(inside) == 1:
                add_calls(inside, parents)
                continue
            number = len(rows)
            last = own.pop() if own else None  # a block ends after the layers in it
            rows.append(row(number, parents, key_of(last) if last else ".".join(path), last, inside, is_module=True))
            add_calls(own, (*parents, number))
            add(deeper, depth + 1, (*parents, number))

    def add_calls(items: Iterable[Facts], parents: tuple[int, ...]) -> None:
        for facts in items:
            rows.append(row(len(rows), parents, key_of(facts), facts, [facts]))

    add(items, 0, ())
    _open_modules(rows)
    return rows


def _open_modules(rows: Sequence[_AnyRow]) -> None:
    """Open level after level of modules as long as the list stays short."""
    for depth in range(max((row.depth for row in rows), default=0)):
        if sum(row.depth <= depth + 1 for row in rows) > _UNFOLDED:
            return
        for row in rows:
            row.is_open |= row.is_module and row.depth == depth


@dataclass
class NetworkRow(ModuleRow[CallFacts]):
    """A line of the list: a call, or a module with the calls in it.

    Attributes:
        layer: Position of its view in `Inspection.layers`; None without one.
        cam: Address of the picture of its Grad-CAM, a module shows its last layer; empty without one.
        cam_of: Key of the layer of that Grad-CAM.
    """

    layer: int | None = None
    cam: str = ""
    cam_of: str = ""

    @property
    def is_call(self) -> bool:
        return self.facts is not None and self.facts.call.order is not None

    @property
    def orders(self) -> str:
        """Its position in order of execution; a module has the first and the last call in it."""
        orders = [part.call.order for part in self.parts if part.call.order is not None]
        if len(orders) < 2:
            return str(orders[0]) if orders else ""
        return f"{min(orders)}–{max(orders)}"

    @property
    def type(self) -> str:
        return self.facts.call.type if self.facts else ""

    @property
    def shape(self) -> str:
        return shape_text(self.facts.shape).replace("x", "×") if self.facts else ""

    @property
    def calls(self) -> int:
        return sum(part.call.order is not None for part in self.parts)

    @property
    def params(self) -> int:
        """Parameters of all layers in the row, of a layer that is called twice once."""
        return sum({part.call.name: part.params for part in self.parts}.values())

    @property
    def macs(self) -> int:
        return sum(part.macs for part in self.parts)

    @property
    def values(self) -> int | None:
        return None if self.facts is None or self.facts.shape is None else size_of(self.facts.shape)

    @property
    def largest(self) -> float | None:
        if self.facts is None or self.facts.low is None or self.facts.high is None:
            return None
        return max(abs(self.facts.low), abs(self.facts.high))


def network_rows(inspection: Inspection) -> list[NetworkRow]:
    """The rows of all calls in order of execution, each module before the calls in it."""
    rows = module_rows(NetworkRow, inspection.calls, lambda facts: facts.call, lambda facts: facts.call.key)
    numbers = {layer.call.key: number for number, layer in reversed(list(enumerate(inspection.layers)))}
    for row in rows:
        row.layer = numbers.get(row.facts.call.key) if row.facts else None
        if row.layer is not None and (cam := small_cam(inspection, row.layer)):
            for shown in (row, *(rows[parent] for parent in row.parents if rows[parent].layer is None)):
                shown.cam, shown.cam_of = cam, row.name
    return rows


MAPS, HEAT = "viridis", "inferno"
"""Colour maps of feature maps, and of Grad-CAM over an image."""

_LEAST, _MOST, _SMALL = 224, 640, 56  # widths of images and of thumbnails, in pixels


def seen_image(seen: Image.Image) -> Image.Image:
    """What the network saw, in a size for the page: small ones magnified by a whole number, large ones reduced."""
    if seen.width > _MOST:
        return seen.resize((_MOST, max(1, round(seen.height * _MOST / seen.width))), Image.Resampling.LANCZOS)
    factor = -(-_LEAST // seen.width)
    return seen.resize((seen.width * factor, seen.height * factor), Image.Resampling.NEAREST)


def over_image(seen: Image.Image, cam: NDArray[np.float32], width: int) -> Image.Image:
    """A class activation map ``(h, w)`` over what the network saw."""
    height = max(1, round(seen.height * width / seen.width))
    ground = seen if width > seen.width else seen.resize((width, height), Image.Resampling.BILINEAR)
    heat = Heat(cam, (0, 0, ground.width, ground.height), max(0.0, float(cam.max())))
    return draw_heat(ground, heat, width, HEAT)


def layer_cam(inspection: Inspection, layer: int, image: int = 0, width: int = _SMALL) -> Image.Image | None:
    """The Grad-CAM of a layer over what the network saw; None if it has none."""
    maps = inspection.layers[layer].images[image]
    if maps is None or maps.cam is None:
        return None
    return over_image(inspection.images[image].seen, maps.cam, width)


def small_cam(inspection: Inspection, layer: int) -> str:
    """The address of a thumbnail of `layer_cam` for the first image that has one; empty if none has."""
    cam = next(filter(None, (layer_cam(inspection, layer, at) for at in range(len(inspection.images)))), None)
    return "" if cam is None else jpeg_address(cam, 80)


def map_or_cam(
    inspection: Inspection, layer: int, place: Place, image: int, width: int = _SMALL
) -> tuple[Image.Image | None, int | None]:
    """The map of the first channel of a place in its own size, and its number; else the Grad-CAM of the layer."""
    maps, channel = inspection.layers[layer].images[image], place.channels[0] if place.channels else None
    if maps is None or channel not in maps.tiles.channels or maps.tiles.values:
        return layer_cam(inspection, layer, image, width), None
    return to_image(maps.tiles.levels[maps.tiles.channels.index(channel)], MAPS), channel
