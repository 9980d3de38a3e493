"""The metrics of a training step against NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from hookscope.training.reductions import BatchMoments, StepWeights, is_bias, is_finite, norm, output_sums, values_of


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4, 5), (2, 3, 2, 4, 5)])
def test_sums_are_those_of_numpy_far_from_zero_too(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1000
    (sums,) = output_sums(values)
    array = values.double().numpy()
    assert sums.count == array.size and np.isclose(sums.mean.item(), array.mean())
    assert np.isclose(sums.spread.item() / array.size**0.5, array.std(), rtol=1e-3)
    assert (sums.alive is None) == (len(shape) < 2) and sums.non_finite == 0


def test_channels_parts_and_values_that_are_not_finite_are_counted_where_they_are() -> None:
    tokens = torch.zeros(2, 5, 3)
    tokens[1, 4, 2] = 1
    (sums,) = output_sums(tokens, nn.Linear(3, 3))
    assert sums.alive is not None and sums.alive.tolist() == [False, False, True] and int(sums.nonzero) == 1
    parts = {"a": torch.ones(2), "b": (torch.zeros(3), torch.ones(1, dtype=torch.long), "word", torch.empty(0))}
    assert [sums.count for sums in output_sums(parts)] == [2, 3]
    assert values_of(torch.empty(2, device="meta")) == []
    values = torch.tensor([[1.0, float("nan")], [float("inf"), -float("inf")]])
    (sums,) = output_sums(values)
    assert int(sums.non_finite) == 3
    (large,) = output_sums(torch.full((4,), 3e38))
    assert int(large.non_finite) == 0


def test_norms_of_other_numbers() -> None:
    assert norm(torch.tensor([3 + 4j])).item() == 5
    assert norm(torch.full((4,), 60000.0).half()).item() == 120000
    assert norm(torch.sparse_coo_tensor([[1, 1]], [3.0, 4.0], (3,), check_invariants=True)).item() == 7
    assert is_finite(torch.full((9,), 60000.0).half()) and not is_finite(torch.tensor([1 + float("nan") * 1j]))


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = torch.randn(9, 2, 5, generator=torch.Generator().manual_seed(1)) * 3 + 7
    whole, parts = (BatchMoments(torch.zeros(2), torch.ones(2), 0.0) for _ in range(2))
    whole.add(values)
    for part in values.split([1, 6, 2]):
        parts.add(part)
    array = values.double().numpy()
    shift = np.sqrt((array.mean((0, 2)) ** 2).mean())
    ratio = np.exp(np.log(array.var((0, 2))).mean())
    for moments in (whole, parts):
        assert np.allclose([each.item() for each in moments.drift()], [shift, ratio], rtol=1e-4)


def test_weights_around_a_step() -> None:
    layer = nn.Linear(2, 1)
    own = dict(layer.named_parameters())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 4.0]]))
        layer.weight.grad, layer.bias.grad = torch.tensor([[1.0, float("inf")]]), torch.tensor([float("nan")])
        weights = StepWeights([own, own], gradients=True)
        layer.weight[0, 0] = 2
        weights.step_is_done()
    metrics = weights.metrics(own)
    assert metrics["weight_norm"] == 5 and metrics["update_to_weight"] == pytest.approx(0.2)
    assert metrics["gradient_non_finite"] == 2 and metrics["weight_non_finite"] == 0
    assert weights.metrics({}) == dict.fromkeys(metrics)
    assert [name for name in ("bias", "bias_ih_l0", "in_proj_bias", "weight", "alpha") if not is_bias(name)] == [
        "weight", "alpha"]  # fmt: skip
