"""The tensors in any value: found, replaced, kept, described; and statistics of all their values."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from hookscope.errors import InputError
from hookscope.hooks.calls import Shape

Fact = TypeVar("Fact")


class KnownTensors(Generic[Fact]):
    """A fact of each tensor, until it is freed or written to; torch counts no writes to tensors of inference mode."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], int, Fact]] = {}

    def add(self, tensor: Tensor, fact: Fact) -> None:
        if not tensor.is_inference():
            self._known[id(tensor)] = ref(tensor), tensor._version, fact

    def of(self, tensor: Tensor) -> Fact | None:
        known = self._known.get(id(tensor))
        return known[2] if known is not None and known[0]() is tensor and known[1] == tensor._version else None


def as_plain(tensor: Tensor) -> Tensor:
    """``tensor`` detached, dense and decoded from its quantized form; otherwise in its own type."""
    tensor = unwrapped(tensor.detach())
    if tensor.device.type == "mps":  # which has no double precision
        tensor = tensor.cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor in the wrappers of ``torch.vmap`` and ``torch.func``, dead after them; a batch is the first axis."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        axis, tensor = functorch.maybe_get_bdim(tensor), functorch.get_unwrapped(tensor)
        if axis > 0:
            with temporarily_clear_interpreter_stack():  # else the result is wrapped again
                tensor = tensor.movedim(axis, 0)
    return tensor


def as_float(tensor: Tensor) -> Tensor:
    """Values that can be compared and scaled, float32 or float64: quantized ones decoded, complex ones by magnitude."""
    tensor = as_plain(tensor)
    if tensor.is_complex():
        tensor = tensor.abs()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def check_values(tensor: Tensor) -> None:
    """Raise an InputError for a tensor without values."""
    if tensor.is_meta:
        raise InputError("a tensor on the meta device has a shape and no values", do="give one on the cpu")


def as_array(tensor: Tensor) -> NDArray[Any]:
    """A copy of the values as NumPy's array; float32 for the number types that NumPy lacks."""
    check_values(tensor)
    tensor = as_plain(tensor).cpu().clone()
    lacks = tensor.is_floating_point() and tensor.element_size() < 4 and tensor.dtype != torch.float16
    return (tensor.float() if lacks else tensor).numpy()


@dataclass(frozen=True, slots=True)
class FiniteValues:
    """The finite values ``(P,)`` of a tensor and their extremes, and counts over all its values."""

    values: Tensor
    count: int
    nan: int = 0
    inf: int = 0
    min: float | None = None
    max: float | None = None

    @property
    def nonfinite(self) -> int:
        return self.nan + self.inf

    @property
    def zeros(self) -> int:
        """How many values are exactly 0."""
        if self.min is None or float(self.values.abs().amin()) > 0:  # the fastest test, and usual
            return 0
        return self.values.numel() - int(torch.count_nonzero(self.values))

    @property
    def largest(self) -> float:
        """The largest absolute value, 0 where no value is finite."""
        return max(abs(self.min or 0.0), abs(self.max or 0.0))

    def norm(self, order: int = 2) -> float:
        """The norm, summed in double precision."""
        return float(torch.linalg.vector_norm(self.values, order, dtype=torch.float64))


def finite_values(tensor: Tensor) -> FiniteValues:
    """The finite values of a real tensor, from one pass over it unless some value is NaN or Inf."""
    check_values(tensor)
    flat, nan = tensor.reshape(-1), 0
    count = flat.numel()
    if not count:
        return FiniteValues(flat, 0)
    low, high = flat.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):  # a NaN or an Inf anywhere shows in the extremes
        nan, flat = int(torch.isnan(flat).sum()), flat.masked_select(torch.isfinite(flat))
        if not flat.numel():
            return FiniteValues(flat, count, nan, count - nan)
        low, high = flat.aminmax()
    return FiniteValues(flat, count, nan, count - nan - flat.numel(), low.item(), high.item())


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (tuple, list)):
        yield from ((str(position), part) for position, part in enumerate(value))
    elif _is_plain_object(value):
        yield from _attributes(value).items()


def _is_plain_object(value: Any) -> bool:
    """Whether ``value`` only carries data: a dataclass, a namespace, or torchvision's ImageList."""
    if isinstance(value, type):
        return False
    return dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace) or type(value).__name__ == "ImageList"


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of a plain object, in slots or not."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    attributes = {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}
    return attributes | getattr(value, "__dict__", {})


