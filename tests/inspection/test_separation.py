"""The layer where classes begin to separate, in planted networks and by NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hookscope import capture, load_model
from hookscope.inspection.facts import Place
from hookscope.inspection.separation import distances, separating_places, separation, split
from tests.inspection.recorded import evidence_of

SAMPLES = Path(__file__).parents[2] / "samples" / "shapes"
SHAPES = [str(SAMPLES / f"{name}.png") for name in ("circle", "circle-2", "checkerboard", "checkerboard-2", "star")]


def same(channels: int = 3) -> nn.Conv2d:
    """A convolution that puts out what it is given."""
    conv = nn.Conv2d(channels, channels, 1, bias=False)
    nn.init.eye_(conv.weight.data[:, :, 0, 0])
    return conv


class Parts(nn.Module):
    """Six layers: those before ``at`` see the same in every picture, the others its colour. Colours are classes."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.blocks = at, nn.ModuleList(same() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.ones_like(x)
        for number, block in enumerate(self.blocks):
            h = block(h + x if number == self.at else h)
        return h.mean((2, 3))


def colours(*names: str) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), name) for name in names]


def parting(net: nn.Module, images: Sequence[Image.Image | str]) -> list[Place]:
    return list(separating_places(evidence_of(net.eval(), images)))


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("names", [("red", "blue"), ("red", "blue", "green"), ("red", "maroon", "blue", "navy")])
def test_the_planted_layer_is_found(at: int, names: tuple[str, ...]) -> None:
    [place] = parting(Parts(at), colours(*names))
    assert (place.kind, place.layer, place.image) == ("classes-separate", f"blocks.{at}", None)
    assert place.numbers["before"] == (1 if "navy" in names else 0)  # times the distance within a class
    assert (place.numbers["images"], place.numbers["answers"]) == (len(names), len({*names} - {"maroon", "navy"}))


def test_the_sentence_has_the_numbers() -> None:
    [place] = parting(Parts(3), colours("red", "blue"))
    after = place.numbers["after"]
    assert place.reason == (
        "At blocks.3 the 2 answers to 2 images begin to separate: their distance is "
        f"{100 * float(after or 0):.3g} % of their size, 0 % before."
    )


@pytest.mark.parametrize("names", [("red",), ("red", "maroon"), ("red", "red")])
def test_one_answer_parts_nowhere(names: tuple[str, ...]) -> None:
    assert parting(Parts(3), colours(*names)) == []


def test_where_all_layers_tell_the_images_apart_nothing_is_claimed() -> None:
    assert parting(Parts(0), colours("red", "blue", "green")) == []
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
    evidence = evidence_of(net, SHAPES)
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
