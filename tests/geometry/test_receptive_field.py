"""Receptive fields, against arithmetic on paper and the pixels that gradients reach."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.ops import SqueezeExcitation, deform_conv2d

from hookscope.exemplars import field_words
from hookscope.geometry import FieldTracker, ReceptiveField, computed_field, effective_fields, receptive_fields
from hookscope.hooks import MODEL, ModelSnapshot, Selection
from hookscope.models import LoadedModel, WeightsMetadata
from tests.nets import Function, named


def fields(net: nn.Module, images: torch.Tensor) -> dict[str, float]:
    return effective_fields(LoadedModel.of(net.eval(), "net", "random", WeightsMetadata()), (images,), "*")


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_convolutions_of_ones_are_box_filters_again_and_again(depth: int) -> None:
    net = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(depth)))
    for layer in net:
        nn.init.ones_(layer.weight)
    line = np.ones(1)
    for _ in range(depth):
        line = np.convolve(line, np.ones(3))
    strength = np.outer(line, line)
    expected = round(np.sqrt((strength > (1 - 0.9545) * strength.max()).sum()), 2)
    found = fields(net, torch.rand(2, 1, 41, 41))[str(depth - 1)]
    assert found == pytest.approx(expected)
    assert found <= 2 * depth + 1  # what the geometry allows


def test_a_gradient_that_never_arrives_is_nothing_and_positions_are_needed() -> None:
    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net.head(net.closed(net.conv(x)).mean((2, 3)))

    net = Function(forward, conv=nn.Conv2d(3, 4, 3), closed=nn.Threshold(1e9, 0.0), head=nn.Linear(4, 2))
    found = fields(net, torch.rand(1, 3, 9, 9))
    assert found == {"conv": 3.0, "closed": 0.0}


SIZE = (40, 56)


def fields_of(net: nn.Module, size: tuple[int, ...], *layers: str, family: str | None = None) -> dict[str, Any]:
    loaded = LoadedModel.of(net.eval(), "net", "random", WeightsMetadata(), family)
    return receptive_fields(loaded, loaded.inputs(torch.rand(3, *size)), Selection.of_names(layers))


def field_of(net: nn.Module) -> ReceptiveField:
    """Of what ``net`` returns."""
    return fields_of(net, SIZE, "")[MODEL]


# size, stride and start on paper: size += (kernel - 1) * stride so far, start -= padding * stride so far
PUBLISHED = {
    "alexnet": {"0": (11, 4, -2), "10": (163, 16, -66), "12": (195, 32, -66)},
    "vgg11": {"3": (8, 2, -3), "18": (134, 16, -59), "20": (150, 32, -59)},
    "resnet18": {"conv1": (7, 2, -3), "layer2.1": (99, 8, -49), "layer4": (435, 32, -217)},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_are_those_of_arithmetic_on_paper(name: str) -> None:
    with torch.device("meta"):
        net = get_model(name, weights=None)
    net = getattr(net, "features", net).to_empty(device="cpu")
    fields = fields_of(net, (64, 80), *PUBLISHED[name])
    for layer, (size, stride, start) in PUBLISHED[name].items():
        assert fields[layer] == ReceptiveField("computed", (size, size), (stride, stride), (start, start))


def conv(kernel: int | tuple[int, int], inputs: int = 3, outputs: int = 3, **more: Any) -> nn.Conv2d:
    """A convolution of positive weights: no gradient cancels another."""
    layer = nn.Conv2d(inputs, outputs, kernel, **more)
    nn.init.uniform_(layer.weight, 0.1, 1)
    return layer


def up(**more: Any) -> Callable[..., Tensor]:
    return lambda net, x: net.after(F.interpolate(net.before(x), **more))


def on_paths(function: Callable[[Any, Tensor], Tensor], **more: Any) -> nn.Module:
    return Function(function, before=conv(3, stride=2), after=conv(3, padding=1), **more)


def transposed(**more: Any) -> nn.Module:
    layer = nn.ConvTranspose2d(3, 3, **more)
    nn.init.uniform_(layer.weight, 0.1, 1)
    return layer


def written_in_parts(net: Any, x: Tensor) -> Tensor:
    made = torch.zeros(1, 3, x.shape[2] + 2, x.shape[3] + 2)
    made[:, :, 1:-1, 1:-1].copy_(x)
    return net.after(made)


def shuffled(net: Any, x: Tensor) -> Tensor:
    parts = net.before(x).chunk(3, 1)
    x = torch.cat([parts[0] + parts[1], parts[2].clone().relu_(), parts[1]], 1)
    return net.after(x.reshape(1, 3, 1, *x.shape[2:]).transpose(1, 2).reshape(x.shape))


def linear_last(net: Any, x: Tensor) -> Tensor:
    x = net.before(x).permute(0, 2, 3, 1)
    return net.after((F.layer_norm(x, (3,)) @ torch.ones(3, 3) + F.linear(x, torch.ones(3, 3))).permute(0, 3, 1, 2))


# nets, and how far a box may reach beyond the pixels with a gradient: the field is the same for all units
FOLLOWED: dict[str, tuple[nn.Module, int]] = {
    "stride, padding and dilation": (nn.Sequential(conv(5, stride=(3, 2), padding=(2, 0)), conv(3, dilation=4)), 0),
    "average pooling": (nn.Sequential(conv(3), nn.AvgPool2d(3, 2, 1), conv(1)), 0),
    "adaptive pooling": (nn.Sequential(nn.AdaptiveAvgPool2d((7, 9))), 6),
    "transposed convolution": (nn.Sequential(conv(3, stride=4), transposed(kernel_size=4, stride=2, padding=1)), 4),
    "nearest neighbours": (on_paths(up(scale_factor=2)), 2),
    "bilinear": (on_paths(up(size=(33, 50), mode="bilinear")), 2),
    "aligned corners": (on_paths(up(size=(33, 50), mode="bilinear", align_corners=True)), 3),
    "bicubic": (on_paths(up(scale_factor=1.5, mode="bicubic")), 3),
    "smaller with antialias": (on_paths(up(size=(12, 13), mode="bilinear", antialias=True)), 4),
    "pad, crop and slice": (on_paths(lambda net, x: net.after(F.pad(x, (1, 0, -2, 1))[:, :, 2:, 1::2])), 2),
    "reflected pad": (nn.Sequential(conv(5, padding=2, padding_mode="reflect"), conv(3, stride=2)), 0),
    "a slice of an axis shorter than its step": (
        Function(lambda net, x: net.after(net.before(x)[:, :, ::2, ::2]), before=conv((3, 56)), after=conv(1)),
        0,
    ),
    "branches": (on_paths(lambda net, x: torch.cat([net.before(x), x[:, :, 1:-1:2, 1:-1:2]], 1)), 0),
    "residual": (on_paths(lambda net, x: net.after(x) + x), 0),
    "written in parts": (on_paths(written_in_parts), 0),
    "channels, in place and shuffled": (on_paths(shuffled), 1),
    "channels last": (on_paths(linear_last), 1),
    "pixel shuffle": (nn.Sequential(conv(3, 3, 12, stride=2), nn.PixelShuffle(2), conv(3)), 2),
    "pixel unshuffle": (nn.Sequential(nn.PixelUnshuffle(2), conv(3, 12)), 0),
    "space to depth by a view": (
        on_paths(lambda net, x: x.reshape(1, 3, 20, 2, 28, 2).permute(0, 1, 3, 5, 2, 4).reshape(1, 12, 20, 28)),
        0,
    ),
}


def test_tokens_without_a_class_token_stand_where_their_patches_are() -> None:
    net = Function(
        lambda net, x: net.mix(net.patches(x).flatten(2).transpose(1, 2)),
        patches=conv(8, 3, 4, stride=8),
        mix=nn.Linear(4, 4),
    )
    field = fields_of(net, (32, 48), "mix")["mix"]
    assert (field.size, field.stride, field.start, field.source) == ((8, 8), (8, 8), (0, 0), "computed")


def reached(output: Tensor, place: tuple[int, int], image: Tensor) -> tuple[int, int, int, int]:
    """The box of the pixels whose gradient is not 0."""
    (gradient,) = torch.autograd.grad(output[0, :, place[0], place[1]].sum(), image, retain_graph=True)
    rows, columns = (gradient[0].ne(0).any(0).any(1 - axis).nonzero() for axis in (0, 1))
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


@pytest.mark.parametrize("name", FOLLOWED)
def test_fields_hold_every_pixel_with_a_gradient_and_little_more(name: str) -> None:
    net, slack = FOLLOWED[name]
    field = field_of(net)
    image = torch.rand(1, 3, *SIZE, requires_grad=True)
    output = net(image)
    high, wide = output.shape[2:]
    assert field.source == "computed"
    for place in ((high // 2, wide // 2), (0, 0), (high - 1, wide - 1), (1, wide // 3)):
        box, pixels = field.box(place, SIZE), reached(output, place, image)
        assert all(box[i] <= pixels[i] and box[i + 2] >= pixels[i + 2] for i in (0, 1)), (place, box, pixels)
        assert max(abs(box[i] - pixels[i]) for i in range(4)) <= slack, (place, box, pixels)


def gate(net: Any, x: Tensor) -> Tensor:
    return net.se(net.conv(x))


def pooled(net: Any, x: Tensor) -> Tensor:
    x = net.conv(x)
    return torch.cat([x, F.interpolate(F.adaptive_avg_pool2d(x, 1), x.shape[2:])], 1)


@pytest.mark.parametrize(
    ("net", "what"),
    [
        (Function(gate, conv=conv(3, 3, 4), se=SqueezeExcitation(4, 2)), "mean over positions"),
        (named(conv=conv(3), norm=nn.GroupNorm(1, 3)), "the statistics of group norm"),
        (named(conv=conv(3), norm=nn.InstanceNorm2d(3)), "the statistics of batch or instance norm"),
        (Function(pooled, conv=conv(3)), "mean over positions"),
    ],
)
def test_what_reaches_all_positions_alike_is_left_out_and_named(net: nn.Module, what: str) -> None:
    fields = fields_of(net, SIZE, "conv", "")
    assert fields["conv"].reason == ""
    assert fields[MODEL].box((5, 6), SIZE) == fields["conv"].box((5, 6), SIZE) == (6, 5, 9, 8)
    assert fields[MODEL].source == "computed"
    assert fields[MODEL].reason == f"left out: {what}, which reaches all positions alike"
    assert field_words(fields[MODEL]).endswith(f"computed from the layers: {fields[MODEL].reason}")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda net, x: net.head(net.conv(x).flatten(1)), "a linear layer"),
        (lambda net, x: net.conv(x).mean((2, 3)), "mean over positions"),
        (lambda net, x: F.adaptive_max_pool2d(net.conv(x), 1), "adaptive_max_pool2d over positions"),
        (lambda net, x: net.conv(x).roll((2, 2), (2, 3)), "roll"),
        (lambda net, x: net.conv(x).flip(2, 3), "flip"),
        (lambda net, x: net.attention(*[net.conv(x).flatten(2).transpose(1, 2)] * 3)[0], "attention"),
        (lambda net, x: torch.fft.fft2(net.conv(x)).real, "_fft_c2c, which is not followed"),
        (lambda net, x: net.conv(x).transpose(2, 3), "exchanged rows and columns"),
        (lambda net, x: net.conv(x).copy_(torch.ones(1, 3, 38, 54)), "no operation that is followed leads"),
        (lambda net, x: torch.cat([net.conv(x).flatten()[:0], torch.ones(8)]), "no operation that is followed leads"),
        (lambda net, x: torch.ones(1, 3, 8, 8), "no operation that is followed leads from the input to it"),
    ],
)
def test_where_positions_are_joined_a_unit_sees_all_and_the_reason_is_said(
    function: Callable[[Any, Tensor], Tensor], why: str
) -> None:
    attention = nn.MultiheadAttention(3, 1, batch_first=True)
    field = field_of(Function(function, conv=conv(3), head=nn.Linear(3 * 38 * 54, 2), attention=attention))
    assert field.source == "whole"
    assert field.box((3, 4), SIZE) == (0, 0, SIZE[1], SIZE[0])
    assert why in field.reason


def test_behind_an_operation_that_is_not_followed_fields_are_measured_by_gradients() -> None:
    def deformed(net: Any, x: Tensor) -> Tensor:
        offset = torch.zeros(1, 18, 9, 13) + 0.5  # half a pixel down and to the right
        return deform_conv2d(net.conv(x), offset, torch.ones(3, 3, 3, 3), stride=2).relu_()

    field = field_of(Function(deformed, conv=conv(2, stride=2)))
    assert (field.source, field.reason) == ("measured", "deform_conv2d, which is not followed")
    assert field.box((4, 6), SIZE) == (24, 16, 32, 24)  # 2 * 2 * (6, 4), and (4 - 1) * 2 + 2 pixels on


def test_where_windows_and_positions_meet_fields_are_measured_by_gradients() -> None:
    def windowed(net: Any, x: Tensor) -> Tensor:
        x = net.conv(x)
        windows = x.reshape(1, 3, 5, 2, 7, 2).permute(0, 2, 4, 1, 3, 5).reshape(35, 3, 4) @ torch.ones(4, 4)
        return windows.reshape(1, 5, 7, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(x.shape) + x

    field = field_of(Function(windowed, conv=conv(4, stride=4)))
    assert (field.source, field.size, field.stride, field.start) == ("measured", (12, 12), (4, 4), (-4, -4))


def test_of_a_clip_the_place_is_in_one_of_the_frames_side_by_side() -> None:
    net = nn.Sequential(nn.Conv3d(3, 2, 3, stride=(1, 2, 2)))
    field = fields_of(net, (6, 20, 30), "0", family="video")["0"]
    assert field == ReceptiveField("computed", (3, 3), (2, 2), (0, 0), frame=14)
    assert field.box((2, 14 + 3), (20, 30)) == field.box((2, 3), (20, 30)) == (6, 4, 9, 7)


def test_fields_of_a_detector_are_in_pixels_of_the_image_that_it_resizes_itself() -> None:
    net = get_model("ssdlite320_mobilenet_v3_large", weights=None, weights_backbone=None).eval()
    field = fields_of(net, (80, 160), "backbone.features.0.0.0")["backbone.features.0.0.0"]
    assert field.stride == (0.5, 1.0)  # of two pixels of 320x320


@pytest.mark.parametrize("measure", [effective_fields, receptive_fields])
def test_the_model_and_the_random_state_stay_as_they_are(measure: Callable[..., dict[str, Any]]) -> None:
    net = nn.Sequential(conv(3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout()).train()
    image, state = torch.rand(1, 3, *SIZE), ModelSnapshot(net)
    with torch.no_grad():
        found = measure(LoadedModel.of(net, "net", "random", WeightsMetadata()), (image,), "all")
    assert state.changes() == []
    assert list(found) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("place", "box"),
    [((0, 0), (0, 0, 4, 4)), ((2, 3), (5, 3, 10, 8)), ((9, 9), (17, 17, 18, 20)), ((-9, 0), (0, 0, 4, 1))],
)
def test_a_box_stays_inside_the_input_and_is_never_empty(place: tuple[int, int], box: tuple[int, ...]) -> None:
    assert ReceptiveField("computed", (5, 5), (2, 2), (-1, -1)).box(place, (20, 18)) == box


def test_a_box_has_no_pixel_more_by_rounding() -> None:
    field = ReceptiveField("computed", (0.1 + 0.2 + 2.7, 3.0), (0.1, 1 / 3), (0.0, 0.0))
    assert field.box((30, 3), (20, 20)) == (1, 3, 4, 6)  # 30 * 0.1 is not 3 exactly


@pytest.mark.parametrize("function", [torch.sum, torch.max, torch.Tensor.norm])
def test_a_single_number_sees_everything_that_it_was_made_of(function: Callable[[Tensor], Tensor]) -> None:
    tracker, image = FieldTracker(), torch.rand(1, 3, *SIZE)
    tracker.follow([image])
    with tracker:
        field, known = computed_field(tracker, function(image), None)
    assert (field.source, field.size, known) == ("whole", SIZE, True)
