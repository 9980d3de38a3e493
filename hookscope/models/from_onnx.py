"""Models in ONNX files, which onnxruntime computes, where it is installed."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, UsageError
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress
from hookscope.models.weights_choice import WeightsChoice, WeightsKind

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel


class OnnxSource(ModelSource):
    """``model.onnx``; the file holds its own weights."""

    own_weights = True

    def matches(self, model: str) -> bool:
        return model.endswith(".onnx")

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        own_weights_only(model, weights)
        try:
            from hookscope.models import onnx_model
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("onnx", "onnxruntime"):
                raise
            raise ModelError(f"{model} needs the package {error.name}", do="pip install 'hookscope[onnx]'") from None
        from hookscope.models.loaded import LoadedModel

        net: Any = onnx_model.load(model)
        notes = [f"{model} takes (N, H, W, C): the axes of pictures are moved for it"] * net.channels_last
        metadata = WeightsMetadata(input_size=net.input_shape if all(net.input_shape) else None, notes=tuple(notes))
        loaded = LoadedModel.of(net, model, os.path.basename(model), metadata, "classification")
        preprocess = replace(loaded.preprocess, channels=net.input_shape[0] or 3, dtype=net.input_dtype)
        return replace(loaded, preprocess=preprocess, checkpoint=model)


def own_weights_only(model: str, weights: WeightsChoice) -> None:
    """Refuse other weights than those in the file ``model``, and a file that is not there.

    ``none`` is no refusal: where a command needs no weights, those of the file do no harm.
    """
    if not os.path.isfile(model):
        raise ModelError(f"no file '{model}'")
    if weights.kind in (WeightsKind.NAME, WeightsKind.FILE):
        raise UsageError(f"{model} holds its own weights and takes no others", do="leave --weights out for this model")
