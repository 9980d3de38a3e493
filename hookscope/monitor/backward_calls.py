"""See what a script calls ``backward`` on: the loss, wherever in its own code it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BackwardCalls", "scalar_of"]


class BackwardCalls:
    """Calls ``seen(value)`` before each backward pass of the process that begins at scalars, while it is `on`.

    No hook of torch is called there: ``torch.autograd.backward``, which ``Tensor.backward`` calls too, is replaced for
    that time, and put back. What imported the function by name beforehand is not seen. ``value`` is the sum of the
    scalars the pass begins at, a copy without a graph: a loss that a ``GradScaler`` has scaled is the scaled one.

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
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def on(self) -> None:
        """See the calls from now on."""
        import torch

        if self._ours is not None:
            return
        original = torch.autograd.backward

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._ours is backward:  # else it is over, and somebody who wrapped this one calls it still
                self._see(tensors, args, kwargs)
            return original(tensors, *args, **kwargs)

        self._original, self._ours = original, backward
        torch.autograd.backward = backward

    def off(self) -> None:
        """Put back what was there; what somebody has put over it since then stays."""
        import torch

        if torch.autograd.backward is self._ours:
            torch.autograd.backward = self._original  # type: ignore[assignment]
        self._original = self._ours = None

    def _see(self, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        if (args and args[0] is not None) or kwargs.get("grad_tensors") is not None:
            return  # a vector times a Jacobian: no loss
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        values = [value for value in map(scalar_of, roots) if value is not None]
        if values and len(values) == len(roots):
            self._seen(values[0] if len(values) == 1 else torch.stack([v.float() for v in values]).sum(), roots)


def scalar_of(value: Any) -> Tensor | None:
    """A copy of a tensor of one real value, without its graph and its axes; None for anything else.

    Example:
        >>> import torch
        >>> scalar_of(torch.tensor([2.0])), scalar_of(torch.ones(2)), scalar_of("word")
        (tensor(2.), None, None)
    """
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() != 1 or value.is_meta:
        return None
    return value.detach().reshape(()).clone()
