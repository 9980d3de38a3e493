"""Which pictures are near-duplicates: real photographs and drawings, their copies, and others."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from hookscope.exemplars.duplicates import Duplicates, prints_of
from samples.shapes.draw import draw

SAMPLES = Path(__file__).parents[2] / "samples"


def tensor(image: Image.Image, side: int) -> torch.Tensor:
    """Prepared as torchvision does it: a square, ImageNet's mean and standard deviation."""
    values = torch.from_numpy(np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)).copy())
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((values / 255 - mean) / std).permute(2, 0, 1)


def near(one: Image.Image, other: Image.Image, side: int = 128) -> bool:
    prints = np.concatenate([prints_of(tensor(image, side)[None]) for image in (one, other)])
    return bool(Duplicates(prints)(np.array([0]), np.array([1]))[0])


PICTURES = {
    **{name: Image.open(SAMPLES / f"{name}.jpg").convert("RGB") for name in ("cat", "coffee", "rocket")},
    **{f"drawing {number}": draw(0, number).image for number in range(10)},
}


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(stream)


COPIES = {
    "the same": lambda image: image,
    "JPEG 95": lambda image: as_jpeg(image, 95),
    "JPEG 75": lambda image: as_jpeg(image, 75),
    "JPEG 50": lambda image: as_jpeg(image, 50),
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "twice the size": lambda image: image.resize((image.width * 2, image.height * 2), Image.Resampling.LANCZOS),
    "one level brighter": lambda image: image.point(lambda level: min(level + 1, 255)),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_near_duplicates(copy: str) -> None:
    assert [name for name, image in PICTURES.items() if not near(image, COPIES[copy](image))] == []


def test_different_pictures_are_none() -> None:
    prints = np.concatenate([prints_of(tensor(image, 128)[None]) for image in PICTURES.values()])
    one, other = np.triu_indices(len(prints), 1)
    assert not Duplicates(prints)(one, other).any()


@pytest.mark.parametrize("number", range(4))
def test_two_objects_on_one_background_are_none(number: int) -> None:
    drawings = [draw(0, number, label).image for label in range(10)]
    prints = np.concatenate([prints_of(tensor(image, 128)[None]) for image in drawings])
    one, other = np.triu_indices(len(prints), 1)
    assert not Duplicates(prints)(one, other).any()


def test_one_shape_drawn_at_two_places_of_a_background_is_none() -> None:
    background = Image.open(SAMPLES / "coffee.jpg").convert("RGB").resize((128, 128))
    drawn = []
    for x, colour in ((30, "red"), (38, "red"), (30, "blue")):
        drawn.append(background.copy())
        ImageDraw.Draw(drawn[-1]).regular_polygon((x, 60, 20), 3, fill=colour)
    assert not near(drawn[0], drawn[1])
    assert not near(drawn[0], drawn[2])


def test_plain_colours_differ_and_images_with_nan_are_near_duplicates_of_themselves_only() -> None:
    plain = [Image.new("RGB", (8, 8), colour) for colour in ("black", "white", "red", "orange")]
    prints = np.concatenate([prints_of(tensor(image, 32)[None]) for image in plain])
    one, other = np.triu_indices(4, 1)
    assert not Duplicates(prints)(one, other).any()
    lost = prints_of(torch.full((2, 3, 8, 8), torch.nan))
    assert Duplicates(lost)(np.array([0, 0]), np.array([0, 1])).tolist() == [True, False]


@pytest.mark.parametrize(
    "images",
    [torch.rand(2, 3, 5, 40, 30), torch.rand(2, 7), [torch.rand(3, 20, 30), torch.rand(3, 50, 9)]],
    ids=["clips", "vectors", "list"],
)
def test_every_kind_of_input_has_a_hash(images: object) -> None:
    prints = prints_of(images)
    assert len(prints) == 2
    assert Duplicates(prints)(np.array([0, 0]), np.array([0, 1])).tolist() == [True, False]
