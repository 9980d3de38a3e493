"""Saliency beside captum, beside loops by hand and on paper."""

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from hookscope.errors import HookscopeError, InputError, InstallationError, ModelError, UsageError
from hookscope.explain.saliency import Saliency, saliency_maps
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.explain.saliency_settings import SaliencySettings
from hookscope.scores.logits import Prediction
from tests.explain.nets import Gives, picture, small
from tests.explain.test_any_method import FEW
from tests.helpers import hooks_on, not_in_place, refused, seeded
from tests.nets import Fails, Function, named as chain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from captum import attr as captum


OF_GRADIENTS = [name for name, how in SALIENCY_METHODS.items() if how.gradient and not how.localised]


def only(model: nn.Module, inputs: Any, target: str | int = 3, method: str = "gradient", **options: Any) -> Tensor:
    [saliency] = saliency_maps(model, inputs, target, method, **options)
    assert saliency.method == method and saliency.values.shape == inputs.shape[1:]
    return saliency.values


def close(ours: Tensor, theirs: Tensor, within: float = 1e-5) -> None:
    theirs = theirs.detach()[0]
    assert theirs.abs().max() > 0
    assert (ours - theirs).abs().max() <= within * theirs.abs().max()


def of_three(x: Tensor) -> Tensor:
    """Of three values the score ``2 x + 3 y^2 - z``, and its negative."""
    a, b, c = x.flatten(1).unbind(1)
    score = 2 * a + 3 * b**2 - c
    return torch.stack([score, -score], 1)


def test_the_methods_from_paper() -> None:
    x = torch.tensor([3.0, 2.0, 5.0]).reshape(1, 3, 1, 1)
    expected = {
        "gradient": [2, 12, -1],
        "gradient-input": [6, 24, -5],
        "integrated-gradients": [6, 12, -5],  # 3 * 2^2: the rule is exact for polynomials
    }
    for method, values in expected.items():
        assert only(Function(of_three), x, 0, method).flatten().tolist() == pytest.approx(values, rel=1e-5), method
        opposite = only(Function(of_three), x, 1, method)
        assert opposite.flatten().tolist() == pytest.approx([-v for v in values], rel=1e-5)


