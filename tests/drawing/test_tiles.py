"""Feature maps as one byte a value, and an output measured."""

import math

import pytest
import torch
from torch import Tensor

from hookscope.drawing import colours
from hookscope.drawing.scale import LayerScale, Scale
from hookscope.drawing.tiles import ChannelChoice, finite_extremes, measure, reduce_maps, reduce_output
from hookscope.errors import LayerError, NoMapError, SelectionError
from hookscope.hooks import as_float

TOP = colours.LEVELS - 1


def slow_level(value: float, low: float, high: float) -> int:
    if math.isnan(value):
        return colours.NAN
    if math.isinf(value):
        return colours.PLUS_INF if value > 0 else colours.MINUS_INF
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else float(value > low)
    return round(min(max(share, 0.0), 1.0) * TOP)


def assert_levels(values: Tensor, scale: str, bounds: list[tuple[float, float]]) -> None:
    tiles = reduce_maps(values, scale=Scale.parse(scale))
    assert tiles.low.tolist() == pytest.approx([low for low, _ in bounds], rel=1e-6)
    assert tiles.high.tolist() == pytest.approx([high for _, high in bounds], rel=1e-6)
    for channel, (low, high) in enumerate(bounds):
        for value, level in zip(values[channel].flatten().tolist(), tiles.levels[channel].flatten(), strict=True):
            assert abs(slow_level(value, low, high) - int(level)) <= (abs(value - low) > 0), (channel, value)


def own_bounds(values: Tensor) -> list[tuple[float, float]]:
    finite = [[v for v in channel.flatten().tolist() if math.isfinite(v)] for channel in values]
    return [(min(channel), max(channel)) for channel in finite]


RANDOM = torch.manual_seed(0) and torch.randn(5, 6, 7)


@pytest.mark.parametrize(
    "values",
    [
        RANDOM,
        RANDOM * 1e-38,
        RANDOM.double() * 1e-310,
        RANDOM * 1e37,
        RANDOM.double() * 3e307,
        RANDOM + 1000,
        RANDOM.double() + 1e9,
        -torch.rand(2, 3, 3) - 4,
        torch.tensor([[[-3e38, 3e38, 0.0]]]),
        torch.tensor([[[-1.7e308, 1.7e308, 0.0]]], dtype=torch.float64),
        torch.where(RANDOM > 1, math.nan, torch.where(RANDOM < -1, -math.inf, RANDOM)),
    ],
    ids=["plain", "tiny", "subnormal", "huge", "huger", "offset", "far", "negative", "wide", "widest", "broken"],
)
def test_each_map_has_its_own_range(values: Tensor) -> None:
    assert_levels(values, "channel", own_bounds(values))


def test_shared_scales() -> None:
    low, high = float(RANDOM.min()), float(RANDOM.max())
    assert_levels(RANDOM, "layer", [(low, high)] * 5)
    widest = max(abs(low), abs(high))
    assert_levels(RANDOM, "symmetric", [(-widest, widest)] * 5)
    assert_levels(RANDOM, "-0.5:1.5", [(-0.5, 1.5)] * 5)
    assert_levels(RANDOM, "percentile:10,100", [(float(RANDOM.quantile(0.1)), high)] * 5)
    for name in ("layer", "symmetric", "percentile:1,99", "0:1"):
        tiles = reduce_maps(RANDOM, scale=Scale.parse(name))
        assert (tiles.shared, tiles.scale) == (True, name)
    assert not reduce_maps(RANDOM).shared


def test_bounds_that_a_float_does_not_hold_are_kept() -> None:
    values = 1000 + torch.arange(-4.0, 12.0).view(1, 4, 4) * 2**-14
    assert_levels(values, "1000.00001:1000.0005", [(1000.00001, 1000.0005)])


def test_a_shared_scale_counts_channels_that_are_not_drawn() -> None:
    values = torch.tensor([[[0.0, 1.0]], [[0.0, 10.0]]])
    tiles = reduce_maps(values, ChannelChoice.parse("0"), LayerScale())
    assert (tiles.high.tolist(), tiles.levels.tolist()) == ([10.0], [[[0, round(TOP / 10)]]])


def test_equal_percentiles_still_separate_higher_values() -> None:
    values = torch.zeros(1, 10, 10)
    values[0, 0, 0], values[0, 0, 1] = 5, -5
    levels = reduce_maps(values, scale=Scale.parse("percentile:2,98")).levels
    assert (levels[0, 0, 0], levels[0, 0, 1], levels[0, 5, 5]) == (TOP, 0, 0)


def test_constant_maps_are_marked_and_keep_their_value() -> None:
    values = torch.stack([torch.zeros(2, 2), torch.full((2, 2), 7.0), torch.arange(4.0).view(2, 2)])
    tiles = reduce_maps(values)
    assert tiles.constant.tolist() == [True, True, False]
    assert set(tiles.levels[:2].ravel()) == {colours.CONSTANT}
    assert tiles.low.tolist() == [0, 7, 0]
    assert tiles.strength.tolist() == [0, 0, 3]
    shared = reduce_maps(values, scale=LayerScale())
    assert [set(levels.ravel()) for levels in shared.levels[:2]] == [{0}, {TOP}]
    assert shared.constant.tolist() == [True, True, False]


