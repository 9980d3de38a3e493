"""The columns of exemplars. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hookscope.columns import Column, Columns, Row
from hookscope.hooks import CALL

if TYPE_CHECKING:
    from hookscope.exemplars.facts import ChannelExemplars, LayerExemplars


def exemplar_row(layer: LayerExemplars, channel: ChannelExemplars, weights: str) -> Row:
    return EXEMPLARS.row(channel, layer, **CALL.row(layer.call), weights=weights)


def class_words(channel: ChannelExemplars) -> str:
    """The classes of the strongest exemplars: ``star 6, ring 3``."""
    return ", ".join(f"{label} {count}" for label, count in channel.classes)


def _best(name: str) -> Callable[[ChannelExemplars], Any]:
    return lambda channel: getattr(channel.most[0], name) if channel.most else None


def _box(channel: ChannelExemplars) -> str | None:
    best = channel.most[0] if channel.most else None
    return ",".join(map(str, best.box)) if best is not None and best.place is not None else None


def _synthesized(channel: ChannelExemplars) -> float | None:
    made, best = max((image.value for image in channel.synthesized), default=None), _best("value")(channel)
    return made / best if made is not None and best is not None and best > 0 else None


EXEMPLARS = Columns(
    *CALL.but("type", index={"help": "index, call and order as in list-layers", "hide": ""}),
    *CALL.but("index", "name", "call", "order", type={"need": 1}),
    Column("part", help="name of the tensor, if the layer returns several", hide="zero"),
    Column("channel", help="its number"),
    Column("value", _best("value"), "the channel's value on the best image"),
    Column("image", _best("name"), "the image that excites it most"),
    Column("label", _best("label"), "the label of that image", 2, "zero"),
    Column("box", _box, "left, top, right, bottom of what the unit sees of the input", 3, "unknown"),
    Column("classes", class_words, "how many of the best images have each label", 4, "zero"),
    Column("selectivity", help="(best - others) / (best + others) of the means of classes", hide="unknown"),
    Column("best_class", help="the class with the highest mean value", need=5, hide="zero"),
    Column(
        "synthesized",
        _synthesized,
        "value of the best synthesized image over the value of the best image",
        hide="unknown",
    ),
    Column("images", help="number of images that were used", where="rows"),
    Column("weights", where="rows"),
)
"""What ``exemplars`` says of a channel, a `ChannelExemplars` of a `LayerExemplars`."""
