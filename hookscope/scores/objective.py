"""What is explained or differentiated: numbers that are computed from a model's output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import adaptive_avg_pool2d

from hookscope.errors import AbsentTargetError, ModelError, UsageError
from hookscope.hooks import tensors_in
from hookscope.models import describe_error
from hookscope.scores.logits import (
    Logits,
    Prediction,
    Score,
    check_categories,
    class_at,
    class_maps,
    class_scores,
    described,
    is_a_list_of_records,
    one_picture,
    predictions,
    probabilities,
)
from hookscope.scores.target import ClassNames, Target, class_label

Size = tuple[int, int]
_ONE_EACH = "return a tensor with one floating-point number for each image"


@dataclass(frozen=True, slots=True)
class Objective:
    """A number to explain.

    Attributes:
        score: Its name and its value for the image.
        of: From the model's output for ``N`` images to the values ``(N,)``, in its graph. The same number of further
            images, such as copies with parts hidden: of a detected box, how well these still show it.
        probability: The same for the probability of a class; None for a number without one.
    """

    score: Score
    of: Callable[[Any], Tensor]
    probability: Callable[[Any], Tensor] | None = None


class ScoreTarget(ABC):
    """A target that is more than a class: it says what numbers are explained.

    For a single number a function of the model's output is enough. A subclass names its numbers, and may give several.

    Example:
        >>> import torch, hookscope
        >>> from hookscope.scores import Objective
        >>> class Spread(hookscope.ScoreTarget):
        ...     def objectives(self, output, categories, what, size=None):
        ...         of = lambda output: output.std(1)
        ...         return [Objective(hookscope.Score(None, None, float(of(output)), None, target="spread"), of)]
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
        >>> [saliency] = hookscope.saliency_maps(net, torch.ones(1, 3, 2, 2), Spread())
        >>> saliency.prediction.name
        'spread'
    """

    @abstractmethod
    def objectives(self, output: Any, categories: ClassNames, what: str, size: Size | None = None) -> list[Objective]:
        """The numbers to explain; ``output`` comes from the model called ``what`` for one image of ``size``."""


def _name_of(function: Callable[[Any], Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _own_objective(function: Callable[[Any], Any], output: Any) -> Objective:
    """Any function from the model's output for ``N`` images to ``N`` numbers, or for one image to one number."""
    name = _name_of(function)

    def values(output: Any) -> Tensor:
        try:
            value = function(output)
        except Exception as error:  # a function of the user raises any kind of exception
            raise ModelError(f"{name} raised {describe_error(error)}") from error
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() > 1:
            kind = type(value).__name__
            if isinstance(value, Tensor):
                kind = f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
            raise ModelError(f"{name} returns {kind}", do=_ONE_EACH)
        value = value.reshape(-1)
        parts = [output] if is_a_list_of_records(output) else tensors_in(output).values()
        images = {len(part) for part in parts if isinstance(part, list) or part.dim()}
        if len(value) == 1 and len(images) == 1 and images != {1}:
            do = "compute a number for each image, such as output[:, 3] and not output[0, 3]"
            raise ModelError(f"{name} returns one number for {images.pop()} images", do=do)
        return value

    value = values(output)
    if len(value) != 1:
        raise ModelError(f"{name} returns {len(value):,} numbers for one image", do=_ONE_EACH)
    return Objective(Score(None, None, float(value.detach()[0]), None, target=name), values)


def objectives(
    target: Any, output: Any, categories: ClassNames, what: str = "the model", size: Size | None = None
) -> list[Objective]:
    """The numbers that ``target`` names: a `Target` or what `Target.of` takes, a `ScoreTarget`, or a function.

    ``output`` is that for one image, ``size`` the height and width of the image, where it is known.
    """
    if isinstance(target, ScoreTarget):
        return target.objectives(output, categories, what, size)
    if callable(target):
        return [_own_objective(target, output)]
    return class_objectives(target, None, output, categories, what)


