"""The channels that carry the answer, compared with numbers on paper, `intervene` and captum."""

import copy
import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn

from hookscope import capture, intervene, load_model
from hookscope.cli.main import cli
from hookscope.errors import spelling_for_shell
from hookscope.inspection import places as places_module
from hookscope.inspection.facts import Place
from hookscope.inspection.outliers import distances, separating_places, separation, split
from hookscope.inspection.places import answer_places, find_places
from hookscope.interventions import Zero
from hookscope.models import LoadedModel
from tests.inspection.faults import recorded
from tests.nets import Function

SAMPLES = Path(__file__).parents[2] / "samples"
SHAPES = [
    str(SAMPLES / "shapes" / f"{name}.png") for name in ("circle", "circle-2", "checkerboard", "checkerboard-2", "star")
]


def same(channels: int = 3) -> nn.Conv2d:
    """A convolution that puts out what it is given."""
    conv = nn.Conv2d(channels, channels, 1, bias=False)
    nn.init.eye_(conv.weight.data[:, :, 0, 0])
    return conv


def parts(at: int) -> nn.Module:
    """Six layers: those before ``at`` see the same in every picture, the others its colour. Colours are classes."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.ones_like(x)
        for number, block in enumerate(net.blocks):
            h = block(h + x if number == at else h)
        return h.mean((2, 3))

    return Function(forward, blocks=nn.ModuleList(same() for _ in range(6)))


def colours(*names: str) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), name) for name in names]


def parting(net: nn.Module, images: Sequence[Image.Image | str]) -> list[Place]:
    return list(separating_places(recorded(net.eval(), images)))


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("names", [("red", "blue"), ("red", "blue", "green"), ("red", "maroon", "blue", "navy")])
def test_the_planted_layer_is_found(at: int, names: tuple[str, ...]) -> None:
    [place] = parting(parts(at), colours(*names))
    assert (place.kind, place.layer, place.image) == ("classes-separate", f"blocks.{at}", None)
    assert place.numbers["before"] == (1 if "navy" in names else 0)  # times the distance within a class
    assert (place.numbers["images"], place.numbers["answers"]) == (len(names), len({*names} - {"maroon", "navy"}))


def test_the_sentence_has_the_numbers() -> None:
    [place] = parting(parts(3), colours("red", "blue"))
    after = place.numbers["after"]
    assert place.reason == (
        "At blocks.3 the 2 answers to 2 images begin to separate: their distance is "
        f"{100 * float(after or 0):.3g} % of their size, 0 % before."
    )


@pytest.mark.parametrize("names", [("red",), ("red", "maroon")])
def test_one_answer_parts_nowhere(names: tuple[str, ...]) -> None:
    assert parting(parts(3), colours(*names)) == []


def test_where_all_layers_tell_the_images_apart_nothing_is_claimed() -> None:
    assert parting(parts(0), colours("red", "blue", "green")) == []
    assert parting(nn.Sequential(*(same() for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten()), SHAPES[2:]) == []


def test_distances_on_paper() -> None:
    means = np.array([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [-3.0, -4.0]])
    assert distances(means)[0] == pytest.approx([0, 0, 5 / (12.5**0.5), 2])
    assert distances(np.zeros((2, 3))).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ([0.0, 0, 0, 1, 1, 1], 3),
        ([1.0, 1, 1, 1, 4, 5, 6, 6], 4),
        ([1.0, 1, 1, 4, 1, 1, 6, 6, 6, 6], 6),  # one of ten layers may be on the other side
        ([1.0, 4, 1, 4, 1, 4], None),
        ([6.0, 5, 4, 3, 2, 1], None),
        ([1.0, 1, 1, 1], None),
    ],
)
def test_a_split_needs_a_clear_rise(values: list[float], at: int | None) -> None:
    assert split(values) == at


def test_a_trained_network_parts_the_shapes_late_and_the_numbers_are_those_of_numpy() -> None:
    net = load_model("shapes")
    evidence = recorded(net, SHAPES)
    [place] = separating_places(evidence)
    assert place.layer == "features.10.expand1x1" and place.numbers["images"] == 5
    answers = [image.predictions[0].index for image in evidence.images]
    means = []
    for name in SHAPES:
        with capture(net.model, place.layer) as kept, torch.no_grad():
            net.model(*net.inputs(net.prepare(Image.open(name))))
        means.append(kept[place.layer][0].double().mean((1, 2)).numpy())
    apart: dict[bool, list[float]] = {True: [], False: []}
    for i, k in itertools.combinations(range(5), 2):
        both = (means[i] @ means[i] + means[k] @ means[k]) / 2
        apart[answers[i] == answers[k]].append(np.linalg.norm(means[i] - means[k]) / both**0.5)
    assert separation(np.array(means), answers) == pytest.approx(np.mean(apart[False]) / np.mean(apart[True]))
    values = [
        separation(np.array([maps.mean for maps in layer.images if maps is not None]), answers)
        for layer in evidence.layers
    ]
    at = [layer.key for layer in evidence.layers].index(place.layer)
    assert (place.numbers["before"], place.numbers["after"]) == (np.median(values[:at]), np.median(values[at:]))


STAR = str(SAMPLES / "shapes" / "star.png")


def paper(values: Sequence[float], scores: Sequence[Sequence[float]]) -> nn.Sequential:
    """Channels of constant ``values``, whatever the picture; class ``k`` has the score ``scores[k] @ values``."""
    conv, head = nn.Conv2d(3, len(values), 1), nn.Linear(len(values), len(scores))
    with torch.no_grad():
        conv.weight.zero_()
        conv.bias.copy_(torch.tensor(values))
        head.weight.copy_(torch.tensor(scores))
        head.bias.zero_()
    return nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()


def carriers(net: Any, *images: Any) -> list[Place]:
    images = images or (Image.new("RGB", (8, 8)),)
    return [place for place in answer_places(recorded(net, images)) if place.kind == "carries-answer"]


def share(*scores: float) -> float:
    """The softmax probability of the first class."""
    return math.exp(scores[0]) / sum(map(math.exp, scores))


def test_only_channels_that_are_likely_to_carry_the_answer_cost_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score 1 of 20 equal channels may fall by 0.81; fewer than 5 of them do a quarter of that."""
    tried, plain = [], places_module.scores_without

    def counted(model: nn.Module, inputs: Any, scores: Tensor, channels: Any, *rest: Any) -> Tensor:
        tried.append([len(group) for _, _, group in channels])
        return plain(model, inputs, scores, channels, *rest)

    monkeypatch.setattr(places_module, "scores_without", counted)
    [place] = carriers(paper([1] * 20, [[0.05] * 20, [0] * 20]))
    assert tried == [[5], [20, 10]] and len(place.channels or ()) == 20


