"""What detectors of torchvision, transformers and ultralytics find: boxes, classes and scores of each image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import batched_nms, box_convert

from hookscope.errors import ModelError
from hookscope.scores.logits import described, gives_boxes

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
