"""Every shape a vision layer puts out, against tensors permuted by hand."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.errors import NoMapError
from hookscope.hooks.endings import output_of
from hookscope.hooks.maps import InputSize, Maps, by_channel, channel_axis, channels_last, feature_maps, token_grid
from tests.helpers import hooked

SQUARE = InputSize(224, 224)


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def only(output: Any, module: nn.Module | None = None, shown: InputSize | None = None) -> Maps:
    (maps,) = feature_maps(output, module, shown)
    return maps


def test_a_convolution() -> None:
    maps = only(numbered(1, 3, 4, 5), nn.Conv2d(1, 1, 1))
    assert (maps.part, maps.label, maps.axes, maps.item, maps.items, maps.frames) == ("", "", "N C H W", 0, 1, 1)
    assert torch.equal(maps.values, numbered(3, 4, 5))


def test_channels_last_by_class_and_by_proportions() -> None:
    tensor = numbered(1, 7, 7, 12)
    by_hand = tensor[0].permute(2, 0, 1)
    for module in (nn.LayerNorm(12), nn.Linear(1, 12), nn.GELU(), torchvision.ops.Permute([0, 2, 3, 1]), None):
        maps = only(tensor, module, SQUARE)
        assert maps.axes == "N H W C"
        assert torch.equal(maps.values, by_hand)
    first = torchvision.ops.Permute([0, 3, 1, 2])
    for module in (nn.Conv2d(1, 1, 1), nn.BatchNorm2d(7), nn.AdaptiveAvgPool2d(1), first):
        assert only(tensor, module, SQUARE).values.shape == (7, 7, 12)
    assert only(numbered(1, 9, 9, 9), nn.ReLU(), SQUARE).axes == "N C H W"
    assert only(numbered(1, 12, 9, 16), nn.ReLU(), InputSize(90, 160)).axes == "N C H W"
    assert only(numbered(1, 9, 16, 12), nn.ReLU(), InputSize(90, 160)).axes == "N H W C"
    assert channel_axis(numbered(1, 64, 80, 80), nn.ReLU(), InputSize(240, 320)) == 1
    tensor = numbered(1, 5, 5, 6)
    assert channels_last(nn.Sequential(nn.Conv2d(1, 1, 1), nn.LayerNorm(6), nn.Dropout()), tensor)
    assert not channels_last(nn.Sequential(nn.LayerNorm(6), nn.Conv2d(1, 1, 1), nn.ReLU()), tensor)
    assert channels_last(nn.Sequential(nn.ReLU()), tensor)


@pytest.mark.parametrize("extra", [0, 1, 2, 5])
def test_tokens_fold_to_their_grid(extra: int) -> None:
    tokens = numbered(1, extra + 4 * 6, 3)
    maps, *apart = feature_maps(tokens, nn.LayerNorm(3), InputSize(40, 60))
    for y in range(4):
        for x in range(6):
            assert torch.equal(maps.values[:, y, x], tokens[0, extra + y * 6 + x])
    assert [one.part for one in apart] == {0: [], 1: ["class token"]}.get(extra, [f"{extra} class tokens"])
    for one in apart:
        assert torch.equal(one.values, tokens[0, :extra].T[:, None])


def test_token_grids() -> None:
    assert token_grid(196) == (0, 1, 14, 14)
    assert token_grid(197) == (1, 1, 14, 14)
    assert token_grid(198) == (2, 1, 14, 14)
    assert token_grid(12 * 20 + 1, InputSize(120, 200)) == (1, 1, 12, 20)
    clip = InputSize(224, 224, 16)  # of mvit and swin3d
    assert token_grid(8 * 7 * 7, clip) == (0, 8, 7, 7) and token_grid(8 * 14 * 14, clip) == (0, 8, 14, 14)
    assert token_grid(1 + 8 * 7 * 7, clip) == (1, 8, 7, 7) and token_grid(1 + 8 * 56 * 56, clip) == (1, 8, 56, 56)
    for length in (1, 2, 3, 7, 91, 1000):
        assert token_grid(length) is None


def test_a_picture_without_a_batch() -> None:
    for tensor in (numbered(3, 12, 16), numbered(64, 25, 32)):
        maps = only(tensor, None, InputSize(300, 400))
        assert maps.axes == "C H W"
        assert torch.equal(maps.values, tensor)
    assert only(numbered(8, 5, 9), nn.Conv2d(1, 1, 1)).axes == "C H W"


@pytest.mark.parametrize("last", [False, True])
def test_clips_have_their_frames_side_by_side(last: bool) -> None:
    clip = numbered(1, 2, 3, 4, 5)
    module = nn.LayerNorm(2) if last else nn.Conv3d(1, 1, 1)
    maps = only(clip.movedim(1, -1) if last else clip, module)
    assert (maps.frames, maps.axes) == (3, "N T H W C" if last else "N C T H W")
    for frame in range(3):
        assert torch.equal(maps.values[:, :, 5 * frame : 5 * frame + 5], clip[0, :, frame])


def test_items_of_a_batch_are_named() -> None:
    first, second = feature_maps(numbered(5, 2, 3, 3), nn.Conv2d(1, 1, 1))
    assert (first.label, second.label) == ("item 0 of 5", "item 1 of 5")
    assert torch.equal(second.values, numbered(5, 2, 3, 3)[1])
    assert [maps.label for maps in feature_maps({"a": numbered(2, 1, 3, 3)})] == ["a, item 0 of 2", "a, item 1 of 2"]


def test_parts_are_named() -> None:
    output = OrderedDict(out=numbered(1, 2, 3, 3), aux=(numbered(1, 4, 5, 5), numbered(1, 7)))
    assert [(m.part, tuple(m.values.shape)) for m in feature_maps(output)] == [("out", (2, 3, 3)), ("aux.0", (4, 5, 5))]
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    tokens = torch.rand(1, 17, 8)
    maps = feature_maps(attention(tokens, tokens, tokens, need_weights=False), attention)
    assert [(m.part, tuple(m.values.shape)) for m in maps] == [("0", (8, 4, 4)), ("0, class token", (8, 1, 1))]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (numbered(1, 1000), "the output is 1x1000, not a feature map"),
        (torch.tensor(1.0), "the output is a single number, not a feature map"),
        (None, "the output is no tensor, not a feature map"),
        (([], {}), "the output is no tensor, not a feature map"),
        ({"boxes": numbered(7, 4), "labels": numbered(7)}, "the output is 7x4 and 7, not a feature map"),
        (torch.zeros(0, 256, 14, 14), "the output is 0x256x14x14, not a feature map"),
        (numbered(1, 7, 8), "the output is 1x7x8, not a feature map"),
    ],
)
def test_the_error_for_an_output_without_maps_has_its_shapes(output: Any, words: str) -> None:
    with pytest.raises(NoMapError) as caught:
        feature_maps(output, nn.Linear(1, 1))
    assert str(caught.value) == words


@pytest.mark.parametrize("module", [nn.Conv1d(1, 1, 1), nn.BatchNorm1d(16), nn.AvgPool1d(1)])
def test_a_signal_is_no_map(module: nn.Module) -> None:
    with pytest.raises(NoMapError):
        feature_maps(numbered(1, 16, 9), module)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("shown", [None, InputSize(32, 32)])
def test_the_steps_of_a_recurrent_layer_are_no_positions_of_a_map(
    layer: type[nn.Module], shown: InputSize | None
) -> None:
    module = layer(6, 8, batch_first=True).eval()
    tokens = torch.rand(1, 16, 6)
    with pytest.raises(NoMapError):
        feature_maps(module(tokens), module, shown)
    with pytest.raises(NoMapError):
        feature_maps(module(tokens)[0], module, shown)
    # of another layer the same tensor is a grid of 4x4
    assert only(module(tokens)[0], nn.Linear(6, 8), shown).values.shape == (8, 4, 4)


def outputs(model: nn.Module, *inputs: Any) -> dict[str, tuple[nn.Module, Any]]:
    """What each layer of a model puts out."""
    layers: dict[str, tuple[nn.Module, Any]] = {}
    with torch.no_grad(), hooked(model, lambda name, out: layers.update({name: (model.get_submodule(name), out)})):
        model.eval()(*inputs)
    return layers


def test_every_layer_of_swin() -> None:
    model = torchvision.models.SwinTransformer([4, 4], 24, [2, 2], [2, 2], [4, 4], num_classes=3)
    layers = outputs(model, torch.rand(1, 3, 96, 64))
    read = {"N C H W": 0, "N H W C": 0}
    for name, (module, out) in layers.items():
        if out.dim() != 4:
            continue
        maps = only(out, module, InputSize(96, 64))
        first = name in ("features.0.0", "permute", "avgpool")
        assert maps.axes == ("N C H W" if first else "N H W C"), name
        assert torch.equal(maps.values, out[0] if first else out[0].permute(2, 0, 1))
        read[maps.axes] += 1
    assert read["N C H W"] == 3
    assert read["N H W C"] > 40


def test_every_layer_of_swin3d() -> None:
    model = torchvision.models.video.SwinTransformer3d([2, 4, 4], 12, [2], [2], [2, 2, 2], num_classes=3)
    layers = outputs(model, torch.rand(1, 3, 8, 32, 32))
    read = 0
    for name, (module, out) in layers.items():
        if out.dim() == 5 and name not in ("patch_embed.proj", "avgpool"):
            maps = only(out, module, InputSize(32, 32, 8))
            assert (maps.axes, maps.frames) == ("N T H W C", out.shape[1]), name
            assert torch.equal(maps.values[:, :, : out.shape[3]], out[0, 0].permute(2, 0, 1))
            read += 1
    assert read > 10
    assert only(layers["patch_embed.proj"][1], layers["patch_embed.proj"][0]).axes == "N C T H W"


def test_every_layer_of_convnext() -> None:
    setting = torchvision.models.convnext.CNBlockConfig
    model = torchvision.models.ConvNeXt([setting(8, 16, 1), setting(16, None, 1)], num_classes=3)
    layers = outputs(model, torch.rand(1, 3, 64, 64))
    inside = ("block.1", "block.2", "block.3", "block.4", "block.5")  # between the two Permutes
    axes = {name: only(out, module, InputSize(64, 64)).axes for name, (module, out) in layers.items() if out.dim() == 4}
    assert {name for name, read in axes.items() if read == "N H W C"} == {n for n in axes if n.endswith(inside)}
    assert len([name for name in axes if name.endswith(inside)]) == 10


def test_the_layers_of_vit() -> None:
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 12, 24, num_classes=3)
    layers = outputs(model, torch.rand(1, 3, 32, 32))
    read = 0
    for name, (module, out) in layers.items():
        tokens = out[0] if isinstance(out, tuple) else out
        if tokens.dim() == 3:
            maps, apart = feature_maps(out, module, InputSize(32, 32))
            assert torch.equal(maps.values, tokens[0, 1:].T.reshape(-1, 4, 4)), name
            assert torch.equal(apart.values[:, 0, 0], tokens[0, 0])
            read += 1
    assert read > 10
    assert only(layers["conv_proj"][1], layers["conv_proj"][0]).values.shape == (12, 4, 4)


def test_the_blocks_of_mvit() -> None:
    block = torchvision.models.video.mvit.MSBlockConfig
    model = torchvision.models.video.MViT(
        *((32, 32), 4, [block(1, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2])] * 2),
        residual_pool=True, residual_with_cls_embed=True, rel_pos_embed=False, proj_after_attn=True,
        patch_embed_kernel=(3, 7, 7), patch_embed_stride=(2, 4, 4), patch_embed_padding=(1, 3, 3), num_classes=3,
    )  # fmt: skip
    layers = outputs(model, torch.rand(1, 3, 4, 32, 32))
    module, (tokens, *size) = layers["blocks.0"]
    maps, apart = feature_maps((tokens, *size), module, InputSize(32, 32, 4))
    assert (maps.frames, maps.label, apart.label) == (2, "0", "0, class token")
    folded = tokens[0, 1:].T.reshape(-1, 2, 8, 8)
    assert torch.equal(maps.values, torch.cat([folded[:, 0], folded[:, 1]], 2))


def test_the_pyramid_of_a_detector_and_its_heads() -> None:
    pyramid = torchvision.ops.FeaturePyramidNetwork([4, 8], 6)
    features = OrderedDict(a=torch.rand(1, 4, 8, 12), b=torch.rand(1, 8, 4, 6))
    output = pyramid(features)
    assert {m.part: tuple(m.values.shape) for m in feature_maps(output, pyramid)} == {"a": (6, 8, 12), "b": (6, 4, 6)}
    head = torchvision.models.detection.rpn.RPNHead(6, 3)
    maps = feature_maps(head(list(output.values())), head)
    assert [m.part for m in maps] == ["0.0", "0.1", "1.0", "1.1"]
    sizes = torchvision.models.detection.transform.GeneralizedRCNNTransform(32, 64, [0] * 3, [1] * 3)
    images, _ = sizes([torch.rand(3, 40, 50)])
    (maps,) = feature_maps((images, None), sizes)
    assert torch.equal(maps.values, images.tensors[0])


@pytest.mark.parametrize(
    ("shape", "module", "channels", "positions"),
    [
        ((), None, 1, 1),
        ((7,), nn.Linear(1, 7), 7, 1),
        ((5, 7), nn.Linear(1, 7), 7, 1),
        ((2, 197, 768), nn.LayerNorm(768), 768, 197),
        ((2, 197, 768), nn.GELU(), 768, 197),
        ((2, 5, 40), nn.Conv1d(1, 5, 1), 5, 40),
        ((8, 5, 9), nn.Conv2d(1, 8, 1), 8, 45),
        ((2, 8, 5, 9), nn.Conv2d(1, 8, 1), 8, 45),
        ((2, 8, 1, 1), nn.ReLU(), 8, 1),
        ((2, 14, 14, 8), nn.GELU(), 8, 196),
        ((2, 14, 14, 8), nn.LayerNorm(8), 8, 196),
        ((2, 8, 3, 5, 9), nn.Conv3d(1, 8, 1), 8, 135),
        ((2, 3, 14, 14, 8), nn.LayerNorm(8), 8, 588),
        ((2, 4, 3, 7, 7, 8), None, 8, 588),
        ((0, 8, 5, 9), nn.Conv2d(1, 8, 1), 8, 45),
        ((2, 8, 0, 9), nn.Conv2d(1, 8, 1), 8, 0),
    ],
)
def test_channels_come_second(shape: tuple[int, ...], module: nn.Module, channels: int, positions: int) -> None:
    tensor = by_channel(numbered(*shape), module, SQUARE)
    assert (tensor.shape[1], tensor[0, 0].numel() if len(tensor) else positions) == (channels, positions)
    assert tensor.numel() == numbered(*shape).numel()


def test_each_channel_keeps_its_values_with_a_batch_or_without() -> None:
    tokens, maps = numbered(2, 6, 4), numbered(2, 4, 4, 3)
    assert torch.equal(by_channel(tokens)[1, 2], tokens[1, :, 2])
    assert torch.equal(by_channel(maps, nn.LayerNorm(3))[1, 2], maps[1, :, :, 2])
    assert by_channel(maps, nn.Conv2d(1, 1, 1)) is maps
    maps = numbered(8, 5, 9)
    assert by_channel(maps, nn.ReLU(), InputSize(5, 9, batched=False)).shape == (1, 8, 5, 9)
    assert by_channel(maps, nn.ReLU(), InputSize(5, 9)).shape == (8, 9, 5)
    assert by_channel(maps, nn.LayerNorm(9), InputSize(5, 9, batched=False)).shape == (8, 9, 5)


@pytest.mark.parametrize(
    ("shape", "module", "axis"),
    [
        ((2, 3, 5), nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU()), 1),
        ((3, 5), nn.Conv1d(1, 1, 1), 0),
        ((2, 3, 5), nn.GroupNorm(1, 3), 1),
        ((2, 3), nn.BatchNorm1d(3), 1),
        ((3, 4, 5, 6), nn.Conv3d(1, 1, 1), 0),
        ((3, 5, 6), nn.MaxPool2d(2), 0),
        ((2, 3, 10), nn.Upsample(10), 1),
        ((2, 5, 6, 3), nn.Sequential(nn.Conv2d(1, 1, 1), nn.LayerNorm(3)), 3),
        ((7,), None, 0),
    ],
)
def test_the_axis_of_the_channels(shape: tuple[int, ...], module: nn.Module | None, axis: int) -> None:
    assert channel_axis(torch.zeros(shape), module) == axis


def test_inputs_may_have_another_channel_order_than_outputs() -> None:
    from torchvision.ops import Permute

    first, last = torch.zeros(2, 3, 8, 9), torch.zeros(2, 8, 9, 3)
    layers = nn.Sequential(nn.Dropout(), nn.Conv2d(1, 1, 1), Permute([0, 2, 3, 1]), nn.LayerNorm(3))
    for module in (layers, Permute([0, 2, 3, 1]), nn.Sequential(nn.Flatten(), nn.Linear(1, 1))):
        assert channel_axis(first, module, of_input=True) == 1
    assert channel_axis(last, layers) == 3 == channel_axis(last, Permute([0, 3, 1, 2]), of_input=True)


@pytest.mark.parametrize("turn", [lambda x: x.transpose(2, 3), lambda x: torch.rot90(x, 1, (2, 3))])
def test_an_activation_after_a_convolution_has_its_axes_though_the_image_is_turned(turn: Any) -> None:
    conv, relu = nn.Conv2d(3, 96, 3, padding=1), nn.ReLU()  # 96 channels of 160x96: also the shape of (H, W, C)
    shown = InputSize(96, 160)
    with torch.no_grad():
        after = output_of(lambda x: relu(conv(turn(x))), torch.rand(1, 3, 96, 160))
        tensor = relu(conv(turn(torch.rand(1, 3, 96, 160))))
    [maps] = feature_maps(after, relu, shown)
    assert (maps.axes, tuple(maps.values.shape)) == ("N C H W", (96, 160, 96))
    assert feature_maps(tensor, relu, shown)[0].axes == "N H W C"  # what the proportions alone say
