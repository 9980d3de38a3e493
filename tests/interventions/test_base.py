"""Which part of a tensor is changed, wherever the channels are; which tensors pass unchanged or are refused."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, UsageError
from hookscope.hooks.calls import Call
from hookscope.interventions import (
    Clamp,
    DropBlock,
    DropBlock2d,
    Dropout,
    Freeze,
    Intervention,
    LinearSchedule,
    Mean,
    Noise,
    Patch,
    Permute,
    Prune,
    Quantize,
    Scale,
    Steer,
    Zero,
)
from hookscope.interventions.base import Ranges, Site, checked, laid_out_like, parse_channels, parse_positions, replaced
from tests.helpers import refused


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (None, None),
        ("0-3", (0, 1, 2, 3)),
        ("7", (7,)),
        (" 8 , 0 - 2 ", (0, 1, 2, 8)),
        ("3,3,1-3", (1, 2, 3)),
        (5, (5,)),
        ([5, 0], (0, 5)),
        (range(2, 8, 3), (2, 5)),
        (["0-1", 9], (0, 1, 9)),
        ((), ()),
        (np.int64(4), (4,)),
        (np.array([4, 2]), (2, 4)),
        (torch.tensor([6, 1]), (1, 6)),
        (torch.tensor(3), (3,)),
        (torch.tensor([3]), (3,)),
        (Ranges([2, 1]), (1, 2)),
    ],
)
def test_channels(value: Any, numbers: tuple[int, ...] | None) -> None:
    assert parse_channels(value) == numbers


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "bad channels ''; write 0-31 or 0-31,40"),
        ("3-1", "bad channels '3-1'"),
        ("-1", "bad channels '-1'"),
        ("1,,2", "bad channels '1,,2'"),
        ("a", "bad channels 'a'"),
        (-1, "bad channels -1; channels count from 0"),
        ([0, -2], "bad channels -2"),
        (1.5, "channels cannot be a float"),
        ([0.5], "channels cannot be a float"),
        (torch.tensor([0.5]), "channels cannot be a Tensor"),
        (object(), "channels cannot be an object"),
        ("0-999999999", "channels '0-999999999' are too many for a tensor"),
    ],
)
def test_bad_channels_are_refused(value: Any, says: str) -> None:
    with refused(UsageError, says, part="begins"):
        parse_channels(value)


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1, 2), (0, 2, 3, 9), tuple(range(1, 40, 2))])
def test_the_text_of_ranges_is_read_as_the_same(numbers: tuple[int, ...]) -> None:
    shown = str(Ranges(numbers))
    assert (parse_channels(shown) if shown else ()) == numbers


@pytest.mark.parametrize(
    ("value", "spans"),
    [
        (None, None),
        ("0-9x5-14", ((0, 9), (5, 14))),
        ("3", ((3, 3),)),
        ("1 x 2-3×4", ((1, 1), (2, 3), (4, 4))),
        ([(0, 9), [5, 5]], ((0, 9), (5, 5))),
        (((np.int64(1), 2),), ((1, 2),)),
    ],
)
def test_positions(value: Any, spans: tuple[tuple[int, int], ...] | None) -> None:
    assert parse_positions(value) == spans


@pytest.mark.parametrize(
    "value", ["", "0-9x", "9-0", "-1", 5, (0, 9), [(0,)], [(0, 1, 2)], [(3, 1)], [(-1, 2)], [("0", 1)]]
)
def test_bad_positions_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^(bad positions|positions cannot be an? )") as caught:
        parse_positions(value)
    assert "0-9x5-14" in str(caught.value) and "\n" not in str(caught.value)


CALL = Call("layer", "Conv2d", 0, 0)
PLACES = [
    ((2, 6, 5, 7), nn.Conv2d(1, 1, 1), "0,2-4", "1-3x2-6", (slice(None), [0, 2, 3, 4], slice(1, 4), slice(2, 7))),
    ((2, 5, 7, 6), nn.LayerNorm(6), "0,2-4", "1-3x2-6", (slice(None), slice(1, 4), slice(2, 7), [0, 2, 3, 4])),
    ((2, 10, 6), nn.Linear(1, 1), 5, "1-9", (slice(None), slice(1, 10), [5])),
    ((6, 5, 7), nn.Conv2d(1, 1, 1), [1], "0x0", ([1], slice(0, 1), slice(0, 1))),
    ((2, 6, 9), nn.Conv1d(1, 1, 1), [1, 3], "2-4", (slice(None), [1, 3], slice(2, 5))),
    ((6, 9), nn.Conv1d(1, 1, 1), [1, 3], "2-4", ([1, 3], slice(2, 5))),
    ((2, 6, 9), nn.Sequential(nn.Conv1d(1, 1, 1), nn.ReLU()), [1, 3], "2-4", (slice(None), [1, 3], slice(2, 5))),
    ((2, 6, 9), nn.GroupNorm(1, 6), [1, 3], "2-4", (slice(None), [1, 3], slice(2, 5))),
    ((2, 6), nn.Linear(1, 1), "5", None, (slice(None), [5])),
    ((2, 6), nn.BatchNorm1d(6), "5", None, (slice(None), [5])),
    ((2, 6, 3, 4, 5), nn.Conv3d(1, 1, 1), 0, "2x1-2x4", (slice(None), [0], slice(2, 3), slice(1, 3), slice(4, 5))),
    ((6, 3, 4, 5), nn.Conv3d(1, 1, 1), 0, "2x1-2x4", ([0], slice(2, 3), slice(1, 3), slice(4, 5))),
    ((2, 3, 4, 5, 6), nn.LayerNorm(6), 0, "2x1-2x4", (slice(None), slice(2, 3), slice(1, 3), slice(4, 5), [0])),
    ((2, 6, 5, 7), None, None, "1-3x2-6", (slice(None), slice(None), slice(1, 4), slice(2, 7))),
]


@pytest.mark.parametrize(("shape", "module", "channels", "positions", "where"), PLACES)
@pytest.mark.parametrize("change", [Zero(), Scale(-3.0), Clamp(0, 0.1), Noise(0.5, relative=True), Quantize(2)])
def test_a_part_is_changed_like_a_tensor_of_its_own_and_no_bit_outside_changes(
    shape: tuple[int, ...], module: nn.Module | None, channels: Any, positions: str | None, where: Any, change: Any
) -> None:
    tensor = torch.randn(shape)
    tensor.flatten()[::3] = -0.0
    kept = tensor.clone()
    torch.manual_seed(2)
    found = dataclasses.replace(change, channels=channels, positions=positions)(CALL, tensor, module)
    torch.manual_seed(2)
    judge = change(CALL, kept[where])
    outside = torch.ones(shape, dtype=torch.bool)
    outside[where] = False
    assert torch.equal(found[where], judge)
    assert judge.numel() < 8 or not torch.equal(judge, kept[where])
    assert torch.equal(found[outside].view(torch.int32), kept[outside].view(torch.int32))
    assert torch.equal(tensor.view(torch.int32), kept.view(torch.int32)) and found.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("part", [{}, {"channels": "0-3"}, {"channels": 1, "positions": "0-1x0-1"}])
@pytest.mark.parametrize(
    "change",
    [
        Zero(), Scale(2), Clamp(0, 1), Noise(), Quantize(), Quantize(per_channel=True), Permute(), Permute("channels"),
        Permute("images"), Patch(torch.ones(2, 8, 5, 5)), Patch(torch.ones(1, 8, 5, 5)), Mean(), Mean(over="positions"),
        Mean(torch.ones(3, 8, 5, 5)), Steer(torch.ones(8)), Steer(torch.ones(8, 5, 5)), DropBlock(0.1, 3),
    ],
)  # fmt: skip
def test_the_memory_format_is_kept(change: Intervention, part: dict[str, Any]) -> None:
    for layout in (torch.channels_last, torch.contiguous_format):
        tensor = torch.randn(2, 8, 5, 5).contiguous(memory_format=layout)
        assert dataclasses.replace(change, **part)(CALL, tensor).stride() == tensor.stride()


def test_gradients_reach_the_values_outside_the_part_and_no_channels_is_no_change() -> None:
    tensor = torch.randn(1, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Scale(3.0, channels="0,2", positions="1-2x0")(CALL, x), tensor)
    tensor = torch.randn(1, 3, 2, 2)
    for change in (Zero(channels=[]), Scale(2.0, channels=()), Noise(channels=[])):
        assert torch.equal(change(CALL, tensor), tensor)


@pytest.mark.parametrize(
    ("change", "shape", "says"),
    [
        (Zero(channels="0-6"), (1, 6, 2, 2), "no channel 6 at 'layer'; there are 6: 0 to 5"),
        (Zero(channels=[99]), (1, 6), "no channel 99 at 'layer'; there are 6: 0 to 5"),
        (Zero(positions="0-2x0"), (1, 6, 2, 2), "no position 2 at 'layer'; there are 2: 0 to 1"),
        (
            Zero(positions="0"),
            (1, 6, 2, 2),
            "1 range of positions for 'layer', whose shape 1x6x2x2 has 2 position axes",
        ),
        (
            Zero(positions="0x0"),
            (1, 6),
            "2 ranges of positions for 'layer', whose shape 1x6 has no position axis; leave",
        ),
    ],
)
def test_a_part_that_the_tensor_lacks_is_refused(change: Intervention, shape: tuple[int, ...], says: str) -> None:
    with refused(LayerError, says, part="begins"):
        change(CALL, torch.ones(shape))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_activation_stays_one() -> None:
    tensor = torch.quantize_per_tensor(torch.arange(24.0).reshape(1, 6, 2, 2), 0.5, 3, torch.quint8)
    found = Scale(2.0, channels="1-2")(CALL, tensor)
    assert (found.dtype, found.q_scale(), found.q_zero_point()) == (torch.quint8, 0.5, 3)
    judge = torch.arange(24.0).reshape(1, 6, 2, 2)
    judge[:, 1:3] *= 2
    assert torch.equal(found.dequantize(), judge)
    assert torch.equal(found.int_repr()[:, [0, 3, 4, 5]], tensor.int_repr()[:, [0, 3, 4, 5]])


def test_the_result_of_a_function_is_copied_and_none_keeps_the_tensor() -> None:
    given = torch.ones(2, 3)
    assert checked(None, given, "layer") is given
    own = torch.zeros(2, 3)
    assert torch.equal(checked(own, given, "layer"), own) and checked(own, given, "layer").data_ptr() != own.data_ptr()


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (torch.ones(3, 2), "the intervention at 'fc#1' returns shape 3x2; it got 2x3; return a tensor like it"),
        (torch.ones(()), "the intervention at 'fc#1' returns shape (); it got 2x3"),
        (torch.ones(2, 3).double(), "the intervention at 'fc#1' returns dtype float64; it got float32"),
        (torch.ones(2, 3).int(), "the intervention at 'fc#1' returns dtype int32; it got float32"),
        (torch.ones(2, 3, device="meta"), "the intervention at 'fc#1' returns device meta; it got cpu"),
        (5, "the intervention at 'fc#1' returns an int; it got a tensor; return one like it"),
        (torch.ones(2, 3).numpy(), "the intervention at 'fc#1' returns a ndarray; it got a tensor"),
    ],
)
def test_a_result_of_another_type_or_shape_is_refused(returned: Any, says: str) -> None:
    with refused(UsageError, says, part="begins"):
        checked(returned, torch.ones(2, 3), "fc#1")


@dataclass(frozen=True)
class Halved(Intervention):
    """An intervention of somebody's own."""

    wrongly: bool = False

    def change(self, site: Site, part: Tensor) -> Tensor:
        return part[:1] if self.wrongly else part / 2


