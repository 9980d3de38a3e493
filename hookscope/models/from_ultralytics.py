"""Detectors and segmentation models of the package ultralytics, where it is installed."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, nearest
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress, WeightsChoice, WeightsKind, random_label

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel

_PREFIX = "ultralytics:"
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

_SCALE = re.compile(r"(\d+)([nslmx])(.+)?$")  # yolov8n.yaml is yolov8.yaml at the scale n


class UltralyticsSource(ModelSource):
    """``ultralytics:NAME``, where the package has NAME.yaml; NAME may have a scale, as ``yolov8n`` of yolov8.yaml."""

    def matches(self, model: str) -> bool:
        return model.startswith(_PREFIX)

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.checkpoint_files import read_checkpoint
        from hookscope.models.checkpoints import fitted, load_checkpoint
        from hookscope.models.loaded import LoadedModel
        from hookscope.models.run import build_errors_as_model_errors, quiet_log
        from hookscope.models.stated import stated_class_names, stated_transforms

        name = model.removeprefix(_PREFIX)
        if name.endswith(".pt"):
            do = (
                "save model.model.state_dict() with torch.save, and give it with "
                "‹weights=FILE|--weights FILE› to ultralytics:yolov8n"
            )
            raise ModelError(f"{name} is a pickled model, which runs code when it is read", do=do)
        weights.refuse_names(model)
        try:
            tasks: Any = importlib.import_module("ultralytics.nn.tasks")
        except ImportError:
            raise ModelError(f"{model} needs the package ultralytics", do="pip install ultralytics") from None
        label, notes = random_label(seed), list[str]()
        with build_errors_as_model_errors(f"cannot build {model}"), quiet_log("ultralytics"):
            config = _config(name, tasks)
            head = config["head"][-1][2]
            if head not in _CLASSES:
                raise ModelError(f"{model} is no detector or segmentation model", f"its head is {head}")
            make = functools.partial(getattr(tasks, _CLASSES[head]), config, verbose=False)
            built = make()
            if weights.kind is WeightsKind.FILE:
                state, _ = fitted(built, read_checkpoint(weights.text))
                classes = next((len(value) for key, value in state.items() if _LAST_BIAS.search(key)), None)
                if classes not in (None, config["nc"]):
                    built = make(nc=classes)
                label, notes = load_checkpoint(built, weights.text, model)
        metadata = WeightsMetadata(stated_transforms(built), stated_class_names(built), tuple(notes))
        if weights.kind is WeightsKind.AUTO:
            why = "trained ones are pickled; give a state dict with ‹weights=FILE|--weights FILE›"
            metadata = metadata.noted(f"{model} has random weights (seed {seed}): {why}")
        return LoadedModel.of(built, model, label, metadata)


def _config(name: str, tasks: Any) -> Any:
    """The content of the file of the package for ``name``; ultralytics itself would fetch an unknown file."""
    files = {path.stem for path in Path(tasks.__file__).parents[1].glob("cfg/models/**/*.yaml")}
    if not files & {name, _SCALE.sub(r"\1\3", name)}:
        raise ModelError(f"no ultralytics model '{name}'", nearest(name, sorted(files)), "give a name such as yolov8n")
    return tasks.yaml_model_load(f"{name}.yaml")
