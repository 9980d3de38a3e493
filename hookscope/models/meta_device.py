"""Models and passes on the meta device, where tensors have shapes and no values: no arithmetic, no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from hookscope.hooks import map_tensors


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``build`` returns, on the meta device, where initialising the parameters costs nothing.

    Only ``torch.empty`` goes to the meta device while building, because some builders (RegNet) compute with tensors.
    """

    class EmptyOnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.empty:
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    with EmptyOnMeta():
        model = build()
    return model.to("meta")


def meta_forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    """One forward pass on the meta device, with meta tensors in place of the parameters and buffers of ``model``.

    The model raises some exception if an operation needs values (``nonzero`` in detectors).
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    replacements = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    with torch.no_grad():
        on_meta = map_tensors((args, dict(kwargs or {})), lambda tensor: tensor.to("meta"))
        return functional_call(model, replacements, *on_meta)
