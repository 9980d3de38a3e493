"""Photograph to tensor, judged by torchvision's own transforms and by Pillow."""

import dataclasses
import signal
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import models, transforms as T
from torchvision.transforms import functional as F

import hookscope
from hookscope.errors import ImageError, InputError, UsageError
from hookscope.models import LoadedModel, load_model
from hookscope.models.choices import PreprocessChoice
from hookscope.models.preprocess import Preprocess
from hookscope.models.transforms import Normalisation, OwnTransforms, Transforms, imagenet_transforms, usual_transforms
from tests.helpers import refused


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """Smooth and in colour, wider than high."""
    y, x = np.mgrid[0:150, 0:200]
    values = np.stack([x * 255 / 200, y * 255 / 150, 127 + 100 * np.sin(x / 9 + y / 13)], axis=-1)
    return Image.fromarray(values.astype(np.uint8))


def prepared(family: str, preset: Any, **more: Any) -> Preprocess:
    return Preprocess(family, Transforms.of(preset), **more)


CLASSIFIERS = [name for name in models.list_models(module=models) if models.get_model_weights(name).__members__]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_transforms_of_weights_are_torchvisions_own(photograph: Image.Image, name: str) -> None:
    small = photograph.resize((61, 40))
    for entry in models.get_model_weights(name):
        own = entry.transforms()
        assert torch.equal(prepared("classification", own)(small), own(small))


def test_the_words_for_transforms_of_weights() -> None:
    for entry, words in {
        models.ResNet50_Weights.IMAGENET1K_V1: "resize 256, crop 224, ImageNet mean and std",
        models.ViT_H_14_Weights.IMAGENET1K_SWAG_E2E_V1: "resize 518 bicubic, crop 518, ImageNet mean and std",
        models.segmentation.FCN_ResNet50_Weights.DEFAULT: "resize 520, ImageNet mean and std",
        models.detection.FasterRCNN_ResNet50_FPN_Weights.DEFAULT: "own size, range 0..1",
        models.optical_flow.Raft_Small_Weights.DEFAULT: "own size in multiples of 8, mean 0.5, std 0.5",
        models.video.R3D_18_Weights.DEFAULT: "stretch 128x171, crop 112, mean 0.43216 0.394666 0.37645,"
        " std 0.22803 0.22145 0.216989",
    }.items():
        assert prepared("", entry.transforms()).describe() == words


def test_other_families_are_torchvisions_own(photograph: Image.Image) -> None:
    detection = models.detection.FasterRCNN_ResNet50_FPN_Weights.DEFAULT.transforms()
    assert torch.equal(prepared("detection", detection)(photograph), detection(photograph))
    segmentation = models.segmentation.FCN_ResNet50_Weights.DEFAULT.transforms()
    assert torch.equal(prepared("segmentation", segmentation)(photograph), segmentation(photograph))
    assert prepared("segmentation", segmentation)(photograph).shape == (3, 520, 693)
    for entry in (models.video.R3D_18_Weights.DEFAULT, models.video.MViT_V2_S_Weights.DEFAULT):
        video = entry.transforms()
        frames = torch.stack([F.pil_to_tensor(photograph)] * 16)
        assert torch.equal(prepared("video", video, frames=16)(photograph), video(frames))
    flow = models.optical_flow.Raft_Small_Weights.DEFAULT.transforms()
    same = photograph.resize((200, 152))
    assert torch.equal(prepared("optical_flow", flow)(same), flow(same, same)[0])


def chosen(size: tuple[int, int] | None = None, **choice: Any) -> Preprocess:
    """Preprocessing of ImageNet, changed by what the user chose."""
    parsed = PreprocessChoice.parse(**choice)
    parsed.check(size)
    return Preprocess("classification", imagenet_transforms()).changed(parsed, size)


def test_none_keeps_the_size(photograph: Image.Image) -> None:
    prepare = chosen(preprocess="none")
    expected = torch.from_numpy(np.asarray(photograph, dtype=np.float32) / 255).permute(2, 0, 1)
    assert torch.equal(prepare(photograph), expected)
    assert (prepare.describe(), prepare.any_size) == ("own size, range 0..1", True)


