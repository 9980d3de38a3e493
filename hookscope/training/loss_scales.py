"""By how much a ``GradScaler`` has scaled a loss, so that it can be told as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookscope.training.replaced import Replaced

_KEY = "hookscope.scale"
_MOST_NODES = 8  # what a script does to a loss after it was scaled: divides it, adds others to it


class LossScales:
    """Knows the scale of what any ``GradScaler`` has scaled while it is `on`.

    ``torch.amp.GradScaler.scale`` is replaced for that time, and that of each class derived from it. The scale is noted
    in the node of the autograd graph that made the scaled tensor, and goes with it.

    Example:
        >>> import torch
        >>> scales, scaler = LossScales(), torch.amp.GradScaler("cpu", init_scale=8.0)
        >>> loss = torch.ones(2, requires_grad=True).sum()
        >>> scales.on()
        >>> scaled = scaler.scale(loss)
        >>> scales.off()
        >>> scales.of(scaled / 2), scales.of(loss)
        (tensor(8.), None)
    """

    def __init__(self) -> None:
        self._replaced: list[Replaced] = []
        self._is_used = False

    def on(self) -> None:
        """Note scales from now on."""
        if self._replaced:
            return
        owners = {torch.amp.GradScaler, *_derived(torch.amp.GradScaler)}
        self._replaced = [Replaced(owner, "scale", self._scale) for owner in owners if "scale" in vars(owner)]
        for each in self._replaced:
            each.on()

    def off(self) -> None:
        """Put back what was there."""
        for each in self._replaced:
            each.off()
        self._replaced = []

    def of(self, tensor: Tensor) -> Tensor | None:
        """What ``tensor``, or what it was made from a few operations ago, was multiplied by; None where by nothing."""
        waiting: list[Any] = [tensor.grad_fn] if self._is_used else []
        for _ in range(_MOST_NODES):
            if not waiting:
                return None
            node = waiting.pop(0)
            if node is None:
                continue
            scale: Tensor | None = node.metadata.get(_KEY)
            if scale is not None:
                return scale
            waiting += [parent for parent, _ in node.next_functions]
        return None

    def _scale(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        if not torch.compiler.is_compiling():
            with contextlib.suppress(Exception):  # of a scaler of another kind nothing is known
                self._note(scaler, scaled)
        return scaled

    def _note(self, scaler: Any, scaled: Any) -> None:
        if not scaler.is_enabled():
            return
        scale = scaler._scale.detach()  # autograd itself sees to it that `update` comes after the backward pass
        for tensor in _tensors([scaled]):
            if tensor.grad_fn is not None:
                node: Any = tensor.grad_fn
                node.metadata[_KEY] = scale
                self._is_used = True


def _derived(cls: type[Any]) -> Iterator[type[Any]]:
    derived: list[type[Any]] = cls.__subclasses__()
    for each in derived:
        yield each
        yield from _derived(each)


def _tensors(scaled: Sequence[Any]) -> Iterator[Tensor]:
    """Those in lists and tuples; an iterator is left to the script, for it can be gone through only once."""
    for each in scaled:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)
