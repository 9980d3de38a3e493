"""Whether an image gets the same answer again, and beside another image: dropout or noise left on, samples that mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import HookscopeError
from hookscope.findings import CATALOGUE, Finding, default
from hookscope.hooks import Call, Observer, differentiable, tensors_in
from hookscope.models import LoadedModel

_DIFFERENCE = default("random-output", "difference")
_SAMPLE = 256  # values of a call that are compared


def unrepeated(net: LoadedModel, inputs: Sequence[tuple[Tensor, ...]]) -> Iterator[Finding]:
    """One finding, at the first call that differs, if the first image is answered otherwise beside another one."""
    alone = net.inputs(*inputs[0])
    both = [_joined(*pair) for pair in zip(alone, net.inputs(*inputs[-1]), strict=True)]
    if not both or any(pair is None for pair in both):
        return
    try:
        with differentiable(net.model, parameters=False), torch.no_grad():
            first, beside = _output(net.model(*alone)), _output(net.model(*both))
            again = first if first is None or _same(first, beside) else _output(net.model(*alone))
            if first is None or beside is None or _same(first, beside):
                return
            case = "batch" if _same(first, again) else ""
            before, after = (_calls(net, given) for given in (alone, both if case else alone))
    except (HookscopeError, RuntimeError, ValueError, TypeError):  # such as a model that takes no batch
        return
    layer = next((key for key in before if key in after and not _same(before[key], after[key])), "")
    difference = _distance(first, beside if case else again)
    when = "beside another image" if case else "in a second pass"
    text = f"the output of the model {when} differs by {difference:.2g} of its spread"
    yield CATALOGUE["random-output"].finding(layer, text, case, numbers={"difference": difference})


def _joined(one: Any, other: Any) -> Tensor | None:
    """Both inputs in one batch; None where they have none."""
    fits = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    return torch.cat([one, other]) if fits and one.dim() > 2 and len(one) == 1 else None


def _output(output: Any) -> Tensor | None:
    """Some values of the first image in the first tensor of an output."""
    tensor = next(iter(tensors_in(output).values()), None)
    if tensor is None or tensor.dim() < 2 or not tensor.is_floating_point():
        return None
    values = tensor[0].detach().flatten()
    return values[:: -(-len(values) // _SAMPLE) or 1].double().cpu()


def _calls(net: LoadedModel, inputs: Sequence[Any]) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}

    def keep(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if (values := _output(output)) is not None:
            kept.setdefault(call.key, values)

    with Observer(net.model, "*", None, keep):
        net.model(*inputs)
    return kept


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is None or other is None or one.shape != other.shape or not _distance(one, other) > _DIFFERENCE


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference, over the spread of the values."""
    assert one is not None and other is not None
    spread = max(float(one.std()), float(one.abs().mean()), 1e-30) if len(one) > 1 else max(float(one.abs()), 1e-30)
    return float((one - other).abs().max()) / spread
