"""Class activation maps: which layer, which class, which map; what cannot be is said; and the model never knows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from hookscope.errors import HookscopeError, InputError, LayerError, ModelError, NoMapError, TargetError, UsageError
from hookscope.explain.cam import ClassActivationMap, class_activation_maps, fused, landmark_layers, resized
from hookscope.explain.cam_methods import CAM_METHODS
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.hooks.selection import Call
from hookscope.scores.logits import Prediction
from tests.helpers import hooks_on, seeded
from tests.nets import Fails, named as chain

GRADIENT = [name for name, method in CAM_METHODS.items() if method.gradient]


def picture(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(1, 3, *(shape or (16, 16)), generator=torch.Generator().manual_seed(seed))


def small() -> nn.Module:
    """Two convolutions before ReLUs in place, BatchNorm and Dropout between, a head on their mean."""
    return seeded(
        lambda: chain(
            first=nn.Conv2d(3, 6, 3, padding=1),
            norm=nn.BatchNorm2d(6),
            relu=nn.ReLU(inplace=True),
            drop=nn.Dropout(0.5),
            pool=nn.MaxPool2d(2),
            second=nn.Conv2d(6, 8, 3, padding=1),
            again=nn.ReLU(inplace=True),
            mean=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            head=nn.Linear(8, 5),
        )
    )


def only(model: nn.Module, inputs: Any, *args: Any, **options: Any) -> ClassActivationMap:
    [found] = class_activation_maps(model, inputs, *args, **options)
    return found


def same(ours: ClassActivationMap, other: ClassActivationMap) -> bool:
    return ours.call == other.call and np.array_equal(ours.values, other.values) and ours.values.any()


def one_line(error: pytest.ExceptionInfo[HookscopeError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 300
    return text


# -- the default layer -------------------------------------------------------------------------------------------------


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


DEFAULTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, tuple[int, ...]]] = {
    "a mean": (small, (16, 16), "again", (8, 8)),
    "resnet18": (torchvisions("resnet18"), (64, 64), "layer4", (2, 2)),
    "squeezenet1_1": (torchvisions("squeezenet1_1"), (64, 64), "classifier.2", (3, 3)),
    "mobilenet_v2": (torchvisions("mobilenet_v2"), (64, 64), "features", (2, 2)),
    "shufflenet_v2_x0_5": (torchvisions("shufflenet_v2_x0_5"), (64, 96), "conv5", (2, 3)),
    "vit": (vit, (32, 32), "encoder.layers.encoder_layer_1.ln_1", (4, 4)),
    "swin": (swin, (64, 64), "permute", (8, 8)),
    "lraspp_mobilenet_v3_large": (
        torchvisions("lraspp_mobilenet_v3_large", weights_backbone=None), (64, 64), "classifier", (8, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", DEFAULTS)
def test_the_default_is_the_last_layer_with_a_map_that_the_score_depends_on(family: str) -> None:
    build, size, name, shape = DEFAULTS[family]
    found = only(build(), picture(*size))
    assert (found.call.name, found.values.shape, found.seen, found.unreached) == (name, shape, size, False)
    assert np.isfinite(found.values).all()


def test_of_a_score_that_no_value_changes_it_is_the_last_map_and_all_zero() -> None:
    found = only(vit(head=0), picture(32, 32))
    assert found.is_empty and found.unreached and found.peak is None
    assert (found.call.name, found.values.shape) == ("encoder", (4, 4))


class Attends(nn.Module):
    """Attention written out, as libraries do: what is inside has four axes, and none of them are places."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.qkv, self.weights, self.drop, self.q_norm = nn.Linear(8, 24), nn.Softmax(-1), nn.Dropout(), nn.LayerNorm(4)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        q, k, v = self.qkv(tokens).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # each (1, heads, tokens, 4)
        mixed = self.drop(self.weights(self.q_norm(q) @ k.transpose(2, 3))) @ v
        return self.head(mixed.mean(2).flatten(1))


