"""Feature maps as tiles, and the forward pass that reduces outputs to them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from hookscope.drawing import colours
from hookscope.drawing.scale import LayerScale, Scale
from hookscope.drawing.tiles import (
    ChannelChoice,
    finite_extremes,
    input_frames,
    measure,
    reduce_maps,
    reduce_output,
    run_and_reduce,
)
from hookscope.errors import InputError, LayerError, NoMapError, SelectionError
from hookscope.hooks import as_float
from hookscope.models.load import load_model
from hookscope.models.loaded import LoadedModel, family_of
from hookscope.models.preprocess import Preprocess
from tests.helpers import hooks_on, refused
from tests.nets import Function

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
    [("0-2,7", [0, 1, 2, 7]), ("7, 0 - 2,1", [7, 0, 1, 2]), ("8-99999999999", [8, 9]), ("0:2,5", [0, 1, 5])],
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
    values[0, 0, 0], values[2, 0, 0] = math.nan, math.inf  # which are not strong
    assert ChannelChoice.parse("top:2").of(values) == [1, 3]


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "-1", "1,,2", "top:0", "top:", "top:3:median", "top:-1", "3:3", "1.5"]
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
    many = torch.full((3_000_000,), 0.1)
    assert measure(many)[1] == pytest.approx(float(many[0]), rel=1e-12)


def test_dead_channels_are_the_constant_ones() -> None:
    values = torch.manual_seed(0) and torch.randn(1, 6, 4, 4)
    values[0, 1], values[0, 2], values[0, 3], values[0, 4, 0, 0] = 0, 7, math.nan, math.nan
    summary = reduce_output(values, choice=ChannelChoice.parse("0"))
    assert (summary.dead, summary.nonfinite, summary.shape) == (2, 17, (1, 6, 4, 4))
    assert summary.parts[0].tiles.channels == [0]


def test_dead_channels_of_parts_add_up_of_items_must_agree_and_single_positions_are_never_dead() -> None:
    assert reduce_output(torch.zeros(1, 6, 1, 1)).dead == 0
    still, moving = torch.zeros(1, 3, 4, 4), torch.rand(1, 5, 4, 4)
    assert reduce_output({"a": still, "b": moving}).dead == 3
    assert reduce_output((still, still[:, :2], moving)).dead == 5
    assert reduce_output(torch.cat([still, moving[:, :3]])).dead == 0
    assert reduce_output(torch.cat([still, still])).dead == 3


def test_a_part_without_maps_is_not_measured() -> None:
    output = {"logits": torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]]), "labels": torch.tensor([999])}
    summary = reduce_output(output)
    assert (summary.low, summary.mean, summary.high) == (0.0, 1.5, 3.0)


class Small(nn.Module):
    """Two convolutions, the first overwritten in place and the second run twice, then a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.unused = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(1, 1, 1)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 2)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        x = self.conv2(self.conv2(x))
        self.passes += 1
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def net(model: nn.Module) -> LoadedModel:
    family = family_of(model)
    return LoadedModel(model.eval(), "net", "none", Preprocess(family), None, family, "cpu")


@pytest.fixture
def small() -> LoadedModel:
    return net(Small())


PICTURE = torch.manual_seed(3) and torch.rand(3, 12, 14)


def test_summaries_describe_the_returned_values(small: LoadedModel) -> None:
    result = run_and_reduce(small, [PICTURE])
    assert [(call.key, call.index) for call, _ in result.summaries] == [("conv1", 0), ("conv2", 1), ("conv2#1", 2)]
    assert result.did_not_run == ("unused",)
    assert result.without_map == ()
    with torch.no_grad():
        first = small.model.conv1(PICTURE[None])
        second = small.model.conv2(first.relu())
        third = small.model.conv2(second)
    for (_, summary), expected in zip(result.summaries, (first, second, third), strict=True):
        assert (summary.low, summary.high) == (float(expected.min()), float(expected.max()))
        assert summary.mean == pytest.approx(float(expected.mean()), rel=1e-5)
        assert summary.parts[0].tiles.low.tolist() == expected[0].double().amin((1, 2)).tolist()
    assert hooks_on(small.model) == 0


