"""Findings on weights: which, in what words, with what numbers."""

import json
from typing import Any

import torch
from torch import nn

from hookscope.findings import Finding
from hookscope.parameters import ParameterThresholds, finding_names, parameter_findings, parameter_statistics


def updated(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    norm.running_mean.fill_(0.5)
    return norm


def findings(model: nn.Module) -> list[Finding]:
    return parameter_findings(parameter_statistics(model))


def test_each_fault_has_its_finding() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), updated(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    model.requires_grad_(False)
    model[0].weight[2] = 0
    model[0].weight[7] = model[0].weight[1]
    model[2].weight[0, 0, 0, 1] = torch.nan
    model[2].bias[3:5] = torch.inf
    model[1].running_var[[4, 6]] = 0
    all_findings = findings(model)
    assert [(f.finding, f.layer) for f in all_findings] == [
        ("non-finite", "2.weight"),
        ("non-finite", "2.bias"),
        ("never-updated", "3"),
        ("dead-filters", "0.weight"),
        ("duplicate-filters", "0.weight"),
        ("collapsed-variance", "1.running_var"),
    ]
    assert [f.evidence for f in all_findings] == [
        "1 NaN among 576 values, the first at [0, 0, 0, 1]",
        "2 Inf among 8 values, the first at [3]",
        "the running statistics of 1 of 2 BatchNorms still have their first values, 0 and 1",
        "1 of 8 filters has a norm of 0, or below 1e-06 of the layer's median: 2",
        "1 of 8 filters is a duplicate (cosine 0.9999 or more): 1=7",
        "2 of 8 channels have a running variance below 1e-07 (0.01 of eps): 4, 6",
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