@pytest.mark.parametrize("size", [(16, 16), (32, 32), (32, 48)])
def test_the_inside_of_attention_is_passed_by(size: tuple[int, int]) -> None:
    found = only(seeded(Attends), picture(*size))
    assert (found.call.name, found.values.shape) == ("norm", (size[0] // 4, size[1] // 4))


def test_long_pictures_through_convolutions_without_padding_have_a_map() -> None:
    net = seeded(
        lambda: chain(a=nn.Conv2d(3, 4, 4), b=nn.Conv2d(4, 4, 3), mean=nn.AdaptiveAvgPool2d(1), f=nn.Flatten())
    )
    for size, shape in (((8, 64), (3, 59)), ((64, 8), (59, 3))):
        found = only(net, picture(*size))
        assert (found.call.name, found.values.shape) == ("b", shape)


class Aside(nn.Module):
    """Branches that the score does not depend on, last of all: unused, detached, under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)
        self.unused, self.detached, self.blind = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.idle = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        score = self.head(x.mean((2, 3)))
        self.unused(x)
        score = score + self.detached(x).detach().mean()
        with torch.no_grad():
            return score + self.blind(x).mean() * 0 + 0 * score.sum()


class Aside2(Aside):
    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        self.unused(x)
        with torch.no_grad():
            blind = self.blind(x).mean()
        return self.head(x.mean((2, 3))) + self.detached(x).detach().mean() + blind


def test_branches_that_the_score_does_not_depend_on_are_passed_by() -> None:
    assert only(seeded(Aside2), picture()).call.name == "trunk"


@pytest.mark.parametrize("method", GRADIENT)
@pytest.mark.parametrize("layer", ["unused", "detached", "blind"])
def test_a_layer_that_the_score_does_not_depend_on_is_one_line(layer: str, method: str) -> None:
    with pytest.raises(
        LayerError, match=f"does not depend on {layer}; .*unused, detached or computed under no_grad; .*eigenc"
    ) as e:
        class_activation_maps(seeded(Aside2), picture(), layer, method=method)
    one_line(e)


def test_a_score_made_under_no_grad_is_one_line() -> None:
    net = seeded(Aside)
    with pytest.raises(LayerError, match="does not depend on trunk") as e:
        class_activation_maps(net, picture(), "trunk")
    one_line(e)
    with pytest.raises(
        NoMapError, match=r"no layer of Aside has a map that the score depends on; .* choose a layer and a method"
    ):
        class_activation_maps(net, picture())
    # what asks for no gradient needs none
    for method in ("eigencam", "scorecam", "ablationcam"):
        assert only(net, picture(), "trunk", method=method).values.any(), method


def test_a_layer_that_did_not_run_is_one_line() -> None:
    with pytest.raises(LayerError, match="idle") as e:
        class_activation_maps(seeded(Aside2), picture(), "idle")
    one_line(e)
    with pytest.raises(LayerError, match="idle"):
        class_activation_maps(seeded(Aside2), picture(), ["idle", "trunk"])


def test_landmarks_are_the_last_outermost_layers_of_the_last_resolutions() -> None:
    net = torchvisions("resnet18")()
    state = ModelSnapshot(net)
    assert landmark_layers(net, picture(64, 64)) == ["layer2", "layer3", "layer4"]
    assert landmark_layers(net, picture(64, 64), most=5) == ["relu", "layer1", "layer2", "layer3", "layer4"]
    assert state.changes() == []
    assert landmark_layers(small(), picture()) == ["relu", "again"]
    assert landmark_layers(seeded(Aside2), picture()) == ["trunk"]
    with torch.no_grad():
        maps = class_activation_maps(net, picture(64, 64), landmark_layers(net, picture(64, 64)))
    assert [one.values.shape for one in maps] == [(8, 8), (4, 4), (2, 2)]


def test_the_last_landmark_is_the_layer_that_is_taken_without_a_choice() -> None:
    class Ends(nn.Module):
        """An outermost block, and a layer inside another that runs later and has maps of the same size."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 6, 3, padding=1)
            self.after = nn.ModuleDict({"act": nn.Tanh(), "head": nn.Linear(6, 5)})

        def forward(self, x: Tensor) -> Tensor:
            return self.after["head"](self.after["act"](self.block(self.stem(x))).mean((2, 3)))

    assert landmark_layers(seeded(Ends), picture()) == ["after.act"]
    for net, x in (
        (seeded(Ends), picture()),
        (small(), picture()),
        (vit(), picture(32, 32)),
        (swin(), picture(48, 64)),
    ):
        for target in (0, "top:1"):
            assert landmark_layers(net, x, target)[-1] == only(net, x, target=target).call.key


def test_the_landmarks_of_a_score_that_no_value_changes_have_maps_that_are_all_zero() -> None:
    net, x = vit(head=0), picture(32, 32)
    found = landmark_layers(net, x)
    assert found[-1] == only(net, x).call.key
    assert all(one.is_empty and one.unreached for one in class_activation_maps(net, x, found))


def test_without_a_layer_that_counts_there_are_no_landmarks() -> None:
    with pytest.raises(
        NoMapError,
        match=r"depends on; no gradient reaches a map: .*; choose a layer and a method without gradient: eig",
    ) as e:
        landmark_layers(seeded(Aside), picture(32, 32))
    one_line(e)
    flat = seeded(lambda: chain(flat=nn.Flatten(), head=nn.Linear(768, 5)))
    for ask in (landmark_layers, class_activation_maps):
        with pytest.raises(NoMapError, match="depends on; no layer has a map; use saliency") as e:
            ask(flat, picture())
        one_line(e)


# -- every model -------------------------------------------------------------------------------------------------------

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
    found = only(net, picture(side, side))
    last = next(layer for family, layer in LAST.items() if name.startswith(family))
    assert found.call.name == last and np.isfinite(found.values).all() and not found.unreached
    assert min(found.values.shape) >= 2 and found.prediction.index in range(1000)


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
def test_clips_have_a_map_a_frame(name: str) -> None:
    size, layer, shape = CLIPS[name]
    found = only(torchvisions(name, num_classes=10)(), picture(*size))
    assert (found.call.name, found.values.shape, found.unreached) == (layer, shape, False)
    assert np.isfinite(found.values).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models.segmentation))
