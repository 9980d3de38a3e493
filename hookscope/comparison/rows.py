"""The rows of a comparison: what is added up for each pair of calls, and each part of their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.comparison.facts import INPUT, Difference, LargestDifference, PairedCall
from hookscope.comparison.inputs import PairedBatch
from hookscope.comparison.pairing import Pair
from hookscope.comparison.side import Side
from hookscope.comparison.similarities import SIMILARITIES
from hookscope.hooks import MODEL, Call, Shape, as_plain, by_channel, tensors_in

_LEVELS = 256  # of 8 bits
_PIECE = 1 << 16  # values that are added at a time: in double precision they stay in the processor's cache


def comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both decoded, on one device; complex numbers have a further axis of two."""
    a, b = as_plain(a), as_plain(b)
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    if a.is_complex() or b.is_complex():
        wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.complex64)
        a, b = (torch.view_as_real(side.to(wide).resolve_conj()) for side in (a, b))
    return a, b


def rounded_as(a: Tensor, b: Tensor) -> Tensor | None:
    """``a`` in the steps of ``b``, from its lowest to its highest; None if it does not have at most 256 equal ones."""
    a, b = (as_plain(side).float() for side in (a, b))
    levels = b.unique()
    if not 2 < len(levels) <= _LEVELS or not levels.isfinite().all():
        return None
    step = levels.diff().min()
    places = (levels - levels[0]) / step
    if (places - places.round()).abs().max() > 0.1 or places[-1].round() >= _LEVELS:
        return None
    rounded: Tensor = levels[0] + ((a - levels[0]) / step).round().clamp(0, places[-1].round()) * step
    return rounded


def shape_for_one(tensor: Tensor, images: int) -> tuple[int, ...]:
    """The shape for one image: without the batch axis, and of windows or proposals as many as one image has."""
    shape = tuple(int(size) for size in tensor.shape)
    count, rest = divmod(shape[0], images) if shape else (0, 1)
    if rest or not count:
        return shape
    return shape[1:] if count == 1 else (count, *shape[1:])


@dataclass
class DifferenceSums:
    """Sums over the values of a pair of outputs; squares are over the values that are finite on both sides."""

    values: int = 0
    equal: int = 0
    finite: int = 0
    moved: float = 0.0
    a: float = 0.0
    b: float = 0.0
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    largest: LargestDifference | None = None

    def add(self, a: Tensor, b: Tensor, images: Sequence[int]) -> None:
        """Add outputs of equal shape; ``images`` are the positions of the images of the batch."""
        a, b = comparable(a, b)
        before, at = self.largest.value if self.largest else 0.0, -1
        flat = a.reshape(-1), b.reshape(-1)
        for number, (x, y) in enumerate(zip(*(side.split(_PIECE) for side in flat), strict=True)):
            value, where = self._add_piece(x.double(), y.double())
            if value > before:
                before, at = value, number * _PIECE + where
        if at >= 0:
            self.largest = _largest(before, at, *flat, a.shape, images)

    def _add_piece(self, a: Tensor, b: Tensor) -> tuple[float, int]:
        """Add some values in double precision; returns the largest difference among them, and where it is."""
        moved = b - a
        squares = [float(side.dot(side)) for side in (a, b, moved)]
        finite = len(a)
        if not math.isfinite(sum(squares)):
            fine_a, fine_b = a.isfinite(), b.isfinite()
            both = fine_a & fine_b
            finite = int(both.sum())
            self.nonfinite_a += int((fine_b & ~both).sum())
            self.nonfinite_b += int((fine_a & ~both).sum())
            squares = [float(some.dot(some)) for some in (side[both] for side in (a, b, moved))]
            same = (a == b) | (a.isnan() & b.isnan())
            moved = moved.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
        self.values += len(a)
        self.finite += finite
        self.a, self.b, self.moved = self.a + squares[0], self.b + squares[1], self.moved + squares[2]
        changed = int(torch.count_nonzero(moved))
        self.equal += len(a) - changed
        if not changed:
            return 0.0, 0
        value, where = moved.abs().max(0)
        return float(value), int(where)

    @property
    def relative_l2(self) -> float | None:
        """None where a value is finite on one side only, or no value is finite on both."""
        if not self.finite or self.nonfinite_a or self.nonfinite_b:
            return None
        if self.moved == 0:
            return 0.0
        return math.sqrt(self.moved / self.a) if self.a else math.inf

    @property
    def apart(self) -> float | None:
        """Relative L2; inf where NaN or Inf are on one side only, None without values."""
        return math.inf if self.nonfinite_a or self.nonfinite_b else self.relative_l2 if self.values else None

    def difference(self) -> Difference:
        product = 0.0 if self.relative_l2 is None else math.sqrt(self.a) * math.sqrt(self.b)
        cosine = max(-1.0, min(1.0, (self.a + self.b - self.moved) / (2 * product))) if product else None
        bad = self.nonfinite_a, self.nonfinite_b
        return Difference(self.values, self.equal, self.relative_l2, self.largest, cosine, *bad)


