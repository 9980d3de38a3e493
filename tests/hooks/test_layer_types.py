"""What kinds of layers a model has."""

from __future__ import annotations

from collections import Counter

from torch import nn

from hookscope.hooks.layer_types import class_names, is_leaf, layers_with_weights, types_in
from hookscope.hooks.selection import describe_types


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(1)), nn.Linear(2, 2))


def test_facts_about_modules() -> None:
    net = small()
    assert class_names(net[0]) == ["Conv2d", "_ConvNd"] and class_names(nn.Module()) == []
    assert is_leaf(net[0]) and not is_leaf(net) and is_leaf(nn.Sequential())
    childless = nn.Module()
    childless.register_module("absent", None)
    assert is_leaf(childless)
    assert types_in(net) == Counter({"Sequential": 2, "Conv2d": 1, "ReLU": 1, "BatchNorm2d": 1, "Linear": 1})


def test_types_are_listed_most_frequent_first_up_to_a_limit() -> None:
    assert describe_types(Counter({"ReLU": 1, "Conv2d": 3})) == "Conv2d (3), ReLU (1)"
    assert describe_types(Counter("abc"), most=2) == "a (1), b (1), ..."


def test_layers_with_weights_are_those_with_a_matrix_or_filters() -> None:
    assert layers_with_weights(small()).plain_names == ("0", "2")
    nn.utils.parametrizations.weight_norm((net := small())[2])
    assert layers_with_weights(net).plain_names == ("0", "2")
    assert layers_with_weights(nn.Sequential(nn.ReLU())).plain_names == ("0",)  # every leaf, then