def test_every_segmentation_model_has_a_map(name: str) -> None:
    net = torchvisions(name, weights_backbone=None)()
    side = 4 if name == "deeplabv3_mobilenet_v3_large" else 8
    found = only(net, picture(64, 64))
    assert found.call.name == "classifier" and found.values.shape == (side, side)
    inner = only(net, picture(64, 64), "backbone")
    assert min(inner.values.shape) >= 4 and inner.channels > 21


# -- tokens, channels last, clips --------------------------------------------------------------------------------------


def evidence(net: nn.Module, layer: str, x: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Activation and gradient by a plain hook, for layers that nothing works in place on."""
    kept: list[Tensor] = []
    handle = net.get_submodule(layer).register_forward_hook(lambda module, args, output: kept.append(output))
    score = net(x)[0, index]
    handle.remove()
    [gradient] = torch.autograd.grad(score, kept[0])
    return kept[0].detach(), gradient


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
        torch.testing.assert_close(torch.from_numpy(ours.values), values.reshape(4, 4), rtol=1e-4, atol=1e-7)


def test_channels_last_maps_are_turned() -> None:
    net, x = swin(), picture(48, 32)
    for layer in ("features.3", "norm", "features.1.0.norm1", "features.2", "features.0"):
        activation, gradient = evidence(net, layer, x, 1)
        weights = gradient[0].mean((0, 1))
        ours = only(net, x, layer, 1)
        assert ours.channels == activation.shape[-1] and ours.values.shape == activation.shape[1:3]
        values = (activation[0] @ weights).relu()
        torch.testing.assert_close(torch.from_numpy(ours.values), values, rtol=1e-4, atol=1e-7)
    # and turned by the model itself
    assert np.array_equal(only(net, x, "permute", 1).values, only(net, x, "norm", 1).values)


def test_ablation_sets_the_channel_of_tokens_and_of_channels_last_to_zero() -> None:
    for net, layer, x, apart in (
        (vit(), "encoder.layers.encoder_layer_0", picture(32, 32), 1),  # the class token is no place of the map
        (swin(), "norm", picture(32, 32), 0),
    ):
        net, x = net.double(), x.double()  # differences of scores lose digits
        module = net.get_submodule(layer)
        activation, _ = evidence(net, layer, x, 2)
        with torch.no_grad():
            score, weights = net(x)[0, 2], []
            for channel in range(activation.shape[-1]):
                keep = torch.ones(activation.shape[-1]).double()
                keep[channel] = 0

                def silence(
                    module: nn.Module, args: Any, output: Tensor, keep: Tensor = keep, begin: int = apart
                ) -> Tensor:
                    return torch.cat([output[:, :begin], output[:, begin:] * keep], 1)

                handle = module.register_forward_hook(silence)
                weights.append((score - net(x)[0, 2]) / abs(score))
                handle.remove()
        summed = (activation[0] @ torch.stack(weights)).relu().flatten()[apart:]
        ours = torch.from_numpy(only(net, x, layer, 2, "ablationcam", batch_size=3).values).flatten()
        assert ours.any()
        torch.testing.assert_close(ours, summed.float(), rtol=1e-4, atol=1e-6)


def test_ablation_where_the_class_token_alone_is_read_finds_no_place() -> None:
    net, x = vit(), picture(32, 32)
    for index in range(3):
        found = only(net, x, "encoder.ln", index, "ablationcam")
        assert found.values.shape == (4, 4) and not found.values.any()
        assert only(net, x, "encoder.layers.encoder_layer_0", index, "ablationcam").values.shape == (4, 4)


def test_the_steps_of_a_recurrent_layer_are_no_map() -> None:
    class Recurs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.lstm, self.head = nn.Conv2d(3, 8, 4, 4), nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(self.conv(x).flatten(2).transpose(1, 2))[0].mean(1))

    net = seeded(Recurs)
    assert only(net, picture()).call.name == "conv"
    with pytest.raises(NoMapError, match="the output of lstm is no feature map") as e:
        class_activation_maps(net, picture(), "lstm")
    one_line(e)


def test_ablation_of_a_layer_that_returns_what_it_was_given_spares_the_others_who_hold_it() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.same, self.head = nn.Conv2d(3, 4, 1), nn.Identity(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.head((3 * self.same(x) + x).mean((2, 3)))

    net, x = seeded(Skips), picture()
    with torch.no_grad():
        kept = net.conv(x)
        score = net(x)[0, 1]
        lost = 3 * kept.mean((2, 3))[0] * net.head.weight[1]  # of the score, without one channel of the branch
        expected = torch.einsum("c,chw->hw", lost / abs(score), kept[0]).relu()
    ours = torch.from_numpy(only(net, x, "same", 1, "ablationcam").values)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def clip_net() -> nn.Module:
    return seeded(
        lambda: chain(
            conv=nn.Conv3d(3, 4, 3, padding=1),
            relu=nn.ReLU(inplace=True),
            mean=nn.AdaptiveAvgPool3d((2, 1, 1)),
            flat=nn.Flatten(),
            head=nn.Linear(8, 3),
        )
    )


def test_clips_have_a_map_of_each_frame() -> None:
    net, x = clip_net(), picture(4, 6, 8)
    with torch.no_grad():
        activation = net.conv(x)
    reached = activation.clone().requires_grad_()
    [gradient] = torch.autograd.grad(net.head(net.flat(net.mean(reached.relu())))[0, 1], reached)
    weights = gradient[0].mean((1, 2, 3))
    expected = torch.einsum("c,cthw->thw", weights, activation[0]).relu()
    ours = only(net, x, "conv", 1)
    assert ours.values.shape == (4, 6, 8) and ours.seen == (6, 8) and ours.channels == 4
    torch.testing.assert_close(torch.from_numpy(ours.values), expected, rtol=1e-5, atol=1e-7)
    positions = (gradient[0] * activation[0]).sum(0)
    torch.testing.assert_close(torch.from_numpy(only(net, x, "conv", 1, "hirescam").values), positions)
    assert only(net, x).call.name == "relu"
    ablated = only(net, x, "conv", 1, "ablationcam").values
    assert ablated.shape == (4, 6, 8) and ablated.any()


def test_a_clip_takes_no_masks() -> None:
    with pytest.raises(UsageError, match="masks need one picture") as e:
        class_activation_maps(clip_net(), picture(4, 6, 8), method="scorecam")
    one_line(e)


# -- layers, targets, facts --------------------------------------------------------------------------------------------


def test_the_value_is_the_one_before_the_relu_in_place() -> None:
    net, x = small(), picture()
    with torch.no_grad():
        second = net.second(net.pool(net.relu(net.norm(net.first(x)))))
    assert (second < 0).any()
    reached = second.clone().requires_grad_()
    [gradient] = torch.autograd.grad(net.head(reached.relu().mean((2, 3)))[0, 3], reached)
    torch.testing.assert_close(
        torch.from_numpy(only(net, x, "second", 3, "hirescam").values), (gradient * second)[0].sum(0)
    )


def test_for_each_class_the_layers_in_order_of_execution() -> None:
    net, x, names = small(), picture(), ["a", "b", "c", "d", "e"]
    found = class_activation_maps(net, x, "again,first,second", "top:2", categories=names)
    with torch.no_grad():
        scores = net(x)[0]
    best = scores.argsort(descending=True)[:2].tolist()
    assert [(one.prediction.index, one.call.name) for one in found] == [
        (index, layer) for index in best for layer in ("first", "second", "again")
    ]
    for one in found:
        assert one.prediction.label == names[one.prediction.index]
        assert one.prediction.score == pytest.approx(float(scores[one.prediction.index]), abs=1e-6)
        assert one.prediction.probability == pytest.approx(float(scores.softmax(0)[one.prediction.index]), abs=1e-6)
        assert same(one, only(net, x, one.call.name, one.prediction.index)) or one.is_empty
        assert one.seen == (16, 16)
    assert only(net, x, target="c", categories=names).prediction.index == 2
    assert (
        only(net, x, target=torch.tensor(2)).prediction.index == 2 == only(net, x, target=np.int64(2)).prediction.index
    )
    union = class_activation_maps(net, x, "second", "4,c,4", categories=names)
    assert [one.prediction.index for one in union] == [4, 2]
    assert [one.call.name for one in class_activation_maps(net, x, "all")] == ["first", "second"]
    assert only(net, x, -1).call.name == "second"
    assert len(class_activation_maps(net, x, "0:3", types=("all",))) == 3


def test_a_layer_that_runs_twice_has_a_map_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.shared, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.shared(self.shared(self.stem(x)).relu()).mean((2, 3)))

    net, x = seeded(Twice), picture()
    assert only(net, x).call.key == "shared#1"
    with torch.no_grad():
        first = net.shared(net.stem(x))
        second = net.shared(first.relu())
    maps = {one.call.key: one for one in class_activation_maps(net, x, "shared,shared#1", 1, "hirescam")}
    assert list(maps) == ["shared", "shared#1"]
    for key, kept in (("shared", first), ("shared#1", second)):
        reached = kept.clone().requires_grad_()
        after = net.shared(reached.relu()) if key == "shared" else reached
        [gradient] = torch.autograd.grad(net.head(after.mean((2, 3)))[0, 1], reached)
        torch.testing.assert_close(
            torch.from_numpy(maps[key].values), (gradient * kept)[0].sum(0), rtol=1e-4, atol=1e-6
        )
    # and only that call is ablated
    with torch.no_grad():
        score, summed = net(x)[0, 1], torch.zeros(16, 16)
        for channel in range(4):
            without = second.clone()
            without[:, channel] = 0
            weight = (score - net.head(without.mean((2, 3)))[0, 1]) / abs(score)
            summed += weight * second[0, channel]
    ablated = only(net, x, "shared#1", 1, "ablationcam").values
    torch.testing.assert_close(torch.from_numpy(ablated), summed.relu(), rtol=1e-4, atol=1e-6)


class Container(nn.Module):
    """A layer that returns a container, of which the later parts matter."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.parts, self.head, self.take = _Parts(wrap), nn.Linear(4, 3), take

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.take(self.parts(x)).mean((2, 3)))


