"""Class names from files: lines, the usual forms of JSON, and everything else."""

import json
from pathlib import Path
from typing import Any

import pytest
from torchvision.models import ResNet18_Weights

from hookscope.errors import CategoriesError
from hookscope.scores import categories
from hookscope.scores.categories import read_categories


def written(folder: Path, content: str | bytes | Any, name: str = "names.txt") -> Path:
    path = folder / name
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error_of(path: Any) -> str:
    with pytest.raises(CategoriesError) as caught:
        read_categories(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cat\nred fox\n", ("cat", "red fox")),
        ("cat\r\n dog \r\n\r\n\n  \n", ("cat", "dog")),
        ("\ufeffcafé\nтигр\n猫\n", ("café", "тигр", "猫")),
        ("a line\u2028with a separator\nb", ("a line\u2028with a separator", "b")),  # splitlines() makes three of it
        ("n01440764 tench, Tinca tinca\n0: gold\n", ("n01440764 tench, Tinca tinca", "0: gold")),
        ("cat\n[dog]\n", ("cat", "[dog]")),
    ],
)
def test_lines(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    assert read_categories(written(tmp_path, text)) == names
    assert read_categories(str(tmp_path / "names.txt")) == names


@pytest.mark.parametrize(
    ("held", "names"),
    [
        (["cat", "red fox"], ("cat", "red fox")),
        ({"0": "tench", "1": "goldfish"}, ("tench", "goldfish")),
        ({"1": ["n01443537", "goldfish"], "0": ["n01440764", "tench"]}, ("tench", "goldfish")),
        ({str(index): f"class {index}" for index in reversed(range(12))}, tuple(f"class {n}" for n in range(12))),
        (["é \u2028"], ("é \u2028",)),
    ],
)
@pytest.mark.parametrize("name", ["names.json", "names.txt"])
def test_json(tmp_path: Path, held: Any, names: tuple[str, ...], name: str) -> None:
    assert read_categories(written(tmp_path, held, name)) == names
    assert read_categories(written(tmp_path, "\n  " + json.dumps(held, indent=2) + "\n", name)) == names


@pytest.mark.parametrize(
    "held",
    [
        {"tench": 0, "goldfish": 1},
        {"0": "tench", "2": "goldfish"},
        {"0": "tench", "00": "goldfish"},
        {"0": ["n01440764", "tench", "fish"]},
        {"categories": ["tench"]},
        ["tench", 1],
        [None],
    ],
)
def test_json_of_another_form(tmp_path: Path, held: Any) -> None:
    error = error_of(written(tmp_path, held))
    assert "is JSON of another form; class names are a list of names, " in error


ERRORS = {
    "holds no class names: it is empty": ["", "\n\n  \n", "\ufeff", "[]", "{}"],
    # a class without a name would shift the others
    "has no name for class 1; there are 3 classes": [
        "cat\n\ndog\n",
        ["cat", "", "dog"],
        {"0": "a", "1": " ", "2": "b"},
    ],
    "is not valid JSON: ": ['["cat", ', "{cat}"],
    "nested too deep": ["[" * 200_000],
    "is not UTF-8 text": [b"caf\xe9\n", "cat\ndog".encode("utf-16"), b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"],
    "is not text": [b"cat\0dog"],
}


@pytest.mark.parametrize("reason", ERRORS)
def test_a_wrong_content_is_refused(tmp_path: Path, reason: str) -> None:
    for content in ERRORS[reason]:
        assert reason in error_of(written(tmp_path, content))


def test_missing_unreadable_and_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of(tmp_path / "nope.txt") == (
        f"no file '{tmp_path / 'nope.txt'}' with class names; give a file, or imagenet for the classes of ImageNet"
    )
    assert error_of(tmp_path).endswith(": Is a directory")
    assert "cannot read the class names in" in error_of("a\0b")
    assert "cannot read the class names in" in error_of("x" * 5000)
    assert error_of(written(tmp_path, "x") / "y").endswith(": Not a directory")
    monkeypatch.setattr(categories, "MAX_BYTES", 5)
    assert read_categories(written(tmp_path, "a\nb\nc")) == ("a", "b", "c")
    assert "is too large for class names" in error_of(written(tmp_path, "a\nb\ncd"))


def test_the_names_of_imagenet_are_those_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = read_categories("imagenet")
    assert names == tuple(ResNet18_Weights.DEFAULT.meta["categories"]) and len(names) == 1000
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagenet").write_text("mine\n")
    assert read_categories("imagenet") == ("mine",)
