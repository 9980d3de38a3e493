"""The weights argument as a type."""

from pathlib import Path

import pytest
from torchvision.models import ResNet18_Weights

from hookscope.errors import UsageError
from hookscope.models.model_source import WEIGHTS_WORDS, WeightsChoice, WeightsKind, is_random, random_label


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
