"""A detected box as a target: its class score, and how well further images still show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import batched_nms, box_convert, box_iou

from hookscope.errors import AbsentTargetError, ModelError, UsageError
from hookscope.scores.logits import Score, described, gives_boxes
from hookscope.scores.objective import Objective, ScoreTarget, Size
from hookscope.scores.target import class_label

_LEAST = 0.05  # of a score, where the model itself does not choose; as torchvision does
_SAME = 0.7  # overlap of boxes of one class that ultralytics counts as one
_WITH_NO_OBJECT = ("DetrO", "DetrS", "Yolos", "TableTransformer")  # outputs with a softmax; the last class is none


@dataclass(frozen=True, slots=True)
class Detections:
    """What a detector found in one image, by descending score.

    Attributes:
        boxes: ``(n, 4)``: left, top, right and bottom.
        labels: ``(n,)`` numbers of classes.
        scores: ``(n,)``, 0 to 1, in the graph of the output.
        shares: Whether the boxes are shares of the input's width and height, 0 to 1, and not pixels.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    shares: bool = False

    @property
    def by_score(self) -> Detections:
        order = self.scores.argsort(descending=True, stable=True)
        return Detections(self.boxes[order], self.labels[order], self.scores[order], self.shares)

    @property
    def chosen(self) -> Detections:
        """Those with a score of at least 0.05."""
        kept = self.scores >= _LEAST
        return Detections(self.boxes[kept], self.labels[kept], self.scores[kept], self.shares)


def detections(output: Any, what: str = "the model") -> list[Detections]:
    """The detections in each image of a detector's output.

    They are those that the library of the model makes of it. Models of transformers and ultralytics put out all their
    queries or anchors; of these, scores from 0.05 count, and of ultralytics' boxes of one class that overlap by more
    than 0.7 the best. A ModelError for other outputs calls the model ``what``.
    """
    if not gives_boxes(output):
        raise ModelError(f"{what} gives {described(output)}, no boxes with classes and scores", do="explain a class")
    if isinstance(output, list):
        found = [Detections(image["boxes"], image["labels"], image["scores"]) for image in output]
    elif isinstance(output, Mapping):
        found = _of_transformers(output)
    else:
        found = _of_ultralytics(*output)
    return [image.by_score for image in found]


def _of_transformers(output: Mapping[str, Tensor]) -> list[Detections]:
    """What ``post_process_object_detection`` of the model's image processor returns."""
    logits, boxes = output["logits"], box_convert(output["pred_boxes"], "cxcywh", "xyxy")
    if type(output).__name__.startswith(_WITH_NO_OBJECT):
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
    else:
        # a query may be of several classes
        queries, classes = logits.shape[1:]
        scores, boxes = logits.sigmoid().flatten(1), boxes.repeat_interleave(classes, 1)
        labels = torch.arange(classes, device=logits.device).repeat(len(logits), queries)
    images = zip(boxes, labels, scores, strict=True)
    return [Detections(*image, shares=True).chosen for image in images]


def _of_ultralytics(rows: Any, raw: Any) -> list[Detections]:
    """What ``non_max_suppression`` of ultralytics returns, from ``rows`` or from ``(rows, masks)``."""
    rows = rows[0] if isinstance(rows, tuple) else rows
    if isinstance(raw, tuple):  # RT-DETR
        boxes = box_convert(rows[..., :4], "cxcywh", "xyxy")
        images = zip(boxes, rows[..., 5].long(), rows[..., 4], strict=True)
        return [Detections(*image, shares=True).chosen for image in images]
    raw = raw.get("one2many") or raw.get("one2one") or raw
    classes, anchors = raw["scores"].shape[1:]
    if rows.shape[2] != anchors:  # without overlaps: left, top, right, bottom, score, class
        return [Detections(image[:, :4], image[:, 5].long(), image[:, 4]).chosen for image in rows]
    boxes = box_convert(rows[:, :4].mT, "cxcywh", "xyxy")
    scores, labels = rows[:, 4 : 4 + classes].max(1)
    return [_once(Detections(*image).chosen) for image in zip(boxes, labels, scores, strict=True)]


def _once(found: Detections) -> Detections:
    """Without the boxes that overlap a better one of their class."""
    kept = batched_nms(found.boxes.detach(), found.scores.detach(), found.labels, _SAME)
    return Detections(found.boxes[kept], found.labels[kept], found.scores[kept])


_MOST_NAMED = 5
_LEAST_OVERLAP = 0.5


@dataclass(frozen=True, slots=True)
class BoxTarget(ScoreTarget):
    """A box that a detector found: why is it there?

    The number that is explained is the score of the box's class. Methods that change the image ask how well the changed
    image still shows the box: the score of a detection of its class times their overlap (intersection over union), of
    all detections the highest, as D-RISE does (Petsiuk et al., arXiv:2006.03204). A detection counts for the box of its
    class that it overlaps most. Without ``fit`` it is the score alone, where the overlap is at least a half.

    The gradient is that of the score: at the box itself the overlap is at its maximum, which has no slope.

    Detectors are those of torchvision, transformers (DETR, RT-DETR, YOLOS and others with ``logits`` and
    ``pred_boxes``) and ultralytics. Of the last two, scores from 0.05 count.

    Attributes:
        index: Number of the box by descending score, from 0; or the numbers of several boxes.
        fit: Whether the overlap counts too.

    Raises:
        AbsentTargetError: when used, if the detector found no such box.
        ModelError: when used, if the model is no detector.

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