def test_the_pass_ends_after_the_last_selected_call(small: LoadedModel) -> None:
    run_and_reduce(small, [PICTURE], "0")
    run_and_reduce(small, [PICTURE], "conv2#0")
    assert small.model.passes == 0
    run_and_reduce(small, [PICTURE], "-1")
    assert small.model.passes == 1


@pytest.mark.parametrize(("layers", "keys"), [("-1", ["conv2#1"]), ("::2", ["conv1", "conv2#1"]), (1, ["conv2"])])
def test_selections(small: LoadedModel, layers: str | int, keys: list[str]) -> None:
    assert [call.key for call, _ in run_and_reduce(small, [PICTURE], layers).summaries] == keys


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_gives_what_the_processor_gives() -> None:
    values = []
    for device in ("cpu", "cuda"):
        loaded = load_model("squeezenet1_1", weights="none", device=device)
        picture = loaded.preprocess(Image.new("RGB", (80, 80), (200, 100, 50)))
        values.append([summary.mean for _, summary in run_and_reduce(loaded, [picture]).summaries])
    assert values[0] == pytest.approx(values[1], rel=1e-2, abs=1e-4)


def test_channels_and_scale_reach_the_tiles(small: LoadedModel) -> None:
    result = run_and_reduce(small, [PICTURE], "0", choice=ChannelChoice.parse("2,1"), scale=Scale.parse("0:1"))
    tiles = result.summaries[0][1].parts[0].tiles
    assert (tiles.channels, tiles.scale) == ([2, 1], "0:1")


def test_a_vector_is_drawn_and_an_output_without_channels_is_an_error(small: LoadedModel) -> None:
    result = run_and_reduce(small, [PICTURE], ["0", "fc"])
    assert [(call.key, summary.shape) for call, summary in result.summaries][1:] == [("fc", (1, 2))]
    sums = net(nn.Sequential(nn.Conv2d(3, 4, 3), Function(torch.sum)))
    ((call, error),) = run_and_reduce(sums, [PICTURE], ["0", "1"], types=["all"]).without_map
    assert (call.key, error.asked) == ("1", "the output is a single number, not a feature map")
    words = r"nothing to draw in 1 \(Function\): the output is a single number, not a feature map; layers with"
    with pytest.raises(NoMapError, match=words):
        run_and_reduce(sums, [PICTURE], "1", types=["all"])
    assert hooks_on(small.model) == 0


def test_class_names_go_to_the_layers_whose_channels_are_classes() -> None:
    hidden = nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Conv2d(10, 6, 1))  # ten channels, as many as classes
    head = nn.Sequential(nn.Flatten(1), nn.Linear(6 * 10 * 12, 16), nn.ReLU(), nn.Linear(16, 10), nn.Softmax(1))
    loaded = replace(net(nn.Sequential(hidden, head)), categories=tuple("abcdefghij"))
    result = run_and_reduce(loaded, [PICTURE], "all", types=["all"])
    named = {call.key: summary.parts[0].names for call, summary in result.summaries if summary.parts[0].names}
    assert named == dict.fromkeys(["1.3", "1.4"], tuple("abcdefghij"))


def test_a_detector_has_the_classes_of_each_anchor() -> None:
    layers = {"hidden": nn.Conv2d(3, 6, 1), "cls_logits": nn.Conv2d(6, 6, 1)}
    scores = Function(lambda net, images: net.cls_logits(net.hidden(images[0][None])), **layers)
    loaded = replace(net(scores), categories=("cat", "dog", "hen"), family="detection")
    (_, hidden), (_, head) = run_and_reduce(loaded, [PICTURE]).summaries
    assert hidden.parts[0].names == ()
    assert head.parts[0].names[2:4] == ("hen, anchor 0", "cat, anchor 1")


