"""Directions for use: what a file says is taken, what it leaves out is the usual, what cannot be is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torchvision.transforms._presets import ImageClassification

from hookscope.models.directions import WeightsMetadata, directions_in

TRANSFORMS = {"resize_size": 64, "crop_size": 32, "mean": [0.5, 0.25, 0.75], "std": [1.0, 2.0, 4.0]}
USUAL = WeightsMetadata(ImageClassification(crop_size=224), ("cat", "dog"), ("before",))


def write(folder: Path, said: Any) -> str:
    save_file({"a": torch.zeros(1)}, folder / "own.safetensors", {"hookscope": json.dumps(said)})
    return str(folder / "own.safetensors")


def test_both_are_taken_from_the_file(tmp_path: Path) -> None:
    found = directions_in(write(tmp_path, {"categories": ["a", "b"]} | TRANSFORMS), 2, USUAL)
    assert (found.categories, found.notes) == (("a", "b"), ("before",))
    picture = torch.rand(3, 50, 80)
    own = ImageClassification(crop_size=32, resize_size=64, mean=(0.5, 0.25, 0.75), std=(1.0, 2.0, 4.0))
    assert torch.equal(found.transforms(picture), own(picture))


def test_what_is_left_out_is_the_usual(tmp_path: Path) -> None:
    names = directions_in(write(tmp_path, {"categories": ["a"]}), 1, USUAL)
    assert (names.categories, names.transforms) == (("a",), USUAL.transforms)
    transforms = directions_in(write(tmp_path, TRANSFORMS), 7, USUAL)
    assert (transforms.categories, transforms.transforms.crop_size) == (USUAL.categories, [32])
    assert directions_in(write(tmp_path, {}), 2, USUAL) == USUAL


def test_where_the_number_of_classes_is_not_known_the_names_are_believed(tmp_path: Path) -> None:
    assert directions_in(write(tmp_path, {"categories": ["a", "b", "c"]}), None, USUAL).categories == ("a", "b", "c")


@pytest.mark.parametrize(
    ("said", "family", "note"),
    [
        (["no object"], "classification", "describes its model in a way that makes no sense: it is no JSON object"),
        ({"categories": ["a"]}, "classification", "has 1 class name for 2 outputs"),
        (
            {"categories": ["a", "b"]},
            "segmentation",
            "describes a model that classifies, and this one is for segmentation",
        ),
        (TRANSFORMS, "optical_flow", "describes a model that classifies, and this one is for optical flow"),
    ],
)
def test_what_cannot_be_is_noted_and_none_of_it_believed(tmp_path: Path, said: Any, family: str, note: str) -> None:
    said = said | TRANSFORMS if isinstance(said, dict) else said
    path = write(tmp_path, said)
    found = directions_in(path, 2, USUAL, family)
    assert (found.transforms, found.categories) == (USUAL.transforms, USUAL.categories)
    assert found.notes == ("before", f"{path} {note}; its description is left aside")


def test_a_name_and_an_accuracy_fit_every_family(tmp_path: Path) -> None:
    path = write(tmp_path, {"model": "fcn_resnet50", "accuracy": 0.5})
    assert directions_in(path, 21, USUAL, "segmentation") == USUAL
