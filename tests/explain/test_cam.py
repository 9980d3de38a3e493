"""Class activation maps: which layer, which class, which map; and what is refused."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from hookscope.errors import HookscopeError, InputError, LayerError, ModelError, NoMapError, UsageError
from hookscope.explain.cam import class_activation_maps, landmark_layers
from hookscope.explain.cam_maps import ClassActivationMap, fuse_maps, resized
from hookscope.explain.cam_methods import CAM_METHODS
from hookscope.hooks.calls import Call
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.scores.logits import Prediction
from hookscope.scores.score_targets import RegionTarget
from tests.explain.nets import Gives, picture, small
from tests.helpers import hooked, hooks_on, refused, seeded
from tests.nets import Function, named as chain


def only(model: nn.Module, inputs: Any, *args: Any, **options: Any) -> ClassActivationMap:
    [cam] = class_activation_maps(model, inputs, *args, **options)
    return cam


def close(ours: ClassActivationMap, expected: Tensor, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    torch.testing.assert_close(torch.from_numpy(ours.values), expected.detach().float(), rtol=rtol, atol=atol)


def vit(head: float = 0.5) -> nn.Module:
    net = seeded(
        lambda: VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5
        )
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        nn.init.normal_(net.heads.head.weight, std=head)  # torchvision begins with zeros
    return net


def swin() -> nn.Module:
    return seeded(
        lambda: SwinTransformer(
            patch_size=[4, 4], embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=[4, 4], num_classes=5
        )
    )


def torchvisions(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return torchvision.models.get_model(name, weights=None, **options)

    return lambda: seeded(build)


def test_the_default_of_a_segmentation_without_a_backbone_is_the_last_layer_of_the_lowest_resolution() -> None:
    up, down = nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3, stride=2, padding=1)
    layers = nn.Conv2d(3, 4, 1), down, nn.GELU(), up, nn.Conv2d(4, 3, 1)
    net = seeded(lambda: nn.Sequential(*layers))
    region = torch.ones(8, 8)
    assert only(net, picture(8, 8), target=RegionTarget(region, 1)).call.name == "2"
    assert landmark_layers(net, picture(8, 8), RegionTarget(region)) == ["0", "2"]


def segments(encoder: str, head: str) -> nn.Module:
    """A segmentation model whose head is coarser than what it is given.

    Its encoder returns the maps of all levels, the finest first, as in segmentation_models_pytorch and transformers.
    """

    def levels(net: Any, x: Tensor) -> list[Tensor]:
        fine = net.fine(x)
        return [x, fine, net.coarse(fine.relu())]

    def forward(net: Any, x: Tensor) -> Tensor:
        _, fine, coarse = net.get_submodule(encoder)(x)
        last = net.get_submodule(head)
        up = nn.functional.interpolate(last["down"](coarse), fine.shape[2:])
        return last["classes"](torch.cat([fine, up], 1))

    fine, coarse = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 6, 2, 2)
    layers = nn.ModuleDict({"down": nn.Conv2d(6, 6, 2, 2), "classes": nn.Conv2d(10, 5, 1)})
    return Function(forward, **{encoder: Function(levels, fine=fine, coarse=coarse), head: layers})


@pytest.mark.parametrize(("encoder", "head"), [("encoder", "after"), ("net", "decode_head")])
def test_the_layer_of_a_segmentation_is_the_last_map_before_the_head(encoder: str, head: str) -> None:
    net, x, region = seeded(lambda: segments(encoder, head)), picture(32, 32), RegionTarget(torch.ones(32, 32), 1)
    inner = only(net, x, f"{encoder}.coarse", region)
    for layer in (None, encoder):
        cam = only(net, x, layer, region)
        assert cam.call.name == encoder and np.array_equal(cam.values, inner.values)
    assert landmark_layers(net, x, region) == [f"{encoder}.fine", encoder]
    assert only(net, x, target=1, smooth=True).values.shape == (8, 8)


def attends() -> nn.Module:
    """Attention written out, as libraries do: what is inside has four axes, and none of them are places."""

    def forward(net: Any, x: Tensor) -> Tensor:
        tokens = net.norm(net.patches(x).flatten(2).transpose(1, 2))
        q, k, v = net.qkv(tokens).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # each (1, heads, tokens, 4)
        mixed = net.drop(net.weights(net.q_norm(q) @ k.transpose(2, 3))) @ v
        return net.head(mixed.mean(2).flatten(1))

    layers = {"patches": nn.Conv2d(3, 8, 4, 4), "norm": nn.LayerNorm(8), "qkv": nn.Linear(8, 24), "drop": nn.Dropout()}
    return Function(forward, **layers, weights=nn.Softmax(-1), q_norm=nn.LayerNorm(4), head=nn.Linear(8, 5))


def attends_with_positions() -> nn.Module:
    """Attention of 49 tokens and a head of 27 channels, as in CoAT."""

    def forward(net: Any, x: Tensor) -> Tensor:
        tokens = net.norm(net.patches(x).flatten(2).transpose(1, 2))
        return net.head(net.positions(tokens).mean((1, 2)))

    # its output looks like a map that is about twice as high as wide: (1, heads, tokens, channels of a head)
    positions = Function(lambda tokens: tokens.unflatten(2, (2, -1)).transpose(1, 2))
    patches, norm, head = nn.Conv2d(3, 54, 4, 4), nn.LayerNorm(54), nn.Linear(27, 5)
    return Function(forward, patches=patches, norm=norm, positions=positions, head=head)


def one_way() -> nn.Module:
    """Strides of two in one direction at a time: maps of 14x27, 13x14 and 7x14."""
    first, second = nn.Conv2d(3, 4, 2, (2, 1)), nn.Conv2d(4, 4, (2, 3), (1, 2), (0, 1))
    third = nn.Conv2d(4, 5, (1, 1), (2, 1))
    return chain(first=first, second=second, third=third, mean=Function(lambda x: x.mean((2, 3))))


def unpadded() -> nn.Module:
    layers = {"a": nn.Conv2d(3, 4, 4), "b": nn.Conv2d(4, 4, 3), "mean": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    return seeded(lambda: chain(**layers))


DEFAULTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, tuple[int, ...]]] = {
    "a mean": (small, (16, 16), "again", (8, 8)),
    "resnet18": (torchvisions("resnet18"), (64, 64), "layer4", (2, 2)),
    "squeezenet1_1": (torchvisions("squeezenet1_1"), (64, 64), "classifier.2", (3, 3)),
    "mobilenet_v2": (torchvisions("mobilenet_v2"), (64, 64), "features", (2, 2)),
    "shufflenet_v2_x0_5": (torchvisions("shufflenet_v2_x0_5"), (64, 96), "conv5", (2, 3)),
    "vit": (vit, (32, 32), "encoder.layers.encoder_layer_1.ln_1", (4, 4)),
    "swin": (swin, (64, 64), "permute", (8, 8)),
    "lraspp_mobilenet_v3_large": (
        torchvisions("lraspp_mobilenet_v3_large", weights_backbone=None), (64, 64), "backbone", (4, 4)
    ),
    **{
        f"attention, {high}x{wide}": (lambda: seeded(attends), (high, wide), "norm", (high // 4, wide // 4))
        for high, wide in ((16, 16), (32, 32), (32, 48))
    },
    "attention with positions": (lambda: seeded(attends_with_positions), (28, 28), "norm", (7, 7)),
    "strides in one direction": (lambda: seeded(one_way), (28, 28), "third", (7, 14)),
    "a wide picture": (unpadded, (8, 64), "b", (3, 59)),
    "a high picture": (unpadded, (64, 8), "b", (59, 3)),
}  # fmt: skip


@pytest.mark.parametrize("family", DEFAULTS)
def test_the_default_is_the_last_layer_with_a_map_that_the_score_depends_on(family: str) -> None:
    build, size, name, shape = DEFAULTS[family]
    cam = only(build(), picture(*size))
    assert (cam.call.name, cam.values.shape, cam.seen, cam.unreached) == (name, shape, size, False)
    assert np.isfinite(cam.values).all()


def aside(scored: bool = True) -> nn.Module:
    """Branches that the score does not depend on, last of all: unused, detached, under no_grad."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.trunk(x)
        net.unused(x)
        with torch.no_grad():
            blind = net.blind(x).mean()
        score = net.head(x.mean((2, 3))) + net.detached(x).detach().mean() + blind
        return score if scored else score.detach()

    sides = {name: nn.Conv2d(4, 4, 3) for name in ("unused", "detached", "blind", "idle")}
    return Function(forward, trunk=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 5), **sides)