def tensors_in(value: Any) -> dict[str, Tensor]:
    """Every tensor inside ``value`` by its dotted part name, such as ``aux.0``; a bare tensor has the name ``""``."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    try:
        return {
            f"{name}.{inner}" if inner else name: tensor
            for name, part in _parts(value)
            for inner, tensor in tensors_in(part).items()
        }
    except RecursionError:
        raise InputError("a value between layers is nested too deeply, or holds itself") from None


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor replaced by ``change(tensor)``; containers are rebuilt, other leaves kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return _rebuilt_tuple(value, [map_tensors(part, change) for part in value])
    if isinstance(value, list):
        twin: Any = copy.copy(value)
        twin[:] = [map_tensors(part, change) for part in value]
        return twin
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, {key: map_tensors(part, change) for key, part in value.items()})
    if _is_plain_object(value):
        twin = copy.copy(value)
        for name, part in _attributes(value).items():
            object.__setattr__(twin, name, map_tensors(part, change))
        return twin
    return value


def _rebuilt_tuple(value: Any, parts: list[Any]) -> Any:
    kind = type(value)
    if hasattr(kind, "_make"):
        return kind._make(parts)
    try:
        return kind(parts)  # the only way for torch.return_types
    except TypeError:  # the class has a constructor of its own
        return tuple.__new__(kind, parts)


def _rebuilt_mapping(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if isinstance(value, MutableMapping):
        twin = copy.copy(value)
        for key, part in parts.items():
            twin[key] = part
        return twin
    try:
        return type(value)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


def joined_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs of a call as one value, as `Activations.inputs` holds them.

    The only positional input, the tuple of several, the dictionary if there are only keywords, else ``(args, kwargs)``.
    """
    if kwargs:
        return (args, kwargs) if args else kwargs
    return args[0] if len(args) == 1 else args


