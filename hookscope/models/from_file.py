"""Models in files that hold their own weights: of ONNX, which onnxruntime computes, and of ``torch.export``."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hookscope.errors import ModelError, UsageError
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress, WeightsChoice, WeightsKind

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel


class FileSource(ModelSource):
    """A file with the end ``ending``, which `read` turns into a module with what it takes as attributes."""

    own_weights = True
    ending: ClassVar[str]

    @abstractmethod
    def read(self, path: str) -> Any:
        """The module, with ``input_shape`` (C, H, W), 0 for any length, and ``input_dtype``."""

    def matches(self, model: str) -> bool:
        return model.endswith(self.ending)

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        if not os.path.isfile(model):
            raise ModelError(f"no file '{model}'")
        if weights.kind in (WeightsKind.NAME, WeightsKind.FILE):  # where none are needed, its own do no harm
            asked = f"{model} holds its own weights and takes no others"
            raise UsageError(asked, do="leave ‹weights|--weights› out for this model")
        net = self.read(model)
        from hookscope.models.loaded import LoadedModel

        shape = net.input_shape
        notes = (f"{model} takes (N, H, W, C): the axes of pictures are moved for it",) * getattr(
            net, "channels_last", False
        )
        metadata = WeightsMetadata(input_size=shape if all(shape) else None, notes=notes)
        loaded = LoadedModel.of(net, model, os.path.basename(model), metadata, "classification")
        preprocess = replace(loaded.preprocess, channels=shape[0] or 3, dtype=net.input_dtype)
        return replace(loaded, preprocess=preprocess, checkpoint=model)


class OnnxSource(FileSource):
    """``model.onnx``."""

    ending = ".onnx"

    def read(self, path: str) -> Any:
        try:
            from hookscope.models import onnx_model
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("onnx", "onnxruntime"):
                raise
            raise ModelError(f"{path} needs the package {error.name}", do="pip install 'hookscope[onnx]'") from None
        return onnx_model.load(path)


class ExportedSource(FileSource):
    """``model.pt2``, which `torch.export.save` wrote."""

    ending = ".pt2"

    def read(self, path: str) -> Any:
        from hookscope.models import exported_model

        return exported_model.load(path)
