"""Models in a folder that transformers has saved, where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, WeightsError
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress, WeightsChoice, WeightsKind, random_label

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel


_TASKS = {
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "ObjectDetection": "OBJECT_DETECTION",
    "SemanticSegmentation": "SEMANTIC_SEGMENTATION",
}
_WEIGHTS = "model.safetensors"


class TransformersSource(ModelSource):
    """A folder with the ``config.json`` and the weights of a classifier, a detector or a segmentation model.

    Code in the folder is never run.
    """

    def matches(self, model: str) -> bool:
        return os.path.isfile(os.path.join(model, "config.json"))

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.checkpoints import load_checkpoint
        from hookscope.models.loaded import LoadedModel
        from hookscope.models.run import build_errors_as_model_errors
        from hookscope.models.stated import stated_class_names, stated_transforms

        weights.refuse_names(model)
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError:
            raise ModelError(f"{model} needs the package transformers", do="pip install transformers") from None
        with build_errors_as_model_errors(f"cannot build the model of {model}"):
            config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False, local_files_only=True)
            if hasattr(config, "use_pretrained_backbone"):
                config.use_pretrained_backbone = False  # its weights are in the folder, or none are wanted
            auto = getattr(transformers, f"AutoModelFor{_task_of(config, transformers)}")
            built = auto.from_config(config, trust_remote_code=False)
        label, notes = random_label(seed), list[str]()
        if weights.kind is not WeightsKind.NONE:
            path = weights.text if weights.kind is WeightsKind.FILE else model
            try:
                label, notes = load_checkpoint(built, path, model)
            except WeightsError:
                if (converted := _converted(auto, config, path, built)) is None:
                    raise
                built, label = converted, f"{os.path.basename(os.path.realpath(path))}/{_WEIGHTS}"
        metadata = WeightsMetadata(stated_transforms(built, [model]), stated_class_names(built), tuple(notes))
        return LoadedModel.of(built, model, label, metadata)


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