def test_guided_backpropagation_from_paper() -> None:
    # y = relu(x) with x = (1, -1, 2), then weights (1, 1, -1): the ReLU stops the second, the guide the third
    net = chain(flat=nn.Flatten(), relu=nn.ReLU(), head=nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        net.head.weight.copy_(torch.tensor([[1.0, 1, -1]]))
    x = torch.tensor([1.0, -1, 2]).reshape(1, 3, 1, 1)
    assert only(net, x, 0).flatten().tolist() == [1, 0, -1]
    assert only(net, x, 0, "guided-backprop").flatten().tolist() == [1, 0, 0]


def test_the_map_is_the_largest_channel_or_the_sum_of_shares() -> None:
    values = torch.tensor([1.0, -3.0, 1.5]).reshape(3, 1, 1)
    for method, how in SALIENCY_METHODS.items():
        found = Saliency(Prediction(0, None, 1, 1), method, values)
        assert found.map.tolist() == [[0.5 if how.signed else 3.0]], method
    clip = Saliency(Prediction(0, None, 1, 1), "gradient", torch.ones(3, 4, 5, 6))
    assert clip.map.shape == (4, 5, 6)


CAPTUM: dict[str, Callable[[nn.Module, Tensor, int], Tensor]] = {
    "gradient": lambda net, x, at: captum.Saliency(net).attribute(x, at, abs=False),
    "gradient-input": lambda net, x, at: captum.InputXGradient(net).attribute(x, at),
    "integrated-gradients": lambda net, x, at: captum.IntegratedGradients(net).attribute(
        x, torch.zeros_like(x), at, n_steps=7, method="gausslegendre"
    ),
    "guided-backprop": lambda net, x, at: captum.GuidedBackprop(net).attribute(x, at),
}


def judged(method: str, net: nn.Module, x: Tensor, at: int) -> Tensor:
    """By captum on a copy: it leaves flags and hooks of its own behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it sets requires_grad, and hooks on ReLUs
        return CAPTUM[method](copy.deepcopy(net), x.clone().requires_grad_(), at)


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_layers_in_place_agree_with_captum_and_with_the_same_net_without(method: str) -> None:
    x = picture()
    ours, other = (only(small(inplace), x, 1, method, settings=FEW) for inplace in (True, False))
    close(ours, other[None], 1e-6)
    for at in (0, 3) if method in CAPTUM else ():
        close(
            only(small(), x, at, method, settings=SaliencySettings(steps=7, most_steps=7)),
            judged(method, small(inplace=False), x, at),
        )


@pytest.mark.slow
@pytest.mark.parametrize("method", CAPTUM)
@pytest.mark.parametrize("name", ["vgg11_bn", "squeezenet1_1", "alexnet", "googlenet"])
def test_captum_agrees_on_models_of_torchvision(name: str, method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of googlenet's builder
        net = seeded(lambda: torchvision.models.get_model(name, weights=None, num_classes=10))
    apart = not_in_place(copy.deepcopy(net))
    if name == "googlenet" and method == "guided-backprop":
        with pytest.raises(ModelError, match="GoogLeNet has no ReLU layer"):
            only(net, picture(64, 64), 3, method)
        return
    x = picture(64, 64)
    close(only(net, x, 3, method, settings=SaliencySettings(steps=7, most_steps=7)), judged(method, apart, x, 3), 1e-4)


def test_smoothgrad_is_the_mean_gradient_of_noisy_pictures_and_without_noise_the_gradient() -> None:
    net, x = small(), picture()
    numbers = torch.Generator().manual_seed(7)
    sigma, total = 0.3 * float(x.max() - x.min()), torch.zeros_like(x)
    for _ in range(6):
        noisy = (x + sigma * torch.randn(x.shape, generator=numbers)).requires_grad_()
        total += torch.autograd.grad(net(noisy)[0, 2], noisy)[0]
    settings = SaliencySettings(samples=6, noise=0.3, seed=7)
    close(only(net, x, 2, "smoothgrad", settings=settings), total / 6)
    other = only(net, x, 2, "smoothgrad", settings=SaliencySettings(samples=6, noise=0.3, seed=8))
    assert not torch.allclose(other, total[0] / 6, rtol=0.01)
    assert torch.equal(other, only(net, x, 2, "smoothgrad", settings=SaliencySettings(samples=6, noise=0.3, seed=8)))
    close(only(net, x, 2, "smoothgrad", settings=SaliencySettings(noise=0)), only(net, x, 2)[None])
    # and a picture of one colour has no range to take a share of
    flat = torch.ones_like(x)
    close(only(net, flat, 2, "smoothgrad"), only(net, flat, 2)[None])


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
def test_integrated_gradients_add_up_to_the_score(act: Callable[..., nn.Module]) -> None:
    net, x = small(inplace=False, act=act).double(), picture().double()
    [found] = saliency_maps(net, x, 3, "integrated-gradients", settings=SaliencySettings(steps=200))
    with torch.no_grad():
        between = float((net(x) - net(x * 0))[0, 3])
    assert abs(between) > 0.01
    assert float(found.values.sum()) == pytest.approx(between, rel=1e-6 if act is nn.Tanh else 1e-2)
    [few] = saliency_maps(net, x, 3, "integrated-gradients", settings=SaliencySettings(steps=1, most_steps=1))
    assert abs(float(few.values.sum()) - between) > abs(float(found.values.sum()) - between)


@pytest.mark.parametrize(("most", "steps", "incomplete"), [(800, 16, False), (8, 8, True), (3, 2, True), (1, 2, True)])
def test_integrated_gradients_double_their_steps_until_the_shares_add_up(
    most: int, steps: int, incomplete: bool
) -> None:
    # a sigmoid that saturates: few points between zeros and the picture miss where it rises
    net = Function(lambda x: 1 * torch.sigmoid(40 * x.mean((2, 3)) - 10))  # not the last operation
    x, seen = torch.ones(1, 3, 4, 4, dtype=torch.double), list[tuple[int, int]]()
    settings = SaliencySettings(steps=2, most_steps=most)
    [found] = saliency_maps(
        net, x, 1, "integrated-gradients", settings=settings, on_progress=lambda *at: seen.append(at)
    )
    assert (found.steps, found.incomplete) == (steps, incomplete)
    assert found.expected == pytest.approx(
        float(torch.sigmoid(torch.tensor(30.0)) - torch.sigmoid(torch.tensor(-10.0)))
    )
    total = float(found.values.sum())
    assert (abs(total / found.expected - 1) > 0.05) == incomplete
    note = f"add up to {total:.4g} with {steps} steps, but the score minus the score of zeros is {found.expected:.4g}"
    assert (note in repr(found)) == incomplete and f"sum={total:.4g}, expected={found.expected:.4g}" in repr(found)
    judge = captum.IntegratedGradients(net).attribute(x, torch.zeros_like(x), 1, n_steps=steps, method="gausslegendre")
    close(found.values[None], judge)
    taken = sum(number for number in (2, 4, 8, 16) if number <= steps)
    assert seen[-1] == (taken, taken) and seen == sorted(seen)
    assert [other.steps for other in saliency_maps(net, x, 1, "gradient")] == [None]


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_each_class_is_as_if_asked_alone_and_progress_is_complete(method: str) -> None:
    net, x, steps = small(), picture(), []
    with torch.no_grad():
        scores, between = net(x)[0], (net(x) - net(x * 0))[0]
    options = {"categories": "abcde", "settings": FEW}
    maps = saliency_maps(net, x, "top:3", method, **options, on_progress=lambda *at: steps.append(at))
    assert steps[-1][0] == steps[-1][1] == 3 * SALIENCY_METHODS[method].pictures(FEW, x)
    assert [saliency.prediction.index for saliency in maps] == scores.argsort(descending=True)[:3].tolist()
    for saliency in maps:
        index = saliency.prediction.index
        assert saliency.prediction.label == "abcde"[index] and saliency.map.shape == (16, 16)
        assert saliency.prediction.score == pytest.approx(float(scores[index]), abs=1e-6)
        assert (saliency.map >= 0).all()
        assert torch.equal(saliency.values, only(net, x, index, method, settings=FEW)) and saliency.unguided == 0
        expected = {"integrated-gradients": float(between[index]), "lrp": saliency.prediction.score}.get(method)
        assert saliency.expected == (None if expected is None else pytest.approx(expected, abs=1e-6))


def guided_by_hand(forward: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor], x: Tensor, at: int) -> Tensor:
    class Guided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.save_for_backward(value)
            return value.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            [value] = ctx.saved_tensors
            return gradient.clamp(min=0) * (value > 0)

    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(forward(leaf, Guided.apply)[0, at], leaf)[0]


def shared(function: bool) -> nn.Module:
    """One ReLU that runs twice, in place, and a ReLU that is a function between."""

    def forward(net: Any, x: Tensor, relu: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        relu = relu or net.relu
        x = relu(net.a(x))
        x = F.relu(net.b(x)) if function else net.b(x)
        return net.head(relu(net.c(x)).mean((2, 3)))

    layers = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 3), "c": nn.Conv2d(8, 16, 3)}
    return Function(forward, **layers, relu=nn.ReLU(inplace=True), head=nn.Linear(16, 5))


@pytest.mark.parametrize("function", [False, True])
def test_a_relu_that_runs_twice_is_guided_twice_and_a_function_never(function: bool) -> None:
    net, x = seeded(lambda: shared(function)), picture()
    for at in range(3):
        expected = guided_by_hand(net, x, at)
        close(only(net, x, at, "guided-backprop"), expected)
    assert not torch.allclose(only(net, x, 0, "guided-backprop"), only(net, x, 0), rtol=0.01)


def mixed() -> nn.Module:
    """A ReLU that is a layer, one that is a function, one off the way, and one of a parameter alone."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = F.relu(net.b(net.relu(net.a(x))))
        net.aside(x), F.relu(x + 1)
        return net.head(x.mean((2, 3))) * F.relu(net.scale)

    layers = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 3), "head": nn.Linear(8, 5)}
    net = Function(forward, **layers, relu=nn.ReLU(), aside=nn.ReLU())
    net.scale = nn.Parameter(torch.ones(1))
    return net


