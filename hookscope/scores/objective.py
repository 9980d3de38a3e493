"""What a map explains: numbers that are computed from a model's output, for any batch of images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from hookscope.errors import ModelError, TargetError, UsageError
from hookscope.hooks import tensors_in
from hookscope.models import describe_error
from hookscope.scores.logits import (
    ASK_FOR_A_BOX,
    Prediction,
    Score,
    check_categories,
    class_maps,
    class_scores,
    described,
    gives_boxes,
    is_a_list_of_records,
    one_picture,
    predictions,
)
from hookscope.scores.target import Target, class_label

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Objective:
    """A number to explain.

    Attributes:
        score: Its name and its value for the image.
        of: From the model's output for ``N`` images to the values ``(N,)``, in its graph. The same number of further
            images, such as copies with parts hidden: of a detected box, how well these still show it.
    """

    score: Score
    of: Callable[[Any], Tensor]


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
    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        """The numbers to explain; ``output`` is that of the model called ``what`` for one image of ``size``."""


@dataclass(frozen=True, slots=True)
class FunctionTarget(ScoreTarget):
    """Any function from the model's output for ``N`` images to ``N`` numbers, or for one image to one number."""

    function: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        value = self.values(output)
        if len(value) != 1:
            do = "return a tensor with one floating-point number for each image"
            raise ModelError(f"{self.name} returns {len(value):,} numbers for one image", do=do)
        return [Objective(Score(None, None, float(value.detach()[0]), None, target=self.name), self.values)]

    def values(self, output: Any) -> Tensor:
        try:
            value = self.function(output)
        except Exception as error:  # a function of the user raises any kind of exception
            raise ModelError(f"{self.name} raised {describe_error(error)}") from error
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() > 1:
            found = f"{type(value).__name__}"
            if isinstance(value, Tensor):
                found = f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
            do = "return a tensor with one floating-point number for each image"
            raise ModelError(f"{self.name} returns {found}", do=do)
        value = value.reshape(-1)
        parts = [output] if is_a_list_of_records(output) else tensors_in(output).values()
        images = {len(part) for part in parts if isinstance(part, list) or part.dim()}
        if len(value) == 1 and len(images) == 1 and images != {1}:
            do = "compute a number for each image, such as output[:, 3] and not output[0, 3]"
            raise ModelError(f"{self.name} returns one number for {images.pop()} images", do=do)
        return value


