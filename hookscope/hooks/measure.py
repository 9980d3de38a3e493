"""Tensors in a few numbers: extremes, norms, counts of NaN and Inf, and the difference between two values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookscope.hooks.tensors import tensors_in

# Values in double precision at a time: the first fully connected layer of VGG has 10⁸. Larger pieces take longer, as
# their memory is fetched anew from the system for each.
_PIECE = 1 << 18


def as_plain(tensor: Tensor) -> Tensor:
    """``tensor`` detached, dense and decoded from its quantized form; otherwise in its own type."""
    tensor = tensor.detach()
    if tensor.device.type == "mps":  # which has no double precision
        tensor = tensor.cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def as_float(tensor: Tensor) -> Tensor:
    """Values that can be compared and scaled, float32 or float64: quantized ones decoded, complex ones by magnitude."""
    tensor = as_plain(tensor)
    if tensor.is_complex():
        tensor = tensor.abs()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass(frozen=True, slots=True)
class FiniteValues:
    """The finite values of a tensor, which every summary here starts from.

    Attributes:
        values: ``(P,)`` the finite values.
        count: How many values there are, finite or not.
        nan: How many are NaN.
        inf: How many are Inf of either sign.
        min: The lowest finite value, None where there is no finite value.
        max: The highest.
    """

    values: Tensor
    count: int
    nan: int = 0
    inf: int = 0
    min: float | None = None
    max: float | None = None


def finite_values(tensor: Tensor) -> FiniteValues:
    """The finite values of a real tensor, from one pass over it unless some value is NaN or Inf.

    Example:
        >>> import torch
        >>> summary = finite_values(torch.tensor([2.0, torch.inf, -1.0]))
        >>> summary.min, summary.max, summary.inf, summary.values.tolist()
        (-1.0, 2.0, 1, [2.0, -1.0])
    """
    flat, nan = tensor.reshape(-1), 0
    count = flat.numel()
    if not count:
        return FiniteValues(flat, 0)
    low, high = flat.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):  # a NaN or an Inf anywhere shows in the extremes
        nan, flat = int(torch.isnan(flat).sum()), flat[torch.isfinite(flat)]
        if not flat.numel():
            return FiniteValues(flat, count, nan, count - nan)
        low, high = flat.aminmax()
    return FiniteValues(flat, count, nan, count - nan - flat.numel(), low.item(), high.item())


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor at one moment; holds no tensor.

    Attributes:
        shape: As it is.
        dtype: Such as ``float32``; of a quantized tensor the type it is stored in, ``quint8``.
        min: Lowest finite value, decoded from a quantized tensor, 0 or 1 for a truth value. None for complex and empty
            tensors, for those on the meta device, and where no value is finite.
        max: Highest finite value, likewise.
        nonfinite: How many values are NaN or Inf.
        values: All values as nested lists, complex ones as ``[real, imaginary]``; None where they were not asked for
            or are too many.
    """

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    nonfinite: int
    values: Any = None


Facts = dict[str, TensorSummary]


def facts_of(value: Any, most: int = 0) -> Facts:
    """The summary of every tensor in ``value`` by its dotted part name; that of a bare tensor under ``""``.

    Args:
        value: Whatever a layer takes or returns.
        most: Summaries of tensors with at most so many values hold them; 0 for none.

    Example:
        >>> import torch
        >>> facts_of({"out": torch.tensor([[1.0, -2.0]])}, most=4)["out"]
        TensorSummary(shape=(1, 2), dtype='float32', min=-2.0, max=1.0, nonfinite=0, values=[[1.0, -2.0]])
    """
    return {part: _summary(tensor, most) for part, tensor in tensors_in(value).items()}


