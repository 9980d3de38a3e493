"""Saliency: which pixels a score depends on, from the gradient with respect to the picture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookscope.differentiable import differentiable, leaves_of, passed_on
from hookscope.errors import InputError, ModelError, UsageError, nearest
from hookscope.gradient_hooks import ClampSign, change_gradients
from hookscope.scores import Prediction, class_scores, predictions
from hookscope.targets import Target

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["METHODS", "Saliency", "Settings", "saliency_maps"]

Gradient = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True)
class Settings:
    """What the methods with many passes can be told.

    Attributes:
        samples: How many noisy pictures SmoothGrad takes.
        noise: Its standard deviation, as a share of the picture's range of values.
        steps: How many points Integrated Gradients takes between the baseline and the picture.
        batch_size: Pictures in one pass.
        seed: Of the noise.

    Raises:
        UsageError: for less than one sample, step or picture, and for noise below 0.
    """

    samples: int = 25
    noise: float = 0.15
    steps: int = 50
    batch_size: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} {getattr(self, name)}", do="give a number from 1")
        if not 0 <= self.noise < float("inf"):
            raise UsageError(f"noise {self.noise:g}", do="give a number from 0, as a share of the range of values")


@dataclass(frozen=True)
class Saliency:
    """How much each value of the picture counts for one class.

    Attributes:
        prediction: The class, its score and probability.
        method: One of `METHODS`.
        values: ``(C, H, W)`` signed, in units of the score (per unit of the prepared picture where the method is a
            gradient).
    """

    prediction: Prediction
    method: str
    values: Tensor

    @property
    def map(self) -> Tensor:
        """``(H, W)``, not negative: the largest absolute value of the channels, as in the paper of the gradient.

        For the methods that multiply by the picture, whose channels add up to the score, the absolute sum of them.
        """
        return self.values.sum(0).abs() if METHODS[self.method].adds_up else self.values.abs().amax(0)


def vanilla(gradient: Gradient, picture: Tensor, settings: Settings) -> Tensor:
    """The gradient of the score (Simonyan et al., arXiv:1312.6034): ``dS/dX``."""
    return gradient(picture)


def gradient_times_input(gradient: Gradient, picture: Tensor, settings: Settings) -> Tensor:
    """Gradient times input (Shrikumar et al., arXiv:1605.01713): ``X * dS/dX``."""
    return picture * gradient(picture)


def smoothgrad(gradient: Gradient, picture: Tensor, settings: Settings) -> Tensor:
    """SmoothGrad (Smilkov et al., arXiv:1706.03825): the mean gradient of noisy copies of the picture.

    ``mean_n dS/dX(X + e_n)``, ``e_n`` normal with ``sigma = noise * (max(X) - min(X))``.
    """
    import torch

    numbers = torch.Generator().manual_seed(settings.seed)
    sigma = settings.noise * float(picture.max() - picture.min())
    total = torch.zeros_like(picture, dtype=_wide(picture))
    for size in _batches(settings.samples, settings.batch_size):
        noise = torch.randn((size, *picture.shape[1:]), generator=numbers, dtype=torch.float32)
        total += gradient(picture + sigma * noise.to(picture)).sum(0, keepdim=True)
    return total / settings.samples


def integrated_gradients(gradient: Gradient, picture: Tensor, settings: Settings) -> Tensor:
    """Integrated Gradients (Sundararajan et al., arXiv:1703.01365) from a baseline of 0 to the picture.

    ``X * integral_0^1 dS/dX(a X) da``, by the Gauss-Legendre rule; its sum is ``S(X) - S(0)`` as far as the steps go.
    0 is the mean colour of the training pictures where the preprocessing subtracts it.
    """
    import numpy as np
    import torch

    points, shares = np.polynomial.legendre.leggauss(settings.steps)
    at = torch.as_tensor((points + 1) / 2, dtype=_wide(picture), device=picture.device)
    weight = torch.as_tensor(shares / 2, dtype=_wide(picture), device=picture.device)
    total = torch.zeros_like(picture, dtype=_wide(picture))
    for some in torch.arange(settings.steps).split(settings.batch_size):
        place = [len(some)] + [1] * (picture.dim() - 1)
        found = gradient((picture * at[some].view(place)).to(picture.dtype))
        total += (found * weight[some].view(place)).sum(0, keepdim=True)
    return picture * total


def _wide(picture: Tensor) -> torch.dtype:
    """What sums of many gradients are kept in: half a number would be lost in the formats of half precision."""
    import torch

    return torch.promote_types(picture.dtype, torch.float32)


def _batches(total: int, size: int) -> list[int]:
    return [min(size, total - begun) for begun in range(0, total, size)]


@dataclass(frozen=True, slots=True)
class Method:
    """A method and how its values are read.

    Attributes:
        attribute: From a function picture -> gradient, the picture ``(1, C, H, W)`` and settings to its values.
        adds_up: Whether the values are shares of the score, which add up over colour channels.
        guided: Whether negative gradients are cut off at every ReLU on the way.
        pictures: Which of the settings says how many pictures it takes, empty for one.
    """

    attribute: Callable[[Gradient, Tensor, Settings], Tensor]
    adds_up: bool = False
    guided: bool = False
    pictures: str = ""

    def total(self, settings: Settings) -> int:
        """How many pictures it takes."""
        return int(getattr(settings, self.pictures)) if self.pictures else 1


METHODS = {
    "gradient": Method(vanilla),
    "gradient-input": Method(gradient_times_input, adds_up=True),
    "smoothgrad": Method(smoothgrad, pictures="samples"),
    "integrated-gradients": Method(integrated_gradients, adds_up=True, pictures="steps"),
    "guided-backprop": Method(vanilla, guided=True),
}
"""Every method by the name that ``--method`` takes; guided backpropagation is arXiv:1412.6806."""


def saliency_maps(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor],
    target: str | int = "top:1",
    method: str = "gradient",
    *,
    categories: Sequence[str] | None = None,
    settings: Settings | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Saliency]:
    """Which pixels the score of each wanted class depends on.

    The model runs in eval mode, with gradients whatever surrounds the call; nothing of it changes.

    Guided backpropagation (Springenberg et al., arXiv:1412.6806) lets through, at every layer that is a ReLU, only
    what is positive of the gradient; hooks do that and are gone afterwards. It sees no ReLU that is a function in a
    ``forward`` (``F.relu``), and none of another shape, such as GELU.

    Args:
        model: Any eager module with a score for each class.
        inputs: The picture ``(1, C, H, W)``, or a clip ``(1, C, T, H, W)``; a tuple of one will do too.
        target: A class index, a class name or ``top:K``.
        method: One of `METHODS`.
        categories: Names of the classes.
        settings: Samples, noise, steps, batch size and seed.
        on_progress: Called with pictures done and in all.

    Raises:
        TargetError: no such class.
        ModelError: a model without scores of classes, without a ReLU to guide, or whose scores no gradient leads back
            from to the picture.
        InputError: a gradient that is not finite.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2, bias=False))
        >>> with torch.no_grad():
        ...     _ = net[1].weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))
        >>> [found] = saliency_maps(net, torch.ones(1, 3, 1, 1), target=0)
        >>> found.values.flatten().tolist(), found.map.tolist()
        ([1.0, 2.0, 3.0], [[3.0]])
    """
    if method not in METHODS:
        raise UsageError(f"no method '{method}'", nearest(method, list(METHODS)), f"there are {', '.join(METHODS)}")
    import torch

    how, settings, wanted = METHODS[method], settings or Settings(), Target(str(target))
    with differentiable(model):
        with torch.no_grad():
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            scores = class_scores(model(*passed_on(given)), type(model).__name__)
        picture = _picture(given)
        if len(scores) != 1:
            raise UsageError(f"{len(scores)} pictures at once", "a map is of one", "call it for each")
        answers = predictions(scores[0], categories, wanted)
        advance = _counted(on_progress, len(answers) * how.total(settings))
        guide = _Guide(ClampSign("positive"))
        with change_gradients(model, dict.fromkeys(_relus(model), guide) if how.guided else {}):
            values = [how.attribute(_gradient_of(model, one.index, advance), picture, settings)[0] for one in answers]
            values = [one.to(_wide(picture)) for one in values]
        if how.guided and not guide.met:
            raise _nothing_to_guide(model, "that the gradient passes")
    found = [Saliency(answer, method, one) for answer, one in zip(answers, values, strict=True)]
    for one in found:
        what = "score" if not math.isfinite(one.prediction.score) else "gradient"
        if what == "score" or not bool(torch.isfinite(one.values).all()):
            asked = f"the {what} of class {one.prediction.index} is not finite"
            raise InputError(asked, do="see gradients --detect-anomaly")
    return found


def _picture(inputs: tuple[Any, ...]) -> Tensor:
    """A copy of the only input, which gradients can be asked of."""
    import torch

    if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
        raise UsageError(f"{type(inputs[0]).__name__} and {len(inputs) - 1} more inputs", do="give one picture")
    if not inputs[0].is_floating_point():
        raise UsageError(f"a picture of {inputs[0].dtype}", "gradients need real numbers", "prepare it first")
    return inputs[0].detach().clone()


def _counted(on_progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """What adds up pictures, and says how many are done of ``total``."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    return advance


