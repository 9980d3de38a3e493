"""See what a script calls ``backward`` on: the loss, wherever in its own code it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookscope.training.loss_scales import LossScales
from hookscope.training.replaced import Replaced


class BackwardCalls:
    """Calls ``seen(value)`` before each backward pass of the process that begins at scalars, while it is `on`.

    No hook of torch is called there: ``torch.autograd.backward``, which ``Tensor.backward`` calls too, is replaced for
    that time, and put back. What imported the function by name beforehand is not seen. ``value`` is the sum of the
    scalars the pass begins at, a copy without a graph; without the scale of a ``GradScaler``.

    Args:
        seen: What to call; what it raises is raised in the script, in place of the backward pass.

    Example:
        >>> import torch
        >>> values = []
        >>> calls = BackwardCalls(lambda value, tensors: values.append(float(value)))
        >>> calls.on()
        >>> (torch.ones(2, requires_grad=True) * 3).sum().backward()
        >>> calls.off()
        >>> values
        [6.0]
    """

    def __init__(self, seen: Callable[[Tensor, Sequence[Tensor]], None]) -> None:
        self._seen = seen
        self._scales = LossScales()
        self._replaced: Replaced | None = None

    def on(self) -> None:
        """See the calls from now on."""
        if self._replaced is None:
            self._replaced = Replaced(torch.autograd, "backward", self._backward)
            self._replaced.on()
            self._scales.on()

    def off(self) -> None:
        """Put back what was there; what somebody has put over it since then stays."""
        if self._replaced is not None:
            self._replaced.off()
            self._scales.off()
        self._replaced = None

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, Iterator):  # it can be gone through only once
            tensors = tuple(tensors)
        self._see(tensors, args, kwargs)
        return original(tensors, *args, **kwargs)

    def _see(self, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if (args and args[0] is not None) or kwargs.get("grad_tensors") is not None:
            return  # a vector times a Jacobian: no loss
        value, roots = None, (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        with contextlib.suppress(Exception):  # whatever is wrong with them, let the pass itself say so
            roots = tuple(roots)
            value = self._value(roots)
        if value is not None:
            self._seen(value, roots)

    def _value(self, roots: Sequence[Any]) -> Tensor | None:
        """The sum of scalars without their scales, None where not all are scalars."""
        values = []
        for root in roots:
            value = scalar_of(root)
            if value is None:
                return None
            scale = self._scales.of(root)
            values.append(value if scale is None else value.float() / scale.to(value.device))
        if len(values) < 2:
            return values[0] if values else None
        return torch.stack([value.float().to(values[0].device) for value in values]).sum()


def scalar_of(value: Any) -> Tensor | None:
    """A copy of a tensor of one real value, without its graph and its axes; None for anything else.

    Example:
        >>> import torch
        >>> scalar_of(torch.tensor([2.0])), scalar_of(torch.ones(2)), scalar_of("word")
        (tensor(2.), None, None)
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() != 1 or value.is_meta:
        return None
    return value.detach().reshape(()).clone()
