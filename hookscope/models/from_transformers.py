"""Models in a folder that transformers has saved, where it is installed."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from hookscope.errors import WeightsError
from hookscope.models.model_source import Detections, MadeSource

if TYPE_CHECKING:
    from torch import nn

_TASKS = {
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "ObjectDetection": "OBJECT_DETECTION",
    "SemanticSegmentation": "SEMANTIC_SEGMENTATION",
}
_WITH_NO_OBJECT = ("DetrO", "DetrS", "Yolos", "TableTransformer")  # outputs with a softmax; the last class is none
_WEIGHTS = "model.safetensors"


class TransformersSource(MadeSource):
    """A folder with the ``config.json`` and the weights of a classifier, a detector or a segmentation model.

    Code in the folder is never run.
    """

    has_trained = True

    @classmethod
    def matches(cls, text: str) -> bool:
        return os.path.isfile(os.path.join(text, "config.json"))

    def make(self, pretrained: bool) -> nn.Module:
        from hookscope.models.run import build_errors_as_model_errors

        transformers = self.imported("transformers")
        with build_errors_as_model_errors(f"cannot build the model of {self.text}"):
            config = transformers.AutoConfig.from_pretrained(self.text, trust_remote_code=False, local_files_only=True)
            if hasattr(config, "use_pretrained_backbone"):
                config.use_pretrained_backbone = False  # its weights are in the folder, or none are wanted
            self._config, self._auto = config, getattr(transformers, f"AutoModelFor{_task_of(config, transformers)}")
            net: nn.Module = self._auto.from_config(config, trust_remote_code=False)
        return self.load(net, self.text) if pretrained else net

    def load(self, net: nn.Module, path: str) -> nn.Module:
        try:
            return super().load(net, path)
        except WeightsError:
            if (converted := _converted(self._auto, self._config, path, net)) is None:
                raise
            self.label, self.checkpoint = f"{os.path.basename(os.path.realpath(path))}/{_WEIGHTS}", path
            return cast("nn.Module", converted)

    def transforms(self, net: nn.Module) -> Any:
        from hookscope.models.published_transforms import published_transforms

        return published_transforms(net, [self.text])

    @classmethod
    def detections(cls, output: Any) -> list[Detections] | None:
        """What ``post_process_object_detection`` of the model's image processor returns."""
        if (
            not isinstance(output, Mapping)
            or not {"logits", "pred_boxes"} <= output.keys()
            or output["logits"].dim() != 3
        ):
            return None
        import torch
        from torchvision.ops import box_convert

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


def _task_of(config: Any, transformers: Any) -> str:
    """The task of the class that was saved, else the first that has a class for this configuration."""
    saved = [task for task in _TASKS for name in config.architectures or () if name.endswith(f"For{task}")]
    built = [
        task for task, name in _TASKS.items() if type(config) in getattr(transformers, f"MODEL_FOR_{name}_MAPPING")
    ]
    return next(iter(saved + built), "ImageClassification")


def _converted(auto: Any, config: Any, folder: str, like: Any) -> Any:
    """The model with the weights in ``folder``, which transformers saves under other names; None if they do not fit."""
    from hookscope.models.run import quiet_log

    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, "dtype": like.dtype}
    try:
        with contextlib.redirect_stderr(io.StringIO()), quiet_log("transformers"):  # it draws a bar
            built, info = auto.from_pretrained(folder, config=config, output_loading_info=True, **options)
    except Exception:  # the error that the caller has says more
        return None
    return None if any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")) else built
