"""``ultralytics:NAME`` as MODEL."""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.errors import ModelError, UsageError, WeightsError
from hookscope.models.load import load_model

HAS_ULTRALYTICS = importlib.util.find_spec("ultralytics") is not None


@pytest.mark.skipif(HAS_ULTRALYTICS, reason="ultralytics is installed")
def test_without_ultralytics_it_says_so() -> None:
    with pytest.raises(ModelError, match=r"needs the package ultralytics; pip install ultralytics$"):
        load_model("ultralytics:yolov8n")


def test_a_pickled_model_is_not_read() -> None:
    with pytest.raises(ModelError, match=r"^best\.pt is a pickled model, which runs code .*weights=FILE to"):
        load_model("ultralytics:best.pt")


class DetectionModel(nn.Module):
    """The head of a detector, as far as a checkpoint is about it."""

    def __init__(self, config: dict, nc: int | None = None, verbose: bool = True) -> None:
        super().__init__()
        assert not verbose
        self.cv3 = nn.ModuleList([nn.Sequential(nn.Identity(), nn.Identity(), nn.Conv2d(3, nc or config["nc"], 1))])
        self.names = dict(enumerate(("car", "dog")))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in with the names of ultralytics that are used."""
    tasks = types.ModuleType("ultralytics.nn.tasks")
    tasks.__file__ = str(tmp_path / "nn" / "tasks.py")
    heads = {"yolov8": "Detect", "yolov8-cls": "Classify"}
    for name in heads:
        path = tmp_path / "cfg" / "models" / "v8" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    DetectionModel.__module__ = "ultralytics.nn.tasks"
    tasks.DetectionModel = DetectionModel
    tasks.yaml_model_load = lambda name: {"nc": 2, "head": [[-1, 1, heads[name.replace("8n", "8")[:-5]], ["nc"]]]}
    for name, module in (("ultralytics", types.ModuleType("ultralytics")), ("ultralytics.nn", types.ModuleType("nn"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ultralytics.nn.tasks", tasks)
    return tmp_path


def test_a_model_of_ultralytics(package: Path) -> None:
    net = load_model("ultralytics:yolov8n", seed=2)
    assert (net.family, net.categories, net.weights) == ("batched_detection", ("car", "dog"), "random (seed 2)")
    assert net.preprocess.describe() == "pad to 640x640, range 0..1"
    assert net.notes[0].startswith("weights of ultralytics:yolov8n are random (seed 2): trained ones are pickled")
    own = DetectionModel({"nc": 5}, verbose=False)
    torch.save(own.state_dict(), package / "own.pth")
    loaded = load_model("ultralytics:yolov8", weights=f"{package}/own.pth")
    assert torch.equal(loaded.model.cv3[0][2].weight, own.cv3[0][2].weight) and not loaded.notes


@pytest.mark.parametrize(
    ("name", "weights", "error", "words"),
    [
        ("yolo8n", "auto", ModelError, "no ultralytics model 'yolo8n'; nearest: yolov8"),
        ("../v8/yolov8", "auto", ModelError, "no ultralytics model '../v8/yolov8'"),
        ("yolov8n-cls", "auto", ModelError, "is not a detector or segmentation model; its head is Classify"),
        ("yolov8n", "default", WeightsError, "no weights for ultralytics:yolov8n: trained ones are pickled"),
        ("yolov8n", "V1", UsageError, "has no torchvision weights 'V1'"),
    ],
)
def test_what_the_package_lacks_is_refused(
    package: Path, name: str, weights: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        load_model(f"ultralytics:{name}", weights=weights)
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["yolov8n", "yolov8n-seg", "yolo26n", "yolo26n-sem", "rtdetr-resnet50"])
def test_the_installed_package(name: str, tmp_path: Path) -> None:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    from ultralytics.data.augment import LetterBox

    loaded = load_model(f"ultralytics:{name}", weights="none", device="cpu")
    picture = Image.linear_gradient("L").resize((300, 200)).convert("RGB")
    prepared = loaded.preprocess(picture)
    grey = LetterBox(640, auto=False, scale_fill="rtdetr" in name)(image=np.array(picture))
    assert (prepared - torch.tensor(grey).permute(2, 0, 1) / 255).abs().max() < 0.03
    assert loaded.family == ("segmentation" if "sem" in name else "batched_detection")
    if name == "yolov8n":
        torch.manual_seed(1)
        other = tasks.DetectionModel("yolov8n.yaml", nc=3, verbose=False).eval()
        torch.save(other.state_dict(), tmp_path / "three.pth")
        torch.save({"model": other}, tmp_path / "three.pt")
        own = load_model(f"ultralytics:{name}", weights=tmp_path / "three.pth", device="cpu")
        with torch.no_grad():
            assert torch.equal(own.model(prepared[None])[0], other(prepared[None])[0])
        with pytest.raises(WeightsError, match="more than weights"):
            load_model(f"ultralytics:{name}", weights=tmp_path / "three.pt")
