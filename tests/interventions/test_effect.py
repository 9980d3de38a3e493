"""A pass without and with interventions: which layers moved and how far, and the page that shows them."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookscope
from hookscope.drawing import MapDifference, colours, difference, files as pages
from hookscope.drawing.files import read_provenance, read_sheet, write_png
from hookscope.drawing.sheet import Origin
from hookscope.errors import InputError, LayerError, NoMapError, UsageError
from hookscope.hooks.calls import Call
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.hooks.tensors import shape_of
from hookscope.interventions import Dropout, Noise, Scale, Zero, figure
from hookscope.interventions.effect import Effect, MovedLayer, intervention_effect
from hookscope.interventions.figure import draw_effect, moved_maps
from tests.explain.pages import net as loaded, picture as photograph
from tests.nets import Function


def trunk_and_branch(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.relu(net.first(x))
    after = net.second(x)
    net.side = net.aside(x)
    return net.fc(after.mean((2, 3)))


@pytest.fixture
def net() -> nn.Module:
    """A trunk with an in-place layer, and a branch that the trunk's second half does not touch."""
    layers = {"first": nn.Conv2d(1, 2, 1), "relu": nn.ReLU(inplace=True), "second": nn.Conv2d(2, 2, 1)}
    net = Function(trunk_and_branch, **layers, aside=nn.Conv2d(2, 1, 1), fc=nn.Linear(2, 3)).eval()
    with torch.no_grad():
        net.first.weight.copy_(torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1))
        net.first.bias.copy_(torch.tensor([0.0, 0.5]))  # so that the in-place layer takes some values and leaves some
    return net


@pytest.fixture
def picture() -> torch.Tensor:
    return torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def by_hand(net: nn.Module, x: torch.Tensor, factor: float) -> dict[str, np.ndarray]:
    """What every layer gives with the first one scaled, written down without a hook."""
    with torch.no_grad():
        first = net.first(x) * factor
        relu = first.clamp(min=0)
        second = net.second(relu)
        found = {"first": first, "second": second, "aside": net.aside(relu), "fc": net.fc(second.mean((2, 3)))}
    return {name: value.double().numpy().ravel() for name, value in found.items()}


def test_an_index_from_the_end_changes_compares_and_keeps_the_same_calls() -> None:
    net = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(4)))
    found = intervention_effect(net, (torch.ones(1, 1, 2, 2),), {"0": Scale(2.0)}, layers="-3:", keep="-2")
    assert [layer.call.name for layer in found.layers] == ["1", "2", "3"] and found.missing == ()
    assert [layer.call.name for layer in found.layers if layer.after is not None] == ["2"]
    assert intervention_effect(net, (torch.ones(1, 1, 2, 2),), {-1: Zero()}).changed == {"3": 1}
    assert intervention_effect(net, (torch.ones(1, 1, 2, 2),), {"-2:": Zero()}).changed == {"2": 1, "3": 1}


def test_distances_are_those_of_a_forward_pass_written_by_hand(net: nn.Module, picture: torch.Tensor) -> None:
    before, after = by_hand(net, picture, 1), by_hand(net, picture, 3)
    found = intervention_effect(net, (picture,), {"first": Scale(3.0)})
    assert [layer.call.key for layer in found.layers] == ["first", "second", "aside", "fc"]
    assert [layer.changed for layer in found.layers] == [True, False, False, False]
    for layer in found.layers:
        one, other = before[layer.call.name], after[layer.call.name]
        assert layer.relative_l2 == pytest.approx(np.linalg.norm(other - one) / np.linalg.norm(one), rel=1e-6)
        assert layer.cosine == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other), rel=1e-6)
    np.testing.assert_allclose(found.before.double().numpy().ravel(), before["fc"], rtol=1e-6)
    np.testing.assert_allclose(found.after.double().numpy().ravel(), after["fc"], rtol=1e-6)


