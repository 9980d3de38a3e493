"""What safetensors files say of themselves: read as the package reads it, and believed only where it can be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.functional import to_pil_image

from hookscope.errors import WeightsError
from hookscope.models.metadata import (
    Description,
    WeightsMetadata,
    count_parameters,
    read_description,
    read_header,
    read_metadata,
)
from hookscope.models.preprocess import Preprocess
from hookscope.models.transforms import imagenet_transforms

ROOT = Path(__file__).parents[2]
WHOLE: dict[str, Any] = {
    "model": "squeezenet1_1",
    "categories": ["circle", "five-pointed star"],
    "resize_size": 128,
    "crop_size": 112,
    "mean": [0.5, 0, -0.25],
    "std": [1, 2.5, 0.25],
    "accuracy": 0.75,
    "held_out": 2000,
}


def write(folder: Path, content: Any, name: str = "own.safetensors") -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    save_file({"weight": torch.zeros(2, 3), "scale": torch.zeros(())}, folder / name, {"hookscope": text})
    return folder / name


def test_the_header_is_that_of_the_package(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    header = read_header(path)
    with safe_open(path, "pt") as judge:
        assert set(header) == {*judge.keys(), "__metadata__"}
        assert header["__metadata__"] == judge.metadata()
        assert header["weight"]["shape"] == judge.get_slice("weight").get_shape() == [2, 3]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02",
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x09\0\0\0\0\0\0\0{"a": 1',
        b"\xff" * 64,
        b"\x03\0\0\0\0\0\0\0\xff\xfe\xfd",
        b"\xa0\x86\x01\0\0\0\0\0" + b"[" * 100_000,
    ],
    ids=["empty", "one byte", "a list", "cut short", "ones", "no text", "deep"],
)
def test_other_files_have_no_header_and_no_description(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "own").write_bytes(content)
    assert read_header(tmp_path / "own") == {}
    assert read_description(tmp_path / "own") is None
    assert read_header(tmp_path) == read_header(tmp_path / "nothing") == {}


def test_parameters_are_counted_without_running_statistics(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5), torch.nn.BatchNorm2d(4))
    save_file(net.state_dict(), tmp_path / "own.safetensors", {"by": "me"})
    count = count_parameters(read_header(tmp_path / "own.safetensors"))
    assert count == sum(parameter.numel() for parameter in net.parameters()) == 312


@pytest.mark.parametrize(
    "header", [{}, {"__metadata__": {}}, {"a": 3}, {"a": {"shape": None}}, {"a": {"shape": ["x"]}}]
)
def test_a_header_of_nonsense_counts_nothing(header: dict[str, Any]) -> None:
    assert count_parameters(header) is None


def test_a_whole_description(tmp_path: Path) -> None:
    assert read_description(write(tmp_path, WHOLE)) == Description(
        model="squeezenet1_1",
        categories=("circle", "five-pointed star"),
        resize_size=128,
        crop_size=112,
        mean=(0.5, 0, -0.25),
        std=(1, 2.5, 0.25),
        accuracy=0.75,
        held_out=2000,
    )


def test_every_entry_is_optional_but_those_of_the_transforms_go_together(tmp_path: Path) -> None:
    assert read_description(write(tmp_path, {})) == Description()
    assert read_description(write(tmp_path, {"categories": ["a"], "of a later day": 3})) == Description(
        categories=("a",)
    )
    for name in ("resize_size", "crop_size", "mean", "std"):
        part = {key: value for key, value in WHOLE.items() if key != name}
        with pytest.raises(WeightsError, match=f"mean, std go together, but {name} is missing$"):
            read_description(write(tmp_path, part))


def test_a_file_without_a_description(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "bare.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors", {"format": "pt"})
    torch.save({"a": torch.zeros(1)}, tmp_path / "own.pth")
    assert [read_description(path) for path in tmp_path.iterdir()] == [None] * 3


NONSENSE: dict[str, list[Any]] = {
    "it is not a JSON object": ["", "[" * 100_000, []],
    "model is not a name": [{"model": 3}],
    "categories is not a list of names": [{"categories": wrong} for wrong in ([], ["a", 3], ["b\nc"], ["\ud83d"])],
    "resize_size is not a number of pixels": [WHOLE | {"resize_size": 0}],
    "crop_size is not a number of pixels": [WHOLE | {"crop_size": wrong} for wrong in (128.0, True, 10**9)],
    "mean is not three numbers": [WHOLE | {"mean": [0.5, 0.5, *wrong]} for wrong in ([], [float("nan")], [10**400])],
    "std is not three numbers above 0": [WHOLE | {"std": wrong} for wrong in ([1, 1, 0], [True] * 3)],
    "accuracy is not a share between 0 and 1": [WHOLE | {"accuracy": wrong} for wrong in (98.15, None)],
    "held_out is not a number of pictures": [WHOLE | {"held_out": 0.5}],
}


@pytest.mark.parametrize("reason", NONSENSE)
def test_a_description_that_makes_no_sense(tmp_path: Path, reason: str) -> None:
    for content in NONSENSE[reason]:
        path = write(tmp_path, content)
        with pytest.raises(WeightsError) as caught:
            read_description(path)
        assert str(caught.value) == f"{path} has an invalid description of its model: {reason}"


TRANSFORMS = {"resize_size": 64, "crop_size": 32, "mean": [0.5, 0.25, 0.75], "std": [1.0, 2.0, 4.0]}
USUAL = WeightsMetadata(imagenet_transforms(), ("cat", "dog"), ("before",))


def test_class_names_and_transforms_come_from_the_file(tmp_path: Path) -> None:
    metadata = read_metadata(str(write(tmp_path, {"categories": ["a", "b"]} | TRANSFORMS)), 2, USUAL)
    assert (metadata.categories, metadata.notes) == (("a", "b"), ("before",))
    picture = to_pil_image(torch.rand(3, 50, 80))
    own = ImageClassification(crop_size=32, resize_size=64, mean=(0.5, 0.25, 0.75), std=(1.0, 2.0, 4.0))
    assert torch.equal(Preprocess("classification", metadata.transforms)(picture), own(picture))


def test_a_missing_entry_is_the_usual_one(tmp_path: Path) -> None:
    names = read_metadata(str(write(tmp_path, {"categories": ["a"]})), 1, USUAL)
    assert (names.categories, names.transforms) == (("a",), USUAL.transforms)
    transforms = read_metadata(str(write(tmp_path, TRANSFORMS)), 7, USUAL)
    assert (transforms.categories, transforms.transforms.resize.crop) == (USUAL.categories, (32, 32))
    for family, content in (("classification", {}), ("segmentation", {"model": "fcn_resnet50", "accuracy": 0.5})):
        assert read_metadata(str(write(tmp_path, content)), 2, USUAL, family) == USUAL
    unknown = read_metadata(str(write(tmp_path, {"categories": ["a", "b", "c"]})), None, USUAL)
    assert unknown.categories == ("a", "b", "c")


@pytest.mark.parametrize(
    ("content", "family", "note"),
    [
        (["no object"], "classification", "has an invalid description of its model: it is not a JSON object"),
        ({"categories": ["a"]}, "classification", "has 1 class name for 2 outputs"),
        (TRANSFORMS, "optical_flow", "describes a classification model, but the model is for optical flow"),
    ],
)
def test_a_wrong_description_is_noted_and_ignored(tmp_path: Path, content: Any, family: str, note: str) -> None:
    content = content | TRANSFORMS if isinstance(content, dict) else content
    path = str(write(tmp_path, content))
    metadata = read_metadata(path, 2, USUAL, family)
    assert (metadata.transforms, metadata.categories) == (USUAL.transforms, USUAL.categories)
    assert metadata.notes == ("before", f"{path} {note}; the description is ignored")
