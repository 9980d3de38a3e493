"""The state of a model and of random numbers: compared, put back, and made ready for gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdRef

from hookscope.errors import ModelError, UsageError, kind_of
from hookscope.hooks.registration import check_hookable
from hookscope.hooks.tensors import as_float, as_plain, finite_values, map_tensors, tensors_in


class HeldModel(Protocol):
    """What `hookscope.load_model` returns, as far as every function knows it: a module and its class names."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def categories(self) -> Sequence[str] | None: ...


AnyModel = nn.Module | HeldModel
"""A module, or what `hookscope.load_model` returns."""


def module_of(model: AnyModel) -> nn.Module:
    """The module of a model; anything else is a UsageError."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if isinstance(module, nn.Module):
        return module
    what = f"text {model[:40]!r}" if isinstance(model, str) else kind_of(model)
    of_class = f"an instance, such as {model.__name__}()" if isinstance(model, type) else ""
    raise UsageError(f"{what} is not a model", do=f"give {of_class or 'an nn.Module, or what load_model returns'}")


def names_of(model: AnyModel, categories: Sequence[str] | None = None) -> Sequence[str] | None:
    """``categories``, by default the class names of the model; None if they are not known."""
    return categories if categories is not None or isinstance(model, nn.Module) else model.categories


def largest_difference(value: Any, other: Any) -> float:
    """The largest absolute difference between the tensors of two values; NaN equals NaN, and Inf the Inf of its sign.

    ``inf`` where the containers, the shapes or the data types differ, or a number meets NaN or Inf.
    """
    pairs = _pairs(value, other)
    return math.inf if pairs is None else max((_difference(*pair) for pair in pairs), default=0.0)


def same_bits(value: Any, other: Any) -> bool:
    """Whether the tensors of two values are the same to the bit: 0 and -0 differ, a NaN equals itself."""
    pairs = _pairs(value, other)
    return pairs is not None and all(torch.equal(_as_bytes(tensor), _as_bytes(twin)) for tensor, twin in pairs)


def largest_value(value: Any) -> float:
    """The largest finite absolute value among the tensors of a value."""
    return max((finite_values(as_float(tensor)).largest for tensor in tensors_in(value).values()), default=0.0)


def _pairs(value: Any, other: Any) -> list[tuple[Tensor, Tensor]] | None:
    """The tensors of both values side by side; None where containers, shapes or data types differ."""
    first, second = tensors_in(value), tensors_in(other)
    if list(first) != list(second):
        return None
    pairs = [(tensor, second[name]) for name, tensor in first.items()]
    return pairs if all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs) else None


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = (tensor.int_repr() if tensor.is_quantized else tensor.detach()).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _difference(tensor: Tensor, other: Tensor) -> float:
    if torch.equal(tensor, other):
        return 0.0
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    a, b = (as_plain(side).cpu().to(wide) for side in (tensor, other))  # not every device has doubles
    equal = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(equal, 0.0)
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


@contextmanager
def one_thread() -> Iterator[None]:
    """Calculate in this thread alone: short work is not worth the time in which torch wakes its other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class StateChange:
    """One part of the state that changed; ``layer`` is empty for a random state, only buffers have a difference."""

    layer: str
    what: str
    difference: float | None = None


class ModelSnapshot:
    """The state of ``model`` and of random numbers that a pass with hooks must leave as it was.

    For each layer: hooks, train or eval mode, values of buffers; for each parameter the object, the number of writes,
    a checksum of the values, ``requires_grad`` and ``.grad``. The random states are of torch, of its devices, of
    Python and of numpy.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._facts = dict(_facts(model))

    def __len__(self) -> int:
        """How many parts are compared."""
        return len(self._facts)

    def changes(self) -> list[StateChange]:
        """The parts that changed since the snapshot."""
        now = dict(_facts(self._model))
        changes = [_change(*key, value, now.get(key)) for key, value in self._facts.items()]
        changes += [StateChange(key[0], f"{key[1]} that was not there") for key in now if key not in self._facts]
        return [change for change in changes if change is not None]


def _facts(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, module in model.named_modules():
        hooks = {table: held for table, held in vars(module).items() if "hook" in table and isinstance(held, dict)}
        yield (name, "hooks"), {table: tuple(held) for table, held in hooks.items()}
        yield (name, "train/eval mode"), module.training
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield (name, f"parameter '{own}'"), (*_identity(parameter), _checksum(parameter))
                yield (name, f"requires_grad of '{own}'"), parameter.requires_grad
                yield (name, f".grad of '{own}'"), parameter.grad is not None and _identity(parameter.grad)
        for own, buffer in module._buffers.items():
            if buffer is not None:
                yield (name, f"buffer '{own}'"), buffer.detach().clone()
    for source, state in random_states().items():
        yield ("", f"random state of {source}"), state


def _identity(tensor: Tensor) -> tuple[WeakIdRef, int | None]:
    """Equal for the same tensor object that nothing has written to."""
    return WeakIdRef(tensor), None if tensor.is_inference() else tensor._version


def _checksum(tensor: Tensor) -> int | None:
    """The sum of all bits, because a write through ``.data`` raises no version."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
        return None
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(tensor.element_size(), torch.uint8)
    return int(tensor.detach().contiguous().reshape(-1).view(whole).sum(dtype=torch.int64))


