"""How far two outputs are apart, added up over batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hookscope.comparison.facts import Difference, LargestDifference
from hookscope.hooks import Shape, as_plain

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


def shape_for_one(tensor: Tensor, images: int) -> tuple[int, ...]:
    """The shape for one image: without the batch axis, and of windows or proposals as many as one image has."""
    shape = tuple(int(size) for size in tensor.shape)
    each, rest = divmod(shape[0], images) if shape else (0, 1)
    if rest or not each:
        return shape
    return shape[1:] if each == 1 else (each, *shape[1:])


@dataclass
class DifferenceSums:
    """Sums over the values of a pair of outputs; squares are those of the values that are finite on both sides."""

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
        """Norm of B − A divided by the norm of A."""
        if not self.finite:
            return None
        if self.moved == 0:
            return 0.0
        return math.sqrt(self.moved / self.a) if self.a else math.inf

    def difference(self) -> Difference:
        product = math.sqrt(self.a) * math.sqrt(self.b)
        cosine = (self.a + self.b - self.moved) / (2 * product) if product else None
        return Difference(
            self.values,
            self.equal,
            self.relative_l2,
            self.largest,
            None if cosine is None else max(-1.0, min(1.0, cosine)),
            self.nonfinite_a,
            self.nonfinite_b,
        )


def _largest(
    value: float, flat: int, a: Tensor, b: Tensor, shape: Sequence[int], images: Sequence[int]
) -> LargestDifference:
    place = tuple(int(at) for at in np.unravel_index(flat, shape))
    values = float(a[flat]), float(b[flat])
    each, rest = divmod(shape[0], len(images)) if place else (0, 1)
    if rest:  # such as the proposals of a detector
        return LargestDifference(value, images[0] if len(images) == 1 else None, place, *values)
    item = (place[0] % each,) if each > 1 else ()
    return LargestDifference(value, images[place[0] // each], item + place[1:], *values)


@dataclass
class ConstantChannels:
    """Which channels have had one value so far, over all images and positions."""

    values: Tensor | None = None
    constant: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    count: int = 0

    def add(self, output: Tensor) -> None:
        """Add an output ``(N, C, ...)``."""
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
    noise: float | None = None
    dead_a: ConstantChannels = field(default_factory=ConstantChannels)
    dead_b: ConstantChannels = field(default_factory=ConstantChannels)

    @property
    def alone_relative(self) -> float | None:
        """Relative L2 of the layer alone; inf where NaN or Inf are on one side only, None if it did not run alone."""
        sums = self.alone
        return math.inf if sums.nonfinite_a or sums.nonfinite_b else sums.relative_l2 if sums.values else None

    def only_dead_in(self, side: ConstantChannels, other: ConstantChannels) -> float | None:
        """Share of the channels that are dead in ``side`` and not in ``other``."""
        if side.dead is None or other.dead is None or len(side.dead) != len(other.dead):
            return None
        return float((side.dead & ~other.dead).double().mean())
