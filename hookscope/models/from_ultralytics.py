"""Detectors and segmentation models of the package ultralytics, where it is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, nearest
from hookscope.models.model_source import Detections, MadeSource

if TYPE_CHECKING:
    from torch import nn

_CLASSES = {
    "Detect": "DetectionModel",
    "v10Detect": "DetectionModel",
    "RTDETRDecoder": "RTDETRDetectionModel",
    "Segment": "SegmentationModel",
    "Segment26": "SegmentationModel",
    "Pose": "PoseModel",
    "Pose26": "PoseModel",
    "SemanticSegment": "SemanticSegmentationModel",
}
# The last bias of a head, which has one number for each class.
_LAST_BIAS = re.compile(r"(?:cv3\.0\.2|dec_score_head\.0)\.bias$")

_SAME = 0.7  # overlap of boxes of one class that count as one
_SCALE = re.compile(r"(\d+)([nslmx])(.+)?$")  # yolov8n.yaml is yolov8.yaml at the scale n


class UltralyticsSource(MadeSource):
    """``ultralytics:NAME``, where the package has NAME.yaml; NAME may have a scale, as ``yolov8n`` of yolov8.yaml."""

    prefix = "ultralytics:"
    has_trained = True

    def make(self, pretrained: bool, **kwargs: Any) -> Any:
        from hookscope.models.run import build_errors_as_model_errors, quiet_log

        give = "‹weights=FILE|--weights FILE›"
        if self.name.endswith(".pt"):
            do = f"save model.model.state_dict() with torch.save, and give it with {give} to ultralytics:yolov8n"
            raise ModelError(f"{self.name} is a pickled model, which runs code when it is read", do=do)
        tasks = self.imported("ultralytics.nn.tasks")
        with build_errors_as_model_errors(f"cannot build {self.text}"), quiet_log("ultralytics"):
            config = _config(self.name, tasks)
            head = config["head"][-1][2]
            if head not in _CLASSES:
                raise ModelError(f"{self.text} is not a detector or segmentation model", f"its head is {head}")
            if pretrained:
                self.missing = f"trained ones are pickled; give a state dict with {give}"
                return None
            return getattr(tasks, _CLASSES[head])(config, verbose=False, **kwargs)

    def load(self, net: nn.Module, path: str) -> nn.Module:
        from hookscope.models.checkpoint_files import read_checkpoint
        from hookscope.models.checkpoints import fitted

        state, _ = fitted(net, read_checkpoint(path))
        sizes = [
            {key: len(value) for key, value in each.items() if _LAST_BIAS.search(key)}
            for each in (state, net.state_dict())
        ]
        if sizes[0] and sizes[0] != sizes[1]:
            net = self.make(False, nc=next(iter(sizes[0].values()))) or net
        return super().load(net, path)

    @classmethod
    def detections(cls, output: Any) -> list[Detections] | None:
        """What ``non_max_suppression`` of ultralytics returns, from ``rows`` or from ``(rows, masks)``."""
        from torchvision.ops import box_convert

        if not isinstance(output, tuple) or len(output) != 2:
            return None
        rows, raw = output
        if isinstance(raw, tuple):  # RT-DETR
            if len(raw) != 5 or getattr(rows, "shape", (0,))[2:] != (6,):
                return None
            boxes = box_convert(rows[..., :4], "cxcywh", "xyxy")
            images = zip(boxes, rows[..., 5].long(), rows[..., 4], strict=True)
            return [Detections(*image, shares=True).chosen for image in images]
        raw = raw.get("one2many") or raw.get("one2one") or raw if isinstance(raw, dict) else {}
        if not {"boxes", "scores", "feats"} <= raw.keys() or "angle" in raw:  # boxes with an angle are not read
            return None
        rows = rows[0] if isinstance(rows, tuple) else rows
        classes, anchors = raw["scores"].shape[1:]
        if rows.shape[2] != anchors:  # without overlaps: left, top, right, bottom, score, class
            return [Detections(image[:, :4], image[:, 5].long(), image[:, 4]).chosen for image in rows]
        boxes = box_convert(rows[:, :4].mT, "cxcywh", "xyxy")
        scores, labels = rows[:, 4 : 4 + classes].max(1)
        return [_once(Detections(*image).chosen) for image in zip(boxes, labels, scores, strict=True)]


def _once(found: Detections) -> Detections:
    """Without the boxes that overlap a better one of their class."""
    from torchvision.ops import batched_nms

    kept = batched_nms(found.boxes.detach(), found.scores.detach(), found.labels, _SAME)
    return Detections(found.boxes[kept], found.labels[kept], found.scores[kept])


def _config(name: str, tasks: Any) -> Any:
    """The content of the file of the package for ``name``; ultralytics itself would fetch an unknown file."""
    files = {path.stem for path in Path(tasks.__file__).parents[1].glob("cfg/models/**/*.yaml")}
    if not files & {name, _SCALE.sub(r"\1\3", name)}:
        raise ModelError(f"no ultralytics model '{name}'", nearest(name, sorted(files)), "give a name such as yolov8n")
    return tasks.yaml_model_load(f"{name}.yaml")