def test_only_later_calls_are_compared_and_neutral_interventions_move_nothing(
    net: nn.Module, picture: torch.Tensor
) -> None:
    found = intervention_effect(net, (picture,), {"second": Zero(channels=1)})
    assert [layer.call.key for layer in found.layers] == ["second", "aside", "fc"]
    assert (found.layers[1].relative_l2, found.layers[1].cosine) == (0.0, 1.0)
    assert found.changed == {"second": 1}
    with pytest.warns(RuntimeWarning, match="the layer was in eval mode"):
        found = intervention_effect(net, (picture,), {"first": Scale(1.0), "second": Noise(0.0), "fc": Dropout(0.5)})
    assert (found.layers, found.changed) == ((), {}) and torch.equal(found.before, found.after)


def test_a_parameter_counts_from_its_layer_on(net: nn.Module, picture: torch.Tensor) -> None:
    found = intervention_effect(net, (picture,), {"second.weight": Scale(2.0)})
    changed = [(layer.call.key, layer.changed) for layer in found.layers]
    assert changed == [("second", True), ("aside", False), ("fc", False)]
    assert found.layers[0].relative_l2 > 0 and found.changed == {"second.weight": 1}
    # of a layer that is not among the chosen ones, from where it shows
    found = intervention_effect(net, (picture,), {"first.bias": Scale(2.0)}, layers=["second", "fc"])
    assert [(layer.call.key, layer.changed) for layer in found.layers] == [("second", False), ("fc", False)]


def test_both_passes_draw_the_same_numbers(net: nn.Module, picture: torch.Tensor) -> None:
    noisy = Function(lambda noisy, x: noisy.net(x) + torch.rand(3), net=net)
    found = intervention_effect(noisy, (picture,), {"net.fc": Zero()}, seed=5)
    torch.manual_seed(5)
    assert torch.allclose(found.after, torch.rand(3)) and not torch.allclose(found.before, found.after)
    again = intervention_effect(noisy, (picture,), {"net.fc": Zero()}, seed=5)
    assert torch.equal(again.before, found.before)


def test_outputs_that_were_0_become_0_or_nan(net: nn.Module, picture: torch.Tensor) -> None:
    with torch.no_grad():
        net.second.weight.zero_(), net.second.bias.zero_()
    dead = intervention_effect(net, (picture,), {"second": lambda call, tensor: tensor + 1}).layers[0]
    assert (dead.relative_l2, dead.cosine) == (math.inf, None)
    gone = intervention_effect(net, (picture,), {"first": Zero()}).layers[0]
    assert (gone.relative_l2, gone.cosine) == (1.0, None)
    found = intervention_effect(net, (picture,), {"first": lambda call, tensor: tensor / 0 * 0})
    assert [layer.nonfinite for layer in found.layers] == [32, 32, 16, 3]
    assert all(math.isnan(layer.relative_l2 or 0) and layer.cosine is None for layer in found.layers)


def test_kept_activations_are_those_of_both_passes(net: nn.Module, picture: torch.Tensor) -> None:
    found = intervention_effect(net, (picture,), {"first": Scale(-1.0)}, layers="second", keep="first")
    kept = {layer.call.key: (layer.before, layer.after) for layer in found.layers}
    assert list(kept) == ["first", "second"] and kept["second"] == (None, None)
    with torch.no_grad():
        expected = net.first(picture)
    assert torch.equal(kept["first"][0], expected) and torch.equal(kept["first"][1], -expected)


def test_the_two_measured_calls_after_a_changed_one_are_kept_with_it() -> None:
    deep = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(6)))
    effect = intervention_effect(deep, (torch.ones(1, 1, 2, 2),), {"1": Zero()}, keep_changed=True)
    kept = [layer.call.name for layer in effect.layers if layer.before is not None]
    assert ([layer.call.name for layer in effect.layers], kept) == (["1", "2", "3", "4", "5"], ["1", "2", "3"])


