"""The data type in which a model computes."""

from __future__ import annotations

import torch
from torch import nn

from hookscope.errors import UsageError
from hookscope.findings import listed

DTYPES = ("float32", "float64", "float16", "bfloat16")
AUTOCAST = "autocast"


def parse_dtype(text: str, device: str) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The type of parameters and inputs, and that of `torch.autocast`; one of them is None.

    ``text`` is one of `DTYPES`, ``autocast`` for the usual type of ``device``, or such as ``autocast:float16``.

    Raises:
        UsageError: no such type.
    """
    if text.partition(":")[0] == AUTOCAST:
        name = text.partition(":")[2] or dtype_name(torch.get_autocast_dtype(torch.device(device).type))
        if name not in ("float16", "bfloat16"):
            raise UsageError(f"autocast cannot compute in '{name}'", "it takes float16 and bfloat16", "choose one")
        return None, getattr(torch, name)
    if text not in DTYPES:
        raise UsageError(f"no data type '{text}'", f"there are {listed([*DTYPES, AUTOCAST], 9)}", "choose one")
    return getattr(torch, text), None


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_quantized(model: nn.Module) -> bool:
    """Whether layers hold their weights in 8 bits."""
    return any(value.is_quantized for value in model.state_dict().values() if isinstance(value, torch.Tensor))
