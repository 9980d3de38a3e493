"""Summaries of tensors of every type that a layer may return."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hookscope.tracing.events import TensorSummary, facts_of


def facts(tensor: Tensor, most: int = 0) -> TensorSummary:
    return facts_of(tensor, most)[""]


@pytest.mark.parametrize(
    ("tensor", "dtype", "least", "most"),
    [
        (torch.tensor([1.5, -2.0]), "float32", -2.0, 1.5),
        (torch.tensor([1.5, -2.0], dtype=torch.float64), "float64", -2.0, 1.5),
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "bfloat16", -2.0, 1.5),
        (torch.tensor([1.5, -2.0], dtype=torch.float16), "float16", -2.0, 1.5),
        (torch.tensor([1.5, -2.0]).to(torch.float8_e5m2), "float8_e5m2", -2.0, 1.5),
        (torch.tensor([3, 2**62]), "int64", 3, 2**62),
        (torch.tensor([3, 7], dtype=torch.uint16), "uint16", 3, 7),
        (torch.tensor([True, False]), "bool", 0, 1),
        (torch.tensor([[0.0, 2.0]]).to_sparse(), "float32", 0.0, 2.0),
        (torch.tensor([5.0]).expand(3, 4), "float32", 5.0, 5.0),
        (torch.tensor([1.0, 2.0], requires_grad=True), "float32", 1.0, 2.0),
    ],
    ids=str,
)
def test_the_range_of_every_type(tensor: Tensor, dtype: str, least: float, most: float) -> None:
    assert facts(tensor) == TensorSummary(tuple(tensor.shape), dtype, least, most, 0)


@pytest.mark.parametrize(
    ("values", "least", "most", "nonfinite"),
    [
        ([math.nan, 2.0, -1.0], -1.0, 2.0, 1),
        ([math.inf, 2.0, -math.inf, math.nan], 2.0, 2.0, 3),
        ([math.nan], None, None, 1),
        ([], None, None, 0),
    ],
)
def test_values_that_are_not_finite_are_counted_and_are_no_extremes(
    values: list[float], least: float | None, most: float | None, nonfinite: int
) -> None:
    summary = facts(torch.tensor(values))
    assert (summary.min, summary.max, summary.nonfinite) == (least, most, nonfinite)


def test_complex_values_have_no_range_and_the_meta_device_no_values() -> None:
    tensor = torch.tensor([1 + 2j, complex(math.nan, 0)]).conj()
    assert facts(tensor[:1], 1) == TensorSummary((1,), "complex64", None, None, 0, [[1.0, -2.0]])
    assert facts(tensor).nonfinite == 1
    assert facts(torch.empty(2, 3, device="meta"), 100) == TensorSummary((2, 3), "float32", None, None, 0)


@pytest.mark.parametrize(
    ("tensor", "most", "values"),
    [
        (torch.arange(4).reshape(2, 2), 4, [[0, 1], [2, 3]]),
        (torch.arange(4).reshape(2, 2), 3, None),
        (torch.arange(4), 0, None),
        (torch.tensor(7.5), 1, 7.5),
        (torch.tensor(7.5), 0, None),
        (torch.empty(0, 4), 1, []),
        (torch.tensor([True]), 1, [True]),
        (torch.tensor([0.1]), 1, [0.10000000149011612]),
    ],
)
def test_summaries_hold_the_values_of_small_tensors(tensor: Tensor, most: int, values: Any) -> None:
    assert facts(tensor, most).values == values


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_decoded() -> None:
    tensor = torch.quantize_per_tensor(torch.tensor([-1.0, 0.6]), 0.5, 10, torch.quint8)
    assert facts(tensor, 2) == TensorSummary((2,), "quint8", -1.0, 0.5, 0, [-1.0, 0.5])


def test_containers_are_summed_up_by_part_without_holding_the_tensors() -> None:
    summary = facts_of({"out": torch.zeros(1, 2), "more": [torch.ones(3), None]})
    assert {part: one.shape for part, one in summary.items()} == {"out": (1, 2), "more.0": (3,)}
    assert facts_of((None, "word")) == {}
    tensor = torch.tensor([1.0, 2.0])
    summary = facts(tensor, 2)
    tensor.zero_()
    assert (summary.max, summary.values) == (2.0, [1.0, 2.0])