def _largest(
    value: float, flat: int, a: Tensor, b: Tensor, shape: Sequence[int], images: Sequence[int]
) -> LargestDifference:
    place = tuple(int(at) for at in np.unravel_index(flat, shape))
    values = float(a[flat]), float(b[flat])
    count, rest = divmod(shape[0], len(images)) if place else (0, 1)
    if rest:  # such as the proposals of a detector
        return LargestDifference(value, images[0] if len(images) == 1 else None, place, *values)
    item = (place[0] % count,) if count > 1 else ()
    return LargestDifference(value, images[place[0] // count], item + place[1:], *values)


@dataclass
class ConstantChannels:
    """Which channels have had one value so far, over all images and positions."""

    values: Tensor | None = None
    constant: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    count: int = 0

    def add(self, output: Tensor) -> None:
        channels = output.shape[1]
        if not output.numel():
            return
        if self.values is None:
            self.values, self.constant = output[0].reshape(channels, -1)[:, 0].clone(), torch.ones(channels) > 0
        if len(self.constant) != channels:
            return
        self.count += output.numel() // channels
        left = self.constant.nonzero().flatten()
        if len(left):
            some = output[:, left.to(output.device)].movedim(1, 0).flatten(1)
            self.constant[left] = (some == self.values[left.to(output.device), None]).all(1).cpu()

    @property
    def dead(self) -> Tensor | None:
        """``(C,)``; None where a channel has had one value only, so that nothing is known."""
        return self.constant if self.count > 1 else None


@dataclass
class PartSums:
    """What is added up for one row: a pair of calls, or a part of their outputs."""

    shape_a: Shape = None
    shape_b: Shape = None
    shapes_differ: bool = False
    difference: DifferenceSums = field(default_factory=DifferenceSums)
    alone: DifferenceSums = field(default_factory=DifferenceSums)
    rounding: DifferenceSums = field(default_factory=DifferenceSums)
    noise: float | None = None
    dead_a: ConstantChannels = field(default_factory=ConstantChannels)
    dead_b: ConstantChannels = field(default_factory=ConstantChannels)
    similarities: dict[str, Any] = field(default_factory=dict)

    def only_dead_in(self, side: ConstantChannels, other: ConstantChannels) -> float | None:
        if side.dead is None or other.dead is None or len(side.dead) != len(other.dead):
            return None
        return float((side.dead & ~other.dead).double().mean())


class RowSums:
    """The sums of all rows so far, by key of the call of A and part."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = {pair.a.key: pair for pair in pairs}
        self._sums: dict[str, dict[str, PartSums]] = {key: {} for key in (INPUT, *self._pairs, MODEL)}

    def add(
        self, key: str, modules: tuple[Any, Any], outputs: tuple[Any, Any], batch: PairedBatch, listed: bool = False
    ) -> None:
        """Add the outputs of the modules of A and B for a batch; ``listed`` as `parts_of` takes it."""
        size = batch.size
        for part, a, b, images in parts_of(*outputs, batch.positions, listed):
            sums = self._sums[key].setdefault(part, PartSums())
            shapes = shape_for_one(a, len(images)), shape_for_one(b, len(images))
            if a.dim() > 1 and len(a) == len(b) == len(images):
                sums.similarities = sums.similarities or {name: kind.make() for name, kind in SIMILARITIES.items()}
                for similarity in sums.similarities.values():
                    similarity.add(a, b)
            if not sums.shapes_differ:
                sums.shape_a, sums.shape_b = shapes
            if a.shape != b.shape:
                sums.shapes_differ = True
                continue
            sums.difference.add(a, b, images)
            if a.dim() > 1 and len(a) == len(images):
                for side, constant, module in ((a, sums.dead_a, modules[0]), (b, sums.dead_b, modules[1])):
                    layer = module if isinstance(module, nn.Module) else None
                    if side.is_floating_point() or side.is_quantized:
                        constant.add(by_channel(as_plain(side), layer, size))

    def add_alone(self, key: str, output: Any, alone: Any, rounds: bool = False) -> None:
        """Add what the layer of B gives on the inputs of A; ``rounds`` says whether it may round to 8 bits."""
        for part, a, b, images in parts_of(output, alone, (0,), False):
            if a.shape == b.shape and part in self._sums[key]:
                self._sums[key][part].alone.add(a, b, images)
                if rounds and (rounded := rounded_as(a, b)) is not None:
                    self._sums[key][part].rounding.add(a, rounded, images)

    def add_noise(self, key: str, output: Any, again: Any, batch: PairedBatch, listed: bool = False) -> None:
        by_part: dict[str, DifferenceSums] = {}
        rounding: dict[str, float] = {}
        for part, a, b, images in parts_of(output, again, batch.positions, listed):
            sums = by_part.setdefault(part, DifferenceSums())
            if a.shape == b.shape:
                sums.add(a, b, images)
            else:
                sums.moved = np.inf  # as many boxes as rounding decides
            if a.is_floating_point() and key != INPUT:  # one rounding of another kernel, whatever the input
                rounding[part] = torch.finfo(a.dtype).eps / 2
        for part, sums in by_part.items():
            row = self._sums[key].setdefault(part, PartSums())
            measured = np.inf if sums.moved == np.inf else sums.relative_l2 or 0.0
            row.noise = max(row.noise or 0.0, measured, rounding.get(part, 0.0))

    def rows(self, a: Side, b: Side, change: Callable[[Pair, bool], float | None]) -> Iterator[PairedCall]:
        """The rows in order of execution of A, with the ``change`` of the parameters, and of the buffers, of a pair."""
        for key, parts in self._sums.items():
            pair = self._pairs.get(key)
            if pair is None:
                kinds = ["" if key == INPUT else type(side.net.model).__name__ for side in (a, b)]
                one, two = (Call(key, kind, 0, None) for kind in kinds)
                pair = Pair(one, two, "name", one, two)
            for part, sums in parts.items():
                about = pair.a, pair.b, part, pair.paired_by, sums.shape_a, sums.shape_b
                difference = None if sums.shapes_differ else sums.difference.difference()
                distances = sums.noise, sums.alone.apart, sums.rounding.relative_l2
                similarities = {name: similarity.value for name, similarity in sums.similarities.items()}
                dead = sums.only_dead_in(sums.dead_a, sums.dead_b), sums.only_dead_in(sums.dead_b, sums.dead_a)
                changes = change(pair, False), change(pair, True)
                yield PairedCall(*about, difference, *distances, similarities, *dead, *changes)


def parts_of(
    a: Any, b: Any, positions: Sequence[int], listed: bool
) -> Iterator[tuple[str, Tensor, Tensor, Sequence[int]]]:
    """The tensors of both outputs that belong together, and the images that they are of.

    ``listed`` outputs are lists with an item for each image, such as a detector's. Parts belong together by
    name, or by position if no name is on both sides.
    """
    if listed and isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == len(positions):
        for one, two, position in zip(a, b, positions, strict=True):
            yield from parts_of(one, two, (position,), False)
        return
    of_a, of_b = tensors_in(a), tensors_in(b)
    by_name = [(name, of_a[name], of_b[name]) for name in of_a if name in of_b]
    by_place = ((name, one, two) for (name, one), two in zip(of_a.items(), of_b.values(), strict=False))
    yield from ((*part, positions) for part in by_name or by_place)
