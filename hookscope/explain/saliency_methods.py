"""Saliency methods: functions from an image, and the gradient of a score at images or the score itself, to values.

In the formulas ``X`` is the image ``(1, C, H, W)`` and ``dS/dX`` the gradient of the score of a class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from hookscope.errors import InstallationError, ModelError
from hookscope.explain.saliency_settings import SaliencySettings
from hookscope.models import describe_error, is_quantized


@contextmanager
def relevance_rules(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of ``model`` whose gradients are relevances, for a relevance of 1 at the score.

    Layer-wise relevance propagation (Bach et al., PLoS ONE 2015, doi:10.1371/journal.pone.0130140): the flat rule for
    the first layer, z+ for further convolutions, epsilon for linear layers. BatchNorm is merged into the convolution
    before it. Sums of branches share the relevance in torchvision's ResNets only.
    """
    try:
        from zennit.composites import EpsilonPlusFlat
        from zennit.torchvision import ResNetCanonizer
    except ImportError as error:
        raise InstallationError("lrp needs the package zennit", do="pip install 'hookscope[lrp]'") from error
    if is_quantized(model):
        raise ModelError(
            "zennit has no rules for layers of 8 bits", do="use a method without gradient: occlusion, rise"
        )
    composite, do = EpsilonPlusFlat(canonizers=[ResNetCanonizer()]), "use integrated-gradients, whose shares add up too"
    try:
        twin = copy.deepcopy(model)
        composite.register(twin)
    except Exception as error:
        asked = f"zennit has no rules for {type(model).__name__}: {describe_error(error)}"
        raise ModelError(asked, do=do) from error
    try:
        yield twin
    except RuntimeError as error:
        if "incorrect number of values" not in str(error):  # of a module whose inputs are not its outputs
            raise
        raise ModelError(f"zennit has no rules for attention, as in {type(model).__name__}", do=do) from error
    finally:
        composite.remove()


Gradient = Callable[[Tensor], Tensor]
Scores = Gradient

_COPIES, _MASKS = 25, 1000  # samples of smoothgrad and of rise
_SHOWN = 0.5  # share of the cells of a mask, as in the paper


def vanilla(gradient: Gradient, picture: Tensor, settings: SaliencySettings) -> Tensor:
    """The gradient of the score (Simonyan et al., arXiv:1312.6034): ``dS/dX``."""
    return gradient(picture)


def gradient_times_input(gradient: Gradient, picture: Tensor, settings: SaliencySettings) -> Tensor:
    """Gradient times input (Shrikumar et al., arXiv:1605.01713): ``X * dS/dX``."""
    return picture * gradient(picture)


def smoothgrad(gradient: Gradient, picture: Tensor, settings: SaliencySettings) -> Tensor:
    """SmoothGrad (Smilkov et al., arXiv:1706.03825): the mean gradient of noisy copies of the picture.

    ``mean_n dS/dX(X + e_n)``, ``e_n`` normal with ``sigma = noise * (max(X) - min(X))``.
    """
    numbers = torch.Generator("cpu").manual_seed(settings.seed)
    sigma = settings.noise * float(picture.max() - picture.min())
    total = torch.zeros_like(picture, dtype=wide(picture))
    samples = settings.samples or _COPIES
    for begin in range(0, samples, settings.batch_size):
        count = min(settings.batch_size, samples - begin)
        noise = torch.randn((count, *picture.shape[1:]), generator=numbers, dtype=torch.float32, device="cpu")
        total += gradient(picture + sigma * noise.to(picture)).sum(0, keepdim=True)
    return total / samples


