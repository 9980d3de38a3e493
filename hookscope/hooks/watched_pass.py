"""A forward pass with every operation of torch in sight, and the line of code that called each."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hookscope.hooks.registration import HookHandles

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # the folder of the package


class WatchedPass(TorchFunctionMode):
    """Observes every operation of torch, and each layer before and after it runs, inside a ``with`` block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._handles = HookHandles()

    def __enter__(self) -> Self:
        with HookHandles() as handles:
            for module in self._names:
                handles.forward_pre(module, self._before)
                handles.forward(module, self._after)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._handles = handles.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._handles.close()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        raise NotImplementedError


def place_of_code() -> str:
    """The line that called the running ``__torch_function__``, ``net.py:17``; empty if it is a line of hookscope."""
    library = os.path.dirname(torch.__file__) + os.sep
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    frame = frame and frame.f_back
    while frame is not None:
        own = frame.f_code.co_filename.startswith(_OWN)
        if own and frame.f_code.co_name != "__torch_function__":
            return ""
        if not own and not frame.f_code.co_filename.startswith(library):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def operation_name(func: Any) -> str:
    """The name of a function of torch; the name of the attribute for a property such as ``data``."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        attribute = str(getattr(owner, "__name__", name))
        return attribute if name == "__get__" else "__set__"
    return name
