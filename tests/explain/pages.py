"""A photograph and a model for the pages of maps, and what was handed to the page that was drawn last."""

import inspect
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from hookscope.drawing.heat import HeatPanel, draw_heat_page
from hookscope.explain import page
from hookscope.images import InputImage
from hookscope.models.loaded import LoadedModel
from hookscope.models.metadata import WeightsMetadata
from hookscope.scores.logits import Prediction

TABBY = Prediction(281, "tabby", 12.25, 0.875)
UNSEEN = Prediction(7, None, -1.5, 0.006, 0.875)
SAYS_UNSEEN = "the model does not see this class: it has 0.6 %, the best class 87.5 %"
SAYS_RANDOM = "the weights are random: class and map mean nothing"
VALUES = np.arange(49, dtype=np.float32).reshape(7, 7)


def picture(width: int = 400, height: int = 300) -> InputImage:
    image = Image.new("RGB", (width, height), (200, 10, 10))
    return InputImage(image, "a/cat.jpg", "ab" * 32, (), (image,))


def net(weights: str = "DEFAULT") -> LoadedModel:
    return LoadedModel.of(nn.Conv2d(3, 1, 1), "resnet34", weights, WeightsMetadata(), "classification")


BOX = net().preprocess.visible_box(400, 300)


class Drawn(dict[str, Any]):
    """The arguments of the last page."""

    @property
    def words(self) -> list[str]:
        return list(self["heading"].words)

    @property
    def panels(self) -> list[HeatPanel]:
        return [panel for row in self["rows"] for panel in row.panels]

    @property
    def maps(self) -> list[HeatPanel]:
        return [panel for panel in self.panels if panel.heat is not None]

    @property
    def only(self) -> HeatPanel:
        [panel] = self.panels
        return panel


def record_page(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    arguments, draw = Drawn(), draw_heat_page
    signature = inspect.signature(draw)

    def record(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        arguments.update(bound.arguments)
        return draw(*args, **options)

    monkeypatch.setattr(page, "draw_heat_page", record)
    return arguments
