"""Statistics of parameters and the findings on them, against NumPy; their selection, and refusals."""

import copy
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from hookscope.errors import LayerError, ModelError, UsageError
from hookscope.findings import Finding
from hookscope.models import load_model
from hookscope.parameters import (
    ParameterStatistics,
    ParameterThresholds,
    finding_names,
    parameter_findings,
    parameter_statistics,
    statistics as module,
)
from hookscope.parameters.statistics import dead_filters, duplicate_filters, filter_norms, filters_of, is_convolution


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


def test_duplicates_are_joined_to_groups_and_filters_of_few_weights_must_be_equal() -> None:
    layer = random(nn.Conv2d(4, 16, 3))
    assert duplicates(layer) == ()
    layer.weight[[3, 9]] = 0.5 * layer.weight[1]
    layer.weight[12] = layer.weight[4]
    layer.weight[13] = -layer.weight[5]
    layer.weight[[6, 7]] = 0
    assert duplicates(layer) == duplicates(layer, 1.0) == ((1, 3, 9), (4, 12))
    layer = nn.Conv2d(3, 300, 3).requires_grad_(False)
    layer.weight.fill_(0.5)
    assert duplicates(layer) == (tuple(range(300)),)
    layer = random(nn.Conv2d(1, 6, 1))
    assert duplicates(layer) == ()
    layer.weight[4] = layer.weight[2]
    layer.weight[5] = 2 * layer.weight[2]
    assert duplicates(layer) == ((2, 4),)
    assert duplicates(random(nn.Conv2d(2, 512, 1))) == ()


def test_filters_on_different_inputs_are_not_duplicates_and_transposed_ones_lie_on_the_other_axis() -> None:
    depthwise = random(nn.Conv2d(8, 8, 3, groups=8))
    depthwise.weight[3] = depthwise.weight[1]
    assert duplicates(depthwise) == ()
    grouped = random(nn.Conv2d(8, 8, 3, groups=2))
    grouped.weight[5] = grouped.weight[1]
    assert duplicates(grouped) == ()
    grouped.weight[6] = grouped.weight[5]
    assert duplicates(grouped) == ((5, 6),)
    layer = random(nn.ConvTranspose2d(8, 8, 3, groups=2))
    layer.weight[4:, 3] = 2 * layer.weight[4:, 1]
    assert duplicates(layer) == ((5, 7),)


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


def test_running_statistics_know_whether_they_were_updated_collapsed_or_frozen() -> None:
    norm = nn.BatchNorm2d(3)
    for updated in (False, True):
        assert [row.updated for row in by_name(norm).values()] == [None, None, updated, updated]
        norm(torch.rand(2, 3, 4, 4))
    norm = nn.BatchNorm2d(4, eps=1e-3)
    norm.running_var.copy_(torch.tensor([1e-3, 1.01e-5, 0.99e-5, 0.0]))
    assert by_name(norm)["running_var"].collapsed == (2, 3)
    assert by_name(norm, thresholds=ParameterThresholds(collapsed=0))["running_var"].collapsed == ()
    rows = by_name(FrozenBatchNorm2d(3))
    assert list(rows) == ["weight", "bias", "running_mean", "running_var"]
    assert all(row.buffer for row in rows.values())


def test_shared_parameters_are_named_once_and_found_by_either_name() -> None:
    model = net()
    model.append(nn.Linear(6, 2))
    model[4].weight = model[3].weight
    model.append(model[0])
    assert [name for name in by_name(model) if name[0] in "45"] == ["4.bias"]
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model["b"] = model["a"]
    assert [row.name for row in parameter_statistics(model, layers="b")] == ["a.weight", "a.bias"]


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


@pytest.mark.parametrize("wrong", [{"dead_norm": -1}, {"dead_norm": float("nan")}, {"duplicate_cosine": 0}])
def test_bad_thresholds(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        ParameterThresholds(**wrong)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mnasnet0_5"])
def test_random_models_have_neither_dead_nor_duplicate_filters(name: str) -> None:
    rows = parameter_statistics(load_model(name, weights="none", device="cpu").model)
    assert not [row.name for row in rows if row.dead_filters or row.duplicate_filters or row.collapsed]
    assert any(row.filters for row in rows)


def updated(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    norm.running_mean.fill_(0.5)
    return norm


def findings(model: nn.Module) -> list[Finding]:
    return parameter_findings(parameter_statistics(model))


def test_each_fault_has_its_finding() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), updated(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    model.requires_grad_(False)
    model[0].weight[2] = 0
    model[0].weight[7] = model[0].weight[1]
    model[2].weight[0, 0, 0, 1] = torch.nan
    model[2].bias[3:5] = torch.inf
    model[1].running_var[[4, 6]] = 0
    all_findings = findings(model)
    assert [f"{f.finding} {f.layer}: {f.evidence}" for f in all_findings] == [
        "non-finite 2.weight: 1 NaN among 576 values, the first at [0, 0, 0, 1]",
        "non-finite 2.bias: 2 Inf among 8 values, the first at [3]",
        "never-updated 3: the running statistics of 1 of 2 BatchNorms still have their first values, 0 and 1",
        "dead-filters 0.weight: 1 of 8 filters has a norm of 0, or below 1e-06 of the layer's median: 2",
        "duplicate-filters 0.weight: 1 of 8 filters is a duplicate (cosine 0.9999 or more): 1=7",
        "collapsed-variance 1.running_var: 2 of 8 channels have a running variance below 1e-07 (0.01 of eps): 4, 6",
    ]
    assert [f.channels for f in all_findings] == [None, None, None, (2,), (1, 7), (4, 6)]
    assert all_findings[4].groups == ((1, 7),)
    assert all(f.meaning and json.dumps(f.as_row(), allow_nan=False) for f in all_findings)
    names = {row.name: finding_names(row) for row in parameter_statistics(model)}
    assert names["0.weight"] == ("dead-filters", "duplicate-filters")
    assert names["3.running_mean"] == names["3.running_var"] == ("never-updated",)
    assert names["1.bias"] == ()


def test_batch_norms_that_are_all_new_are_one_finding_and_a_sound_model_has_none() -> None:
    (finding,) = findings(nn.Sequential(*[nn.BatchNorm2d(2) for _ in range(5)]))
    assert (finding.finding, finding.layer, finding.numbers["never"]) == ("never-updated", "", 5)
    assert finding.evidence.startswith("the running statistics of all 5 BatchNorms still have")
    assert findings(nn.Sequential(nn.Conv2d(3, 8, 3), updated(8), nn.Linear(8, 2))) == []


def test_thresholds_are_in_the_words() -> None:
    layer = nn.Conv2d(1, 3, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(9)[:3].reshape(3, 1, 3, 3))
        layer.weight[0] *= 0.01
    assert findings(layer) == []
    thresholds = ParameterThresholds(dead_norm=0.1)
    (finding,) = parameter_findings(parameter_statistics(layer, thresholds), thresholds)
    assert finding.evidence == "1 of 3 filters has a norm of 0, or below 0.1 of the layer's median: 0"
