"""Each family of models gets the input that it takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models.segmentation import FCN

from hookscope.errors import InputError, UsageError
from hookscope.models.load import load_model
from hookscope.models.loaded import (
    CLIP_FRAMES,
    LoadedModel,
    as_batch,
    check_size,
    example_inputs,
    family_of,
    in_channels,
    native_size,
)
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.torchvision_builders import build_skeleton

FAMILIES = {
    "resnet18": "classification",
    "lraspp_mobilenet_v3_large": "segmentation",
    "fasterrcnn_mobilenet_v3_large_fpn": "detection",
    "mvit_v1_b": "video",
    "raft_small": "optical_flow",
}


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_family_and_input(name: str, family: str) -> None:
    model = build_skeleton(name).model
    assert family_of(model) == family
    inputs = example_inputs(model, (128, 136))
    expected: dict[str, list[Any]] = {
        "classification": [(1, 3, 128, 136)],
        "segmentation": [(1, 3, 128, 136)],
        "detection": [[(3, 128, 136)]],
        "video": [(1, 3, CLIP_FRAMES, 128, 136)],
        "optical_flow": [(1, 3, 128, 136)] * 2,
    }
    assert [[tuple(t.shape) for t in i] if isinstance(i, list) else tuple(i.shape) for i in inputs] == expected[family]


def test_a_subclass_is_of_its_family() -> None:
    assert family_of(type("Own", (FCN,), {})(nn.Identity(), nn.Identity())) == "segmentation"


@pytest.mark.parametrize(
    ("module", "name", "family"),
    [
        ("transformers.models.detr.modeling_detr", "DetrForObjectDetection", "batched_detection"),
        ("transformers.models.segformer.modeling_segformer", "SegformerForSemanticSegmentation", "segmentation"),
        ("ultralytics.nn.tasks", "RTDETRDetectionModel", "batched_detection"),
        ("own.net", "MyDetectionModel", "classification"),
    ],
)
def test_the_family_of_classes_of_other_packages(module: str, name: str, family: str) -> None:
    model = type(name, (nn.Conv2d,), {"__module__": module})(3, 2, 1)
    assert family_of(model) == family
    assert example_inputs(model, (32, 40))[0].shape == (1, 3, 32, 40)


def test_native_size() -> None:
    assert native_size(build_skeleton("vit_b_16").model) == (224, 224)
    assert native_size(nn.Conv2d(3, 4, 3)) is None


@pytest.mark.parametrize(("net", "channels"), [
    (nn.Conv2d(1, 4, 3), 1),
    (nn.Conv2d(3, 4, 3), 3),
    (nn.Sequential(nn.Linear(2, 2), nn.Conv3d(1, 2, 1), nn.Conv2d(3, 2, 1)), 1),
    (nn.Conv2d(12, 4, 3), 3),
    (nn.Linear(4, 3), 3),
])  # fmt: skip
def test_colour_channels(net: nn.Module, channels: int) -> None:
    assert in_channels(net) == channels
    assert example_inputs(net, (5, 6))[0].shape == (1, channels, 5, 6)


def volumes(channels: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(channels, 2, 3), nn.ReLU())


def test_models_of_volumes_take_any_depth_and_number_of_channels() -> None:
    assert family_of(volumes()) == "video"
    assert family_of(nn.Sequential(nn.Conv3d(1, 2, 1), nn.Conv2d(1, 2, 1))) == "classification"
    assert example_inputs(volumes(), (7, 20, 24))[0].shape == (1, 4, 7, 20, 24)
    assert example_inputs(volumes(1), (20, 24))[0].shape == (1, 1, CLIP_FRAMES, 20, 24)
    assert example_inputs(volumes(), (2, 4, 7, 20, 24))[0].shape == (2, 4, 7, 20, 24)
    assert example_inputs(build_skeleton("r3d_18").model, (5, 64, 72))[0].shape == (1, 3, 5, 64, 72)
    assert example_inputs(nn.Conv1d(7, 2, 3), (2, 7, 9))[0].shape == (2, 7, 9)


def test_a_depth_is_for_models_of_volumes() -> None:
    check_size(volumes(), (7, 20, 24))
    check_size(nn.Conv2d(3, 4, 3), (20, 24))
    with pytest.raises(UsageError, match="an input of 7x20x24 has a depth, and Conv2d takes pictures"):
        check_size(nn.Conv2d(3, 4, 3), (7, 20, 24))


def test_the_depth_of_a_loaded_model_is_that_of_its_clips() -> None:
    net = load_model("r3d_18", weights="none", device="cpu", input_size=(5, 32, 40))
    assert net.preprocess.input_shape == (3, 5, 32, 40)
    assert net.preprocess(Image.new("RGB", (64, 48))).shape == (3, 5, 32, 40)
    with pytest.raises(UsageError, match="ResNet takes pictures"):
        load_model("resnet18", weights="none", device="cpu", input_size=(5, 32, 40))


def test_the_side_that_a_transformers_config_states() -> None:
    net = nn.Conv2d(3, 4, 3)
    net.config = SimpleNamespace(image_size=48)
    assert native_size(net) == (48, 48)


def test_a_full_shape_is_kept_with_the_models_dtype_and_device() -> None:
    (example,) = example_inputs(nn.Conv2d(3, 4, 3).half(), (2, 1, 28, 28))
    assert (example.shape, example.dtype, example.device.type) == ((2, 1, 28, 28), torch.float16, "cpu")
    (example,) = example_inputs(nn.Linear(784, 10, device="meta"), [784])
    assert (example.shape, example.dtype, example.device.type) == ((784,), torch.float32, "cpu")
    first, second = example_inputs(build_skeleton("raft_small").model, (2, 3, 128, 128))
    assert first.shape == second.shape == (2, 3, 128, 128)


@pytest.mark.parametrize("size", [(), (0, 5), (5, -1), (1, 3, 0, 4)])
def test_bad_sizes(size: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"bad input size .*; give \(H, W\) or a full shape"):
        example_inputs(nn.Conv2d(3, 4, 3), size)


def test_pictures_become_a_batch_as_their_family_takes_it() -> None:
    tensors = [torch.full((3, 4, 5), float(n)) for n in range(2)]
    for family in ("classification", "segmentation"):
        (batch,) = as_batch(family, tensors)
        assert torch.equal(batch, torch.stack(tensors))
    (clips,) = as_batch("video", [torch.zeros(3, 16, 4, 4)] * 3)
    assert clips.shape == (3, 3, 16, 4, 4)
    first, second = as_batch("optical_flow", tensors)
    assert torch.equal(first, second) and torch.equal(first, torch.stack(tensors))
    (pictures,) = as_batch("detection", [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)])
    assert [tuple(picture.shape) for picture in pictures] == [(3, 4, 5), (3, 6, 7)]


def test_one_picture_keeps_the_memory_layout_of_its_transforms_in_memory_of_its_own() -> None:
    picture = torch.rand(8, 8, 3).permute(2, 0, 1)  # as torchvision makes a tensor of a photograph
    (batch,) = as_batch("classification", [picture])
    assert batch.stride() == picture[None].stride() and batch.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch[0], picture) and batch.data_ptr() != picture.data_ptr()


def test_two_pictures_of_optical_flow_are_compared_with_each_other() -> None:
    net = LoadedModel.of(nn.Identity(), "net", "none", WeightsMetadata(), family="optical_flow")
    first, second = net.inputs(torch.zeros(3, 4, 5), torch.ones(3, 4, 5))
    assert (float(first.max()), float(second.min())) == (0.0, 1.0)


def test_pictures_of_different_shapes_make_no_batch() -> None:
    with pytest.raises(InputError, match="do not stack; 3x4x5, 3x6x7; make batches of one shape"):
        as_batch("classification", [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)])
    for family in ("classification", "detection"):
        with pytest.raises(InputError, match="a batch needs at least one picture"):
            as_batch(family, [])
