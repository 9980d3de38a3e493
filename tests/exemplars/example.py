"""Exemplars made by hand: pictures whose pixels say where they are, and a layer of two channels."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

import hookscope
from hookscope.exemplars import ChannelExemplars, Exemplar, LayerExemplars, SynthesizedImage
from hookscope.geometry import ReceptiveField
from hookscope.hooks import Call
from hookscope.models import LoadedModel

SMALL = ReceptiveField("computed", (15, 15), (8, 8), (-3, -3))
WIDE = ReceptiveField("computed", (95, 95), (16, 16), (-40, -40))


@cache
def shapes() -> LoadedModel:
    """A model whose preprocessing leaves a picture of 128×128 as it is."""
    return hookscope.load_model("shapes")


def picture(number: int) -> np.ndarray:
    """Red is the column, green the row, blue 40 times the number."""
    rows, columns = np.mgrid[:128, :128]
    return np.stack([2 * columns, 2 * rows, np.full((128, 128), 40 * number)], -1).astype(np.uint8)


def layer_in(
    folder: Path, field: ReceptiveField = SMALL, channels: int = 2, images: int = 3, name: str = "features.3"
) -> LayerExemplars:
    """Each channel has all ``images``, from the strongest; the unit is at row 2 and column 4, of the last at 0, 0."""
    found = []
    for number in range(images):
        path = folder / f"{number}.png"
        Image.fromarray(picture(number)).save(path)
        place = (0, 0) if number == images - 1 else (2, 4)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        label = "ring" if number else "star"
        box = field.box(place, (128, 128))
        found.append(Exemplar(9.5 - number, number, str(path), digest, label, place, box, (128, 128)))
    made = SynthesizedImage(Image.new("RGB", (128, 128), "teal"), 19.0, 9.5, 3)
    counts, edges = np.histogram([each.value for each in found], 5)
    each = [
        ChannelExemplars(
            channel, tuple(found), tuple(found[::-1][:1]), counts, edges,
            classes=(("ring", images - 1), ("star", 1)), selectivity=0.25, best_class="ring",
            synthesized=(made,) if channel == 0 else (),
        )
        for channel in range(channels)
    ]  # fmt: skip
    return LayerExemplars(Call(name, "Fire", 0, None, 5), "", "max", images, field, tuple(each))
