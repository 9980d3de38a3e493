"""Saliency beside captum, beside loops by hand and on paper; and the model never knows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from hookscope.errors import HookscopeError, InputError, ModelError, TargetError, UsageError
from hookscope.explain.saliency import Saliency, saliency_maps
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.explain.saliency_settings import Settings
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.scores.logits import Prediction
from tests.helpers import hooks_on, seeded
from tests.nets import Fails, named as chain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from captum import attr as captum

FEW = Settings(samples=5, steps=6, batch_size=4)


def picture(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(1, 3, *(shape or (12, 12)), generator=torch.Generator().manual_seed(seed))


def small(inplace: bool = True, act: Callable[..., nn.Module] = nn.ReLU) -> nn.Module:
    options = {"inplace": True} if inplace else {}
    return seeded(
        lambda: chain(
            first=nn.Conv2d(3, 6, 3, padding=1),
            norm=nn.BatchNorm2d(6),
            relu=act(**options),
            drop=nn.Dropout(0.5),
            pool=nn.MaxPool2d(2),
            second=nn.Conv2d(6, 8, 3, padding=1),
            again=act(**options),
            mean=nn.AdaptiveAvgPool2d(2),
            flat=nn.Flatten(),
            head=nn.Linear(32, 5),
        )
    )


def only(model: nn.Module, inputs: Any, target: str | int = 3, method: str = "gradient", **options: Any) -> Tensor:
    [found] = saliency_maps(model, inputs, target, method, **options)
    assert found.method == method and found.values.shape == inputs.shape[1:]
    return found.values


def one_line(error: pytest.ExceptionInfo[HookscopeError]) -> str:
    text = str(error.value)
    assert text and "\n" not in text and len(text) < 300
    return text


def close(ours: Tensor, theirs: Tensor, within: float = 1e-5) -> None:
    theirs = theirs.detach()[0]
    assert theirs.abs().max() > 0
    assert (ours - theirs).abs().max() <= within * theirs.abs().max()


# -- on paper ----------------------------------------------------------------------------------------------------------


def square() -> nn.Module:
    """Of three values the score ``2 x + 3 y^2 - z``, and its negative."""

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b, c = x.flatten(1).unbind(1)
            score = 2 * a + 3 * b**2 - c
            return torch.stack([score, -score], 1)

    return Square()


def test_the_methods_from_paper() -> None:
    x = torch.tensor([3.0, 2.0, 5.0]).reshape(1, 3, 1, 1)
    expected = {
        "gradient": [2, 12, -1],
        "gradient-input": [6, 24, -5],
        "integrated-gradients": [6, 12, -5],  # 3 * 2^2: the rule is exact for polynomials
    }
    for method, values in expected.items():
        assert only(square(), x, 0, method).flatten().tolist() == pytest.approx(values, rel=1e-5), method
        assert only(square(), x, 1, method).flatten().tolist() == pytest.approx([-v for v in values], rel=1e-5)


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


# -- captum ------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("method", CAPTUM)
def test_captum_agrees(method: str) -> None:
    net, x = small(inplace=False), picture()
    for at in (0, 3):
        close(only(net, x, at, method, settings=Settings(steps=7)), judged(method, net, x, at))


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_layers_in_place_give_what_the_same_weights_give_without(method: str) -> None:
    x = picture()
    ours, other = (only(small(inplace), x, 1, method, settings=FEW) for inplace in (True, False))
    close(ours, other[None], 1e-6)
    if method in CAPTUM:
        close(only(small(), x, 1, method, settings=Settings(steps=7)), judged(method, small(inplace=False), x, 1))


@pytest.mark.slow
@pytest.mark.parametrize("method", CAPTUM)
@pytest.mark.parametrize("name", ["vgg11_bn", "squeezenet1_1", "alexnet", "googlenet"])
def test_captum_agrees_on_models_of_torchvision(name: str, method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of googlenet's builder
        net = seeded(lambda: torchvision.models.get_model(name, weights=None, num_classes=10))
    apart = copy.deepcopy(net)
    for module in apart.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    if name == "googlenet" and method == "guided-backprop":
        with pytest.raises(ModelError, match="GoogLeNet has no ReLU layer"):
            only(net, picture(64, 64), 3, method)
        return
    x = picture(64, 64)
    close(only(net, x, 3, method, settings=Settings(steps=7)), judged(method, apart, x, 3), 1e-4)


# -- SmoothGrad, Integrated Gradients ----------------------------------------------------------------------------------


def test_smoothgrad_is_the_mean_gradient_of_noisy_pictures() -> None:
    net, x = small(), picture()
    numbers = torch.Generator().manual_seed(7)
    sigma, total = 0.3 * float(x.max() - x.min()), torch.zeros_like(x)
    for _ in range(6):
        noisy = (x + sigma * torch.randn(x.shape, generator=numbers)).requires_grad_()
        total += torch.autograd.grad(net(noisy)[0, 2], noisy)[0]
    settings = Settings(samples=6, noise=0.3, seed=7)
    close(only(net, x, 2, "smoothgrad", settings=settings), total / 6)
    other = only(net, x, 2, "smoothgrad", settings=Settings(samples=6, noise=0.3, seed=8))
    assert not torch.allclose(other, total[0] / 6, rtol=0.01)
    assert torch.equal(other, only(net, x, 2, "smoothgrad", settings=Settings(samples=6, noise=0.3, seed=8)))


def test_smoothgrad_without_noise_is_the_gradient() -> None:
    net, x = small(), picture()
    close(only(net, x, 2, "smoothgrad", settings=Settings(noise=0)), only(net, x, 2)[None])
    # and a picture of one colour has no range to take a share of
    flat = torch.ones(1, 3, 12, 12)
    close(only(net, flat, 2, "smoothgrad"), only(net, flat, 2)[None])


def test_smoothgrad_sees_the_same_noise_for_each_class() -> None:
    net, x = small(), picture()
    both = saliency_maps(net, x, "top:2", "smoothgrad", settings=FEW)
    for one in both:
        assert torch.equal(one.values, only(net, x, one.prediction.index, "smoothgrad", settings=FEW))


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
def test_integrated_gradients_add_up_to_the_score(act: Callable[..., nn.Module]) -> None:
    net, x = small(inplace=False, act=act).double(), picture().double()
    [found] = saliency_maps(net, x, 3, "integrated-gradients", settings=Settings(steps=200))
    with torch.no_grad():
        between = float((net(x) - net(x * 0))[0, 3])
    assert abs(between) > 0.01
    assert float(found.values.sum()) == pytest.approx(between, rel=1e-6 if act is nn.Tanh else 1e-2)
    [few] = saliency_maps(net, x, 3, "integrated-gradients", settings=Settings(steps=1))
    assert abs(float(few.values.sum()) - between) > abs(float(found.values.sum()) - between)


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_what_the_values_should_make_up_is_known_of_integrated_gradients_alone(method: str) -> None:
    net, x = small(), picture()
    with torch.no_grad():
        between = (net(x) - net(x * 0))[0]
    for one in saliency_maps(net, x, "top:3", method, settings=FEW):
        if method == "integrated-gradients":
            assert one.expected == pytest.approx(float(between[one.prediction.index]), abs=1e-6)
        else:
            assert one.expected is None
        assert one.unguided == 0


@pytest.mark.parametrize("method", ["smoothgrad", "integrated-gradients"])
def test_the_size_of_a_batch_does_not_count_and_progress_is_complete(method: str) -> None:
    net, x = small(), picture()
    found = {}
    for size in (1, 3, 7, 50):
        steps: list[tuple[int, int]] = []
        settings = Settings(samples=7, steps=7, batch_size=size)
        found[size] = saliency_maps(
            net, x, "top:2", method, settings=settings, on_progress=lambda *at, to=steps: to.append(at)
        )
        assert steps[-1] == (14, 14) and steps == sorted(steps) and {total for _, total in steps} == {14}
        assert len(steps) == 2 * -(-7 // size)
    for several in zip(*found.values(), strict=True):
        for one in several[1:]:
            close(one.values, several[0].values[None])


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_progress_of_every_method_is_complete(method: str) -> None:
    steps: list[tuple[int, int]] = []
    saliency_maps(small(), picture(), "top:3", method, settings=FEW, on_progress=lambda *at: steps.append(at))
    assert steps[-1][0] == steps[-1][1] == 3 * SALIENCY_METHODS[method].total(FEW)


# -- guided backpropagation --------------------------------------------------------------------------------------------


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


class Shared(nn.Module):
    """One ReLU that runs twice, in place, and a ReLU that is a function between."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 16, 3)
        self.relu, self.head, self.function = nn.ReLU(inplace=True), nn.Linear(16, 5), function

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        x = F.relu(self.b(x)) if self.function else self.b(x)
        return self.head(self.relu(self.c(x)).mean((2, 3)))

    def by_hand(self, x: Tensor, relu: Callable[[Tensor], Tensor]) -> Tensor:
        x = relu(self.a(x))
        x = F.relu(self.b(x)) if self.function else self.b(x)
        return self.head(relu(self.c(x)).mean((2, 3)))