class _Parts(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.wrap = nn.Conv2d(3, 4, 3), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.conv(x), x)


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
def test_of_a_container_the_part_that_the_score_depends_on(method: str, wrap: Any, take: Any) -> None:
    net, x = seeded(lambda: Container(wrap, take)), picture()
    assert same(only(net, x, "parts.conv", 2, "hirescam"), only(net, x, "parts.conv", 2, "hirescam"))
    whole, inner = only(net, x, "parts", 2, method), only(net, x, "parts.conv", 2, method)
    assert np.allclose(whole.values, inner.values, atol=1e-6) and whole.call.name == "parts"


def test_peak_is_the_middle_of_the_highest_cell() -> None:
    def made(values: Any) -> ClassActivationMap:
        array = np.array(values, np.float32)
        return ClassActivationMap(Call("a", "Conv2d", 0, 0), Prediction(0, None, 1, 1), "gradcam", array, 1, (8, 8))

    assert made([[0, 0, 0, 0], [0, 0, 3, 1]]).peak == (0.75, 0.625)
    assert made([[[1, 0], [0, 0]], [[0, 0], [2, 0]]]).peak == (0.75, 0.25)  # of a clip, the second frame
    assert made([[0, -1]]).is_empty and made([[0, -1]]).peak is None
    assert not made([[0, 1e-30]]).is_empty


