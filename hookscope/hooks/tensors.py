"""Tensors inside the inputs and outputs of layers: tuples, lists, mappings, named tuples, plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks.calls import Shape


def as_plain(tensor: Tensor) -> Tensor:
    """``tensor`` detached, dense and decoded from its quantized form; otherwise in its own type."""
    tensor = tensor.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside torch.vmap
        tensor = torch._C._functorch.get_unwrapped(tensor)
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
    return {
        f"{name}.{inner}" if inner else name: tensor
        for name, part in _parts(value)
        for inner, tensor in tensors_in(part).items()
    }


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