def _summary(tensor: Tensor, most: int) -> TensorSummary:
    shape, dtype = tuple(int(length) for length in tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        return TensorSummary(shape, dtype, None, None, 0)
    plain = as_plain(tensor)
    if plain.is_floating_point() and plain.element_size() < 4:  # not every small type has a lowest value
        plain = plain.float()
    elif plain.dtype in (torch.uint16, torch.uint32, torch.uint64):
        plain = plain.long()
    is_small = most > 0 and plain.numel() <= most
    if plain.is_complex():
        values = torch.view_as_real(plain.resolve_conj()).tolist() if is_small else None
        return TensorSummary(shape, dtype, None, None, int((~torch.isfinite(plain)).sum()), values)
    finite = finite_values(plain.to(torch.uint8) if plain.dtype is torch.bool else plain)
    values = plain.tolist() if is_small else None
    return TensorSummary(shape, dtype, finite.min, finite.max, finite.nan + finite.inf, values)


@dataclass(frozen=True, slots=True)
class GradientSize:
    """The size of a gradient, over all tensors of a container.

    Attributes:
        norm: Euclidean norm of the finite values.
        mean_abs: Mean absolute finite value.
        max_abs: Largest absolute finite value.
        zeros: Share of all values that are exactly 0, 0 to 1.
        nan: Count of NaN.
        inf: Count of Inf of either sign.
        count: Count of all values.
    """

    norm: float
    mean_abs: float
    max_abs: float
    zeros: float
    nan: int
    inf: int
    count: int


def size_of(gradients: Sequence[Tensor]) -> GradientSize | None:
    """The size of gradients together, None where they have no value at all.

    Example:
        >>> import torch
        >>> size = size_of([torch.tensor([3.0, -4.0, 0.0, float("nan")])])
        >>> size.norm, size.max_abs, size.zeros, size.nan
        (5.0, 4.0, 0.25, 1)
    """
    parts = [finite_values(as_float(gradient)) for gradient in gradients if gradient.numel()]
    if not parts:
        return None
    count, finite = sum(part.count for part in parts), sum(part.values.numel() for part in parts)
    zeros = finite - sum(int(torch.count_nonzero(part.values)) for part in parts)
    total = sum(float(torch.linalg.vector_norm(part.values, 1, dtype=torch.float64)) for part in parts)
    return GradientSize(
        norm=math.hypot(*(_norm(part.values) for part in parts)),
        mean_abs=total / finite if finite else 0.0,
        max_abs=max(max(abs(part.min or 0.0), abs(part.max or 0.0)) for part in parts),
        zeros=zeros / count,
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
        count=count,
    )


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def norm_and_nonfinite(tensors: Sequence[Tensor]) -> tuple[float, int]:
    """The Euclidean norm of the finite values of all ``tensors`` together, and how many are NaN or Inf."""
    norms, nonfinite = [0.0], 0
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = as_float(tensor)
        norms.append(_norm(values))
        if not math.isfinite(norms[-1]):
            finite = finite_values(values)
            nonfinite += finite.nan + finite.inf
            norms[-1] = _norm(finite.values)
    return math.hypot(*norms), nonfinite


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of the finite values of ``tensors`` together, in double precision; NaN if none is finite."""
    tensors = list(tensors)
    norm, nonfinite = norm_and_nonfinite(tensors)
    return math.nan if nonfinite and nonfinite == sum(tensor.numel() for tensor in tensors) else norm


def value_numbers(values: Tensor) -> dict[str, Any]:
    """Mean, population standard deviation, extremes, L2 norm and share of zeros of ``values``; NaN and Inf counted.

    Args:
        values: Of any shape, float32 or float64.

    Example:
        >>> import torch
        >>> numbers = value_numbers(torch.tensor([[3.0, 4.0], [math.nan, 0.0]]))
        >>> numbers["norm"], numbers["max"], numbers["nan"], numbers["first_nonfinite"], numbers["zeros"]
        (5.0, 4.0, 1, (1, 0), 0.25)
    """
    nan, inf, zeros, first = 0, 0, 0, None
    low, high = math.inf, -math.inf
    flat = values.reshape(-1)
    for start, piece in enumerate(flat.split(_PIECE) if len(flat) else ()):
        zeros += int((piece == 0).sum())
        finite = finite_values(piece)
        if first is None and finite.nan + finite.inf:
            first = start * _PIECE + int((~torch.isfinite(piece)).nonzero()[0, 0])
        nan, inf = nan + finite.nan, inf + finite.inf
        if finite.min is not None and finite.max is not None:
            low, high = min(low, finite.min), max(high, finite.max)
    mean, std, norm = _moments(flat, max(abs(low), abs(high))) if low <= high else (None, None, None)
    return {
        "mean": mean,
        "std": std,
        "min": low if low <= high else None,
        "max": high if low <= high else None,
        "norm": norm,
        "zeros": zeros / len(flat) if len(flat) else None,
        "nan": nan,
        "inf": inf,
        "first_nonfinite": None if first is None else tuple(int(i) for i in np.unravel_index(first, values.shape)),
    }


def _moments(flat: Tensor, largest: float) -> tuple[float, float, float]:
    """Mean, population standard deviation and norm of the finite values, in units of the ``largest`` of them."""
    unit = largest or 1.0
    count, mean, squares, about_mean = 0, 0.0, 0.0, 0.0
    for piece in flat.split(_PIECE):
        part = piece.double()
        part = part[torch.isfinite(part)] / unit
        if not len(part):
            continue
        squares += float(part.square().sum())
        part_mean = float(part.mean())
        moments = (len(part), part_mean, float((part - part_mean).square().sum()))
        count, mean, about_mean = merge_moments((count, mean, about_mean), moments)
    return mean * unit, math.sqrt(about_mean / count) * unit, math.sqrt(squares) * unit


Moments = tuple[Any, Any, Any]


def merge_moments(one: Moments, two: Moments, outer: bool = False) -> Moments:
    """Count, mean and squared distances from the mean of two sets of values together (Chan, Golub, LeVeque 1979).

    ``M2 = M2a + M2b + d² na nb / n`` with ``d`` the difference of the means: no difference of large sums is taken, so
    the variance stays exact where the mean is large.

    Args:
        one: Count, mean and summed squares of one set: numbers, NumPy arrays or tensors.
        two: Those of the other set.
        outer: Whether the squares are products of every two channels, ``(C, C)`` for a mean ``(C,)``.

    Example:
        >>> merge_moments((2, 1.0, 2.0), (1, 4.0, 0.0))
        (3, 2.0, 8.0)
    """
    (count, mean, squares), (other_count, other_mean, other_squares) = one, two
    total = count + other_count
    share = other_count / (total + (total == 0))
    apart = other_mean - mean
    weighted = apart * (count * share)
    return total, mean + apart * share, squares + other_squares + (apart[:, None] if outer else apart) * weighted


def largest_difference(value: Any, other: Any) -> float:
    """The largest absolute difference between the tensors of two values; NaN equals NaN, and Inf the Inf of its sign.

    Returns:
        0.0 for equal values; ``inf`` where the containers, the shapes or the data types differ, or a number meets NaN
        or Inf.

    Example:
        >>> import torch
        >>> largest_difference((torch.tensor([1.0, torch.nan]),), (torch.tensor([1.5, torch.nan]),))
        0.5
    """
    pairs = _pairs(value, other)
    return math.inf if pairs is None else max((_difference(*pair) for pair in pairs), default=0.0)


def same_bits(value: Any, other: Any) -> bool:
    """Whether the tensors of two values are the same to the bit: 0 and -0 differ, a NaN equals itself.

    Example:
        >>> import torch
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0)), same_bits([torch.tensor(torch.nan)] * 2, [])
        (False, False)
    """
    pairs = _pairs(value, other)
    return pairs is not None and all(torch.equal(_as_bytes(one), _as_bytes(two)) for one, two in pairs)


def largest_value(value: Any) -> float:
    """The largest finite absolute value among the tensors of a value.

    Example:
        >>> import torch
        >>> largest_value([torch.tensor([1.0, -3.0]), torch.tensor(torch.inf)])
        3.0
    """
    tensors = [as_plain(tensor) for tensor in tensors_in(value).values() if tensor.numel()]
    return max((float(tensor.abs().double().nan_to_num(0, 0, 0).max()) for tensor in tensors), default=0.0)


def _pairs(value: Any, other: Any) -> list[tuple[Tensor, Tensor]] | None:
    """The tensors of both values side by side; None where containers, shapes or data types differ."""
    first, second = tensors_in(value), tensors_in(other)
    if list(first) != list(second):
        return None
    pairs = [(tensor, second[name]) for name, tensor in first.items()]
    return pairs if all(one.shape == two.shape and one.dtype == two.dtype for one, two in pairs) else None


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = (tensor.int_repr() if tensor.is_quantized else tensor.detach()).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _difference(tensor: Tensor, other: Tensor) -> float:
    if torch.equal(tensor, other):
        return 0.0
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    one, two = (as_plain(side).cpu().to(wide) for side in (tensor, other))  # not every device has doubles
    equal = (one == two) | (one.isnan() & two.isnan())
    apart = (one - two).abs().masked_fill(equal, 0.0)
    return float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max())


@contextmanager
def one_thread() -> Iterator[None]:
    """Calculate in this thread alone: short work is not worth the time in which torch wakes its other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