def test_single_positions_share_the_scale_of_the_layer() -> None:
    tiles = reduce_maps(torch.tensor([-2.0, 0.0, 2.0]).view(3, 1, 1))
    assert (tiles.shared, tiles.scale) == (True, "layer")
    assert tiles.levels.ravel().tolist() == [0, round(TOP / 2), TOP]
    assert tiles.strength.tolist() == [2, 0, 2]
    assert not tiles.constant.any()
    assert reduce_maps(torch.ones(3, 1, 1), scale=Scale.parse("0:2")).scale == "0:2"


def test_maps_without_a_finite_value() -> None:
    values = torch.tensor([[[math.nan, math.nan]], [[math.inf, -math.inf]], [[1.0, 2.0]], [[3.0, math.nan]]])
    for scale in ("channel", "layer", "symmetric", "percentile:1,99", "0:1"):
        tiles = reduce_maps(values, scale=Scale.parse(scale))
        assert tiles.nonfinite.tolist() == [2, 2, 0, 1]
        assert tiles.levels[0].tolist() == [[colours.NAN] * 2]
        assert tiles.levels[1].tolist() == [[colours.PLUS_INF, colours.MINUS_INF]]
        assert tiles.levels[3, 0, 1] == colours.NAN
        assert tiles.levels[3, 0, 0] < colours.LEVELS
        assert not tiles.constant.any()
        assert tiles.strength.tolist() == [0, 0, 1, 0]
    for scale in ("channel", "layer", "symmetric", "percentile:1,99"):
        assert set(reduce_maps(values[:1], scale=Scale.parse(scale)).levels.ravel()) == {colours.NAN}


def test_finite_extremes() -> None:
    low, high, bad = finite_extremes(torch.tensor([[[1.0, 3.0]], [[math.nan, 2.0]], [[math.inf, math.nan]]]))
    assert (low.tolist(), high.tolist(), bad.tolist()) == ([1, 2, math.inf], [3, 2, -math.inf], [0, 1, 2])
    assert low.dtype == high.dtype == torch.float64


SOURCE = torch.tensor([[[0, 1], [1, 0]], [[0, 3], [7, 100]]])


@pytest.mark.parametrize(
    "tensor",
    [
        *(SOURCE.to(dtype) for dtype in (torch.bfloat16, torch.half, torch.int64, torch.uint8, torch.float8_e4m3fn)),
        SOURCE.ne(0),
        SOURCE * (3 + 4j) / 5,
        SOURCE.float().to_sparse(),
        SOURCE.float().requires_grad_(),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_every_type_of_number_has_levels(tensor: Tensor) -> None:
    expected = tensor.detach().to_dense().abs().float() if tensor.is_complex() else tensor.detach().to_dense().float()
    values = as_float(tensor)
    torch.testing.assert_close(values, expected, check_dtype=False)
    assert (reduce_maps(values).levels == reduce_maps(expected).levels).all()


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*:UserWarning")
def test_quantised_numbers_are_decoded() -> None:
    values = as_float(torch.quantize_per_tensor(SOURCE.float(), 0.5, 3, torch.quint8))
    assert torch.equal(values, SOURCE.float())


def test_the_values_are_left_as_they_were() -> None:
    values = RANDOM.clone()
    reduce_maps(values, scale=LayerScale())
    reduce_maps(values)
    assert torch.equal(values, RANDOM)


def test_nothing_to_draw() -> None:
    for shape in ((0, 3, 3), (3, 0, 3), (3, 3, 0)):
        with pytest.raises(NoMapError, match="has no values"):
            reduce_maps(torch.zeros(shape))


@pytest.mark.parametrize(
    ("text", "channels"),
    [("0-2,7", [0, 1, 2, 7]), ("7, 0 - 2,1", [7, 0, 1, 2]), ("8-99999999999", [8, 9])],
)
def test_channels_by_number(text: str, channels: list[int]) -> None:
    values = torch.zeros(10, 1, 1)
    assert ChannelChoice.parse(text).of(values) == channels
    assert ChannelChoice().of(values) == list(range(10))
    with pytest.raises(LayerError, match="no channel 10,12-20; there are 10: 0 to 9"):
        ChannelChoice.parse("10,12-20").of(values)


@pytest.mark.parametrize(
    ("text", "channels"),
    [
        ("top:2", [1, 3]),
        ("top:3:abs", [1, 3, 2]),
        ("top:2:max", [1, 2]),
        ("top:2:std", [1, 2]),
        ("top:1:mean", [2]),
        ("top:99", [1, 3, 2, 0]),
    ],
)
def test_channels_by_strength(text: str, channels: list[int]) -> None:
    values = torch.tensor([[[1.0, 1.0]], [[-9.0, 7.0]], [[4.0, 4.5]], [[-5.0, -5.0]]])
    assert ChannelChoice.parse(text).of(values) == channels


def test_nan_and_inf_are_not_strong() -> None:
    values = torch.tensor([[[math.nan, 1.0]], [[-9.0, 7.0]], [[math.inf, 4.5]], [[-5.0, -5.0]]])
    assert ChannelChoice.parse("top:2").of(values) == [1, 3]


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "-1", "1,,2", "top:0", "top:", "top:3:median", "top:-1", "0:3", "1.5"]
)
def test_texts_that_are_no_channels(text: str) -> None:
    with pytest.raises(SelectionError, match="bad channels"):
        ChannelChoice.parse(text)


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
