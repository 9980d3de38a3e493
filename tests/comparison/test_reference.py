"""A model against a reference: the numbers by NumPy, the place by faults that are planted here."""

import copy
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookscope.comparison import AgainstReference, against_reference, check_shifts
from hookscope.errors import InputError
from hookscope.hooks import MODEL, Call
from hookscope.inspection import inspect
from hookscope.models import as_loaded
from hookscope.statistics import SavedStatistics, StatisticsCollector, held_by, load_statistics
from tests.nets import Function


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AvgPool2d(4),
        nn.Flatten(), nn.Linear(32, 5),
    ).eval()  # fmt: skip


def images(count: int, seed: int) -> torch.Tensor:
    """Pictures whose colours, contrast and grain differ from each other, with more red than blue."""
    generator = torch.Generator().manual_seed(seed)
    size, colours, contrast = (count, 3, 1, 1), torch.tensor([0.7, 0.5, 0.3])[:, None, None], torch.rand(count, 1, 1, 1)
    level = colours + 0.1 * torch.randn(size, generator=generator)
    return level + (0.1 + 0.1 * contrast) * torch.randn((count, 3, 12, 12), generator=generator)


def saved(model: nn.Module, pictures: torch.Tensor, batch: int = 8) -> SavedStatistics:
    with StatisticsCollector(model, ranges=True) as collector, torch.no_grad():
        for part in pictures.split(batch):
            model(part)
    return SavedStatistics.of(as_loaded(model), collector.totals)


def against(model: nn.Module, pictures: torch.Tensor, reference: SavedStatistics | None = None) -> AgainstReference:
    return against_reference(saved(model, pictures, 3), reference or saved(net(), images(48, 0)))


def test_the_numbers_of_a_channel_are_those_of_numpy() -> None:
    pictures = images(10, 3)
    found = saved(net(), pictures, 4).totals.ranges["(input)"]
    values = pictures.double().numpy().reshape(10, 3, -1)
    numbers = [values.mean(2), values.std(2), values.max(2), np.sqrt((np.diff(values) ** 2).mean(2))]
    for row, expected in enumerate(numbers):
        assert found.mean[row] == pytest.approx(expected.mean(0), rel=1e-5)
        assert found.m2[row] == pytest.approx(expected.var(0) * 10, rel=1e-3)
    # three channels are their own mixtures
    assert found.mixed == pytest.approx(found.mean[:2])
    for row, expected in enumerate(numbers[:2]):
        assert found.mixed_m2[row] == pytest.approx(np.cov(expected.T) * 9, rel=1e-3, abs=1e-6)
    assert found.low == pytest.approx(values.min((0, 2))) and found.images == 10


def test_the_model_itself_is_measured_and_a_container_that_hands_on_is_not() -> None:
    nested = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)), nn.Identity(), nn.Flatten())
    assert list(saved(nested, images(4, 1)).totals.ranges) == [
        "(input)", "0.0", "0.1", "2", "(model)", "(model) answers"
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_sound_model_on_other_images_is_in_its_range(seed: int, count: int) -> None:
    found = against(net(), images(count, 100 + seed))
    assert found.finding is None and max(shift.times for shift in found.calls) < 1
    assert found.sentence.startswith("all 10 calls are in the range of the reference")
    assert not check_shifts(found).broken and not check_shifts(found, 0.0, 0.0).broken


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        ("0", lambda model: model[0].weight.data.mul_(2)),
        ("1", lambda model: model[1].running_var.fill_(9.0)),
        ("3", lambda model: model[3].reset_parameters()),
        ("3", lambda model: model[3].weight.data.neg_()),
        ("7", lambda model: model[7].bias.data.add_(1)),
        ("7", lambda model: model[7].weight.data.mul_(0.01)),
    ],
)
@pytest.mark.parametrize("count", [4, 12])
def test_the_layer_that_changed_is_named(layer: str, change: object, count: int) -> None:
    model = net()
    change(model)  # type: ignore[operator]
    found = against(model, images(count, 7))
    assert found.finding is not None and found.finding.severity == "error"
    assert found.finding.layer == layer
    assert ("order of colours" in found.finding.meaning) == (layer == "0")
    [first, *_] = check_shifts(found).broken
    assert first.layer == found.finding.layer and first.value is not None and first.value > 1


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("reverse order", lambda pictures: pictures.flip(1)),
        ("times as large as", lambda pictures: pictures * 255),
        ("what chance explains with so few images", lambda pictures: pictures * 0.3),
    ],
)
def test_the_input_is_the_cause_before_all_layers(words: str, change: object) -> None:
    found = against(net(), change(images(8, 7)))  # type: ignore[operator]
    assert found.finding is not None and not found.finding.layer and words in found.finding.evidence
    assert found.finding.meaning.startswith("The model gets other values")


