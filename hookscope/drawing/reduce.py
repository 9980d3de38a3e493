"""The output of a layer, reduced inside its hook to what a row and a sheet need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field as dataclass_field
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.drawing.scale import Scale
from hookscope.drawing.tiles import ChannelChoice, Tiles, finite_extremes, reduce_maps
from hookscope.geometry import ReceptiveField
from hookscope.hooks import (
    InputSize,
    Maps,
    Shape,
    as_float,
    finite_values,
    maps_or_vectors,
    one_thread,
    shape_of,
    tensors_in,
)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an output: its axes, which item of the batch it is, its tiles; names of all channels or none."""

    name: str
    axes: str
    item: int
    items: int
    frames: int
    tiles: Tiles
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActivationSummary:
    """Statistics of the finite values of an output, and the parts that are feature maps, as tiles.

    ``low``, ``mean`` and ``high`` are None without a finite value; ``dead`` counts the channels whose map is constant,
    ``nonfinite`` the values NaN and Inf. ``values`` holds a copy of the output's tensors, with ``keep``. ``field`` is
    what a unit sees of an input of ``input_size``, if the output is one tensor and that is known.
    """

    shape: Shape
    low: float | None
    mean: float | None
    high: float | None
    dead: int
    nonfinite: int
    parts: tuple[Part, ...]
    values: Mapping[str, Tensor] = dataclass_field(default_factory=dict)
    field: ReceptiveField | None = None
    input_size: InputSize | None = None


def reduce_output(
    output: Any,
    module: nn.Module | None = None,
    input_size: InputSize | None = None,
    choice: ChannelChoice | None = None,
    scale: Scale | None = None,
    names: Sequence[str] = (),
    keep: bool = False,
) -> ActivationSummary:
    """Measure an output and reduce its feature maps to one byte a value.

    The type of ``module`` helps to find the channel axis, ``input_size`` the proportions of a token grid. ``names`` are
    those of the channels of a part with as many. NoMapError if no part of the output is a feature map or a vector,
    LayerError if none of the chosen channels exists.
    """
    with one_thread():
        maps = maps_or_vectors(output, module, input_size)
        drawn = {m.part for m in maps}
        low, mean, high, nonfinite = measure([tensor for part, tensor in tensors_in(output).items() if part in drawn])
        parts = tuple(_part(m, choice, scale, names) for m in maps)
        kept = {part: tensor.detach().cpu().clone() for part, tensor in tensors_in(output).items()} if keep else {}
        return ActivationSummary(shape_of(output), low, mean, high, _dead(maps), nonfinite, parts, kept)


def _part(maps: Maps, choice: ChannelChoice | None, scale: Scale | None, names: Sequence[str]) -> Part:
    own = tuple(names) if len(names) == len(maps.values) else ()
    tiles = reduce_maps(maps.values, choice, scale, bool(own))
    return Part(maps.label, maps.axes, maps.item, maps.items, maps.frames, tiles, own)


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
    """Count the channels of each part that are constant in every drawn item of the batch."""
    constant: dict[str, Any] = {}
    for m in maps:
        if m.values.shape[1] * m.values.shape[2] > 1:
            low, high, nonfinite = finite_extremes(m.values)
            constant[m.part] = constant.get(m.part, True) & (low == high) & (nonfinite == 0)
    return sum(int(channels.sum()) for channels in constant.values())
