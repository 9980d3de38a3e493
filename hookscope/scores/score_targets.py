"""Targets that are more than classes: a difference of classes, a region, a similarity, and detected boxes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_iou

from hookscope.errors import AbsentTargetError, InputError, ModelError, UsageError
from hookscope.hooks import tensors_in
from hookscope.images import InputImage
from hookscope.models import Detections, LoadedModel, detections_in, find_in_source, model_errors_as_input_errors
from hookscope.scores.logits import (
    EXPLAIN_SIMILARITY,
    Score,
    check_family,
    class_maps,
    class_scores,
    described,
    embeddings,
    is_a_list_of_records,
)
from hookscope.scores.objective import Objective, ScoreTarget, Size, class_objective, class_objectives, class_regions
from hookscope.scores.target import Boxes, ClassNames, Target, TargetChoice, class_label


@dataclass(frozen=True, slots=True)
class DifferenceTarget(ScoreTarget):
    """What speaks for a class and not for another: the difference of their logits.

    Of a segmentation, the difference at the pixels where the class is the best; `RegionTarget` says other pixels.

    Args:
        target: A class index, a class name or ``top:K``, of which ``against`` is left out.
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

    def objectives(self, output: Any, categories: ClassNames, what: str, size: Size | None = None) -> list[Objective]:
        return self.in_region(None, output, categories, what)

    def in_region(self, region: Tensor | None, output: Any, categories: ClassNames, what: str) -> list[Objective]:
        """The differences over the pixels of ``region`` ``(H, W)``."""
        regions = class_regions(self.target, region, output, categories, what)
        maps = class_maps(output, bare=True)
        classes = (class_scores(output, what) if maps is None else maps).shape[1]
        [other] = Target.of(self.against).indices([0.0] * classes, categories)
        pairs = [
            [class_objective(index, place, output, categories, what) for index in (at, other)]
            for at, place in regions.items()
            if at != other
        ]
        if not pairs or (other in regions and not Target.of(self.target).has_top):
            raise UsageError(f"'{self.against}' is subtracted from itself", do="give two classes")
        return [_difference(*pair) for pair in pairs]


def _difference(first: Objective, second: Objective) -> Objective:
    words = f"{first.score.name} against {second.score.name}"
    score = Score(None, None, first.score.score - second.score.score, None, target=words)
    return Objective(score, lambda output: first.of(output) - second.of(output))


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
        ModelError: for a model that is not a segmentation model.

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
            values = np.asarray(self.region)
            object.__setattr__(self, "region", torch.as_tensor(values if values.dtype.kind in "biuf" else 0))
        if self.region.dim() != 2:
            shape = "x".join(map(str, self.region.shape))
            raise UsageError(f"a region is a mask (H, W), not {shape or 'one number'}")
        if not bool((self.region > 0).any()) or bool((self.region < 0).any()):
            raise UsageError("the region is empty", do="give a mask that is above 0 at one pixel at least")

    def objectives(self, output: Any, categories: ClassNames, what: str, size: Size | None = None) -> list[Objective]:
        maps = class_maps(output, bare=True)
        if size and maps is not None and self.region.shape not in (size, maps.shape[-2:]):
            shape, other = ("x".join(map(str, sides)) for sides in (self.region.shape, size))
            do = "give a mask of the network's input, such as preprocess.region makes"
            raise UsageError(f"the region is {shape}, and the input {other}", do=do)
        of = (
            self.target.in_region
            if isinstance(self.target, DifferenceTarget)
            else partial(class_objectives, self.target)
        )
        goals = of(self.region, output, categories, what)
        (top, left), (bottom, right) = (limits.tolist() for limits in self.region.nonzero().aminmax(dim=0))
        around = (float(left), float(top), float(right + 1), float(bottom + 1))
        return [
            replace(goal, score=replace(goal.score, target=f"{goal.score.name} {self.where}", box=around))
            for goal in goals
        ]