def of_torchvision(name: str) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=10)


@pytest.mark.parametrize(
    ("build", "count"),
    [
        *((mixed, 1), (lambda: shared(True), 1), (lambda: shared(False), 0), (small, 0)),
        *((of_torchvision("resnet18"), 0), (of_torchvision("densenet121"), 1)),
    ],
)
def test_relus_that_are_functions_are_counted_as_unguided(build: Callable[[], nn.Module], count: int) -> None:
    net, x = seeded(build), picture(64, 64)
    assert [one.unguided for one in saliency_maps(net, x, "top:2", "guided-backprop")] == [count, count]
    net.requires_grad_(False)
    methods = {"guided-backprop": count, "gradient": 0}
    assert {method: saliency_maps(net, x, 0, method)[0].unguided for method in methods} == methods


NEVER_RUNS = Function(
    lambda net, x: F.relu(net.conv(x)).mean((2, 3)),
    conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU(),
)  # fmt: skip


@pytest.mark.parametrize("net", [small(False, nn.GELU), NEVER_RUNS])
def test_without_a_layer_that_is_a_relu_there_is_nothing_to_guide(net: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"no ReLU layer.*smoothgrad"):
        saliency_maps(net, picture(), 0, "guided-backprop")
    assert hooks_on(net) == 0