def split_inputs(inputs: Any, count: int, keywords: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The reverse of `joined_inputs`, for a call with ``count`` positional inputs, and with keywords or without."""
    if keywords:
        return inputs if count else ((), inputs)
    return ((inputs,) if count == 1 else inputs), {}


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs of a call that hold tensors, by position or keyword; an only input stands by itself."""
    named: dict[str, Any] = {str(position): value for position, value in enumerate(args)} | kwargs
    named = {name: value for name, value in named.items() if tensors_in(value)}
    return next(iter(named.values())) if len(named) == 1 else named


def shape_of(value: Any) -> Shape:
    """The shape of a tensor, ``{part: shape}`` for a container of several, None where there is no tensor."""
    shapes = {name: tuple(int(n) for n in tensor.shape) for name, tensor in tensors_in(value).items()}
    if not shapes:
        return None
    return shapes[""] if "" in shapes else shapes


def graph_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of the autograd graph that gradients of ``roots`` reach, breadth first from the roots; without None."""
    waiting, visited = deque(roots), set[Any]()
    while waiting:
        node = waiting.popleft()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += (before for before, _ in node.next_functions)


def storage_key(tensor: Tensor) -> int | None:
    """An identifier that two tensors share when a write to one may change the other."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without one storage
        return None
    return key


def storage_keys(*values: Any) -> set[int | None]:
    """The storages of all tensors inside ``values``."""
    return {storage_key(tensor) for value in values for tensor in tensors_in(value).values()} - {None}


def shares_storage(tensor: Tensor, storages: set[int | None]) -> bool:
    """Whether a write to one of ``storages`` may change ``tensor``."""
    return bool(storages) and storage_key(tensor) in storages


def keep_and_hand_on(module: nn.Module, args: Any, kwargs: Any, output: Any, leaves: bool = False) -> tuple[Any, Any]:
    """The output to keep, which nothing writes to later, and its replacement for the network (None: the output itself).

    Without a graph a copy is kept, and the network gets its own tensor. In an autograd graph the layer's tensor is kept
    and the network gets a copy of it, so that gradients reach the kept tensor. An output that shares memory with an
    input or a parameter (of an in-place layer, a view, an identity) is then copied twice, because a later write to that
    memory would change it. A tensor that the model itself stores and overwrites later is not protected: capture such
    a model under ``no_grad``. With ``leaves`` a graph begins here at each tensor that has none.
    """
    if not in_graph(output) and not (leaves and torch.is_grad_enabled()):
        return _copied(output), None
    held = storage_keys(args, kwargs, list(module._parameters.values()), list(module._buffers.values()))
    kept = map_tensors(output, cache(lambda tensor: tensor.clone() if shares_storage(tensor, held) else tensor))
    if leaves:
        kept = map_tensors(kept, cache(_leaf))
    return kept, _copied(kept)


def in_graph(output: Any) -> bool:
    """Whether a gradient reaches one of the tensors in ``output``."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in tensors_in(output).values())


def _leaf(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().requires_grad_()


def _copied(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.clone()
    # the same tensor in two places is one tensor in the copy too
    return map_tensors(output, cache(lambda tensor: tensor.clone()))


@dataclass(frozen=True, slots=True)
class GradientSize:
    """Euclidean norm, mean and maximum of the absolute finite values; share of zeros among all ``count`` values."""

    norm: float
    mean_abs: float
    max_abs: float
    zeros: float
    nan: int
    inf: int
    count: int


def size_of(gradients: Sequence[Tensor]) -> GradientSize | None:
    """The size of gradients together, None where they have no value at all."""
    parts = [finite_values(as_float(gradient)) for gradient in gradients if gradient.numel()]
    if not parts:
        return None
    count, finite = sum(part.count for part in parts), sum(part.values.numel() for part in parts)
    norm, largest = math.hypot(*(part.norm() for part in parts)), max(part.largest for part in parts)
    mean = sum(part.norm(1) for part in parts) / finite if finite else 0.0
    zeros, nan, inf = (sum(getattr(part, name) for part in parts) for name in ("zeros", "nan", "inf"))
    return GradientSize(norm, mean, largest, zeros / count, nan, inf, count)


def norm_and_nonfinite(tensors: Iterable[Tensor]) -> tuple[float, int]:
    """The Euclidean norm of the finite values of all ``tensors`` together, and how many are NaN or Inf."""
    norms, nonfinite = [], 0
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        finite = FiniteValues(as_float(tensor), tensor.numel())
        norm = finite.norm()
        if not math.isfinite(norm):  # finite values, the usual case, need no further pass
            finite = finite_values(finite.values)
            norm = finite.norm()
        norms.append(norm)
        nonfinite += finite.nonfinite
    return math.hypot(*norms), nonfinite


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of the finite values of ``tensors`` together, in double precision; NaN if none is finite."""
    tensors = list(tensors)
    norm, nonfinite = norm_and_nonfinite(tensors)
    return math.nan if nonfinite and nonfinite == sum(tensor.numel() for tensor in tensors) else norm


# Values in double precision at a time: the first fully connected layer of VGG has 10⁸. Larger pieces take longer, as
# their memory is fetched anew from the system for each.
_PIECE = 1 << 17
_CANCELLED = 1e-3  # a sum of squared distances below this share of the sum of squares has lost too many digits

Moments = tuple[Any, Any, Any]


def value_numbers(values: Tensor) -> dict[str, Any]:
    """Mean, population standard deviation, extremes, L2 norm and share of zeros of ``values``; NaN and Inf counted.

    The values are float32 or float64, of any shape.
    """
    parts = [finite_values(piece) for piece in values.reshape(-1).split(_PIECE)]
    finite = [part for part in parts if part.values.numel()]
    mean, std, norm = _moments(finite) if finite else (None, None, None)
    return {
        "mean": mean,
        "std": std,
        "min": min((part.min for part in parts if part.min is not None), default=None),
        "max": max((part.max for part in parts if part.max is not None), default=None),
        "norm": norm,
        "zeros": sum(part.zeros for part in finite) / values.numel() if values.numel() else None,
        "nan": sum(part.nan for part in parts),
        "inf": sum(part.inf for part in parts),
        "first_nonfinite": _first_nonfinite(values) if any(part.nonfinite for part in parts) else None,
    }


def _first_nonfinite(values: Tensor) -> tuple[int, ...]:
    position = (~torch.isfinite(values)).reshape(-1).byte().argmax()
    return tuple(int(index) for index in np.unravel_index(int(position), values.shape))


def _moments(parts: Sequence[FiniteValues]) -> tuple[float, float, float]:
    """Mean, population standard deviation and norm; float64 in units of the largest absolute value."""
    # no square of a float32 overflows float64
    unit = 1.0 if parts[0].values.dtype == torch.float32 else max(part.largest for part in parts) or 1.0
    moments: Moments = (0, 0.0, 0.0)
    squares = 0.0
    for part in parts:
        scaled = part.values.double() if unit == 1 else part.values / unit
        square, mean = float(torch.dot(scaled, scaled)), float(scaled.mean())
        about_mean = square - len(scaled) * mean * mean
        if about_mean < _CANCELLED * square:
            away = scaled - mean
            about_mean = float(torch.dot(away, away))
        squares += square
        moments = merge_moments(moments, (len(scaled), mean, about_mean))
    count, mean, about_mean = moments
    return mean * unit, math.sqrt(about_mean / count) * unit, math.sqrt(squares) * unit


def merge_moments(moments: Moments, others: Moments, outer: bool = False) -> Moments:
    """Count, mean and squared distances from the mean of two sets of values together (Chan, Golub, LeVeque 1979).

    ``M2 = M2a + M2b + d² na nb / n`` with ``d`` the difference of the means: no difference of large sums is taken, so
    the variance stays exact where the mean is large. The three are numbers, NumPy arrays or tensors; ``outer`` makes
    the squares products of every two channels, ``(..., C, C)`` for ``(..., C)``.

    Example:
        >>> merge_moments((2, 1.0, 2.0), (1, 4.0, 0.0))
        (3, 2.0, 8.0)
    """
    (count, mean, squares), (other_count, other_mean, other_squares) = moments, others
    total = count + other_count
    share = other_count / (total + (total == 0))
    apart = other_mean - mean
    weighted = apart * (count * share)
    change = apart[..., None] * weighted[..., None, :] if outer else apart * weighted
    return total, mean + apart * share, squares + other_squares + change