def test_a_channel_without_which_another_class_is_the_answer() -> None:
    [place] = carriers(paper([2, 1, 1, 1], [[2, 0, 0, 0], [0, 3, 0, 0], [0, 0, 1, 1]]))  # scores 4, 3, 2
    assert (place.severity, place.layer, place.channels, place.image) == ("note", "0", (0,), 0)
    assert place.reason == (
        "Channel 0 of 0 carries the answer: without it class 0 falls from 67 % to 4 %, and the answer is class 1."
    )
    numbers = dict(place.numbers)
    assert numbers.pop("probability") == pytest.approx(share(4, 3, 2))
    assert numbers.pop("probability_after") == pytest.approx(share(0, 3, 2))
    assert numbers.pop("gradient_x_activation") == pytest.approx(4)
    assert numbers == {"score": 4, "score_after": 0, "class": 0, "class_after": 1}
    [place] = carriers(paper([1, 1, 1], [[1.5, 1.4, 0], [0, 0, 1]]))  # 2.9 and 1, then 1.4 and 1
    assert place.reason == "Channel 0 of 0 carries the answer: without it class 0 falls from 87 % to 60 %."


def test_few_channels_rank_above_many_outliers_above_others_and_then_what_changes_most() -> None:
    def place(channels: int, after: float, **numbers: float) -> Place:
        numbers |= {"probability": 0.8, "probability_after": after}
        return Place("carries-answer", "note", "conv", "", tuple(range(channels)), numbers=numbers)

    expected = [place(1, 1.0, times=9.0), place(1, 0.1), place(1, 0.3), place(2, 0.0)]
    assert sorted([expected[at] for at in (3, 1, 0, 2)], key=places_module._rank) == expected


