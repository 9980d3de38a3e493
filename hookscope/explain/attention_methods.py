"""The methods of class activation mapping that follow attention through a whole pass, for transformers.

In the formulas ``A`` is the attention ``(heads, L, L)`` of one layer, ``I`` the identity and ``S`` the score. The map
of a layer is the row of the class token in the product over the layers up to this one, without the column of the class
token; of a model without class token it is the mean of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.attention import Attention, AttentionMap, follow_attention, map_of, selected_attention, usual_query
from hookscope.errors import LayerError, NoMapError
from hookscope.hooks import MODEL, InputSize, Layers, Selection

_INSTEAD = "attention shows each layer alone"


def rollout(attention: Tensor, gradient: Tensor | None) -> Tensor:
    """Attention rollout (Abnar and Zuidema, arXiv:2005.00928): what flows through all layers; ignores the class.

    ``R = B_l B_(l-1) ... B_1``, ``B = (mean_heads(A) + I) / 2``: the residual connection is half of each layer.
    """
    mean = attention.mean(0)
    return (mean + torch.eye(len(mean), dtype=mean.dtype, device=mean.device)) / 2


def attention_gradient(attention: Tensor, gradient: Tensor | None) -> Tensor:
    """Attention times gradient (Chefer et al., arXiv:2012.09838): the attention that raises the score.

    ``R = B_l B_(l-1) ... B_1 - I``, ``B = I + mean_heads(ReLU(dS/dA * A))``. The paper weighs the gradient with a
    relevance by LRP; the attention in its place is the authors' own later form (arXiv:2103.15679).
    """
    assert gradient is not None
    raised = (gradient * attention).relu().mean(0)
    return raised + torch.eye(len(raised), dtype=raised.dtype, device=raised.device)


@dataclass(frozen=True, slots=True)
class AttentionMethod:
    """A method, and the steps around it.

    Attributes:
        layer: From the attention of a layer, and its gradient or None, to the matrix ``(L, L)`` of that layer.
        summary: How it joins the layers, in a line of the help.
        gradient: Whether it needs the gradient.
        own: Whether each token's relevance for itself, the identity, is part of the map.
    """

    layer: Callable[[Tensor, Tensor | None], Tensor]
    summary: str
    gradient: bool
    own: bool


ATTENTION_METHODS = {
    "rollout": AttentionMethod(rollout, "transformers: attention of all layers; ignores the class", False, True),
    "attention-gradient": AttentionMethod(
        attention_gradient, "transformers: attention of all layers, times its gradient", True, False
    ),
}
"""Every method by the name of the method."""

Follow = Callable[[Tensor], Iterator[tuple[AttentionMap, int]]]


def follow_relevance(
    model: nn.Module, inputs: tuple[Any, ...], layers: Layers | None, how: AttentionMethod, shown: InputSize
) -> tuple[Any, Follow]:
    """Run the model once; returns its output, and a function of a score.

    That gives the map ``(1, h, w)`` of each selected call of attention, and the number of heads up to it.
    """
    if layers is not None:
        Selection.of(layers).check_names([name for name, _ in model.named_modules()], type(model).__name__)
    output, found = follow_attention(model, inputs, "0:", partial(_reduced, how))
    calls = [call for call, _ in found]
    last = calls[-1:] if layers is None else selected_attention(calls, Selection.of(layers))
    steps = [step for call, step in found if (call.index or 0) <= (last[-1].index or 0)]
    for attention, _ in steps:
        _check_joins(attention, steps[0][0])

    def follow(score: Tensor) -> Iterator[tuple[AttentionMap, int]]:
        gradients = _gradients(score, [each for each, _ in steps]) if how.gradient else [None] * len(steps)
        matrices, heads = list[Tensor](), 0
        for (attention, count), gradient in zip(steps, gradients, strict=True):
            weights = attention.weights[0]
            matrices.append(weights[0] if gradient is None else how.layer(_exact(weights), gradient))
            heads += count
            if attention.call in last:
                with torch.no_grad():
                    found = map_of(attention, usual_query(model), shown, looks=partial(_looks, how, matrices))
                if isinstance(found, NoMapError):
                    raise found
                yield found, heads

    return output, follow


def _reduced(how: AttentionMethod, attention: Attention) -> tuple[Attention, int]:
    """What a method needs of one call, and the number of heads: without gradients one matrix, which is smaller."""
    windows, heads, length, width = attention.weights.shape
    if how.gradient or windows > 1 or length != width:
        return attention, heads
    matrix = how.layer(_exact(attention.weights[0]), None)[None, None]
    return replace(attention, weights=matrix, source=matrix), heads


def _looks(how: AttentionMethod, matrices: Sequence[Tensor], share: Tensor) -> Tensor:
    """What queries with shares ``(1, L)`` look at through all ``matrices``, the last first: ``(1, 1, L)``."""
    row = share.double()
    for matrix in reversed(matrices):
        row = row @ matrix
    return (row if how.own else row - share)[None].float()


def _exact(weights: Tensor) -> Tensor:
    return weights.detach().cpu().double()  # not every device has double precision


def _check_joins(attention: Attention, first: Attention) -> None:
    """Refuse attention that no matrix over all tokens can join: in windows, from other tokens, of other numbers."""
    windows, _, length, width = attention.weights.shape
    tokens = first.weights.shape[-1]
    if windows == 1 and length == width == tokens:
        return
    exists = f"its {length:,} queries look at {width:,} keys"
    if windows > 1:
        exists = f"it looks within {windows:,} windows"
    elif length == width:
        exists = f"it has {width:,} tokens, and {first.call.key or MODEL} has {tokens:,}"
    raise NoMapError(f"the attention of {attention.call.key or MODEL} cannot be joined over layers", exists, _INSTEAD)


def _gradients(score: Tensor, calls: list[Attention]) -> list[Tensor]:
    """The gradients of ``score`` by the weights of each call, ``(heads, L, L)``; zeros where it does not depend."""
    sources = [attention.source for attention in calls]
    reached = [source for source in sources if source.requires_grad and score.requires_grad]
    found = torch.autograd.grad(score, reached, retain_graph=True, allow_unused=True) if reached else ()
    by_source = {id(source): each for source, each in zip(reached, found, strict=True) if each is not None}
    if not by_source:
        exists = "no gradient reaches it: it is detached or computed under no_grad"
        raise LayerError("the score does not depend on any attention", exists, "use the method rollout")
    gradients = []
    for attention, source in zip(calls, sources, strict=True):
        gradient = by_source.get(id(source), torch.zeros_like(source))
        gradients.append(_exact(gradient.reshape(attention.weights.shape)[0]))
    return gradients