def _change(layer: str, what: str, before: Any, now: Any) -> StateChange | None:
    if isinstance(before, torch.Tensor):
        difference = largest_difference(before, now)
        return StateChange(layer, what, difference) if difference else None
    return None if before == now else StateChange(layer, what)


def random_states() -> dict[str, Any]:
    """The random states of torch on each device, of Python and of numpy; equal unless a number was drawn between."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "Python": random.getstate()}
    if torch.cuda.is_initialized():
        states["CUDA"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    if torch.backends.mps.is_available():
        states["MPS"] = torch.mps.get_rng_state().numpy().tobytes()
    return states | {"numpy": (kind, keys.tobytes(), *rest)}  # type: ignore[union-attr]


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put back the random states when the block is left, as if no number had been drawn in it."""
    python, numpys = random.getstate(), np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    metal = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    own = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(own)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        if metal is not None:
            torch.mps.set_rng_state(metal)


@contextmanager
def differentiable(model: nn.Module, parameters: bool = True) -> Iterator[None]:
    """Run the block with gradients on and ``model`` in eval mode; then put back modes, buffers and random states.

    ``no_grad`` and ``inference_mode`` around the block have no effect in it, and parameters may be frozen: ask for the
    gradients of inputs and outputs with `torch.autograd.grad`, which writes no ``.grad``. With ``parameters`` False
    none takes a gradient in the block, so that layers make no graph for them.

    Raises:
        ModelError: for weights made inside ``inference_mode``, which no gradient can pass.
    """
    named = list(model.named_modules())
    check_hookable(model, named)
    taking = []
    for name, module in named:
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if not is_lazy(tensor) and tensor.is_inference():
                asked = f"'{name and name + '.'}{own}' was made inside torch.inference_mode: no gradient can pass it"
                raise ModelError(asked, do="build and load the model outside")
            if not parameters and tensor.requires_grad and tensor.is_leaf:
                taking.append(tensor)
    modes = [(module, module.training) for _, module in named]
    with torch.inference_mode(False), torch.enable_grad(), random_states_kept(), buffers_kept(model):
        try:
            if any(training for _, training in modes):  # eval() alone takes longer than the rest
                model.eval()
            for tensor in taking:
                tensor.requires_grad_(False)
            yield
        finally:
            for tensor in taking:
                tensor.requires_grad_()
            for module, training in modes:
                if module.training != training:
                    module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode; the modes of all modules are put back."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put back the buffers of ``model``, both the tensors and their values, when the block is left."""
    buffers_of = [(module, dict(module._buffers)) for module in model.modules()]
    with torch.no_grad():
        values = [
            (buffer, buffer.clone())
            for _, buffers in buffers_of
            for buffer in buffers.values()
            # of a tensor without values to compare, such as a sparse one, only the object is put back
            if buffer is not None and not is_lazy(buffer) and buffer.layout == torch.strided and not buffer.is_meta
        ]
    try:
        yield
    finally:
        for module, buffers in buffers_of:
            for name in module._buffers.keys() - buffers.keys():
                del module._buffers[name]
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if buffer.shape != value.shape:
                    buffer.data = value
                elif not torch.equal(buffer, value):  # a write that changes nothing still spoils a pending backward
                    buffer.copy_(value)


def leaves_of(inputs: Any) -> Any:
    """``inputs`` with copies of its tensors that take gradients; call it inside `differentiable`."""

    def leaf(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()
        return copied.requires_grad_() if copied.is_floating_point() or copied.is_complex() else copied

    return map_tensors(inputs, leaf)


def passed_on(leaves: Any) -> Any:
    """``leaves`` as the model gets them: copies in the graph, because a layer may work in place."""
    return map_tensors(leaves, lambda tensor: tensor.clone())


def leaf_tensors(leaves: Any) -> list[Tensor]:
    """The tensors of ``leaves`` that take gradients."""
    return [tensor for tensor in tensors_in(leaves).values() if tensor.requires_grad]
