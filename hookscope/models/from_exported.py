"""Models in files of ``torch.export``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hookscope.models.from_onnx import own_weights_only
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress
from hookscope.models.weights_choice import WeightsChoice

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel


class ExportedSource(ModelSource):
    """``model.pt2``, which `torch.export.save` wrote; the file holds its own weights."""

    own_weights = True

    def matches(self, model: str) -> bool:
        return model.endswith(".pt2")

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        own_weights_only(model, weights)
        from hookscope.models.exported_model import load
        from hookscope.models.loaded import LoadedModel

        net: Any = load(model)
        shape = net.input_shape
        metadata = WeightsMetadata(input_size=shape if all(shape) else None)
        loaded = LoadedModel.of(net, model, os.path.basename(model), metadata, "classification")
        preprocess = replace(loaded.preprocess, channels=shape[0] or 3, dtype=net.input_dtype)
        return replace(loaded, preprocess=preprocess, checkpoint=model)