def test_the_model_stays_as_it_was_after_any_exception(net: nn.Module, picture: torch.Tensor) -> None:
    net.train()
    net.fc.eval()
    state = ModelSnapshot(net)
    intervention_effect(net, (picture,), {"first": Zero(), "second.weight": Noise(1.0)})
    with pytest.raises(LayerError, match="no channel 7 at 'first'; there are 2: 0 to 1"):
        intervention_effect(net, (picture,), {"second.weight": Noise(1.0), "first": Zero(channels=7)})
    with pytest.raises(
        InputError,
        match=r"ZeroDivisionError: .* in <lambda>, in the function for 'first': it gets .call, tensor. and returns",
    ):
        intervention_effect(net, (picture,), {"first": lambda call, tensor: 1 / 0})
    assert state.changes() == []
    assert "side" in vars(net)


def test_a_first_layer_in_place_does_not_spoil_the_second_pass() -> None:
    net, picture = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(1, 1, 1)), torch.full((1, 1, 2, 2), -1.0)
    found = intervention_effect(net, (picture,), {"re:^0$": lambda call, tensor: tensor + 0})
    assert torch.equal(found.before, found.after) and float(picture.min()) == -1


def test_calls_of_one_pass_alone_are_named() -> None:
    def choose(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.first(x)
        return net.large(x) if float(x.abs().max()) > 1e5 else net.small(x)

    net = Function(choose, **{name: nn.Conv2d(1, 1, 1) for name in ("first", "small", "large")})
    found = intervention_effect(net, (torch.ones(1, 1, 2, 2),), {"first": lambda call, tensor: tensor * 0 + 1e6})
    assert [layer.call.key for layer in found.layers] == ["first"]
    assert found.missing == ("small", "large")


def test_an_index_of_an_input_may_be_that_of_a_block_whose_layers_are_counted_before_it() -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU()), nn.Conv2d(2, 2, 1))
    found = intervention_effect(net, (torch.ones(1, 3, 2, 2),), {2: Scale(2.0, on="input")}, types=("*",))
    assert found.changed == {"0": 1} and [layer.call.name for layer in found.layers if layer.changed] == ["0"]


