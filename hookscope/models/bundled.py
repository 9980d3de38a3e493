"""The trained models that ship with hookscope: small, and there without a network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.errors import WeightsError
from hookscope.models.metadata import Description, read_description
from hookscope.models.model_source import ModelSource, Progress, Skeleton
from hookscope.models.weights_choice import WeightsChoice

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model that ships with hookscope.

    Attributes:
        name: The MODEL argument.
        architecture: The name of the torchvision model that it is.
        classes: Number of classes.
        side: Height and width of the input in pixels.
        file: Name of the weights file, which is also the name of the weights.
        folder: Folder of the file in a checkout, relative to its top; in an installation it lies in the package.
    """

    name: str
    architecture: str
    classes: int
    side: int
    file: str
    folder: str


BUNDLED = {"shapes": BundledModel("shapes", "squeezenet1_1", 10, 128, "shapes.safetensors", "samples/shapes")}
"""The bundled models by name."""


def package_folder() -> str:
    """The folder of the installed package."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def weights_path(bundled: BundledModel) -> str:
    """The weights file of a bundled model: that of the installed package, else that of the checkout.

    Raises:
        WeightsError: neither file exists.

    Example:
        >>> os.path.basename(weights_path(BUNDLED["shapes"]))
        'shapes.safetensors'
    """
    package = package_folder()
    folders = [package, os.path.join(os.path.dirname(package), *bundled.folder.split("/"))]
    for folder in folders:
        path = os.path.join(folder, bundled.file)
        if os.path.isfile(path):
            return path
    raise WeightsError(
        f"the weights of {bundled.name} are missing from the installation",
        f"no {bundled.file} in {' or '.join(folders)}",
        "reinstall hookscope, or use --weights none",
    )


class BundledSource(ModelSource):
    """``shapes``."""

    def matches(self, model: str) -> bool:
        return model in BUNDLED

    def names(self) -> tuple[str, ...]:
        return tuple(BUNDLED)

    def class_names(self, model: str) -> tuple[str, ...]:
        return (read_description(weights_path(BUNDLED[model])) or Description()).categories

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.torchvision_builders import load_bundled

        return load_bundled(BUNDLED[model], weights, seed)

    def skeleton(self, model: str) -> Skeleton:
        from hookscope.models.torchvision_builders import build_skeleton

        return build_skeleton(model)
