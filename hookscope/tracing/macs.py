"""Multiply-accumulates of every operation that runs, by torch's own formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_CONVOLUTIONS = {torch.ops.aten.convolution, torch.ops.aten._convolution}


def _of_recurrent_layer(inputs: Tensor, *weights: Tensor) -> int:
    """An LSTM in one operation on a CPU: inputs ``(T, N, C)``, then two matrices and their biases."""
    return math.prod(inputs.shape[:2]) * (weights[0].numel() + weights[1].numel())


_FORMULAS: dict[Any, Callable[..., int]] = {torch.ops.aten.mkldnn_rnn_layer: _of_recurrent_layer}


class MacCounter(TorchDispatchMode):
    """Calls ``count(macs, added)`` for each operation inside the ``with`` block that multiplies and accumulates.

    A multiply-accumulate is two of torch's FLOPs. ``added`` are the values of a convolution's output that get a bias.
    """

    supports_higher_order_operators = True

    def __init__(self, count: Callable[[int, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __enter__(self) -> Any:
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it fuses attention into an operation without a formula
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.backends.mha.set_fastpath_enabled(self._fastpath)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = func._overloadpacket if isinstance(func, OpOverload) else func
        formula = flop_registry.get(kind)
        if formula is None:
            if len(args) > 1 and hasattr(args[1], "unpack"):
                return self._quantized(kind, args, func(*args, **kwargs))
            if kind in _FORMULAS:
                self._count(_FORMULAS[kind](*args[:5]), 0)
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        added = output.numel() if kind in _CONVOLUTIONS and args[2] is not None else 0
        self._count(formula(*args, **kwargs, out_val=output) // 2, added)
        return output

    def _quantized(self, kind: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Count an operation of a quantized layer, whose second argument holds the weight and the bias."""
        weight, bias = args[1].unpack()[:2]
        is_convolution = "conv" in kind.__name__
        each = args[0] if "transpose" in kind.__name__ else output  # of these values, one row of the weight for each
        self._count(each.numel() * weight[0].numel(), output.numel() if is_convolution and bias is not None else 0)
        return output