def moved(before: Any, after: Any, module: nn.Module | None = None) -> list[MapDifference]:
    return moved_maps(layer(before, after), module)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_tokens_clips_parts_and_vectors_are_read_as_maps() -> None:
    before, after = random(1, 17, 5), random(1, 17, 5, seed=1)
    grid, token = moved(before, after)
    assert (grid.part, token.part) == ("", "class token")
    assert grid.tiles is not None and token.tiles is not None
    assert grid.tiles[0].levels.shape == (5, 4, 4)
    assert token.tiles[0].levels.shape == (5, 1, 1)
    [last] = moved(random(1, 4, 6, 3), random(1, 4, 6, 3, seed=1), nn.Linear(3, 3))
    assert last.tiles is not None and last.tiles[0].levels.shape == (3, 4, 6)
    [clip] = moved(random(1, 3, 2, 4, 4), random(1, 3, 2, 4, 4, seed=1), nn.Conv3d(1, 1, 1))
    assert (clip.frames, clip.total) == (2, 3)
    several = moved({"a": random(1, 2, 4, 4), "b": before}, {"a": random(1, 2, 4, 4), "b": after})
    assert [(one.part, one.moved) for one in several] == [("a", 0), ("b", 5), ("b, class token", 5)]
    before = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    after = torch.tensor([[1.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    first, second = moved(before, after, nn.Linear(3, 3))
    assert (first.part, first.channels, first.distances) == ("item 0 of 2", (1, 2), (2.0, 1.0))
    assert second.moved == 0


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 5, 4), "the shapes differ: 1x3x4x4 before, 1x3x5x4 after"),
        (torch.zeros(4), torch.ones(4), "not a feature map"),
        (None, None, "no tensor"),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused(before: Any, after: Any, words: str) -> None:
    with pytest.raises(NoMapError, match=words):
        moved(before, after)


INTERVENTIONS = ["conv zero:channels=2", "conv noise:std=0.1"]
Values = dict[str, tuple[list[int], Any]]


def layer(before: Any, after: Any, name: str = "conv", call: int = 0, **more: Any) -> MovedLayer:
    found = {"changed": True, "relative_l2": 0.25, "cosine": 0.5, "nonfinite": 0} | more
    return MovedLayer(Call(name, "Conv2d", call, 3), shape_of(after), before=before, after=after, **found)


def drawn(*layers: MovedLayer, **more: Any) -> tuple[Image.Image, dict[str, Any]]:
    """The picture of an effect, and its provenance."""
    image = draw_effect(Effect(None, None, layers, {"conv": 1}, ()), **more)
    return image, json.loads(image.info["hookscope"])


def read_back(page: tuple[Image.Image, dict[str, Any]], path: Path) -> Values:
    write_png(page[0], path)
    return read_sheet(path)


def boxes(image: Image.Image, part: dict[str, Any]) -> list[Any]:
    """The colours ``(H, W, 3)`` of each drawn map of a grid."""
    pixels = np.asarray(image.convert("RGB"))
    high, wide = part["height"] * part["zoom"], part["width"] * part["zoom"]
    places = [divmod(at, part["columns"]) for at in range(len(part["channels"]))]
    corners = [(part["y"] + row * part["step_y"], part["x"] + column * part["step_x"]) for row, column in places]
    return [pixels[y : y + high, x : x + wide] for y, x in corners]


def test_the_pixels_are_before_after_and_their_difference(tmp_path: Path) -> None:
    before, after = random(1, 20, 5, 7), random(1, 20, 5, 7, seed=1)
    page = drawn(layer(before, after))
    found = read_back(page, tmp_path / "effect.png")
    assert list(found) == ["conv before", "conv after", "conv difference"]
    tops = [part["high"][0] for part in page[1]["parts"]]
    three = (before, after, after.double() - before)
    channels = page[1]["parts"][0]["channels"]
    highest = [float(values[0, channels].abs().max()) for values in three]
    assert tops == pytest.approx([max(highest[:2]), max(highest[:2]), highest[2]])
    for name, top, values in zip(found, tops, three, strict=True):
        channels, decoded = found[name]
        half_a_step = top / (colours.LEVELS - 1)
        assert len(channels) == 16
        np.testing.assert_allclose(decoded, values[0, channels], atol=half_a_step * 1.0001)
    distances = (after - before)[0].square().mean((1, 2))
    assert found["conv after"][0] == distances.argsort(descending=True)[:16].tolist()


def test_all_bands_stand_in_the_same_three_columns() -> None:
    small = layer(random(1, 2, 3, 3), random(1, 2, 3, 3, seed=1), "a")
    large = layer(random(1, 9, 90, 90), random(1, 9, 90, 90, seed=1), "b")
    _, told = drawn(small, large, layer(random(1, 10), random(1, 10, seed=1), "c"))
    lefts = [part["x"] for part in told["parts"]]
    assert lefts[:3] == lefts[3:6] == lefts[6:] and lefts[1] - lefts[0] == lefts[2] - lefts[1] > 0
    assert [part["part"].split()[0] for part in told["parts"]] == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_where_all_channels_are_constant_afterwards_only_the_maps_before_are_drawn(
    words: list[str], tmp_path: Path
) -> None:
    before, after = random(1, 3, 5, 7), torch.zeros(1, 3, 5, 7)
    page = drawn(layer(before, after), layer(random(1, 2, 5, 7, seed=1), random(1, 2, 5, 7, seed=2), "later"))
    assert [part["part"] for part in page[1]["parts"]] == ["conv before"] + [
        f"later {name}" for name in ("before", "after", "difference")
    ]
    channels, decoded = read_back(page, tmp_path / "zero.png")["conv before"]
    top = page[1]["parts"][0]["high"][0]
    np.testing.assert_allclose(decoded, before[0, channels], atol=top / (colours.LEVELS - 1) * 1.0001)
    assert "after: each drawn channel is 0 everywhere" in words and not any("const" in line for line in words)
    drawn(layer(before, after + torch.arange(3.0)[:, None, None]))
    assert "after: each drawn channel is constant everywhere" in words


def test_nan_and_inf_have_colours_of_their_own_and_are_counted(words: list[str]) -> None:
    before, after = random(1, 4, 3, 3), random(1, 4, 3, 3, seed=1)
    after[0, 2, 0, 0], after[0, 2, 1, 1], after[0, 2, 2, 2] = math.nan, math.inf, -math.inf
    image, told = drawn(layer(before, after, nonfinite=3))
    fixed = [tuple(colours.palette("RdBu_r")[at]) for at in (colours.NAN, colours.PLUS_INF, colours.MINUS_INF)]
    assert fixed == [(255, 0, 255), (255, 0, 0), (0, 200, 255)]
    for part in told["parts"][1:]:
        box, zoom = boxes(image, part)[0], part["zoom"]
        assert part["channels"][0] == 2
        assert [tuple(box[at * zoom, at * zoom]) for at in range(3)] == fixed
    assert not {tuple(pixel) for pixel in boxes(image, told["parts"][0])[0].reshape(-1, 3)} & set(fixed)
    assert "NaN magenta, +Inf red, -Inf light blue (!): 0 before, 3 after, 3 difference" in words
    assert any(line.endswith("NaN or Inf after: 3") for line in words)
    assert told["bands"][0]["parts"][0]["nonfinite"] == {"before": 0, "after": 3, "difference": 3}
    json.dumps(told, allow_nan=False)


def test_the_page_names_interventions_origin_layer_distances_and_channels(words: list[str]) -> None:
    before, net = random(1, 30, 4, 4), loaded("best.pth")
    after = before.clone()
    after[0, [8, 3]] += torch.tensor([2.0, 1.0])[:, None, None]
    drawn(layer(before, after, call=1), net=net, photograph=photograph(), interventions=INTERVENTIONS, seed=7)
    preprocess = net.preprocess.describe()
    assert words[:2] == [
        "resnet34 without and with conv zero:channels=2   then   conv noise:std=0.1",
        f"weights: best.pth, cat.jpg, preprocessing: {preprocess}, seed 7",
    ]
    assert "conv#1   Conv2d   1x30x4x4   changed here" in words
    assert "relative L2 0.25   cosine 0.5" in words
    assert "2 of 30 channels moved; most (root mean square of the difference): 8 (2), 3 (1)" in words
    assert {"before and after:", "difference:", "before", "after", "difference: after - before"} <= set(words)


def test_random_weights_are_red_and_what_is_not_known_is_left_out(words: list[str]) -> None:
    before = random(1, 3, 4, 4)
    image, _ = drawn(layer(before, before + 1))
    assert words[:2] == ["without and with conv", words[1]] and words[1].startswith("The channels that moved most")
    assert not (np.asarray(image) == colours.ALARM).any()
    image, _ = drawn(layer(before, before + 1), net=loaded("random (seed 0)"))
    assert "weights: random (seed 0), the network is not trained" in words
    assert (np.asarray(image) == colours.ALARM).any()
    changes = {0: Zero(channels=1)}
    draw_effect(intervention_effect(nn.Sequential(nn.Conv2d(3, 3, 1)), (random(1, 3, 4, 4),), changes, keep="all"))
    assert "without and with 0 Zero(channels=1)" in words


def test_more_channels_than_are_drawn_and_a_small_difference(words: list[str]) -> None:
    before = random(1, 300, 4, 4)
    _, told = drawn(layer(before, before + 1e-4), most_channels=5)
    assert any(line.startswith("300 of 300 channels moved, 5 drawn; most") for line in words)
    assert any(line.endswith(" % of the scale of before and after") for line in words)
    assert told["parts"][2]["high"][0] == pytest.approx(1e-4, rel=1e-2)


def test_a_layer_that_did_not_move_has_a_line_and_no_grid(words: list[str]) -> None:
    before = random(1, 30, 4, 4)
    image, told = drawn(layer(before, before.clone(), relative_l2=0.0, cosine=1.0))
    assert "nothing moved: each of 30 channels is as before" in words
    assert told["parts"] == []
    assert told["bands"][0]["parts"][0] | {"ranges": {}} == {
        "part": "", "channels": [], "distances": [], "total": 30, "moved": 0, "ranges": {},
        "nonfinite": {"before": 0, "after": 0, "difference": 0},
    }  # fmt: skip
    assert (np.asarray(image) >= colours.LEVELS).all()


def test_a_layer_that_cannot_be_drawn_has_a_line_with_the_reason(words: list[str]) -> None:
    other = layer(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 4), "head", relative_l2=None, cosine=None)
    _, told = drawn(layer(random(1, 2, 3, 3), random(1, 2, 3, 3, seed=1)), other)
    assert "not drawn: the shapes differ: 1x2x3x3 before, 1x2x3x4 after" in words
    assert "relative L2 -   cosine -" in words
    assert [bool(band["why_not"]) for band in told["bands"]] == [False, True]
    with pytest.raises(NoMapError, match=r"head \(Conv2d\) cannot be drawn: the shapes differ"):
        drawn(other)
    with pytest.raises(NoMapError, match="no activation to draw"):
        drawn()
    with pytest.raises(
        NoMapError, match=r"the effect holds no activations; intervention_effect keeps the activations of keep="
    ):
        drawn(MovedLayer(Call("conv", "Conv2d", 0, 0), (1, 2, 3, 3), True, 0.1, 0.9, 0))


