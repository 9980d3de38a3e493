"""Where gradients stop: every planted break is found with its layer, its reason and its line; sound nets have none."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hookscope.errors import ModelError
from hookscope.gradients.anomaly import first_anomaly
from hookscope.gradients.autograd_flow import Stop, gradient_stops
from hookscope.gradients.backward_pass import layer_gradients
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.models.load import load_model
from hookscope.scores.objective import Loss
from tests.nets import Function, PaddedConv

BOTH = ("a.weight", "a.bias", "b.weight", "b.bias")


def net_of(way: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Convolutions a, b, c and a head, in the order that ``way(net, x)`` calls them."""
    layers = {name: nn.Conv2d(channels, 4, 3) for name, channels in zip("abc", (3, 4, 4), strict=True)}
    return Function(lambda net, x: net.head(way(net, x).mean((2, 3))), **layers, head=nn.Linear(4, 2))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def sound(net: Any, x: Tensor) -> Tensor:
    x = F.relu(net.a(x), inplace=True)
    with torch.no_grad():
        size = x.abs().max()  # looked at, and not used
    assert size.item() >= 0
    scale = x.detach().abs().mean()  # used beside the graph, which goes on
    return net.c(net.b(x) / (scale + 1))


def detached_after_a_relu(net: Any, x: Tensor) -> Tensor:
    x = F.relu(net.b(F.relu(net.a(x))))
    return net.c(x.detach())


def detached_in_place(net: Any, x: Tensor) -> Tensor:
    x = net.a(x).relu_()
    x = net.b(x).detach_()
    return net.c(x.relu_())


def without_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = net.b(F.relu(net.a(x)))
    return net.c(x)


def without_grad_between(net: Any, x: Tensor) -> Tensor:
    x = net.b(net.a(x))
    with torch.no_grad():
        x = x * 2
    return net.c(x)


def stops_of(way: Callable[[Any, Tensor], Tensor]) -> list[Stop]:
    return list(gradient_stops(net_of(way), torch.rand(1, 3, 12, 12), Loss("mse")))


@pytest.mark.parametrize(
    ("way", "line", "why"),
    [
        (detached_after_a_relu, 2, "detached between 'b' and 'c' by detach at {}"),
        (lambda n, x: n.c(n.b(n.a(x)).data * 2), 0, "detached between 'b' and 'c' by data at {}"),
        (detached_in_place, 2, "detached between 'b' and 'c' by detach_ at {}"),
        (lambda n, x: n.c(Double.apply(n.b(n.a(x))).detach()), 0, "detached between 'b' and 'c' by detach at {}"),
        (lambda n, x: n.c(torch.from_numpy(n.b(n.a(x)).detach().numpy())), 0, "detached after 'b' by detach at {}"),
        (without_grad, 2, "no graph inside 'b': conv2d at {} runs under no_grad"),
        (without_grad_between, 3, "no graph between 'b' and 'c': mul at {} runs under no_grad"),
        (
            lambda n, x: n.c(n.b(n.a(x)).argmax(1, keepdim=True).float().expand(-1, 4, -1, -1)),
            0,
            "no graph between 'b' and 'c': argmax at {} is not differentiable",
        ),
    ],
    ids=["detach", "data", "in place", "custom function", "numpy", "no_grad", "no_grad between", "argmax"],
)
def test_a_break_is_found_with_its_reason_and_its_line(way: Any, line: int, why: str) -> None:
    place = f"test_cut_points.py:{way.__code__.co_firstlineno + line}"
    reason = "no graph" if why.startswith("no graph") else "detached"
    assert stops_of(way) == [Stop(reason, "b", ("a", "b"), BOTH, why.format(place), place)]


def test_a_sound_net_has_no_stop() -> None:
    assert stops_of(sound) == []
    # instance norm puts out a view, to which the ReLU then writes
    views = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    frozen = net_of(sound)
    frozen.a.requires_grad_(False)
    for net in (views, frozen):
        assert gradient_stops(net, torch.rand(1, 3, 12, 12), "mse") == ()


def test_two_breaks_are_two_stops_and_calls_of_one_layer_are_distinct() -> None:
    found = stops_of(lambda n, x: n.c(n.b(n.a(x).detach()).detach()))
    assert [(stop.layer, stop.calls, stop.parameters) for stop in found] == [
        ("a", ("a",), BOTH[:2]),
        ("b", ("b",), BOTH[2:]),
    ]
    (stop,) = stops_of(lambda n, x: n.c(n.b(n.b(n.a(x)).detach())))
    assert (stop.layer, stop.calls, stop.parameters) == ("b", ("a", "b"), BOTH[:2])
    assert "between 'b' and 'b#1'" in stop.why


