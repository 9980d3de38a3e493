"""What the hooks of one inspection keep: numbers of every call, and the maps of drawn calls, reduced at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.drawing import Tiles, reduce_maps
from hookscope.errors import NoMapError
from hookscope.explain import ClassActivationMap
from hookscope.hooks import (
    Call,
    InputSize,
    KnownTensors,
    Maps,
    Shape,
    as_float,
    call_key,
    finite_values,
    hook_tensor,
    is_leaf,
    keep_and_hand_on,
    maps_or_vectors,
    one_thread,
    shape_of,
    tensors_in,
)
from hookscope.inspection.facts import CallFacts, ImageMaps, InspectedLayer
from hookscope.scores import Score
from hookscope.statistics import in_intervals
from hookscope.tracing import Trace, rows_of_type

BINS = 32
"""Intervals of the histogram of a call."""
_FINE = 8  # parts of an interval, from which histograms of several images are merged; together 256
_PIECE = 1 << 16


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

    def merge(self, other: CallNumbers) -> None:
        self.shape, self.nonfinite = other.shape, self.nonfinite + other.nonfinite
        if not other.count:
            return
        self._widen(other.low, other.high)
        other._widen(self.low, self.high)
        self.count, self.zeros = self.count + other.count, self.zeros + other.zeros
        self.total, self.counts = self.total + other.total, self.counts + other.counts

    def _widen(self, low: float, high: float) -> None:
        """Move the counts so far to intervals between the lowest and the highest value with the new ones."""
        before, self.low, self.high = (self.low, self.high), min(low, self.low), max(high, self.high)
        if self.count and before != (self.low, self.high):
            middles = before[0] + (before[1] - before[0]) * (np.arange(len(self.counts)) + 0.5) / len(self.counts)
            self.counts = in_intervals(middles, self.counts, self.low, self.high, len(self.counts))

    @property
    def histogram(self) -> tuple[int, ...]:
        """Numbers of finite values in `BINS` intervals; empty without values."""
        return tuple(self.counts.reshape(BINS, _FINE).sum(1).tolist()) if self.count else ()


def _histogram(values: Tensor, low: float, high: float) -> NDArray[np.int64]:
    """Counts in `BINS` × `_FINE` equal intervals from ``low`` to ``high``.

    Pieces that stay in the processor's cache are counted as whole numbers: three times as fast as histc.
    """
    bins = BINS * _FINE
    if not 1e-30 < high - low < 1e35:
        wide = high - low > 1e35  # beyond it float32 overflows
        return torch.histc(values.double() if wide else values, bins, low, high).cpu().numpy().astype(np.int64)
    counts = torch.zeros(bins, dtype=torch.int64, device=values.device)
    for piece in values.split(_PIECE):
        levels = piece.sub(low).mul_(bins / (high - low)).clamp_(max=bins - 1)
        counts += torch.bincount(levels.to(torch.int16), minlength=bins)
    return counts.cpu().numpy()


@dataclass
class DrawnPart:
    """The maps of one part of a call for one image, and what the backward pass adds to them.

    ``reduced`` has the tiles, means and zeros of a drawn call. ``reached``: its gradient is not 0 everywhere.
    """

    call: Call
    maps: Maps
    reduced: tuple[Tiles, NDArray[np.float64], NDArray[np.float64]] | None = None
    answer: NDArray[np.float64] | None = None
    cam: NDArray[np.float32] | None = None
    reached: bool = False

    def reduce(self) -> None:
        flat, tiles = self.maps.values.flatten(1).cpu(), reduce_maps(self.maps.values)
        zeros = (flat.shape[1] - np.count_nonzero(flat.numpy(), axis=1)) / flat.shape[1]
        if tiles.nonfinite.any():
            flat = flat.where(flat.isfinite(), 0.0)
        count = flat.shape[1] - tiles.nonfinite
        self.reduced = tiles, flat.sum(1, dtype=torch.float64).numpy() / count.clip(min=1), zeros

    def explain(self, slopes: Tensor) -> None:
        """Reduce the gradient to a sum of gradient × activation for each channel, and to the Grad-CAM."""
        values = self.maps.values
        self.answer = (slopes * values).sum((1, 2), dtype=torch.float64).cpu().numpy()
        self.reached = bool(slopes.any())
        if values.shape[1] * values.shape[2] > 1:
            self.cam = torch.tensordot(slopes.mean((1, 2)), values, 1).relu().float().cpu().numpy()

    @property
    def facts(self) -> InspectedLayer:
        """What stays of a drawn part when the pass is over."""
        assert self.reduced is not None
        maps = ImageMaps(*self.reduced, self.answer, self.cam)
        return InspectedLayer(self.call, self.maps.label, self.maps.axes, self.maps.frames, (maps,))


@dataclass
class PassRecord:
    """What the hooks kept of the pass of one image.

    Attributes:
        numbers: The numbers of every call, by key.
        changes: Of each block, see `Evidence.changes`.
        layers: The parts of the drawn calls.
        without_map: Why a drawn call has no map, by key.
    """

    numbers: dict[str, CallNumbers] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)
    layers: tuple[InspectedLayer, ...] = ()
    without_map: dict[str, str] = field(default_factory=dict)


class Recorder:
    """The hooks of one pass of an input of ``size``; the parts in ``drawn`` and ``followed`` hold their tensors.

    Args:
        size: The size of the input.
        blocks: Names of the blocks whose change is measured.
        followed: Keys of the calls whose gradient is wanted although they are not drawn.
        unseen: Calls a function whose calculations are not operations of the model.
    """

    def __init__(
        self, size: InputSize, blocks: Collection[str], followed: Collection[str], unseen: Callable[..., Any]
    ) -> None:
        self.record = PassRecord()
        self.drawn: list[DrawnPart] = []
        self.followed: list[DrawnPart] = []
        self._pending: dict[int, Tensor] = {}
        self._known = KnownTensors[CallNumbers]()
        self._numbers = count()
        self._size, self._blocks, self._followed, self._unseen = size, blocks, followed, unseen

    @property
    def waiting(self) -> list[Tensor]:
        """The tensors whose gradient has not come, in order of execution."""
        return list(self._pending.values())

    def on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A copy of the input of a block, which layers inside it may overwrite."""
        if is_leaf(module):
            return None
        tensor = next(iter(tensors_in((args, kwargs)).values()), None)
        return None if tensor is None else tensor.detach().clone()

    def on_call(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any, before: Tensor | None) -> Any:
        """Measure any call; ``before`` is what `on_input` returned. A followed call hands on a copy of its output."""
        self._unseen(self._measure, call, output, before)
        if call.key not in self._followed or not torch.is_grad_enabled():
            return None
        own, handed_on = keep_and_hand_on(module, args, kwargs, output)
        self._unseen(self._follow, call, module, own)
        return handed_on

    def on_drawn(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Reduce the maps of a drawn call; in a graph it hands on a copy of its output."""
        own, handed_on = keep_and_hand_on(module, args, kwargs, output) if torch.is_grad_enabled() else (output, None)
        self._unseen(self._draw, call, module, own)
        return handed_on

    def cam(self, label: Score, lowest: bool = False) -> ClassActivationMap | None:
        """The Grad-CAM at the last map that the score depends on, or at the last of the ``lowest`` resolution."""
        last = [part for key in self._followed for part in self.followed if part.call.key == key]
        parts = [part for part in [*last, *reversed(self.drawn)] if part.cam is not None and part.maps.items == 1]
        if lowest:  # the last maps of a segmentation are the scores themselves
            parts.sort(key=lambda part: part.maps.values[0].numel())
        part = next((part for part in parts if part.reached), parts[0] if parts else None)
        if part is None or part.cam is None:
            return None
        values, shown = part.cam, (self._size.height, self._size.width)
        if part.maps.frames > 1:  # side by side
            values = values.reshape(len(values), part.maps.frames, -1).transpose(1, 0, 2)
        return ClassActivationMap(
            part.call, label, "gradcam", values, len(part.maps.values), shown, unreached=not part.reached
        )

    def _measure(self, call: Call, output: Any, before: Tensor | None) -> None:
        after = next(iter(tensors_in(output).values()), None)
        self.record.numbers[call.key] = self._numbers_of(call, output)
        if call.name in self._blocks and after is not None:
            self.record.changes[call.key] = _change(before, as_float(after))

    def _numbers_of(self, call: Call, output: Any) -> CallNumbers:
        """The numbers of a call; where a block hands on what its last layer returned, they are known."""
        if isinstance(output, Tensor) and (known := self._known.of(output)) is not None:
            return replace(known, call=call)
        numbers = CallNumbers(call)
        numbers.update(output)
        if isinstance(output, Tensor):
            self._known.add(output, numbers)
        return numbers

    def _draw(self, call: Call, module: nn.Module, output: Any) -> None:
        try:
            parts = self._parts(call, module, output)
        except NoMapError as error:
            self.record.without_map[call.key] = error.asked
            return
        for part in parts:
            part.reduce()
        self.drawn += parts

    def _follow(self, call: Call, module: nn.Module, output: Any) -> None:
        with suppress(NoMapError):
            self.followed += self._parts(call, module, output)

    def _parts(self, call: Call, module: nn.Module, output: Any) -> list[DrawnPart]:
        """The maps of an output, each with a hook for its gradient; vectors only where there are no maps."""
        read = [
            (name, tensor, [DrawnPart(call, maps) for maps in _of_part(name, tensor, module, self._size)])
            for name, tensor in tensors_in(output).items()
        ]
        results = [entry for entry in read if any(part.maps.axes != "N C" for part in entry[2])]
        results = results or [entry for entry in read if entry[2]]
        if not results:
            maps_or_vectors(output, module, self._size)  # raises, and says why
        for name, tensor, parts in results:
            if tensor.requires_grad:
                number = next(self._numbers)
                self._pending[number] = tensor
                hook_tensor(tensor, partial(self._on_gradient, number, name, module, parts))
        return [part for *_, parts in results for part in parts]

    def _on_gradient(
        self, number: int, name: str, module: nn.Module, parts: list[DrawnPart], gradient: Tensor | None
    ) -> None:
        if self._pending.pop(number, None) is None or gradient is None:  # a dynamically quantized layer has none
            return
        with torch.no_grad(), one_thread():
            for part, slopes in zip(parts, _of_part(name, gradient, module, self._size), strict=True):
                part.explain(slopes.values)


def _of_part(name: str, tensor: Tensor, module: nn.Module, size: InputSize) -> list[Maps]:
    """The maps, or vectors, of one tensor of an output; empty if it has none."""
    with suppress(NoMapError):
        return maps_or_vectors({name: tensor} if name else tensor, module, size)
    return []


def _change(before: Tensor | None, after: Tensor) -> float:
    """The norm of the difference over the norm of ``before``; NaN where the shapes differ."""
    if before is None or before.shape != after.shape:
        return float("nan")
    values = as_float(before)
    norm = float(torch.linalg.vector_norm(values))
    return float(torch.linalg.vector_norm(after - values)) / norm if norm else float("nan")


def call_facts(traced: Trace, records: Sequence[PassRecord], drawn: Collection[str]) -> Iterator[CallFacts]:
    """The numbers of every call of a single layer and of each drawn block, in order of execution."""
    rows = {call_key(row.name, row.call): row for row in rows_of_type(traced, ("all",)) if row.call is not None}
    everything: dict[str, CallNumbers] = {}
    for record in records:
        for key, numbers in record.numbers.items():
            if everything.setdefault(key, numbers) is not numbers:
                everything[key].merge(numbers)
    for key, numbers in everything.items():
        row = rows.get(key)
        if row is None and numbers.call.order is None and key not in drawn:
            continue
        total, finite = numbers.count + numbers.nonfinite, numbers.count
        cost = (row.params, row.macs) if row else (0, 0)
        low, high = (numbers.low, numbers.high) if finite else (None, None)
        mean, zeros = numbers.total / finite if finite else None, numbers.zeros / total if total else None
        nonfinite, histogram = numbers.nonfinite, numbers.histogram
        yield CallFacts(numbers.call, numbers.shape, *cost, low, mean, high, zeros, nonfinite, histogram)