@pytest.mark.parametrize("function", [False, True])
def test_a_relu_that_runs_twice_is_guided_twice_and_a_function_never(function: bool) -> None:
    net, x = seeded(lambda: Shared(function)), picture()
    for at in range(3):
        expected = guided_by_hand(net.by_hand, x, at)
        close(only(net, x, at, "guided-backprop"), expected)
    assert not torch.allclose(only(net, x, 0, "guided-backprop"), only(net, x, 0), rtol=0.01)


class Mixed(nn.Module):
    """A ReLU that is a layer, one that is a function, one off the way, and one of a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 5)
        self.relu, self.aside, self.scale = nn.ReLU(), nn.ReLU(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(self.relu(self.a(x))))
        self.aside(x), F.relu(x + 1)
        return self.head(x.mean((2, 3))) * F.relu(self.scale)


def test_relus_that_are_functions_are_counted_as_unguided() -> None:
    for build, count in ((Mixed, 1), (lambda: Shared(True), 1), (lambda: Shared(False), 0), (small, 0)):
        found = saliency_maps(seeded(build), picture(), "top:2", "guided-backprop")
        assert [one.unguided for one in found] == [count, count]
    net = seeded(Mixed).requires_grad_(False)
    assert saliency_maps(net, picture(), 0, "guided-backprop")[0].unguided == 1
    assert saliency_maps(net, picture(), 0, "gradient")[0].unguided == 0


@pytest.mark.parametrize(("name", "count"), [("resnet18", 0), ("densenet121", 1)])
def test_unguided_relus_of_torchvision(name: str, count: int) -> None:
    net = seeded(lambda: torchvision.models.get_model(name, weights=None, num_classes=10))
    [found] = saliency_maps(net, picture(64, 64), 3, "guided-backprop")
    assert found.unguided == count


class OnlyFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


class NeverRuns(OnlyFunctions):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()


@pytest.mark.parametrize("build", [lambda: small(False, nn.GELU), OnlyFunctions, NeverRuns])
def test_without_a_layer_that_is_a_relu_there_is_nothing_to_guide(build: Callable[[], nn.Module]) -> None:
    net = seeded(build)
    with pytest.raises(ModelError, match="no ReLU layer") as e:
        saliency_maps(net, picture(), 0, "guided-backprop")
    assert "smoothgrad" in one_line(e) and hooks_on(net) == 0
    close(only(net, picture()), only(net, picture())[None])  # the others do without


def test_names_of_layers_are_no_patterns() -> None:
    inner = nn.ModuleDict({"a,b#1": nn.ReLU(), "re:(": nn.ReLU()})

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.first, self.second = inner, nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner["re:("](self.second(self.inner["a,b#1"](self.first(x)))).mean((2, 3))

    net, x = seeded(Odd), picture()
    expected = guided_by_hand(lambda leaf, relu: relu(net.second(relu(net.first(leaf)))).mean((2, 3)), x, 1)
    close(only(net, x, 1, "guided-backprop"), expected)


# -- what comes back, what cannot be -----------------------------------------------------------------------------------


def test_for_each_class_what_the_model_answers() -> None:
    net, x = small(), picture()
    with torch.no_grad():
        scores = net(x)[0]
    found = saliency_maps(net, x, "top:3", categories=["a", "b", "c", "d", "e"])
    assert [one.prediction.index for one in found] == scores.argsort(descending=True)[:3].tolist()
    for one in found:
        assert one.prediction.label == "abcde"[one.prediction.index]
        assert one.prediction.score == pytest.approx(float(scores[one.prediction.index]), abs=1e-6)
        assert torch.equal(one.values, only(net, x, one.prediction.index))
        assert one.map.shape == (12, 12) and (one.map >= 0).all()


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_clips(method: str) -> None:
    net = seeded(
        lambda: chain(conv=nn.Conv3d(3, 4, 3), relu=nn.ReLU(), mean=nn.AdaptiveAvgPool3d(1), flat=nn.Flatten())
    )
    clip = picture(5, 6, 7)
    values = only(net, clip, 1, method, settings=FEW)
    assert values.shape == (3, 5, 6, 7) and values.any()


def test_segmentation_scores_are_means_of_logits() -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.conv(x), "aux": self.conv(x) * 2}

    net = seeded(Segments)
    expected = net.conv.weight.detach()[2].expand(3, 12, 12) / 144
    close(only(net, picture(), 2), expected[None])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"target": 5}, TargetError, "no class 5; the model has 5 classes: 0 to 4"),
        ({"target": "fox"}, TargetError, "no class 'fox'"),
        ({"target": "top:0"}, UsageError, "bad target 'top:0'"),
        ({"method": "smothgrad"}, UsageError, "no method 'smothgrad'; nearest: smoothgrad"),
        ({"inputs": torch.zeros(2, 3, 12, 12)}, UsageError, "expected one picture, got 2"),
        ({"inputs": (picture(), picture())}, UsageError, "no single picture but Tensor, Tensor; give one tensor"),
        ({"inputs": [picture()[0]]}, UsageError, "no single picture but list; give one tensor"),
        ({"inputs": ()}, UsageError, "no single picture but nothing"),
        ({"inputs": picture()[0]}, UsageError, "a picture of 3x12x12; wanted is (1, C, H, W), or a clip (1, C, T, H"),
        ({"inputs": (picture()[0],)}, UsageError, "x[None] adds a batch"),
        ({"target": 1.0}, UsageError, "target must be an index, a name or top:K, not float"),
        ({"inputs": torch.zeros(1, 3, 12, 12, dtype=torch.uint8)}, UsageError, "torch.uint8"),
    ],
)
@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_what_cannot_be_is_one_line(
    method: str, options: dict[str, Any], error: type[HookscopeError], text: str
) -> None:
    class Takes(nn.Module):  # anything
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
            return self.net(x.float())

    net = Takes()
    with pytest.raises(error) as e:
        saliency_maps(net, **({"inputs": picture(), "method": method, "settings": FEW} | options))
    assert text in one_line(e) and hooks_on(net) == 0


@pytest.mark.parametrize("inputs", [picture()[0], [picture()[0]], picture().to(torch.uint8), (picture(), picture())])
@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_the_picture_is_checked_before_the_pass(method: str, inputs: Any) -> None:
    net = chain(never=Fails(1))
    with pytest.raises(UsageError):
        saliency_maps(net, inputs, 0, method)
    assert net.never.passes == 0


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_a_model_without_any_class_is_one_line(method: str) -> None:
    net = seeded(lambda: Gives(lambda x: x.mean((2, 3))[:, :0]))
    with pytest.raises(ModelError, match="the model has no classes") as e:
        saliency_maps(net, picture(), method=method)
    one_line(e)


@pytest.mark.parametrize("wish", [3, "3", torch.tensor(3), "d"])
def test_a_class_may_be_asked_for_by_whatever_names_it(wish: Any) -> None:
    [found] = saliency_maps(small(), picture(), wish, categories="abcde")
    assert found.prediction.index == 3
    several = saliency_maps(small(), picture(), "d,0,3", categories="abcde")
    assert [one.prediction.index for one in several] == [3, 0]


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"steps": 0}, {"batch_size": 0}, {"noise": -1.0}, {"noise": float("nan")}]
)
def test_settings_that_make_no_sense_are_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong)).replace("_", " ")) as e:
        Settings(**wrong)
    one_line(e)


class Gives(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.relu, self.output = nn.Conv2d(3, 4, 1), nn.ReLU(), output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.relu(self.conv(x)))


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_models_without_classes_are_one_line(method: str) -> None:
    net = seeded(lambda: Gives(lambda x: [{"boxes": x[0, 0], "scores": x[0, 0, 0]}]))
    with pytest.raises(ModelError, match="gives boxes and scores, no score for each class") as e:
        saliency_maps(net, picture(), method=method)
    one_line(e)


@pytest.mark.parametrize("method", SALIENCY_METHODS)
@pytest.mark.parametrize(
    "output",
    [
        lambda x: x.detach().mean((2, 3)),
        lambda x: torch.ones(1, 4),
        lambda x: torch.ones(1, 4, requires_grad=True) * 2,
    ],
)
def test_a_score_that_no_gradient_leads_back_from_is_one_line(output: Any, method: str) -> None:
    net = seeded(lambda: Gives(output))
    with pytest.raises(ModelError, match="no gradient leads from the score of Gives") as e:
        saliency_maps(net, picture(), method=method)
    one_line(e)
    assert hooks_on(net) == 0


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_weights_that_are_not_finite_are_one_line(method: str) -> None:
    net = small()
    with torch.no_grad():
        net.first.weight[0, 0, 0, 0] = float("nan")
        net.head.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="the score of class 0 is not finite") as e:
        saliency_maps(net, picture(), 0, method, settings=FEW)
    one_line(e)


class Root(nn.Module):
    """The root of the mean pixel: at a black picture its value is 0, its slope infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).abs().mean(1, keepdim=True).sqrt()


