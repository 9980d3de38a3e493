"""Where a picture comes from: model, weights, image and preprocessing, as facts and in words."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import nn

from hookscope.images import InputImage
from hookscope.models import LoadedModel, is_random, package_versions


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a picture comes from; ``second`` is the name and SHA-256 of the other image of optical flow."""

    model: str
    weights: str
    image: str
    sha256: str
    preprocess: str
    second: tuple[str, str] | None = None

    @classmethod
    def of(cls, net: LoadedModel | nn.Module | None, *pictures: InputImage | Image.Image | None) -> Origin:
        """The origin of a page on one picture, or on the two of optical flow; what is not known is empty."""
        named = [(picture.name, picture.sha256) for picture in pictures if isinstance(picture, InputImage)]
        first, *others = named or [("", "")]
        if isinstance(net, LoadedModel):
            about = net.name, net.weights, net.preprocess.describe()
        else:
            about = "" if net is None else type(net).__name__, "", ""
        return cls(*about[:2], *first, about[2], others[0] if others else None)

    def facts(self) -> dict[str, Any]:
        """The first entries of every provenance: versions, model, weights, image and preprocessing."""
        second = self.second and {"image": os.path.basename(self.second[0]), "sha256": self.second[1]}
        return {
            **package_versions(),
            "model": self.model,
            "weights": self.weights,
            "image": os.path.basename(self.image),
            "sha256": self.sha256,
            "preprocess": self.preprocess,
            **({"second": second} if second else {}),
        }

    @property
    def images(self) -> str:
        """The names of the images without their folders."""
        return " and ".join(os.path.basename(name) or name for name in (self.image, *(self.second or ())[:1]))

    @property
    def is_random(self) -> bool:
        """Whether the weights are random."""
        return is_random(self.weights)

    @property
    def alarm(self) -> str:
        """A line in red for random weights, empty for others."""
        return f"weights: {self.weights}, the network is not trained" if self.is_random else ""

    @property
    def words(self) -> list[str]:
        """Weights that are not random, image and preprocessing, as far as they are known."""
        weights = "" if self.is_random or not self.weights else f"weights: {self.weights}"
        preprocess = f"preprocessing: {self.preprocess}" if self.preprocess else ""
        return [word for word in (weights, self.images, preprocess) if word]