def test_the_peak_is_where_the_only_object_is() -> None:
    class Bright(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1, bias=False)
            with torch.no_grad():
                self.conv.weight.fill_(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).mean((2, 3))

    x = torch.zeros(1, 3, 10, 20)
    x[:, :, 2, 15] = 1
    for method in CAM_METHODS:
        assert only(seeded(Bright), x, target=1, method=method).peak == (0.25, 0.775), method


def test_fused_is_the_mean_of_what_each_layer_finds() -> None:
    def made(values: Any, name: str, index: int = 0) -> ClassActivationMap:
        array = np.array(values, np.float32)
        answer = Prediction(index, None, 1, 1)
        return ClassActivationMap(Call(name, "Conv2d", 0, 0), answer, "gradcam", array, 3, (8, 8))

    coarse, fine, nothing = made([[10]], "a"), made([[0, 4], [-8, 2]], "b"), made([[0, 0], [0, 0]], "c")
    both = fused([coarse, fine])
    assert both.values.tolist() == [[0.5, 1], [0.5, 0.75]] and both.call.name == "a + b" and both.channels == 6
    assert both.call.type == "Conv2d"
    other = dataclasses.replace(fine, call=Call("r", "ReLU", 0, 0))
    assert fused([coarse, other, fine]).call.type == "Conv2d + ReLU"
    assert fused([nothing, fine]).values.tolist() == [[0, 0.5], [0, 0.25]]
    clip = made([[[0, 2], [0, 0]], [[0, 2], [0, 4]]], "d")
    assert fused([clip]).values.tolist() == [[0, 1], [0, 1]]
    for wrong in ([coarse, made([[1]], "a", 1)], []):
        with pytest.raises(HookscopeError, match="cannot be fused"):
            fused(wrong)
    net, x = small(), picture()
    found = class_activation_maps(net, x, "first,second", 0, "layercam")
    assert fused(found).values.shape == (16, 16) and 0 <= fused(found).values.min() <= fused(found).values.max() <= 1


def test_resized_samples_between_the_middles_of_cells() -> None:
    assert resized(torch.tensor([[[[0.0, 4.0]]]]), (1, 4)).tolist() == [[[[0, 1, 3, 4]]]]
    half = torch.tensor([[[[0.0, 4.0]]]]).half()
    assert resized(half, (1, 4)).dtype == torch.float32


