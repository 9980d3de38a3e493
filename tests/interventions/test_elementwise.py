"""Zero, scale, clamp, noise, quantize and permute, compared with arithmetic, torch and its observers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.hooks.calls import Call
from hookscope.interventions import Clamp, Intervention, Noise, Permute, Quantize, Scale, Zero

CALL = Call("layer", "Conv2d", 0, 0)


def applied(
    change: Intervention, tensor: Tensor, module: nn.Module | None = None, seed: int = 0, **options: Any
) -> Tensor:
    torch.manual_seed(seed)
    return change(CALL, tensor, module, **options)


def test_zero_takes_nan_and_inf_too_and_lets_no_gradient_back() -> None:
    tensor = torch.tensor([[math.nan, math.inf, -1.0, 2.0]], requires_grad=True)
    zeroed = applied(Zero(channels="0-2"), tensor)
    assert zeroed.tolist() == [[0, 0, 0, 2]] and not bool(zeroed.signbit().any())
    zeroed.sum().backward()
    assert tensor.grad.tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scaling_keeps_the_type(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 3, dtype=dtype)
    scaled = applied(Scale(-1.5), tensor)
    assert scaled.dtype == dtype and torch.equal(scaled, tensor * -1.5)


@pytest.mark.parametrize("change", [Scale(1), Scale(1.0, channels=0), Noise(0), Noise(0.0, relative=True)])
def test_neutral_values_return_the_tensor_itself(change: Intervention) -> None:
    tensor = torch.tensor([[-0.0, 1.0]])
    before = torch.get_rng_state()
    assert change(CALL, tensor) is tensor and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("low", "high"), [(0, 6), (None, 1.5), (-1, None), (2, 2), (-math.inf, 0)])
def test_clamp_bounds_every_value_and_keeps_nan(low: float | None, high: float | None) -> None:
    tensor = torch.randn(3, 50) * 5
    judge = [
        [max(min(v, math.inf if high is None else high), -math.inf if low is None else low) for v in row]
        for row in tensor.tolist()
    ]
    assert applied(Clamp(low, high), tensor).tolist() == judge
    assert math.isnan(applied(Clamp(0, 1), torch.tensor([[math.nan]])).item())


def test_noise_is_gaussian_with_the_given_deviation() -> None:
    tensor = torch.full((4, 50), 3.0)
    torch.manual_seed(0)
    judge = tensor + torch.randn_like(tensor) * 0.25
    assert torch.equal(applied(Noise(0.25), tensor), judge)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_relative_noise_has_the_spread_of_the_changed_values(dtype: torch.dtype) -> None:
    tensor = (torch.randn(2, 4, 100, 100) * torch.tensor([1.0, 20.0, 1.0, 1.0]).reshape(1, 4, 1, 1)).to(dtype)
    added = (applied(Noise(0.1, relative=True, channels=1), tensor) - tensor).float()
    assert float(added[:, 1].std()) == pytest.approx(2, rel=0.05)
    assert not bool(added[:, [0, 2, 3]].any())


@pytest.mark.parametrize(
    "change", [Scale(2.5), Zero(channels=1), Clamp(-0.5, 0.5), Noise(0.3, channels="0,2"), Permute(), Permute("images")]
)
def test_gradients_are_those_of_finite_differences(change: Intervention) -> None:
    tensor = torch.randn(2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: applied(change, x, seed=3), tensor)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("shift", [0.0, 2.0, -2.0])
def test_quantized_values_are_the_nearest_of_evenly_spaced_levels(bits: int, shift: float) -> None:
    tensor = torch.rand(2, 500) + shift
    changed = applied(Quantize(bits), tensor).double()
    low, high = min(0.0, float(tensor.min())), max(0.0, float(tensor.max()))
    step = (high - low) / (2**bits - 1)
    # levels are multiples of the step, 0 among them; none is farther away than half a step, at the ends one
    assert float(((changed / step) - (changed / step).round()).abs().max()) < 1e-2
    assert changed.unique().numel() <= 2**bits
    assert float((changed - tensor).abs().max()) <= step * (1.001 if shift else 0.501) + 1e-6


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_quantized_as_the_observers_of_torch_would(symmetric: bool, per_channel: bool) -> None:
    from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

    tensor = torch.randn(3, 4, 6, 6) * torch.tensor([1.0, 10.0, 0.1, 3.0]).reshape(1, 4, 1, 1) + 0.3
    ends: dict[str, Any] = {"dtype": torch.quint8, "quant_min": 0, "quant_max": 255}
    if symmetric:
        ends = {"dtype": torch.qint8, "quant_min": -127, "quant_max": 127}
    scheme = f"per_{'channel' if per_channel else 'tensor'}_{'symmetric' if symmetric else 'affine'}"
    kind: Any = PerChannelMinMaxObserver if per_channel else MinMaxObserver
    observer = kind(qscheme=getattr(torch, scheme), **({"ch_axis": 1} if per_channel else {}), **ends)
    observer(tensor)
    scale, zero = observer.calculate_qparams()
    low, high = ends["quant_min"], ends["quant_max"]
    if per_channel:
        judge = torch.fake_quantize_per_channel_affine(tensor, scale, zero.int(), 1, low, high)
    else:
        judge = torch.fake_quantize_per_tensor_affine(tensor, float(scale), int(zero), low, high)
    changed = applied(Quantize(8, symmetric=symmetric, per_channel=per_channel), tensor)
    assert torch.allclose(changed, judge, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "change", [Quantize(3), Quantize(1), Quantize(4, symmetric=True), Quantize(2, per_channel=True)]
)
def test_gradients_pass_straight_through(change: Quantize, dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 5, 4, 4, dtype=dtype, requires_grad=True)
    changed = applied(change, tensor)
    assert changed.dtype == dtype and torch.equal(changed.detach(), applied(change, tensor.detach()))
    changed.backward(weight := torch.randn_like(tensor))
    assert torch.equal(tensor.grad, weight)


def test_quantize_at_zeros_empty_tensors_vectors_and_the_last_level_and_never_nan() -> None:
    assert applied(Quantize(), torch.zeros(1, 4)).tolist() == [[0, 0, 0, 0]]
    assert applied(Quantize(), torch.ones(0, 4)).shape == (0, 4)
    assert applied(Quantize(channels=[]), torch.ones(1, 4)).tolist() == [[1, 1, 1, 1]]
    for bad in (math.nan, math.inf):
        with pytest.raises(UsageError, match="cannot quantize NaN or Inf at 'layer'; clamp them first"):
            applied(Quantize(), torch.tensor([[1.0, bad]]))
    vector = torch.tensor([-2.0, 0.3, 5.0])
    assert torch.allclose(applied(Quantize(8, per_channel=True), vector, axis=0), vector)
    # in steps of 1 both ends lie half-way between levels: rounding takes one of them past the last
    tensor = torch.tensor([[-77.5, 177.5, 3.0]], requires_grad=True)
    applied(Quantize(8), tensor).sum().backward()
    assert tensor.grad.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("shape", "module", "axis"),
    [
        ((2, 4, 5, 6), None, 1),
        ((2, 5, 6, 4), nn.LayerNorm(4), 3),
        ((2, 30, 4), nn.Linear(1, 1), 2),
        ((4, 5, 6), nn.Conv2d(1, 1, 1), 0),
    ],
)
def test_positions_are_permuted_alike_in_all_channels_and_images(
    shape: tuple[int, ...], module: nn.Module | None, axis: int
) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    changed = applied(Permute(), tensor, module)
    images, channels = (1 if axis == 0 else shape[0]), shape[axis]
    flat = tensor.movedim(axis, 0 if axis == 0 else 1).reshape(images, channels, -1)
    mixed = changed.movedim(axis, 0 if axis == 0 else 1).reshape(images, channels, -1)
    order = [flat[0, 0].tolist().index(value) for value in mixed[0, 0].tolist()]
    assert sorted(order) == list(range(flat.shape[2])) != order
    assert torch.equal(mixed, flat[:, :, order])


def test_channels_and_images_are_permuted_as_wholes() -> None:
    tensor = torch.arange(48.0).reshape(4, 6, 2)
    channels = applied(Permute("channels"), tensor, nn.Conv1d(1, 1, 1))
    assert [sorted(row) for row in channels[:, :, 0].tolist()] == tensor[:, :, 0].tolist()
    assert torch.equal(channels[:, :, 1], channels[:, :, 0] + 1) and not torch.equal(channels, tensor)
    images = applied(Permute("images"), tensor, seed=1)
    assert sorted(images[:, 0, 0].tolist()) == tensor[:, 0, 0].tolist() and not torch.equal(images, tensor)
    with pytest.raises(UsageError, match="no images to permute at 'layer'; its tensor has no batch axis"):
        applied(Permute("images"), torch.ones(4, 5, 6), nn.Conv2d(1, 1, 1))


def test_numbers_of_numpy_and_torch_and_infinite_bounds_are_accepted() -> None:
    for factor in (2, np.float32(2), torch.tensor(2.0), 3.4028234663852886e38):
        Scale(factor)
    Clamp(-float("inf"), 1)