def test_a_gradient_that_is_not_finite_under_a_finite_score_is_one_line() -> None:
    with pytest.raises(InputError, match="the gradient of class 0 is not finite") as e:
        saliency_maps(Root(), torch.zeros(1, 3, 4, 4), 0)
    one_line(e)


def test_weights_made_in_inference_mode_are_one_line() -> None:
    with torch.inference_mode():
        net = small()
    with pytest.raises(ModelError, match=r"'first.weight' was made inside torch.inference_mode") as e:
        saliency_maps(net, picture())
    one_line(e)


# -- whatever surrounds the call; nothing changes ----------------------------------------------------------------------


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_grad_modes_frozen_parameters_and_train_mode_do_not_count(method: str) -> None:
    net, x = small(), picture()
    plain = only(net, x, 3, method, settings=FEW)
    with torch.no_grad():
        assert torch.equal(plain, only(net, x, 3, method, settings=FEW))
    with torch.inference_mode():
        assert torch.equal(plain, only(net, x.clone(), 3, method, settings=FEW))
    net.requires_grad_(False)
    assert torch.equal(plain, only(net, x, 3, method, settings=FEW))
    net.train()
    assert torch.equal(plain, only(net, x, 3, method, settings=FEW))
    assert net.training and net.drop.training
    assert not plain.requires_grad and not plain.is_inference()


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_a_default_device_around_the_call_does_not_count(method: str) -> None:
    net, x = small(), picture()
    [plain] = saliency_maps(net, x, 3, method, settings=FEW)
    with torch.device("meta"):
        [found] = saliency_maps(net, x, 3, method, settings=FEW)
        shown = found.map
    assert torch.equal(plain.values, found.values) and torch.equal(plain.map, shown)
    assert plain.expected == found.expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_other_precisions_give_nearly_the_same(method: str, dtype: torch.dtype) -> None:
    plain = only(small(), picture(), 3, method, settings=FEW)
    other = only(small().to(dtype), picture().to(dtype), 3, method, settings=FEW)
    assert other.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    far = (other - plain).norm() / plain.norm()  # a maximum may fall on the neighbour in coarse numbers
    assert far < (1e-4 if dtype == torch.float64 else 0.4)


