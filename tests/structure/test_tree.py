"""The modules of a network as a tree: what stands in which row, and what each costs."""

from typing import Any

import pytest
import torch
import torchinfo
import torchvision
from torch import nn

from hookscope.structure import Structure, layer_tree
from hookscope.tracing import trace_at
from tests.nets import Function, Twice, WithIdle, named


def block(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, width, 1, bias=False), nn.ReLU())


def rows(model: nn.Module, *fields: str, **options: Any) -> list[tuple[Any, ...]]:
    return [tuple(getattr(row, field) for field in fields) for row in layer_tree(model, (1, 4, 2, 2), **options)]


def test_equal_neighbours_share_a_row_with_the_numbers_of_all() -> None:
    net = nn.Sequential(block(), block(), block(8))
    assert rows(net, "depth", "name", "last", "repeats", "params", "macs", "values") == [
        (0, "", "", 1, 64, 256, 2 * 32 + 64),
        (1, "0", "1", 2, 32, 128, 2 * 32),
        (2, "0.0", "1.0", 2, 32, 128, 2 * 16),
        (2, "0.1", "1.1", 2, 0, 0, 2 * 16),
        (1, "2", "2", 1, 32, 128, 64),
        (2, "2.0", "2.0", 1, 32, 128, 32),
        (2, "2.1", "2.1", 1, 0, 0, 32),
    ]


@pytest.mark.parametrize(
    "second",
    [
        nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Sigmoid()),  # another class inside
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()),  # other parameters
        nn.Sequential(nn.Conv2d(4, 4, 1, padding=1, bias=False), nn.ReLU()),  # another shape
        nn.Sequential(nn.Conv2d(4, 4, 1, groups=2, bias=False), nn.ReLU()),  # other arithmetic
    ],
)
def test_neighbours_that_differ_have_rows_of_their_own(second: nn.Module) -> None:
    assert rows(nn.Sequential(block(), second), "name", "repeats", depth=1)[1:] == [("0", 1), ("1", 1)]


def test_equal_layers_that_are_no_neighbours_have_rows_of_their_own() -> None:
    assert rows(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.ReLU()), "name")[1:] == [("0",), ("1",), ("2",)]


def test_the_calls_of_one_layer_share_a_row_and_only_what_was_not_used_was_not_called() -> None:
    twice = [(row.name, row.calls, row.params, row.macs) for row in layer_tree(Twice(), (1, 1, 2, 2))]
    assert twice == [("", 1, 2, 16), ("layer", 2, 2, 16)]
    assert Structure(trace_at(WithIdle(), (1, 3, 2, 2))).not_called() == {"idle": 5}


def test_operations_are_rows_where_they_are_asked_for() -> None:
    net = Function(lambda net, x: net.conv(x).relu() + 1, conv=nn.Conv2d(4, 4, 1))
    assert rows(net, "name") == [("",), ("conv",)]
    assert rows(net, "name", "type", ops=True)[1:] == [("conv", "Conv2d"), ("::relu", "relu"), ("::add", "add")]


@pytest.mark.parametrize(("depth", "deepest"), [(1, 1), (2, 2), (9, 3), (None, 3)])
def test_the_tree_ends_at_the_depth(depth: int | None, deepest: int) -> None:
    net = named(a=named(b=block()), c=nn.ReLU())
    assert max(row.depth for row in layer_tree(net, (1, 4, 2, 2), depth)) == deepest


def test_without_a_depth_a_long_tree_is_cut_where_forty_rows_end() -> None:
    net = named(a=nn.Sequential(*(nn.Conv2d(4, 4, 1, padding=at) for at in range(39))), b=nn.ReLU())
    assert {row.depth for row in layer_tree(net, (1, 4, 2, 2))} == {0, 1}


def test_numbers_of_resnet18_are_those_of_torchinfo_and_of_plain_hooks() -> None:
    model, picture = torchvision.models.resnet18().eval(), torch.zeros(1, 3, 64, 64)
    values: dict[str, int] = {}
    for name, module in model.named_modules():
        if not list(module.children()):
            add = lambda *call, name=name: values.update({name: values.get(name, 0) + call[2].numel()})  # noqa: E731
            module.register_forward_hook(add)
    infos = torchinfo.summary(model, input_data=picture, depth=9, verbose=0).summary_list
    params = {info.var_name: info.num_params for info in infos if info.depth == 1}
    top = [row for row in layer_tree(model, (64, 64), 1) if row.depth == 1]
    assert {row.name: row.params for row in top} == params
    whole = layer_tree(model, (64, 64))[0]
    assert whole.params == sum(parameter.numel() for parameter in model.parameters())
    expected = {row.name: sum(n for name, n in values.items() if f"{name}.".startswith(f"{row.name}.")) for row in top}
    assert {row.name: row.values for row in top} == expected
    assert whole.values == sum(expected.values())
