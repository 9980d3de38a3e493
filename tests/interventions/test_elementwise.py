"""Interventions on values, compared with arithmetic, torch, its observers and torchvision, and with passes by hand."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.ops import drop_block2d, drop_block3d

from hookscope.errors import LayerError, UsageError
from hookscope.hooks.activations import capture
from hookscope.hooks.calls import Call
from hookscope.interventions import (
    Clamp,
    DropBlock,
    DropBlock2d,
    DropBlock3d,
    Dropout,
    Dropout2d,
    Intervention,
    LinearSchedule,
    Mean,
    Noise,
    Patch,
    Permute,
    Quantize,
    Scale,
    Steer,
    Zero,
    intervene,
)
from tests.helpers import refused, same_bits, small_head
from tests.nets import Function

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


RATE_0 = [kind(p) for kind in (DropBlock, DropBlock2d, DropBlock3d, Dropout, Dropout2d) for p in (0, lambda step: 0.0)]


@pytest.mark.parametrize("change", [Scale(1), Scale(1.0, channels=0), Noise(0), Noise(0.0, relative=True), *RATE_0])
def test_neutral_values_return_the_tensor_itself_and_draw_nothing(change: Intervention) -> None:
    tensor = torch.tensor([[-0.0, 1.0]])
    before = torch.get_rng_state()
    assert change.at(3)(CALL, tensor) is tensor and torch.equal(torch.get_rng_state(), before)


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


CHANGES = [Scale(2.5), Zero(channels=1), Clamp(-0.5, 0.5), Noise(0.3, channels="0,2"), Permute(), Permute("images")]
CHANGES += [DropBlock(0.3, 3), Dropout(0.4), Dropout2d(0.5), DropBlock(0.5, 3, channels=1)]


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_those_of_finite_differences(change: Intervention) -> None:
    tensor = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
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


def twice() -> nn.Module:
    """Runs a layer twice and puts out a dictionary on the way."""

    def forward(net: Any, x: Tensor) -> Tensor:
        parts = net.split(net.conv(torch.relu(net.conv(x))))
        return parts["low"] + 10 * parts["high"][0]

    split = Function(lambda x: {"low": x.clamp(max=0), "high": [x.clamp(min=0), torch.arange(3)]})
    return Function(forward, conv=nn.Conv2d(2, 2, 1), split=split)


def tail_of_resnet18(model: Any, x: Tensor) -> Tensor:
    return model.fc(torch.flatten(model.avgpool(model.layer4(model.layer3(x))), 1))


def head_of_resnet18(model: Any, x: Tensor) -> Tensor:
    return model.layer2(model.layer1(model.maxpool(model.relu(model.bn1(model.conv1(x))))))


def test_patching_is_the_second_half_of_the_net_on_the_other_activation() -> None:
    model = resnet18(weights=None).eval()
    one, other = torch.randn(2, 1, 3, 64, 64)
    with torch.no_grad():
        with capture(model, "layer2") as kept:
            model(other)
        judge = tail_of_resnet18(model, head_of_resnet18(model, other))
        with intervene(model, {"layer2": Patch(kept)}) as block:
            found = model(one)
        assert torch.equal(found, judge) and not torch.equal(found, model(one)) and block.changed == {"layer2": 1}
        mixed = head_of_resnet18(model, one)
        mixed[:, 3:9, 2:5, 0:4] = head_of_resnet18(model, other)[:, 3:9, 2:5, 0:4]
        with intervene(model, {"layer2": Patch(kept, channels="3-8", positions="2-4x0-3")}):
            assert torch.equal(model(one), tail_of_resnet18(model, mixed))


def test_patching_before_an_in_place_layer_uses_the_true_activation() -> None:
    model = small_head("vgg11")
    one, other = torch.randn(2, 1, 3, 32, 32)
    with torch.no_grad():
        with capture(model, "features.3") as kept:
            model(other)
        with intervene(model, {"features.3": Patch(kept)}):
            found = [model(one), model(one)]  # the in-place ReLU has not written into what is patched in
        x = model.features[3](model.features[:3](other))
        judge = model.classifier(torch.flatten(model.avgpool(model.features[4:](x)), 1))
    assert torch.equal(found[0], judge) and torch.equal(found[1], judge)


def test_calls_parts_and_inputs_each_get_their_own() -> None:
    net, (one, other) = twice(), torch.randn(2, 1, 2, 4, 4)
    with torch.no_grad():
        with capture(net, "conv,split") as kept:
            plain = net(other)
        assert set(kept) == {"conv", "conv#1", "split"}
        for where in ("conv", "conv#1", "conv#0", "split"):
            with intervene(net, {where: Patch(kept)}):
                assert torch.equal(net(one), plain)
        parts = {"low": kept["split"]["low"], "high": [kept["split"]["high"][0]]}
        with intervene(net, {"split": Patch({"split": parts})}):
            assert torch.equal(net(one), plain)
        for where, source, says in (
            ("conv", kept["conv"], "no activation of 'conv#1' to patch with; there is conv"),
            ("split", {"low": parts["low"]}, "no part 'high.0' of 'split' to patch with; there is low"),
        ):
            with pytest.raises(LayerError, match=f"{says}$"), intervene(net, {where: Patch({where: source})}):
                net(one)
        with capture(net, "split", inputs=True) as kept:
            plain = net(other)
        with intervene(net, {"split": Patch(kept.inputs, on="input")}):
            assert torch.equal(net(one), plain)


def test_the_activation_of_one_image_goes_to_each_of_a_batch_and_takes_no_gradient() -> None:
    source = torch.randn(1, 3, 2, 2)
    found = Patch(source)(CALL, torch.randn(4, 3, 2, 2))
    assert torch.equal(found, source.expand(4, 3, 2, 2)) and found.is_contiguous()
    tensor = torch.randn(1, 3, 2, 2, requires_grad=True)
    source = torch.randn(1, 3, 2, 2, requires_grad=True)
    Patch(source, channels=1)(CALL, tensor).sum().backward()
    assert tensor.grad[0].sum((1, 2)).tolist() == [4, 0, 4] and source.grad is None


NO_PART = "no part '' of 'layer' to patch with; there is no tensor"


@pytest.mark.parametrize(
    ("source", "shape", "says"),
    [
        (torch.ones(1, 3, 2, 2), (1, 3, 4, 4), "the patch for 'layer' is 1x3x2x2; its activation is 1x3x4x4; take"),
        (torch.ones(2, 3), (3, 3), "the patch for 'layer' is 2x3; its activation is 3x3"),
        (torch.ones(()), (3, 3), "the patch for 'layer' is a single number; its activation is 3x3"),
        (torch.ones(3), (3, 3), "the patch for 'layer' is 3; its activation is 3x3"),
        *((source, (1, 2), NO_PART) for source in ("a.jpg", {"layer": None}, None)),
    ],
)
def test_a_patch_of_another_shape_or_without_a_tensor_is_refused(source: Any, shape: Any, says: str) -> None:
    with refused(LayerError if says == NO_PART else UsageError, says, part="begins"):
        Patch(source)(CALL, torch.ones(shape))


def test_the_mean_of_the_batch_or_of_other_images_of_its_shape() -> None:
    tensor, others = torch.randn(4, 3, 2, 2), torch.randn(9, 3, 2, 2)
    assert torch.equal(Mean()(CALL, tensor), tensor.mean(0, keepdim=True).expand(4, 3, 2, 2))
    found = Mean({"layer": others}, channels="0,2")(CALL, tensor)
    assert torch.equal(found[:, [0, 2]], others.mean(0)[[0, 2]].expand(4, 2, 2, 2))
    assert torch.equal(found[:, 1], tensor[:, 1])
    with pytest.raises(UsageError, match="no images to average at 'layer'; its tensor has no batch axis"):
        Mean()(CALL, torch.ones(3, 4, 5), nn.Conv2d(1, 1, 1))
    with pytest.raises(UsageError, match="the mean for 'layer' is 1x3x2x2; its activation is 2x3x4x4"):
        Mean(torch.ones(5, 3, 2, 2))(CALL, torch.ones(2, 3, 4, 4))
    with pytest.raises(LayerError, match="no activation of 'layer' to average; there is conv1, conv2"):
        Mean({"conv1": torch.ones(1), "conv2": torch.ones(1)})(CALL, torch.ones(1, 2))


SHAPES = [
    ((2, 3, 4, 5), None, (2, 3)),
    ((2, 4, 5, 3), nn.LayerNorm(3), (1, 2)),
    ((2, 9, 3), nn.Linear(1, 1), (1,)),
    ((3, 4, 5), nn.Conv2d(1, 1, 1), (1, 2)),
]


@pytest.mark.parametrize(("shape", "module", "axes"), SHAPES)
def test_the_mean_of_each_map(shape: tuple[int, ...], module: nn.Module | None, axes: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    assert torch.allclose(Mean(over="positions")(CALL, tensor, module), tensor.mean(axes, keepdim=True).expand(shape))


@pytest.mark.parametrize(("shape", "module", "axes"), SHAPES)
def test_steering_adds_the_direction_everywhere(
    shape: tuple[int, ...], module: nn.Module | None, axes: tuple[int, ...]
) -> None:
    reshaped = (3,) if shape[-1] == 3 else (3, 1, 1)
    tensor, direction = torch.randn(shape), torch.randn(3, dtype=torch.float64)
    judge = tensor + 2.5 * direction.float().reshape(reshaped)
    assert torch.equal(Steer(direction, 2.5)(CALL, tensor, module), judge)
    channel = Steer(direction, 2.5, channels=1)(CALL, tensor, module)
    assert torch.equal(channel != tensor, (judge != tensor) & (torch.arange(3) == 1).reshape(reshaped))


def test_steering_by_a_whole_activation_and_by_none() -> None:
    tensor, direction = torch.randn(2, 3, 4, 4), torch.randn(3, 4, 4)
    assert torch.equal(Steer(direction)(CALL, tensor), tensor + direction)
    at = Steer(direction, positions="1x2-3")(CALL, tensor)
    assert torch.equal(at[:, :, 1, 2:], (tensor + direction)[:, :, 1, 2:]) and torch.equal(
        at[:, :, 2:], tensor[:, :, 2:]
    )
    assert Steer(direction, scale=0)(CALL, tensor) is tensor
    with pytest.raises(UsageError, match="the direction for 'layer' is 1x5; its activation is 2x3x4x4"):
        Steer(torch.ones(5))(CALL, tensor)


def case(change: Intervention, shape: tuple[int, ...], judge: Callable[[Tensor], Tensor]) -> Any:
    return pytest.param(change, shape, judge, id=f"{change}-{'x'.join(map(str, shape))}")


AS_TORCH = [
    *(
        case(kind(p, size), shape, partial(drop_block2d, p=p, block_size=size))
        for kind in (DropBlock, DropBlock2d)
        for shape, p, size in (
            ((2, 3, 9, 9), 0.1, 7), ((1, 8, 6, 11), 0.5, 3), ((1, 4, 5, 5), 1.0, 1), ((1, 2, 3, 3), 1, 3)
        )
    ),
    case(DropBlock(0.4, 3), (2, 3, 4, 7, 8), partial(drop_block3d, p=0.4, block_size=3)),
    case(DropBlock3d(0.4, 3), (2, 3, 4, 7, 8), partial(drop_block3d, p=0.4, block_size=3)),
    *(  # a block larger than the map is cut to its odd width
        case(DropBlock(0.3, 9), (2, 16, *side), partial(drop_block2d, p=0.3, block_size=width))
        for side, width in (((4, 4), 3), ((2, 9), 1), ((7, 7), 7), ((1, 1), 1), ((6, 3), 3))
    ),
    *(case(Dropout(0.3), shape, partial(nn.functional.dropout, p=0.3)) for shape in ((4, 10), (2, 3, 5, 5), (7,))),
    case(Dropout2d(0.5), (2, 8, 5, 5), partial(nn.functional.dropout2d, p=0.5)),
]  # fmt: skip


@pytest.mark.parametrize(("change", "shape", "judge"), AS_TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_numbers_of_torch_and_torchvision(change: Any, shape: Any, judge: Any, dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, dtype=dtype)
    torch.manual_seed(5)
    expected = judge(tensor)
    assert same_bits(applied(change, tensor, seed=5), expected)
    assert applied(change, tensor[:0]).shape == (0, *shape[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_counts_maps_of_more_values_than_it_has_numbers(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 8, 96, 96, dtype=dtype)
    assert tensor.numel() > 65504
    found = applied(DropBlock(0.1, 7), tensor)
    assert found.dtype == dtype and bool(found.isfinite().all())
    torch.manual_seed(0)
    judge = drop_block2d(tensor.float(), 0.1, 7)
    assert torch.equal(found, judge.to(dtype))
    assert 0.08 < float((found == 0).double().mean()) < 0.11


def test_channels_last_and_a_part_are_dropped_as_channels_first_and_the_part_alone() -> None:
    tensor = torch.randn(2, 9, 9, 5)
    first = applied(DropBlock(0.3, 3), tensor.movedim(-1, 1), seed=2)
    assert same_bits(applied(DropBlock(0.3, 3), tensor, nn.LayerNorm(5), 2), first.movedim(1, -1))
    tensor = torch.randn(2, 6, 9, 9)
    torch.manual_seed(4)
    judge = drop_block2d(tensor[:, [1, 2, 5], 2:8], 0.4, 3)
    found = applied(DropBlock(0.4, 3, channels="1-2,5", positions="2-7x0-8"), tensor, seed=4)
    assert same_bits(found[:, [1, 2, 5], 2:8], judge)
    outside = torch.ones_like(tensor, dtype=torch.bool)
    outside[:, [1, 2, 5], 2:8] = False
    assert torch.equal(found[outside], tensor[outside])


@pytest.mark.parametrize(
    ("kind", "shape", "wanted"),
    [
        (DropBlock, (2, 5), "needs a tensor (N, C, H, W) or (N, C, T, H, W); got 2x5"),
        (DropBlock, (5, 4, 4), "needs a tensor (N, C, H, W) or (N, C, T, H, W); got 5x4x4"),
        (DropBlock2d, (1, 2, 3, 4, 4), "needs a tensor (N, C, H, W); got 1x2x3x4x4"),
        (DropBlock3d, (1, 2, 4, 4), "needs a tensor (N, C, T, H, W); got 1x2x4x4"),
    ],
)
def test_tensors_that_are_no_maps_are_refused(kind: Any, shape: tuple[int, ...], wanted: str) -> None:
    with refused(UsageError, f"{kind.__name__} at 'layer' {wanted}"):
        applied(kind(), torch.ones(shape), nn.Conv2d(1, 1, 1))


def test_dropout2d_drops_whole_channels_wherever_they_are() -> None:
    tensor = torch.randn(2, 8, 5, 5)
    judge = applied(Dropout2d(0.5), tensor, seed=1)
    last = applied(Dropout2d(0.5), tensor.movedim(1, -1), nn.LayerNorm(8), 1)
    assert same_bits(last, judge.movedim(1, -1))
    tokens = applied(Dropout2d(0.5), torch.ones(3, 49, 16), nn.Linear(1, 1), 1)
    assert {len(set(tokens[n, :, c].tolist())) for n in range(3) for c in range(16)} == {1}
    single = applied(Dropout2d(0.5), torch.ones(16, 4, 4), nn.Conv2d(1, 1, 1), 1)
    assert {len(set(channel.flatten().tolist())) for channel in single} == {1}
    assert set(single.flatten().tolist()) == {0.0, 2.0}


def test_a_linear_rate_and_train_mode() -> None:
    rate = LinearSchedule(0.0, 0.2, steps=4)
    assert [rate(step) for step in (-1, 0, 1, 2, 3, 4, 9)] == pytest.approx([0, 0, 0.05, 0.1, 0.15, 0.2, 0.2])
    falling = DropBlock(LinearSchedule(0.5, 0.1, 2), block_size=3)
    assert [falling.at(step).rate for step in (0, 1, 2)] == pytest.approx([0.5, 0.3, 0.1])
    assert falling.at(1).block_size == 3
    with pytest.raises(UsageError, match=r"DropBlock has a schedule; call `\.at\(step\)` first"):
        falling(CALL, torch.ones(1, 1, 3, 3))
    layer = nn.Identity()
    assert Dropout().is_active(layer) and not Dropout().is_active(layer.eval())
    assert Dropout(when="always").is_active(layer)
