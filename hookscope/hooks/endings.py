"""What operations say of a tensor: the scores before a softmax or a sigmoid, and that its channels come first."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.hooks.tensors import tensors_in

_COPIES = ("alias", "clone", "detach", "to_copy", "unsafe_view")
_MAKES_CHANNELS = re.compile("(?!.*backward).*(conv|batch_norm).*")
_KEEPS_AXES = re.compile(f"(leaky_|p)?relu|g?elu|silu|mish|hardswish|hardtanh|tanh|sigmoid|{'|'.join(_COPIES)}")
_ENDS = ("softmax", "log_softmax", "sigmoid")
_ENDING, _FIRST = "_hookscope_ending", "_hookscope_channels_first"


class Ending(NamedTuple):
    """The operation that made a tensor: ``softmax``, ``log_softmax`` or ``sigmoid``; ``before`` gives its argument."""

    kind: str
    before: Callable[[], Tensor]

    def mark(self, tensor: Tensor) -> None:
        """Let `ending_of` find it."""
        setattr(tensor, _ENDING, self)


def ending_of(tensor: Tensor) -> Ending | None:
    """The operation that made an output of `output_of`; None if it is another one than `Ending` knows."""
    return getattr(tensor, _ENDING, None)


def has_channels_first(tensor: Any) -> bool:
    """Whether a convolution or BatchNorm in `output_of` made it, or an activation function after one."""
    return getattr(tensor, _FIRST, False)


def output_of(model: Callable[..., Any], *args: Any) -> Any:
    """What ``model(*args)`` returns; `ending_of` knows the scores before a softmax or a sigmoid that made it.

    It changes no path that torch takes. Copies and views, such as hooks hand on, are followed. A model of
    torch.compile runs alone: it may be told to run whole or not at all.
    """
    if hasattr(model, "_orig_mod"):
        return model(*args)
    with _Endings() as endings:
        output = model(*args)
    for tensor in tensors_in(output).values():  # no other tensor keeps what was before it in memory
        if ending := endings.of(tensor):
            ending.mark(tensor)
    return output


def repeated(model: Callable[..., Any]) -> Callable[..., Any]:
    """`output_of` for many passes of one model: plain calls, once an output had no ending."""
    plain = False

    def run(*args: Any) -> Any:
        nonlocal plain
        output = model(*args) if plain else output_of(model, *args)
        plain = plain or not any(map(ending_of, tensors_in(output).values()))
        return output

    return run


@cache
def _facts(function: Any) -> tuple[str, bool, bool, bool]:
    """The name of an operation; whether its result has channels, keeps the axes, and is a copy or a view."""
    kind = function.overloadpacket.__name__.strip("_")
    copies = function.is_view or kind in _COPIES
    return kind, bool(_MAKES_CHANNELS.fullmatch(kind)), bool(_KEEPS_AXES.fullmatch(kind)), copies


class _Endings(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # an ending, its argument, and how often the tensor and the argument had been written to
        self._known = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> Ending | None:
        """The ending of a tensor that nothing has written to since."""
        if (known := self._known.get(tensor)) is None:
            return ending_of(tensor)  # made by another runtime
        ending, given, *versions = known
        return ending if versions == [_version(tensor), _version(given)] else None

    def _note(self, tensor: Tensor, ending: Ending, given: Tensor) -> None:
        self._known[tensor] = ending, given, _version(tensor), _version(given)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        kind, makes, keeps, copies = _facts(function)
        if makes or (keeps and has_channels_first(args[0])):
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                setattr(first, _FIRST, True)
        if not (copies or kind in _ENDS) or output is (given := args[0]):
            return output
        # the softmax of attention, over the last of four axes, is as large as it is uninteresting
        if kind in _ENDS and given.dim() in (2, 4) and (kind == "sigmoid" or args[1] in (1, 1 - given.dim())):
            self._note(output, Ending(kind, lambda: given), given)
        elif copies and isinstance(output, Tensor) and isinstance(given, Tensor) and (ending := self.of(given)):
            before = Ending(ending.kind, lambda: function(ending.before(), *args[1:], **(kwargs or {})))
            self._note(output, before, self._known[given][1] if given in self._known else given)
        return output


def _version(tensor: Tensor) -> int:
    """How often something wrote to a tensor; 0 for one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version