def test_layers_that_the_loss_does_not_depend_on_are_unused() -> None:
    unused, idle = stops_of(lambda n, x: (y := n.a(x), n.b(y))[0])
    assert (unused.reason, unused.layer, unused.calls, unused.parameters) == ("unused", "b", ("b",), BOTH[2:])
    assert unused.why == "the loss does not depend on the output of 'b'"
    assert (idle.reason, idle.why, idle.parameters) == ("unused", "'c' did not run", ("c.weight", "c.bias"))
    (idle,) = stops_of(lambda n, x: n.a(x))
    assert (idle.layer, idle.why, len(idle.parameters)) == ("c", "2 layers from 'b' to 'c' did not run", 4)


def test_a_parameter_alone() -> None:
    net = net_of(lambda n, x: n.c(F.conv2d(n.a(x), n.b.weight.detach())))
    net.spare = nn.Parameter(torch.ones(1))
    by_name = {stop.parameters: stop for stop in gradient_stops(net, torch.rand(1, 3, 12, 12), "mse")}
    assert by_name[("spare",)].why == "the loss does not depend on 'spare'"
    assert by_name[("b.weight",)].reason == "detached" and by_name[("b.bias",)].why == "'b' did not run"


@pytest.mark.parametrize(
    ("way", "finder", "outcome"),
    [
        (sound, None, nullcontext()),
        (detached_in_place, gradient_stops, nullcontext()),
        (without_grad, gradient_stops, nullcontext()),
        (lambda net, x: net.c(net.b(net.a((x - x).sqrt() * 0 + x))), first_anomaly, nullcontext()),
        (lambda net, x: net.c(net.b(net.a((x * 0 - 1).log()))), first_anomaly, nullcontext()),
        (lambda net, x: net.a(x) @ torch.ones(3), None, pytest.raises(RuntimeError, match="size mismatch")),
    ],
    ids=["sound", "in place", "no_grad", "nan backward", "nan forward", "fails"],
)
@pytest.mark.parametrize("examine", [gradient_stops, first_anomaly])
def test_the_model_does_not_change_even_if_it_fails(examine: Any, way: Any, finder: Any, outcome: Any) -> None:
    net, x, found = net_of(way).train(), torch.rand(1, 3, 12, 12), None
    state = ModelSnapshot(net)
    with outcome, torch.inference_mode():
        found = examine(net, x, "mse")
    assert state.changes() == [] and bool(found) == (examine is finder)
    assert not torch.is_anomaly_enabled()
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("examine", [gradient_stops, layer_gradients, first_anomaly])
def test_a_reentrant_checkpoint_is_refused(examine: Any) -> None:
    def way(net: Any, x: Tensor, reentrant: bool = True) -> Tensor:
        x = checkpoint(net.b, net.a(x), use_reentrant=reentrant)
        return checkpoint(lambda y: net.c(y), x, use_reentrant=reentrant)

    net, x = net_of(way), torch.rand(1, 3, 12, 12)
    state = ModelSnapshot(net)
    with pytest.raises(ModelError, match=r"'b' runs inside a reentrant checkpoint, .*; .* use_reentrant=False"):
        examine(net, x, Loss("mse"))
    assert state.changes() == []
    net = net_of(lambda net, x: way(net, x, reentrant=False))
    examine(net, x, Loss("mse"))
    assert gradient_stops(net, x, "mse") == ()


def test_googlenets_idle_heads() -> None:
    net = load_model("googlenet", "none", device="cpu")
    (stop,) = gradient_stops(net.model, torch.rand(1, 3, 32, 32))
    assert (stop.reason, stop.why) == ("unused", "8 layers from 'aux1.conv.conv' to 'aux2.fc2' did not run")
    assert len(stop.parameters) == 14


@pytest.mark.parametrize("norm", [None, nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_layer_with_layers_inside_is_named_with_its_parameters(norm: Any) -> None:
    net = net_of(detached_after_a_relu)
    net.a, net.b = PaddedConv(3, 4, 3), PaddedConv(4, 4, 3)
    if norm is not None:
        norm(net.a)
    (stop,) = gradient_stops(net, torch.rand(1, 3, 9, 9))
    assert (stop.reason, stop.layer, stop.calls) == ("detached", "b", ("a.pad", "a", "b.pad", "b"))
    assert {*stop.parameters} == {name for name, _ in net.named_parameters() if name.startswith(("a.", "b."))}


@pytest.mark.parametrize("name", ["vit_b_16", "convnext_tiny"])
def test_layers_that_hold_parameters_break_nothing(name: str) -> None:
    net = load_model(name, weights="none", device="cpu")
    assert gradient_stops(net.model, torch.rand(1, 3, 224, 224)) == ()