CHOICES: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "imagenet": (
        {"preprocess": "imagenet"},
        [T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))],
        "resize 256, crop 224, ImageNet mean and std",
    ),
    "half": (
        {"preprocess": "half"},
        [T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize((0.5,) * 3, (0.5,) * 3)],
        "resize 256, crop 224, mean 0.5, std 0.5",
    ),
    "mean and std": (
        {"mean": "0.1,0.2,0.3", "std": (0.4, 0.5, 0.6)},
        [T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))],
        "resize 256, crop 224, mean 0.1 0.2 0.3, std 0.4 0.5 0.6",
    ),
    "shorter": (
        {"resize": "shorter", "size": (64, 64), "range": "0..1"},
        [T.Resize(64), T.CenterCrop(64), T.ToTensor()],
        "resize 64, crop 64, range 0..1",
    ),
    "shorter:90": (
        {"resize": "shorter:90", "size": (64, 80), "range": (0, 1)},
        [T.Resize(90), T.CenterCrop((64, 80)), T.ToTensor()],
        "resize 90, crop 64x80, range 0..1",
    ),
    "stretch": ({"preprocess": "stretch"}, [T.Resize((224, 224)), T.ToTensor()], "stretch 224x224, range 0..1"),
    "-1..1": (
        {"preprocess": "stretch", "size": (32, 48), "range": "-1..1"},
        [T.Resize((32, 48)), T.ToTensor(), lambda x: x * 2 - 1],
        "stretch 32x48, range -1..1",
    ),
    "0..255 and a mean": (
        {"resize": "stretch", "size": (32, 48), "range": "0..255", "mean": "123.68,116.779,103.939", "std": "1"},
        [T.Resize((32, 48)), T.PILToTensor(), lambda x: x.float(), T.Normalize((123.68, 116.779, 103.939), (1, 1, 1))],
        "stretch 32x48, range 0..255, mean 123.68 116.779 103.939, std 1",
    ),
    "pad": (
        {"resize": "pad", "size": (96, 96), "preprocess": "half"},
        [lambda p: ImageOps.pad(p, (96, 96), Image.Resampling.BILINEAR), T.ToTensor(), T.Normalize((0.5,), (0.5,))],
        "pad to 96x96, mean 0.5, std 0.5",
    ),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("choice", "steps", "words"), CHOICES.values(), ids=CHOICES)
def test_choices_are_what_torchvision_and_pillow_compute(
    photograph: Image.Image, choice: dict[str, Any], steps: list[Any], words: str, turned: bool
) -> None:
    picture = photograph.rotate(90, expand=True) if turned else photograph
    prepare = chosen(**choice)
    truth = T.Compose(steps)(picture)
    assert torch.allclose(prepare(picture), truth, rtol=0, atol=1e-6 * float(truth.abs().max()))
    assert prepare.describe() == words
    assert prepare.input_shape == truth.shape


WRONG_CHOICES = [
    ({"mean": "0.5"}, "mean needs std; add std=1"),
    ({"std": "0.5"}, "std needs mean; add mean=0"),
    (
        {"mean": "0.5,0.5", "std": "1"},
        "mean has 2 numbers, and the input has 3 channels; give one number",
    ),
    (
        {"mean": "half", "std": "1"},
        "mean 'half' is not a list of numbers; give one number, or one for each channel, such as 0.48",
    ),
    ({"mean": "0", "std": "0"}, "std '0' is not a list of numbers above 0"),
    ({"mean": "nan", "std": "1"}, "mean 'nan' is not a list of numbers"),
    ({"range": "1..0"}, "range '1..0' is not a range; write LOW..HIGH, such as 0..1, -1..1 or 0..255"),
    ({"range": "255"}, "range '255' is not a range"),
    ({"resize": "crop"}, "no resize 'crop'; there are shorter, stretch, pad and shorter:PIXELS"),
    ({"resize": "shorter:0"}, "no resize 'shorter:0'"),
    ({"preprocess": "imagnet"}, "no preprocessing 'imagnet'; there are weights, imagenet, half, stretch, none and"),
    ({"preprocess": 3}, "no preprocessing '3'"),
    ({"preprocess": "none", "resize": "pad"}, "preprocess='none' keeps the image's own size; leave resize"),
    ({"preprocess": "none", "size": (8, 8)}, "preprocess='none' keeps the image's own size; leave an input size out"),
    ({"preprocess": "stretch", "resize": "pad"}, "preprocess='stretch' contradicts resize pad"),
]


@pytest.mark.parametrize(("choice", "message"), WRONG_CHOICES)
def test_choices_that_cannot_be_read_or_contradict_each_other(choice: dict[str, Any], message: str) -> None:
    with refused(UsageError, message, part="begins"):
        chosen(**choice)


@pytest.mark.parametrize("size", [(33, 57), (300, 64), (1, 1)])
@pytest.mark.parametrize("family", ["classification", "segmentation", "detection"])
def test_the_output_has_the_input_size(photograph: Image.Image, family: str, size: tuple[int, int]) -> None:
    prepare = Preprocess(family, usual_transforms(family)).changed(PreprocessChoice(), size)
    assert prepare(photograph).shape == (3, *size)