def _gradient_of(model: nn.Module, index: int, advance: Callable[[int], None]) -> Gradient:
    """The function from pictures ``(N, C, H, W)`` to the gradients of their scores of class ``index``."""
    import torch

    def gradient(pictures: Tensor) -> Tensor:
        leaf = leaves_of(pictures)
        scores = class_scores(model(passed_on(leaf)), type(model).__name__)
        score = scores[:, index].sum()
        found: Tensor | None = None
        if score.requires_grad:
            [found] = torch.autograd.grad(score, leaf, allow_unused=True)
        if found is None:
            asked = f"the score of {type(model).__name__} does not depend on the picture as far as gradients tell"
            raise ModelError(
                asked, "it is detached, under no_grad, quantized or constant", "take cam --method eigencam"
            )
        advance(len(pictures))
        return found

    return gradient


@dataclass
class _Guide:
    """A change of gradients that knows whether it has met any."""

    change: ClampSign
    met: bool = False

    def __call__(self, gradient: Tensor) -> Tensor:
        self.met = True
        return self.change(gradient)


def _relus(model: nn.Module) -> list[str]:
    """The selection of every layer of ``model`` that is a ReLU.

    Raises:
        ModelError: it has none.
    """
    import torch

    names = [re.escape(name) for name, module in model.named_modules() if isinstance(module, torch.nn.ReLU)]
    if not names:
        raise _nothing_to_guide(model)
    return [f"re:^(?:{'|'.join(names)})$"]


def _nothing_to_guide(model: nn.Module, which: str = "") -> ModelError:
    asked = f"{type(model).__name__} has no layer that is a ReLU {which}".rstrip() + ": there is nothing to guide"
    return ModelError(asked, do="take smoothgrad or integrated-gradients")
