"""The methods of class activation mapping.

Most methods compute the weights of the channels of one layer: ``(C,)``, or ``(C, H, W)`` with a weight for every
position. The map is the sum of weight times activation over the channels, followed by the ReLU where the paper has one;
`hookscope.explain.cam` does the rest. In their formulas ``A`` is the activation ``(C, H, W)``, ``A_k`` its channel
``k``, ``S`` the score of the class (its logit), ``G = dS/dA`` the gradient, and a sum or mean without an index goes
over the positions of one channel.

Methods for transformers follow attention through a whole pass. In their formulas ``A`` is the attention
``(heads, L, L)`` of one layer, ``I`` the identity and ``S`` the score. The map of a layer is the row of the class token
in the product over the layers up to this one, without the column of the class token; of a model without class token it
is the mean of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hookscope.attention import Attention, AttentionMap, follow_attention, map_of, selected_attention, usual_query
from hookscope.errors import LayerError, NoMapError, UsageError, nearest
from hookscope.hooks import MODEL, InputSize, Layers, Selection

Method = TypeVar("Method")


@dataclass(frozen=True)
class CamInputs:
    """The inputs of a method: one layer, one image and one class.

    Attributes:
        activation: ``(C, H, W)``, as the layer returned it.
        gradient: ``(C, H, W)``, of the score with respect to it; zeros for a method without gradient.
        score: The score of the class.
        masked_scores: From channels ``(C, H, W)`` to the scores ``(C,)`` of the image under each channel as a mask,
            resized to the image and scaled to 0..1.
        ablated_scores: The scores ``(C,)`` with each channel of the layer set to 0 in turn.
    """

    activation: Tensor
    gradient: Tensor
    score: float
    masked_scores: Callable[[Tensor], Tensor]
    ablated_scores: Callable[[], Tensor]


def gradcam(inputs: CamInputs) -> Tensor:
    """Grad-CAM (Selvaraju et al., arXiv:1610.02391): the gradient's mean over the positions, then ReLU.

    ``w_k = mean(G_k)``, ``map = ReLU(sum_k w_k A_k)``.
    """
    return inputs.gradient.mean((1, 2))


def gradcam_plus_plus(inputs: CamInputs) -> Tensor:
    """Grad-CAM++ (Chattopadhay et al., arXiv:1710.11063): positions weighted by what each explains, then ReLU.

    ``w_k = sum(a_k ReLU(G_k))``, ``a_k = G_k^2 / (2 G_k^2 + sum(A_k) G_k^3 + 1e-6)``, 0 where ``G_k`` is 0: the
    closed form for the score passed through an exponential, without the factor ``exp(S)`` of the whole map. The paper
    has no 1e-6; it keeps the quotient finite, as in grad-cam. For gradients below 1e-3 it dominates, and the weight of
    a position is about proportional to the cube of its gradient.
    """
    gradient = inputs.gradient
    squared = gradient**2
    below = 2 * squared + inputs.activation.sum((1, 2), keepdim=True) * squared * gradient
    alpha = torch.where(gradient != 0, squared / (below + 1e-6), 0)
    return (alpha * gradient.relu()).sum((1, 2))


def hirescam(inputs: CamInputs) -> Tensor:
    """HiResCAM (Draelos and Carin, arXiv:2011.08891): every position by its own gradient, without ReLU.

    ``map = sum_k G_k * A_k``, position by position: where it is negative, the layer speaks against the class.
    """
    return inputs.gradient


def layercam(inputs: CamInputs) -> Tensor:
    """LayerCAM (Jiang et al., TIP 2021, doi:10.1109/TIP.2021.3089943; not on arXiv): positive gradients, then ReLU.

    ``map = ReLU(sum_k ReLU(G_k) * A_k)``, position by position, which also suits early layers with fine maps.
    """
    return inputs.gradient.relu()


def xgradcam(inputs: CamInputs) -> Tensor:
    """XGrad-CAM (Fu et al., arXiv:2008.02312): the gradient's mean weighted by the activation, then ReLU.

    ``w_k = sum(G_k A_k) / (sum(A_k) + 1e-7)``; the paper has no 1e-7, grad-cam does. Sensitivity and conservation hold
    as far as weights of channels allow.
    """
    # values of both signs cancel in the sums; MPS has no double precision
    wide = torch.float32 if inputs.activation.device.type == "mps" else torch.float64
    activation, gradient = inputs.activation.to(wide), inputs.gradient.to(wide)
    return ((gradient * activation).sum((1, 2)) / (activation.sum((1, 2)) + 1e-7)).to(inputs.activation)


def eigencam(inputs: CamInputs) -> Tensor:
    """Eigen-CAM (Muhammad and Yeasin, arXiv:2008.00299): the first principal component; no class, no ReLU.

    ``map = (A - mean(A)) V_1``, ``V_1`` the first right singular vector of the ``H W x C`` matrix of centred
    activations. The paper does not centre; grad-cam and this function do, or the component would be the mean map. The
    sign of ``V_1`` is arbitrary: it is chosen so that the map is high where the activations are large.
    """
    flat = inputs.activation.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    # left vectors of C x HW are right vectors of the paper's HW x C; `pca_lowrank` would draw random numbers
    first: Tensor = torch.linalg.svd(centred, full_matrices=False).U[:, 0]
    along = first @ centred
    size = flat.abs().sum(0)
    return first if float(along @ (size - size.mean())) >= 0 else -first


def scorecam(inputs: CamInputs) -> Tensor:
    """Score-CAM (Wang et al., arXiv:1910.01279): the score of the image under each channel as a mask, then ReLU.

    ``w = softmax_k(S(X * H_k))``, ``H_k`` channel ``k`` resized to the image ``X`` and scaled to 0..1: no gradient,
    one forward pass per channel. The mask of a constant channel is 0.
    """
    return inputs.masked_scores(inputs.activation).softmax(0)


def ablationcam(inputs: CamInputs) -> Tensor:
    """Ablation-CAM (Desai and Ramaswamy, WACV 2020; not on arXiv): the score lost without a channel, then ReLU.

    ``w_k = (S - S_k) / |S|``, ``S_k`` the score with ``A_k`` set to 0. The paper divides by ``S``, which inverts the
    map of a negative score. A weight below 1e-5 counts as 0: passes in batches of different sizes differ so much by
    rounding, and a map of rounding errors would look like any other.
    """
    weights = (inputs.score - inputs.ablated_scores()) / max(abs(inputs.score), 1e-7)
    return weights * (weights.abs() >= _ROUNDING)


_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class CamMethod:
    """A method, and the steps around it.

    Attributes:
        weigh: From the inputs to weights ``(C,)`` or ``(C, H, W)``.
        summary: What weighs the channels, in a line of the help.
        relu: Whether the paper sets negative values of the map to 0.
        gradient: Whether the method needs the gradient.
        centred: Whether the mean of each channel is subtracted before the weights are applied.
        passes: Whether it runs the model once per channel.
    """

    weigh: Callable[[CamInputs], Tensor]
    summary: str
    relu: bool = True
    gradient: bool = True
    centred: bool = False
    passes: bool = False


CAM_METHODS = {
    "gradcam": CamMethod(gradcam, "mean gradient of the channel"),
    "gradcam++": CamMethod(gradcam_plus_plus, "positive gradients, weighted by how much their position explains"),
    "hirescam": CamMethod(hirescam, "gradient of each position, without ReLU", relu=False),
    "layercam": CamMethod(layercam, "positive gradient of each position; suits early layers"),
    "xgradcam": CamMethod(xgradcam, "mean gradient weighted by the activation"),
    "eigencam": CamMethod(
        eigencam, "first principal component of the activation; ignores the class", False, False, centred=True
    ),
    "scorecam": CamMethod(
        scorecam, "score of the image masked by the channel; one pass per channel", gradient=False, passes=True
    ),
    "ablationcam": CamMethod(
        ablationcam, "score lost without the channel; one pass per channel", gradient=False, passes=True
    ),
}
"""Every method by the name of the method."""


def method_named(name: str, methods: Mapping[str, Method]) -> tuple[str, Method]:
    """The name as ``methods`` spell it, also where it has ``_`` for ``-``, and what it means."""
    name = name.replace("_", "-") if isinstance(name, str) else name
    if not isinstance(name, str) or name not in methods:
        raise UsageError(f"no method '{name}'", nearest(str(name), list(methods)), f"there are {', '.join(methods)}")
    return name, methods[name]


def name_methods(function: Any, **tables: Mapping[str, Any]) -> None:
    """Write the names of methods into a docstring, in place of the names of their ``tables``."""
    for table, methods in tables.items():
        names = ", ".join(f"``{name}``" for name in methods)
        function.__doc__ = (function.__doc__ or "").replace(f"`{table}`", names)


def gradient_free(methods: Mapping[str, Any]) -> str:
    """The methods that need no gradient, for an error."""
    return ", ".join(name for name, method in methods.items() if not method.gradient)


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
    output, pairs = follow_attention(model, inputs, "0:", partial(_reduced, how))
    calls = [call for call, _ in pairs]
    last = calls[-1:] if layers is None else selected_attention(calls, Selection.of(layers))
    steps = [step for call, step in pairs if (call.index or 0) <= (last[-1].index or 0)]
    for attention, _ in steps:
        _check_joins(attention, steps[0][0])

    def follow(score: Tensor) -> Iterator[tuple[AttentionMap, int]]:
        gradients = _gradients(score, [call for call, _ in steps]) if how.gradient else [None] * len(steps)
        matrices, heads = list[Tensor](), 0
        for (attention, count), gradient in zip(steps, gradients, strict=True):
            weights = attention.weights[0]
            matrices.append(weights[0] if gradient is None else how.layer(_exact(weights), gradient))
            heads += count
            if attention.call in last:
                with torch.no_grad():
                    shown_map = map_of(attention, usual_query(model), shown, looks=partial(_looks, how, matrices))
                if isinstance(shown_map, NoMapError):
                    raise shown_map
                yield shown_map, heads

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
    gradients = gradients_of(score, [attention.source for attention in calls])
    if all(gradient is None for gradient in gradients):
        exists = "no gradient reaches it: it is detached or computed under no_grad"
        raise LayerError("the score does not depend on any attention", exists, "use the method rollout")
    pairs = zip(calls, gradients, strict=True)
    slopes = [torch.zeros_like(call.source) if gradient is None else gradient for call, gradient in pairs]
    return [_exact(slope.reshape(call.weights.shape)[0]) for call, slope in zip(calls, slopes, strict=True)]


def gradients_of(score: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of ``score``, None for a tensor that it does not depend on; the graph is retained."""
    in_graph = [tensor for tensor in tensors if tensor.requires_grad and score.requires_grad]
    gradients = torch.autograd.grad(score, in_graph, retain_graph=True, allow_unused=True) if in_graph else ()
    by_id = {id(tensor): gradient for tensor, gradient in zip(in_graph, gradients, strict=True)}
    return [by_id.get(id(tensor)) for tensor in tensors]
