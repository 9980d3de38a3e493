"""What a watched run wraps in torch: the start of the backward pass, the loss scale, a check of compiled models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules

_SCALE = "hookscope.scale"
_MOST_NODES = 8  # searched for a loss scale: scripts divide a scaled loss or add others to it
_HOOK_TABLES = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)


class Patch:
    """Calls ``wrapper(original, *args, **kwargs)`` in place of ``owner.name`` while on."""

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._owner, self._name, self._wrapper = owner, name, wrapper
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def on(self) -> None:
        if self._ours is not None:
            return
        original, wrapper = getattr(self._owner, self._name), self._wrapper

        @wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if self._ours is not ours:  # switched off, but a later wrapper of somebody else still calls this one
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        self._original, self._ours = original, ours
        setattr(self._owner, self._name, ours)

    def off(self) -> None:
        """Put the original back, unless somebody else has wrapped ours since."""
        if self._ours is not None and getattr(self._owner, self._name, None) is self._ours:
            setattr(self._owner, self._name, self._original)
        self._original = self._ours = None


def divisor_of(roots: Sequence[Tensor]) -> float | None:
    """The number by which a script divides the only one of ``roots``, apart from the scale of a ``GradScaler``."""
    node: Any = roots[0].grad_fn if len(roots) == 1 else None
    while node is not None and _SCALE in node.metadata:
        node = node.next_functions[0][0]
    operation = None if node is None else node.name()
    if operation not in ("DivBackward0", "MulBackward0"):
        return None
    factor = node._saved_other
    if factor is None or factor.numel() != 1 or factor.device.type != "cpu" or not factor:
        return None
    return float(factor) if operation == "DivBackward0" else round(1 / float(factor), 6)


class LossTap:
    """Calls ``on_loss(value, roots)`` before each backward pass that starts at scalars, while on.

    Torch has no hook there, so ``torch.autograd.backward`` is wrapped; ``Tensor.backward`` calls it too. A copy that a
    script imported by name beforehand is missed. ``value`` is the sum of the scalars, detached and divided by the
    scale of a ``GradScaler``: ``GradScaler.scale`` is wrapped to note the scale in the autograd node of its result.
    What ``on_loss`` raises is raised in the script, in place of the backward pass.
    """

    def __init__(self, on_loss: Callable[[Tensor, Sequence[Tensor]], None]) -> None:
        self._on_loss = on_loss
        self._patches: list[Patch] = []
        self._has_scales = False

    def on(self) -> None:
        if self._patches:
            return
        scalers = {torch.amp.GradScaler, *_subclasses(torch.amp.GradScaler)}
        self._patches = [Patch(scaler, "scale", self._scale) for scaler in scalers if "scale" in vars(scaler)]
        self._patches.append(Patch(torch.autograd, "backward", self._backward))
        for patch in self._patches:
            patch.on()

    def off(self) -> None:
        for patch in self._patches:
            patch.off()
        self._patches = []

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, Iterator):  # can be consumed only once
            tensors = tuple(tensors)
        vector = args[0] if args else kwargs.get("grad_tensors")
        if vector is None and not torch.compiler.is_compiling():  # a vector-Jacobian product has no loss
            roots, value = (tensors,) if isinstance(tensors, torch.Tensor) else tensors, None
            with contextlib.suppress(Exception):  # backward itself reports bad arguments
                roots = tuple(roots)
                value = self._unscaled_sum(roots)
            if value is not None:
                self._on_loss(value, roots)
        return original(tensors, *args, **kwargs)

    def _unscaled_sum(self, roots: Sequence[Any]) -> Tensor | None:
        values = []
        for root in roots:
            value = scalar_of(root)
            if value is None:
                return None
            scale = self._scale_of(root)
            values.append(value if scale is None else value.float() / scale.to(value.device))
        if len(values) < 2:
            return values[0] if values else None
        return torch.stack([value.float().to(values[0].device) for value in values]).sum()

    def _scale(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        if not torch.compiler.is_compiling():
            with contextlib.suppress(Exception):  # a scaler that is not built like torch's
                if scaler.is_enabled():
                    self._note_scale(scaled, scaler._scale.detach())  # `update` comes after the backward pass
        return scaled

    def _note_scale(self, scaled: Any, scale: Tensor) -> None:
        if isinstance(scaled, torch.Tensor):
            node: Any = scaled.grad_fn
            if node is not None:
                node.metadata[_SCALE] = scale
                self._has_scales = True
        elif isinstance(scaled, (list, tuple)):  # an iterator is left to the script: it can be consumed only once
            for part in scaled:
                self._note_scale(part, scale)

    def _scale_of(self, tensor: Tensor) -> Tensor | None:
        """The scale noted in the nearest autograd node behind ``tensor``, breadth first."""
        waiting: list[Any] = [tensor.grad_fn] if self._has_scales else []
        for _ in range(_MOST_NODES):
            if not waiting:
                return None
            node = waiting.pop(0)
            if node is not None:
                scale: Tensor | None = node.metadata.get(_SCALE)
                if scale is not None:
                    return scale
                waiting += [parent for parent, _ in node.next_functions]
        return None


def hidden_from_compile(hooks: Sequence[Callable[..., Any]]) -> Patch:
    """A patch with which compiled models do not count ``hooks`` as global hooks.

    Compiled models warn at each call that global hooks fire twice. A warnings filter does not help: a script that
    turns warnings into errors puts its own filter before it.
    """

    def has_other_hooks(original: Callable[[], Any]) -> bool:
        registered = (hook for table in _HOOK_TABLES for hook in getattr(modules, table, {}).values())
        return any(all(hook is not own for own in hooks) for hook in registered)

    return Patch(modules, "_has_any_global_hook", has_other_hooks)


def scalar_of(value: Any) -> Tensor | None:
    """A detached copy, of shape (), of a floating-point tensor with one element; None for anything else."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() != 1 or value.is_meta:
        return None
    return value.detach().reshape(()).clone()


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
