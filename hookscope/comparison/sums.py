"""How far two outputs are apart, added up over batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookscope.comparison.facts import Difference, LargestDifference
from hookscope.hooks import Shape, as_plain


def comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as numbers of one floating type on one device; complex numbers have a further axis of two."""
    a, b = as_plain(a), as_plain(b)
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    a, b = (torch.view_as_real(side.resolve_conj()) if side.is_complex() else side for side in (a, b))
    single = all(side.is_floating_point() and side.dtype != torch.float64 for side in (a, b))
    dtype = torch.float32 if single else torch.float64
    return a.to(dtype), b.to(dtype)


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
        if not a.numel():
            return
        moved = b - a
        squares = [_square(side) for side in (a, b, moved)]
        finite = a.numel()
        if not math.isfinite(sum(squares)):
            both = a.isfinite() & b.isfinite()
            finite = int(both.sum())
            self.nonfinite_a += int((b.isfinite() & ~both).sum())
            self.nonfinite_b += int((a.isfinite() & ~both).sum())
            squares = [_square(side.masked_select(both)) for side in (a, b, moved)]
            same = (a == b) | (a.isnan() & b.isnan())
            moved = moved.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
        self.values += a.numel()
        self.finite += finite
        self.equal += a.numel() - int(torch.count_nonzero(moved))
        self.a, self.b, self.moved = self.a + squares[0], self.b + squares[1], self.moved + squares[2]
        low, high = moved.aminmax()
        value = max(-float(low), float(high))
        if value > (self.largest.value if self.largest else 0.0):
            self.largest = _largest(value, a, b, moved, images)

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


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _largest(value: float, a: Tensor, b: Tensor, moved: Tensor, images: Sequence[int]) -> LargestDifference:
    flat = int(moved.abs().argmax())
    place = tuple(int(at) for at in torch.unravel_index(torch.tensor(flat), moved.shape))
    at = float(a.reshape(-1)[flat]), float(b.reshape(-1)[flat])
    each, rest = divmod(a.shape[0], len(images)) if place else (0, 1)
    if rest:  # such as the proposals of a detector
        return LargestDifference(value, images[0] if len(images) == 1 else None, place, *at)
    item = (place[0] % each,) if each > 1 else ()
    return LargestDifference(value, images[place[0] // each], item + place[1:], *at)


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

    def only_dead_in(self, side: ConstantChannels, other: ConstantChannels) -> float | None:
        """Share of the channels that are dead in ``side`` and not in ``other``."""
        if side.dead is None or other.dead is None or len(side.dead) != len(other.dead):
            return None
        return float((side.dead & ~other.dead).double().mean())
