"""What weights files, processors and configurations say of a model, and its transforms judged by their own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torchvision import transforms as T
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.functional import to_pil_image

from hookscope.errors import WeightsError
from hookscope.models.metadata import (
    WeightsMetadata,
    count_parameters,
    read_description,
    read_header,
    read_metadata,
)
from hookscope.models.preprocess import Preprocess
from hookscope.models.published import of_processor, of_timm, published_class_names, published_transforms
from hookscope.models.transforms import OwnTransforms, Resize, Transforms, imagenet_transforms

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
    assert read_description(tmp_path / "own") == {}
    assert read_header(tmp_path) == read_header(tmp_path / "nothing") == {}


def test_parameters_are_counted_without_running_statistics(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 5), torch.nn.BatchNorm2d(4))
    save_file(net.state_dict(), tmp_path / "own.safetensors", {"by": "me"})
    count = count_parameters(read_header(tmp_path / "own.safetensors"))
    assert count == sum(parameter.numel() for parameter in net.parameters()) == 312
    for nonsense in ({}, {"__metadata__": {}}, {"a": 3}, {"a": {"shape": None}}, {"a": {"shape": ["x"]}}):
        assert count_parameters(nonsense) is None


def test_every_entry_is_optional_but_those_of_the_transforms_go_together(tmp_path: Path) -> None:
    for content in (WHOLE, {}, {"categories": ["a"]}):
        assert read_description(write(tmp_path, content | {"of a later day": 3})) == content
    for name in ("resize_size", "crop_size", "mean", "std"):
        part = {key: value for key, value in WHOLE.items() if key != name}
        with pytest.raises(WeightsError, match=f"mean, std go together, but {name} is missing$"):
            read_description(write(tmp_path, part))


def test_a_file_without_a_description(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "bare.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors", {"format": "pt"})
    torch.save({"a": torch.zeros(1)}, tmp_path / "own.pth")
    assert [read_description(path) for path in tmp_path.iterdir()] == [{}] * 3


NONSENSE: dict[str, list[Any]] = {
    "it is not a JSON object": ["", "[" * 100_000, []],
    "model is not a name": [{"model": 3}],
    "categories is not a list of names": [{"categories": wrong} for wrong in ([], ["a", 3], ["b\nc"], ["\ud83d"])],
    "resize_size is not a number of pixels": [WHOLE | {"resize_size": 0}],
    "crop_size is not a number of pixels": [WHOLE | {"crop_size": wrong} for wrong in (128.0, True, 10**9)],
    "mean is not three numbers": [WHOLE | {"mean": [0.5, 0.5, *wrong]} for wrong in ([], [float("nan")], [10**400])],
    "std is not three numbers above 0": [WHOLE | {"std": wrong} for wrong in ([1, 1, 0], [True] * 3)],
    "accuracy is not a share between 0 and 1": [WHOLE | {"accuracy": wrong} for wrong in (98.15, None)],
    "held_out is not a number of images": [WHOLE | {"held_out": 0.5}],
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


BICUBIC = T.InterpolationMode.BICUBIC
NORMALISE = T.Normalize((0.5,) * 3, (0.25,) * 3)
TIMM = {"input_size": (3, 64, 64), "crop_pct": 0.9, "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.25,) * 3}
TIMM_CASES: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "center": ({}, [T.Resize(71, BICUBIC), T.CenterCrop(64)], "resize 71 bicubic, crop 64"),
    "squash": (
        {"crop_mode": "squash"},
        [T.Resize((71, 71), BICUBIC), T.CenterCrop(64)],
        "stretch 71x71 bicubic, crop 64",
    ),
    "border": (
        {"crop_mode": "border", "crop_pct": 1.0},
        [T.Resize((45, 64), BICUBIC), T.Pad((0, 9, 0, 10), (128, 128, 128))],
        "pad to 64x64 bicubic",
    ),
    "not square": (
        {"input_size": (3, 64, 48), "interpolation": "bilinear", "crop_pct": 1.0},
        [T.Resize((64, 91)), T.CenterCrop((64, 48))],
        "resize to cover 64x48, crop 64x48",
    ),
}


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 100, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(("changes", "steps", "words"), TIMM_CASES.values(), ids=TIMM_CASES)
def test_timm(photograph: Image.Image, changes: dict[str, Any], steps: list[Any], words: str) -> None:
    prepare = Preprocess("classification", of_timm(TIMM | changes))
    assert torch.equal(prepare(photograph), T.Compose([*steps, T.ToTensor(), NORMALISE])(photograph))
    assert prepare.describe() == f"{words}, mean 0.5, std 0.25"


def test_a_model_around_one_of_timm_gets_its_mean_and_std() -> None:
    inner = nn.Conv2d(3, 4, 1)
    inner.default_cfg = TIMM
    assert published_transforms(inner) == of_timm(TIMM)
    around = published_transforms(nn.Sequential(nn.Identity(), inner))
    assert isinstance(around, Transforms) and around.assumed == ("size",)
    assert around.describe() == "mean 0.5, std 0.25, assumed resize 256, crop 224"
    other = nn.Conv2d(3, 4, 1)
    other.default_cfg = TIMM | {"mean": (0.1,) * 3}
    assert published_transforms(nn.Sequential(inner, other)) is None
    assert published_transforms(nn.Identity()) is None


CONFIG = {
    "do_resize": True, "size": {"shortest_edge": 40}, "resample": 3, "do_center_crop": True,
    "crop_size": {"height": 32, "width": 33}, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25], "image_processor_type": "CLIPImageProcessor",
}  # fmt: skip


class Processor:
    """Like an image processor of transformers."""

    def __init__(self, **config: Any) -> None:
        self.config = CONFIG | config
        self.image_mean, self.image_std, self.do_normalize = [0.5] * 3, [0.25] * 3, True

    def to_dict(self) -> dict[str, Any]:
        return self.config

    def __call__(self, picture: Image.Image, return_tensors: str) -> dict[str, Any]:
        assert return_tensors == "pt"
        return {"pixel_values": NORMALISE(T.ToTensor()(picture.resize((8, 9))))[None]}


def test_the_configuration_of_an_image_processor(photograph: Image.Image, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CONFIG))
    found = published_transforms(nn.Identity(), [str(tmp_path / "model.safetensors")])
    assert found == published_transforms(nn.Identity(), [str(tmp_path)])
    prepare = Preprocess("classification", found)
    steps = [T.Resize(40, BICUBIC), lambda p: p.crop((12, 4, 45, 36)), T.ToTensor(), NORMALISE]  # 57 - 33 is even
    assert torch.equal(prepare(photograph), T.Compose(steps)(photograph))
    assert prepare.describe() == "resize 40 bicubic, crop 32x33, mean 0.5, std 0.25"
    model = nn.Identity()
    model.config = type("Config", (), {"_name_or_path": str(tmp_path)})()
    assert published_transforms(model) == found


def test_a_crop_of_transformers_begins_at_the_lower_pixel() -> None:
    found = of_processor(Processor(size={"height": 35, "width": 35}, crop_size={"height": 32, "width": 32}), "")
    assert Preprocess("classification", found).visible_box(35, 35) == (1, 1, 33, 33)  # torchvision: (2, 2, 34, 34)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"size": {"height": 30, "width": 20}, "do_center_crop": False}, "stretch 30x20 bicubic, mean 0.5, std 0.25"),
        ({"size": 30, "do_center_crop": False, "resample": None}, "stretch 30x30, mean 0.5, std 0.25"),
        ({"crop_size": [32, 36]}, "resize 40 bicubic, crop 32x36, mean 0.5, std 0.25"),
        (
            {"size": {"shortest_edge": 800, "longest_edge": 1333}, "resample": 2, "do_center_crop": False}
            | {"format": "coco_detection", "do_pad": True, "do_convert_annotations": True},
            "resize 800 up to 1333, mean 0.5, std 0.25",
        ),
        ({"do_normalize": False, "do_center_crop": False}, "resize 40 bicubic, range 0..1"),
        ({"do_normalize": False, "do_rescale": False, "do_resize": False}, "own size, crop 32x33, range 0..255"),
    ],
)
def test_the_entries_of_a_configuration(config: dict[str, Any], words: str) -> None:
    found = of_processor(Processor(**config), "processor")
    assert isinstance(found, Transforms) and found.describe() == words


@pytest.mark.parametrize(
    "config",
    [
        {"do_flip_channel_order": True},
        {"crop_pct": 0.875},
        {"size": {"shortest_edge": 8, "multiple_of": 9}},
        {"format": "coco_detection", "do_pad": True, "pad_size": {"height": 64, "width": 64}},
        {"image_processor_type": "YolosImageProcessor"},
        {"image_processor_type": "LevitImageProcessor"},
        {"crop_size": {"shortest_edge": 32}},
    ],
)
def test_a_processor_with_other_rules_prepares_the_picture_itself(
    photograph: Image.Image, config: dict[str, Any]
) -> None:
    model = nn.Identity()
    model.processor = type("Both", (), {"image_processor": Processor(**config)})()
    found = published_transforms(model)
    assert isinstance(found, OwnTransforms)
    prepare = Preprocess("classification", found)
    assert torch.equal(prepare(photograph), NORMALISE(T.ToTensor()(photograph.resize((8, 9)))))
    assert prepare.describe() == "processor of the model, mean 0.5, std 0.25"
    assert np.abs(np.asarray(prepare.denormalise(prepare(photograph)), int) - photograph.resize((8, 9))).max() <= 1


def test_a_damaged_configuration_says_nothing(tmp_path: Path) -> None:
    for content in ("{", "[]", '"text"', '{"size": 3}', '{"do_resize": true, "resample": "x"}'):
        (tmp_path / "preprocessor_config.json").write_text(content)
        assert published_transforms(nn.Identity(), [str(tmp_path)]) is None


@pytest.mark.parametrize(
    ("high", "wide", "size"), [(480, 640, (800, 1066)), (640, 480, (1066, 800)), (400, 1200, (444, 1333))]
)
def test_the_longer_side_is_limited_as_in_transformers(high: int, wide: int, size: tuple[int, int]) -> None:
    """The sizes that DetrImageProcessor makes."""
    assert Resize("shorter", (800,), longest=1333).resized(high, wide) == size


def test_ultralytics_pads_with_grey_and_names_no_class_by_its_number() -> None:
    kind = {"__module__": "ultralytics.nn.tasks"}
    yolo, rtdetr = (type(name, (nn.Identity,), kind)() for name in ("DetectionModel", "RTDETRDetectionModel"))
    found = published_transforms(yolo)
    assert isinstance(found, Transforms) and found.describe() == "pad to 640x640, range 0..1"
    padded = Preprocess("batched_detection", found)(Image.new("RGB", (64, 32), "red"))
    assert [padded[:, y, 320].mul(255).tolist() for y in (159, 160)] == [[114, 114, 114], [255, 0, 0]]
    assert published_transforms(rtdetr).describe() == "stretch 640x640, range 0..1"
    yolo.names = {0: "0", 1: "1"}
    assert published_class_names(yolo) is None
    yolo.names = {0: "person", 1: "1"}
    assert published_class_names(yolo) == ("person", "1")
    yolo.names = {0: "person", "1": "car"}
    assert published_class_names(yolo) is None