# -- layers without a map ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CAM_METHODS)
@pytest.mark.parametrize(
    ("layers", "kept", "skipped"),
    [
        ("all", ["first", "norm", "relu", "drop", "pool", "second", "again"], ["mean", "flat", "head", ""]),
        ("5:9", ["second", "again"], ["mean", "flat"]),
        ("re:^(again|mean|head)$", ["again"], ["mean", "head"]),
        ("*a*", ["again"], ["mean", "flat", "head"]),
        (["second", "me*"], ["second"], ["mean"]),
    ],
)
def test_a_layer_without_a_map_is_skipped_where_a_pattern_chose_it(
    layers: Any, kept: list[str], skipped: list[str], method: str
) -> None:
    found: list[str] = []

    def skip(call: Call, error: NoMapError) -> None:
        assert isinstance(error, NoMapError) and call.name in str(error)
        found.append(call.name)

    net = small()
    maps = class_activation_maps(net, picture(), layers, 1, method, types=("*",), on_skip=skip)
    assert [one.call.name for one in maps] == kept
    assert [name for name in found if name] == [name for name in skipped if name]
    with pytest.raises(NoMapError):  # unless nobody wants to hear of it
        class_activation_maps(net, picture(), layers, 1, method, types=("*",))


@pytest.mark.parametrize(
    "layers", ["head", "head,second", ["all", "head"], "second,head#0", "9", "+9", "5:8,9", "mean,first"]
)
def test_a_layer_without_a_map_that_is_named_outright_is_an_error(layers: Any) -> None:
    with pytest.raises(NoMapError) as e:
        class_activation_maps(small(), picture(), layers, 1, types=("*",), on_skip=lambda call, error: None)
    assert one_line(e).startswith(("the output of head is", "the maps of mean have"))


def test_where_none_is_left_the_error_is_raised() -> None:
    found: list[str] = []
    with pytest.raises(NoMapError, match="the output of head is no feature map") as e:
        class_activation_maps(
            small(), picture(), "re:^(mean|flat|head)$", 1, on_skip=lambda call, error: found.append(call.name)
        )
    one_line(e)
    assert found == ["mean", "flat", "head"]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"target": 5}, TargetError, "no class 5; the model has 5 classes: 0 to 4"),
        ({"target": "fox"}, TargetError, "no class 'fox'; the class names are unknown"),
        ({"target": 1.0}, UsageError, "target must be an index, a name or top:K, not float"),
        ({"target": "top:0"}, UsageError, "bad target 'top:0'"),
        ({"method": "gradcan"}, UsageError, "no method 'gradcan'; nearest: gradcam"),
        ({"layers": "haed"}, LayerError, "haed"),
        ({"layers": "head"}, NoMapError, "the output of head is no feature map"),
        ({"layers": "mean"}, NoMapError, "the maps of mean have one position; choose a layer before the pooling"),
        ({"layers": ["second", "flat"]}, NoMapError, "the output of flat is no feature map"),
        ({"layers": "7"}, LayerError, "no index 7"),
        ({"layers": "second#1"}, LayerError, "second#1"),
        ({"batch_size": 0}, UsageError, "batch"),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], error: type[HookscopeError], text: str) -> None:
    net = small()
    with pytest.raises(error) as e:
        class_activation_maps(net, picture(), **options)
    assert text in one_line(e)
    assert hooks_on(net) == 0


@pytest.mark.parametrize("method", CAM_METHODS)
def test_several_pictures_at_once_are_one_line(method: str) -> None:
    with pytest.raises(UsageError, match="expected one picture, got 2") as e:
        class_activation_maps(small(), torch.zeros(2, 3, 16, 16), method=method)
    one_line(e)


@pytest.mark.parametrize("inputs", [(), ("a word",)])
def test_no_picture_is_one_line(inputs: Any) -> None:
    with pytest.raises(UsageError, match="no image") as e:
        class_activation_maps(small(), inputs)
    one_line(e)


@pytest.mark.parametrize("shape", [(), (3,), (16, 16), (3, 16, 16), (1, 1, 3, 2, 16, 16)])
@pytest.mark.parametrize("ask", [class_activation_maps, landmark_layers])
def test_a_picture_without_a_batch_axis_is_one_line_that_says_how_to_add_it(ask: Any, shape: tuple[int, ...]) -> None:
    net = small()
    said = "x".join(map(str, shape)) or "one number"
    for inputs in (torch.zeros(shape), (torch.zeros(shape),)):
        with pytest.raises(UsageError) as e:
            ask(net, inputs)
        text = one_line(e)
        assert text.startswith(f"expected an image (1, C, H, W) or a clip (1, C, T, H, W), got {said}; x[None]")


def test_the_pictures_in_a_list_that_detection_takes_need_no_batch_axis() -> None:
    class Boxes(nn.Module):
        def forward(self, x: list[Tensor]) -> Any:
            return [{"boxes": one[0], "scores": one[0, 0]} for one in x]

    with pytest.raises(ModelError, match="gives boxes and scores, no score for each class") as e:
        class_activation_maps(Boxes(), ([torch.rand(3, 16, 16)],))
    one_line(e)


def test_a_model_without_any_class_is_one_line() -> None:
    for ask in (class_activation_maps, landmark_layers):
        with pytest.raises(ModelError, match="the model has no classes") as e:
            ask(seeded(lambda: Gives(lambda x: x.mean((2, 3))[:, :0])), picture())
        one_line(e)


