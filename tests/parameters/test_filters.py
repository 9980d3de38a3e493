"""The filters of convolutions: their axes, dead filters, duplicates; NumPy is the judge."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

from hookscope.parameters import filters as module, parameter_statistics
from hookscope.parameters.filters import (
    dead_filters,
    duplicate_filters,
    filter_norms,
    filters_of,
    is_convolution,
)


def duplicates(layer: nn.Module, cosine: float = 0.9999) -> tuple[tuple[int, ...], ...] | None:
    filters = filters_of(layer, layer.weight)
    norms, whole = filter_norms(filters)
    return duplicate_filters(filters, norms, whole & (norms > 0), cosine)


def random(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0)))
    return layer.requires_grad_(False)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose1d])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_filter_computes_its_output_channel(kind: type[nn.Module], groups: int) -> None:
    layer = random(kind(4, 8, 3, groups=groups, bias=False))
    assert is_convolution(layer)
    filters = filters_of(layer, layer.weight)
    assert filters.shape[:3] == (groups, 8 // groups, 4 // groups)
    norms, _ = filter_norms(filters)
    axes = layer.weight.dim() - 2
    images = torch.zeros(4, 4, *[5] * axes)
    for at in range(4):
        images[(at, at, *[2] * axes)] = 1  # a single 1 spreads the kernel of its input over the output channel
    squares = layer(images).square().transpose(0, 1).flatten(1).sum(1)
    np.testing.assert_allclose(norms, squares.sqrt(), rtol=1e-6)
    np.testing.assert_allclose(norms, np.linalg.norm(filters.flatten(2).flatten(0, 1).numpy(), axis=1), rtol=1e-6)


def test_dead_filters_have_a_small_share_of_the_median_norm() -> None:
    norms = torch.tensor([1.0, 0.0, 2.0, 1e-7, 3.0, 2.0], dtype=torch.float64)
    whole = torch.ones(6, dtype=torch.bool)
    assert dead_filters(norms, whole, 1e-6) == (1, 3)
    assert dead_filters(norms, whole, 0.0) == (1,)
    assert dead_filters(norms, whole & (norms > 0), 0.9) == (0, 3)
    assert dead_filters(torch.zeros(3), torch.ones(3, dtype=torch.bool), 1e-6) == (0, 1, 2)


def test_norms_neither_overflow_nor_vanish() -> None:
    weight = torch.tensor([[3e200, 4e200], [3e-200, 4e-200], [float("nan"), 2.0]], dtype=torch.float64)
    norms, whole = filter_norms(weight[None, :, :, None])
    assert norms.tolist() == pytest.approx([5e200, 5e-200, 2.0])
    assert whole.tolist() == [True, True, False]


def groups_of_whole_product(filters: np.ndarray, cosine: float) -> list[int]:
    """The first row of the group of each row, by the powers of the whole matrix."""
    rows = filters.reshape(len(filters), -1).astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    connected = np.linalg.matrix_power((rows @ rows.T >= cosine).astype(float), len(rows)) > 0
    return connected.argmax(1).tolist()


@pytest.mark.parametrize("cosine", [0.9999, 0.5, 0.4, 0.3, 0.2])
@pytest.mark.parametrize("block", [5, 512])
def test_groups_equal_those_of_the_whole_product(monkeypatch: pytest.MonkeyPatch, cosine: float, block: int) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    monkeypatch.setattr(module, "_COLUMNS", 4)
    layer = random(nn.Conv2d(3, 40, 3))
    layer.weight[[7, 20, 39]] = 3 * layer.weight[5]
    layer.weight[11] = -layer.weight[5]
    rows = layer.weight.flatten(1).double()
    labels = module._duplicate_labels(rows, rows.norm(dim=1), cosine).tolist()
    assert labels == groups_of_whole_product(layer.weight.numpy(), cosine)


def test_duplicates_are_joined_to_groups() -> None:
    layer = random(nn.Conv2d(4, 16, 3))
    assert duplicates(layer) == ()
    layer.weight[[3, 9]] = 0.5 * layer.weight[1]
    layer.weight[12] = layer.weight[4]
    layer.weight[13] = -layer.weight[5]
    layer.weight[[6, 7]] = 0
    assert duplicates(layer) == duplicates(layer, 1.0) == ((1, 3, 9), (4, 12))


def test_filters_on_different_inputs_are_not_duplicates() -> None:
    depthwise = random(nn.Conv2d(8, 8, 3, groups=8))
    depthwise.weight[3] = depthwise.weight[1]
    assert duplicates(depthwise) == ()
    grouped = random(nn.Conv2d(8, 8, 3, groups=2))
    grouped.weight[5] = grouped.weight[1]
    assert duplicates(grouped) == ()
    grouped.weight[6] = grouped.weight[5]
    assert duplicates(grouped) == ((5, 6),)


def test_transposed_filters_lie_on_the_other_axis() -> None:
    layer = random(nn.ConvTranspose2d(8, 8, 3, groups=2))
    layer.weight[4:, 3] = 2 * layer.weight[4:, 1]
    assert duplicates(layer) == ((5, 7),)


def test_filters_of_few_weights_must_be_equal() -> None:
    layer = random(nn.Conv2d(1, 6, 1))
    assert duplicates(layer) == ()
    layer.weight[4] = layer.weight[2]
    layer.weight[5] = 2 * layer.weight[2]
    assert duplicates(layer) == ((2, 4),)
    assert duplicates(random(nn.Conv2d(2, 512, 1))) == ()


def test_equal_filters_are_one_group() -> None:
    layer = nn.Conv2d(3, 300, 3).requires_grad_(False)
    layer.weight.fill_(0.5)
    assert duplicates(layer) == (tuple(range(300)),)


def test_equal_filters_take_no_memory_for_each_pair() -> None:
    """A list of all pairs had 4 GB at 6,000 filters."""
    layer = nn.Conv2d(3, 3000, 3)
    nn.init.constant_(layer.weight, 0.5)
    tracemalloc.start()
    assert duplicates(layer) == (tuple(range(3000)),)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_a_very_wide_layer_has_no_duplicates_to_report() -> None:
    [row, _] = parameter_statistics(nn.Conv2d(1, module.MOST_FOR_DUPLICATES + 1, 1))
    assert row.duplicate_filters is None and row.filters == module.MOST_FOR_DUPLICATES + 1
    depthwise = nn.Conv2d(module.MOST_FOR_DUPLICATES + 1, module.MOST_FOR_DUPLICATES + 1, 1, groups=16_385)
    assert parameter_statistics(depthwise)[0].duplicate_filters == ()
