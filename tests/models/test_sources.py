"""The registry of model sources: one entry is all that a new source needs, and names are checked without torch.

The weights argument is a type.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch import nn
from torchvision.models import ResNet18_Weights

from hookscope.cli.main import cli
from hookscope.errors import ModelError, UsageError
from hookscope.models import sources
from hookscope.models.load import load_model
from hookscope.models.model_source import WEIGHTS_WORDS, MadeSource, WeightsChoice, WeightsKind, is_random, random_label
from hookscope.models.names import torchvision_names
from hookscope.models.sources import EfficientNetLiteSource, find_source, model_names

ROOT = Path(__file__).parents[2]


def test_each_kind_of_text_has_its_source() -> None:
    texts = ("shapes", "timm:resnet18", "package.module:make", "net.py:make", "resnet34", "quantized:resnet18")
    texts += ("ultralytics:yolov8n",)
    kinds = ["BundledSource", "TimmSource", "PythonSource", "PythonSource", "TorchvisionSource", "QuantizedSource"]
    kinds += ["UltralyticsSource"]
    assert [type(find_source(text)).__name__ for text in texts] == kinds


def test_the_names_are_those_of_torchvision_and_the_bundled_ones() -> None:
    quantized = [name.replace("_", ":", 1) for name in torchvision_names() if name.startswith("quantized_")]
    own = {*torchvision_names(), "shapes", *quantized, *EfficientNetLiteSource.names()}
    assert model_names() == tuple(sorted(own))


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ModelError, match="no model 'shape'; nearest: shapes; see `hookscope list-models`"):
        find_source("shape")
    with pytest.raises(ModelError, match=r"a file needs a factory; write path/to/file\.py:factory"):
        find_source("own/net")


def test_names_are_checked_and_completed_without_torch() -> None:
    code = (
        "import sys; from hookscope.errors import ModelError\n"
        "from hookscope.models import class_names_of, find_source\n"
        "find_source('timm:x'), find_source('net.py:make'), class_names_of('shapes'), class_names_of('resnet18')\n"
        "try: find_source('resnet35')\n"
        "except ModelError as error: print(error, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("no model 'resnet35'; nearest: ")
    assert "resnet34" in answer.stdout and answer.stdout.endswith("list-models` False\n")


class ToySource(MadeSource):
    prefix, family = "toy-", "segmentation"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return ("toy-4",)

    def class_names(self) -> tuple[str, ...]:
        return ("a", "b", "c", "d")

    def make(self, pretrained: bool) -> nn.Module:
        return nn.Conv2d(3, int(self.name), 1)


def test_a_new_source_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SOURCES", [*sources.SOURCES, ToySource])
    assert "toy-4" in model_names()
    with pytest.raises(ModelError, match="no model 'toy4'; nearest: toy-4"):
        load_model("toy4")
    net = load_model("toy-4", weights="none", device="cpu")
    assert (net.model.out_channels, net.weights, net.categories) == (4, "random (seed 0)", ("a", "b", "c", "d"))
    assert (net.family, net.preprocess.describe()) == ("segmentation", "assumed resize 520, ImageNet mean and std")
    assert not net.model.training
    listed = CliRunner().invoke(cli, ["list-layers", "toy-4", "--format", "tsv"])
    assert listed.stdout.splitlines()[1].split("\t")[5:8] == ["1x3x520x520", "1x4x520x520", "16"], listed.output


def test_words_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*WEIGHTS_WORDS, "tuned"):
        (tmp_path / name).write_text("")
    for word in ("auto", "default", "none"):  # whatever lies in the folder
        assert WeightsChoice.parse(word) == WeightsChoice(WeightsKind(word), word)
    assert WeightsChoice.parse("IMAGENET1K_V1").kind is WeightsKind.NAME
    for file in ("tuned", "a.pt", "./auto", "no/such", "x.safetensors"):
        assert WeightsChoice.parse(file) == WeightsChoice(WeightsKind.FILE, file)


def test_values_of_python_callers() -> None:
    assert WeightsChoice.parse(None).kind is WeightsKind.NONE
    assert WeightsChoice.parse(ResNet18_Weights.DEFAULT) == WeightsChoice(WeightsKind.NAME, "IMAGENET1K_V1")
    assert WeightsChoice.parse(Path("runs/epoch-3")) == WeightsChoice(WeightsKind.FILE, "runs/epoch-3")
    choice = WeightsChoice.parse("auto")
    assert WeightsChoice.parse(choice) is choice
    with pytest.raises(UsageError, match="weights must be a word, a name or a file, not int"):
        WeightsChoice.parse(3)


@pytest.mark.parametrize("text", ["default", "IMAGENET1K_V1"])
def test_sources_without_weights_names_refuse_them(text: str) -> None:
    with pytest.raises(UsageError, match=f"net.py:make has no torchvision weights '{text}'; use auto, none or a"):
        WeightsChoice.parse(text).refuse_names("net.py:make")
    WeightsChoice.parse("none").refuse_names("net.py:make")


def test_a_file_whose_name_begins_with_random_is_not_random_weights() -> None:
    assert is_random(random_label(3)) and is_random("random")
    assert not any(map(is_random, ("random_erasing.pth", "random.pth (3 keys)", "random (1).pth", "IMAGENET1K_V1")))