def on_the_same_images(model: nn.Module, now: torch.Tensor, before: torch.Tensor) -> AgainstReference:
    sides = saved(net(), before), saved(model, now, 3)
    for number, side in enumerate(sides):
        order = range(len(before)) if number else reversed(range(len(before)))
        side.totals.pictures.extend(order)
    return against_reference(sides[1], sides[0])


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        ("1", lambda model: model[1].weight.data[3].mul_(1.3)),
        ("3", lambda model: model[3].weight.data.mul_(1.1)),
        ("7", lambda model: model[7].bias.data.add_(0.02)),
        ("5", lambda model: setattr(model[5], "forward", nn.MaxPool2d(4).forward)),
    ],
)
def test_the_same_images_show_small_changes(layer: str, change: object) -> None:
    model, pictures = net(), images(16, 7)
    change(model)  # type: ignore[operator]
    found = on_the_same_images(model, pictures, pictures)
    assert found.finding is not None and (found.finding.layer, found.finding.severity) == (layer, "error")
    assert [each.layer for each in check_shifts(found).broken] == [layer]


def test_the_same_images_show_every_channel_that_died() -> None:
    model, pictures = net(), images(16, 7)
    model[1].bias.data[2] = -3  # below 0 for all these images, by little
    found = on_the_same_images(model, pictures, pictures)
    assert next(each.dead for each in found.calls if each.key == "2") == (2,)
    [broken] = check_shifts(found, max_dead_more=0.1).broken
    assert (broken.layer, broken.value) == ("2", 1 / 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_same_images_allow_rounding(dtype: torch.dtype) -> None:
    model, pictures = net().to(dtype), images(16, 7)
    model.register_forward_pre_hook(lambda module, given: given[0].to(dtype))
    found = on_the_same_images(model, pictures, pictures)
    assert found.finding is None and "16 images now, the same 16 in the reference" in found.sentence


def test_a_call_that_is_the_same_for_every_image_is_rounded_too() -> None:
    def token(block: Any, x: torch.Tensor) -> torch.Tensor:
        return block.token + 0 * x.mean((1, 2, 3))[:, None]

    def made() -> nn.Module:
        inner = Function(token, last=nn.Identity())
        inner.token = nn.Parameter(torch.linspace(-1.003, 1.007, 6))
        return nn.Sequential(inner, nn.Linear(6, 3))

    torch.manual_seed(2)
    model, pictures = made(), images(16, 7)
    sides = saved(model, pictures), saved(copy.deepcopy(model).bfloat16().float(), pictures)
    for side in sides:
        side.totals.pictures.extend(range(16))
    found = against_reference(sides[1], sides[0])
    assert found.finding is None and max(shift.times for shift in found.calls) < 1


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("reverse order", lambda pictures: pictures.flip(1) * 1.1 - 0.2),
        ("another mean and std", lambda pictures: pictures * 1.1 - 0.2),
        ("rounding explains on the same images", lambda pictures: pictures.clamp(0, 1)),
    ],
)
def test_the_same_images_tell_how_they_were_prepared(words: str, change: object) -> None:
    pictures = images(16, 7)
    found = on_the_same_images(net(), change(pictures), pictures)  # type: ignore[operator]
    assert found.finding is not None and not found.finding.layer and words in found.finding.evidence


def test_another_size_of_the_input_is_named() -> None:
    model, pictures = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), images(24, 1)
    reference = saved(model, pictures)
    small = nn.functional.avg_pool2d(images(24, 2), 3)
    found = against(model, small, reference)
    assert found.finding is not None and "the input is 1x3x4x4, and 1x3x12x12" in found.finding.evidence


def test_nan_has_left_every_range() -> None:
    model = net()
    model[3].weight.data[2] = math.nan
    found = against(model, images(3, 7))
    assert found.finding is not None and found.finding.layer == "3"
    assert "channel 2 has NaN" in found.finding.evidence


def test_channels_that_died_are_counted_but_not_those_that_were_dead() -> None:
    model = net()
    model[1].bias.data[:2] = -100  # dead in the reference already
    reference = saved(model, images(48, 0))
    assert not check_shifts(against(model, images(8, 5), reference), max_dead_more=0.0).broken
    model[1].bias.data[:5] = -100
    [broken] = check_shifts(against(model, images(8, 5), reference), max_dead_more=0.2).broken
    assert (broken.layer, broken.value, broken.channels) == ("2", 3 / 8, (2, 3, 4))
    assert not check_shifts(against(model, images(8, 5), reference), max_dead_more=0.5).broken


