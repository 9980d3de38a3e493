"""DropBlock and dropout, compared with torchvision and torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import drop_block2d, drop_block3d

from hookscope.errors import UsageError
from hookscope.hooks.calls import Call
from hookscope.interventions import (
    DropBlock,
    DropBlock2d,
    DropBlock3d,
    Dropout,
    Dropout2d,
    Intervention,
    LinearSchedule,
)
from tests.helpers import refused, same_bits

CALL = Call("layer", "Conv2d", 0, 0)


def done(change: Intervention, tensor: Tensor, seed: int = 0, module: nn.Module | None = None) -> Tensor:
    torch.manual_seed(seed)
    return change(CALL, tensor, module)


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
    assert same_bits(done(change, tensor, 5), expected)
    assert done(change, tensor[:0]).shape == (0, *shape[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_counts_maps_of_more_values_than_it_has_numbers(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 8, 96, 96, dtype=dtype)
    assert tensor.numel() > 65504
    found = done(DropBlock(0.1, 7), tensor)
    assert found.dtype == dtype and bool(found.isfinite().all())
    torch.manual_seed(0)
    judge = drop_block2d(tensor.float(), 0.1, 7)
    assert torch.equal(found, judge.to(dtype))
    assert 0.08 < float((found == 0).double().mean()) < 0.11


def test_channels_last_and_a_part_are_dropped_as_channels_first_and_the_part_alone() -> None:
    tensor = torch.randn(2, 9, 9, 5)
    first = done(DropBlock(0.3, 3), tensor.movedim(-1, 1), 2)
    assert same_bits(done(DropBlock(0.3, 3), tensor, 2, nn.LayerNorm(5)), first.movedim(1, -1))
    tensor = torch.randn(2, 6, 9, 9)
    torch.manual_seed(4)
    judge = drop_block2d(tensor[:, [1, 2, 5], 2:8], 0.4, 3)
    found = done(DropBlock(0.4, 3, channels="1-2,5", positions="2-7x0-8"), tensor, 4)
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
        done(kind(), torch.ones(shape), module=nn.Conv2d(1, 1, 1))


def test_dropout2d_drops_whole_channels_wherever_they_are() -> None:
    tensor = torch.randn(2, 8, 5, 5)
    judge = done(Dropout2d(0.5), tensor, 1)
    last = done(Dropout2d(0.5), tensor.movedim(1, -1), 1, nn.LayerNorm(8))
    assert same_bits(last, judge.movedim(1, -1))
    tokens = done(Dropout2d(0.5), torch.ones(3, 49, 16), 1, nn.Linear(1, 1))
    assert {len(set(tokens[n, :, c].tolist())) for n in range(3) for c in range(16)} == {1}
    single = done(Dropout2d(0.5), torch.ones(16, 4, 4), 1, nn.Conv2d(1, 1, 1))
    assert {len(set(channel.flatten().tolist())) for channel in single} == {1}
    assert set(single.flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("change", [DropBlock(0.3, 3), Dropout(0.4), Dropout2d(0.5), DropBlock(0.5, 3, channels=1)])
def test_gradients_are_those_of_finite_differences(change: Intervention) -> None:
    tensor = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: done(change, x, 11), tensor)


@pytest.mark.parametrize("kind", [DropBlock, DropBlock2d, DropBlock3d, Dropout, Dropout2d])
def test_a_rate_of_0_is_the_tensor_itself_and_draws_nothing(kind: Any) -> None:
    tensor, before = torch.randn(1, 2, 3, 3), torch.get_rng_state()
    assert kind(0)(CALL, tensor) is tensor and kind(lambda step: 0.0).at(3)(CALL, tensor) is tensor
    assert torch.equal(torch.get_rng_state(), before)


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