@pytest.mark.parametrize(
    ("each", "carrying", "told"),
    [
        (0.9, 3, "Channels 0, 1 and 2 of 0 carry"),  # 4.5 and 1.5, then 1.8 and 1.5
        (0.4, 10, "10 of the 21 channels of 0 carry"),  # 8 and 4.2; without 10 4 and 4.2
    ],
)
def test_where_no_channel_carries_the_answer_the_fewest_do_together(each: float, carrying: int, told: str) -> None:
    many = 5 if each == 0.9 else 20
    other = 1.5 if each == 0.9 else 4.2
    place = carriers(paper([1] * (many + 1), [[each] * many + [0], [0.0] * many + [other]]))[-1]
    assert place.channels == tuple(range(carrying))
    assert place.numbers["score_after"] == pytest.approx(each * (many - carrying))
    assert place.numbers["probability_after"] == pytest.approx(share(each * (many - carrying), other))
    assert place.reason.startswith(f"{told} the answer: without them class 0 falls from ")


@pytest.mark.parametrize("weights", ["random (seed 0)", "random"])
def test_random_weights_answer_nothing(weights: str) -> None:
    evidence = recorded(paper([2, 1, 1], [[2, 0, 0], [0, 3, 0]]), [Image.new("RGB", (8, 8))])
    assert "carries-answer" in {place.kind for place in find_places(evidence)}
    of_random = {place.kind for place in find_places(replace(evidence, net=replace(evidence.net, weights=weights)))}
    assert "random-weights" in of_random and "carries-answer" not in of_random


def test_class_scores_nan_and_many_channels_are_no_places() -> None:
    net = paper([3, 1, 1], torch.eye(3).tolist())
    assert carriers(net) == []  # the convolution has a channel for each class
    assert carriers(paper([2, math.nan, 1], [[2, 0, 0], [0, 3, 0]])) == []
    assert carriers(paper([1] * 100, [[1.0] * 100, [0.0] * 100])) == []


@pytest.fixture(scope="module")
def driven(shapes: LoadedModel) -> LoadedModel:
    """A channel 40 times as large makes a crescent of the star."""
    model = copy.deepcopy(shapes.model)
    conv = model.get_submodule("features.6.squeeze")
    with torch.no_grad():
        conv.weight[11] *= 40
        conv.bias[11] *= 40
    return replace(shapes, model=model)


@pytest.fixture(scope="module")
def told(driven: LoadedModel) -> list[Place]:
    return answer_places(recorded(driven, [STAR]))


def test_the_channel_that_drives_a_wrong_answer_comes_first_and_is_reported_once(told: list[Place]) -> None:
    assert (told[0].layer, told[0].channels) == ("features.6.squeeze", (11,))
    assert told[0].reason.startswith(
        "Channel 11 of features.6.squeeze carries the answer with 74.2 times the layer's usual value: "
        "without it crescent falls from "
    )
    assert told[0].reason.endswith(", and the answer is star.") and told[0].numbers["times"] == pytest.approx(
        74.2, 0.01
    )
    assert sum(place.layer == "features.6.squeeze" for place in told) == 1


def test_the_numbers_are_those_of_captum(told: list[Place], driven: LoadedModel) -> None:
    captum = pytest.importorskip("captum.attr")
    [inputs] = driven.inputs(driven.prepare(Image.open(STAR)))
    layer, numbers = driven.model.get_submodule("features.6.squeeze"), told[0].numbers
    times = captum.LayerGradientXActivation(driven.model, layer).attribute(inputs, target=numbers["class"]).detach()
    assert numbers["gradient_x_activation"] == pytest.approx(float(times[0, 11].sum()), rel=1e-4)
    mask = (torch.arange(times.shape[1]) == 11).long()[None, :, None, None].expand_as(times)
    lost = captum.LayerFeatureAblation(driven.model, layer).attribute(inputs, target=numbers["class"], layer_mask=mask)
    assert numbers["score"] - numbers["score_after"] == pytest.approx(float(lost[0, 11, 0, 0]), rel=1e-4)


