"""Faithfulness on a linear net, whose curves follow on paper, and against grad-cam's metrics."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_grad_cam.metrics.cam_mult_image import DropInConfidence, IncreaseInConfidence
from pytorch_grad_cam.metrics.road import NoisyLinearImputer, ROADCombined
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget
from torch import Tensor, nn

import hookscope
from hookscope import compare_maps, measure_faithfulness
from hookscope.errors import HookscopeError, InputError, UsageError
from hookscope.faithfulness import BASELINES
from hookscope.faithfulness.measure import imputed
from hookscope.scores import BoxTarget, RegionTarget
from tests.cli.helpers import ROOT
from tests.explain.nets import picture, small
from tests.helpers import hooks_on, same_values, seeded
from tests.nets import Function

SIZE = (25, 38)
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__")  # the authors' code gives tensors to NumPy


def blocks(share: float) -> Tensor:
    cells = torch.nn.functional.interpolate(torch.rand(1, 1, 5, 7), SIZE, mode="bilinear")
    return cells > cells.flatten().quantile(share)


@pytest.mark.parametrize(
    "known",
    [
        lambda: blocks(0.2),
        lambda: blocks(0.9),
        lambda: torch.rand(1, 1, *SIZE) > 0.5,
        lambda: torch.arange(SIZE[0] * SIZE[1]).reshape(1, 1, *SIZE) == 444,
        lambda: torch.arange(SIZE[0] * SIZE[1]).reshape(1, 1, *SIZE) % SIZE[1] > 1,
        lambda: torch.ones(1, 1, *SIZE, dtype=torch.bool),
    ],
)
def test_it_is_the_authors_within_half_of_the_noise(known: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    picture, mask = torch.randn(1, 3, *SIZE), known()
    found = imputed(picture, mask, noise=0.0)[0]
    if bool(mask.all()):
        assert torch.equal(found, picture[0])
        return
    expected = NoisyLinearImputer(noise=0)(picture[0], mask[0, 0].float())
    assert (found - expected).abs().max() < 0.005


def test_masks_of_one_batch_do_not_affect_each_other() -> None:
    torch.manual_seed(0)
    pictures, known = torch.randn(3, 2, *SIZE), torch.cat([blocks(share) for share in (0.1, 0.5, 0.9)])
    together = imputed(pictures, known, noise=0.0)
    for at in range(3):
        alone = imputed(pictures[at : at + 1], known[at : at + 1], noise=0.0)
        assert (together[at] - alone[0]).abs().max() < 0.01


def test_the_noise_is_in_removed_pixels_only_and_has_its_size() -> None:
    torch.manual_seed(0)
    picture, known = torch.zeros(1, 3, 64, 64), torch.rand(1, 1, 64, 64) > 0.5
    found = imputed(picture, known)
    assert not found[known.expand_as(found)].any()
    assert 0.009 < float(found[~known.expand_as(found)].std()) < 0.011
    picture = torch.arange(24.0).reshape(1, 2, 3, 4)
    found = imputed(picture, torch.zeros(1, 1, 3, 4, dtype=torch.bool), noise=0.0)
    assert torch.allclose(found[0].mean((1, 2)), torch.tensor([5.5, 17.5]))
    assert torch.allclose(found[0], found[0, :, :1, :1].expand(2, 3, 4))


WEIGHTS = torch.tensor([[8.0, 1, -2, 4], [0, 2, -1, 3]])
PICTURE = torch.tensor([[3.0, 1, 2, 5], [2, 7, 1, 4]])[None, None]
LINEAR = Function(lambda x: (x[:, 0] * WEIGHTS).sum((1, 2)))


def total(output: Tensor) -> Tensor:
    return output


def test_the_curves_and_the_drop_of_a_linear_net_are_those_on_paper() -> None:
    values = WEIGHTS.flip(0).numpy()[::-1]  # with a stride below 0, which torch does not take
    [found] = measure_faithfulness(LINEAR, PICTURE, values, total, fill="mean", steps=8, baselines=False)
    mean = float(PICTURE.mean())
    gains = (WEIGHTS * (PICTURE[0, 0] - mean)).flatten()
    most_first = gains[torch.argsort(WEIGHTS.flatten(), descending=True)].double().numpy()
    whole = float(gains.sum())
    shown = np.concatenate([[0], np.cumsum(most_first)]) / whole
    assert np.allclose(found.curves["insertion"], shown, atol=1e-6)
    assert np.allclose(found.curves["deletion"], 1 - shown, atol=1e-6)
    area = sum((shown[at] + shown[at + 1]) / 2 / 8 for at in range(8))
    assert found.insertion == pytest.approx(area, abs=1e-6)
    assert found.deletion == pytest.approx(1 - area, abs=1e-6)
    assert found.prediction.score == pytest.approx(float((WEIGHTS * PICTURE[0, 0]).sum()))
    values = torch.tensor([[1.0, -5, 0.5, 0], [0, 0, 0, 0.25]])
    [found] = measure_faithfulness(LINEAR, PICTURE, values, total, baselines=False)
    nothing = float((WEIGHTS * PICTURE.mean()).sum())
    whole = found.prediction.score - nothing
    masked = 8 * 3 - 2 * 2 * 0.5 + 3 * 4 * 0.25 - nothing
    assert found.drop == pytest.approx(1 - masked / whole) and not found.increase


def test_road_and_drop_are_those_of_grad_cam() -> None:
    net, x = small(), picture(24, 24)
    index = int(net(x)[0].argmax())
    cells = torch.rand(24, 24, generator=torch.Generator().manual_seed(3)).numpy()
    [found] = measure_faithfulness(net, x, cells, index, baselines=False)
    judge = [x, cells[None] / cells.max(), [ClassifierOutputSoftmaxTarget(index)], net]
    with torch.random.fork_rng():
        assert found.road == pytest.approx(float(ROADCombined()(*judge)[0]), abs=2e-4)
    change = float(DropInConfidence()(*judge)[0])
    probability = float(net(x).softmax(1)[0, index].detach())
    assert found.drop * probability == pytest.approx(change, abs=1e-6)
    assert found.increase == bool(IncreaseInConfidence()(*judge)[0])


def test_the_score_of_a_class_is_its_probability() -> None:
    net, x = small(), picture(24, 24)
    with torch.no_grad():
        expected = float(net(x).softmax(1)[0, 2])
    found = measure_faithfulness(net, x, np.ones((3, 3)), 2)
    for each in found:
        assert each.curves["deletion"][0] == each.curves["insertion"][-1] == pytest.approx(expected)
    assert {each.curves["deletion"][-1] for each in found} == {found[0].curves["deletion"][-1]}


@pytest.mark.parametrize("wrap", [lambda maps: maps, lambda maps: {"out": maps}])
def test_the_score_of_a_region_is_the_mean_probability_of_the_class_in_it(wrap: Callable[[Tensor], Any]) -> None:
    net, x = seeded(lambda: nn.Conv2d(3, 4, 5, padding=2)), picture(24, 24)
    region = torch.zeros(24, 24)
    region[3:9, 4:20] = 1
    cells = torch.rand(24, 24, generator=torch.Generator().manual_seed(3))
    found = {
        "region": measure_faithfulness(Function(lambda x: wrap(net(x))), x, cells, RegionTarget(region, 2)),
        "best": measure_faithfulness(Function(lambda x: wrap(net(x))), x, cells, 2),
    }
    pixels = {"region": region > 0, "best": net(x)[0].argmax(0) == 2}
    order = cells.flatten().argsort(descending=True)
    for name, [each, *_] in found.items():
        for step in (0, 6, 24):
            removed = x.clone()
            removed.flatten(2)[..., order[: 24 * step]] = x.mean((2, 3)).detach()[..., None]
            expected = net(removed).softmax(1)[0, 2][pixels[name]].mean().item()
            assert each.curves["deletion"][step] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 300.0])
def test_the_scale_of_a_map_changes_nothing_and_costs_nothing(scale: float) -> None:
    net, x = small(), picture(24, 24)
    values = np.random.default_rng(0).random((5, 5))
    first, second = measure_faithfulness(net, x, [values, values * scale], baselines=False)
    assert (first.road, first.deletion) == (second.road, second.deletion)
    assert (first.passes, second.passes) == (2 * 23 + 18 + 1, 0)
    assert (first.same_as, second.same_as) == (None, first.name)


def test_a_constant_map_is_as_good_as_any_random_one() -> None:
    found = {each.name: each for each in measure_faithfulness(small(), picture(24, 24), {"flat": np.zeros((7, 7))}, 1)}
    assert list(found) == ["flat", *BASELINES]
    assert found["flat"].curves["most"].tolist() == found["random"].curves["most"].tolist()


def test_progress_counts_every_image_once() -> None:
    seen: list[tuple[int, int]] = []
    maps = {"a": np.eye(4), "b": np.eye(5), "the same as a": 2 * np.eye(4)}
    found = measure_faithfulness(
        small(), picture(24, 24), maps, 0, steps=3, batch_size=4, on_progress=lambda *at: seen.append(at)
    )
    assert seen[-1] == (4 + sum(each.passes for each in found),) * 2


@pytest.mark.parametrize(
    ("inputs", "values"),
    [
        (torch.rand(1, 3, 4, 16, 16), np.random.default_rng(0).random((2, 4, 4))),
        (torch.rand(1, 3, 4, 16, 16), np.eye(4)),
        (([torch.rand(3, 16, 20)],), np.eye(4)),
        ((torch.rand(1, 3, 16, 16).double(),), torch.eye(4).bfloat16()),
        (torch.rand(1, 3, 16, 16).bfloat16(), np.zeros((4, 4))),
    ],
)
def test_clips_detectors_and_other_precisions_are_measured(inputs: Any, values: Any) -> None:
    net = Function(lambda x: torch.stack([each.float().sum() + 9 * each.max() for each in x]))
    [found] = measure_faithfulness(net, inputs, values, lambda output: output + 1e4, steps=4, baselines=False)
    assert all(np.isfinite(curve).all() for curve in found.curves.values())
    assert len(found.curves["most"]) == 9 and len(found.curves["deletion"]) == 5


def test_of_a_clip_each_place_of_each_frame_has_its_turn() -> None:
    clip = torch.zeros(1, 1, 3, 4, 4)
    clip[0, 0, 1, 2, 2] = 1.0
    net = Function(lambda x: x[:, 0, 1, 2, 2])
    values = np.zeros((3, 4, 4))
    values[1, 2, 2] = 1
    [found] = measure_faithfulness(net, clip, values, total, fill="mean", steps=48, baselines=False)
    assert np.allclose(found.curves["insertion"], [0] + [1] * 48)
    assert np.allclose(found.curves["deletion"], [1] + [0] * 48)


def test_what_explains_a_detected_box_is_ahead_of_the_baselines() -> None:
    def detect(pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        """One box, as sure as the pixels in it are bright."""
        bright = [picture[:, 4:12, 8:20].mean()[None] for picture in pictures]
        box, label = torch.tensor([[8.0, 4, 20, 12]]), torch.tensor([1])
        return [{"boxes": box, "labels": label, "scores": score} for score in bright]

    image, truth = torch.zeros(3, 24, 32), np.zeros((24, 32))
    image[:, 4:12, 8:20] = 0.9
    truth[4:12, 8:20] = 1
    maps = {"truth": truth, "wrong": 1 - truth}
    found = measure_faithfulness(Function(detect), [image], maps, BoxTarget(0), boxes=[(8, 4, 20, 12)])
    by_road = sorted(found, key=lambda each: -each.road)
    assert (by_road[0].name, by_road[-1].name) == ("truth", "wrong")
    assert (by_road[0].in_box, by_road[0].points, by_road[0].drop) == (pytest.approx(1), True, pytest.approx(0))
    # without the most important 20 to 90 % the box is gone, and the least important change nothing
    nothing = float(image.mean()) / 0.9
    assert by_road[0].curves["most"][-1] == pytest.approx(-nothing / (1 - nothing), abs=0.05)
    assert by_road[0].curves["least"][:7] == pytest.approx(np.ones(7), abs=0.01)
    assert found[0].prediction.target.startswith("box 0")


def test_boxes_are_in_pixels_of_the_input() -> None:
    values = np.zeros((8, 8), np.float32)
    values[2, 5], values[6, 6] = 3, 1
    found = measure_faithfulness(LINEAR, PICTURE, np.eye(2), total, baselines=False)[0]
    assert (found.in_box, found.points) == (None, None)
    net, x = Function(lambda x: x.mean((2, 3))), torch.rand(1, 3, 8, 8)
    for boxes, share, points in [
        ([(5, 2, 6, 3)], 0.75, True),
        ([(0, 0, 5, 8)], 0.0, False),
        ([(5, 2, 6, 3), (6, 6, 7, 7)], 1.0, True),
        ([(6, 6, 9, 9)], 0.25, False),
    ]:
        [found] = measure_faithfulness(net, x, values, 0, boxes=boxes, baselines=False)
        assert (found.in_box, found.points) == (pytest.approx(share, abs=1e-5), points)
    [empty] = measure_faithfulness(net, x, -np.ones((2, 2)), 0, boxes=[(0, 0, 8, 8)], baselines=False)
    assert (empty.in_box, empty.points) == (0.0, False)


def test_the_model_the_image_and_the_random_state_stay_as_they_are() -> None:
    net, x = small().train(), picture(24, 24)
    state, before = {name: tensor.clone() for name, tensor in net.state_dict().items()}, torch.get_rng_state()
    first = measure_faithfulness(net, x, np.eye(5), 1)
    again = measure_faithfulness(net, x, np.eye(5), 1)
    assert [each.road for each in first] == [each.road for each in again]
    assert net.training and not hooks_on(net) and same_values(net, state)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(x, picture(24, 24))


def test_maps_of_the_library_have_their_names() -> None:
    net, x = small(), picture(24, 24)
    cams = hookscope.class_activation_maps(net, x, "0,1", 1)
    named = measure_faithfulness(net, x, [*cams, *hookscope.saliency_maps(net, x, 1)], 1, steps=1, baselines=False)
    assert [each.name for each in named] == ["gradcam", "gradcam second", "gradient"]
    assert "gradcam second" in repr(named) and "<img" in named._repr_html_()


BAD: list[tuple[dict[str, Any], type[HookscopeError], str]] = [
    ({"maps": np.zeros((2, 3, 4))}, UsageError, "map has the shape 2x3x4"),
    ({"maps": np.full((3, 3), np.nan)}, InputError, "the map map is not finite"),
    ({"maps": np.full((3, 3), "x")}, UsageError, "no numbers"),
    ({"maps": {}}, UsageError, "no map to measure"),
    ({"target": "top:2"}, UsageError, "the target names 2"),
    ({"inputs": torch.rand(2, 3, 24, 24)}, UsageError, "needs one image"),
    ({"fill": "grey"}, UsageError, "no fill 'grey'"),
    ({"steps": 0}, UsageError, "steps must be an integer of at least 1, not 0"),
    ({"target": lambda output: -(output * 0 + 1)[:, 0]}, InputError, "does not fall"),
]


@pytest.mark.parametrize(("given", "error", "words"), BAD)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], error: type[HookscopeError], words: str) -> None:
    usual = {"inputs": picture(24, 24), "maps": np.eye(3), "target": 0}
    with pytest.raises(error, match=words):
        measure_faithfulness(small(), **{**usual, **given})


@pytest.mark.slow
def test_on_shapes_the_numbers_agree_with_the_boxes() -> None:
    folder = ROOT / "samples" / "shapes"
    net = hookscope.load_model("shapes")
    measured = []
    for name, facts in json.loads((folder / "boxes.json").read_text()).items():
        inputs = net.inputs(net.preprocess(hookscope.open_image(folder / name)))
        [box], truth = [facts["box"]], np.zeros((128, 128), np.float32)
        truth[box[1] : box[3], box[0] : box[2]] = 1
        maps = {
            layer or "last": hookscope.class_activation_maps(net.model, inputs, layer)[0]
            for layer in (None, "features.7", "features.3")
        }
        measured.append(
            measure_faithfulness(net.model, inputs, {**maps, "box": truth, "outside": 1 - truth}, boxes=[box])
        )
    found = {row.name: row for row in compare_maps(measured).maps}
    order = sorted(found, key=lambda name: -found[name].road)
    assert {*order[:2]} == {"box", "last"} and order[-1] == "outside"
    for measure, best_first in (("road", True), ("insertion", True), ("deletion", False)):
        values = [getattr(found[name], measure) for name in ("last", "features.3", "outside")]
        assert values == sorted(values, reverse=best_first)
    inside = [found[name].in_box for name in ("box", "last", "features.3", "outside")]
    assert inside == sorted(inside, reverse=True)
    assert (found["last"].points == 1 and not found["last"].within_noise) or found["box"].road > found["last"].road
