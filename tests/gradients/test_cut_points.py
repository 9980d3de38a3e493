"""Where gradients stop: every planted break is found with its layer, its reason and its line; sound nets have none."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hookscope.errors import ModelError
from hookscope.gradients.anomaly import first_anomaly
from hookscope.gradients.backward_pass import layer_gradients
from hookscope.gradients.cut_points import Stop, gradient_stops
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.scores.losses import Loss


class Net(nn.Module):
    """conv a, b, c and a head; the cases below break it in different places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(n, 4, 3) for n in (3, 4, 4))
        self.head = nn.Linear(4, 2)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3)))


class Sound(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.a(x), inplace=True)
        with torch.no_grad():
            size = x.abs().max()  # looked at, and not used
        assert size.item() >= 0
        scale = x.detach().abs().mean()  # used beside the graph, which goes on
        return self.end(self.c(self.b(x) / (scale + 1)))


class Detached(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(F.relu(self.a(x)))
        x = F.relu(x).detach()  # here
        return self.end(self.c(x))


class Data(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x)).data * 2  # here
        return self.end(self.c(x))


class InPlace(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x.relu_()
        x = self.b(x).detach_()  # here
        return self.end(self.c(x.relu_()))


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class ThroughCustom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Custom.apply(self.b(self.a(x))).detach()  # here
        return self.end(self.c(x))


class ThroughNumpy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x)).detach().numpy() + 0  # here
        return self.end(self.c(torch.from_numpy(x)))


class NoGrad(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.b(F.relu(self.a(x)))  # here
        return self.end(self.c(x))


class NoGradBetween(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        with torch.no_grad():
            x = x * 2  # here
        return self.end(self.c(x))


class Hard(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x)).argmax(1, keepdim=True)  # here
        return self.end(self.c(x.float().expand(-1, 4, -1, -1)))


def line(kind: type[nn.Module]) -> str:
    """``test_cut_points.py:N`` of the line marked in ``forward``."""
    lines, first = inspect.getsourcelines(kind.forward)
    return f"test_cut_points.py:{first + next(at for at, text in enumerate(lines) if '# here' in text)}"


def stops(net: nn.Module, x: torch.Tensor | None = None) -> list[Stop]:
    return list(gradient_stops(net, torch.rand(1, 3, 12, 12) if x is None else x, Loss("mse")))


BOTH = ("a.weight", "a.bias", "b.weight", "b.bias")


@pytest.mark.parametrize(
    ("kind", "reason", "why"),
    [
        (Detached, "detached", "detached between 'b' and 'c' by detach at {}"),
        (Data, "detached", "detached between 'b' and 'c' by data at {}"),
        (InPlace, "detached", "detached between 'b' and 'c' by detach_ at {}"),
        (ThroughCustom, "detached", "detached between 'b' and 'c' by detach at {}"),
        (ThroughNumpy, "detached", "detached after 'b' by detach at {}"),
        (NoGrad, "no graph", "no graph inside 'b': conv2d at {} runs under no_grad"),
        (NoGradBetween, "no graph", "no graph between 'b' and 'c': mul at {} runs under no_grad"),
        (Hard, "no graph", "no graph between 'b' and 'c': argmax at {} is not differentiable"),
    ],
)
def test_a_break_is_found_with_its_reason_and_its_line(kind: type[Net], reason: str, why: str) -> None:
    (stop,) = stops(kind())
    place = line(kind)
    assert stop == Stop(reason, "b", ("a", "b"), BOTH, why.format(place), place)


def test_a_sound_net_has_none() -> None:
    assert stops(Sound()) == []


def test_two_breaks_are_two() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.end(self.c(self.b(self.a(x).detach()).detach()))

    one, other = stops(Twice())
    assert [(stop.layer, stop.calls, stop.parameters) for stop in (one, other)] == [
        ("a", ("a",), BOTH[:2]),
        ("b", ("b",), BOTH[2:]),
    ]


def test_what_nothing_depends_on_is_unused() -> None:
    class Unused(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            self.b(x)
            return self.end(x)

    unused, idle = stops(Unused())
    assert (unused.reason, unused.layer, unused.calls, unused.parameters) == ("unused", "b", ("b",), BOTH[2:])
    assert unused.why == "the loss does not depend on the output of 'b'"
    assert (idle.reason, idle.why, idle.parameters) == ("unused", "'c' did not run", ("c.weight", "c.bias"))


def test_layers_that_did_not_run_are_one_stop_for_a_run() -> None:
    class Short(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.end(self.a(x))

    (stop,) = stops(Short())
    assert (stop.layer, stop.why, len(stop.parameters)) == ("c", "2 layers from 'b' to 'c' did not run", 4)


def test_a_parameter_alone() -> None:
    class Alone(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.conv2d(self.a(x), self.b.weight.detach())
            return self.end(self.c(x))

    spare, weight, bias = sorted(stops(Alone()), key=lambda stop: stop.why, reverse=True)
    assert (spare.parameters, spare.why) == (("spare",), "the loss does not depend on 'spare'")
    assert weight.reason == "unused" or weight.parameters == ("b.weight",)
    by_name = {stop.parameters: stop for stop in (spare, weight, bias)}
    assert by_name[("b.weight",)].reason == "detached" and by_name[("b.bias",)].why == "'b' did not run"


def test_views_that_are_written_to_are_reached() -> None:
    # instance norm puts out a view, to which the ReLU then writes
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    assert stops(net) == []


def test_frozen_parameters_are_no_stop() -> None:
    net = Sound()
    net.a.requires_grad_(False)
    assert stops(net) == []


def test_calls_of_one_layer_are_told_apart() -> None:
    class Again(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(self.a(x)).detach()
            return self.end(self.c(self.b(x)))

    (stop,) = stops(Again())
    assert (stop.layer, stop.calls, stop.parameters) == ("b", ("a", "b"), BOTH[:2])
    assert "between 'b' and 'b#1'" in stop.why


def test_nothing_of_the_model_changes() -> None:
    for kind in (Detached, NoGrad):
        net, x = kind().train(), torch.rand(1, 3, 12, 12)
        state = ModelSnapshot(net)
        with torch.inference_mode():
            assert stops(net, x)
        assert state.changes() == []

    class Fails(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    net, x = Fails(), torch.rand(1, 3, 12, 12)
    state = ModelSnapshot(net)
    with pytest.raises(ValueError, match="no"):
        stops(net, x)
    assert state.changes() == []
    assert type(torch.ones(1) + 1) is torch.Tensor and not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("look", [gradient_stops, layer_gradients, first_anomaly])
def test_a_reentrant_checkpoint_is_refused_not_explained_away(look: Any) -> None:
    class Saving(Net):
        reentrant = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.b, self.a(x), use_reentrant=self.reentrant)
            return self.end(checkpoint(lambda y: self.c(y), x, use_reentrant=self.reentrant))

    net, x = Saving(), torch.rand(1, 3, 12, 12)
    state = ModelSnapshot(net)
    with pytest.raises(ModelError, match=r"'b' runs inside a reentrant checkpoint, .*; .* use_reentrant=False"):
        look(net, x, Loss("mse"))
    assert state.changes() == []
    net.reentrant = False
    look(net, x, Loss("mse"))
    assert stops(net) == []


def test_googlenets_idle_heads() -> None:
    from hookscope.models.load import load_model

    net = load_model("googlenet", "none", device="cpu")
    (stop,) = gradient_stops(net.model, torch.rand(1, 3, 32, 32))
    assert (stop.reason, stop.why) == ("unused", "8 layers from 'aux1.conv.conv' to 'aux2.fc2' did not run")
    assert len(stop.parameters) == 14
