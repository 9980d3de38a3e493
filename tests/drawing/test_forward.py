"""One pass, each wanted output reduced inside its hook."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from hookscope.drawing.scale import Scale
from hookscope.drawing.tiles import ChannelChoice, input_frames, run_and_reduce
from hookscope.errors import InputError, LayerError, NoMapError
from hookscope.models.load import load_model
from hookscope.models.loaded import LoadedModel, family_of
from hookscope.models.preprocess import Preprocess
from tests.helpers import hooks_on
from tests.nets import Function


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
    words = (
        r"nothing to draw in 1 \(Function\): the output is a single number, not a feature map; layers with feature ma"
    )
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
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.cls_logits = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1)

        def forward(self, images: list[Tensor]) -> Tensor:
            out: Tensor = self.cls_logits(self.hidden(images[0][None]))
            return out

    loaded = replace(net(Head()), categories=("cat", "dog", "hen"), family="detection")
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
    with pytest.raises(error) as caught:
        run_and_reduce(small, [PICTURE], layers, choice=ChannelChoice.parse(choice) if choice else None)
    assert words in str(caught.value)
    assert hooks_on(small.model) == 0


def test_an_image_that_the_model_refuses(small: LoadedModel) -> None:
    with pytest.raises(
        InputError,
        match=r"net: layer 'conv1' \(Conv2d\) needs a larger input; forward\(\) failed on 3x1x1: .*; try another",
    ):
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
