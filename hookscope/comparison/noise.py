"""The noise of a comparison: how far A is from itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookscope.comparison.calls import ComparedCalls
from hookscope.comparison.facts import INPUT
from hookscope.comparison.inputs import PairedBatch
from hookscope.comparison.passes import Kept, observers_of, run_side
from hookscope.comparison.rows import RowSums
from hookscope.comparison.side import Side
from hookscope.hooks import MODEL, Call, map_tensors, named_inputs, tensors_in


def measure_noise(
    a: Side, batch: PairedBatch, calls: ComparedCalls, kept: Mapping[str, Kept], output: Any, rows: RowSums
) -> None:
    """Run A again, and with its input changed by rounding.

    Where whole numbers are the input, such as tokens, the first numbers with fractions that come of them change.
    """
    listed = a.net.family == "detection"
    whole = not _has_fractions(batch.a)
    for inputs in (batch.a, map_tensors(batch.a, _rounded)):

        def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any, again: Any = inputs) -> Any:
            if whole and again is not batch.a and not _has_fractions((args, kwargs)):
                output = map_tensors(output, _rounded)
            if call.key in kept:
                rows.add_noise(call.key, kept[call.key].output, output, batch)
            return output if whole else None

        looked_at = [pair.a for pair in calls.pairing.pairs]
        again = run_side(a, inputs, observers_of(a, looked_at, calls.ops, on_call))
        rows.add_noise(MODEL, output, again, batch, listed)
        rows.add_noise(INPUT, named_inputs(batch.a, {}), named_inputs(inputs, {}), batch, listed)


def _has_fractions(value: Any) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_in(value).values())


def _rounded(tensor: Tensor) -> Tensor:
    """``tensor`` with each value changed by about one unit in the last place, up or down."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(2, tensor.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    step = torch.finfo(tensor.dtype).eps * signs.to(tensor.device)
    return (tensor.double() * (1 + step.double())).to(tensor.dtype) if tensor.device.type != "mps" else tensor