@dataclass(frozen=True, slots=True, eq=False)
class SimilarityTarget(ScoreTarget):
    """The cosine similarity of a model's embedding of an image to the embedding of a reference image, -1 to 1.

    The embedding is the vector that the model returns (of a classifier its logits), or the mean over the tokens or
    over the positions of maps that it returns. For an embedding inside a model, wrap the layers up to it in a module.

    Args:
        reference: The model's output for one reference image.
        name: The words for the reference, in tables and on pages.

    Raises:
        ModelError: the output holds no embedding, such as a detector's.
        InputError: the embedding of the reference is 0 or not finite.

    Example:
        >>> import torch, hookscope
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> image = torch.ones(1, 3, 8, 8)
        >>> [cam] = hookscope.class_activation_maps(net, image, target=SimilarityTarget(net(image)))
        >>> cam.prediction.name, round(cam.prediction.score, 4)
        ('similarity to the reference', 1.0)
    """

    reference: Any
    name: str = "the reference"

    @classmethod
    def of_picture(cls, net: LoadedModel, picture: InputImage) -> SimilarityTarget:
        """The similarity to ``picture``, which is called by the name of its file."""
        prepared = net.prepare(picture)
        with model_errors_as_input_errors(net.name, [prepared]), torch.no_grad():
            return cls(net.model(*net.inputs(prepared)), os.path.basename(picture.name))

    def objectives(self, output: Any, categories: ClassNames, what: str, size: Size | None = None) -> list[Objective]:
        reference = _embedding(self.reference, what).detach()
        length = float(reference.norm())
        if not 0 < length < float("inf"):
            raise InputError(f"the embedding of {self.name} has length {length:g}", do="choose another reference")
        own = _embedding(output, what)
        if own.shape[1] != reference.shape[1]:
            asked = f"an embedding of {own.shape[1]:,} values cannot be compared with {self.name}, which has"
            raise ModelError(f"{asked} {reference.shape[1]:,}", do="give the output of the same model")

        def of(output: Any) -> Tensor:
            return torch.nn.functional.cosine_similarity(_embedding(output, what), reference)

        value = min(float(of(output).detach()[0]), 1.0)  # rounding: 1.0000001 for the reference itself
        return [Objective(Score(None, None, value, None, target=f"similarity to {self.name}"), of)]


def _embedding(output: Any, what: str) -> Tensor:
    tensors = {} if is_a_list_of_records(output) else tensors_in(output)
    tensor = next(iter([*embeddings(output), *tensors.values()]), None)
    if tensor is None or tensor.dim() not in (2, 3, 4) or not (tensor.is_floating_point() or tensor.is_quantized):
        do = "use a model that returns a vector for each image"
        raise ModelError(f"{what} gives {described(output)}, no embedding", do=do)
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))  # squares of half precision overflow
    return tensor if tensor.dim() == 2 else tensor.mean(1) if tensor.dim() == 3 else tensor.mean((2, 3))


def detections(output: Any, what: str = "the model") -> list[Detections]:
    """The detections in each image of a detector's output.

    The library of the model makes them. Models of transformers and ultralytics return all their
    queries or anchors; of these, scores from 0.05 count, and of ultralytics' boxes of one class that overlap by more
    than 0.7 the best. A ModelError for other outputs calls the model ``what``.
    """
    if (images := detections_in(output)) is None:
        raise ModelError(f"{what} gives {described(output)}, no boxes with classes and scores", do="explain a class")
    return [image.by_score for image in images]


_MOST_NAMED = 5
_LEAST_OVERLAP = 0.5


@dataclass(frozen=True, slots=True)
class BoxTarget(ScoreTarget):
    """A box that a detector found: why is it there?

    The number that is explained is the score of the box's class. Methods that change the image ask how well the changed
    image still shows the box, as D-RISE does (Petsiuk et al., arXiv:2006.03204): the largest product of a detection's
    score and its overlap (intersection over union), over the detections of this class. A detection counts for the box
    of its class that it overlaps most. Without ``fit`` it is the score alone, where the overlap is at least a half.

    The gradient is of the score: at the box itself the overlap is at its maximum, which has no slope.

    Detectors are models of torchvision, transformers (DETR, RT-DETR, YOLOS and others with ``logits`` and
    ``pred_boxes``) and ultralytics. Of the last two, scores from 0.05 count.

    Attributes:
        index: Number of the box by descending score, from 0; or the numbers of several boxes.
        fit: Whether the overlap counts too.

    Raises:
        AbsentTargetError: when used, if the detector found no such box.
        ModelError: when used, if the model is not a detector.

    Example:
        >>> import torch, torchvision
        >>> from hookscope import BoxTarget, saliency_maps
        >>> _ = torch.manual_seed(0)
        >>> net = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        ...     weights=None, weights_backbone=None, score_thresh=0.0
        ... ).eval()
        >>> [saliency] = saliency_maps(net, [torch.rand(3, 64, 96)], BoxTarget(0))
        >>> saliency.values.shape, saliency.prediction.target.split(":")[0], len(saliency.prediction.box)
        (torch.Size([3, 64, 96]), 'box 0', 4)
    """

    index: int | tuple[int, ...] = 0
    fit: bool = True

    def objectives(self, output: Any, categories: ClassNames, what: str, size: Size | None = None) -> list[Objective]:
        images = detections(output, what)
        if len(images) != 1:
            raise UsageError(f"expected one image, got {len(images)}", do="call it once for each image")
        [picture], indices = images, (self.index,) if isinstance(self.index, int) else self.index
        for index in indices:
            if not 0 <= index < len(picture.scores):
                raise _no_box(index, picture, categories, what)
        return [self._objective(picture, index, categories, what, size) for index in indices]

    def _objective(
        self, picture: Detections, index: int, categories: ClassNames, what: str, size: Size | None
    ) -> Objective:
        label = int(picture.labels[index])
        same = picture.labels == label
        others, at = picture.boxes[same].detach(), int(same[:index].sum())

        def shown(output: Any) -> Tensor:
            return torch.stack([self._shown(image, label, others, at) for image in detections(output, what)])

        return Objective(_score(picture, index, categories, size), shown)

    def _shown(self, found: Detections, label: int, others: Tensor, at: int) -> Tensor:
        """How well an image with the detections ``found`` shows box ``at`` of ``others``, all of class ``label``."""
        same = found.labels == label
        overlaps = box_iou(found.boxes[same].detach(), others).nan_to_num(0)  # 0/0 for boxes without an area
        own, scores = overlaps[:, at], found.scores[same]
        share = own if self.fit else own >= _LEAST_OVERLAP
        best = scores * share * (own == overlaps.amax(1))
        return torch.cat([best, best.new_zeros(1)]).amax()


