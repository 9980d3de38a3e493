"""A detected box as a target: its class score, and how well further images still show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

from hookscope.errors import AbsentTargetError, ModelError, UsageError
from hookscope.models import Detections, detections_in
from hookscope.scores.logits import Score, described
from hookscope.scores.objective import Objective, ScoreTarget, Size
from hookscope.scores.target import class_label


def detections(output: Any, what: str = "the model") -> list[Detections]:
    """The detections in each image of a detector's output.

    The library of the model makes them. Models of transformers and ultralytics return all their
    queries or anchors; of these, scores from 0.05 count, and of ultralytics' boxes of one class that overlap by more
    than 0.7 the best. A ModelError for other outputs calls the model ``what``.
    """
    if (found := detections_in(output)) is None:
        raise ModelError(f"{what} gives {described(output)}, no boxes with classes and scores", do="explain a class")
    return [image.by_score for image in found]


_MOST_NAMED = 5
_LEAST_OVERLAP = 0.5


@dataclass(frozen=True, slots=True)
class BoxTarget(ScoreTarget):
    """A box that a detector found: why is it there?

    The number that is explained is the score of the box's class. Methods that change the image ask how well the changed
    image still shows the box: the score of a detection of its class times their overlap (intersection over union), of
    all detections the highest, as D-RISE does (Petsiuk et al., arXiv:2006.03204). A detection counts for the box of its
    class that it overlaps most. Without ``fit`` it is the score alone, where the overlap is at least a half.

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

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        images = detections(output, what)
        if len(images) != 1:
            raise UsageError(f"expected one picture, got {len(images)}", do="call it for each picture")
        [found], indices = images, (self.index,) if isinstance(self.index, int) else self.index
        for index in indices:
            if not 0 <= index < len(found.scores):
                raise _no_box(index, found, categories, what)
        return [self._objective(found, index, categories, what, size) for index in indices]

    def _objective(
        self, found: Detections, index: int, categories: Sequence[str] | None, what: str, size: Size | None
    ) -> Objective:
        label = int(found.labels[index])
        same = found.labels == label
        others, at = found.boxes[same].detach(), int(same[:index].sum())

        def shown(output: Any) -> Tensor:
            return torch.stack([self._shown(image, label, others, at) for image in detections(output, what)])

        return Objective(_score(found, index, categories, size), shown)

    def _shown(self, found: Detections, label: int, others: Tensor, at: int) -> Tensor:
        """How well an image with the detections ``found`` shows box ``at`` of ``others``, all of class ``label``."""
        same = found.labels == label
        overlaps = box_iou(found.boxes[same].detach(), others).nan_to_num(0)  # 0/0 for boxes without an area
        own, scores = overlaps[:, at], found.scores[same]
        share = own if self.fit else own >= _LEAST_OVERLAP
        best = scores * share * (own == overlaps.amax(1))
        return torch.cat([best, best.new_zeros(1)]).amax()


def _score(found: Detections, index: int, categories: Sequence[str] | None, size: Size | None) -> Score:
    label, box = int(found.labels[index]), found.boxes[index].tolist()
    if found.shares:
        sides = [1.0, 1.0] if size is None else [size[1], size[0]]
        box = [share * side for share, side in zip(box, 2 * sides, strict=True)]
    name = f"box {index}: {class_label(label, categories) or f'class {label}'}"
    value = float(found.scores[index].detach())
    place = None if found.shares and size is None else tuple(box)
    return Score(label, class_label(label, categories), value, None, target=name, box=place)


def _no_box(index: int, found: Detections, categories: Sequence[str] | None, what: str) -> AbsentTargetError:
    count = len(found.scores)
    if not count:
        return AbsentTargetError(f"no box {index}", f"{what} finds no box in this image", "give another image")
    best = [
        f"box:{at} {class_label(label, categories) or f'class {label}'} ({score:.2g})"
        for at, (label, score) in enumerate(zip(found.labels.tolist(), found.scores.tolist(), strict=True))
    ][:_MOST_NAMED]
    more = ", ..." if count > _MOST_NAMED else ""
    boxes = "1 box" if count == 1 else f"{count} boxes"
    return AbsentTargetError(f"no box {index}", f"{what} finds {boxes}: {', '.join(best)}{more}")