def test_branches_that_the_score_does_not_depend_on_are_skipped() -> None:
    net = seeded(aside)
    assert only(net, picture()).call.name == "trunk" and landmark_layers(net, picture()) == ["trunk"]
    for method in ("eigencam", "scorecam", "ablationcam"):  # these need no gradient
        assert only(seeded(lambda: aside(False)), picture(), "trunk", method=method).values.any(), method


def test_a_score_that_no_value_changes_has_landmarks_and_a_last_map_that_is_all_zero() -> None:
    net, x = vit(head=0), picture(32, 32)
    cam, landmarks = only(net, x), landmark_layers(net, x)
    assert (cam.call.name, cam.values.shape, cam.peak) == ("encoder", (4, 4), None)
    assert landmarks[-1] == cam.call.key
    assert all(each.is_empty and each.unreached for each in [cam, *class_activation_maps(net, x, landmarks)])


def test_landmarks_are_the_last_outermost_layers_of_the_last_resolutions() -> None:
    net, x = torchvisions("resnet18")(), picture(64, 64)
    state = ModelSnapshot(net)
    assert landmark_layers(net, x) == ["layer2", "layer3", "layer4"]
    assert landmark_layers(net, x, most=5) == ["relu", "layer1", "layer2", "layer3", "layer4"]
    assert state.changes() == [] and landmark_layers(small(), picture()) == ["relu", "again"]
    blocks = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ZeroPad2d(2), nn.Conv2d(4, 4, 3)
    assert landmark_layers(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), picture()) == ["0", "3"]