def test_parts_and_vectors_are_bands_of_their_own(words: list[str], tmp_path: Path) -> None:
    before, after = random(1, 17, 5), random(1, 17, 5, seed=1)
    found = read_back(drawn(layer(before, after, "encoder")), tmp_path / "a.png")
    assert list(found) == [
        *(f"encoder {name}" for name in ("before", "after", "difference")),
        *(f"encoder, class token {name}" for name in ("before", "after", "difference")),
    ]
    assert {"maps", "class token"} <= set(words)
    vector = torch.tensor([[1.0, 2.0, 3.0]])
    strips = read_back(drawn(layer(vector, vector * torch.tensor([1.0, 2.0, 0.0]), "fc")), tmp_path / "b.png")
    channels, values = strips["fc difference"]
    assert channels == [2, 1]
    np.testing.assert_allclose(values[:, 0, 0], [-3, 2], atol=4 / 243)


def test_the_frames_of_a_clip_come_back(tmp_path: Path) -> None:
    before, after = random(1, 3, 2, 4, 4), random(1, 3, 2, 4, 4, seed=1)
    model = nn.Sequential(nn.Conv3d(1, 1, 1))
    found = read_back(drawn(layer(before, after, "0"), net=model), tmp_path / "clip.png")
    channels, values = found["0 after"]
    sides = torch.cat([after[0, channels, 0], after[0, channels, 1]], 2)
    np.testing.assert_allclose(values, sides, atol=0.05)