class Gives(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.output = nn.Conv2d(3, 4, 1), output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.conv(x))


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (
            lambda x: [{"boxes": x[0, 0], "labels": x[0, 0, 0], "scores": x[0, 0, 0]}],
            "gives boxes and labels and scores",
        ),
        (lambda x: [x[:, :2], x[:, :2]], "gives a list of 2 tensors"),
        (lambda x: x, "gives 1x4x16x16"),
        (lambda x: None, "gives no tensor"),
        (lambda x: x.mean((2, 3)).argmax(1, keepdim=True), "gives 1x1"),
    ],
)
def test_a_model_without_classes_is_one_line_that_says_what_can_be_asked(output: Any, says: str) -> None:
    net = seeded(lambda: Gives(output))
    with pytest.raises(ModelError) as e:
        class_activation_maps(net, picture())
    assert says in one_line(e) and "no score for each class" in one_line(e) and "visualize" in one_line(e)
    assert hooks_on(net) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "raft_small"])
def test_detection_and_flow_are_one_line(name: str) -> None:
    flow = name.startswith("raft")
    net = torchvisions(name, **({} if flow else {"weights_backbone": None}))()
    inputs = (picture(128, 128), picture(128, 128)) if flow else ([torch.rand(3, 320, 320)],)
    with pytest.raises(ModelError, match="no score for each class") as e:
        class_activation_maps(net, inputs)
    one_line(e)


