"""Running statistics of whole models: merged in any order they equal the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import InputError
from hookscope.hooks import Call
from hookscope.statistics import RunningStatistics
from hookscope.statistics.accumulator import LayerAccumulator
from hookscope.statistics.batchnorm import BatchNormAccumulator
from tests.statistics.judge import add, names, random


def counted(values: Tensor, *keys: str) -> RunningStatistics:
    """Running statistics of ``values`` as the output of each layer; ``name#1`` is a second call."""
    totals = RunningStatistics(len(values))
    for key in keys:
        name, _, number = key.partition("#")
        layer = LayerAccumulator(Call(name, "Conv2d", int(number or 0), None), values.shape[1])
        add(layer, values, names(len(values)))
        totals.layers[key] = layer
    norm = BatchNormAccumulator.of(nn.BatchNorm2d(values.shape[1]))
    norm.update(values)
    totals.batch_norms["bn"] = norm
    return totals


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (["stem", "rpn"], ["stem", "roi", "mask", "rpn"], ["stem", "roi", "mask", "rpn"]),
        (["stem", "roi", "rpn"], ["stem", "rpn"], ["stem", "roi", "rpn"]),
        (["b"], ["a", "b", "c"], ["a", "b", "c"]),
        (["a", "c"], ["a", "b"], ["a", "b", "c"]),
        ([], ["a", "b"], ["a", "b"]),
        (["a"], [], ["a"]),
    ],
)
def test_a_layer_that_ran_in_one_half_keeps_its_place(first: list[str], second: list[str], both: list[str]) -> None:
    values = random(2, 3, 4, 4)
    joined = counted(values, *first)
    joined.merge(counted(values, *second))
    assert [layer.key for layer in joined.statistics()] == both
    assert [layer.items for layer in joined.statistics()] == [2 * ((k in first) + (k in second)) for k in both]


def test_merging_shares_nothing_that_changes() -> None:
    values = random(4, 3, 4, 4)
    joined, other = RunningStatistics(), counted(values, "a")
    joined.merge(other)
    joined.merge(counted(values, "a"))
    add(joined.layers["a"], values, ["w", "x", "y", "z"])
    assert (other.images, other.statistics()[0].items, other.drifts()[0].items) == (4, 4, 64)


@pytest.mark.parametrize("name", ["::cat", "block::cat", ""])
def test_channels_of_an_operation_whose_number_changes_become_one(name: str) -> None:
    parts = [random(2, 3, 4, 4), 5 + random(3, 7, 4, 4, seed=6), random(1, 1, 4, 4, seed=7)]
    totals = RunningStatistics()
    for part in parts:
        layer = LayerAccumulator(Call(name, "cat", 0, None), part.shape[1], (-1.0, 1.0), with_rank=True)
        add(layer, part, names(len(part)))
        totals.merge(RunningStatistics(len(part), {layer.key: layer}))
    (found,) = RunningStatistics.from_state(totals.state_dict()).statistics()
    values = torch.cat([part.flatten() for part in parts]).double().numpy()
    numbers = (values.size, values.min(), values.max(), values.mean(), values.std())
    assert (found.values, found.min, found.max, found.mean, found.std) == pytest.approx(numbers, rel=1e-12)
    assert (found.shape, found.channels, found.items, found.rank) == ((None, 4, 4), 1, 6, None)
    assert found.saturated == pytest.approx((abs(values) >= 0.99).mean(), abs=0.01)


def test_other_layers_are_refused_before_anything_is_added() -> None:
    totals = counted(random(2, 3, 4, 4), "a", "b")
    wider, norms = counted(random(2, 3, 4, 4), "a"), counted(random(2, 3, 4, 4), "a", "b")
    wider.layers |= counted(random(2, 5, 4, 4), "b").layers
    norms.batch_norms = counted(random(2, 5, 4, 4)).batch_norms
    with pytest.raises(InputError, match="b has 3 channels of Conv2d and 5 of Conv2d; merge statistics of one model"):
        totals.merge(wider)
    with pytest.raises(InputError, match="bn has 3 channels and 5; merge statistics of one model"):
        totals.merge(norms)
    assert totals.images == 2 and [layer.items for layer in totals.statistics()] == [2, 2]