def test_the_last_landmark_is_the_layer_that_is_taken_without_a_choice() -> None:
    def ends() -> nn.Module:
        """An outermost block, and a layer inside another that runs later and has maps of the same size."""
        stem, block = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 6, 3, padding=1)
        after = nn.ModuleDict({"act": nn.Tanh(), "head": nn.Linear(6, 5)})
        return Function(
            lambda net, x: net.after["head"](net.after["act"](net.block(net.stem(x))).mean((2, 3))),
            stem=stem, block=block, after=after,
        )  # fmt: skip

    assert landmark_layers(seeded(ends), picture()) == ["after.act"]
    for net, x in (
        (seeded(ends), picture()),
        (small(), picture()),
        (vit(), picture(32, 32)),
        (swin(), picture(48, 64)),
    ):
        for target in (0, "top:1"):
            assert landmark_layers(net, x, target)[-1] == only(net, x, target=target).call.key


SIZES = {"alexnet": 96, "inception_v3": 139, "maxvit_t": 224}
LAST = {
    "alexnet": "features", "convnext": "features", "densenet": "features", "efficientnet": "features",
    "googlenet": "inception5b", "inception_v3": "Mixed_7c", "maxvit": "blocks.3", "mnasnet": "layers",
    "mobilenet": "features", "regnet": "trunk_output", "resne": "layer4", "shufflenet": "conv5",
    "squeezenet": "classifier.2", "swin": "permute", "vgg": "features", "wide_resnet": "layer4",
    "vit_b": "encoder.layers.encoder_layer_11.ln_1", "vit_l": "encoder.layers.encoder_layer_23.ln_1",
    "vit_h": "encoder.layers.encoder_layer_31.ln_1",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models))
