"""Feature maps before and after interventions, and their difference: the channels that moved most."""

from __future__ import annotations

from torch import nn

from hookscope.drawing import MapDifference, compare_maps, shape_text
from hookscope.errors import NoMapError
from hookscope.hooks import InputSize, maps_or_vectors, shape_of
from hookscope.interventions.effect import MovedLayer

NAMES = ("before", "after", "difference")


def moved_maps(
    layer: MovedLayer, module: nn.Module | None = None, shown: InputSize | None = None, most_channels: int = 16
) -> list[MapDifference]:
    """The maps of a kept call before, after and their difference, part by part; vectors are maps of one position."""
    outputs = layer.before, layer.after
    old, new = map(shape_of, outputs)
    if old != new:
        raise NoMapError(f"the shapes differ: {shape_text(old)} before, {shape_text(new)} after")
    pairs = zip(*(maps_or_vectors(output, module, shown) for output in outputs), strict=True)
    return [compare_maps(before, after, NAMES, most_channels) for before, after in pairs]
