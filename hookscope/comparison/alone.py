"""What a layer of one side gives on the inputs that its partner had on the other side."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.comparison.pairing import Pair
from hookscope.comparison.side import FUNCTIONAL
from hookscope.hooks import map_tensors, random_states_kept, tensors_in


def may_run_alone(pair: Pair, module: nn.Module | None, holders: Container[str]) -> bool:
    """Whether B's layer, ``module``, runs by itself: no operation, and no block of other layers that are compared."""
    if module is None or pair.first_b is not None or pair.b.type in FUNCTIONAL:  # the hooked Identity adds nothing
        return False
    inner = (parameter for child in module.children() for parameter in child.parameters())
    return pair.a.name not in holders or next(inner, None) is None


def run_alone(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
    """What ``forward`` of a layer gives on the inputs of another layer.

    ``given`` are the inputs that the layer had in its own pass: those of the other layer get their data type, device
    and scale of quantisation.
    """
    like = next(iter(tensors_in(given).values()), None)
    # the same tensor in two places is one tensor in the copy too: attention depends on it
    args, kwargs = map_tensors((args, kwargs), cache(lambda tensor: _as(tensor, like)))
    with random_states_kept():
        return forward(*args, **kwargs)


def _as(tensor: Tensor, like: Tensor | None) -> Tensor:
    """A copy of ``tensor`` in the form of ``like``; a layer may work in place."""
    if like is None:
        return tensor.clone()
    if tensor.is_quantized and not like.is_quantized:
        tensor = tensor.dequantize()
    if like.is_quantized and tensor.is_floating_point():
        tensor = tensor.to(like.device, torch.float32)
        return torch.quantize_per_tensor(tensor, like.q_scale(), like.q_zero_point(), like.dtype)
    dtype = like.dtype if tensor.is_floating_point() and like.is_floating_point() else tensor.dtype
    return tensor.to(like.device, dtype, copy=True)
