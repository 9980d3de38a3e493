"""Randomised weights: the order of the layers, the rank correlation, and a model that stays as it was."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from hookscope import class_activation_maps, sanity_check
from hookscope.errors import ModelError
from hookscope.faithfulness.methods import random_weights, rank_correlation
from tests.helpers import same_values, seeded
from tests.nets import Function, named


@pytest.mark.parametrize("levels", [3, 1000])
def test_the_rank_correlation_is_scipys(levels: int) -> None:
    random = np.random.default_rng(levels)
    first, second = random.integers(0, levels, (2, 6, 7)).astype(np.float32)
    expected = spearmanr(first.ravel(), second.ravel()).statistic
    assert rank_correlation(first, second) == pytest.approx(expected, abs=1e-12)
    assert rank_correlation(first, np.ones_like(first)) == 0


def test_layers_become_random_from_the_last_to_run_and_come_back() -> None:
    net = named(last=nn.Conv2d(3, 4, 3), first=nn.Conv2d(3, 3, 3), norm=nn.BatchNorm2d(4), unused=nn.Linear(2, 2))
    model = seeded(
        lambda: Function(lambda own, x: own.part.norm(own.part.last(own.part.first(x))).mean((2, 3)), part=net)
    )
    state, changed = {name: tensor.clone() for name, tensor in model.state_dict().items()}, list[set[str]]()

    def explain() -> Tensor:
        changed.append({name for name, values in model.named_parameters() if not torch.equal(values, state[name])})
        with torch.no_grad():
            return model(torch.ones(1, 3, 9, 9))

    found = sanity_check(model, explain, steps=9)
    assert [(row.layer, row.layers) for row in found] == [("part.norm", 1), ("part.last", 2), ("part.first", 3)]
    assert changed[0] == set() and "part.last.weight" not in changed[1]
    assert {"part.last.weight", "part.first.weight"} <= changed[3] and "part.unused.weight" not in changed[3]
    assert same_values(model, state)


def test_the_weights_come_back_after_an_error() -> None:
    net = seeded(lambda: nn.Linear(5, 5))
    state, random = {name: tensor.clone() for name, tensor in net.state_dict().items()}, torch.get_rng_state()

    def fails() -> None:
        with random_weights(net):
            assert not torch.equal(net.weight, state["weight"])
            assert sorted(net.bias.tolist()) == sorted(state["bias"].tolist())
            raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        fails()
    assert same_values(net, state) and net.weight.grad is None and torch.equal(torch.get_rng_state(), random)


def test_random_weights_keep_the_size_of_the_values() -> None:
    net = seeded(lambda: nn.Linear(300, 300))
    size = float(net.weight.detach().square().mean().sqrt())
    with random_weights(net):
        assert float(net.weight.detach().square().mean().sqrt()) == pytest.approx(size, rel=0.02)


def test_a_map_of_the_input_alone_does_not_change() -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    x = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    [edges] = sanity_check(net, lambda: (net(x), x[0].diff(dim=-1).abs().sum(0))[1])
    [gradcam] = sanity_check(net, lambda: class_activation_maps(net, x, "0", 2))
    assert edges.correlation == 1 and abs(gradcam.correlation) < 0.9


def test_a_model_without_weights_is_refused() -> None:
    net = nn.ReLU()
    with pytest.raises(ModelError, match="ReLU has no weights to randomise"):
        sanity_check(net, lambda: net(torch.ones(2, 2)))