def test_a_limit_allows_a_small_shift_and_layers_without_limits() -> None:
    model = net()
    model[7].bias.data.add_(0.5)
    found = against(model, images(16, 7))
    shift = next(each.shift for each in found.calls if each.key == "7" and each.number != "weights")
    assert [each.layer for each in check_shifts(found, 0.9 * shift).broken] == ["7"]  # also what the model returns
    assert not check_shifts(found, 1.1 * shift).broken
    assert {each.layer for each in check_shifts(found, 0.9 * shift, allow="re:^7$").broken} == set()


def test_a_reference_is_a_file_with_seven_digits(tmp_path) -> None:
    path, whole, model = tmp_path / "reference.json", saved(net(), images(48, 0)), net()
    whole.save(path)
    reference = load_statistics(path)
    assert repr(reference).count("\n") == 0 and f"ranges={len(whole.totals.ranges)})" in repr(reference)
    assert against_reference(saved(net(), images(6, 2), 3), path).sentence == against(net(), images(6, 2)).sentence
    assert against(model, images(6, 2), reference).finding is None
    assert reference.totals.held.keys() == whole.totals.held.keys()
    for key, each in reference.totals.ranges.items():
        assert each.mean == pytest.approx(whole.totals.ranges[key].mean, rel=1e-6), key
    model[3].weight.data.mul_(3)
    assert against(model, images(6, 2), reference).finding.layer == "3"
    assert json.loads(path.read_text())["format"] == 1


def test_halves_merge_to_the_whole() -> None:
    half, whole = saved(net(), images(20, 0)[:9]), saved(net(), images(20, 0), 20)
    half.totals.merge(saved(net(), images(20, 0)[9:]).totals)
    for key, each in whole.totals.ranges.items():
        assert half.totals.ranges[key].m2 == pytest.approx(each.m2, rel=1e-4, abs=1e-6), key
        assert half.totals.ranges[key].mixed_m2 == pytest.approx(each.mixed_m2, rel=1e-4, abs=1e-5), key
        assert half.totals.ranges[key].images == 20


def test_what_no_reference_can_say_is_an_error() -> None:
    with pytest.raises(InputError, match="the reference has 7 images, too few"):
        against(net(), images(4, 2), saved(net(), images(7, 0)))
    other = nn.Sequential(nn.Flatten(), nn.Linear(432, 2))
    reference = saved(other, images(9, 0))
    reference.totals.ranges = {key: each for key, each in reference.totals.ranges.items() if "(" in key}
    del reference.totals.ranges["(model)"]
    with pytest.raises(InputError, match="no call that this model has"):
        against(net(), images(4, 2), reference)
    with StatisticsCollector(net()) as without:
        without.model(images(9, 0))
    with pytest.raises(InputError, match=r"hold no ranges.*ranges=True"):
        against(net(), images(4, 2), SavedStatistics.of(net(), without.totals))


def test_renamed_layers_pair_as_in_compare() -> None:
    model = nn.ModuleDict({"body": net()})
    model.forward = lambda x: model["body"](x)  # type: ignore[method-assign]
    model["body"][3].weight.data.mul_(3)
    found = against(model, images(6, 2))
    assert found.finding is not None and found.finding.layer == "body.3"


def test_the_first_place_of_an_inspection_is_the_reference(tmp_path) -> None:
    from PIL import Image

    def pictures(count: int, seed: int) -> list[Image.Image]:
        generator = np.random.default_rng(seed)
        return [Image.fromarray(generator.integers(0, 255, (40, 40, 3), dtype=np.uint8)) for _ in range(count)]

    small = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for layer in (small[0], small[2]):
        nn.init.normal_(layer.weight, std=0.2)  # uniform weights would be taken for random ones
    loaded, healthy = as_loaded(small.eval()), StatisticsCollector(small, ranges=True)
    with healthy, torch.no_grad():
        for picture in pictures(24, 0):
            small(loaded.preprocess(picture)[None])
    reference = SavedStatistics.of(loaded, healthy.totals)
    sound = inspect(loaded, pictures(3, 5), reference=reference)
    assert "left-range" not in [place.kind for place in sound.places]
    assert any("in the range of the reference" in note for note in sound.notes)
    broken = copy.deepcopy(small)
    broken[2].weight.data.mul_(3)
    reference.save(tmp_path / "healthy.json")
    place = inspect(as_loaded(broken), pictures(3, 5), reference=str(tmp_path / "healthy.json")).places[0]
    assert (place.kind, place.layer, place.severity) == ("left-range", "2", "error")


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_channel_that_no_image_of_the_reference_excites_may_be_excited(count: int) -> None:
    generator = torch.Generator().manual_seed(4)
    model = nn.Linear(16, 16, bias=False)
    model.weight.data = torch.eye(16)
    silent, rare = torch.randn((64, 16), generator=generator), torch.randn((count, 16), generator=generator)
    silent[:, 3] = rare[:, 3] = 0
    rare[0, 3] = 2.5
    assert against(model, rare, saved(model, silent)).finding is None
    rare[:, 3] = 30
    assert against(model, rare, saved(model, silent)).finding is not None


