"""Whether an image gets the same answer again, and beside another image: dropout or noise left on, samples that mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookscope.findings import CATALOGUE, Finding, default
from hookscope.hooks import Call, Observer, differentiable, tensors_in
from hookscope.models import LoadedModel

_DIFFERENCE = default("random-output", "difference")
_SAMPLE = 256  # values of a call that are compared
_PASSES = 12  # of a model that draws random numbers: a block that is left out now and then

Calls = dict[str, tuple[Sequence[int], Tensor]]
"""Shape and some values of the first output of each call."""


def unrepeated(
    net: LoadedModel, inputs: Sequence[tuple[Tensor, ...]], scores: Tensor | None = None
) -> Iterator[Finding]:
    """One finding, at the first call that differs, if the first image is answered otherwise beside another one.

    ``scores`` ``(1, K)`` are the answer to the first image, if it is known: a sound model then costs one pass.
    """
    alone = net.inputs(*inputs[0])
    both = [_joined(*pair) for pair in zip(alone, net.inputs(*inputs[-1]), strict=True)]
    if any(pair is None for pair in both):
        return
    try:
        with differentiable(net.model, parameters=False), torch.no_grad():
            torch.manual_seed(torch.initial_seed() ^ 1)  # the pass before began with the same random numbers
            state = torch.get_rng_state()
            beside = _values(net.model(*both))
            draws = not torch.equal(torch.get_rng_state(), state)  # what is drawn may seldom matter
            if scores is not None and not draws and _agree(_values(scores), beside):
                return
            passes = range(_PASSES if draws else 1)
            first = _values(net.model(*alone))
            again = next((other for _ in passes if not _agree(first, other := _values(net.model(*alone)))), first)
            case = "batch" if _agree(first, again) else ""
            other = beside if case else again
            if _agree(first, other):
                return
            calls = _calls(net, alone, {})
            tried = (_differing(calls, _calls(net, both if case else alone, calls)) for _ in passes)
            layer = next(filter(None, tried), "")
    except Exception:  # whatever a model raises that takes no batch of two
        return
    difference = _distance(first, other)
    what = "the output changes in a second pass"
    what = "the output for an image changes with the other images of the batch" if case else what
    text = f"{what}, by {difference:.2g} times the spread of its values"
    yield CATALOGUE["random-output"].finding(layer, text, case, numbers={"difference": difference})


def _joined(one: Any, other: Any) -> Tensor | None:
    """Both inputs in one batch; None where they have none."""
    fits = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    return torch.cat([one, other]) if fits and one.dim() > 2 and len(one) == 1 else None


def _values(output: Any, shape: Sequence[int] = ()) -> Tensor:
    """Some values of the first image in the first tensor of an output; empty if it has none.

    With the ``shape`` that one image makes, images are along the first axis that is longer, else along axis 0.
    """
    tensor = next(iter(tensors_in(output).values()), None)
    if tensor is None or tensor.dim() < 2 or not tensor.is_floating_point():
        return torch.zeros(0)
    longer = (axis for axis, (size, own) in enumerate(zip(tensor.shape, shape, strict=False)) if size > own)
    axis = next(longer, 0)
    values = tensor.detach().narrow(axis, 0, shape[axis] if shape else 1).flatten()
    return values[:: -(-len(values) // _SAMPLE) or 1].double().cpu()


def _calls(net: LoadedModel, inputs: Sequence[Any], alone: Calls) -> Calls:
    """The calls of a pass; ``alone`` are the calls for one image."""
    kept: Calls = {}

    def keep(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        shape = next((tensor.shape for tensor in tensors_in(output).values()), ())
        kept.setdefault(call.key, (shape, _values(output, alone.get(call.key, (shape,))[0])))

    with Observer(net.model, "*", None, keep):
        net.model(*inputs)
    return kept


def _differing(calls: Calls, others: Calls) -> str:
    """The first call with other values; empty if there is none."""
    return next((key for key in calls if key in others and not _agree(calls[key][1], others[key][1])), "")


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether the values are the same but for rounding; nothing is said of values that cannot be compared."""
    return one.shape != other.shape or not len(one) or not _distance(one, other) > _DIFFERENCE


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, over the spread of the values, or over their size where that is larger."""
    spread = max(float(one.std(correction=0)), float(one.abs().mean()), 1e-30)
    return float((one - other).abs().max()) / spread
