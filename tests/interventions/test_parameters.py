"""Interventions on parameters: pruning as torch does it, and only training stays afterwards."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from hookscope.errors import LayerError, ModelError, UsageError
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.interventions import (
    Clamp,
    Dropout,
    Freeze,
    LinearSchedule,
    Noise,
    Patch,
    Prune,
    Quantize,
    Scale,
    Zero,
    intervene,
)
from tests.helpers import refused
from tests.nets import Function

X = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def a_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )


def bits(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone().view(torch.int32) for name, parameter in net.named_parameters()}


def same(values: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(values[name], other[name]) for name in values)


@pytest.mark.parametrize(
    ("change", "judge"),
    [
        (Scale(3.0), lambda w: w * 3),
        (Zero(channels="0,2"), lambda w: w.index_fill(0, torch.tensor([0, 2]), 0)),
        (Clamp(-0.05, 0.05), lambda w: w.clamp(-0.05, 0.05)),
        (Patch({"3.weight": torch.ones(4, 6, 3, 3)}, channels=1), lambda w: w.index_fill(0, torch.tensor([1]), 1)),
        (lambda call, w: w.flip(0), lambda w: w.flip(0)),
        (lambda call, w: w.mul_(2), lambda w: w * 2),
        (lambda call, w: None, lambda w: w),
    ],
)
def test_a_parameter_is_changed_in_the_block_and_put_back_in_its_memory(
    change: Any, judge: Callable[..., Tensor]
) -> None:
    net = a_net().eval()
    before, places, state = bits(net), [p.data_ptr() for p in net.parameters()], ModelSnapshot(net)
    twin = copy.deepcopy(net)
    twin[3].weight.data = judge(twin[3].weight.data)
    with torch.no_grad(), intervene(net, {"3.weight": change}) as block:
        assert torch.equal(net[3].weight, twin[3].weight) and torch.equal(net(X), twin(X))
        assert block.changed == {"3.weight": 1}
    assert state.changes() == [] and same(bits(net), before)
    assert [p.data_ptr() for p in net.parameters()] == places


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def test_a_glob_changes_every_parameter_it_names_a_dictionary_in_its_order() -> None:
    net = a_net()
    before = values(net)
    with intervene(net, {"*.bias": Zero(), "re:^[03].weight$": [Scale(2.0), lambda call, w: w + 1]}) as block:
        assert set(block.changed) == {"0.bias", "1.bias", "3.bias", "5.bias", "0.weight", "3.weight"}
        for name, parameter in net.named_parameters():
            judge = {"bias": before[name] * 0, "weight": before[name] * 2 + 1}[name[2:]]
            assert torch.equal(parameter, judge if name[0] in "03" or name.endswith("bias") else before[name])
    assert same(values(net), before)


def test_noise_and_quantization_of_a_parameter_and_a_change_of_its_layer_too() -> None:
    net = a_net()
    weight = net[0].weight.detach().clone()
    torch.manual_seed(3)
    judge = weight + torch.randn_like(weight) * 0.2
    torch.manual_seed(3)
    with intervene(net, {"0.weight": Noise(0.2)}):
        assert torch.equal(net[0].weight, judge)
    with intervene(net, {"0.weight": Quantize(4, per_channel=True), "0.bias": Quantize(2, per_channel=True)}):
        levels = [channel.unique().numel() for channel in net[0].weight.detach()]
        assert max(levels) <= 16 and net[0].weight.detach().unique().numel() > 16
    assert torch.equal(net[0].weight, weight)
    net = a_net().eval()
    judge = copy.deepcopy(net)
    judge[0].weight.data *= 2
    with torch.no_grad(), intervene(net, {"re:^0$": lambda call, x: x + 1, "0.weight": Scale(2.0)}) as block:
        found = net(X)
        assert torch.equal(found, judge[1:](judge[0](X) + 1)) and set(block.changed) == {"0", "0.weight"}


def test_a_filter_at_zero_is_the_channel_at_zero() -> None:
    net = a_net().eval()
    with torch.no_grad():
        with intervene(net, {"re:^3$": Zero(channels="1-2")}):
            on_output = net(X)
        with intervene(net, {"3.weight": Zero(channels="1-2"), "3.bias": Zero(channels="1-2")}):
            assert torch.equal(net(X), on_output)
        net[3].weight[1:3], net[3].bias[1:3] = 0, 0
        assert torch.equal(net(X), on_output)


SINGLE, SLICES = partial(prune.l1_unstructured, name="weight"), partial(prune.ln_structured, name="weight", amount=0.5)


@pytest.mark.parametrize(
    ("change", "judge"),
    [
        *((Prune(amount), partial(SINGLE, amount=float(amount))) for amount in (0, 0.1, 0.77, 1)),
        *(
            (Prune(0.5, *at), partial(SLICES, dim=at[0], n=at[1]))
            for at in ((0, 2), (0, 1), (1, 2), (-1, float("inf")))
        ),
    ],
)
def test_pruned_as_torch_prunes(change: Prune, judge: Callable[[nn.Module], Any]) -> None:
    net, twin = a_net(), a_net()
    for at in (0, 3, 5):
        judge(twin[at])
    with intervene(net, {"re:^[035]$": change}) as block:
        assert set(block.changed) == {"0.weight", "3.weight", "5.weight"} and torch.equal(net(X), twin(X))
        assert all(torch.equal(net[at].weight, twin[at].weight) for at in (0, 3, 5))


OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("build", OPTIMIZERS)
@pytest.mark.parametrize("begun", [0, 3])
def test_pruned_weights_stay_at_zero_in_training(build: Callable[..., torch.optim.Optimizer], begun: int) -> None:
    net = a_net()
    optimizer = build(net.parameters())
    train(net, optimizer, begun)  # so that there is momentum where weights are going to be pruned
    before = values(net)
    with intervene(net, {"0.weight": Prune(0.5), "3": Prune(0.5, dim=0)}):
        gone = {name: dict(net.named_parameters())[name] == 0 for name in ("0.weight", "3.weight")}
        assert {name: int(mask.sum()) * 2 for name, mask in gone.items()} == {n: before[n].numel() for n in gone}
        train(net, optimizer)
        for name, mask in gone.items():
            parameter = dict(net.named_parameters())[name]
            assert parameter.grad is not None and not bool(parameter[mask].any() or parameter.grad[mask].any())
        trained = values(net)
    for name, parameter in net.named_parameters():
        mask = gone.get(name, torch.zeros_like(parameter, dtype=torch.bool))
        assert torch.equal(parameter[mask], before[name][mask])
        assert torch.equal(parameter[~mask], trained[name][~mask]) and not torch.equal(trained[name], before[name])


def test_pruned_training_is_that_of_torchs_pruning() -> None:
    net, twin = a_net(), a_net()
    prune.l1_unstructured(twin[0], "weight", amount=0.5)
    train(twin, torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9))
    with intervene(net, {"0.weight": Prune(0.5)}):
        train(net, torch.optim.SGD(net.parameters(), 0.05, momentum=0.9))
        assert torch.equal(net(X), twin(X)) and torch.equal(net[0].weight, twin[0].weight)


def test_steps_of_training_on_a_changed_weight_are_added_to_the_old_one() -> None:
    net = nn.Linear(2, 1, bias=False)
    net.weight.data = torch.tensor([[1.0, 4.0]])
    with intervene(net, {"weight": Scale(2.0)}):
        assert net.weight.tolist() == [[2, 8]]
        net.weight.data += torch.tensor([[0.5, 0.0]])
    assert net.weight.tolist() == [[1.5, 4]]
    net = nn.Linear(4, 1, bias=False)
    net.weight.data = torch.tensor([[float("nan"), float("inf"), -0.0, 1.0]])
    before = bits(net)
    with intervene(net, {"weight": Zero()}):
        assert net.weight.tolist() == [[0, 0, 0, 0]]
    assert same(bits(net), before)
    with intervene(net, {"weight": Zero()}):
        net.weight.data[0, 3] = 5
    assert net.weight[0, 3] == 6 and torch.equal(net.weight.view(torch.int32)[0, :3], before["weight"][0, :3])


def test_frozen_layers_are_not_trained() -> None:
    net = a_net()
    net[3].bias.requires_grad_(False)
    before, state = bits(net), ModelSnapshot(net)
    with intervene(net, {"re:^[13]$": Freeze(), "0.bias": Freeze()}) as block:
        assert set(block.changed) == {"1.weight", "1.bias", "3.weight", "3.bias", "0.bias"}
        train(net, torch.optim.SGD(net.parameters(), 0.05))
    after = bits(net)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"0.weight", "5.weight", "5.bias"}
    assert not [change for change in state.changes() if "requires_grad" in change.what]


@pytest.mark.parametrize("where", ["a.weight", "b.weight", "c.weight", "*.weight"])
def test_a_parameter_with_several_names_is_changed_once(where: str) -> None:
    net = Function(lambda net, x: net.c(net.b(net.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    net.b.weight, net.c = net.a.weight, net.a
    before = net.a.weight.detach().clone()
    with intervene(net, {where: Scale(2.0)}) as block:
        assert torch.equal(net.b.weight, before * 2) and sum(block.changed.values()) == 1
    assert torch.equal(net.a.weight, before)
    with intervene(net, {"*": Prune(0.5)}) as block:
        assert sum(block.changed.values()) == 1


def test_nothing_is_taken_from_the_cache_of_autocast() -> None:
    net = a_net().eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = net(X)
        with intervene(net, {"5.weight": Zero(), "5.bias": Zero()}):
            assert not bool(net(X).any())
        assert torch.equal(net(X), before)


def test_a_graph_does_not_run_back_past_the_end_of_the_block() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1))
    picture = X.clone().requires_grad_()
    with intervene(net, {"0.weight": Scale(10.0)}):
        inside = net(picture).sum()
        net(picture).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()
    outside = net(picture).sum()
    with (
        intervene(net, {"0.weight": Scale(10.0)}),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        outside.backward()


def test_models_moved_inside_the_block_and_made_in_inference_mode_are_changed() -> None:
    net = a_net()
    before = net[0].weight.detach().clone()
    with intervene(net, {"0.weight": Scale(2.0)}):
        net.double()
        assert torch.equal(net[0].weight, before.double() * 2)
    assert torch.equal(net[0].weight, before.double())
    with torch.inference_mode():
        net = nn.Linear(2, 2)
        before = bits(net)
        with intervene(net, {"weight": Zero()}):
            assert torch.equal(net(torch.ones(1, 2))[0], net.bias)
        assert same(before, bits(net))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_puts_everything_back(kind: type[BaseException]) -> None:
    net = a_net()
    state = ModelSnapshot(net)

    def fails(call: Any, tensor: Tensor) -> None:
        raise kind

    for changes in (
        [("0.weight", Zero()), ("3.weight", fails)],
        [("0.weight", Prune()), ("1", Freeze()), ("re:^3$", fails)],
    ):
        with pytest.raises(kind), intervene(net, changes):
            net.eval()(X)
        net.train()
        assert state.changes() == []


@pytest.mark.parametrize(
    ("where", "change", "error", "says"),
    [
        ("0.wieght", Zero(), LayerError, "no layer or parameter '0.wieght'; nearest: 0.weight"),
        ("0.weight,3.wieght", Zero(), LayerError, "no layer or parameter '3.wieght' in the model; nearest: 3.weight"),
        ("3,9", Freeze(), LayerError, "no parameter to freeze at '3,9'"),
        ("-1", Prune(), LayerError, "no parameter to prune at '-1'"),
        ("re:^3$", Prune(dim=5), UsageError, "no slices along dim=5 of '3.weight'; it is 4x6x3x3"),
        ("3.bias", Prune(dim=0), UsageError, "no slices along dim=0 of '3.bias'; it is 4"),
        ("3.weight", Zero(channels=4), LayerError, "no channel 4 at '3.weight'; there are 4: 0 to 3"),
        ("3.weight", Zero(on="input"), UsageError, "parameter '3.weight' has no input; leave `on` out"),
        ("3.weight", lambda c, w: w[0], UsageError, "the intervention at '3.weight' returns shape 6x3x3; it got"),
        ("3.weight", Patch(torch.ones(2)), UsageError, "the patch for '3.weight' is 2; its activation is 4x6x3x3"),
        ("3.weight", Dropout(LinearSchedule(0, 1, 5)), UsageError, "Dropout has a schedule; call `.at(step)` first"),
    ],
)
def test_an_impossible_change_is_refused(where: str, change: Any, error: type[Exception], says: str) -> None:
    net = a_net()
    state = ModelSnapshot(net)
    with refused(error, says, part="begins"), intervene(net, {where: change}):
        pass
    assert state.changes() == []


def test_parameters_without_values_or_fractions() -> None:
    table = nn.Module()
    table.register_parameter("weight", nn.Parameter(torch.arange(3), requires_grad=False))
    for net, error, says in (
        (nn.LazyLinear(3), ModelError, "'weight' has no values yet; run the model once"),
        (nn.Linear(2, 2, device="meta"), ModelError, "'weight' has no values yet"),
        (table, UsageError, "'weight' is int64; choose a floating-point one"),
    ):
        with pytest.raises(error, match=says):
            intervene(net, {"weight": Zero()}).__enter__()