def _score(picture: Detections, index: int, categories: ClassNames, size: Size | None) -> Score:
    label, box = int(picture.labels[index]), picture.boxes[index].tolist()
    if picture.shares:
        sides = [1.0, 1.0] if size is None else [size[1], size[0]]
        box = [share * side for share, side in zip(box, 2 * sides, strict=True)]
    name = f"box {index}: {class_label(label, categories) or f'class {label}'}"
    value = float(picture.scores[index].detach())
    place = None if picture.shares and size is None else tuple(box)
    return Score(label, class_label(label, categories), value, None, target=name, box=place)


def _no_box(index: int, picture: Detections, categories: ClassNames, what: str) -> AbsentTargetError:
    count = len(picture.scores)
    if not count:
        return AbsentTargetError(f"no box {index}", f"{what} finds no box in this image", "give another image")
    best = [
        f"box:{at} {class_label(label, categories) or f'class {label}'} ({score:.2g})"
        for at, (label, score) in enumerate(zip(picture.labels.tolist(), picture.scores.tolist(), strict=True))
    ][:_MOST_NAMED]
    more = ", ..." if count > _MOST_NAMED else ""
    boxes = "1 box" if count == 1 else f"{count} boxes"
    return AbsentTargetError(f"no box {index}", f"{what} finds {boxes}: {', '.join(best)}{more}")


def target_for(choice: TargetChoice, net: LoadedModel, categories: tuple[str, ...] | None) -> Callable[..., Any]:
    """Check ``choice`` against ``net`` before a forward pass, and return the function from a photograph to its target.

    The target is what `class_activation_maps` takes. A second argument replaces the classes, where it is about
    classes. Functions are imported and pictures are embedded once.

    Raises:
        ModelError: the family of ``net`` has no such scores, or there is no such function.
        TargetError: no such class.
    """
    if isinstance(choice.target, str):
        function = find_in_source(choice.target)
        if not isinstance(function, ScoreTarget) and not callable(function):
            raise ModelError(f"{choice.target} is not a function but {type(function).__name__}", do="name a function")
        return _always(function)
    if isinstance(choice.target, Boxes):
        return _always(BoxTarget(choice.target.indices, choice.target.fit))
    if choice.similar_to:
        check_family(net.family, net.name, "embedding")
        return _always(SimilarityTarget.of_picture(net, choice.similar_to(net.preprocess.frames)))
    check_family(net.family, net.name)
    if getattr(net.model, "num_classes", None) == 0:  # so timm says that there is no classifier
        raise ModelError(f"{net.name} gives an embedding, no score for each class", do=EXPLAIN_SIMILARITY)
    for classes in (choice.classes, choice.against):
        if classes is not None:
            classes.check(categories)

    def target(image: InputImage, classes: Target | None = None) -> Any:
        chosen: Any = classes or choice.classes
        if choice.against is not None:
            chosen = DifferenceTarget(chosen, choice.against)
        if choice.region is None:
            return chosen
        photograph, _ = net.preprocess.shown(image.image, net.prepare(image))
        region = net.preprocess.region(choice.region.drawn(photograph.size))
        if not region.any():
            asked = f"the network does not see the region {choice.region.where}"
            raise InputError(
                asked,
                "the preprocessing cuts it off",
                "choose other pixels, or ‹resize='stretch'|--resize stretch›",
            )
        return RegionTarget(region, chosen, choice.region.where)

    return target


def _always(target: Any) -> Callable[..., Any]:
    return lambda image, classes=None: target