def class_objectives(
    target: Any, region: Tensor | None, output: Any, categories: ClassNames, what: str
) -> list[Objective]:
    """The scores of the classes that ``target`` names, see `class_regions`."""
    regions = class_regions(target, region, output, categories, what)
    return [class_objective(at, place, output, categories, what) for at, place in regions.items()]


def class_regions(
    target: Any, region: Tensor | None, output: Any, categories: ClassNames, what: str
) -> dict[int, Tensor | None]:
    """The classes that ``target`` names, each with the pixels ``(h, w)`` that count; None for all there is.

    Of a segmentation without a ``region``, they are the pixels where the class is the best.
    """
    target = Target.of(target)
    maps = class_maps(output, region is not None or not target.has_top, what)
    if maps is None and region is not None:
        asked = f"{what} gives {described(output)}, no scores of classes at each pixel"
        raise ModelError(asked, do="a region needs a segmentation model")
    scores = class_scores(output, what) if maps is None else maps.mean((2, 3))
    values = one_picture(scores).tolist()
    if categories:
        check_categories(categories, len(values))
    if maps is None:
        return dict.fromkeys(target.indices(values, categories))
    if region is not None:
        region = adaptive_avg_pool2d(
            region.to(maps.device, torch.float32)[None, None], (maps.shape[-2], maps.shape[-1])
        )[0, 0]
        return dict.fromkeys(target.indices(_means(maps, region)[0].tolist(), categories), region)
    numbers = torch.arange(len(values), device=maps.device)[:, None, None]
    is_best = numbers == class_at(maps[0])
    pixels = is_best.sum((1, 2)).tolist()
    chosen = target.indices([count or None for count in pixels], categories)
    for at in chosen:
        if not pixels[at]:
            present = Target("top:5").indices([count or None for count in pixels], None)
            exists = "it has " + ", ".join(class_label(index, categories) or str(index) for index in present)
            asked = f"the segmentation has no pixel of {class_label(at, categories) or f'class {at}'}"
            raise AbsentTargetError(asked, exists if present else "", "choose one of these, or a region")
    return {at: is_best[at].float() for at in chosen}


def class_objective(index: int, region: Tensor | None, output: Any, categories: ClassNames, what: str) -> Objective:
    """The score of a class, of a segmentation its mean over ``region``."""

    def scores(output: Any) -> Tensor:
        return class_scores(output, what) if region is None else _means(_maps(output), region)

    def shares(output: Any) -> Tensor:
        return probabilities(class_scores(output, what)) if region is None else _shares(_maps(output), region)

    found = scores(output)
    value = float(found.detach()[0, index])
    if region is None and found.shape[1] == 1 and not categories and not isinstance(found, Logits):  # a regression?
        return Objective(Score(index, None, value, None), lambda output: scores(output)[:, index])
    given = shares(output)[0].tolist()
    prediction = Prediction(index, class_label(index, categories), value, given[index], max(given))
    return Objective(prediction, lambda output: scores(output)[:, index], lambda output: shares(output)[:, index])


def _maps(output: Any) -> Tensor:
    maps = class_maps(output, bare=True)
    assert maps is not None  # as in the output for the first image
    return maps


def _means(maps: Tensor, region: Tensor) -> Tensor:
    """The means ``(N, K)`` of ``maps`` ``(N, K, h, w)``, weighted by ``region`` ``(h, w)``."""
    return (maps * (region / region.sum())).sum((2, 3))


def _shares(maps: Tensor, region: Tensor) -> Tensor:
    """The mean probabilities ``(N, K)`` of the classes in ``region``."""
    independent = isinstance(maps, Logits) or maps.shape[1] == 1
    return _means(maps.detach().sigmoid() if independent else maps.detach().softmax(1), region)


