"""What kinds of layers a model has."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from hookscope.hooks.layer_types import class_names, holder_of, is_leaf, is_single, layers_with_weights, types_in
from tests.nets import PaddedConv, named


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


def test_layers_with_weights_are_those_with_a_matrix_or_filters() -> None:
    assert layers_with_weights(small()).plain_names == ("0", "2")
    nn.utils.parametrizations.weight_norm((net := small())[2])
    assert layers_with_weights(net).plain_names == ("0", "2")
    assert layers_with_weights(nn.Sequential(nn.ReLU())).plain_names == ("0",)  # every leaf, then


def with_own_parameters() -> nn.Sequential:
    net = named(
        padded=PaddedConv(3, 4, 3),
        attention=nn.MultiheadAttention(4, 2),
        normed=nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        scaled=nn.Sequential(nn.ReLU()),
    )
    net.scaled.scale = nn.Parameter(torch.ones(4, 1, 1))
    net.token = nn.Parameter(torch.ones(1, 1, 4))
    return net


def test_a_layer_that_holds_parameters_is_a_layer_and_parametrizations_are_part_of_theirs() -> None:
    named_modules = with_own_parameters().named_modules()
    assert [name for name, module in named_modules if is_single(name, module)] == [
        "", "padded", "padded.pad", "attention", "attention.out_proj", "normed", "scaled", "scaled.0"
    ]  # fmt: skip


def test_layers_that_hold_a_matrix_have_weights_whatever_is_in_them() -> None:
    selection = layers_with_weights(with_own_parameters())
    assert selection.plain_names == ("attention", "attention.out_proj", "normed", "padded")


def test_parameters_belong_to_the_layer_that_is_parametrized() -> None:
    names = ["weight", "a.bias", "a.b.parametrizations.weight.original0", "parametrizations.weight.0.base"]
    assert [holder_of(name) for name in names] == ["", "a", "a.b", ""]


@pytest.mark.filterwarnings("ignore")  # torch announces that quantized tensors will be removed
def test_a_quantized_linear_is_one_layer_with_its_packed_weights() -> None:
    net = nn.Sequential(torch.ao.nn.quantized.Linear(3, 2))
    assert [name for name, module in net.named_modules() if is_single(name, module)] == ["0"]
