"""Torchvision's models by name, and the models that ship with hookscope."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookscope.errors import ModelError, nearest
from hookscope.models.bundled import BUNDLED, weights_path
from hookscope.models.metadata import Description, read_description
from hookscope.models.model_source import ModelSource, Progress, Skeleton, WeightsChoice
from hookscope.models.names import torchvision_class_names, torchvision_names

_QUANTIZED = "quantized:"

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel


class TorchvisionSource(ModelSource):
    """``resnet34`` and all other names of ``torchvision.models.list_models()``."""

    def matches(self, model: str) -> bool:
        return model in torchvision_names()

    def names(self) -> tuple[str, ...]:
        return torchvision_names()

    def class_names(self, model: str) -> tuple[str, ...]:
        return torchvision_class_names(model)

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.torchvision_builders import load_from_torchvision

        return load_from_torchvision(model, weights, seed, progress)

    def skeleton(self, model: str) -> Skeleton:
        from hookscope.models.torchvision_builders import build_skeleton

        return build_skeleton(model)


class QuantizedSource(ModelSource):
    """``quantized:resnet18`` and the other models that torchvision can quantize, with layers that compute in 8 bits."""

    cpu_only = True

    def matches(self, model: str) -> bool:
        return model.startswith(_QUANTIZED)

    def names(self) -> tuple[str, ...]:
        twins = (name for name in torchvision_names() if name.startswith("quantized_"))
        return tuple(_QUANTIZED + name.removeprefix("quantized_") for name in twins)

    def class_names(self, model: str) -> tuple[str, ...]:
        return torchvision_class_names(_builder(model))

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        if model not in self.names():
            do = "see `hookscope list-models 'quantized*'`"
            raise ModelError(f"no model '{model}'", nearest(model, self.names()), do)
        from hookscope.models.quantized import load_quantized

        return load_quantized(model, _builder(model), weights, seed, progress)


def _builder(model: str) -> str:
    return f"quantized_{model.removeprefix(_QUANTIZED)}"


class BundledSource(TorchvisionSource):
    """``shapes``: architectures of torchvision with weights of their own."""

    def matches(self, model: str) -> bool:
        return model in BUNDLED

    def names(self) -> tuple[str, ...]:
        return tuple(BUNDLED)

    def class_names(self, model: str) -> tuple[str, ...]:
        return (read_description(weights_path(BUNDLED[model])) or Description()).categories

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.torchvision_builders import load_bundled

        return load_bundled(BUNDLED[model], weights, seed)