def test_names_of_layers_are_no_patterns() -> None:
    inner = nn.ModuleDict({"a,b#1": nn.ReLU(), "re:(": nn.ReLU()})
    net = Function(
        lambda net, x: net.inner["re:("](net.second(net.inner["a,b#1"](net.first(x)))).mean((2, 3)),
        inner=inner, first=nn.Conv2d(3, 4, 3), second=nn.Conv2d(4, 5, 3),
    ).eval()  # fmt: skip
    x = picture()
    expected = guided_by_hand(lambda leaf, relu: relu(net.second(relu(net.first(leaf)))).mean((2, 3)), x, 1)
    close(only(net, x, 1, "guided-backprop"), expected)


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_clips(method: str) -> None:
    net = seeded(
        lambda: chain(conv=nn.Conv3d(3, 4, 3), relu=nn.ReLU(), mean=nn.AdaptiveAvgPool3d(1), flat=nn.Flatten())
    )
    clip = picture(5, 6, 7)
    values = only(net, clip, 1, method, settings=FEW)
    assert values.shape == (3, 5, 6, 7) and values.any()


def test_a_class_of_a_segmentation_is_explained_where_it_is_the_best() -> None:
    net = seeded(lambda: Gives(lambda maps: {"out": maps, "aux": maps * 2}))
    net.relu = nn.Identity()
    best = (net(picture())["out"].argmax(1) == 2).float()
    assert 1 < best.sum() < 255
    close(only(net, picture(), 2), net.conv.weight.detach()[2] * best[None] / best.sum())


NO_GRADIENT = "no gradient leads from the score of Gives"
NAN_SLOPE = Gives(lambda maps: (maps * 0).abs().mean((2, 3)).sqrt())  # the slope of a root at 0


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ((picture(), picture()), UsageError, "expected one image (1, C, H, W)"),
        ([picture()[0]] * 2, UsageError, "expected one image (1, C, H, W)"),
        ((), UsageError, "expected one image (1, C, H, W)"),
        (picture()[0], UsageError, "of floating-point numbers, got 3x16x16 torch.float32; x[None] adds a batch axis"),
        ((picture()[0],), UsageError, "got 3x16x16"),
        (picture().to(torch.uint8), UsageError, "of floating-point numbers, got 1x3x16x16 torch.uint8"),
        (picture().numpy(), UsageError, "the input holds no tensor: it is ndarray; torch.from_numpy(x) makes a tensor"),
    ],
)
@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_the_picture_is_checked_before_the_pass(
    method: str, inputs: Any, error: type[HookscopeError], text: str
) -> None:
    net = chain(never=Fails(1))
    with refused(error, text, part="holds"):
        saliency_maps(net, inputs, 0, method)
    assert net.never.passes == 0


@pytest.mark.parametrize("method", OF_GRADIENTS)
@pytest.mark.parametrize(
    ("net", "error", "text"),
    [
        (Gives(lambda maps: maps.detach().mean((2, 3))), ModelError, NO_GRADIENT),
        (Gives(lambda maps: torch.ones(1, 4)), ModelError, NO_GRADIENT),
        (Gives(lambda maps: torch.ones(1, 4, requires_grad=True) * 2), ModelError, NO_GRADIENT),
        (NAN_SLOPE, InputError, "the gradient of class 0 is not finite"),
    ],
)
def test_a_score_without_a_gradient_is_refused(
    net: nn.Module, error: type[HookscopeError], text: str, method: str
) -> None:
    with pytest.raises(error, match=text):
        saliency_maps(net, picture(), 0, method)
    assert hooks_on(net) == 0


