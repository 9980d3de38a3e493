"""Models broken in one way each: the cause is among the first three findings of the command that can see it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope import StatisticsCollector, diagnose
from hookscope.findings import Finding
from hookscope.gradients import examine_gradients
from hookscope.parameters import parameter_findings, parameter_statistics
from tests.nets import Function

Break = Callable[[Any], None]


def pictures(count: int = 3) -> Tensor:
    """Blurred spots and noise, no two alike, about as bright as normalised photographs."""
    generator = torch.Generator().manual_seed(0)
    blurred = nn.functional.interpolate(torch.randn(count, 3, 5, 5, generator=generator), size=(24, 24), mode="bicubic")
    return blurred + 0.5 * torch.randn(count, 3, 24, 24, generator=generator)


def block() -> nn.Module:
    """Two convolutions with BatchNorm and a shortcut around them."""
    conv1, conv2 = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
    layers = {"conv1": conv1, "bn1": nn.BatchNorm2d(16), "conv2": conv2, "bn2": nn.BatchNorm2d(16), "relu1": nn.ReLU()}
    return Function(
        lambda net, x: net.relu2(x + net.bn2(net.conv2(net.relu1(net.bn1(net.conv1(x)))))),
        **layers, relu2=nn.ReLU(inplace=True),
    )  # fmt: skip


def residual() -> nn.Module:
    """A residual net whose BatchNorms have seen pictures, as after a training."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(16, 5))
    net = nn.Sequential(*stem, block(), nn.MaxPool2d(2), block(), *head)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, 0.0, 1.0)
    for _ in range(50):
        net(pictures(16))
    return net.eval()


