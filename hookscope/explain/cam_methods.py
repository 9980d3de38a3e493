"""The methods of class activation mapping: each computes the weights of the channels of one layer.

A method returns weights ``(C,)``, or ``(C, H, W)`` with a weight for every position. The map is the sum of weight times
activation over the channels, followed by the ReLU where the paper has one; `hookscope.explain.cam` does the rest. In
the formulas ``A`` is the activation ``(C, H, W)``, ``A_k`` its channel ``k``, ``S`` the score of the class (its logit),
``G = dS/dA`` the gradient, and a sum or mean without an index goes over the positions of one channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hookscope.errors import UsageError, nearest

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


def method_named(name: str, methods: Mapping[str, Method]) -> Method:
    """The CAM or saliency method called ``name``."""
    if name not in methods:
        raise UsageError(f"no method '{name}'", nearest(name, list(methods)), f"there are {', '.join(methods)}")
    return methods[name]


def gradient_free(methods: Mapping[str, Any]) -> str:
    """The methods that need no gradient, for an error."""
    return ", ".join(name for name, method in methods.items() if not method.gradient)
