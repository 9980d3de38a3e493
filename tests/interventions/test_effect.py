"""A pass without and with interventions: which layers moved, how far; and a model left as it was."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookscope.errors import LayerError
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.interventions import Dropout, Noise, Scale, Zero
from hookscope.interventions.effect import intervention_effect
from tests.nets import Function


def trunk_and_branch(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.relu(net.first(x))
    after = net.second(x)
    net.side = net.aside(x)
    return net.fc(after.mean((2, 3)))


@pytest.fixture
def net() -> nn.Module:
    """A trunk with an in-place layer, and a branch that the trunk's second half does not touch."""
    layers = {"first": nn.Conv2d(1, 2, 1), "relu": nn.ReLU(inplace=True), "second": nn.Conv2d(2, 2, 1)}
    net = Function(trunk_and_branch, **layers, aside=nn.Conv2d(2, 1, 1), fc=nn.Linear(2, 3)).eval()
    with torch.no_grad():
        net.first.weight.copy_(torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1))
        net.first.bias.copy_(torch.tensor([0.0, 0.5]))  # so that the in-place layer takes some values and leaves some
    return net


@pytest.fixture
def picture() -> torch.Tensor:
    return torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def by_hand(net: nn.Module, x: torch.Tensor, factor: float) -> dict[str, np.ndarray]:
    """What every layer gives with the first one scaled, written down without a hook."""
    with torch.no_grad():
        first = net.first(x) * factor
        relu = first.clamp(min=0)
        second = net.second(relu)
        found = {"first": first, "second": second, "aside": net.aside(relu), "fc": net.fc(second.mean((2, 3)))}
    return {name: value.double().numpy().ravel() for name, value in found.items()}


def test_an_index_from_the_end_changes_compares_and_keeps_the_same_calls() -> None:
    net = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(4)))
    found = intervention_effect(net, (torch.ones(1, 1, 2, 2),), {"0": Scale(2.0)}, layers="-3:", keep="-2")
    assert [layer.call.name for layer in found.layers] == ["1", "2", "3"] and found.missing == ()
    assert [layer.call.name for layer in found.layers if layer.after is not None] == ["2"]
    assert intervention_effect(net, (torch.ones(1, 1, 2, 2),), {-1: Zero()}).changed == {"3": 1}
    assert intervention_effect(net, (torch.ones(1, 1, 2, 2),), {"-2:": Zero()}).changed == {"2": 1, "3": 1}


def test_distances_are_those_of_a_forward_pass_written_by_hand(net: nn.Module, picture: torch.Tensor) -> None:
    before, after = by_hand(net, picture, 1), by_hand(net, picture, 3)
    found = intervention_effect(net, (picture,), {"first": Scale(3.0)})
    assert [layer.call.key for layer in found.layers] == ["first", "second", "aside", "fc"]
    assert [layer.changed for layer in found.layers] == [True, False, False, False]
    for layer in found.layers:
        one, other = before[layer.call.name], after[layer.call.name]
        assert layer.relative_l2 == pytest.approx(np.linalg.norm(other - one) / np.linalg.norm(one), rel=1e-6)
        assert layer.cosine == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other), rel=1e-6)
    np.testing.assert_allclose(found.before.double().numpy().ravel(), before["fc"], rtol=1e-6)
    np.testing.assert_allclose(found.after.double().numpy().ravel(), after["fc"], rtol=1e-6)


def test_only_later_calls_are_compared_and_neutral_interventions_move_nothing(
    net: nn.Module, picture: torch.Tensor
) -> None:
    found = intervention_effect(net, (picture,), {"second": Zero(channels=1)})
    assert [layer.call.key for layer in found.layers] == ["second", "aside", "fc"]
    assert (found.layers[1].relative_l2, found.layers[1].cosine) == (0.0, 1.0)
    assert found.changed == {"second": 1}
    found = intervention_effect(net, (picture,), {"first": Scale(1.0), "second": Noise(0.0), "fc": Dropout(0.5)})
    assert (found.layers, found.changed) == ((), {}) and torch.equal(found.before, found.after)


