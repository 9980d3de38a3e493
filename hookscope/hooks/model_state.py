"""What a look into a model must leave as it was: hooks, modes, flags, gradients, buffers, random states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.hooks.measure import largest_difference


@dataclass(frozen=True, slots=True)
class StateChange:
    """One thing that is not as before.

    Attributes:
        layer: Whose it is, empty for the random state.
        what: What it is, such as ``buffer 'running_mean'``.
        difference: How far the values of a buffer moved, None for what has no distance.
    """

    layer: str
    what: str
    difference: float | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that must be the same object, and not be written to."""

    tensor: Tensor | None
    version: int | None
    checksum: int | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Held) or other.tensor is not self.tensor:
            return False
        return (other.version, other.checksum) == (self.version, self.checksum)


class ModelSnapshot:
    """Everything about ``model``, and about random numbers, that a pass with hooks must leave as it was.

    That is, for each layer: its hooks, its train or eval mode, of each parameter the object, the number of writes to
    it and a checksum of its values, ``requires_grad`` and ``.grad``, and the values of each buffer; and the random states of torch, its devices,
    Python and numpy.

    Example:
        >>> import torch
        >>> net = torch.nn.BatchNorm2d(1)
        >>> state = ModelSnapshot(net)
        >>> _ = net.eval(), net.running_mean.add_(2)
        >>> state.changes()
        [StateChange(layer='', what='train/eval mode', difference=None), StateChange(layer='', what="buffer 'running_mean'", difference=2.0)]
    """  # noqa: E501

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._facts = dict(_facts(model))

    def __len__(self) -> int:
        """How many facts there are."""
        return len(self._facts)

    def changes(self) -> list[StateChange]:
        """What is different now."""
        now = dict(_facts(self._model))
        found = [_change(*key, value, now.get(key)) for key, value in self._facts.items()]
        new = [
            StateChange(layer, f"{what} that was not there") for layer, what in now if (layer, what) not in self._facts
        ]
        return [change for change in found if change is not None] + new


def _facts(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, module in model.named_modules():
        tables = {table: tuple(hooks) for table, hooks in vars(module).items() if _is_hook_table(table, hooks)}
        yield (name, "hooks"), tables
        yield (name, "train/eval mode"), module.training
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield (name, f"parameter '{own}'"), _Held(parameter, _version(parameter), _checksum(parameter))
                yield (name, f"requires_grad of '{own}'"), parameter.requires_grad
                yield (name, f".grad of '{own}'"), _Held(parameter.grad, _version(parameter.grad))
        for own, buffer in module._buffers.items():
            if buffer is not None:
                yield (name, f"buffer '{own}'"), buffer.detach().clone()
    for source, state in random_states().items():
        yield ("", f"random state of {source}"), state


def _is_hook_table(name: str, value: Any) -> bool:
    return "hook" in name and isinstance(value, dict)


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def _checksum(tensor: Tensor) -> int | None:
    """The sum of all bits: a write through ``.data`` leaves no version."""
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
    """The random states of torch on each device, of Python and of numpy; equal when no number was drawn between."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "Python": random.getstate()}
    if torch.cuda.is_initialized():
        states["CUDA"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    if torch.backends.mps.is_available():
        states["MPS"] = torch.mps.get_rng_state().numpy().tobytes()
    return states | {"numpy": (kind, keys.tobytes(), *rest)}  # type: ignore[union-attr]


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put back every random state when the block is left, so that nobody sees that numbers were drawn in it."""
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