def busy() -> nn.Module:
    """A model in somebody's hands: part in train mode, part frozen, gradients held, hooks of others on it."""
    net = small()
    net(picture(seed=9)).sum().backward()
    net.drop.train()
    net.head.weight.requires_grad_(False)
    net.first.register_forward_hook(lambda module, args, output: None)
    net.head.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    net.head.register_forward_hook(lambda module, args, output: output + 1)
    return net


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_nothing_of_the_model_changes(method: str) -> None:
    net, x = busy(), picture().requires_grad_()
    hooks, before, state = hooks_on(net), x.detach().clone(), ModelSnapshot(net)
    saliency_maps(net, x, "top:2", method, settings=FEW)
    assert state.changes() == [] and hooks_on(net) == hooks
    assert torch.equal(x, before) and x.grad is None


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_nothing_of_the_model_changes_when_a_layer_fails(method: str, at: int) -> None:
    net = chain(**dict(small().named_children()), fails=Fails(at)).train()
    state = ModelSnapshot(net)
    with pytest.raises(RuntimeError, match="as planned"):
        saliency_maps(net, picture(), 0, method, settings=FEW)
    assert state.changes() == [] and hooks_on(net) == 0


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_nothing_of_the_model_changes_when_somebodys_hook_or_progress_fails(method: str) -> None:
    net = busy()

    def fail(*args: Any) -> None:
        raise RuntimeError("as planned")

    state = ModelSnapshot(net)
    with pytest.raises(RuntimeError, match="as planned"):
        saliency_maps(net, picture(), 0, method, settings=FEW, on_progress=fail)
    assert state.changes() == []
    handle = net.second.register_full_backward_hook(fail)  # in the way back
    state = ModelSnapshot(net)
    with pytest.raises(RuntimeError):
        saliency_maps(net, picture(), 0, method, settings=FEW)
    assert state.changes() == []
    handle.remove()


def test_the_picture_is_not_written_to_by_a_model_that_works_in_place() -> None:
    net = seeded(lambda: chain(relu=nn.ReLU(inplace=True), conv=nn.Conv2d(3, 4, 12), flat=nn.Flatten()))
    x = picture()
    before = x.clone()
    for method in SALIENCY_METHODS:
        values = only(net, x, 1, method, settings=FEW)
        assert torch.equal(x, before)
        if method == "gradient":
            close(values, (net.conv.weight.detach()[1] * (before[0] > 0))[None])
