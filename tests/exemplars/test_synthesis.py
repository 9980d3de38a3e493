"""Images made by gradient ascent: what they excite, repeat and leave as it was; and what docs/ say of `shapes`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.transforms.functional import pil_to_tensor

import hookscope
from hookscope.errors import UsageError
from hookscope.exemplars import add_synthesized, save_synthesized, synthesize_images
from hookscope.hooks import ModelSnapshot
from hookscope.models import LoadedModel
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.transforms import Normalisation, Resize, Transforms
from tests.helpers import settings

ROOT = Path(__file__).parents[2]
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def net_of(*layers: nn.Module, size: int = 16) -> LoadedModel:
    transforms = Transforms(Resize("shorter", (size + 4,), (size, size)), Normalisation(mean=MEAN, std=STD))
    metadata = WeightsMetadata(transforms=transforms, input_size=(3, size, size))
    return LoadedModel.of(nn.Sequential(*layers).eval(), "net.py:net", "random (seed 0)", metadata)


def colour_detector(*weights: tuple[float, float, float]) -> nn.Conv2d:
    layer = nn.Conv2d(3, len(weights), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weights)[:, :, None, None])
    return layer


@pytest.mark.parametrize("measure", ["max", "mean", "abs"])
def test_the_image_has_the_colour_that_a_channel_detects(measure: str) -> None:
    net = net_of(colour_detector((1, -1, 0), (-1, 0, 1)))
    made = synthesize_images(net, "0", [0, 1], steps=30, measure=measure)
    first, second = (np.asarray(made[channel][0].image, np.float32) for channel in (0, 1))
    differences = first[..., 0] - first[..., 1], second[..., 2] - second[..., 0]
    if measure == "mean":
        assert all(each.mean() > 20 for each in differences)
    else:
        assert all(abs(each[8, 8]) > 150 and (measure == "abs" or each[8, 8] > 0) for each in differences)


@pytest.mark.parametrize("measure", ["max", "mean", "abs"])
def test_the_value_is_that_of_the_saved_pixels(measure: str) -> None:
    layer = nn.Conv2d(3, 4, 3, padding=1)
    [made] = synthesize_images(net_of(layer, nn.ReLU(inplace=True)), "0", [2], steps=5, measure=measure)[2]
    pixels = pil_to_tensor(made.image).double() / 255
    mean, std = (torch.tensor(numbers, dtype=torch.double)[:, None, None] for numbers in (MEAN, STD))
    with torch.no_grad():
        values = layer.double()(((pixels - mean) / std)[None])[0, 2]
    expected = {"max": values.max(), "mean": values.mean(), "abs": values.abs().max()}[measure]
    assert made.value == pytest.approx(float(expected), rel=1e-5)


def test_a_seed_repeats_an_image_bit_by_bit_and_another_does_not(shapes: LoadedModel) -> None:
    first, again = (synthesize_images(shapes, "features.3", [7], count=2, steps=3, seed=4)[7] for _ in range(2))
    assert [each.seed for each in first] == [4, 5]
    assert [each.image.tobytes() for each in first] == [each.image.tobytes() for each in again]
    assert first[0].image.tobytes() != first[1].image.tobytes()
    [alone] = synthesize_images(shapes, "features.3", [7], steps=3, seed=5)[7]
    assert alone.image.tobytes() == first[1].image.tobytes()


class _Raises(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.requires_grad:
            raise ValueError("broken")
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_random_states_stay_as_they_are(fails: bool) -> None:
    net = net_of(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), _Raises() if fails else nn.Identity())
    net.model.train()
    net.model[0].weight.requires_grad_(False)
    net.model[1].weight.grad = torch.ones(4)
    before = ModelSnapshot(net.model)
    with torch.no_grad():
        if fails:
            with pytest.raises(hookscope.HookscopeError, match="broken"):
                synthesize_images(net, "name:3", [1], steps=2)
        else:
            assert synthesize_images(net, "name:3", [1], steps=2)[1]
        assert not torch.is_grad_enabled()
    assert before.changes() == []


def test_a_dead_channel_has_no_image() -> None:
    net = net_of(colour_detector((0, 0, 0), (1, 0, 0)), nn.ReLU())
    made = synthesize_images(net, "name:1", [0, 1], steps=2)
    assert made[0] == () and len(made[1]) == 1


def test_a_channel_behind_a_relu_starts_from_noise_that_reaches_it() -> None:
    first = nn.Conv2d(3, 1, 1)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([1.0, 0, 0])[None, :, None, None])
        first.bias.fill_(-1.5)  # fires above red 0.7; the mean is 0.4, grey is 0.5
    [made] = synthesize_images(net_of(first, nn.ReLU()), "name:1", [0], steps=30)[0]
    assert made.value > 1


def test_an_image_that_is_too_weak_is_tried_again_and_said_to_be_weak() -> None:
    net = net_of(colour_detector((1, 0, 0)))  # at most (1 - 0.4) / 0.2 = 3
    counts: list[int] = []
    found = synthesize_images(net, "0", [0], best={0: 3.5}, steps=2, tries=2, on_progress=counts.append)
    assert found[0][0].value <= 3.0001 and not found[0][0].is_enough and counts == [0, 1]
    assert synthesize_images(net, "0", [0], best={0: 1.0}, steps=30)[0][0].is_enough


def test_tokens_and_vectors_are_excited_too() -> None:
    class Tokens(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.flatten(2).transpose(1, 2)

    net = net_of(nn.Conv2d(3, 5, 4, 4), Tokens(), nn.Linear(5, 6), nn.Flatten(), nn.Linear(96, 7))
    for layer in ("name:2", "name:4"):
        some = [synthesize_images(net, layer, [3], steps=steps)[3][0].value for steps in (1, 30)]
        assert some[1] > some[0]


def test_the_best_exemplar_of_a_layer_is_exceeded(shapes: LoadedModel) -> None:
    [found] = hookscope.find_exemplars(shapes, ["samples/shapes/star.png"], layers="features.3", channels=[3, 9])
    added = add_synthesized(shapes, found, [3], steps=12)
    [made] = added.channels[0].synthesized
    assert made.best == found.channels[0].most[0].value and made.is_enough
    assert added.channels[1].synthesized == () and not added.channels[1].unreached


def test_stored_images_are_dropped_where_a_better_exemplar_was_found(shapes: LoadedModel, tmp_path: Path) -> None:
    path, names = tmp_path / "state.json", [f"samples/shapes/{name}.png" for name in ("ring", "star", "cross")]
    options: dict[str, Any] = {"layers": "features.0", "channels": range(6), "top": 1, "save": path}
    [first] = hookscope.find_exemplars(shapes, names[:1], **options)
    added = add_synthesized(shapes, first, steps=1)
    save_synthesized(path, [added])
    stored = hookscope.read_exemplars(path)[0].channels
    for made, read in zip(added.channels, stored, strict=True):
        assert [(each.value, each.best, each.seed) for each in made.synthesized] == [
            (each.value, each.best, each.seed) for each in read.synthesized
        ]
        assert made.unreached == read.unreached
        assert all(np.array_equal(a.image, b.image) for a, b in zip(made.synthesized, read.synthesized, strict=True))
    [longer] = hookscope.find_exemplars(shapes, names, **options, resume=True)
    better = [a.most[0].value > b.most[0].value for a, b in zip(longer.channels, added.channels, strict=True)]
    kept = [0 if is_better else len(b.synthesized) for is_better, b in zip(better, added.channels, strict=True)]
    assert any(better) and sum(kept) and [len(each.synthesized) for each in longer.channels] == kept


def test_the_value_of_an_exemplar_is_measured_alike(shapes: LoadedModel, tmp_path: Path) -> None:
    [made] = synthesize_images(shapes, "features.3", [3], steps=2)[3]
    made.image.save(tmp_path / "made.png")
    [found] = hookscope.find_exemplars(shapes, [str(tmp_path / "made.png")], layers="features.3", channels=[3])
    assert found.channels[0].most[0].value == made.value


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"channels": [9]}, "no channel 9.*2 channels"),
        ({"layer": "*"}, "one layer is needed"),
        ({"measure": "median"}, "unknown measure 'median'"),
        ({"steps": 0}, "steps must be an integer of at least 1, not 0"),
        ({"part": "boxes"}, "no output 'boxes'"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"layer": "0", "channels": [0], "steps": 1} | changes
    with pytest.raises(UsageError, match=says):
        synthesize_images(net_of(colour_detector((1, 0, 0), (0, 1, 0)), nn.ReLU()), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["features.3", "features.6", "features.10"])
def test_nine_of_ten_channels_of_shapes_are_excited_more_than_by_any_drawn_picture(
    shapes: LoadedModel, layer: str, tmp_path: Path
) -> None:
    runpy.run_path(str(ROOT / "samples/shapes/draw.py"))["write"](tmp_path, 5, range(500))
    some = range(0, 120, 3)
    [found] = hookscope.find_exemplars(shapes, [str(tmp_path)], layers=layer, channels=some, top=1, run=settings(32))
    made = [each for each in add_synthesized(shapes, found).channels if not each.unreached]
    assert sum(each.synthesized[0].is_enough for each in made) >= 0.9 * len(made) > 30


@pytest.mark.slow
def test_most_channels_of_a_late_layer_belong_to_one_or_two_shapes(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "samples/shapes/draw.py"))["write"](tmp_path, 11, range(1000), by_class=True)
    rows = re.findall(
        r"^\| `(\S+)` \| (\d+)×\d+ \| (\d+) \| (\d+) \| (\d+) \| (\S+) \|$",
        (ROOT / "docs/howto/exemplars.md").read_text(),
        re.MULTILINE,
    )
    net = hookscope.load_model("shapes")
    found = hookscope.find_exemplars(net, [str(tmp_path)], layers=[row[0] for row in rows], run=settings(32))
    for layer, (name, field, channels, two, one, median) in zip(found, rows, strict=True):
        shapes = [len(channel.classes) for channel in layer.channels]
        assert (layer.call.name, layer.field.size[0], len(shapes)) == (name, int(field), int(channels))
        assert all(len(channel.most) == 9 for channel in layer.channels)
        counts = sum(each <= 2 for each in shapes), sum(each == 1 for each in shapes)
        assert counts == pytest.approx((int(two), int(one)), abs=3)  # values that are nearly equal may change places
        selectivity = [channel.selectivity for channel in layer.channels if channel.selectivity is not None]
        assert np.median(selectivity) == pytest.approx(float(median), abs=0.01)
        if name == "features.10":
            assert 2 * counts[0] >= len(shapes)
