"""The kernels that a device would run, where they keep other tensors than those of the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hookscope.hooks import without_check

_FLASH, _EFFICIENT = 1, 2  # of torch.nn.attention.SDPBackend


class DeviceKernels(TorchFunctionMode):
    """Runs attention and dropout on meta tensors by the kernels that ``device`` (``cpu``, ``cuda``) would take."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # what it calls is to come here too
            with self:
                return without_check(func)(*args, **kwargs)
        if func in (F.dropout, torch.dropout) and self._device == "cuda":
            return _dropout_of_cuda(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        aten = torch.ops.aten
        inputs = query, key, value
        if query.is_meta and query.dim() == 4 and not enable_gqa:
            kernel = self._chosen(query, key, value, attn_mask, dropout_p, is_causal)
            if kernel == _FLASH and self._device == "cpu":
                return aten._scaled_dot_product_flash_attention_for_cpu(
                    *inputs, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
                )[0]
            if kernel == _FLASH:
                return aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, scale=scale)[0]
            if kernel == _EFFICIENT:
                bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
                keeps = any(tensor.requires_grad for tensor in inputs) and torch.is_grad_enabled()
                return aten._scaled_dot_product_efficient_attention(
                    *inputs, bias, keeps, dropout_p, is_causal, scale=scale
                )[0]
        return F.scaled_dot_product_attention(
            *inputs, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _chosen(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
    ) -> int:
        if self._device == "cpu":  # it is here, and can be asked with the tensors of one image
            given = query, key, value, mask
            with torch._C._DisableTorchDispatch():
                one: list[Any] = [
                    None if t is None else torch.empty_like(t[:1] if t.dim() == 4 else t, device="cpu") for t in given
                ]
                if mask is not None:
                    one[3].requires_grad_(mask.requires_grad)
                choice: Any = torch._fused_sdp_choice
                return int(choice(*one, dropout, causal))
        if self._device != "cuda" or query.dtype is torch.float64:
            return 0
        short = query.dtype in (torch.float16, torch.bfloat16)
        return _FLASH if short and mask is None and query.shape[-1] <= 256 else _EFFICIENT


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    bias = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype is torch.bool else mask
    return bias.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout_of_cuda(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    fused = training and 0 < p < 1 and not inplace
    return torch.native_dropout(input, p, True)[0] if fused else F.dropout(input, p, training, inplace)


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Any, mean: Tensor | None, var: Any, training: bool, *numbers: float
) -> tuple[Tensor, Tensor, Tensor]:
    given = next((tensor for tensor in (mean, weight) if tensor is not None), input)
    means = given.new_empty(input.shape[1] if training else 0)
    return torch.empty_like(input), means, torch.empty_like(means)


def _batch_norm_backward(grad: Tensor, input: Tensor, weight: Tensor | None, *others: Any) -> tuple[Any, ...]:
    _, scales, shifts = others[-1]
    given = (input if weight is None else weight).new_empty
    channels = input.shape[1]
    return torch.empty_like(input), given(channels) if scales else None, given(channels) if shifts else None


# Torch's own kernels on the meta device cost twenty times as much, and return float32 means for other inputs too.
RESULTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""Functions that return what a kernel does on the meta device."""