def test_a_parameter_counts_from_its_layer_on(net: nn.Module, picture: torch.Tensor) -> None:
    found = intervention_effect(net, (picture,), {"second.weight": Scale(2.0)})
    changed = [(layer.call.key, layer.changed) for layer in found.layers]
    assert changed == [("second", True), ("aside", False), ("fc", False)]
    assert found.layers[0].relative_l2 > 0 and found.changed == {"second.weight": 1}
    # of a layer that is not among the chosen ones, from where it shows
    found = intervention_effect(net, (picture,), {"first.bias": Scale(2.0)}, layers=["second", "fc"])
    assert [(layer.call.key, layer.changed) for layer in found.layers] == [("second", False), ("fc", False)]


def test_both_passes_draw_the_same_numbers(net: nn.Module, picture: torch.Tensor) -> None:
    noisy = Function(lambda noisy, x: noisy.net(x) + torch.rand(3), net=net)
    found = intervention_effect(noisy, (picture,), {"net.fc": Zero()}, seed=5)
    torch.manual_seed(5)
    assert torch.allclose(found.after, torch.rand(3)) and not torch.allclose(found.before, found.after)
    again = intervention_effect(noisy, (picture,), {"net.fc": Zero()}, seed=5)
    assert torch.equal(again.before, found.before)


def test_outputs_that_were_0_become_0_or_nan(net: nn.Module, picture: torch.Tensor) -> None:
    with torch.no_grad():
        net.second.weight.zero_(), net.second.bias.zero_()
    dead = intervention_effect(net, (picture,), {"second": lambda call, tensor: tensor + 1}).layers[0]
    assert (dead.relative_l2, dead.cosine) == (math.inf, None)
    gone = intervention_effect(net, (picture,), {"first": Zero()}).layers[0]
    assert (gone.relative_l2, gone.cosine) == (1.0, None)
    found = intervention_effect(net, (picture,), {"first": lambda call, tensor: tensor / 0 * 0})
    assert [layer.nonfinite for layer in found.layers] == [32, 32, 16, 3]
    assert all(math.isnan(layer.relative_l2 or 0) and layer.cosine is None for layer in found.layers)


def test_kept_activations_are_those_of_both_passes(net: nn.Module, picture: torch.Tensor) -> None:
    found = intervention_effect(net, (picture,), {"first": Scale(-1.0)}, layers="second", keep="first")
    kept = {layer.call.key: (layer.before, layer.after) for layer in found.layers}
    assert list(kept) == ["first", "second"] and kept["second"] == (None, None)
    with torch.no_grad():
        expected = net.first(picture)
    assert torch.equal(kept["first"][0], expected) and torch.equal(kept["first"][1], -expected)


def test_the_model_stays_as_it_was_after_any_exception(net: nn.Module, picture: torch.Tensor) -> None:
    net.train()
    net.fc.eval()
    state = ModelSnapshot(net)
    intervention_effect(net, (picture,), {"first": Zero(), "second.weight": Noise(1.0)})
    with pytest.raises(LayerError, match="no channel 7 at 'first'; there are 2: 0 to 1"):
        intervention_effect(net, (picture,), {"second.weight": Noise(1.0), "first": Zero(channels=7)})
    with pytest.raises(ZeroDivisionError):
        intervention_effect(net, (picture,), {"first": lambda call, tensor: 1 / 0})
    assert state.changes() == []
    assert "side" in vars(net)


def test_a_first_layer_in_place_does_not_spoil_the_second_pass() -> None:
    net, picture = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(1, 1, 1)), torch.full((1, 1, 2, 2), -1.0)
    found = intervention_effect(net, (picture,), {"re:^0$": lambda call, tensor: tensor + 0})
    assert torch.equal(found.before, found.after) and float(picture.min()) == -1


def test_calls_of_one_pass_alone_are_named() -> None:
    def choose(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.first(x)
        return net.large(x) if float(x.abs().max()) > 1e5 else net.small(x)

    net = Function(choose, **{name: nn.Conv2d(1, 1, 1) for name in ("first", "small", "large")})
    found = intervention_effect(net, (torch.ones(1, 1, 2, 2),), {"first": lambda call, tensor: tensor * 0 + 1e6})
    assert [layer.call.key for layer in found.layers] == ["first"]
    assert found.missing == ("small", "large")


def test_an_index_of_an_input_may_be_that_of_a_block_whose_layers_are_counted_before_it() -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU()), nn.Conv2d(2, 2, 1))
    found = intervention_effect(net, (torch.ones(1, 3, 2, 2),), {2: Scale(2.0, on="input")}, types=("*",))
    assert found.changed == {"0": 1} and [layer.call.name for layer in found.layers if layer.changed] == ["0"]
