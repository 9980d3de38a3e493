"""Maps of detected boxes: each method on a detector known on paper, and on torchvision's beside autograd."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.explain.cam import class_activation_maps, landmark_layers
from hookscope.explain.saliency import saliency_maps
from hookscope.explain.saliency_settings import Settings
from hookscope.scores import BoxTarget
from tests.helpers import hooks_on

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import FasterRCNNBoxScoreTarget

CELL = 8


class FindsCells(nn.Module):
    """Finds squares of 8x8 pixels, red ones of class 1 and green ones of class 2, in torchvision's form."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 2, 1, bias=False)
        self.body.weight.data.copy_(torch.tensor([[1.0, -1, 0], [-1, 1, 0]])[..., None, None])
        self.relu = nn.ReLU(inplace=True)
        self.head = Head()

    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        maps = torch.cat([self.relu(self.body(picture[None])) for picture in pictures])
        return self.head(maps)


class Head(nn.Module):
    """The scores are ``sigmoid(8 x - 4)`` of the mean of each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.AvgPool2d(CELL)

    def forward(self, maps: Tensor) -> list[dict[str, Tensor]]:
        images = []
        for scores in (8 * self.mean(maps) - 4).sigmoid():
            label, y, x = (scores > 0.1).nonzero(as_tuple=True)
            corner = CELL * torch.stack([x, y], 1).float()
            images.append(
                {"boxes": torch.cat([corner, corner + CELL], 1), "labels": label + 1, "scores": scores[label, y, x]}
            )
        return images


def street() -> Tensor:
    """Two red squares, of which the left one is stronger, and a green one below the right one."""
    picture = torch.zeros(3, 24, 32)
    picture[0, 8:16, 0:8] = 1
    picture[0, 8:16, 24:32] = 0.8
    picture[1, 16:24, 24:32] = 0.9
    return picture


LEFT, GREEN, RIGHT = BoxTarget(0), BoxTarget(1), BoxTarget(2)
PLACES = {
    LEFT: (slice(8, 16), slice(0, 8)),
    GREEN: (slice(16, 24), slice(24, 32)),
    RIGHT: (slice(8, 16), slice(24, 32)),
}


def share_inside(values: Any, target: BoxTarget) -> float:
    positive = np.maximum(np.asarray(values), 0)
    return float(positive[PLACES[target]].sum() / positive.sum())


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("method", ["hirescam", "layercam"])
def test_maps_of_each_position_lie_in_the_box(target: BoxTarget, method: str) -> None:
    net = FindsCells()
    [cam] = class_activation_maps(net, [street()], "relu", target, method)
    assert cam.prediction.box is not None and hooks_on(net) == 0
    assert share_inside(cam.values, target) == pytest.approx(1, abs=1e-6)


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
@pytest.mark.parametrize(
    "method", ["gradient", "gradient-input", "smoothgrad", "integrated-gradients", "guided-backprop"]
)
def test_saliency_lies_in_the_box(target: BoxTarget, method: str) -> None:
    settings = Settings(samples=4, noise=0.05, steps=8, most_steps=8)
    [saliency] = saliency_maps(FindsCells(), [street()], target, method, settings=settings)
    assert saliency.values.shape == (3, 24, 32)
    assert share_inside(saliency.map, target) == pytest.approx(1, abs=1e-6)


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