def integrated_gradients(gradient: Gradient, picture: Tensor, settings: SaliencySettings) -> Tensor:
    """Integrated Gradients (Sundararajan et al., arXiv:1703.01365) from a baseline of 0 to the picture.

    ``X * integral_0^1 dS/dX(a X) da``, by the Gauss-Legendre rule; its sum is ``S(X) - S(0)`` as far as the steps go.
    0 is the mean colour of the training pictures where the preprocessing subtracts it.
    """
    points, shares = np.polynomial.legendre.leggauss(settings.steps)
    one_axis = [-1] + [1] * (picture.dim() - 1)
    factors = torch.as_tensor((points + 1) / 2, dtype=wide(picture), device=picture.device).view(one_axis)
    weights = torch.as_tensor(shares / 2, dtype=wide(picture), device=picture.device).view(one_axis)
    total = torch.zeros_like(picture, dtype=wide(picture))
    for begin in range(0, settings.steps, settings.batch_size):
        batch = slice(begin, begin + settings.batch_size)
        slopes = gradient((picture * factors[batch]).to(picture.dtype))
        total += (slopes * weights[batch]).sum(0, keepdim=True)
    return picture * total


def occlusion(scores: Scores, picture: Tensor, settings: SaliencySettings) -> Tensor:
    """Occlusion (Zeiler and Fergus, arXiv:1311.2901): the score lost without the surroundings of each pixel.

    The mean of ``S(X) - S(X without w)`` over the square windows ``w`` that hold the pixel, which are set to 0 in all
    colours and frames. Each colour gets the same part of it. The last windows of a row end at the edge.
    """
    places = windows(settings, picture)
    lost = torch.zeros(picture.shape[-2:], dtype=wide(picture), device=picture.device)
    times, whole = torch.zeros_like(lost), scores(picture)
    for begin in range(0, len(places), settings.batch_size):
        part = places[begin : begin + settings.batch_size]
        hidden = picture.repeat(len(part), *[1] * (picture.dim() - 1))
        for image, place in zip(hidden, part, strict=True):
            image[(..., *place)] = 0
        for place, drop in zip(part, whole - scores(hidden), strict=True):
            lost[place] += drop
            times[place] += 1
    return (lost / times / picture.shape[1]).expand_as(picture)