LOSSES = ("score", "cross-entropy", "mse")


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar computed from a model's output.

    Attributes:
        name: ``score``: the logit of the target class, or the sum over several. ``cross-entropy``: with the target
            as label, or the mean over several. ``mse``: the mean square of all floating-point outputs, which needs no
            classes.
        target: A `Target`, class index, class name or ``top:K``.
        categories: Names of the classes.

    Raises:
        UsageError: no such loss, or a bad target.

    Example:
        >>> import torch
        >>> value, [answer] = Loss("score", "top:1").of(torch.tensor([[1.0, 5.0]]))
        >>> float(value), answer.index
        (5.0, 1)
    """

    name: str = "score"
    target: Target | str | int = "top:1"
    categories: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", Target.of(self.target))
        object.__setattr__(self, "name", str(self.name).replace("_", "-"))
        if self.name not in LOSSES:
            raise UsageError(f"no loss '{self.name}'", f"there are {', '.join(LOSSES)}")

    def of(self, output: Any, what: str = "the model") -> tuple[Tensor, tuple[Prediction, ...]]:
        """The value of the loss, in the graph of ``output``, and the classes that it is computed from.

        Raises:
            ModelError: the output has no scores of classes, or for ``mse`` no numbers.
            TargetError: no such class.
        """
        if self.name == "mse":
            return _mean_square(output, what), ()
        scores = class_scores(output, what)
        function = "call it once for each image, or give a function: lambda output: F.cross_entropy(output, labels)"
        targets = predictions(one_picture(scores, function), self.categories, Target.of(self.target))
        labels = scores.new_tensor([prediction.index for prediction in targets]).long()
        if self.name == "score":
            return scores[0, labels].sum(), tuple(targets)
        return F.cross_entropy(scores.expand(len(targets), -1), labels), tuple(targets)


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A user's loss: a function from a model's output to a tensor with one number."""

    function: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return _name_of(self.function)

    def of(self, output: Any, what: str = "the model") -> tuple[Tensor, tuple[Prediction, ...]]:
        """The value of the loss, in the graph of ``output``, and no classes."""
        try:
            value = self.function(output)
        except TypeError as error:
            do = "give a function of the output alone: lambda output: F.cross_entropy(output, labels)"
            raise UsageError(f"the loss '{self.name}' failed: {describe_error(error)}", do=do) from error
        if not isinstance(value, torch.Tensor):
            returned = type(value).__name__
        elif value.numel() != 1:
            returned = f"{value.numel():,} numbers of shape {tuple(value.shape)}"
        elif not value.is_floating_point():
            returned = f"a number of {value.dtype}"
        else:
            return value.reshape(()), ()
        do = "return a tensor with one floating-point number"
        raise UsageError(f"'{self.name}' is not a loss: it returned {returned}", do=do)


AnyLoss = Loss | OwnLoss
LossLike = AnyLoss | str | Callable[[Any], Any] | None


def as_loss(loss: LossLike, categories: Sequence[str] | None = None) -> AnyLoss:
    """The loss for a `Loss`, a name, a function of the model's output, or None (the score of the most likely class)."""
    if loss is None or isinstance(loss, str):
        return Loss(loss or "score", categories=categories)
    if isinstance(loss, Loss):
        return replace(loss, categories=loss.categories or categories)
    if isinstance(loss, OwnLoss):
        return loss
    if callable(loss):
        return OwnLoss(loss)
    exists = f"there are {', '.join(LOSSES)}"
    raise UsageError(f"no loss {loss!r}", exists, "name one, or give a Loss or a function of the model's output")


def _mean_square(output: Any, what: str) -> Tensor:
    numbers = [tensor.flatten() for tensor in tensors_in(output).values() if tensor.is_floating_point()]
    numbers = [tensor for tensor in numbers if len(tensor)]
    if not numbers:
        raise ModelError(
            f"{what} returned no numbers: there is nothing to differentiate",
            "a detector without detections returns none",
            "try another image or other weights",
        )
    return torch.cat([tensor.float() for tensor in numbers]).square().mean()
