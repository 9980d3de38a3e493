"""What the hooks of one inspection keep: numbers of every call, and the maps of drawn calls, reduced at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.drawing import Tiles, reduce_maps
from hookscope.errors import NoMapError
from hookscope.hooks import (
    Call,
    InputSize,
    Maps,
    Shape,
    as_float,
    by_channel,
    finite_values,
    hook_tensor,
    is_leaf,
    keep_and_hand_on,
    maps_or_vectors,
    one_thread,
    shape_of,
    tensors_in,
)
from hookscope.inspection.facts import ImageMaps

BINS = 32
"""Intervals of the histogram of a call."""
_FINE = 16  # parts of an interval, from which histograms of several images are merged


@dataclass
class CallNumbers:
    """The numbers of a call over all images so far."""

    call: Call
    shape: Shape = None
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    count: int = 0
    zeros: int = 0
    nonfinite: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS * _FINE, np.int64))

    def update(self, output: Any) -> None:
        """Add an output."""
        self.shape = shape_of(output)
        parts = [finite_values(as_float(tensor)) for tensor in tensors_in(output).values()]
        self.nonfinite += sum(part.nonfinite for part in parts)
        some = [part for part in parts if part.values.numel()]
        if not some:
            return
        low = min(part.min for part in some if part.min is not None)
        high = max(part.max for part in some if part.max is not None)
        self._widen(low, high)
        for part in some:
            self.count += part.values.numel()
            self.zeros += part.zeros
            self.total += float(part.values.sum(dtype=torch.float64))
            self.counts += _histogram(part.values, self.low, self.high)

    def _widen(self, low: float, high: float) -> None:
        """Move the counts so far to intervals between the lowest and the highest value with the new ones."""
        before, self.low, self.high = (self.low, self.high), min(low, self.low), max(high, self.high)
        if self.count and before != (self.low, self.high):
            middles = before[0] + (before[1] - before[0]) * (np.arange(len(self.counts)) + 0.5) / len(self.counts)
            middles = np.full_like(middles, before[0]) if before[0] == before[1] else middles
            self.counts, _ = np.histogram(middles, len(self.counts), (self.low, self.high), weights=self.counts)

    @property
    def histogram(self) -> tuple[int, ...]:
        """Numbers of finite values in `BINS` intervals; empty without values."""
        return tuple(self.counts.reshape(BINS, _FINE).sum(1).tolist()) if self.count else ()


def _histogram(values: Tensor, low: float, high: float) -> NDArray[np.int64]:
    """Counts in `BINS` × `_FINE` equal intervals from ``low`` to ``high``."""
    counts: NDArray[np.int64] = torch.histc(values, BINS * _FINE, low, high).cpu().numpy().astype(np.int64)
    return counts


@dataclass
class DrawnPart:
    """The maps of one part of a drawn call for one image, and what the backward pass adds to them."""

    call: Call
    maps: Maps
    tiles: Tiles
    mean: NDArray[np.float64]
    zeros: NDArray[np.float64]
    answer: NDArray[np.float64] | None = None
    cam: NDArray[np.float32] | None = None
    reached: bool = False

    @property
    def facts(self) -> ImageMaps:
        return ImageMaps(self.tiles, self.mean, self.zeros, self.answer, self.cam)


class Recorder:
    """The hooks of an inspection; `unseen` hides their calculations from counters of operations."""

    def __init__(self, blocks: Sequence[str], unseen: Callable[..., Any]) -> None:
        self.numbers: dict[str, CallNumbers] = {}
        self.changes: dict[str, list[float]] = {}
        self.block_means: dict[str, list[NDArray[np.float64]]] = {}
        self.drawn: dict[tuple[Call, str], DrawnPart] = {}
        self.without_map: dict[str, str] = {}
        self.pending: dict[int, tuple[str, Tensor, nn.Module, list[DrawnPart]]] = {}
        self._blocks, self._unseen = set(blocks), unseen
        self.size: InputSize | None = None

    def start(self, size: InputSize | None) -> None:
        """Begin the pass of another image."""
        self.size = size
        self.drawn, self.pending = {}, {}

    def on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A copy of the input of a block, which layers inside it may overwrite."""
        if is_leaf(module):
            return None
        tensor = next(iter(tensors_in((args, kwargs)).values()), None)
        return None if tensor is None else tensor.detach().clone()

    def on_call(self, call: Call, module: nn.Module, output: Any, before: Tensor | None) -> None:
        """Measure any call."""
        self._unseen(self._measure, call, module, output, before)

    def _measure(self, call: Call, module: nn.Module, output: Any, before: Tensor | None) -> None:
        self.numbers.setdefault(call.key, CallNumbers(call)).update(output)
        if call.name in self._blocks:
            after = next(iter(tensors_in(output).values()), None)
            if after is None:
                return
            values = as_float(after)
            self.changes.setdefault(call.key, []).append(_change(before, values))
            means = by_channel(values, module, self.size)
            means = means.flatten(2).mean(2) if means.dim() > 2 else means
            self.block_means.setdefault(call.key, []).append(means.mean(0).double().cpu().numpy())

    def on_drawn(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Reduce the maps of a drawn call; in a graph return a copy of the output to the rest of the network."""
        own, handed_on = keep_and_hand_on(module, args, kwargs, output) if torch.is_grad_enabled() else (output, None)
        self._unseen(self._draw, call, module, own)
        return handed_on

    def _draw(self, call: Call, module: nn.Module, output: Any) -> None:
        found: list[tuple[str, Tensor, list[DrawnPart]]] = []
        reason = "it returned no tensor"
        for name, tensor in tensors_in(output).items():
            try:
                maps = maps_or_vectors({name: tensor} if name else tensor, module, self.size)
                found.append((name, tensor, [_drawn(call, each) for each in maps]))
            except NoMapError as error:
                reason = error.asked
        if any(part.maps.axes != "N C" for *_, parts in found for part in parts):  # vectors beside maps are no maps
            found = [each for each in found if each[2][0].maps.axes != "N C"]
        if not found:
            self.without_map[call.key] = reason
        for name, tensor, parts in found:
            self.drawn |= {(call, part.maps.label): part for part in parts}
            if tensor.requires_grad:
                self.pending[id(tensor)] = (name, tensor, module, parts)
                hook_tensor(tensor, partial(self._on_gradient, id(tensor)))

    def _on_gradient(self, key: int, gradient: Tensor) -> None:
        with torch.no_grad(), one_thread():
            if key not in self.pending:
                return
            name, _, module, parts = self.pending.pop(key)
            read = maps_or_vectors({name: gradient} if name else gradient, module, self.size)
            for part, slopes in zip(parts, read, strict=True):
                _explain(part, slopes.values)


def _drawn(call: Call, maps: Maps) -> DrawnPart:
    values = maps.values
    flat = values.flatten(1)
    finite = flat.isfinite()
    sums = flat.where(finite, 0.0).sum(1, dtype=torch.float64) / finite.sum(1).clamp(min=1)
    zeros = (flat == 0).sum(1).double() / flat.shape[1]
    return DrawnPart(call, maps, reduce_maps(values), sums.cpu().numpy(), zeros.cpu().numpy())


def _explain(part: DrawnPart, slopes: Tensor) -> None:
    """Reduce the gradient of a part to a sum for each channel and to its Grad-CAM."""
    values = part.maps.values
    part.answer = (slopes * values).sum((1, 2), dtype=torch.float64).cpu().numpy()
    part.reached = bool((slopes != 0).any())
    if values.shape[1] * values.shape[2] > 1:
        weights = slopes.mean((1, 2))
        part.cam = torch.tensordot(weights, values, 1).relu().float().cpu().numpy()


def _change(before: Tensor | None, after: Tensor) -> float:
    """The norm of the difference over that of ``before``; NaN where the shapes differ."""
    if before is None or before.shape != after.shape:
        return float("nan")
    values = as_float(before)
    norm = float(torch.linalg.vector_norm(values))
    return float(torch.linalg.vector_norm(after - values)) / norm if norm else float("nan")
