"""Torchvision's models by name, and the models that ship with hookscope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, nearest
from hookscope.models.bundled import BUNDLED, weights_path
from hookscope.models.metadata import Description, read_description
from hookscope.models.model_source import Detections, ModelSource, Progress, Skeleton, WeightsChoice
from hookscope.models.names import torchvision_class_names, torchvision_names

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel


class TorchvisionSource(ModelSource):
    """``resnet34`` and all other names of ``torchvision.models.list_models()``."""

    @classmethod
    def matches(cls, text: str) -> bool:
        return text in torchvision_names()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return torchvision_names()

    @classmethod
    def detections(cls, output: Any) -> list[Detections] | None:
        if not isinstance(output, list) or not output or not isinstance(output[0], dict):
            return None
        if not {"boxes", "labels", "scores"} <= output[0].keys():
            return None
        return [Detections(image["boxes"], image["labels"], image["scores"]) for image in output]

    def class_names(self) -> tuple[str, ...]:
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
            do = "see `hookscope list-models 'quantized*'`"
            raise ModelError(f"no model '{self.text}'", nearest(self.text, self.names()), do)
        from hookscope.models.torchvision_builders import load_quantized

        return load_quantized(self.text, f"quantized_{self.name}", weights, seed, progress)


class BundledSource(TorchvisionSource):
    """``shapes``: architectures of torchvision with weights of their own."""

    @classmethod
    def matches(cls, text: str) -> bool:
        return text in BUNDLED

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(BUNDLED)

    def class_names(self) -> tuple[str, ...]:
        return (read_description(weights_path(BUNDLED[self.text])) or Description()).categories

    def build(self, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.torchvision_builders import load_bundled

        return load_bundled(BUNDLED[self.text], weights, seed)