def test_settings_out_of_range_and_a_method_that_does_not_exist_are_refused() -> None:
    for setting in ("samples", "steps", "batch_size", "noise", "window", "stride"):
        for value in (0, -1) if setting != "noise" else (-1.0, float("nan")):
            with pytest.raises(UsageError, match=f"^{setting.replace('_', ' ')} "):
                SaliencySettings(**{setting: value})
    with pytest.raises(UsageError, match="a stride of 4 pixels for windows of 3"):
        SaliencySettings(window=3, stride=4)
    with pytest.raises(UsageError, match="no method 'smothgrad'; nearest: smoothgrad"):
        saliency_maps(small(), picture(), method="smothgrad")
    with pytest.raises(UsageError, match="no method 'ig'; nearest: integrated-gradients"):
        saliency_maps(small(), picture(), method="ig")


def test_the_picture_is_not_written_to_by_a_model_that_works_in_place() -> None:
    net = seeded(lambda: chain(relu=nn.ReLU(inplace=True), conv=nn.Conv2d(3, 4, 16), flat=nn.Flatten()))
    x = picture()
    before = x.clone()
    for method in SALIENCY_METHODS:
        values = only(net, x, 1, method, settings=FEW)
        assert torch.equal(x, before)
        if method == "gradient":
            close(values, (net.conv.weight.detach()[1] * (before[0] > 0))[None])


@pytest.mark.parametrize(("window", "stride", "size"), [(4, 2, (12, 16)), (5, 3, (11, 13)), (30, 30, (12, 12))])
def test_captum_agrees_on_occlusion(window: int, stride: int, size: tuple[int, int]) -> None:
    net, x = small(), picture(*size)
    shape = (3, min(window, size[0]), min(window, size[1]))
    theirs = captum.Occlusion(net).attribute(x, shape, target=2, strides=(3, min(stride, *size), min(stride, *size)))
    steps: list[tuple[int, int]] = []
    [ours] = saliency_maps(
        net, x, 2, "occlusion", settings=SaliencySettings(window=window, stride=stride, batch_size=7),
        on_progress=lambda *at: steps.append(at),
    )  # fmt: skip
    close(ours.values.sum(0), theirs[:, 0])
    assert ours.values.unique(dim=0).shape[0] == 1 and steps[-1][0] == steps[-1][1]


def test_occlusion_needs_no_gradient_and_takes_any_function_of_the_output() -> None:
    [ours] = saliency_maps(
        Gives(lambda maps: maps.detach()), picture(8, 8), lambda output: output[:, 1].amax((1, 2)), "occlusion"
    )
    assert ours.prediction.index is None and bool(ours.values.any())


def test_a_clip_is_hidden_in_all_frames_at_once() -> None:
    net, clip = (
        chain(conv=nn.Conv3d(3, 2, 1), mean=nn.AdaptiveAvgPool3d(1), flat=nn.Flatten()),
        torch.ones(1, 3, 2, 4, 4),
    )
    [ours] = saliency_maps(net, clip, 0, "occlusion", settings=SaliencySettings(window=2, stride=2))
    lost = (net(clip) - net(torch.zeros_like(clip)))[0, 0] / 4
    close(ours.values, (lost / 3).expand(1, 3, 2, 4, 4))


def test_rise_is_the_papers_mean_about_the_mean_score_and_flat_where_the_picture_is_ignored() -> None:
    net, seen = small(), list[Tensor]()
    settings = SaliencySettings(samples=60, window=5, batch_size=7)
    net.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    found = only(net, torch.ones(1, 3, 12, 16), 2, "rise", settings=settings)
    masks = torch.cat(seen[1:])  # of a picture of ones, what the model sees is the mask
    with torch.no_grad():
        scores = net(masks)[:, 2].double().numpy()
    shown = masks[:, 0].double().numpy()
    assert len(shown) == 60 and torch.equal(masks[:, 0], masks[:, 2]) and abs(shown.mean() - 0.5) < 0.05
    expected = (scores[:, None, None] * shown).mean(0) / shown.mean(0) - scores.mean()
    close(found.sum(0), torch.from_numpy(expected)[None], 1e-4)
    [found] = saliency_maps(small(), picture(), lambda output: output[:, 0] * 0 + 9, "rise", settings=FEW)
    assert found.values.abs().max() < 1e-5


def test_captum_agrees_on_guided_gradcam_of_one_layer() -> None:
    net, apart, x = small(), small(inplace=False), picture()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # captum's guided backpropagation hooks ReLUs
        theirs = captum.GuidedGradCam(apart, apart.second).attribute(x, 2, interpolate_mode="bilinear")
    close(only(net, x, 2, "guided-gradcam", settings=SaliencySettings(layer="second")), theirs)
    with pytest.raises(UsageError, match="chooses 2 calls"):
        saliency_maps(small(), picture(), 2, "guided-gradcam", settings=SaliencySettings(layer="first,second"))


