"""Statistics of parameters against NumPy, their selection, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from hookscope.errors import LayerError, ModelError, UsageError
from hookscope.models import load_model
from hookscope.parameters import ParameterStatistics, ParameterThresholds, parameter_statistics


def net() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(6, 6, 3, groups=2), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(nn.Conv2d(3, 6, 3), body, nn.Flatten(), nn.Linear(6, 2)).requires_grad_(False)


def by_name(model: nn.Module, **more: Any) -> dict[str, ParameterStatistics]:
    return {row.name: row for row in parameter_statistics(model, **more)}


def test_every_parameter_and_running_statistic_in_order() -> None:
    model = net()
    rows = parameter_statistics(model)
    assert [row.name for row in rows if not row.buffer] == [name for name, _ in model.named_parameters()]
    assert [row.name for row in rows if row.buffer] == ["1.1.running_mean", "1.1.running_var"]
    assert [row.layer for row in rows] == ["0", "0", "1.0", "1.0", "1.1", "1.1", "1.1", "1.1", "3", "3"]
    for row in rows:
        raw = model.state_dict()[row.name].numpy().astype(np.float64)
        assert (row.shape, row.count) == (raw.shape, raw.size)
        assert (row.min, row.max) == (raw.min(), raw.max())
        assert row.mean == pytest.approx(raw.mean(), rel=1e-9, abs=1e-12)
        assert row.std == pytest.approx(raw.std(), rel=1e-9)
        assert row.norm == pytest.approx(np.linalg.norm(raw), rel=1e-12)
        assert row.zeros == (raw == 0).mean()
        assert (row.nan, row.inf, row.first_nonfinite) == (0, 0, None)


def test_only_weights_of_convolutions_have_filters() -> None:
    model = net()
    rows = by_name(model)
    assert [name for name, row in rows.items() if row.filters is not None] == ["0.weight", "1.0.weight"]
    norms = np.linalg.norm(model[0].weight.detach().numpy().astype(np.float64).reshape(6, -1), axis=1)
    row = rows["0.weight"]
    assert (row.filters, row.dead_filters, row.duplicate_filters) == (6, (), ())
    measured = (row.filter_norm_min, row.filter_norm_mean, row.filter_norm_max)
    assert measured == pytest.approx((norms.min(), norms.mean(), norms.max()), rel=1e-12)


def old_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


COMPUTED = {
    "parametrized weight norm": nn.utils.parametrizations.weight_norm,
    "parametrized spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "weight norm": old_norm,
    "spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: nn.utils.prune.random_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_weights_that_are_computed_have_a_row_before_the_parameters(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(COMPUTED[how](nn.Conv2d(3, 6, 3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # what the older functions computed last is not what the next pass uses
    before = copy.deepcopy(model.state_dict())
    row, *others = parameter_statistics(model.train())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == [True] * len(list(model.modules()))
    assert (row.name, row.layer, row.filters, row.buffer) == ("0.weight", "0", 6, True)
    assert {row.name for row in others} == {name for name, _ in model.named_parameters()}
    assert sum(row.count for row in others if not row.buffer) == sum(p.numel() for p in model.parameters())
    model.eval()(torch.zeros(1, 3, 5, 5))
    used = model[0].weight.detach().numpy().astype(np.float64)
    assert row.norm == pytest.approx(np.linalg.norm(used), rel=1e-9)
    assert row.zeros == (used == 0).mean() == (0.5 if how == "pruned" else 0)


def test_planted_faults_are_found_and_nothing_else() -> None:
    model = net()
    model[0].weight[2] = 0
    model[0].weight[5] = 2 * model[0].weight[1]
    model[0].weight[3, 0, 1, 2] = torch.nan
    model[1][1].running_var[4] = 1e-9
    model[3].bias[1] = -torch.inf
    rows = by_name(model)
    weight = rows["0.weight"]
    assert (weight.dead_filters, weight.duplicate_filters) == ((2,), ((1, 5),))
    assert (weight.nan, weight.inf, weight.first_nonfinite) == (1, 0, (3, 0, 1, 2))
    assert (rows["3.bias"].inf, rows["3.bias"].first_nonfinite) == (1, (1,))
    assert (rows["1.1.running_var"].collapsed, rows["1.1.running_var"].updated) == ((4,), True)
    untouched = by_name(net())
    for name in ("0.bias", "1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias", "3.weight"):
        assert rows[name] == untouched[name]


def test_running_statistics_know_whether_they_were_updated() -> None:
    norm = nn.BatchNorm2d(3)
    for updated in (False, True):
        assert [row.updated for row in by_name(norm).values()] == [None, None, updated, updated]
        norm(torch.rand(2, 3, 4, 4))


def test_a_collapsed_variance_is_a_share_of_eps() -> None:
    norm = nn.BatchNorm2d(4, eps=1e-3)
    norm.running_var.copy_(torch.tensor([1e-3, 1.01e-5, 0.99e-5, 0.0]))
    assert by_name(norm)["running_var"].collapsed == (2, 3)
    assert by_name(norm, thresholds=ParameterThresholds(collapsed=0))["running_var"].collapsed == ()


def test_frozen_batch_norms_hold_their_weights_in_buffers() -> None:
    rows = by_name(FrozenBatchNorm2d(3))
    assert list(rows) == ["weight", "bias", "running_mean", "running_var"]
    assert all(row.buffer for row in rows.values())


def test_shared_parameters_are_named_once() -> None:
    model = net()
    model.append(nn.Linear(6, 2))
    model[4].weight = model[3].weight
    model.append(model[0])
    assert [name for name in by_name(model) if name[0] in "45"] == ["4.bias"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_other_types(dtype: torch.dtype) -> None:
    layer = nn.Conv2d(1, 2, 2, bias=False, dtype=dtype).requires_grad_(False)
    layer.weight.fill_(0.5)
    row = by_name(layer)["weight"]
    assert (row.mean, row.std, row.norm, row.filter_norm_max) == (0.5, 0, pytest.approx(2**0.5), 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_quantised_layers() -> None:
    layer = torch.ao.nn.quantized.Conv2d(1, 2, 2)
    weight = torch.tensor([1.0, 0, 0, 0, 2.0, 0, 0, 0]).reshape(2, 1, 2, 2)
    layer.set_weight_bias(torch.quantize_per_tensor(weight, 0.5, 0, torch.qint8), torch.zeros(2))
    rows = by_name(nn.Sequential(layer))
    assert list(rows) == ["0.weight", "0.bias"]
    assert (rows["0.weight"].max, rows["0.weight"].zeros, rows["0.weight"].filter_norm_min) == (2, 0.75, 1)


def test_parameters_without_values_are_refused() -> None:
    with pytest.raises(ModelError, match=r"0\.weight has no values; its shape is set by the first forward pass"):
        parameter_statistics(nn.Sequential(nn.LazyConv2d(3, 3)))
    with pytest.raises(ModelError, match="meta device"):
        parameter_statistics(nn.Linear(2, 2, device="meta"))


def test_the_model_is_unchanged() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    threads = torch.get_num_threads()
    parameter_statistics(model)
    assert torch.get_num_threads() == threads
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, {"0", "1.0", "1.1", "3"}),
        ("all", {"0", "1.0", "1.1", "3"}),
        ("re:^0$", {"0"}),
        ("re:^1$", {"1.0", "1.1"}),
        ("1.*", {"1.0", "1.1"}),
        ("1.1,re:^3", {"1.1", "3"}),
        (["re:^0", "1.0"], {"0", "1.0"}),
    ],
)
def test_layers_are_chosen_by_name(layers: Any, expected: set[str]) -> None:
    assert {row.layer for row in parameter_statistics(net(), layers=layers)} == expected


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        ("0:2", UsageError, "weights are selected by name"),
        ("1.0#1", UsageError, "a weight has no calls"),
        ("conv", LayerError, "no layer 'conv' in Sequential"),
        ("1.2", LayerError, "the chosen layers have no parameters"),
    ],
)
def test_selections_of_nothing_are_refused(layers: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        parameter_statistics(net(), layers=layers)


def test_a_layer_of_two_names_is_found_by_either() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = model["a"]
    assert [row.name for row in parameter_statistics(model, layers="b")] == ["a.weight", "a.bias"]


@pytest.mark.parametrize("wrong", [{"dead_norm": -1}, {"dead_norm": float("nan")}, {"duplicate_cosine": 0}])
def test_bad_thresholds(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ParameterThresholds(**wrong)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mnasnet0_5"])
def test_random_models_have_neither_dead_nor_duplicate_filters(name: str) -> None:
    rows = parameter_statistics(load_model(name, weights="none", device="cpu").model)
    assert not [row.name for row in rows if row.dead_filters or row.duplicate_filters or row.collapsed]
    assert any(row.filters for row in rows)
