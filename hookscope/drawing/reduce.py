"""What a layer put out, reduced inside its hook to what a row and a sheet need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hookscope.drawing.scale import Scale
from hookscope.drawing.tiles import ChannelChoice, Tiles, finite_extremes, reduce_maps
from hookscope.hooks import (
    InputSize,
    Maps,
    Shape,
    as_float,
    feature_maps,
    finite_values,
    one_thread,
    shape_of,
    tensors_in,
)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an output, reduced: how it was read and its tiles."""

    name: str
    axes: str
    item: int
    items: int
    frames: int
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class ActivationSummary:
    """An output reduced inside the hook to what its row and its sheet need.

    Attributes:
        shape: Of the output.
        low: Lowest finite value of the parts that are feature maps, None when there is none.
        mean: Mean of the finite values.
        high: Highest finite value.
        dead: Channels whose map is constant; a single position is never called constant.
        nonfinite: Count of NaN and Inf.
        parts: The feature maps, reduced.
    """

    shape: Shape
    low: float | None
    mean: float | None
    high: float | None
    dead: int
    nonfinite: int
    parts: tuple[Part, ...]


def reduce_output(
    output: Any,
    module: nn.Module | None = None,
    shown: InputSize | None = None,
    choice: ChannelChoice | None = None,
    scale: Scale | None = None,
) -> ActivationSummary:
    """Measure an output and reduce its feature maps to one byte a value.

    Raises:
        NoMapError: when no part of it is a feature map.
        LayerError: when none of the chosen channels exists.
    """
    with one_thread():
        maps = feature_maps(output, module, shown)
        drawn = {m.part for m in maps}
        low, mean, high, nonfinite = measure([t for part, t in tensors_in(output).items() if part in drawn])
        parts = tuple(
            Part(m.label, m.axes, m.item, m.items, m.frames, reduce_maps(m.values, choice, scale)) for m in maps
        )
        return ActivationSummary(shape_of(output), low, mean, high, _dead(maps), nonfinite, parts)


def measure(output: Any) -> tuple[float | None, float | None, float | None, int]:
    """Lowest, mean and highest finite value of all tensors in ``output``, and the count of NaN and Inf."""
    parts = [finite_values(as_float(tensor)) for tensor in tensors_in(output).values()]
    bad, count = sum(part.nan + part.inf for part in parts), sum(part.values.numel() for part in parts)
    if not count:
        return None, None, None, bad
    low = min(part.min for part in parts if part.min is not None)
    high = max(part.max for part in parts if part.max is not None)
    return low, sum(float(part.values.sum(dtype=torch.float64)) for part in parts) / count, high, bad


def _dead(maps: Sequence[Maps]) -> int:
    """Channels that are constant in every item of the batch that is drawn; each part has its own."""
    flat: dict[str, Any] = {}
    for m in maps:
        if m.values.shape[1] * m.values.shape[2] == 1:
            continue
        low, high, bad = finite_extremes(m.values)
        constant = (low == high) & (bad == 0)
        flat[m.part] = constant & flat[m.part] if m.part in flat else constant
    return sum(int(constant.sum()) for constant in flat.values())