@pytest.mark.parametrize(
    ("layers", "choice", "error", "words"),
    [
        ("99", None, LayerError, "no index 99; there are 3 Conv2d calls: 0 to 2"),
        ("conv3", None, LayerError, "no layer 'conv3' in Small; nearest: conv2, conv1"),
        ("0", "7-9", LayerError, "no channel 7-9 in conv1; there are 4: 0 to 3"),
        ("unused", None, NoMapError, "nothing to draw: unused did not run; choose another layer"),
    ],
)
def test_errors_name_the_choice(
    small: LoadedModel, layers: str, choice: str | None, error: type[Exception], words: str
) -> None:
    with refused(error, words, part="begins"):
        run_and_reduce(small, [PICTURE], layers, choice=ChannelChoice.parse(choice) if choice else None)
    assert hooks_on(small.model) == 0


def test_an_image_that_the_model_refuses(small: LoadedModel) -> None:
    words = r"net: layer 'conv1' \(Conv2d\) needs a larger input; forward\(\) failed on 3x1x1: .*; try another"
    with pytest.raises(InputError, match=words):
        run_and_reduce(small, [PICTURE[:, :1, :1]])
    assert hooks_on(small.model) == 0


def fails_with(error: BaseException) -> Any:
    def fail(*inputs: Any) -> Any:
        raise error

    return Function(fail)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), RuntimeError),
        (SystemExit(143), SystemExit),  # the command turns SIGTERM into an exit
        (SystemExit(0), InputError),
    ],
    ids=["memory", "signal", "exit"],
)
def test_only_a_model_that_ends_the_program_is_an_input_error(error: BaseException, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=r"can't allocate memory|143|ends the program"):
        run_and_reduce(net(fails_with(error)), [PICTURE], types=["Function"])


def test_input_frames_are_what_the_network_receives(small: LoadedModel) -> None:
    ((picture,),) = input_frames(small, [PICTURE])
    assert (picture.size, picture.mode) == ((14, 12), "RGB")
    video = net(nn.Sequential(nn.Conv3d(3, 1, 1)))
    clip = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)], 1)
    (frames,) = input_frames(video, [clip])
    assert [frame.getpixel((0, 0)) for frame in frames] == [(0, 0, 0), (255, 255, 255)]


def test_the_input_frame_of_a_detector_has_its_own_size() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 8, 1))
    backbone.out_channels = 4  # type: ignore[assignment]
    anchors = torchvision.models.detection.rpn.AnchorGenerator(((16,),), ((1.0,),))
    pooler = torchvision.ops.MultiScaleRoIAlign(["0"], 3, 2)
    model = torchvision.models.detection.FasterRCNN(
        backbone, 2, min_size=64, max_size=64, rpn_anchor_generator=anchors, box_roi_pool=pooler
    )
    detector = net(model)
    assert detector.family == "detection"
    ((picture,),) = input_frames(detector, [torch.full((3, 40, 80), 0.5)])
    assert picture.size == (64, 32)
    assert all(abs(part - 127) <= 1 for part in picture.getpixel((20, 20)))
    result = run_and_reduce(detector, [torch.rand(3, 40, 80)])
    assert result.summaries[0][0].name == "backbone.0"
    assert result.summaries[0][1].shape == (1, 4, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "types", "count"),
    [
        ("raft_small", ("Conv2d",), 100),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", ("Conv2d",), 60),
        ("lraspp_mobilenet_v3_large", ("Conv2d",), 60),
        ("r3d_18", ("Conv3d",), 20),
        ("quantized_mobilenet_v2", ("Conv2d",), 50),
        ("swin_t", ("LayerNorm",), 20),
        ("vit_b_32", ("LayerNorm", "Conv2d"), 20),
        ("mvit_v2_s", ("LayerNorm",), 20),
    ],
)
def test_every_family_runs(name: str, types: tuple[str, ...], count: int) -> None:
    loaded = load_model(name, weights="none")
    photograph = Image.effect_noise((256, 256), 90).convert("RGB")
    pictures = [loaded.preprocess(photograph)] * (2 if loaded.family == "optical_flow" else 1)
    result = run_and_reduce(loaded, pictures, "all", types)
    assert len(result.summaries) >= count
    assert hooks_on(loaded.model) == 0