@pytest.mark.parametrize("name", ["star", "stripes"])
def test_the_answer_of_a_sound_network_is_explained_and_confirmed_by_interventions(
    name: str, shapes: LoadedModel
) -> None:
    path = SAMPLES / "shapes" / f"{name}.png"
    place = find_places(recorded(shapes, [str(path)]))[-1]
    assert place.kind == "carries-answer" and place.severity == "note"
    [inputs] = [shapes.inputs(shapes.prepare(Image.open(path)))]
    with intervene(shapes.model, {place.layer: Zero(channels=place.channels)}), torch.no_grad():
        without = shapes.model(*inputs)[0]
    index, numbers = int(place.numbers["class"] or 0), place.numbers
    assert numbers["score_after"] == pytest.approx(float(without[index]), rel=1e-4, abs=1e-4)
    assert numbers["probability_after"] == pytest.approx(float(without.softmax(0)[index]), rel=1e-3)
    assert (numbers["probability_after"] or 0) <= 0.75 * float(numbers["probability"] or 0)


def test_with_several_images_a_place_says_of_which_it_is(driven: LoadedModel) -> None:
    images = [STAR, str(SAMPLES / "shapes" / "ring.png")]
    found = carriers(driven, *images)
    assert found[0].image is not None and found[0].numbers["times"]
    assert len({(place.layer, place.channels) for place in found}) == len(found) <= 6


def test_the_network_stays_as_it_was(driven: LoadedModel) -> None:
    evidence = recorded(driven, [STAR])
    driven.model.train()
    state = {name: tensor.clone() for name, tensor in driven.model.state_dict().items()}
    assert answer_places(evidence)[0].numbers["times"]
    assert all(module.training for module in driven.model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in driven.model.state_dict().items())
    driven.model.eval()


@pytest.mark.parametrize(
    ("answers", "rest", "chosen"),
    [
        ([("a", 0), ("b", 1), ("c", 2), ("d", 3)], {"a": 0.1, "b": 0.1, "c": 0.0, "d": 0.0}, "abc"),  # three layers
        ([("a", 0), ("b", 1), ("c", 2)], {"a": 0.1, "b": 0.4, "c": 0.4}, "ab"),  # a third of 0.4 costs too much
        ([("a", 0), ("b", 1), ("a", 2)], {"a": 0.3, "b": 0.6}, "aa"),
    ],
)
def test_copies_of_the_image_cost_at_most_one_pass(
    answers: list[tuple[str, int]], rest: dict[str, float], chosen: str
) -> None:
    candidates: Any = [SimpleNamespace(key=key) for key, _ in answers]
    assert "".join(each.key for each in places_module._affordable(candidates, rest)) == chosen


def test_the_command_line_of_a_place_shows_it(driven: LoadedModel) -> None:
    with spelling_for_shell():
        told = answer_places(recorded(driven, [STAR]))
    command = told[0].meaning.partition("hookscope ")[2]
    words = shlex.split(command.replace("MODEL", "shapes").replace("IMAGE", STAR))
    shown = CliRunner().invoke(cli, words)
    assert shown.exit_code == 0 and "star" in shown.stdout


def test_other_reasons_have_their_places_before_the_fifth_channel_that_carries_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"probability": 1.0, "probability_after": 0.0}
    carriers = [Place("carries-answer", "note", f"conv{at}", "", (at,), 0, numbers) for at in range(6)]
    other = Place("widest-maps", "note", "conv9", "")
    monkeypatch.setattr(places_module, "_of_image", lambda *_: carriers)
    monkeypatch.setattr(places_module, "REASONS", [lambda evidence: [other]])
    evidence: Any = SimpleNamespace(calls=(), images=(None,))
    assert answer_places(evidence) == [*carriers[:4], other, *carriers[4:]]