def windows(settings: SaliencySettings, picture: Tensor) -> list[tuple[slice, slice]]:
    """The rows and columns of each window of occlusion."""
    height, width = picture.shape[-2:]
    side = _side(settings, picture)
    stride = settings.stride or max(1, side // 2)
    rows, columns = (range(0, max(full - side, 0) + stride, stride) for full in (height, width))
    return [(slice(y, y + side), slice(x, x + side)) for y in rows for x in columns]


def _side(settings: SaliencySettings, picture: Tensor) -> int:
    return settings.window or max(2, settings.stride or 0, min(picture.shape[-2:]) // 8)


def rise(scores: Scores, picture: Tensor, settings: SaliencySettings) -> Tensor:
    """RISE (Petsiuk et al., arXiv:1806.07421): how much higher the score is where random masks show the pixel.

    ``sum_n S(X M_n) M_n / sum_n M_n - mean_n S(X M_n)``; ``M_n`` are grids of 0 and 1, as likely as each other, which
    are resized bilinearly and shifted at random, the same for all colours and frames. The paper divides by the
    expected mask, and does not subtract the mean score, which is the same at all pixels. Each colour gets the same part
    of it. For a detected box it is D-RISE (arXiv:2006.03204).
    """
    size, side = picture.shape[-2:], _side(settings, picture)
    cells = [-(-full // side) for full in size]
    samples, numbers = settings.samples or _MASKS, torch.Generator("cpu").manual_seed(settings.seed)
    corners = torch.randint(side, (samples, 2), generator=numbers, device="cpu").tolist()
    shown = torch.zeros(size, dtype=wide(picture), device=picture.device)
    weighted, total = torch.zeros_like(shown), shown.new_zeros(())
    for begin in range(0, samples, settings.batch_size):
        part = corners[begin : begin + settings.batch_size]
        grids = torch.rand(len(part), 1, *cells, generator=numbers, dtype=torch.float32, device="cpu") < _SHOWN
        large = interpolate(grids.to(shown), [(count + 1) * side for count in cells], mode="bilinear")[:, 0]
        masks = torch.stack([mask[y:, x:][: size[0], : size[1]] for mask, (y, x) in zip(large, part, strict=True)])
        spread = masks.to(picture.dtype).reshape(-1, *[1] * (picture.dim() - 3), *size)
        values = scores(picture * spread)
        shown += masks.sum(0)
        weighted += torch.tensordot(values, masks, 1)
        total += values.sum()
    lift = torch.where(shown > 0, weighted / shown - total / samples, 0)
    return (lift / picture.shape[1]).expand_as(picture)


def wide(picture: Tensor) -> torch.dtype:
    """The type of sums of many gradients: at least single precision."""
    return torch.promote_types(picture.dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class SaliencyMethod:
    """A method, and how to read its values.

    Attributes:
        attribute: From a function pictures -> gradients, the picture ``(1, C, H, W)`` and settings to its values; the
            function of a method without gradient gives the scores ``(N,)`` of pictures ``(N, C, H, W)``.
        summary: What is computed, in a line of the help.
        caption: What a value of the map is, under its picture.
        signed: Whether the values have signs that mean something, and the values of the colours of a pixel are summed.
        completes: Whether the values sum to the score minus the score of an image of zeros.
        guided: Whether negative gradients are set to 0 at every ReLU.
        pictures: From settings and the picture to the number of images that the model runs on.
        gradient: Whether the method needs the gradient.
        localised: Whether the values are multiplied by the Grad-CAM of a layer.
        prepared: From the model to a block with the model whose gradients are taken, for a score of 1.
    """

    attribute: Callable[[Gradient, Tensor, SaliencySettings], Tensor]
    summary: str
    caption: str
    signed: bool = False
    completes: bool = False
    guided: bool = False
    pictures: Callable[[SaliencySettings, Tensor], int] = lambda settings, picture: 1
    gradient: bool = True
    localised: bool = False
    prepared: Callable[[nn.Module], AbstractContextManager[nn.Module]] | None = None


SALIENCY_METHODS = {
    "gradient": SaliencyMethod(
        vanilla, "dS/dx", "how strongly the score reacts to each pixel: |dS/dx|, largest of its colour channels"
    ),
    "gradient-input": SaliencyMethod(
        gradient_times_input, "x dS/dx", "x dS/dx, summed over the colour channels", signed=True
    ),
    "smoothgrad": SaliencyMethod(
        smoothgrad,
        "mean dS/dx of noisy copies; the seed sets the noise too",
        "how strongly the score of noisy copies reacts to each pixel: |mean dS/dx|, largest of its colour channels",
        pictures=lambda settings, picture: settings.samples or _COPIES,
    ),
    "integrated-gradients": SaliencyMethod(
        integrated_gradients,
        "x times the mean dS/dx on the way from zeros: shares of the score",
        "share of the score, summed over the colour channels",
        signed=True,
        completes=True,
        pictures=lambda settings, picture: settings.steps,
    ),
    "guided-backprop": SaliencyMethod(
        vanilla,
        "dS/dx with negative gradients set to 0 at every ReLU layer",
        "|guided dS/dx|, largest of its colour channels",
        guided=True,
    ),
    "guided-gradcam": SaliencyMethod(
        vanilla,
        "guided-backprop times the Grad-CAM of a layer",
        "|guided dS/dx| x Grad-CAM, largest of its colour channels",
        guided=True,
        localised=True,
    ),
    "lrp": SaliencyMethod(
        vanilla,
        "relevance by layer-wise propagation: shares of S; needs zennit",
        "relevance, summed over the colour channels",
        signed=True,
        prepared=relevance_rules,
    ),
    "occlusion": SaliencyMethod(
        occlusion,
        "score lost while a square of zeros hides the pixel; some 225 passes",
        "score lost while the pixel is hidden, mean over the windows that hide it",
        signed=True,
        pictures=lambda settings, picture: len(windows(settings, picture)) + 1,
        gradient=False,
    ),
    "rise": SaliencyMethod(
        rise,
        "score gained where random masks show the pixel; 1,000 passes",
        "mean score of the masks that show the pixel, minus the mean score of all masks",
        signed=True,
        pictures=lambda settings, picture: settings.samples or _MASKS,
        gradient=False,
    ),
}
"""Every method by the name of the method.

Guided backpropagation is arXiv:1412.6806. Guided Grad-CAM is arXiv:1610.02391, with the map resized bilinearly.
"""