def test_the_provenance_names_everything(tmp_path: Path) -> None:
    before, after = random(1, 4, 3, 3), random(1, 4, 3, 3, seed=1)
    net, more = loaded("best.pth"), {"interventions": INTERVENTIONS, "seed": 7}
    image, told = drawn(layer(before, after, call=1), net=net, cmap="coolwarm", photograph=photograph(), **more)
    write_png(image, tmp_path / "effect.png")
    assert read_provenance(tmp_path / "effect.png") == json.loads(json.dumps(told, allow_nan=False))
    expected = {
        **Origin.of(net, photograph()).facts(), "interventions": INTERVENTIONS, "seed": 7, "scale": "symmetric",
        "cmap": "coolwarm", "size": list(image.size),
    }  # fmt: skip
    assert expected.items() <= told.items()
    [band] = told["bands"]
    facts = {"layer": "conv", "call": 1, "index": 3, "type": "Conv2d", "shape": [1, 4, 3, 3], "changed": True,
             "relative_l2": 0.25, "cosine": 0.5}  # fmt: skip
    assert facts.items() <= band.items()
    [part] = band["parts"]
    for name, values in (("before", before), ("after", after), ("difference", after.double() - before)):
        chosen = values[0, part["channels"]].double().flatten(1)
        assert part["ranges"][name] == torch.stack(chosen.aminmax(dim=1), 1).tolist()