def plain(act: Callable[[], nn.Module] = nn.ReLU, layers: int = 6) -> nn.Sequential:
    """Convolutions and activation functions, without normalisation: even numbers have weights."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for channels in (3, *[16] * (layers - 1)):
        modules += [nn.Conv2d(channels, 16, 3, padding=1), act()]
        nn.init.kaiming_normal_(modules[-2].weight, nonlinearity="relu")
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()


def of_stats(net: nn.Module, images: Tensor) -> list[Finding]:
    with StatisticsCollector(net) as collector, torch.no_grad():
        net(images)
    return diagnose(collector.totals)


COMMANDS: dict[str, Callable[[nn.Module, Tensor], list[Finding]]] = {
    "stats": of_stats,
    "weights": lambda net, images: parameter_findings(parameter_statistics(net)),
    "gradients": lambda net, images: examine_gradients(net, images[:1])[1],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("make", [residual, plain])
def test_the_models_are_sound_before_they_are_broken(make: Callable[[], nn.Module], command: str) -> None:
    assert [f for f in COMMANDS[command](make(), pictures(20)) if f.severity != "note"] == []


def filled(layer: str, value: float) -> Break:
    """Set a parameter or buffer, or all of a layer."""

    def fill(net: Any) -> None:
        for name, values in net.state_dict().items():
            if name.startswith(layer) and values.is_floating_point():
                values.fill_(value)

    return fill


def scaled(factor: float) -> Break:
    def scale(net: Any) -> None:
        for name, values in net.state_dict().items():
            if name.endswith("weight") and values.dim() > 1:
                values.mul_(factor)

    return scale


def entry(name: str, place: Any, value: float) -> Break:
    """Set a part of a parameter."""

    def change(net: Any) -> None:
        net.get_parameter(name).data[place] = value

    return change


def replaced(function: Callable[[Tensor], Tensor]) -> Break:
    """Put a function in the place of the pooling."""

    def replace(net: Any) -> None:
        net[4] = Function(lambda x: function(nn.functional.max_pool2d(x, 2)))

    return replace


def put_first(function: Callable[[Tensor], Tensor]) -> Break:
    """Change the pictures."""
    return lambda net: net.insert(0, Function(function))


def copied(net: Any) -> None:
    weight = net[3].conv1.weight.data
    weight[8:12] = weight[:4]


def diverged(net: Any) -> None:
    net[3].bn1.running_var[4] = 1e14
    net[3].conv1.weight.data[4] *= 199 / net[3].conv1.weight.data[4].abs().max()


def negative(net: Any) -> None:
    net[3].bn2.running_var[[1, 5]] *= -1


def without_buffers(net: Any) -> None:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()


def unused(net: Any) -> None:
    net[3].forward = lambda x: net[3].relu2(x + net[3].conv2.bias[:, None, None])


BROKEN: dict[str, tuple[Callable[[], nn.Module], Break, int, dict[str, tuple[str, str, str]]]] = {
    "a dead ReLU": (
        plain, filled("4.bias", -1e3), 3,
        {"stats": ("error", "constant-output", "5"), "gradients": ("error", "vanishing-gradient", "6")},
    ),
    "a dead ReLU in a branch": (
        residual, filled("3.bn1.bias", -1e3), 3, {"stats": ("warning", "constant-output", "3.relu1")}
    ),
    "most of a ReLU dead": (plain, entry("4.bias", slice(10), -1e3), 20, {"stats": ("warning", "dead-channels", "5")}),
    "copied filters": (
        residual, copied, 3,
        {
            "weights": ("note", "duplicate-filters", "3.conv1.weight"),
            "stats": ("note", "duplicate-channels", "3.conv1"),
        },
    ),
    "equal filters": (
        plain, filled("2.weight", 0.1), 20,
        {"weights": ("warning", "constant-weights", "2.weight"), "stats": ("warning", "duplicate-channels", "2")},
    ),
    "one NaN": (
        residual, entry("3.conv2.weight", (2, 1, 0, 0), math.nan), 3,
        {"weights": ("error", "non-finite", "3.conv2.weight"), "stats": ("error", "non-finite", "3.conv2")},
    ),
    "one Inf": (
        residual, entry("5.conv1.bias", 3, math.inf), 3,
        {"weights": ("error", "non-finite", "5.conv1.bias"), "stats": ("error", "non-finite", "5.conv1")},
    ),
    "a large initialisation": (
        plain, scaled(30), 3,
        {"stats": ("warning", "exploding-activations", "4"), "gradients": ("warning", "exploding-gradient", "14")},
    ),
    "a small initialisation": (
        plain, scaled(1e-3), 3,
        {"stats": ("error", "constant-output", "2"), "gradients": ("warning", "vanishing-gradient", "6")},
    ),
    "a collapsed BatchNorm": (
        residual, filled("3.bn1.running_var", 0.0), 3,
        {
            "weights": ("warning", "collapsed-variance", "3.bn1.running_var"),
            "stats": ("warning", "sudden-drift", "3.bn1"),
        },
    ),
    "most scales lost": (
        residual, entry("3.bn1.weight", slice(9), 0.0), 3, {"weights": ("warning", "dead-filters", "3.bn1.weight")}
    ),
    "a diverged training": (residual, diverged, 3, {"weights": ("warning", "exploding-variance", "3.bn1.running_var")}),
    "large weights": (residual, scaled(3e3), 3, {"weights": ("warning", "exploding-weights", "0.weight")}),
    "a negative variance": (
        residual, negative, 3,
        {
            "weights": ("error", "negative-variance", "3.bn2.running_var"),
            "stats": ("error", "negative-variance", "3.bn2"),
        },
    ),
    "saturated sigmoids": (
        lambda: plain(nn.Sigmoid), scaled(300), 3, {"stats": ("warning", "saturated", "1")},
    ),
    "saturated tangents": (lambda: plain(nn.Tanh), scaled(300), 3, {"stats": ("warning", "saturated", "1")}),
    "pictures of 0..255": (
        residual, put_first(lambda x: 127 + 60 * x), 3, {"stats": ("warning", "batchnorm-drift", "2")}
    ),
    "pictures that are not normalised": (
        residual, put_first(lambda x: 0.45 + 0.02 * x), 20, {"stats": ("warning", "batchnorm-drift", "2")}
    ),
    "equal pictures": (
        residual, put_first(lambda x: x[:1].expand_as(x)), 20, {"stats": ("error", "constant-output", "1")}
    ),
    "a zeroed head": (
        plain, filled("14.weight", 0.0), 3,
        {"stats": ("error", "constant-output", "14"), "weights": ("warning", "constant-weights", "14.weight")},
    ),
    "a zeroed layer": (
        plain, filled("6.", 0.0), 3,
        {"stats": ("error", "constant-output", "6"), "weights": ("warning", "constant-weights", "6.weight")},
    ),
    "a checkpoint without buffers": (
        residual, without_buffers, 3,
        {"weights": ("warning", "never-updated", ""), "stats": ("warning", "never-updated", "")},
    ),
    "a detached backbone": (residual, replaced(Tensor.detach), 3, {"gradients": ("error", "no-gradient", "4")}),
    "a step function": (residual, replaced(Tensor.sign), 3, {"gradients": ("error", "vanishing-gradient", "3.conv2")}),
    "a hard choice": (residual, replaced(lambda x: (x > 0.5).float()), 3, {"gradients": ("error", "no-gradient", "4")}),
    "a root of 0": (
        residual, replaced(lambda x: (x - x.detach()).abs().sqrt() + x), 3,
        {"gradients": ("error", "exploding-gradient", "3.bn2")},
    ),
    "an unused layer": (residual, unused, 3, {"gradients": ("warning", "no-gradient", "3.bn2")}),
}  # fmt: skip


@pytest.mark.parametrize(("make", "fault", "count", "expected"), BROKEN.values(), ids=BROKEN)
def test_the_cause_is_among_the_first_three_findings(
    make: Callable[[], nn.Module], fault: Break, count: int, expected: dict[str, tuple[str, str, str]]
) -> None:
    net = make()
    fault(net)
    for command, finding in expected.items():
        found = [(f.severity, f.finding, f.layer) for f in COMMANDS[command](net, pictures(count))]
        assert finding in found[:3], command