def test_every_classification_model_has_a_map(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of googlenet's and inception's builders
        net = torchvisions(name)()
    side = 224 if name.startswith("vit_") else SIZES.get(name, 64)
    if name.startswith("vit_"):
        nn.init.normal_(net.heads.head.weight, std=0.02)
    cam = only(net, picture(side, side))
    last = next(layer for family, layer in LAST.items() if name.startswith(family))
    assert cam.call.name == last and np.isfinite(cam.values).all() and not cam.unreached
    assert min(cam.values.shape) >= 2 and cam.prediction.index in range(1000)


CLIPS = {
    "r3d_18": ((16, 64, 64), "layer4", (2, 4, 4)),
    "mc3_18": ((8, 64, 64), "layer4", (8, 4, 4)),
    "r2plus1d_18": ((8, 64, 64), "layer4", (4, 4)),  # a single frame is left
    "s3d": ((16, 224, 224), "features", (2, 7, 7)),
    "swin3d_t": ((8, 64, 64), "norm", (4, 2, 2)),
    "mvit_v2_s": ((16, 224, 224), "blocks.15.norm1", (8, 7, 7)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
def test_video_models_have_one_map_per_frame(name: str) -> None:
    size, layer, shape = CLIPS[name]
    cam = only(torchvisions(name, num_classes=10)(), picture(*size))
    assert (cam.call.name, cam.values.shape, cam.unreached) == (layer, shape, False)
    assert np.isfinite(cam.values).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models.segmentation))
def test_every_segmentation_model_has_a_map(name: str) -> None:
    net = torchvisions(name, weights_backbone=None)()
    side = 4 if name == "deeplabv3_mobilenet_v3_large" else 8
    cam = only(net, picture(64, 64), "classifier")
    assert cam.channels == 21 and cam.values.shape == (side, side)
    inner = only(net, picture(64, 64))
    assert inner.call.name == "backbone" and min(inner.values.shape) >= 4 and inner.channels > 21


def evidence(net: nn.Module, layer: str, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Activation and gradient by a plain hook, for layers that nothing works in place on."""
    outputs: list[Tensor] = []
    with hooked(net, lambda name, output: outputs.append(output), layer):
        score = net(x)[0, index]
    [gradient] = torch.autograd.grad(score, outputs[0])
    return outputs[0].detach(), gradient


def test_tokens_fold_row_by_row_and_the_class_token_is_left_out() -> None:
    net, x = vit(), picture(32, 32)
    layer = "encoder.layers.encoder_layer_1.ln_1"
    activation, gradient = evidence(net, layer, x, 2)
    assert activation.shape == (1, 17, 16)
    tokens, slopes = activation[0, 1:], gradient[0, 1:]
    expected = {
        "gradcam": (tokens @ slopes.mean(0)).relu(),
        "hirescam": (tokens * slopes).sum(1),
        "layercam": (tokens * slopes.relu()).sum(1).relu(),
    }
    for method, values in expected.items():
        ours = only(net, x, layer, 2, method)
        assert ours.channels == 16
        close(ours, values.reshape(4, 4), atol=1e-7)


def test_channels_last_maps_are_turned() -> None:
    net, x = swin(), picture(48, 32)
    for layer in ("features.3", "norm", "features.1.0.norm1", "features.2", "features.0"):
        activation, gradient = evidence(net, layer, x, 1)
        weights = gradient[0].mean((0, 1))
        ours = only(net, x, layer, 1)
        assert ours.channels == activation.shape[-1] and ours.values.shape == activation.shape[1:3]
        close(ours, (activation[0] @ weights).relu(), atol=1e-7)
    # and turned by the model itself
    assert np.array_equal(only(net, x, "permute", 1).values, only(net, x, "norm", 1).values)


@pytest.mark.parametrize(("build", "layer", "first"), [(vit, "encoder.layers.encoder_layer_0", 1), (swin, "norm", 0)])
def test_ablation_zeroes_channels_of_tokens_and_of_channels_last(build: Any, layer: str, first: int) -> None:
    net, x = build().double(), picture(32, 32).double()  # differences of scores lose digits
    activation, _ = evidence(net, layer, x, 2)
    with torch.no_grad():
        score, weights = net(x)[0, 2], []
        for channel in range(activation.shape[-1]):

            def silence(name: str, output: Tensor, at: int = channel) -> Tensor:
                output = output.clone()
                output[:, first:, ..., at] = 0  # the class token is no place of the map
                return output

            with hooked(net, silence, layer):
                weights.append((score - net(x)[0, 2]) / abs(score))
    summed = (activation[0] @ torch.stack(weights)).relu().flatten()[first:]
    ours = only(net, x, layer, 2, "ablationcam", batch_size=3)
    assert ours.values.any()
    close(ours, summed.reshape(ours.values.shape))


def test_ablation_gives_a_map_of_zeros_if_only_the_class_token_is_read() -> None:
    net, x = vit(), picture(32, 32)
    for index in range(3):
        cam = only(net, x, "encoder.ln", index, "ablationcam")
        assert cam.values.shape == (4, 4) and not cam.values.any()
        assert only(net, x, "encoder.layers.encoder_layer_0", index, "ablationcam").values.shape == (4, 4)


def test_the_steps_of_a_recurrent_layer_are_not_a_map() -> None:
    conv, lstm, head = nn.Conv2d(3, 8, 4, 4), nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 5)
    net = Function(
        lambda net, x: net.head(net.lstm(net.conv(x).flatten(2).transpose(1, 2))[0].mean(1)),
        conv=conv, lstm=lstm, head=head,
    )  # fmt: skip
    assert only(net.eval(), picture()).call.name == "conv"
    with pytest.raises(NoMapError, match="the output of lstm is not a feature map"):
        class_activation_maps(net, picture(), "lstm")


def test_ablation_of_a_layer_that_returns_its_input_leaves_other_users_of_it() -> None:
    def skips(net: Any, x: Tensor) -> Tensor:
        x = net.conv(x)
        return net.head((3 * net.same(x) + x).mean((2, 3)))

    net = Function(skips, conv=nn.Conv2d(3, 4, 1), same=nn.Identity(), head=nn.Linear(4, 3)).eval()
    x = picture()
    with torch.no_grad():
        activation = net.conv(x)
        score = net(x)[0, 1]
        lost = 3 * activation.mean((2, 3))[0] * net.head.weight[1]  # of the score, without one channel of the branch
        expected = torch.einsum("c,chw->hw", lost / abs(score), activation[0]).relu()
    close(only(net, x, "same", 1, "ablationcam"), expected, atol=1e-5)


def slope(score: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    reached = values.clone().requires_grad_()
    return torch.autograd.grad(score(reached), reached)[0]


def test_clips_have_a_map_of_each_frame() -> None:
    layers = {"conv": nn.Conv3d(3, 4, 3, padding=1), "relu": nn.ReLU(inplace=True)}
    net = chain(**layers, mean=nn.AdaptiveAvgPool3d((2, 1, 1)), flat=nn.Flatten(), head=nn.Linear(8, 3)).eval()
    x = picture(4, 6, 8)
    with torch.no_grad():
        activation = net.conv(x)
    gradient = slope(lambda maps: net.head(net.flat(net.mean(maps.relu())))[0, 1], activation)
    weights = gradient[0].mean((1, 2, 3))
    expected = torch.einsum("c,cthw->thw", weights, activation[0]).relu()
    ours = only(net, x, "conv", 1)
    assert ours.values.shape == (4, 6, 8) and ours.seen == (6, 8) and ours.channels == 4
    close(ours, expected, atol=1e-7)
    close(only(net, x, "conv", 1, "hirescam"), (gradient[0] * activation[0]).sum(0))
    assert only(net, x).call.name == "relu"
    ablated = only(net, x, "conv", 1, "ablationcam").values
    assert ablated.shape == (4, 6, 8) and ablated.any()
    with pytest.raises(UsageError, match="masks need one image"):
        class_activation_maps(net, x, method="scorecam")


def test_maps_are_in_order_of_class_then_of_execution() -> None:
    net, x, names = small(), picture(), "abcde"
    maps = class_activation_maps(net, x, "again,first,second", "top:2", categories=names)
    with torch.no_grad():
        scores = net(x)[0]
    best = scores.argsort(descending=True)[:2].tolist()
    assert [(cam.prediction.index, cam.call.name) for cam in maps] == [
        (index, layer) for index in best for layer in ("first", "second", "again")
    ]
    for cam in maps:
        index = cam.prediction.index
        assert (cam.prediction.label, cam.seen) == (names[index], (16, 16))
        assert cam.prediction.score == pytest.approx(float(scores[index]), abs=1e-6)
        assert cam.prediction.probability == pytest.approx(float(scores.softmax(0)[index]), abs=1e-6)
        assert np.array_equal(cam.values, only(net, x, cam.call.name, index).values)
    assert [cam.call.name for cam in class_activation_maps(net, x, "0:")] == ["first", "second"]
    assert only(net, x, -1).call.name == "second"
    assert len(class_activation_maps(net, x, "0:3", types=("all",))) == 3


def test_a_layer_that_runs_twice_has_a_map_for_each_call() -> None:
    net = Function(
        lambda net, x: net.head(net.shared(net.shared(net.stem(x)).relu()).mean((2, 3))),
        stem=nn.Conv2d(3, 4, 1), shared=nn.Conv2d(4, 4, 3, padding=1), head=nn.Linear(4, 3),
    ).eval()  # fmt: skip
    x = picture()
    assert only(net, x).call.key == "shared#1"
    with torch.no_grad():
        first = net.shared(net.stem(x))
        second = net.shared(first.relu())
    maps = {cam.call.key: cam for cam in class_activation_maps(net, x, "shared,shared#1", 1, "hirescam")}
    assert list(maps) == ["shared", "shared#1"]
    scores = {
        "shared": lambda maps: net.head(net.shared(maps.relu()).mean((2, 3)))[0, 1],
        "shared#1": lambda maps: net.head(maps.mean((2, 3)))[0, 1],
    }
    for (key, score), activation in zip(scores.items(), (first, second), strict=True):
        gradient = slope(score, activation)
        close(maps[key], (gradient * activation)[0].sum(0))
    # and only that call is ablated
    with torch.no_grad():
        score, summed = net(x)[0, 1], torch.zeros(16, 16)
        for channel in range(4):
            without = second.clone()
            without[:, channel] = 0
            weight = (score - net.head(without.mean((2, 3)))[0, 1]) / abs(score)
            summed += weight * second[0, channel]
    close(only(net, x, "shared#1", 1, "ablationcam"), summed.relu())


def container(wrap: Callable[[Tensor, Tensor], Any], take: Callable[[Any], Tensor]) -> nn.Module:
    """A layer that returns a container, of which one part matters."""
    parts = Function(lambda net, x: wrap(net.conv(x), x), conv=nn.Conv2d(3, 4, 3))
    return Function(lambda net, x: net.head(take(net.parts(x)).mean((2, 3))), parts=parts, head=nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("wrap", "take"),
    [
        (lambda maps, x: (maps, None), lambda parts: parts[0]),
        (lambda maps, x: {"out": maps}, lambda parts: parts["out"]),
        (lambda maps, x: [maps.mean((2, 3)), maps], lambda parts: parts[1]),
        (lambda maps, x: (x[:, :, ::2, ::2] * 0, maps), lambda parts: parts[1]),
        (lambda maps, x: {"unused": maps + 1, "out": maps}, lambda parts: parts["out"]),
    ],
)
@pytest.mark.parametrize("method", CAM_METHODS)
def test_the_map_of_a_container_is_of_the_part_that_the_score_depends_on(method: str, wrap: Any, take: Any) -> None:
    net, x = seeded(lambda: container(wrap, take)), picture()
    whole, inner = only(net, x, "parts", 2, method), only(net, x, "parts.conv", 2, method)
    assert np.allclose(whole.values, inner.values, atol=1e-6) and whole.call.name == "parts"


def cam_of(values: Any, name: str = "a", index: int = 0) -> ClassActivationMap:
    call, array = Call(name, "Conv2d", 0, 0), np.array(values, np.float32)
    return ClassActivationMap(call, Prediction(index, None, 1, 1), "gradcam", array, 3, (8, 8))


def test_the_peak_is_the_middle_of_the_highest_cell_where_the_only_object_is() -> None:
    assert cam_of([[0, 0, 0, 0], [0, 0, 3, 1]]).peak == (0.75, 0.625)
    assert cam_of([[[1, 0], [0, 0]], [[0, 0], [2, 0]]]).peak == (0.75, 0.25)  # of a clip, the second frame
    assert cam_of([[0, -1]]).is_empty and cam_of([[0, -1]]).peak is None
    assert not cam_of([[0, 1e-30]]).is_empty
    conv = nn.Conv2d(3, 2, 1, bias=False)
    nn.init.ones_(conv.weight)
    bright = chain(conv=conv, mean=Function(lambda maps: maps.mean((2, 3))))

    x = torch.zeros(1, 3, 10, 20)
    x[:, :, 2, 15] = 1
    for method in CAM_METHODS:
        assert only(bright, x, target=1, method=method).peak == (0.25, 0.775), method


def test_fused_is_the_mean_of_the_scaled_maps() -> None:
    coarse, fine, nothing = cam_of([[10]], "a"), cam_of([[0, 4], [-8, 2]], "b"), cam_of([[0, 0], [0, 0]], "c")
    both = fuse_maps([coarse, fine])[0]
    assert both.values.tolist() == [[0.5, 1], [0.5, 0.75]] and both.call.name == "a + b" and both.channels == 6
    assert both.call.type == "Conv2d"
    other = dataclasses.replace(fine, call=Call("r", "ReLU", 0, 0))
    assert fuse_maps([coarse, other, fine])[0].call.type == "Conv2d + ReLU"
    assert fuse_maps([nothing, fine])[0].values.tolist() == [[0, 0.5], [0, 0.25]]
    clip = cam_of([[[0, 2], [0, 0]], [[0, 2], [0, 4]]], "d")
    assert fuse_maps([clip])[0].values.tolist() == [[0, 1], [0, 1]]
    assert fuse_maps([]) == []
    # the classes of a layer share its scale
    first, second = fuse_maps([coarse, cam_of([[5]], "a", 1)])
    assert (first.values.tolist(), second.values.tolist(), first.fused) == ([[1]], [[0.5]], True)
    with pytest.raises(HookscopeError, match="maps of several images cannot be fused"):
        fuse_maps([coarse, dataclasses.replace(fine, seen=(1, 1))])
    net, x = small(), picture()
    [values] = [cam.values for cam in fuse_maps(class_activation_maps(net, x, "first,second", 0, "layercam"))]
    assert values.shape == (16, 16) and 0 <= values.min() <= values.max() <= 1


def test_resized_samples_between_the_middles_of_cells() -> None:
    assert resized(torch.tensor([[[[0.0, 4.0]]]]), (1, 4)).tolist() == [[[[0, 1, 3, 4]]]]
    half = torch.tensor([[[[0.0, 4.0]]]]).half()
    assert resized(half, (1, 4)).dtype == torch.float32


@pytest.mark.parametrize("method", CAM_METHODS)
@pytest.mark.parametrize(
    ("layers", "drawn", "skipped"),
    [
        ("all", ["first", "norm", "relu", "drop", "pool", "second", "again"], ["mean", "flat", "head", ""]),
        ("5:9", ["second", "again"], ["mean", "flat"]),
        ("re:^(again|mean|head)$", ["again"], ["mean", "head"]),
        ("*a*", ["again"], ["mean", "flat", "head"]),
        (["second", "me*"], ["second"], ["mean"]),
    ],
)
def test_a_layer_without_a_map_is_skipped_where_a_pattern_chose_it(
    layers: Any, drawn: list[str], skipped: list[str], method: str
) -> None:
    skipped_calls: list[str] = []

    def skip(call: Call, error: NoMapError) -> None:
        assert isinstance(error, NoMapError) and call.name in str(error)
        skipped_calls.append(call.name)

    net = small()
    maps = class_activation_maps(net, picture(), layers, 1, method, types=("*",), on_skip=skip)
    assert [cam.call.name for cam in maps] == drawn
    assert [name for name in skipped_calls if name] == [name for name in skipped if name]
    with pytest.raises(NoMapError):  # unless nobody wants to hear of it
        class_activation_maps(net, picture(), layers, 1, method, types=("*",))


@pytest.mark.parametrize(
    "layers",
    [
        "head",
        "head,second",
        ["all", "head"],
        "second,head#0",
        "9",
        "+9",
        "5:8,9",
        "mean,first",
        "re:^(mean|flat|head)$",
    ],
)
def test_a_layer_without_a_map_is_an_error_if_it_is_named_exactly_or_is_the_only_one(layers: Any) -> None:
    with pytest.raises(NoMapError, match=r"^the (output of head is not a feature map|maps of mean have one position)"):
        class_activation_maps(small(), picture(), layers, 1, types=("*",), on_skip=lambda call, error: None)


def in_windows(net: Any, x: Tensor) -> Tensor:
    windows = torch.cat(net.stem(x).chunk(2, 2), 0)
    return net.head(torch.cat(net.inner(windows).chunk(2, 0), 2).mean((2, 3)))


WINDOWS = Function(in_windows, stem=nn.Conv2d(3, 4, 1), inner=nn.Conv2d(4, 4, 1), head=nn.Linear(4, 3))

NAN = picture()
NAN[0, 0, 3, 3] = float("nan")
HIDES_NAN = Gives(lambda maps: maps.nan_to_num(0, 0, 0).mean((2, 3)))
ROOT_OF_0 = Gives(lambda maps: maps.mean((2, 3)) + (maps * 0).abs().sqrt().mean((2, 3)))  # whose slope is infinite
FLAT = chain(flat=nn.Flatten(), head=nn.Linear(768, 5))
BOXES = Function(lambda x: [{"boxes": image[0], "scores": image[0, 0]} for image in x])
NO_BATCH = "expected an image (1, C, H, W) or a clip (1, C, T, H, W), got {}; x[None]"
GRADIENT = [name for name, method in CAM_METHODS.items() if method.gradient]


@pytest.mark.parametrize(
    ("net", "x", "options", "error", "text"),
    [
        (small(), picture(), {"method": "gradcan"}, UsageError, "no method 'gradcan'; nearest: gradcam"),
        (small(), picture(), {"layers": "haed"}, LayerError, "haed"),
        (small(), picture(), {"layers": "head"}, NoMapError, "the output of head is not a feature map"),
        (small(), picture(), {"layers": "mean"}, NoMapError, "have one position; choose a layer before the pooling"),
        (small(), picture(), {"layers": ["second", "flat"]}, NoMapError, "the output of flat is not a feature map"),
        (small(), picture(), {"layers": "7"}, LayerError, "no index 7"),
        (small(), picture(), {"layers": "second#1"}, LayerError, "second#1"),
        (small(), picture(), {"batch_size": 0}, UsageError, "batch"),
        (small(), (), {}, UsageError, "expected an image"),
        (small(), ("a word",), {}, UsageError, "the input holds no tensor"),
        (WINDOWS, picture(), {"layers": "inner"}, NoMapError, "the output of inner holds 2 parts of the image"),
        (aside(), picture(), {"layers": "idle"}, LayerError, "idle did not run"),
        (aside(), picture(), {"layers": ["idle", "trunk"]}, LayerError, "idle did not run"),
        (aside(False), picture(), {"layers": "trunk"}, LayerError, "the score does not depend on trunk"),
        (
            aside(False),
            picture(),
            {},
            NoMapError,
            "no layer of Function has a map that the score depends on; no gradient",
        ),
        (small(), picture(), {"target": lambda output: output[:, 0], "smooth": True}, UsageError, "smoothing takes"),
        (small(), (picture(), 3), {"target": 1, "smooth": True}, UsageError, "smoothing takes"),
        # the pictures in a list that detection takes need no batch axis
        (BOXES, ([torch.rand(3, 16, 16)],), {}, ModelError, "gives boxes and scores, no score for each class"),
        (FLAT, picture(), {}, NoMapError, "depends on; no layer has a map; use saliency"),
        (HIDES_NAN, NAN, {"layers": "conv"}, InputError, "the map of conv is not finite; its activation holds NaN"),
        (ROOT_OF_0, picture(), {"layers": "conv"}, InputError, "the map of conv is not finite; its gradient holds NaN"),
    ],
)
def test_layers_models_and_inputs_without_a_map_are_refused(
    net: nn.Module, x: Any, options: dict[str, Any], error: type[HookscopeError], text: str
) -> None:
    with refused(error, text, part="holds"):
        class_activation_maps(net.eval(), x, **options)
    assert hooks_on(net) == 0
    if not options and not hasattr(net, "trunk"):  # methods without gradient take any layer with a map
        with refused(error, text, part="holds"):
            landmark_layers(net, x)


@pytest.mark.parametrize("method", GRADIENT)
@pytest.mark.parametrize("layer", ["unused", "detached", "blind"])
def test_a_layer_that_the_score_does_not_depend_on_is_refused(layer: str, method: str) -> None:
    says = f"does not depend on {layer}; .*unused, detached or computed under no_grad; .*eigenc"
    with pytest.raises(LayerError, match=says):
        class_activation_maps(seeded(aside), picture(), layer, method=method)


@pytest.mark.parametrize("method", CAM_METHODS)
def test_a_weight_that_is_not_finite_spoils_the_gradient_of_every_class(method: str) -> None:
    net = small()
    with torch.no_grad():
        net.head.weight[0, 0] = float("nan")
    if CAM_METHODS[method].gradient:  # 0 * NaN is in the gradient of the other classes too
        with pytest.raises(InputError, match="the map of second is not finite; its gradient holds NaN or Inf"):
            class_activation_maps(net, picture(), "second", 1, method)
    else:
        assert np.isfinite(only(net, picture(), "second", 1, method).values).all()


@pytest.mark.parametrize("shape", [(), (3,), (16, 16), (3, 16, 16), (1, 1, 3, 2, 16, 16)])
@pytest.mark.parametrize("ask", [class_activation_maps, landmark_layers])
def test_a_picture_without_a_batch_axis_is_refused_with_the_way_to_add_it(ask: Any, shape: tuple[int, ...]) -> None:
    for inputs in (torch.zeros(shape), (torch.zeros(shape),)):
        with refused(UsageError, NO_BATCH.format("x".join(map(str, shape)) or "one number"), part="begins"):
            ask(small(), inputs)


@pytest.mark.slow
def test_the_float_models_of_quantized_builders_have_a_map() -> None:
    for name in ("quantized_mobilenet_v2", "quantized_resnet18", "quantized_shufflenet_v2_x0_5"):
        cam = only(torchvisions(name)(), picture(64, 64))
        assert cam.values.shape == (2, 2) and not cam.unreached, name


@pytest.mark.filterwarnings("ignore")  # that this part of torch will go
@pytest.mark.parametrize("method", sorted(CAM_METHODS.keys() - set(GRADIENT)))
def test_the_last_layer_with_a_map_is_the_default_of_a_quantized_model(method: str) -> None:
    conv, dequant = torch.ao.nn.quantized.Conv2d(3, 4, 3), torch.ao.nn.quantized.DeQuantize()
    conv.set_weight_bias(torch.quantize_per_tensor(torch.randn(4, 3, 3, 3), 1 / 32, 0, torch.qint8), torch.zeros(4))
    net = Function(
        lambda net, x: net.dequant(net.conv(torch.quantize_per_tensor(x, 1 / 64, 0, torch.quint8)).mean((2, 3))),
        conv=conv, dequant=dequant,
    )  # fmt: skip
    cam = only(net.eval(), picture(8, 8), method=method)
    assert cam.call.name == "conv" and cam.values.shape == (6, 6) and np.isfinite(cam.values).all()


@pytest.mark.slow
def test_quantized_models_have_maps_by_the_methods_without_gradient() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this part of torch will go
        net = torchvisions("quantized_resnet18", quantize=True)()
        x = picture(64, 64)
        for method in CAM_METHODS.keys() - set(GRADIENT):
            assert only(net, x, "layer3", method=method).values.shape == (4, 4)
            assert only(net, x, method=method).call.name == "layer4"
        with pytest.raises(LayerError, match="does not depend on layer3"):
            class_activation_maps(net, x, "layer3")


@pytest.mark.parametrize("method", sorted(CAM_METHODS.keys() - set(GRADIENT)))
def test_methods_without_gradient_have_a_default_layer_where_no_gradient_flows(method: str) -> None:
    frozen = Function(torch.no_grad()(lambda net, x: net.net(x)), net=small())  # as a quantized model, an ONNX file
    default = only(small(), picture(), method=method)
    cam = only(frozen, picture(), method=method)
    assert cam.call.name == f"net.{default.call.name}" and np.array_equal(cam.values, default.values)
    assert landmark_layers(frozen, picture()) == [f"net.{name}" for name in landmark_layers(small(), picture())]
    with pytest.raises(NoMapError, match="choose a method without gradient: eigencam, scorecam, ablationcam"):
        class_activation_maps(frozen, picture())


def test_a_graph_begins_at_the_layer_and_parameters_are_as_before() -> None:
    net, seen = small(), []
    flags = {name: parameter.requires_grad for name, parameter in net.named_parameters()}
    net.first.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    net.head.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    class_activation_maps(net, picture(), "second", 1)
    assert seen == [False, True]
    assert {name: parameter.requires_grad for name, parameter in net.named_parameters()} == flags


def test_counts_the_order_of_calls_only_on_demand() -> None:
    [plain], [ordered] = (class_activation_maps(small(), picture(), "second", 1, ordered=on) for on in (False, True))
    assert (plain.call.index, plain.call.order) == (1, None)
    assert (ordered.call.index, ordered.call.order) == (1, 5)


@pytest.mark.parametrize("method", ["gradcam", "scorecam"])
def test_smoothing_is_the_mean_over_mirrored_and_scaled_images(method: str) -> None:
    net, x, steps = small(), picture(12, 16), list[tuple[int, int]]()
    smooth = class_activation_maps(net, x, None, "top:2", method, smooth=True, on_progress=lambda *at: steps.append(at))
    plain = class_activation_maps(net, x, None, "top:2", method)
    assert [cam.prediction for cam in smooth] == [cam.prediction for cam in plain]
    assert not steps or steps[-1][0] == steps[-1][1] == 6 * plain[0].channels
    for ours in smooth:
        total = np.zeros_like(ours.values)
        for factor in (0.9, 1, 1.1):
            for image, step in ((x, 1), (x.flip(-1), -1)):
                [one] = class_activation_maps(net, factor * image, ours.call.key, ours.prediction.index, method)
                total += one.values[..., ::step] / 6
        assert np.allclose(ours.values, total, atol=1e-6) and ours.variants == 6
