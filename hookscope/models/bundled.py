"""The trained models that ship with hookscope: small, and there without a network."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hookscope.errors import WeightsError


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
    """The weights file of a bundled model: of the installed package, else of the checkout."""
    package = package_folder()
    folders = [package, os.path.join(os.path.dirname(package), *bundled.folder.split("/"))]
    for folder in folders:
        path = os.path.join(folder, bundled.file)
        if os.path.isfile(path):
            return path
    raise WeightsError(
        f"the weights of {bundled.name} are missing from the installation",
        f"no {bundled.file} in {' or '.join(folders)}",
        "reinstall hookscope, or use ‹weights='none'|--weights none›",
    )
