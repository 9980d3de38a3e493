"""Maps of detected boxes: each method on a detector known on paper, and on torchvision's beside autograd."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from hookscope.drawing import Origin
from hookscope.explain.cam import class_activation_maps, landmark_layers
from hookscope.explain.cam_maps import candidates
from hookscope.explain.page import OverlaySource, draw_cam, draw_saliency, why_outside
from hookscope.explain.saliency import saliency_maps
from hookscope.explain.saliency_settings import SaliencySettings
from hookscope.hooks import Call, InputSize
from hookscope.scores import BoxTarget, Prediction
from tests.explain.nets import CELL, FindsCells, street
from tests.helpers import hooks_on, seeded
from tests.nets import Function

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import FasterRCNNBoxScoreTarget

LEFT, GREEN, RIGHT = BoxTarget(0), BoxTarget(1), BoxTarget(2)
PLACES = {
    LEFT: (slice(8, 16), slice(0, 8)),
    GREEN: (slice(16, 24), slice(24, 32)),
    RIGHT: (slice(8, 16), slice(24, 32)),
}


def share_inside(values: Any, target: BoxTarget) -> float:
    positive = np.maximum(np.asarray(values), 0)
    return float(positive[PLACES[target]].sum() / positive.sum())


FEW = SaliencySettings(samples=4, noise=0.05, steps=8, most_steps=8)
OF_GRADIENTS = "gradient", "gradient-input", "smoothgrad", "integrated-gradients", "guided-backprop"
EXPLAIN: dict[str, Callable[..., list[Any]]] = {
    **{name: partial(class_activation_maps, layers="relu", method=name) for name in ("hirescam", "layercam")},
    **{name: partial(saliency_maps, method=name, settings=FEW) for name in OF_GRADIENTS},
}


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("method", EXPLAIN)
def test_maps_of_each_position_and_saliency_lie_in_the_box(target: BoxTarget, method: str) -> None:
    net = FindsCells()
    [found] = EXPLAIN[method](net, [street()], target=target)
    assert found.prediction.box is not None and found.seen == (24, 32) and hooks_on(net) == 0
    assert share_inside(found.still, target) == pytest.approx(1, abs=1e-6)


def test_channels_weigh_as_much_as_the_box_loses_without_them() -> None:
    [green] = class_activation_maps(FindsCells(), [street()], "relu", GREEN, "ablationcam")
    assert share_inside(green.values, GREEN) == pytest.approx(1)
    [right] = class_activation_maps(FindsCells(), [street()], "relu", RIGHT, "ablationcam")
    assert right.values[PLACES[RIGHT]] == pytest.approx(0.8) and right.values[PLACES[LEFT]] == pytest.approx(1)


def test_masks_weigh_by_how_well_they_still_show_the_box() -> None:
    [cam] = class_activation_maps(FindsCells(), [street()], "relu", RIGHT, "scorecam")
    # the mask of the red channel leaves 0.8 of the right square's 0.8; that of the green channel leaves nothing of it
    red, green = torch.tensor([torch.tensor(8 * 0.64 - 4).sigmoid(), 0]).softmax(0).tolist()
    assert cam.values[PLACES[RIGHT]] == pytest.approx(0.8 * red, rel=1e-5)
    assert cam.values[PLACES[GREEN]] == pytest.approx(0.9 * green, rel=1e-5)


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("method", ["occlusion", "rise"])
def test_hiding_and_showing_parts_of_the_image_finds_the_box(target: BoxTarget, method: str) -> None:
    settings = SaliencySettings(samples=200, window=4, batch_size=50)
    [saliency] = saliency_maps(FindsCells(), [street()], target, method, settings=settings)
    y, x = np.unravel_index(saliency.still.argmax(), (24, 32))
    rows, columns = PLACES[target]
    assert rows.start <= y < rows.stop and columns.start <= x < columns.stop


def test_gradients_are_those_of_the_score_on_paper() -> None:
    [saliency] = saliency_maps(FindsCells(), [street()], RIGHT)
    score = torch.tensor(8 * 0.8 - 4).sigmoid()
    slope = float(8 * score * (1 - score) / CELL**2)
    assert saliency.prediction.score == pytest.approx(float(score))
    assert saliency.values[0][PLACES[RIGHT]].tolist() == [[pytest.approx(slope, rel=1e-4)] * CELL] * CELL
    assert saliency.values[1][PLACES[RIGHT]].tolist() == [[pytest.approx(-slope, rel=1e-4)] * CELL] * CELL


def test_grad_cam_is_that_of_another_package() -> None:
    net, picture = FindsCells(), street()
    [cam] = class_activation_maps(net, [picture], "relu", RIGHT)
    [found] = net([picture])
    at = int(found["scores"].argsort(descending=True)[2])
    judge = FasterRCNNBoxScoreTarget([int(found["labels"][at])], found["boxes"][at : at + 1].detach().numpy())
    with GradCAM(net, [net.relu]) as theirs:
        [expected] = theirs(picture[None], [judge])
    assert np.allclose(cam.values / cam.values.max(), expected / expected.max(), atol=1e-4)


def test_the_layer_of_a_box_lies_before_the_detection_head() -> None:
    [cam] = class_activation_maps(FindsCells(), [street()], target=LEFT)
    assert cam.call.key == "relu"
    assert landmark_layers(FindsCells(), [street()], LEFT) == ["relu"]


def ssdlite() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=4, score_thresh=0.0
        )
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
    return net.eval()


def test_gradients_of_torchvisions_detectors_are_those_of_autograd() -> None:
    net, picture = ssdlite(), torch.rand(3, 40, 48, generator=torch.Generator().manual_seed(1))
    [cam] = class_activation_maps(net, [picture], target=BoxTarget(1), method="hirescam")
    [saliency] = saliency_maps(net, [picture], BoxTarget(1))
    leaf = picture.clone().requires_grad_()
    [found] = net([leaf])
    [expected] = torch.autograd.grad(found["scores"][1], leaf)
    assert saliency.prediction.score == cam.prediction.score == found["scores"][1].item() and expected.abs().max() > 0
    assert saliency.prediction.box == cam.prediction.box == tuple(found["boxes"][1].tolist())
    torch.testing.assert_close(saliency.values, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    assert cam.call.key == "backbone" and (cam.values > 0).any()


def test_a_map_that_is_highest_outside_the_box_says_so() -> None:
    maps = {}
    for method in ("gradcam", "layercam"):
        for target in (LEFT, RIGHT):
            [maps[method, target]] = class_activation_maps(FindsCells(), [street()], "relu", target, method)
    assert why_outside(maps["gradcam", RIGHT]) == (
        "the highest value lies outside the box; hirescam and layercam show only what its score depends on"
    )
    assert not any(why_outside(maps[key]) for key in maps if key != ("gradcam", RIGHT))
    [coarse] = class_activation_maps(FindsCells(), [street()], "head.mean", RIGHT)
    assert why_outside(coarse)  # the cell of the left square
    narrow = replace(coarse, values=coarse.values[:, 2:], prediction=replace(coarse.prediction, box=(17, 9, 18, 15)))
    assert not why_outside(narrow)  # the box lies in the highest cell, beside its centre
    point = Prediction(0, None, 1.0, 0.5, target="class 0 at 0,0", box=(0, 0, 1, 1))
    assert not why_outside(replace(coarse, prediction=point))  # a region, not a detected box


def test_the_box_is_drawn_where_the_network_saw_it() -> None:
    photograph = Image.new("RGB", (640, 480), (128, 128, 128))
    [cam] = class_activation_maps(FindsCells(), [street()], "relu", RIGHT)
    [saliency] = saliency_maps(FindsCells(), [street()], RIGHT)
    for draw, answer in (
        (lambda one: draw_cam([one], photograph), cam),
        (partial(draw_saliency, photograph=photograph), saliency),
    ):
        framed, plain = draw(answer), draw(replace(answer, prediction=replace(answer.prediction, box=None)))
        facts = json.loads(framed.info["hookscope"])
        assert facts.get("maps", [facts])[0]["box"] == [24, 8, 32, 16]
        changed = np.argwhere((np.asarray(framed) != np.asarray(plain)).any(-1))
        # 160 pixels from the top of the box to its foot, and the outline of three lines of two pixels
        assert np.ptp(changed[:, 0]) == 160 + 2 * 4
    source = OverlaySource(photograph, (-10.0, 20.0, 630.0, 260.0), Origin.of(None, photograph))
    assert source.frame_of(cam.prediction, cam.seen) == (470, 100, 630, 180)
    assert source.frame_of(replace(cam.prediction, box=None), cam.seen) is None


def pyramid() -> nn.Module:
    """Finds box 0 on the fine one of two levels of maps, and box 1 on the coarse one."""

    def levels(net: Any, x: Tensor) -> dict[str, Tensor]:
        fine = net.fine(x)
        return {"0": fine, "1": net.pool(fine)}

    def forward(net: Any, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        fine, coarse = net.body(torch.stack(list(pictures))).values()
        scores = torch.stack([(fine.mean() + 1).sigmoid(), coarse.mean().sigmoid()])
        boxes = torch.tensor([[0.0, 0, 9, 9], [9, 9, 20, 20]])
        return [{"boxes": boxes, "labels": torch.ones(2).long(), "scores": scores}]

    fine = nn.Conv2d(3, 2, 1)
    nn.init.constant_(fine.weight, 1)
    return Function(forward, body=Function(levels, fine=fine, pool=nn.AvgPool2d(2)))


@pytest.mark.parametrize("layers", [None, "body"])
def test_each_box_takes_the_level_of_a_pyramid_that_it_depends_on(layers: str | None) -> None:
    maps = class_activation_maps(pyramid(), [street()], layers, BoxTarget((0, 1)), "layercam")
    assert [(cam.call.key, cam.values.shape, cam.is_empty) for cam in maps] == [
        ("body", (24, 32), False),
        ("body", (12, 16), False),
    ]


def test_a_detector_that_resizes_to_a_square_has_square_maps() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 1))
    net.transform = SimpleNamespace(fixed_size=(320, 320))  # as in torchvision's SSD
    outputs = [(Call("0", "Conv2d", 0, 0), {"0": torch.zeros(1, 2, 20, 20), "5": torch.zeros(1, 2, 2, 2)})]
    found = candidates(net, outputs, InputSize(300, 451))
    assert [layer.resolution for layer in found] == [(2, 2), (20, 20)]


def with_queries(levels: int) -> nn.Module:
    """A detector with outputs as those of transformers: queries that look at the tokens of two levels in a row.

    There are 4x4 queries, and 4x4 + 2x2 = 4x5 tokens, which are no 4x5 places.
    """
    queries = torch.randn(1, 16, 8)

    def forward(net: Any, x: Tensor) -> dict[str, Tensor]:
        fine = net.backbone(x)
        maps = [fine, net.coarse(fine)][:levels]
        tokens = net.norm(net.encoder(torch.cat([level.flatten(2).mT for level in maps], 1)))
        found = net.norm(queries + (queries @ tokens.mT).softmax(-1) @ tokens)
        return {"logits": net.classes(found), "pred_boxes": net.boxes(found).sigmoid()}

    layers = {"backbone": nn.Conv2d(3, 8, 8, 8), "coarse": nn.Conv2d(8, 8, 2, 2), "encoder": nn.Tanh()}
    return Function(forward, **layers, norm=nn.LayerNorm(8), boxes=nn.Linear(8, 4), classes=nn.Linear(8, 3))


@pytest.mark.parametrize(("levels", "layer"), [(1, "encoder"), (2, "backbone")])
def test_queries_and_tokens_of_several_levels_are_no_map(levels: int, layer: str) -> None:
    net = seeded(lambda: with_queries(levels))
    [cam] = class_activation_maps(net, torch.rand(1, 3, 32, 32), target=BoxTarget(0), method="hirescam")
    assert (cam.call.key, cam.values.shape) == (layer, (4, 4))