@dataclass(frozen=True, slots=True)
class DifferenceTarget(ScoreTarget):
    """What speaks for a class and not for another: the difference of their logits.

    Of a segmentation, the difference at the pixels where the class is the best; `RegionTarget` says other pixels.

    Args:
        target: A class index, a class name or ``top:K``.
        against: The one class whose logit is subtracted.

    Raises:
        UsageError: ``against`` is not one class, or the same class.

    Example:
        >>> import torch, hookscope
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> [cam] = hookscope.class_activation_maps(net, torch.ones(1, 3, 8, 8), target=DifferenceTarget(2, 0))
        >>> cam.prediction.name
        'class 2 against class 0'
    """

    target: Target | str | int
    against: Target | str | int

    def __post_init__(self) -> None:
        against = Target.of(self.against)
        if against.count != 1 or against.has_top:
            raise UsageError(f"'{against}' is not one class to subtract", do="give a class number or name")

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        return self.in_region(None, output, categories, what)

    def in_region(
        self, region: Tensor | None, output: Any, categories: Sequence[str] | None, what: str
    ) -> list[Objective]:
        """The differences over the pixels of ``region`` ``(H, W)``."""
        found = _regions(self.target, output, categories, what, region)
        maps = class_maps(output, bare=True)
        classes = (class_scores(output, what) if maps is None else maps).shape[1]
        [other] = Target.of(self.against).indices([0.0] * classes, categories)
        pairs = [
            [_objective(each, place, output, categories, what) for each in (at, other)]
            for at, place in found.items()
            if at != other
        ]
        if not pairs:
            raise UsageError(f"'{self.against}' is subtracted from itself", do="give two classes")
        return [_difference(*pair) for pair in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class RegionTarget(ScoreTarget):
    """The mean logit of a class over some pixels of a segmentation.

    Args:
        region: A mask ``(H, W)`` of the network's input or of the logits, a tensor or an array of booleans or of
            weights from 0; it is averaged to the size of the logits. ``LoadedModel.preprocess.region`` makes it of a
            mask of the photograph.
        target: A class index, a class name or ``top:K``, the best in the region; or a `DifferenceTarget`.
        where: The words after the class, in tables and on pages.

    Raises:
        UsageError: the mask is empty, no mask of two dimensions, or of another size.
        ModelError: for a model that is no segmentation model.

    Example:
        >>> import torch, hookscope
        >>> net, mask = torch.nn.Conv2d(3, 4, 3, padding=1), torch.zeros(8, 8)
        >>> mask[2:4, 5] = 1
        >>> [saliency] = hookscope.saliency_maps(net, torch.ones(1, 3, 8, 8), RegionTarget(mask, 2))
        >>> saliency.prediction.name, saliency.map.nonzero().amin(0).tolist()
        ('class 2 in the region', [1, 4])
    """

    region: Any
    target: Target | str | int | DifferenceTarget = "top:1"
    where: str = "in the region"

    def __post_init__(self) -> None:
        if not isinstance(self.region, Tensor):
            object.__setattr__(self, "region", torch.as_tensor(np.asarray(self.region)))
        if self.region.dim() != 2:
            shape = "x".join(map(str, self.region.shape))
            raise UsageError(f"a region is a mask (H, W), not {shape or 'one number'}")
        if not bool((self.region > 0).any()) or bool((self.region < 0).any()):
            raise UsageError("the region is empty", do="give a mask that is above 0 at one pixel at least")

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        maps = class_maps(output, bare=True)
        if size and maps is not None and self.region.shape not in (size, maps.shape[-2:]):
            shape, other = ("x".join(map(str, each)) for each in (self.region.shape, size))
            do = "give a mask of the network's input, such as preprocess.region makes"
            raise UsageError(f"the region is {shape}, and the input {other}", do=do)
        of = self.target.in_region if isinstance(self.target, DifferenceTarget) else partial(_of_classes, self.target)
        goals = of(self.region, output, categories, what)
        around = _bounds(self.region)
        return [
            replace(goal, score=replace(goal.score, target=f"{goal.score.name} {self.where}", box=around))
            for goal in goals
        ]


def objectives(
    target: Any, output: Any, categories: Sequence[str] | None, what: str = "the model", size: Size | None = None
) -> list[Objective]:
    """The numbers that ``target`` names: a `Target` or what `Target.of` takes, a `ScoreTarget`, or a function.

    ``output`` is that for one image, ``size`` the height and width of the image, where it is known.
    """
    if isinstance(target, ScoreTarget):
        return target.objectives(output, categories, what, size)
    if callable(target):
        return FunctionTarget(target).objectives(output, categories, what, size)
    if gives_boxes(output):
        raise ModelError(f"{what} gives {described(output)}, no score for each class", do=ASK_FOR_A_BOX)
    return _of_classes(target, None, output, categories, what)


def _of_classes(
    target: Any, region: Tensor | None, output: Any, categories: Sequence[str] | None, what: str
) -> list[Objective]:
    found = _regions(target, output, categories, what, region)
    return [_objective(at, place, output, categories, what) for at, place in found.items()]


def _difference(first: Objective, second: Objective) -> Objective:
    words = f"{first.score.name} against {second.score.name}"
    score = Score(None, None, first.score.score - second.score.score, None, target=words)
    return Objective(score, lambda output: first.of(output) - second.of(output))


def _regions(
    target: Any, output: Any, categories: Sequence[str] | None, what: str, region: Tensor | None
) -> dict[int, Tensor | None]:
    """The classes that ``target`` names, each with the pixels ``(h, w)`` that count; None for all there is.

    Of a segmentation without a ``region``, they are the pixels where the class is the best.
    """
    target = Target.of(target)
    maps = class_maps(output, bare=region is not None or not target.has_top)
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
    is_best = maps[0] > 0 if len(values) == 1 else numbers == maps[0].argmax(0)
    pixels = is_best.sum((1, 2)).tolist()
    chosen = target.indices([count or None for count in pixels], categories)
    for at in chosen:
        if not pixels[at]:
            present = Target("top:5").indices([count or None for count in pixels], None)
            exists = "it has " + ", ".join(class_label(each, categories) or str(each) for each in present)
            asked = f"the segmentation has no pixel of {class_label(at, categories) or f'class {at}'}"
            raise TargetError(asked, exists if present else "", "choose one of these, or a region")
    return {at: is_best[at].float() for at in chosen}


def _objective(
    index: int, region: Tensor | None, output: Any, categories: Sequence[str] | None, what: str
) -> Objective:
    """The score of a class, of a segmentation its mean over ``region``."""
    if region is None:
        [prediction] = predictions(one_picture(class_scores(output, what)), categories, Target(str(index)))
        return Objective(prediction, partial(_of_class, index=index, what=what))
    maps = _maps(output).detach()
    shares = _means(maps.sigmoid() if maps.shape[1] == 1 else maps.softmax(1), region)[0].tolist()
    value = float(_means(maps, region)[0, index])
    prediction = Prediction(index, class_label(index, categories), value, shares[index], max(shares))
    return Objective(prediction, lambda output: _means(_maps(output), region)[:, index])


def _maps(output: Any) -> Tensor:
    maps = class_maps(output, bare=True)
    assert maps is not None  # as in the output for the first image
    return maps


def _bounds(region: Tensor) -> tuple[float, float, float, float]:
    """``(left, top, right, bottom)`` of the box around the pixels of ``region`` ``(H, W)``."""
    (top, left), (bottom, right) = (limits.tolist() for limits in region.nonzero().aminmax(dim=0))
    return float(left), float(top), float(right + 1), float(bottom + 1)


def _means(maps: Tensor, region: Tensor) -> Tensor:
    """The means ``(N, K)`` of ``maps`` ``(N, K, h, w)``, weighted by ``region`` ``(h, w)``."""
    return (maps * (region / region.sum())).sum((2, 3))


def _of_class(output: Any, index: int, what: str) -> Tensor:
    return class_scores(output, what)[:, index]