def test_a_square_size_scales_the_resize_too(photograph: Image.Image) -> None:
    own = Preprocess("classification", imagenet_transforms(crop=112, resize=128))
    assert torch.equal(chosen((112, 112))(photograph), own(photograph))


def test_a_size_that_is_not_square_keeps_proportions() -> None:
    """A circle stays as high as it is wide."""
    y, x = np.mgrid[0:300, 0:300]
    disc = ((x - 150) ** 2 + (y - 150) ** 2 < 40**2) * np.uint8(255)
    tensor = chosen((120, 240))(Image.fromarray(disc).convert("RGB"))
    bright = tensor[0] > 0
    assert abs(int(bright.any(0).sum()) - int(bright.any(1).sum())) <= 2


@pytest.mark.parametrize("mode", ["weights", "stretch", "none", "imagenet"])
@pytest.mark.parametrize("size", [None, (96, 128)])
def test_clips(photograph: Image.Image, mode: str, size: tuple[int, int] | None) -> None:
    usual = Preprocess("video", usual_transforms("video"), default_size=(112, 112), frames=16)
    prepare = usual.changed(PreprocessChoice.parse(mode), None if mode == "none" else size)
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
    prepare = Preprocess("optical_flow", usual_transforms("optical_flow"))
    tensor = prepare(Image.new("RGB", (wide, high), (255, 0, 128)))
    assert tensor.shape == (3, *expected)
    assert (float(tensor.min()), float(tensor.max())) == (-1.0, 1.0)
    assert prepare.changed(PreprocessChoice(), (128, 256)).describe() == "stretch 128x256, mean 0.5, std 0.5"


DENORMALISED = [
    {},
    {"preprocess": "half"},
    {"range": "-1..1", "resize": "pad"},
    {"range": "0..255", "mean": "120,110,100", "std": "60", "resize": "stretch"},
    {"preprocess": "none"},
]


@pytest.mark.parametrize("family", ["classification", "segmentation", "detection", "video", "optical_flow"])
@pytest.mark.parametrize("choice", DENORMALISED)
def test_denormalise_undoes_the_normalisation(photograph: Image.Image, family: str, choice: dict[str, Any]) -> None:
    """The judge is the same geometry without any normalisation, in bytes."""
    usual = Preprocess(family, usual_transforms(family), frames=2 if family == "video" else 1)
    prepare = usual.changed(PreprocessChoice.parse(**choice), None if choice.get("preprocess") else (128, 136))
    seen = np.asarray(prepare.denormalise(prepare(photograph)), dtype=int)
    plain = dataclasses.replace(prepare, transforms=dataclasses.replace(prepare.transforms, values=Normalisation()))
    expected = plain(photograph)
    expected = expected[:, 0] if family == "video" else expected
    assert np.abs(seen - (expected.permute(1, 2, 0) * 255).numpy()).max() <= 1.01


def test_grey_models_get_the_luminance(photograph: Image.Image) -> None:
    """The judge is torchvision's Grayscale."""
    usual = Preprocess("classification", imagenet_transforms(), channels=1)
    assert usual.describe() == "grey, resize 256, crop 224, mean 0.449, std 0.226"
    prepare = usual.changed(PreprocessChoice.parse("stretch", mean="0.1307", std="0.3081"), (28, 28))
    steps = [T.Grayscale(), T.Resize((28, 28)), T.ToTensor(), T.Normalize((0.1307,), (0.3081,))]
    tensor = prepare(photograph)
    assert torch.allclose(tensor, T.Compose(steps)(photograph), atol=1e-6)
    assert prepare.describe() == "grey, stretch 28x28, mean 0.1307, std 0.3081"
    assert (prepare.denormalise(tensor).size, prepare.denormalise(tensor).mode) == ((28, 28), "RGB")
    with pytest.raises(UsageError, match="mean has 3 numbers, and the input has 1 channel; give one number"):
        usual.changed(PreprocessChoice.parse(mean="1,2,3", std="1"))


def test_what_is_not_an_image_or_does_not_fit_into_memory_is_refused() -> None:
    def full(image: Image.Image) -> None:
        raise MemoryError

    with refused(InputError, "cannot prepare an image of (20, 30): it does not fit into memory", part="begins"):
        Preprocess("classification", Transforms(full))(Image.new("RGBA", (20, 30)))
    with refused(ImageError, "expected an image, got Tensor", part="begins"):
        Preprocess("classification", imagenet_transforms())(torch.rand(3, 20, 30))  # type: ignore[arg-type]


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
    tensor = preprocess.transforms.values.inverse(tensor).numpy()
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
    ("choice", "input_size"),
    [
        ({}, None),
        ({}, (96, 160)),
        ({}, (64, 64)),
        ({"preprocess": "stretch"}, None),
        ({"resize": "shorter"}, (64, 64)),
        ({"resize": "shorter:100"}, (64, 80)),
    ],
)
def test_the_box_is_the_part_that_the_transforms_keep(size, choice, input_size):
    preprocess = chosen(input_size, **choice)
    box = preprocess.visible_box(*size)
    assert box == pytest.approx(edges_seen(preprocess, *size), abs=max(size) / 120)