def test_the_page_of_an_effect_holds_its_differences_negative_ones_in_blue(tmp_path: Path) -> None:
    first, last = nn.Conv2d(1, 3, 1, bias=False), nn.Conv2d(3, 2, 1, bias=False)
    with torch.no_grad():
        first.weight[:, 0, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
        last.weight[:, :, 0, 0] = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    net = nn.Sequential(first, nn.ReLU(inplace=True), last)
    inputs = (torch.arange(4.0).reshape(1, 1, 2, 2),)
    found = intervention_effect(net, inputs, [("0", Zero(channels="1"))], layers="all", types=("Conv2d",), keep="all")
    page = draw_effect(found, net=net)
    values = read_back((page, {}), tmp_path / "effect.png")
    near, far = values["0 before"], values["2 difference"]
    assert (near[0], far[0]) == ([1], [0])  # 2x is lost, which only the first channel of the last layer sees
    np.testing.assert_allclose(near[1][0], [[0, 2], [4, 6]], atol=6.1 / 243)
    np.testing.assert_allclose(far[1][0], [[0, -2], [-4, -6]], atol=18.1 / 243)
    part = read_provenance(tmp_path / "effect.png")["parts"][-1]
    box = boxes(page, part)[0]
    assert box[-1, -1].tolist() == colours.palette("RdBu_r")[0].tolist()
    assert box[-1, -1, 2] > box[-1, -1, 0], "blue"


def test_maps_are_smaller_and_then_fewer_where_pixels_are_too_many(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    many = [layer(random(1, 16, 9, 9), random(1, 16, 9, 9, seed=1), f"conv{at}") for at in range(3)]
    zooms = {part["zoom"] for part in drawn(*many)[1]["parts"]}
    monkeypatch.setattr(figure, "MOST_PIXELS", 900_000)
    image, told = drawn(*many)
    assert {part["zoom"] for part in told["parts"]} < {*range(1, min(zooms))}
    assert {len(part["channels"]) for part in told["parts"]} == {16}
    monkeypatch.setattr(figure, "MOST_PIXELS", 210_000)
    image, told = drawn(layer(random(1, 16, 64, 64), random(1, 16, 64, 64, seed=1)))
    counts = {(len(part["channels"]), part["zoom"]) for part in told["parts"]}
    [(count, zoom)] = counts
    assert 1 < count < 16
    assert zoom == 1
    assert any(f"16 of 16 channels moved, {count} drawn;" in line for line in words)
    assert len(told["bands"][0]["parts"][0]["ranges"]["after"]) == count
    assert (image.width - 2 * pages.MARGIN) * (image.height - 2 * pages.MARGIN) < 2 * 210_000
    for place in (figure, difference):
        monkeypatch.setattr(place, "MOST_PIXELS", 9_000)
    with pytest.raises(UsageError, match="a page of 3 layers is too large"):
        drawn(*many)


def test_a_model_in_train_mode_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net, x = nn.Sequential(*net, nn.Linear(4, 3)).train(), torch.rand(2, 3, 8, 8)
    judge = copy.deepcopy(net).eval()(x).softmax(1).amax(1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    scores = hookscope.predict(net, x, "top:1")
    assert [row.probability for row in scores] == pytest.approx(judge.tolist())
    intervention_effect(net, (x,), {"0": Zero(channels=1)})
    hookscope.find_exemplars(net, list(x), "0")
    assert net.training and all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
