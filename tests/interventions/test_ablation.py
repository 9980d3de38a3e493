"""The worth of channels, compared with zeroed filters and passes by hand, and its figure."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from matplotlib.figure import Figure
from torch import Tensor, nn

from hookscope.drawing import Colour
from hookscope.errors import InputError, LayerError, NoMapError, TargetError, UsageError
from hookscope.hooks import capture
from hookscope.hooks.calls import Call
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.interventions import (
    Clamp,
    Mean,
    Noise,
    Permute,
    Quantize,
    Zero,
    ablation as ablation_module,
    intervene,
    scores_without,
)
from hookscope.interventions.ablation import Ablation, ChannelWorth, ablate_each
from hookscope.interventions.effect import intervention_effect
from hookscope.interventions.figure import draw_ablation
from hookscope.scores.logits import Prediction
from tests.explain.pages import net, picture
from tests.helpers import hooked
from tests.nets import Function

PICTURE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))


def paper() -> nn.Sequential:
    """Channels ``x``, ``2 x``, 0 and ``-x``; class 0 has the score 1, class 1 the sum of all channels."""
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([1.0, 2, 0, -1]).reshape(4, 1, 1, 1))
        net[0].bias.zero_()
        net[3].weight.copy_(torch.tensor([[0.0] * 4, [1.0] * 4]))
        net[3].bias.copy_(torch.tensor([1.0, 0.0]))
    return net.eval()


def random_net(name: str, **kwargs: Any) -> nn.Module:
    torch.manual_seed(5)
    builder = getattr(torchvision.models, name, None) or getattr(torchvision.models.segmentation, name)
    net = builder(**kwargs, **({} if isinstance(builder, type) else {"weights": None})).eval()
    for module in net.modules():  # a ViT's head is all zero
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)
    return net


VIT = {"image_size": 64, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
SWIN = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": [4, 4]}


def after(ablation: Ablation) -> dict[tuple[str, int], float]:
    return {(row.call.key, row.channel): row.score_after for row in ablation.channels}


def score(net: nn.Module, target: int) -> float:
    with torch.no_grad():
        return float(net(PICTURE)[0, target])


def without(net: nn.Module, layer: str, channel: int) -> nn.Module:
    """A copy of the net whose convolution has a filter of zeros."""
    judge = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in judge.get_submodule(layer).parameters():
            parameter[channel] = 0
    return judge


def test_on_paper() -> None:
    ablation = ablate_each(paper(), torch.full((1, 1, 2, 2), 3.0), "0", "dog", categories=["cat", "dog"])
    assert (ablation.prediction.index, ablation.prediction.label, ablation.prediction.score) == (1, "dog", 6.0)
    assert [(row.channel, row.score_drop, row.score_after, row.top_after) for row in ablation.channels] == [
        (1, 6.0, 0.0, 0),
        (0, 3.0, 3.0, 1),
        (2, 0.0, 6.0, 1),
        (3, -3.0, 9.0, 1),
    ]
    assert ablation.channels[0].call == Call("0", "Conv2d", 0, 0) and ablation.channels[0].score == 6.0
    assert ablation.channels[0].probability_after == pytest.approx(1 / (1 + math.e))
    assert ablation.skipped == ()


@pytest.mark.parametrize("layer", ["layer2.0.conv1", "layer3.0.downsample.0"])
def test_convolutions_beside_zeroed_filters(layer: str) -> None:
    net = random_net("resnet18")
    ablation = ablate_each(net, PICTURE, layer)
    scores = after(ablation)
    assert ablation.channels[0].score_drop > 1e-3
    for channel in (0, 7, len(scores) - 1):
        expected = score(without(net, layer, channel), ablation.prediction.index)
        assert scores[layer, channel] == pytest.approx(expected, rel=1e-5)


def test_tokens_beside_a_pass_by_hand() -> None:
    net = random_net("VisionTransformer", **VIT)
    ablation = ablate_each(net, PICTURE, "encoder.layers.encoder_layer_1.mlp", 3, batch_size=200)
    for channel in (0, 13):
        with torch.no_grad():
            x = net.encoder.pos_embedding + torch.cat([net.class_token, net._process_input(PICTURE)], 1)
            for at, block in enumerate(net.encoder.layers):
                y = block.ln_1(x)
                x = x + block.self_attention(y, y, y, need_weights=False)[0]
                y = block.mlp(block.ln_2(x))
                x = x + (y * (torch.arange(16) != channel) if at == 1 else y)
            expected = float(net.heads(net.encoder.ln(x)[:, 0])[0, 3])
        assert after(ablation)["encoder.layers.encoder_layer_1.mlp", channel] == pytest.approx(expected, abs=1e-5)


BOTH_WAYS: list[tuple[str, dict[str, Any], str, int]] = [
    ("resnet18", {}, "layer4.1.conv2", 0),
    ("resnet18", {}, "layer2.0.conv1", 0),
    ("resnet18", {}, "layer4.0.downsample.0", 4),
    ("densenet121", {}, "features.denseblock4.denselayer16.conv2", 3),
    ("googlenet", {"init_weights": False}, "inception5b.branch1.conv", 3),
    ("mobilenet_v3_small", {}, "features.4.block.2.fc1", 0),
    ("VisionTransformer", VIT, "conv_proj", 1),
    ("SwinTransformer", SWIN, "features.3.0.mlp", 0),
    ("SwinTransformer", SWIN, "features.3.0.attn", 0),
    ("squeezenet1_1", {}, "features.12.expand1x1", 1),
    ("lraspp_mobilenet_v3_large", {"weights_backbone": None}, "backbone.15.block.1.0", 0),
]


@pytest.mark.parametrize(("name", "kwargs", "layer", "refused"), BOTH_WAYS)
def test_many_at_once_are_as_one_by_one(
    name: str, kwargs: dict[str, Any], layer: str, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``refused``: at how many places the picture cannot become many, before one is found."""
    net = random_net(name, **kwargs)
    with_all = ablation_module.baseline(ablation_module.Passes(net, (PICTURE,)), layer, ("Conv2d",))
    [site], tried = with_all.sites, tries(monkeypatch)
    filled = ablation_module.rounds(site, with_all, 6)
    channels, scores = next(channels for channels in filled if list(channels[0]) != site.silent)
    assert len(channels) == 6 and tried == [False] * refused + [True]
    for channel, found in zip(channels[:3], scores, strict=False):
        expected = ablation_module.Copies(None, [(site, Zero(channels=channel))]).scores(with_all.passes)[0]
        assert torch.allclose(found, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


def counting(net: Any, x: Tensor) -> Tensor:
    """Asks its input for the number of images, so that copies must be there from the start."""
    count = x.size(0)
    for stage in net.stages:
        x = stage(x)
    return net.head(x.mean((2, 3)).view(count, -1))


def test_layers_before_the_channels_see_one_copy() -> None:
    stages = nn.ModuleList([nn.Conv2d(3, 5, 3, stride=2), nn.ReLU(inplace=True), nn.Conv2d(5, 6, 3)])
    net, seen = Function(counting, stages=stages, head=nn.Linear(6, 4)).eval(), list[int]()
    net.stages[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    ablation = ablate_each(net, PICTURE, "stages.2", 1)
    assert set(seen) == {1}
    for row in ablation.channels:
        assert row.score_after == pytest.approx(score(without(net, "stages.2", row.channel), 1), abs=1e-6)


def silenced(net: nn.Module, layer: str, *channels: int, axis: int = 1) -> AbstractContextManager[None]:
    """A plain hook that zeroes channels of a layer."""
    return hooked(net, lambda name, output: output.index_fill(axis, torch.tensor(channels), 0), layer)


SEVERAL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "resnet18": ({}, ["layer3.1.conv1", "layer4.0.downsample.0", "layer4.1.conv2"]),
    "densenet121": ({}, ["features.denseblock4.denselayer15.conv2", "features.denseblock4.denselayer16.conv2"]),
    "googlenet": ({"init_weights": False}, ["inception5b.branch1.conv", "inception5b.branch4.1.conv"]),
    "VisionTransformer": (VIT, ["encoder.layers.encoder_layer_0.mlp", "encoder.layers.encoder_layer_1"]),
}


def always(scores: Tensor) -> bool:
    return True


@pytest.mark.parametrize("name", SEVERAL)
def test_groups_of_channels_of_several_calls_in_one_pass_are_as_those_of_a_plain_hook(name: str) -> None:
    kwargs, layers = SEVERAL[name]
    net, channels, expected, ran = random_net(name, **kwargs), [], [], []
    with capture(net, layers, types="all") as kept, torch.no_grad():
        with_all = net(PICTURE)
    for layer in layers:
        [call] = [call for call in kept.calls if call.name == layer]
        shape = tuple(kept[layer].shape)
        channels += [(call, shape, (1,)), (call, shape, (6, 2))]
        for group in ((1,), (6, 2)):
            with silenced(net, layer, *group, axis=2 if len(shape) == 3 else 1), torch.no_grad():
                expected.append(net(PICTURE)[0])
    with hooked(net, lambda name, output: ran.append(1), ""):
        scores = scores_without(net, (PICTURE,), with_all, channels, used=always, refused=set())
    assert len(ran) == 2 and not torch.equal(scores, with_all.expand_as(scores))
    assert torch.allclose(scores, torch.stack(expected), rtol=0, atol=3e-6 * float(with_all.abs().max()))


def tries(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Fills with whether copies side by side were taken, try by try."""
    tried: list[bool] = []
    verified = ablation_module._verified

    def noted(*args: Any, **probe: Any) -> Tensor | None:
        scores = verified(*args, **probe)
        if not probe:
            tried.append(scores is not None)
        return scores

    monkeypatch.setattr(ablation_module, "_verified", noted)
    return tried


def small_net(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    head = [nn.Conv2d(16, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(3, 16, 3), between=nn.Sequential(*between), head=nn.Sequential(*head))
    )


def fake_quantize(observer: str, **kwargs: Any) -> nn.Module:
    from torch.ao import quantization

    return quantization.FakeQuantize(observer=getattr(quantization, observer), **kwargs)


MIXING: dict[str, Callable[[], list[nn.Module]]] = {
    "mean of the batch": lambda: [Function(lambda x: x - x.mean(0) / 2)],
    "first picture alone": lambda: [Function(lambda x: x[:1])],
    "first picture in all": lambda: [Function(lambda x: x + x[:1])],
    "remembered size": lambda: [Function(lambda x: x.reshape(1, 16, 62, 62))],
    "random": lambda: [Function(lambda x: x * torch.rand(len(x), 1, 1, 1))],
    "numpy's random": lambda: [Function(lambda x: x * float(np.random.rand()))],
    "dropout": lambda: [nn.Dropout(0.5)],
    "batch statistics": lambda: [nn.BatchNorm2d(16)],
    "no statistics kept": lambda: [nn.BatchNorm2d(16, track_running_stats=False).eval()],
    "range": lambda: [nn.ReLU(), Function(lambda x: (x / x.max() * 15).round() * x.max() / 15)],
    "range of what saturates": lambda: [nn.ReLU6(), Function(lambda x: (x / x.max() * 3).round() * x.max() / 3)],
    "range of what has one spread": lambda: [nn.GroupNorm(1, 16), Function(lambda x: (x / x.abs().max() * 7).round())],
    "highest alone": lambda: [Function(lambda x: x * (x >= x.max() / 2))],
    "median": lambda: [Function(lambda x: x * (x > x.median()))],
    "torch's range": lambda: [nn.ReLU(inplace=True), fake_quantize("MinMaxObserver", quant_min=0, quant_max=7)],
    "torch's moving range": lambda: [nn.Tanh(), fake_quantize("MovingAverageMinMaxObserver")],
}


@pytest.mark.filterwarnings("ignore")  # torch's quantisation is to move
@pytest.mark.parametrize("kind", MIXING)
@pytest.mark.parametrize("batch_size", [None, 5])
def test_layers_that_mix_the_pictures_of_a_batch_get_single_pictures(kind: str, batch_size: int | None) -> None:
    net = small_net(*MIXING[kind]())
    judge, state, picture = copy.deepcopy(net), ModelSnapshot(net), PICTURE.clone()
    ablation = ablate_each(net, picture, "conv", 3, batch_size=batch_size)
    assert not state.changes() and torch.equal(picture, PICTURE)
    for channel in range(0, 16, 5):  # the judge counts ranges anew each time
        drawn = np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            expected = score(without(judge, "conv", channel), 3)
        np.random.set_state(drawn)
        assert after(ablation)["conv", channel] == pytest.approx(expected, abs=1e-6)


INSIDE = [Quantize(*options) for options in ((2, False, False), (8, False, True), (8, True, False), (2, True, True))]
INSIDE += [Mean(), Permute("images"), Permute(), Noise(0.5, relative=True), Clamp(0, 1)]


@pytest.mark.parametrize("where", ["between.0", "head.0"])
@pytest.mark.parametrize("change", INSIDE)
def test_inside_an_intervention_at_the_next_or_a_later_layer(where: str, change: Any) -> None:
    net, expected = small_net(nn.ReLU()).eval(), []
    with intervene(net, {where: change}):
        ablation = ablate_each(net, PICTURE, "conv", 3, seed=4)
        for channel in range(0, 16, 5):
            torch.manual_seed(4)
            with silenced(net, "conv", channel):
                expected.append(score(net, 3))
    assert [after(ablation)["conv", channel] for channel in range(0, 16, 5)] == pytest.approx(expected, abs=1e-6)


def test_a_seed_counts_in_each_pass_and_is_that_of_an_effect() -> None:
    net, noise = small_net(nn.ReLU()).eval(), {"between": Noise(0.5)}
    state = ModelSnapshot(net)
    with intervene(net, noise):
        first, second, other = (ablate_each(net, PICTURE, "conv", 3, seed=seed) for seed in (7, 7, 8))
        torch.manual_seed(7)
        assert first.prediction.score == score(net, 3)
    torch.manual_seed(1)
    effect = intervention_effect(net, (PICTURE,), noise, seed=7)
    assert first == second != other and first.prediction.score == float(effect.after[0, 3])
    assert not [change for change in state.changes() if "random" not in change.what]
    before = torch.get_rng_state()
    ablate_each(net, PICTURE, "conv", 3, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


def twice() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        found = net.pool(net.conv(net.conv(x).relu()))
        net.count(found.sum())
        return found

    torch.manual_seed(2)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    conv, idle = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
    return Function(forward, conv=conv, pool=pool, idle=idle, count=nn.Identity())


def test_calls_are_judged_alone_or_ranked_together_without_those_that_have_no_channels() -> None:
    net = twice()
    first = ablate_each(net, PICTURE, "conv#0", 0)
    second = ablate_each(net, PICTURE, "-1", 0)
    assert {row.call for row in second.channels} == {Call("conv", "Conv2d", 1, 1)}
    assert sorted(after(second)) == [("conv#1", 0), ("conv#1", 1), ("conv#1", 2)]
    assert after(second)["conv#1", 0] == 0 and after(second)["conv#1", 1] == pytest.approx(second.prediction.score)
    with torch.no_grad():
        maps = net.conv(PICTURE).relu() * torch.tensor([1.0, 0.0, 1.0]).reshape(1, 3, 1, 1)
        expected = float(net.pool(net.conv(maps))[0, 0])
    assert after(first)["conv", 1] == pytest.approx(expected, abs=1e-6)
    ablation = ablate_each(net, PICTURE, ["conv", "re:^(pool|count)"], 0)
    worths = [row.score_drop for row in ablation.channels]
    assert {row.call.key for row in ablation.channels} == {"conv", "conv#1", "pool", "pool.0", "pool.1"}
    assert worths == sorted(worths, reverse=True) and len(worths) == 15
    assert ablation.skipped == ("count",)


def test_channels_that_are_0_cost_no_pass_equals_stay_in_order_and_progress_counts_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, net = tries(monkeypatch), paper()
    with torch.no_grad():
        net[0].weight.zero_()
    ablation = ablate_each(net, torch.ones(1, 1, 2, 2), "0,1", 1, types=["all"])
    assert [(row.call.name, row.channel, row.score_drop) for row in ablation.channels] == [
        (name, channel, 0.0) for name in "01" for channel in range(4)
    ]
    assert tried == []
    told: list[tuple[int, int]] = []
    ablate_each(
        paper(), torch.ones(1, 1, 2, 2), "0,1", types=["all"], batch_size=2, on_progress=lambda *at: told.append(at)
    )
    assert told == [(1, 8), (3, 8), (4, 8), (5, 8), (7, 8), (8, 8)]


def test_a_score_of_nan_comes_last() -> None:
    def divided(net: Any, x: Tensor) -> Tensor:
        maps = net.maps(x).mean((2, 3))
        return maps / (maps[:, :1] / maps[:, :1])

    x = torch.tensor([4.0, 2.0, 1.0]).reshape(1, 3, 1, 1)
    ablation = ablate_each(Function(divided, maps=nn.Identity()), x, "maps", 2)
    assert [row.channel for row in ablation.channels] == [2, 1, 0]
    assert math.isnan(ablation.channels[-1].score_drop)


def test_hooks_are_gone_after_an_error_and_an_interruption() -> None:
    net = paper()
    state = ModelSnapshot(net)

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablate_each(net, torch.ones(1, 1, 2, 2), "0", on_progress=interrupted)
    with pytest.raises(InputError, match="takes 1 channels and got 2"):
        ablate_each(net, torch.ones(1, 2, 2, 2), "0")
    assert not state.changes()


def test_complex_values_are_compared_with_their_imaginary_parts() -> None:
    from hookscope.interventions.ablation import _close

    one = torch.tensor([1.0 + 1.0j])
    assert _close(one, one) and not _close(one, one.conj())


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_halves_and_inference_mode() -> None:
    net = random_net("squeezenet1_1").bfloat16()
    with torch.inference_mode():
        ablation = ablate_each(net, PICTURE.bfloat16(), "features.12.squeeze", batch_size=64)
    assert len(ablation.channels) == 64 and ablation.channels[0].score_drop > 0


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"target": "top:2"}, UsageError, "expected one class"),
        ({"target": "0,1"}, UsageError, "expected one class"),
        ({"target": 7}, TargetError, "no class 7"),
        ({"layers": "cnov"}, LayerError, "nearest: conv"),
        ({"layers": "conv#2"}, LayerError, "2 times"),
        ({"layers": "9"}, LayerError, "no index 9"),
        ({"layers": "idle"}, LayerError, "did not run"),
        ({"layers": "idle*"}, LayerError, "did not run"),
        ({"layers": "count"}, NoMapError, "the output of count has no channels"),
        ({"layers": "coun*"}, NoMapError, "the output of count has no channels"),
        ({"inputs": torch.zeros(2, 3, 8, 8)}, UsageError, "expected one image, got 2"),
        ({"batch_size": 0}, UsageError, "batch size must be an integer of at least 1, not 0"),
        ({"inputs": PICTURE * torch.inf}, InputError, "not finite"),
    ],
)
def test_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ablate_each(twice(), **{"inputs": PICTURE, "layers": "conv", "target": 0, **given})


def test_maps_of_the_tokens_of_a_clip_are_means_over_its_frames() -> None:
    patches, clip = nn.Conv3d(3, 5, (1, 4, 4), (1, 4, 4)), torch.rand(1, 3, 2, 12, 8)
    net = Function(
        lambda net, x: net.head(net.tokens(net.patches(x).flatten(2).mT).mean(1)),
        patches=patches, tokens=nn.Linear(5, 5), head=nn.Linear(5, 2),
    ).eval()  # fmt: skip
    expected = net.tokens(net.patches(clip).flatten(2).mT)[0].unflatten(0, (2, 3, 2)).mean(0)
    for row in ablate_each(net, clip, "tokens", keep=5).channels:
        assert row.values is not None and np.allclose(row.values, expected[..., row.channel].detach(), atol=1e-6)


STAR = Prediction(7, "star", 5.0, 0.9)


def channel(number: int, worth: float, values: Any = None, best: tuple[int, str | None] = (7, "star")) -> ChannelWorth:
    kept = None if values is None else np.asarray(values, np.float32)
    call = Call("features.3", "Conv2d", 0, 3)
    return ChannelWorth(call, number, 5.0, 5.0 - worth, worth, 0.5, *best, kept)


def ablation(*channels: ChannelWorth) -> Ablation:
    return Ablation(STAR, channels, ())


def texts(figure: Figure) -> dict[str, Any]:
    """Every text of the page, with its colour."""
    axes = [text for axes in figure.axes for text in axes.texts]
    return {text.get_text().strip(): text.get_color() for text in [*figure.texts, *axes]}


def bars(figure: Figure) -> list[tuple[float, float]]:
    """Row and length of every bar, colour after colour."""
    ends = [path.vertices for group in figure.axes[0].collections for path in group.get_paths()]
    return [(round(float(at[:, 1].mean())), float(at[np.abs(at[:, 0]).argmax(), 0])) for at in ends]


def test_bars_are_the_worths_in_their_order_with_labels_and_the_class_that_wins() -> None:
    found = ablation(channel(26, 1.5, best=(9, "triangle")), channel(3, 0.25), channel(4, -0.5), channel(5, math.nan))
    figure = draw_ablation(found, picture(), net("best.pth"))
    assert bars(figure) == [(0, 1.5), (1, 0.25), (2, -0.5)]
    said = texts(figure)
    assert {"features.3 26", "0.25", "-0.5", "NaN", "score lost"} <= set(said)
    assert said["1.5   then best: triangle"] == Colour.ALARM and said["0.25"] == Colour.INK
    low, high = figure.axes[0].get_xlim()
    assert low < -0.5 and high > 1.5 and figure.axes[0].get_ylim() == (3.5, -0.5)


def test_the_page_names_class_model_image_and_preprocessing_and_random_weights_in_red() -> None:
    said = texts(draw_ablation(ablation(channel(1, 1.0)), picture(), net("best.pth")))
    assert "Score of star (7) that is lost when a channel is set to 0" in said
    assert f"resnet34, weights: best.pth, cat.jpg, preprocessing: {net().preprocess.describe()}" in " ".join(said)
    assert "score with all channels 5, probability 90 %; 1 of 1 channel, those worth most first" in said
    said = texts(draw_ablation(ablation(channel(1, 1.0)), picture(), net("random (seed 0)")))
    assert said["weights: random (seed 0), the network is not trained"] == Colour.ALARM
    assert len(draw_ablation(ablation(channel(1, 1.0))).axes) == 2  # bars and their numbers alone


def test_maps_stand_after_the_photograph_on_scales_of_their_own() -> None:
    hot, cold = np.zeros((3, 4)), np.zeros((3, 4))
    hot[0, 0], cold[2, 3] = 8, -2
    whole = nn.Identity()
    figure = draw_ablation(
        ablation(channel(1, 1.0, hot), channel(2, 0.5), channel(3, 0.25, cold)), picture().image, whole
    )
    _, _, photograph, first, second = (axes.images[0].get_array() if axes.images else None for axes in figure.axes)
    assert tuple(photograph[120, 160]) == (200, 10, 10)
    assert first[0, 0, 0] > first[0, 0, 2] + 50 and second[-1, -1, 2] > second[-1, -1, 0] + 50  # red and blue
    assert np.ptp(first[-1, -1]) == 0  # 0 is transparent over grey
    assert {"photograph", "features.3 1", "-8 (blue) to 8 (red)", "-2 (blue) to 2 (red)"} <= set(texts(figure))
    said = set(texts(draw_ablation(ablation(channel(1, 1.0, hot)), picture().image, whole)))
    assert "0 to 8" in said


def test_there_are_as_many_bars_as_asked_for_at_most_a_hundred() -> None:
    many = ablation(*(channel(at, 1.0) for at in range(150)))
    assert [len(bars(draw_ablation(many, top=top))) for top in (7, 150)] == [7, 100]
    with pytest.raises(UsageError, match="top must be an integer of at least 1, not 0"):
        draw_ablation(many, top=0)


def test_the_kept_maps_are_the_activations_of_the_best_channels_of_each_layer() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model, x = nn.Sequential(*layers, nn.Linear(5, 3)).eval(), torch.randn(1, 3, 9, 12)
    found = ablate_each(model, x, ["0", "2", "5"], types=("all",), keep=9)
    with torch.no_grad():
        judge = {"0": model[0](x), "2": model[:3](x), "5": model(x)}
    for at, row in enumerate(found.channels):
        values = judge[row.call.name][0, row.channel]
        if at < 9 and values.dim():
            assert row.values is not None and np.allclose(row.values, values, atol=1e-6)
        else:
            assert row.values is None
    assert {row.call.name for row in found.channels[:9] if row.values is not None} == {"0", "2"}
    assert ablate_each(model, x, ["0", "2", "5"], types=("all",)) == found  # maps do not count


def test_the_map_of_a_clip_is_the_mean_of_its_frames_and_tokens_are_folded() -> None:
    clip = nn.Sequential(nn.Conv3d(1, 2, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    x = torch.randn(1, 1, 3, 4, 5)
    [best, _] = ablate_each(clip, x, "0", types=("all",), keep=1).channels
    assert best.values is not None
    assert np.allclose(best.values, clip[0](x)[0, best.channel].detach().mean(0), atol=1e-6)


def test_class_names_are_facts() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.constant_(model[0].weight, 1.0)
    first, second = ablate_each(model, torch.ones(1, 1, 2, 2), 0, 0, categories=["cat", "dog"]).channels
    assert (first.channel, first.top_after, first.top_label) == (0, 1, "dog") and second.top_label == "cat"