def test_an_intervention_of_ones_own() -> None:
    assert Halved(channels=0)(CALL, torch.ones(2, 2)).tolist() == [[0.5, 1], [0.5, 1]]
    for channels, shape in ((None, "2x2"), (0, "2x1")):
        with pytest.raises(UsageError, match=f"at 'layer' returns shape 1x.; it got {shape}"):
            Halved(channels=channels, wrongly=True)(CALL, torch.ones(2, 2))


@pytest.mark.parametrize("strides", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("other", [torch.channels_last, torch.contiguous_format])
def test_new_values_take_the_memory_layout_of_the_old(strides: Any, other: Any) -> None:
    part = torch.randn(2, 6, 5, 5).contiguous(memory_format=strides).requires_grad_()
    values = torch.randn(2, 6, 5, 5).contiguous(memory_format=other)
    found = replaced(part, values)
    assert torch.equal(found, values) and found.stride() == part.stride() == laid_out_like(part, values).stride()
    assert replaced(part, values[:1].expand(2, -1, -1, -1)).stride() == part.stride()
    found.sum().backward()
    assert part.grad is not None and not bool(part.grad.any())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Zero(on="inside"), "no side 'inside' of a layer; there are output and input"),
        (lambda: Scale(math.nan), "factor=nan; give a finite number"),
        (lambda: Scale("2"), "factor='2' is not a number"),
        (lambda: Scale(1e39), "factor=1e+39 exceeds single precision"),
        (lambda: Noise(-1.0), "std=-1; give 0 or more"),
        (lambda: Noise(math.inf), "std=inf"),
        (lambda: Noise(1e39), "std=1e+39 exceeds"),
        (lambda: Clamp(), "clamp needs a bound; give min, max or both"),
        (lambda: Clamp(3, 1), "a clamp from 3 to 1; give a min of at most max"),
        (lambda: Clamp(math.nan), "min=nan; give a finite number"),
        (lambda: Clamp(max=[1]), r"max=[1] is not a number"),
        (lambda: Clamp(min=math.inf), "a clamp from inf to inf; give finite bounds"),
        (lambda: Clamp(-1e39, 0), "min=-1e+39 exceeds single precision"),
        (lambda: Quantize(0), "bits=0; give 1 to 16"),
        (lambda: Quantize(17), "bits=17"),
        (lambda: Quantize(1, symmetric=True), "bits=1; give 2 to 16"),
        (lambda: Quantize(2.5), "bits=2.5; give 1 to 16"),
        (lambda: Permute("rows"), "no value 'rows' of axis; choices: positions, channels, images"),
        (lambda: Mean(over="time"), "no value 'time' of over; choices: images, positions"),
        (lambda: Mean(torch.ones(1), over="positions"), "a mean over positions takes no source; leave the source out"),
        (lambda: Steer(torch.ones(1), math.nan), "scale=nan; give a finite number"),
        (lambda: DropBlock(-0.1), "p=-0.1 is not a share; give a number from 0 to 1"),
        (lambda: Dropout(1.01), "p=1.01 is not a share"),
        (lambda: Dropout(math.nan), "p=nan is not a share"),
        (lambda: Dropout("0.1"), "p='0.1' is not a number"),
        (lambda: Dropout(LinearSchedule(0, 2, 1)).at(1), "p=2.0 is not a share"),
        (lambda: LinearSchedule(0, 1, 0), "steps of a schedule must be an integer of at least 1, not 0"),
        (lambda: DropBlock(0.1, 4), "block_size=4; give an odd number, such as 7"),
        (lambda: DropBlock(0.1, 0), "block_size=0"),
        (lambda: DropBlock(0.1, -3), "block_size=-3"),
        (lambda: DropBlock(0.1, 3.0), "block_size=3.0"),
        (lambda: Dropout(when="eval"), "no value 'eval' of when; choices: train, always"),
        (lambda: DropBlock2d(p=lambda: 0.1), "the schedule of DropBlock2d takes (); it is called with (step)"),
        (lambda: Prune(norm="nuc"), "norm='nuc' is not a number; give a finite number"),
        (lambda: Prune(norm=None), "norm=None is not a number"),
        (lambda: Prune(norm=math.nan), "norm=nan; give a finite number"),
        (lambda: Prune(norm=0), "norm=0; give a number above 0, such as 1 or 2"),
        (lambda: Prune(norm=-math.inf), "norm=-inf; give a number above 0"),
        (lambda: Prune(math.nan), "amount=nan; give a finite number"),
        (lambda: Prune("0.5"), "amount='0.5' is not a number"),
        (lambda: Prune(1.5), "amount=1.5 is not a share; give a number from 0 to 1"),
    ],
)
def test_bad_values_are_refused(make: Any, says: str) -> None:
    with refused(UsageError, says, part="begins"):
        make()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Zero(), "Zero"),
        (Zero(channels=[0, 1, 2, 7], on="input"), "Zero(channels=0-2,7, on=input)"),
        (Zero(positions=((0, 9), (5, 5))), "Zero(positions=0-9x5)"),
        (Scale(0.5), "Scale(factor=0.5)"),
        (Noise(0.1), "Noise"),
        (Patch(torch.ones(3), channels=1), "Patch(channels=1)"),
        (Clamp(0, math.inf), "Clamp(min=0, max=inf)"),
    ],
)
def test_str_spells_the_parameters_that_differ_from_their_default(change: Intervention, text: str) -> None:
    assert str(change) == text


def test_the_names_in_errors_are_those_of_the_classes() -> None:
    assert str(Prune()) == "Prune(amount=0.5, dim=None, norm=2)" and str(Freeze()) == "Freeze()"
