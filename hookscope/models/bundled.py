"""The models that ship with hookscope: trained, small, there without a network; told from files, without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hookscope.errors import WeightsError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model that ships.

    Attributes:
        name: What MODEL takes.
        architecture: The name of the torchvision model that it is.
        classes: How many classes it tells apart.
        side: Height and width of the input it is made for.
        file: Name of the file of its weights, which is also the word for them.
        folder: Where the file lies in a checkout, from its top; an installation has it in the package.
    """

    name: str
    architecture: str
    classes: int
    side: int
    file: str
    folder: str


BUNDLED = {"shapes": BundledModel("shapes", "squeezenet1_1", 10, 128, "shapes.safetensors", "samples/shapes")}
"""The models that ship, by name."""


def weights_path(shipped: BundledModel) -> str:
    """The file with the weights of a model that ships: that of the installed package, or that of the checkout.

    Raises:
        WeightsError: neither is there.

    Example:
        >>> import tempfile, unittest.mock
        >>> with (
        ...     tempfile.TemporaryDirectory() as package,
        ...     unittest.mock.patch("hookscope.models.bundled._PACKAGE", package),
        ...     open(f"{package}/shapes.safetensors", "w") as file,
        ... ):
        ...     weights_path(BUNDLED["shapes"]) == file.name
        True
    """
    places = [_PACKAGE, os.path.join(os.path.dirname(_PACKAGE), *shipped.folder.split("/"))]
    for place in places:
        path = os.path.join(place, shipped.file)
        if os.path.isfile(path):
            return path
    raise WeightsError(
        f"the weights of {shipped.name} are not where hookscope is installed",
        f"no {shipped.file} in {' or '.join(places)}",
        "install hookscope anew, or use --weights none",
    )
