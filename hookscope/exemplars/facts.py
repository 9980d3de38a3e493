"""The exemplars of each channel: images, places, values, what a unit sees, and their columns. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookscope.columns import Column, Columns, Row
from hookscope.display import Cells, Picture, RowTuple, Shown
from hookscope.hooks import CALL

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from hookscope.geometry import Box, ReceptiveField
    from hookscope.hooks import Call


@dataclass(frozen=True, slots=True, repr=False)
class Exemplar(Shown):
    """An image that excites a channel, and where.

    Attributes:
        value: The largest, mean or largest absolute activation of the channel on the image.
        position: Position of the image in the list.
        name: Its path, or its number if it has none.
        sha256: Hexadecimal SHA-256 of its file.
        label: The name of its folder if that is a label, else empty.
        place: Row and column of the unit with that value, or of the largest value for a mean; frames of a clip are side
            by side. None where the output has no places.
        box: What the unit sees of the network's input.
        size: Height and width of the network's input.
        image: What the network sees, of an image without a file.
    """

    value: float
    position: int
    name: str
    sha256: str = ""
    label: str = ""
    place: tuple[int, int] | None = None
    box: Box = (0, 0, 0, 0)
    size: tuple[int, int] = (0, 0)
    image: Image.Image | None = field(default=None, compare=False, repr=False)

    def _cells(self) -> Cells:
        place, box = (",".join(map(str, each)) if self.place else "" for each in (self.place or (), self.box))
        about = {name: getattr(self, name) for name in ("value", "position", "name", "label")}
        return about | {"place": place, "box": box, "sha256": self.sha256}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SynthesizedImage(Shown):
    """An image made from a seed to excite a channel, at the size of the network's input.

    Its value is measured as for an exemplar; ``best`` is the value of the best exemplar, None without exemplars.
    """

    image: Image.Image
    value: float
    best: float | None
    seed: int
    channel: int | None = None

    def _cells(self) -> Cells:
        return {
            "channel": self.channel,
            "value": self.value,
            "best": self.best,
            "seed": self.seed,
            "image": Picture(lambda: self.image._repr_png_() or b"", "image"),
        }

    @property
    def is_enough(self) -> bool:
        """Whether the value is above the best exemplar's, or there is none."""
        return self.best is None or self.value > self.best


class SynthesizedByChannel(Shown, dict[int, tuple[SynthesizedImage, ...]]):
    """The images made for each channel; none for a channel that no gradient reaches."""

    def _cells(self) -> Cells:
        return {"channels": len(self), "unreached": [channel for channel, made in self.items() if not made]}

    def _rows(self) -> Sequence[SynthesizedImage]:
        return [image for made in self.values() for image in made]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ChannelExemplars(Shown, rows="most"):
    """What one channel reacts to.

    Attributes:
        most: The images that excite it most, the strongest first; near-duplicates of one image count once.
        least: Those that excite it least, the weakest first; empty unless they were wanted.
        counts: Histogram of the channel's values, one for each image, in equal intervals.
        edges: ``(len(counts) + 1,)`` ends of these intervals.
        classes: How many of ``most`` have each label, the most frequent first; empty without labels.
        selectivity: ``(best − others) / (best + others)`` of the mean value of the images of the best class and the
            mean of all other classes, from 0 to 1 (arXiv:1803.06959); None without labels, or for negative means.
        best_class: The label of that class.
        nonfinite: Number of images that are left out, because the channel's value on them is NaN or Inf.
        synthesized: Images made to excite it.
        unreached: Whether such images were wanted, and no gradient reaches the channel.
    """

    channel: int
    most: tuple[Exemplar, ...]
    least: tuple[Exemplar, ...]
    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    classes: tuple[tuple[str, int], ...] = ()
    selectivity: float | None = None
    best_class: str = ""
    nonfinite: int = 0
    synthesized: tuple[SynthesizedImage, ...] = ()
    unreached: bool = False

    def _columns(self) -> Columns:
        return EXEMPLARS.but("index", "name", "type", "call", "order", "part")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LayerExemplars(Shown, rows="channels"):
    """The exemplars of the channels of one call.

    Attributes:
        call: The call.
        part: Name of the tensor if the output has several, else empty.
        measure: ``max``, ``mean`` or ``abs``: how an image excites a channel.
        images: Number of images that were seen.
        field: What a unit of the layer sees.
        channels: The chosen channels.
    """

    call: Call
    part: str
    measure: str
    images: int
    field: ReceptiveField
    channels: RowTuple[ChannelExemplars]

    def _cells(self) -> Cells:
        counts = {"images": self.images, "channels": len(self.channels)}
        return {"layer": self.key, "measure": self.measure, **counts, "pictures": "hookscope.draw_exemplars(this, net)"}

    @property
    def key(self) -> str:
        """The key of the call, and the part if there are several."""
        return f"{self.call.key} {self.part}" if self.part else self.call.key


def exemplar_row(layer: LayerExemplars, channel: ChannelExemplars, weights: str) -> Row:
    return EXEMPLARS.row(channel, layer, **CALL.row(layer.call), weights=weights)


def class_words(channel: ChannelExemplars) -> str:
    """The classes of the strongest exemplars: ``star 6, ring 3``."""
    return ", ".join(f"{label} {count}" for label, count in channel.classes)


def _best(name: str) -> Callable[[ChannelExemplars], Any]:
    return lambda channel: getattr(channel.most[0], name) if channel.most else None


def _box(channel: ChannelExemplars) -> str | None:
    return (channel.most[0]._cells()["box"] or None) if channel.most else None


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
        "value of the best synthesized image divided by the value of the best image",
        hide="unknown",
    ),
    Column("images", help="number of images that were used", where="rows"),
    Column("weights", where="rows"),
)
"""What ``exemplars`` says of a channel, a `ChannelExemplars` of a `LayerExemplars`."""
