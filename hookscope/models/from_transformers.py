"""Image classifiers in a folder that transformers has saved, where it is installed."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress
from hookscope.models.weights_choice import WeightsChoice, WeightsKind, random_label

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel


class TransformersSource(ModelSource):
    """A folder with the ``config.json`` and the weights of a classifier; code in the folder is never run."""

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
            built = transformers.AutoModelForImageClassification.from_config(config, trust_remote_code=False)
        label, notes = random_label(seed), list[str]()
        if weights.kind is not WeightsKind.NONE:
            path = weights.text if weights.kind is WeightsKind.FILE else model
            label, notes = load_checkpoint(built, path, model)
        metadata = WeightsMetadata(stated_transforms(built, [model]), stated_class_names(built), tuple(notes))
        return LoadedModel.of(built, model, label, metadata)
