"""The softmax or the sigmoid at the end of a model, and the scores that it was computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_COPIES = ("alias", "clone", "detach", "to_copy", "unsafe_view")
_MARK = "_hookscope_ending"


@dataclass(frozen=True, slots=True)
class Ending:
    """The operation that made a tensor: ``softmax``, ``log_softmax`` or ``sigmoid``; ``before`` gives its argument."""

    kind: str
    before: Callable[[], Tensor]

    def mark(self, tensor: Tensor) -> None:
        """Let `ending_of` find it."""
        setattr(tensor, _MARK, self)


def ending_of(tensor: Tensor) -> Ending | None:
    """The operation that made an output of `output_of`; None if it is another one than `Ending` knows."""
    ending: Ending | None = getattr(tensor, _MARK, None)
    return ending


def output_of(model: nn.Module, *args: Any) -> Any:
    """What ``model(*args)`` returns; `ending_of` knows the scores before a softmax or a sigmoid that made it.

    It changes no path that torch takes. Copies and views, such as hooks hand on, are followed.
    """
    with _Endings():  # type: ignore[no-untyped-call]
        return model(*args)


class _Endings(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        kind = function.overloadpacket.__name__.strip("_")
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is None or not isinstance(output, Tensor) or output is given:
            return output
        # the softmax of attention, over the last of four axes, is as large as it is uninteresting
        of_classes = kind == "sigmoid" or (kind in ("softmax", "log_softmax") and args[1] in (1, 1 - given.dim()))
        if of_classes and given.dim() in (2, 4):
            Ending(kind, lambda: given).mark(output)
        elif (ending := ending_of(given)) and (function.is_view or kind in _COPIES):
            Ending(ending.kind, lambda: function(ending.before(), *args[1:], **kwargs)).mark(output)
        return output