def test_a_call_that_is_missing_is_named() -> None:
    model = net()
    reference = saved(model, images(48, 0))
    model.forward = lambda x: model[5:](model[3](model[:3](x)))  # type: ignore[method-assign]
    found = against(model, images(8, 5), reference)
    assert found.finding is not None and found.finding.layer == "4" and "it did not run" in found.finding.evidence


def test_an_exported_file_need_not_have_the_blocks_of_the_reference() -> None:
    def skip(block: Any, x: torch.Tensor) -> torch.Tensor:
        return block.body(x) + x

    block = Function(skip, body=nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    model = nn.Sequential(nn.Conv2d(3, 3, 3), block, nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()).eval()
    reference, now = saved(model, images(12, 0)), saved(model, images(8, 5))
    ranges = now.totals.ranges
    del ranges["1"]
    ranges["/3"] = replace(ranges.pop("3"), call=Call("/3", "Relu", 0, None))
    assert against_reference(now, reference).finding is None


def test_a_vector_has_numbers_of_its_own() -> None:
    found = saved(net(), images(10, 3), 4).totals.ranges["7"]
    with torch.no_grad():
        values = net()(images(10, 3)).double().numpy()
    numbers = [values.std(1), values.max(1), (values == 0).mean(1)]
    assert found.mean[0] == pytest.approx(values.mean(0), rel=1e-5)
    for row, expected in enumerate(numbers, 1):
        assert found.mean[row] == pytest.approx(np.full(5, expected.mean()), rel=1e-5)


@pytest.mark.parametrize("size", [(3,), (64, 8, 3, 3), (1000, 100)])
def test_sketches_are_about_as_far_apart_as_the_weights(size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    layer = nn.Module()
    layer.w = nn.Parameter(torch.randn(size, generator=generator))
    before = held_by(layer)["w"]
    change = 0.1 * torch.randn(size, generator=generator)
    layer.w.data += change
    assert np.linalg.norm(held_by(layer)["w"] - before) == pytest.approx(float(change.norm()), rel=0.5)


def test_weights_that_are_others_are_named_although_images_do_not_show_it() -> None:
    model, reference = net(), saved(net(), images(48, 0))
    with torch.no_grad():
        model[3].bias += 0.02
    found = against(model, images(4, 7), reference)
    assert found.finding is not None and found.finding.layer == "3"
    away = float(np.linalg.norm(np.full(8, 0.02)) / net()[3].bias.detach().norm())
    assert f"its bias differs from the reference by {away / 1.7:.0%} to {away * 1.7:.0%}" in found.finding.evidence
    assert [each.layer for each in check_shifts(found).broken] == ["3"]


def test_rounded_weights_and_weights_that_were_trained_on_are_no_others() -> None:
    reference = saved(net(), images(48, 0))
    half, tuned = net(), net()
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16().float()
    for parameter in tuned.parameters():
        parameter.data *= 1 + 0.05 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert against(half, images(8, 7), reference).finding is None
    assert "weights" not in [each.number for each in against(tuned, images(8, 7), reference).calls]


def test_a_setting_that_is_another_is_a_note() -> None:
    model, reference = net(), saved(net(), images(48, 0))
    model[1].eps = 1e-4
    found = against(model, images(8, 7), reference)
    assert found.finding is not None and (found.finding.layer, found.finding.severity) == ("1", "note")
    assert "its eps is 0.0001, and 1e-05 in the reference" in found.finding.evidence
    assert not check_shifts(found).broken
    model[1].eps = 0.2  # layers show it by little, and the setting is no chance
    found = against(model, images(8, 7), reference)
    assert found.finding is not None and (found.finding.layer, found.finding.severity) == ("1", "error")


def test_a_setting_of_the_model_itself_does_not_hide_the_layer_that_it_changes() -> None:
    model = net()
    model.slope = 0
    reference = saved(model, images(48, 0))
    model.slope = 3
    found = against(model, images(8, 7), reference)
    assert found.finding is not None and (found.finding.layer, found.finding.severity) == (MODEL, "note")
    model[3].weight.data *= 2
    found = against(model, images(8, 7), reference)
    assert found.finding is not None and (found.finding.layer, found.finding.severity) == ("3", "error")
    assert "; of the model, its slope is 3, and 0 in the reference" in found.finding.evidence


class Head(nn.Module):
    """A layer behind an operation, which takes its input by keyword."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.fc, self._drop = nn.Linear(27, 4), drop

    def forward(self, *, picture: torch.Tensor) -> torch.Tensor:
        return self.fc(nn.functional.dropout(nn.functional.avg_pool2d(picture, 4).flatten(1), self._drop))


def test_a_layer_of_another_class_is_named_although_the_images_do_not_show_it() -> None:
    other = net()
    other[4] = nn.LeakyReLU(1e-4)
    finding = against(other, images(40, 1)).finding
    assert finding is not None and finding.layer == "4"
    assert finding.evidence.startswith("it is LeakyReLU, and ReLU in the reference")
    other[4] = Function(lambda x: x.relu())  # which may compute the same
    finding = against(other, images(40, 1)).finding
    assert finding is not None and (finding.layer, finding.severity) == ("4", "note")


def test_the_types_of_another_runtime_are_no_other_layers() -> None:
    reference, now = saved(net(), images(12, 0)), saved(net(), images(8, 5))
    types = {"0": "Conv", "1": "Relu", "2": "Sigmoid+Mul", "3": "Conv", "4": "Clip", "5": "Pool", "7": "Gemm"}
    for key, kind in types.items():
        now.totals.ranges[key] = replace(now.totals.ranges[key], call=Call(key, kind, 0, None))
    assert against_reference(now, reference).finding is None


def test_what_a_layer_reads_from_an_operation_is_measured() -> None:
    def measured(drop: float, count: int, seed: int) -> SavedStatistics:
        torch.manual_seed(2)
        model = Head(drop)
        with StatisticsCollector(model, ranges=True) as collector, torch.no_grad():
            model(picture=images(count, seed))
        return SavedStatistics.of(as_loaded(model), collector.totals)

    reference = measured(0.0, 48, 0)
    assert list(reference.totals.ranges) == ["(input)", "fc input", "fc", "(model)", "(model) answers"]
    assert against_reference(measured(0.0, 16, 3), reference).finding is None
    found = against_reference(measured(0.5, 16, 3), reference).finding
    assert found is not None and found.layer == "fc" and "it reads" in found.evidence


def classes(shares: dict[int, int], seed: int) -> torch.Tensor:
    """Images ``(N, 6)`` of six classes: a one at their place, and noise."""
    labels = torch.tensor([label for label, count in shares.items() for _ in range(count)])
    noise = 0.2 * torch.randn((len(labels), 6), generator=torch.Generator().manual_seed(seed))
    return nn.functional.one_hot(labels, 6) + noise


def test_images_of_one_class_are_no_error_and_their_shares_are_said() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 8, bias=False))
    for layer in model:
        layer.weight.data = torch.eye(*layer.weight.shape)
    reference = saved(model, classes(dict.fromkeys(range(6), 10), 0))
    answers = reference.totals.ranges["(model) answers"]
    assert answers.mean[0] == pytest.approx([1 / 6] * 6 + [0, 0]) and answers.images == 60
    assert against(model, classes(dict.fromkeys(range(6), 3), 4), reference).finding is None
    found = against(model, classes({2: 16}, 4), reference)
    assert found.finding is not None and found.finding.severity == "note" and not check_shifts(found).broken
    assert "class 2 has 100% of the answers, and 17% in the reference" in found.finding.evidence
    # chi squared of the shares: (1 - 1/6)² / (1/6) + 5 (1/6)² / (1/6) = 5
    shares = next(each for each in found.calls if each.number == "shares")
    assert shares.shift == pytest.approx(5**0.5, rel=1e-6)
    model[1].weight.data *= 4  # more than other shares explain
    assert against(model, classes({2: 16}, 4), reference).finding.severity == "error"


def test_changed_weights_are_named_before_what_few_images_may_show() -> None:
    model, reference = net(), saved(net(), images(48, 0))
    model[3].weight.data *= 0.9
    found = against(model, images(8, 7) * 1.3, reference)
    first = next(each for each in found.calls if each.times > 1)
    assert first.key == "(input)" and first.times < 2
    assert found.finding is not None and found.finding.layer == "3" and "its weight" in found.finding.evidence