@pytest.mark.parametrize("size", [(450, 300), (300, 450), (90, 70), (1000, 240)])
def test_a_padded_picture_has_a_border_and_its_box_reaches_beyond_it(size):
    preprocess = chosen((64, 64), resize="pad", range="0..1")
    white = preprocess(Image.new("RGB", size, "white"))[0] > 0.5
    rows, columns = (torch.nonzero(white.any(axis)).flatten() for axis in (1, 0))
    left, top, right, bottom = preprocess.visible_box(*size)
    across, down = 64 / (right - left), 64 / (bottom - top)
    inner = [-left * across, -top * down, (size[0] - left) * across - 1, (size[1] - top) * down - 1]
    assert inner == pytest.approx([int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])])


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
    assert Preprocess(family, usual_transforms(family)).visible_box(30, 20) == (0, 0, 30, 20)


@pytest.mark.parametrize("name", ["center", "wide", "pad", "stretch", "none"])
def test_a_region_is_where_the_input_shows_the_mask(name: str) -> None:
    """The judge: a photograph with values only inside the mask, prepared as any other."""
    resize = {"center": "shorter:64", "wide": "shorter", "pad": "pad", "stretch": "stretch"}.get(name)
    size = None if name == "none" else (48, 64) if name == "wide" else (48, 48)
    preprocess = chosen(size, preprocess="none") if name == "none" else chosen(size, mean=0, std=1, resize=resize)
    mask = Image.new("L", (160, 120))
    mask.paste(1, (40, 32, 110, 90))
    region = preprocess.region(mask)
    assert region.shape == preprocess(mask.convert("RGB")).shape[1:]
    left, top, right, bottom = preprocess.visible_box(160, 120)
    high, wide = region.shape
    x, y = (
        (torch.arange(wide) + 0.5) * (right - left) / wide + left,
        (torch.arange(high) + 0.5) * (bottom - top) / high + top,
    )
    inside = ((x > 40) & (x < 110))[None] & ((y > 32) & (y < 90))[:, None]
    assert ((region > 0.5) != inside).float().mean() < 0.03 and region.max() == 1 and region.min() == 0
    cell = (right - left) / wide * (bottom - top) / high
    assert float(region.sum()) * cell == pytest.approx(70 * 58, rel=0.03)


def test_one_pixel_of_a_large_photograph_stays_in_a_region() -> None:
    mask = Image.new("L", (4000, 3000))
    mask.putpixel((2000, 1500), 255)
    region = chosen((32, 32)).region(mask)
    assert float(region.sum()) > 0 and region.nonzero().tolist() in ([[16, 16]], [[16, 15]], [[15, 16]], [[15, 15]])


def test_a_region_of_an_own_function_has_the_size_of_the_input() -> None:
    own = Preprocess("segmentation", OwnTransforms(lambda image: torch.zeros(3, 8, 8), "own"))
    mask = Image.new("L", (8, 8))
    mask.putpixel((2, 5), 1)
    assert own.region(mask).nonzero().tolist() == [[5, 2]]


def test_the_input_is_what_an_own_function_makes() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    def loaded(*steps: torch.nn.Module) -> LoadedModel:
        return load_model(net, preprocess=T.Compose([*steps, T.ToTensor()]))

    fixed, varied = loaded(T.Resize(64), T.CenterCrop(60)), loaded(T.Resize(64))
    assert fixed.preprocess.input_shape == (3, 60, 60) and not fixed.preprocess.any_size
    assert hookscope.list_layers(fixed)[0].macs == 56 * 58 * 58 and "input=3x60x60," in repr(fixed)
    assert varied.preprocess.any_size and "input=3x64x64 of a square image," in repr(varied)
    assert load_model(net, preprocess=lambda image: 1 / 0).preprocess.input_shape == (3, 224, 224)


def test_a_signal_during_a_function_of_the_user_ends_the_run() -> None:
    def stopped(picture: Image.Image) -> torch.Tensor:
        raise SystemExit(128 + signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        OwnTransforms(stopped, "mine")(Image.new("RGB", (4, 4)))
