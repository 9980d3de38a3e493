"""Answers that are no scores of classes, against the model's own output, NumPy and `class_activation_maps`."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

from hookscope.errors import OutputNote
from hookscope.explain import class_activation_maps
from hookscope.inspection import InspectedImage, inspect
from hookscope.models import LoadedModel, WeightsMetadata
from tests.inspection.test_run import noise, ready
from tests.nets import Function


def segmenter(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    narrow = [nn.Conv2d(3, 6, 3, stride=4, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *narrow,
        nn.Upsample(scale_factor=4),
        nn.Conv2d(6, classes, 3, padding=1),
        nn.InstanceNorm2d(classes, affine=True),
    )


def numbers(change: Any) -> nn.Module:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return Function(lambda net, x: change(net.head(x)), head=head)


def seen(net: LoadedModel, **options: Any) -> tuple[InspectedImage, Any]:
    """What is kept of an image, and what the model returns for it."""
    image = noise()
    with torch.no_grad():
        output = net.model(*net.inputs(net.prepare(image)))
    return inspect(net, image, **options).images[0], output


def test_the_mask_of_an_own_segmentation_has_the_best_class_of_each_pixel() -> None:
    image, output = seen(ready(segmenter(), categories=("sky", "road", "car")))
    best = output[0].numpy().argmax(0)
    np.testing.assert_array_equal(image.answer.mask, best)
    shares = np.bincount(best.ravel(), minlength=3) / best.size
    assert [(row.index, row.score) for row in image.answer.rows] == [(at, shares[at]) for at in np.argsort(-shares)]
    assert (
        image.answer.words(1) == f"{('sky', 'road', 'car')[shares.argmax()]} {100 * shares.max():.3g} % of the pixels"
    )
    assert image.classes == () and image.without_cam == "to explain a class, try target=1"


def test_a_named_class_of_an_own_segmentation_has_a_grad_cam_before_the_upsampling() -> None:
    net = ready(segmenter())
    image, _ = seen(net, target=1)
    assert image.cam is not None and image.cam.call.name == "3"
    [judge] = class_activation_maps(net.model, net.inputs(net.prepare(noise())), "name:3", target=1)
    np.testing.assert_allclose(image.cam.values, judge.values, rtol=1e-4, atol=1e-7)


def test_a_class_without_a_pixel_has_no_grad_cam_and_the_reason() -> None:
    net = segmenter()
    net[-1].bias.data[2] = -1e6
    image, _ = seen(ready(net), target=2)
    assert image.cam is None and image.without_cam == "the segmentation has no pixel of class 2"


def test_a_single_map_is_of_the_class_where_it_is_above_0() -> None:
    image, output = seen(ready(segmenter(1)))
    np.testing.assert_array_equal(image.answer.mask, np.where(output[0, 0].numpy() > 0, 0, -1))
    assert sum(row.score for row in image.answer.rows) == float((output > 0).double().mean())


def test_a_map_of_probabilities_is_of_the_class_above_one_half() -> None:
    image, output = seen(ready(nn.Sequential(segmenter(1), nn.Sigmoid())))
    assert 0 < float((output > 0.5).float().mean()) < 1
    np.testing.assert_array_equal(image.answer.mask, (output[0, 0].numpy() > 0.5).astype(int) - 1)


def test_an_enlarged_input_is_an_image_too() -> None:
    enlarged = Function(
        lambda net, x: nn.functional.interpolate(x, scale_factor=2) + 0.01 * net.conv(x).mean(), conv=nn.Conv2d(3, 3, 3)
    )
    image, _ = seen(ready(enlarged))
    assert image.answer.words() == "correlation with the input 1"


def test_an_output_like_the_input_is_an_image_and_not_a_segmentation() -> None:
    image, output = seen(ready(Function(lambda net, x: x + net.conv(x) / 10, conv=nn.Conv2d(3, 3, 3, padding=1))))
    pairs = zip(output[0].numpy(), ready(nn.Identity()).prepare(noise()).numpy(), strict=True)
    lowest = min(np.corrcoef(one.ravel(), other.ravel())[0, 1] for one, other in pairs)
    assert image.answer.mask is None and image.answer.words() == f"correlation with the input {lowest:.4g}"


@pytest.mark.parametrize(
    "net", [nn.Conv2d(3, 5, 16, 16, 8), nn.Sequential(nn.Conv2d(3, 5, 1), nn.Threshold(9.0, torch.nan))]
)
def test_neither_coarse_features_nor_nan_are_classes_of_pixels(net: nn.Module) -> None:
    image, _ = seen(ready(net))
    assert image.answer is None and "no score for each class" in image.without_cam


def test_boxes_are_those_of_the_detector_the_best_first() -> None:
    torch.manual_seed(0)
    net = LoadedModel.of(
        ssdlite320_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=5, score_thresh=0.0, topk_candidates=9
        ).eval(),
        "ssd",
        "as given",
        WeightsMetadata(),
    )
    image, [judge] = seen(net)
    order = judge["scores"].argsort(descending=True, stable=True)[:8]
    assert image.answer.total == len(judge["scores"]) > 8
    assert [row.index for row in image.answer.rows] == judge["labels"][order].tolist()
    np.testing.assert_allclose([row.box for row in image.answer.rows], judge["boxes"][order], rtol=1e-6)
    np.testing.assert_allclose([row.score for row in image.answer.rows], judge["scores"][order], rtol=1e-6)


def _row(scores: Tensor) -> Tensor:
    return scores[:, 0]


@pytest.mark.parametrize(
    ("change", "names", "classes"),
    [
        (_row, ["output"], 0),
        (lambda scores: scores[:, :1], ["output"], 0),
        (lambda scores: scores, ["output 0", "output 1", "output 2"], 3),
        (lambda scores: {"age": scores[:, :1], "at": scores[:, 1:]}, ["age", "at 0", "at 1"], 0),
        (lambda scores: {"box": scores}, ["box 0", "box 1", "box 2"], 0),
    ],
    ids=["vector", "one", "three", "named", "box"],
)
@pytest.mark.filterwarnings("ignore::hookscope.errors.OutputNote")
def test_a_short_output_is_told_as_numbers_in_their_order(change: Any, names: list[str], classes: int) -> None:
    image, output = seen(ready(numbers(change)))
    values = torch.cat([part.flatten() for part in (output.values() if isinstance(output, dict) else [output])])
    assert [(row.name, row.score) for row in image.answer.rows] == list(zip(names, values.tolist(), strict=True))
    assert len(image.classes) == classes


def test_scores_with_names_of_classes_are_no_numbers() -> None:
    image, _ = seen(ready(numbers(lambda scores: scores), categories=("a", "b", "c")))
    assert image.answer is None and len(image.classes) == 3


@pytest.mark.parametrize(("last", "told"), [(nn.Softmax(1), True), (nn.Sigmoid(), False)])
def test_a_segmentation_that_ends_in_a_softmax_is_told(last: nn.Module, told: bool) -> None:
    net = segmenter()
    for weight in net.parameters():
        nn.init.normal_(weight)  # not as after initialisation
    places = inspect(ready(nn.Sequential(net, last)), noise()).places
    assert "random-weights" not in [place.kind for place in places]
    assert ("probabilities-as-scores" in [place.kind for place in places]) is told


def test_the_choice_of_an_output_is_told_once() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    parts = {"body": nn.Sequential(*body, nn.Flatten()), "head": nn.Linear(8, 4)}
    net = Function(lambda net, x: (net.head(values := net.body(x)), values), **parts)
    for weight in net.parameters():
        nn.init.normal_(weight)  # not as after initialisation
    with pytest.warns(OutputNote) as told:
        places = inspect(ready(net), noise()).places
    assert "carries-answer" in [place.kind for place in places]
    assert len({str(each.message) for each in told}) == 1