def test_relevances_follow_the_rules_by_hand_and_add_up_to_the_score() -> None:
    x = picture(6, 6)
    net = seeded(
        lambda: chain(
            one=nn.Conv2d(3, 4, 3, bias=False), relu=nn.ReLU(inplace=True), two=nn.Conv2d(4, 5, 3, bias=False),
            again=nn.ReLU(inplace=True), flat=nn.Flatten(), head=nn.Linear(20, 3, bias=False),
        )
    )  # fmt: skip
    [ours] = saliency_maps(net, x, 1, "lrp")
    with torch.no_grad():
        first = net.one(x).relu()
        second = net.two(first).relu()
        relevance = (second.flatten() * net.head.weight[1]).reshape(second.shape)  # epsilon: shares of the score
        up = net.two.weight.clamp(min=0)
        relevance = first * F.conv_transpose2d(relevance / F.conv2d(first, up).clamp(min=1e-9), up)  # z+
        flat = torch.ones_like(net.one.weight) / 27
        relevance = F.conv_transpose2d(relevance, flat)
    close(ours.values, relevance, 1e-4)
    assert not ours.incomplete and ours.expected == ours.prediction.score


def test_relevances_of_a_resnet_with_reused_relus_in_place_add_up_to_the_score() -> None:
    net = seeded(lambda: torchvision.models.resnet18(num_classes=5)).eval()
    before = copy.deepcopy(net.state_dict())
    [ours] = saliency_maps(net, picture(64, 64), 2, "lrp")
    assert abs(float(ours.values.sum()) / ours.prediction.score - 1) < 0.1  # biases take the rest
    assert hooks_on(net) == 0 and all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.filterwarnings("ignore")  # that this part of torch will go
def test_relevance_of_a_quantized_model_is_refused() -> None:
    net = nn.Sequential(torch.ao.nn.quantized.Quantize(1 / 64, 0, torch.quint8), torch.ao.nn.quantized.Conv2d(3, 4, 3))
    net.extend([torch.ao.nn.quantized.DeQuantize(), nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    with pytest.raises(ModelError, match="zennit has no rules for layers of 8 bits; use a method without gradient: oc"):
        saliency_maps(net, picture(), 2, "lrp")


def test_without_zennit_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zennit.composites", None)
    with pytest.raises(InstallationError, match="needs the package zennit; pip install"):
        saliency_maps(small(), picture(), 2, "lrp")


def test_a_model_that_takes_one_image_at_a_time_is_hidden_in_batches_of_one() -> None:
    net = Gives(lambda maps: maps.mean((0, 2, 3))[None])
    with pytest.raises(ModelError, match="gives 1 score for 10 images; set the batch size to 1"):
        saliency_maps(net, picture(), 0, "occlusion")
    assert bool(only(net, picture(), 0, "occlusion", settings=SaliencySettings(batch_size=1)).any())


def test_a_model_that_cannot_be_copied_or_given_rules_is_an_error_in_one_line() -> None:
    net = small()
    net.scale = next(net.parameters()).sum()  # a tensor in a graph
    with pytest.raises(ModelError, match=r"no rules for \w+: RuntimeError: Only Tensors created explicitly"):
        saliency_maps(net, picture(), 2, "lrp")

    class Refusing(nn.Conv2d):
        def register_forward_pre_hook(self, *args: object, **options: object) -> None:
            raise AssertionError

    net = chain(conv=Refusing(3, 4, 3), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten())
    with pytest.raises(ModelError, match="zennit has no rules for Sequential: AssertionError"):
        saliency_maps(net, picture(), 2, "lrp")

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.heads = nn.Conv2d(3, 4, 4, 4), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            tokens = self.patch(x).flatten(2).mT
            return self.heads(tokens, tokens, tokens)[0].mean(1)

    with pytest.raises(ModelError, match="no rules for attention, as in Attends; use integrated-gradients"):
        saliency_maps(Attends(), picture(16, 16), 2, "lrp")


def test_a_method_has_underscores_too_and_its_map_shows_itself() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    [saliency] = saliency_maps(net, torch.ones(1, 3, 8, 8), method="integrated_gradients")
    assert saliency.method == "integrated-gradients" and "method=integrated-gradients" in repr(saliency)
