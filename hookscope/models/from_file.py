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
    def read(self) -> Any:
        """The module, with ``input_shape`` (C, H, W), 0 for any length, and ``input_dtype``."""

    @classmethod
    def matches(cls, text: str) -> bool:
        return text.endswith(cls.ending)

    def build(self, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        if not os.path.isfile(self.text):
            raise ModelError(f"no file '{self.text}'")
        if weights.kind in (WeightsKind.NAME, WeightsKind.FILE):  # where none are needed, its own do no harm
            asked = f"{self.text} holds its own weights and takes no others"
            raise UsageError(asked, do="leave ‹weights|--weights› out for this model")
        net = self.read()
        from hookscope.models.loaded import LoadedModel

        shape, note = net.input_shape, f"{self.text} takes (N, H, W, C): the axes of pictures are moved for it"
        notes = (note,) if getattr(net, "channels_last", False) else ()
        metadata = WeightsMetadata(input_size=shape if all(shape) else None, notes=notes)
        loaded = LoadedModel.of(net, self.text, os.path.basename(self.text), metadata, "classification")
        preprocess = replace(loaded.preprocess, channels=shape[0] or 3, dtype=net.input_dtype)
        return replace(loaded, preprocess=preprocess, checkpoint=self.text)


class OnnxSource(FileSource):
    """``model.onnx``."""

    ending = ".onnx"

    def read(self) -> Any:
        for package in ("onnx", "onnxruntime"):
            self.imported(package, "'hookscope[onnx]'")
        from hookscope.models import onnx_model

        return onnx_model.load(self.text)


class ExportedSource(FileSource):
    """``model.pt2``, which `torch.export.save` wrote."""

    ending = ".pt2"

    def read(self) -> Any:
        from hookscope.models import exported_model

        return exported_model.load(self.text)