@pytest.mark.parametrize("method", CAM_METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", ["first", "head"])
def test_weights_that_are_not_finite_are_one_line(layer: str, bad: float, method: str) -> None:
    net = small()
    with torch.no_grad():
        net.get_submodule(layer).weight.view(-1)[0] = bad
    for target in (0, "1,0", "top:5"):
        with pytest.raises(
            InputError, match=r"the score of class \d is not finite; see gradients --detect-anomaly"
        ) as e:
            class_activation_maps(net, picture(), "second", target, method)
        one_line(e)
    assert hooks_on(net) == 0
    if layer == "head" and CAM_METHODS[method].gradient:  # 0 * NaN is in the gradient of the other classes too
        with pytest.raises(InputError, match="the map of second is not finite; its gradient holds NaN or Inf") as e:
            class_activation_maps(net, picture(), "second", 1, method)
        one_line(e)
    elif layer == "head":
        assert np.isfinite(only(net, picture(), "second", 1, method).values).all()


class Breaks(nn.Module):
    """Finite scores over something that is not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.what = nn.Conv2d(3, 2, 1), what
        if what == "weighted sum":
            with torch.no_grad():
                self.conv.weight.mul_(3e38)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        if self.what == "gradient":
            return maps.mean((2, 3)) + (maps * 0).abs().sqrt().mean((2, 3))  # the slope of a root at 0
        if self.what == "weighted sum":
            return (maps.clamp(-1e30, 1e30) * 1e-20).mean((2, 3))
        return maps.nan_to_num(0, 0, 0).mean((2, 3))


def test_a_map_that_is_not_finite_under_finite_scores_is_one_line() -> None:
    x = picture()
    x[0, 0, 3, 3] = float("nan")
    with pytest.raises(
        InputError, match="the map of conv is not finite; its activation holds NaN or Inf; see gradi"
    ) as e:
        class_activation_maps(seeded(lambda: Breaks("activation")), x, "conv", 1)
    one_line(e)
    with pytest.raises(InputError, match="the map of conv is not finite; its gradient holds NaN or Inf") as e:
        class_activation_maps(seeded(lambda: Breaks("gradient")), picture(), "conv", 1)
    one_line(e)


def test_weights_made_in_inference_mode_are_one_line() -> None:
    with torch.inference_mode():
        net = small()
    with pytest.raises(ModelError, match=r"'first.weight' was made inside torch.inference_mode") as e:
        class_activation_maps(net, picture())
    one_line(e)


def test_windows_of_a_picture_are_no_map() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            windows = torch.cat(x.chunk(2, 2), 0)
            return self.head(torch.cat(self.inner(windows).chunk(2, 0), 2).mean((2, 3)))

    net = seeded(Windows)
    with pytest.raises(NoMapError, match="the output of inner holds 2 parts of the image") as e:
        class_activation_maps(net, picture(), "inner")
    one_line(e)
    assert only(net, picture()).call.name == "stem"


# -- whatever surrounds the call ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CAM_METHODS)
def test_grad_modes_frozen_parameters_and_train_mode_do_not_count(method: str) -> None:
    net, x = small(), picture()
    plain = only(net, x, "second", 3, method)
    assert plain.values.any()
    with torch.no_grad():
        assert same(plain, only(net, x, "second", 3, method))
    with torch.inference_mode():
        assert same(plain, only(net, x, "second", 3, method))
        assert torch.is_inference_mode_enabled()
        assert same(plain, only(net, x.clone(), "second", 3, method))  # a picture made here
    net.requires_grad_(False)
    assert same(plain, only(net, x, "second", 3, method))
    net.requires_grad_(True)
    net.train()
    net.norm.eval()
    assert same(plain, only(net, x, "second", 3, method))
    assert net.training and net.drop.training and not net.norm.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", CAM_METHODS)
def test_other_precisions_give_nearly_the_same_map(method: str, dtype: torch.dtype) -> None:
    plain = only(small(), picture(), "relu", 3, method)
    other = only(small().to(dtype), picture().to(dtype), "relu", 3, method)
    assert other.values.dtype == np.float32 and plain.values.any()
    # the coarse formats have 8 and 11 bits, and a small difference of scores is what ablation divides
    within = 1e-5 if dtype == torch.float64 else 0.5 if method in ("ablationcam", "gradcam++") else 0.25
    assert np.abs(other.values - plain.values).max() <= within * np.abs(plain.values).max()


@pytest.mark.parametrize("method", CAM_METHODS)
def test_a_default_device_around_the_call_does_not_count(method: str) -> None:
    net, x = small(), picture()
    plain = only(net, x, "second", 3, method, batch_size=3)
    with torch.device("meta"):
        assert same(plain, only(net, x, "second", 3, method, batch_size=3))
        assert landmark_layers(net, x) == ["relu", "again"]


# -- nothing changes ---------------------------------------------------------------------------------------------------


def busy() -> nn.Module:
    """A model in somebody's hands: part in train mode, part frozen, gradients held, hooks of others on it."""
    net = small()
    net(picture(seed=9)).sum().backward()
    net.drop.train()
    net.head.weight.requires_grad_(False)
    net.first.register_forward_hook(lambda module, args, output: None)
    net.second.register_forward_pre_hook(lambda module, args: None)
    net.head.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    net.head.register_forward_hook(lambda module, args, output: output + 1)
    return net


@pytest.mark.parametrize("layers", [None, ["first", "second"]])
@pytest.mark.parametrize("method", CAM_METHODS)
def test_nothing_of_the_model_changes(method: str, layers: Any) -> None:
    net, x = busy(), picture().requires_grad_()
    hooks, before, state = hooks_on(net), x.detach().clone(), ModelSnapshot(net)
    class_activation_maps(net, x, layers, "top:2", method)
    assert state.changes() == [] and hooks_on(net) == hooks
    assert torch.equal(x, before) and x.grad is None and x.requires_grad


@pytest.mark.parametrize(
    ("method", "at"), [*((name, 1) for name in CAM_METHODS), ("scorecam", 2), ("ablationcam", 2), ("ablationcam", 3)]
)
def test_nothing_of_the_model_changes_when_a_layer_fails(method: str, at: int) -> None:
    net = chain(**dict(small().named_children()), fails=Fails(at)).train()
    state = ModelSnapshot(net)
    with pytest.raises(RuntimeError, match="as planned"):
        class_activation_maps(net, picture(), "second", 0, method, batch_size=4)
    assert state.changes() == [] and hooks_on(net) == 0


@pytest.mark.parametrize("method", CAM_METHODS)
def test_nothing_of_the_model_changes_when_somebodys_hook_or_progress_fails(method: str) -> None:
    net = busy()

    def fail(*args: Any) -> None:
        raise RuntimeError("as planned")

    handle = net.again.register_forward_hook(fail)
    state = ModelSnapshot(net)
    with pytest.raises(RuntimeError, match="as planned"):
        class_activation_maps(net, picture(), method=method)
    assert state.changes() == []
    handle.remove()
    if CAM_METHODS[method].passes:
        state = ModelSnapshot(net)
        with pytest.raises(RuntimeError, match="as planned"):
            class_activation_maps(net, picture(), method=method, on_progress=fail)
        assert state.changes() == []


def test_random_numbers_drawn_by_the_model_are_drawn_again_by_the_next() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x + F.dropout(x, 0.5, training=True)).mean((2, 3))

    net = seeded(Draws)
    state = ModelSnapshot(net)
    class_activation_maps(net, picture())
    assert state.changes() == []


# -- quantized ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_float_models_of_quantized_builders_have_a_map() -> None:
    for name in ("quantized_mobilenet_v2", "quantized_resnet18", "quantized_shufflenet_v2_x0_5"):
        found = only(torchvisions(name)(), picture(64, 64))
        assert found.values.shape == (2, 2) and not found.unreached, name


@pytest.mark.slow
def test_quantized_models_have_maps_by_the_methods_without_gradient() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this part of torch will go
        net = torchvisions("quantized_resnet18", quantize=True)()
        x = picture(64, 64)
        for method in CAM_METHODS.keys() - set(GRADIENT):
            assert only(net, x, "layer3", method=method).values.shape == (4, 4)
            assert only(net, x, method=method).call.name == "layer4"
        with pytest.raises(LayerError, match="does not depend on layer3") as e:
            class_activation_maps(net, x, "layer3")
    one_line(e)
