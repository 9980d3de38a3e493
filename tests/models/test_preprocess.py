"""Photograph to tensor, judged by torchvision's own transforms and by Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import models
from torchvision.transforms import functional as F

from hookscope.errors import InputError
from hookscope.models.preprocess import Preprocess, imagenet_transforms, usual_transforms


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """Smooth and in colour, wider than high."""
    y, x = np.mgrid[0:150, 0:200]
    values = np.stack([x * 255 / 200, y * 255 / 150, 127 + 100 * np.sin(x / 9 + y / 13)], axis=-1)
    return Image.fromarray(values.astype(np.uint8))


WEIGHTS = [
    models.ResNet50_Weights.IMAGENET1K_V1,
    models.ViT_H_14_Weights.IMAGENET1K_SWAG_E2E_V1,
]


@pytest.mark.parametrize("entry", WEIGHTS, ids=str)
def test_weights_mode_is_torchvisions_own(photograph: Image.Image, entry: Any) -> None:
    own = entry.transforms()
    prepare = Preprocess("classification", own)
    assert torch.equal(prepare(photograph), own(photograph))
    assert prepare.describe() == f"ImageClassification resize {own.resize_size[0]} crop {own.crop_size[0]}"


def test_other_families_are_torchvisions_own(photograph: Image.Image) -> None:
    detection = models.detection.FasterRCNN_ResNet50_FPN_Weights.DEFAULT.transforms()
    assert torch.equal(Preprocess("detection", detection)(photograph), detection(photograph))
    segmentation = models.segmentation.FCN_ResNet50_Weights.DEFAULT.transforms()
    assert torch.equal(Preprocess("segmentation", segmentation)(photograph), segmentation(photograph))
    assert Preprocess("segmentation", segmentation)(photograph).shape == (3, 520, 693)
    video = models.video.R3D_18_Weights.DEFAULT.transforms()
    frames = torch.stack([F.pil_to_tensor(photograph)] * 16)
    assert torch.equal(Preprocess("video", video, frames=16)(photograph), video(frames))
    flow = models.optical_flow.Raft_Small_Weights.DEFAULT.transforms()
    same = photograph.resize((200, 152))
    assert torch.equal(Preprocess("optical_flow")(same), flow(same, same)[0])


def test_stretch_is_resize_and_division(photograph: Image.Image) -> None:
    prepare = Preprocess("classification", imagenet_transforms(), "stretch")
    resized = np.asarray(photograph.resize((224, 224), Image.Resampling.BILINEAR), dtype=np.float32)
    assert torch.equal(prepare(photograph), torch.from_numpy(resized / 255).permute(2, 0, 1))
    assert prepare.describe() == "stretch 224x224, range [0, 1]"
    sized = Preprocess("classification", imagenet_transforms(), "stretch", size=(33, 57))
    assert sized(photograph).shape == (3, 33, 57)


def test_mode_none_keeps_the_size(photograph: Image.Image) -> None:
    prepare = Preprocess("classification", imagenet_transforms(), "none", size=(9, 9))
    expected = torch.from_numpy(np.asarray(photograph, dtype=np.float32) / 255).permute(2, 0, 1)
    assert torch.equal(prepare(photograph), expected)
    assert prepare.describe() == "none: own size, range [0, 1]"


@pytest.mark.parametrize("size", [(33, 57), (300, 64), (1, 1)])
@pytest.mark.parametrize("family", ["classification", "segmentation", "detection"])
def test_the_output_has_the_input_size(photograph: Image.Image, family: str, size: tuple[int, int]) -> None:
    transforms = usual_transforms(family)
    before = dict(vars(transforms))
    prepare = Preprocess(family, transforms, size=size)
    assert prepare(photograph).shape == (3, *size)
    assert vars(transforms) == before
    assert prepare.describe().endswith(f" {size[0]}x{size[1]}")


def test_a_square_size_scales_the_resize_too(photograph: Image.Image) -> None:
    own = imagenet_transforms(crop=112, resize=128)
    prepare = Preprocess("classification", imagenet_transforms(), size=(112, 112))
    assert torch.equal(prepare(photograph), own(photograph))


def test_a_size_that_is_not_square_keeps_proportions() -> None:
    """A circle stays as high as it is wide."""
    y, x = np.mgrid[0:300, 0:300]
    disc = ((x - 150) ** 2 + (y - 150) ** 2 < 40**2) * np.uint8(255)
    tensor = Preprocess("classification", imagenet_transforms(), size=(120, 240))(Image.fromarray(disc).convert("RGB"))
    bright = tensor[0] > 0
    assert abs(int(bright.any(0).sum()) - int(bright.any(1).sum())) <= 2


@pytest.mark.parametrize("mode", ["weights", "stretch", "none"])
@pytest.mark.parametrize("size", [None, (96, 128)])
def test_clips(photograph: Image.Image, mode: str, size: tuple[int, int] | None) -> None:
    prepare = Preprocess("video", usual_transforms("video"), mode, size, default_size=(112, 112), frames=16)
    expected = (150, 200) if mode == "none" else size or (112, 112)
    assert prepare(photograph).shape == (3, 16, *expected)
    frames = [photograph.point(lambda value, at=at: min(255, value + at)) for at in range(16)]
    clip = prepare(frames)
    assert float((clip[:, 0] - clip[:, 15]).abs().max()) > 0
    assert torch.equal(prepare([photograph])[:, 3], prepare(photograph)[:, 0])


@pytest.mark.parametrize(
    ("high", "wide", "expected"),
    [(150, 200, (152, 200)), (100, 50, (128, 128)), (360, 640, (360, 640)), (3000, 4000, (768, 1024))],
)
def test_optical_flow_sizes(high: int, wide: int, expected: tuple[int, int]) -> None:
    tensor = Preprocess("optical_flow")(Image.new("RGB", (wide, high), (255, 0, 128)))
    assert tensor.shape == (3, *expected)
    assert (float(tensor.min()), float(tensor.max())) == (-1.0, 1.0)


def test_optical_flow_with_a_size(photograph: Image.Image) -> None:
    prepare = Preprocess("optical_flow", size=(128, 256))
    assert prepare(photograph).shape == (3, 128, 256)
    assert prepare.describe() == "OpticalFlow 128x256"


@pytest.mark.parametrize("family", ["classification", "segmentation", "detection", "video", "optical_flow"])
@pytest.mark.parametrize("mode", ["weights", "stretch"])
def test_denormalise_undoes_the_normalisation(photograph: Image.Image, family: str, mode: str) -> None:
    options = {"size": (128, 136), "frames": 16 if family == "video" else 1}
    normalised = Preprocess(family, usual_transforms(family), mode, **options)
    picture = np.asarray(normalised.denormalise(normalised(photograph)), dtype=int)
    expected = Preprocess(family, _without_normalisation(family), mode, **options)(photograph)
    if family == "video":
        expected = expected[:, 0]
    if family == "optical_flow" and mode == "weights":
        expected = (expected + 1) / 2
    assert picture.shape == (128, 136, 3)
    assert np.abs(picture - (expected.permute(1, 2, 0) * 255).numpy()).max() <= 1.01


def _without_normalisation(family: str) -> Any:
    transforms = usual_transforms(family)
    if hasattr(transforms, "mean"):
        transforms.mean, transforms.std = [0.0] * 3, [1.0] * 3
    return transforms


def test_grey_models(photograph: Image.Image) -> None:
    prepare = Preprocess("classification", imagenet_transforms(), "stretch", size=(28, 28), channels=1)
    tensor = prepare(photograph)
    assert tensor.shape == (1, 28, 28)
    assert (prepare.denormalise(tensor).size, prepare.denormalise(tensor).mode) == ((28, 28), "RGB")


def test_a_picture_of_four_channels_is_an_input_error() -> None:
    with pytest.raises(InputError, match="cannot prepare a picture of "):
        Preprocess("classification", imagenet_transforms())(Image.new("RGBA", (20, 30)))


def test_a_picture_beyond_the_memory_is_an_input_error() -> None:
    def full(image: Image.Image) -> None:
        raise MemoryError

    with pytest.raises(InputError, match=r"cannot prepare a picture of \(20, 30\): it does not fit into memory"):
        Preprocess("classification", full)(Image.new("RGB", (20, 30)))


def coordinates(width, height):
    """Red rises from 0 to 255 from left to right, green from top to bottom."""
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    pixels = np.zeros((height, width, 3))
    pixels[..., 0], pixels[..., 1] = x[None] * 255, y[:, None] * 255
    return Image.fromarray(pixels.round().astype(np.uint8))


def edges_seen(preprocess, width, height):
    """Left, top, right, bottom from lines through the middle of the prepared tensor."""
    tensor = preprocess(coordinates(width, height)).double()
    tensor = tensor[:, 0] if tensor.dim() == 4 else tensor
    if preprocess.mode == "weights":
        mean, std = preprocess.transforms.mean, preprocess.transforms.std
        tensor = np.array(std)[:, None, None] * tensor.numpy() + np.array(mean)[:, None, None]
    else:
        tensor = tensor.numpy()
    high, wide = tensor.shape[-2:]

    def line(values, length):
        # away from the edges, where filters see less
        inner = slice(length // 5, -(length // 5))
        slope, begin = np.polyfit(np.arange(length)[inner] + 0.5, values[inner], 1)
        return begin, begin + slope * length

    left, right = line(tensor[0, high // 2] * width, wide)
    top, bottom = line(tensor[1, :, wide // 2] * height, high)
    return left, top, right, bottom


@pytest.mark.parametrize("size", [(451, 300), (300, 451), (90, 70), (1000, 240)])
@pytest.mark.parametrize(
    ("mode", "input_size"), [("weights", None), ("weights", (96, 160)), ("weights", (64, 64)), ("stretch", None)]
)
def test_the_box_is_the_part_that_the_transforms_keep(size, mode, input_size):
    preprocess = Preprocess("classification", imagenet_transforms(224, 256), mode, input_size)
    box = preprocess.visible_box(*size)
    assert box == pytest.approx(edges_seen(preprocess, *size), abs=max(size) / 120)


def test_clips_are_resized_without_their_proportions():
    preprocess = Preprocess("video", usual_transforms("video"), frames=2)
    assert preprocess.visible_box(451, 300) == pytest.approx(edges_seen(preprocess, 451, 300), abs=4)


def test_a_picture_smaller_than_the_crop_is_padded():
    preprocess = Preprocess("classification", imagenet_transforms(224, 112))
    box = preprocess.visible_box(112, 112)
    assert box == (-56.0, -56.0, 168.0, 168.0)
    tensor = preprocess(Image.new("RGB", (112, 112), "white"))
    assert int((tensor[0] > 0).sum()) == 112 * 112 and float(tensor[0, 56, 56]) > 0 and float(tensor[0, 55, 55]) < 0


@pytest.mark.parametrize("family", ["detection", "segmentation", "optical_flow"])
def test_the_box_of_families_without_a_crop_is_the_whole_picture(family):
    assert Preprocess(family, None).visible_box(30, 20) == (0, 0, 30, 20)
