"""Feature maps before, after and their difference, which has a scale of its own: the channels that moved most."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.drawing import Scale, SymmetricScale, Tiles, finite_extremes, finite_or_none, reduce_maps, shape_text
from hookscope.errors import NoMapError
from hookscope.hooks import InputSize, Maps, maps_or_vectors, shape_of
from hookscope.interventions.effect import MovedLayer

NAMES = ("before", "after", "difference")
_AT_ONCE = 1 << 22  # values
Extremes = tuple[float, float]


@dataclass(frozen=True)
class MovedMaps:
    """A part of an output before, after, and the difference after - before.

    Attributes:
        axes: The axes of the tensor, such as ``N C H W``.
        total: Number of channels.
        moved: Number of channels with a changed value.
        channels: The drawn channels: those that moved most, in that order.
        distances: Root mean square of the difference for each drawn channel; inf where NaN or Inf appeared or vanished.
        nonfinite: Number of NaN and Inf in all channels, before, after and in the difference.
        largest: Largest finite absolute difference of the drawn channels.
        ranges: Lowest and highest finite value of each drawn channel, before, after and of the difference.
        tiles: Before and after on one symmetric scale, and the difference on its own; None if nothing moved.
    """

    part: str
    axes: str
    frames: int
    total: int
    moved: int
    channels: tuple[int, ...]
    distances: tuple[float, ...]
    nonfinite: tuple[int, int, int]
    largest: float
    ranges: tuple[tuple[Extremes, ...], ...]
    tiles: tuple[Tiles, ...] | None

    def facts(self, drawn: int) -> dict[str, Any]:
        """The facts of the first ``drawn`` channels for a text chunk."""
        return {
            "part": self.part,
            "channels": list(self.channels[:drawn]),
            "distances": finite_or_none(self.distances[:drawn]),
            "total": self.total,
            "moved": self.moved,
            "nonfinite": dict(zip(NAMES, self.nonfinite, strict=True)),
            "ranges": {
                name: [finite_or_none(pair) for pair in pairs[:drawn]]
                for name, pairs in zip(NAMES, self.ranges, strict=False)
            },
        }


def moved_maps(
    layer: MovedLayer, module: nn.Module | None = None, shown: InputSize | None = None, most_channels: int = 16
) -> list[MovedMaps]:
    """The maps of a kept call before, after and their difference, part by part; vectors are maps of one position."""
    outputs = layer.before, layer.after
    old, new = map(shape_of, outputs)
    if old != new:
        raise NoMapError(f"the shapes differ: {shape_text(old)} before, {shape_text(new)} after")
    pairs = zip(*(maps_or_vectors(output, module, shown) for output in outputs), strict=True)
    return [_compared(before, after, most_channels) for before, after in pairs]


def _compared(before: Maps, after: Maps, most_channels: int) -> MovedMaps:
    distances, nonfinite = _distances(before.values, after.values)
    moved = int((distances > 0).sum())
    order = distances.argsort(descending=True, stable=True)
    channels = [int(at) for at in order[: min(moved, most_channels)]]
    # double precision: equal values get equal levels in all three, and differences of floats do not overflow
    old, new = before.values[channels].double(), after.values[channels].double()
    three = [old, new, new - old]
    extremes = [finite_extremes(values) for values in three] if channels else []
    ranges = tuple(tuple(zip(low.tolist(), high.tolist(), strict=True)) for low, high, _ in extremes)
    largest = max(map(_magnitude, ranges[2:]), default=0.0)
    one = SymmetricScale(max(map(_magnitude, ranges[:2]), default=0.0) or 1.0)
    scales = [one, one, SymmetricScale(largest or 1.0)]
    return MovedMaps(
        before.label,
        before.axes,
        before.frames,
        len(distances),
        moved,
        tuple(channels),
        tuple(distances[channels].tolist()),
        (_nonfinite(before.values), _nonfinite(after.values), nonfinite),
        largest,
        ranges,
        tuple(_tiles(*pair, channels) for pair in zip(three, scales, strict=True)) if channels else None,
    )


def _magnitude(ranges: tuple[Extremes, ...]) -> float:
    """The largest absolute value, 0 where nothing is finite."""
    return max((abs(end) for pair in ranges for end in pair if math.isfinite(end)), default=0.0)


def _distances(before: Tensor, after: Tensor) -> tuple[Tensor, int]:
    """``(C,)``: the distance of each channel, inf where NaN or Inf appeared or vanished; and the number of NaN and Inf.

    Works on some channels at a time: large maps in double precision take much memory.
    """
    many = max(1, _AT_ONCE // before[0].numel())
    distances, nonfinite = [], 0
    for old, new in zip(before.split(many), after.split(many), strict=True):
        difference = new.double() - old.double()
        same = (old == new) | (old.isnan() & new.isnan())
        broken = (~same & ~difference.isfinite()).flatten(1).any(1)
        distances.append(torch.where(broken, math.inf, _root_mean_square(torch.where(same, 0.0, difference))))
        nonfinite += _nonfinite(difference)
    return torch.cat(distances), nonfinite


def _root_mean_square(values: Tensor) -> Tensor:
    """``(C,)``, of the finite values of each channel of ``(C, H, W)``."""
    finite = values.isfinite()
    flat = torch.where(finite, values, 0.0).flatten(1)
    largest = flat.abs().amax(1, keepdim=True)
    shares = torch.where(largest > 0, flat / largest, 0.0)  # squares of the values themselves may overflow or underflow
    return largest[:, 0] * (shares.square().sum(1) / finite.flatten(1).sum(1).clamp(min=1)).sqrt()


def _nonfinite(values: Tensor) -> int:
    return int((~values.isfinite()).sum())


def _tiles(values: Tensor, scale: Scale, channels: list[int]) -> Tiles:
    strength = _root_mean_square(values).cpu().numpy()
    return replace(reduce_maps(values, scale=scale), channels=channels, strength=strength)
