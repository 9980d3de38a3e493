"""An output measured: what a row says of it."""

from __future__ import annotations

import math

import pytest
import torch

from hookscope.drawing.reduce import measure, reduce_output
from hookscope.drawing.tiles import ChannelChoice


def test_measures_leave_nan_and_inf_out() -> None:
    values = torch.tensor([1.0, math.nan, 5.0, math.inf, -math.inf, 3.0])
    assert measure(values) == (1, 3, 5, 3)
    assert measure({"a": values, "b": (torch.tensor([7, -1]), None)}) == (-1, 3, 7, 3)
    assert measure(torch.full((4,), math.nan)) == (None, None, None, 4)
    assert measure(torch.zeros(0, 3)) == (None, None, None, 0)
    assert measure([]) == (None, None, None, 0)
    assert measure(torch.tensor([True, False])) == (0, 0.5, 1, 0)


def test_a_mean_of_many_is_exact() -> None:
    values = torch.full((3_000_000,), 0.1)
    assert measure(values)[1] == pytest.approx(float(values[0]), rel=1e-12)


def test_dead_channels_are_the_constant_ones() -> None:
    values = torch.manual_seed(0) and torch.randn(1, 6, 4, 4)
    values[0, 1], values[0, 2], values[0, 3], values[0, 4, 0, 0] = 0, 7, math.nan, math.nan
    summary = reduce_output(values, choice=ChannelChoice.parse("0"))
    assert (summary.dead, summary.nonfinite, summary.shape) == (2, 17, (1, 6, 4, 4))
    assert summary.parts[0].tiles.channels == [0]


def test_single_positions_are_never_dead() -> None:
    assert reduce_output(torch.zeros(1, 6, 1, 1)).dead == 0


def test_dead_channels_of_parts_add_up_and_of_items_must_agree() -> None:
    still, moving = torch.zeros(1, 3, 4, 4), torch.rand(1, 5, 4, 4)
    assert reduce_output({"a": still, "b": moving}).dead == 3
    assert reduce_output((still, still[:, :2], moving)).dead == 5
    assert reduce_output(torch.cat([still, moving[:, :3]])).dead == 0
    assert reduce_output(torch.cat([still, still])).dead == 3


def test_a_part_without_maps_is_not_measured() -> None:
    output = {"logits": torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]]), "labels": torch.tensor([999])}
    summary = reduce_output(output)
    assert (summary.low, summary.mean, summary.high) == (0.0, 1.5, 3.0)
