"""Similarities of embeddings and detected boxes as targets."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope import saliency_maps
from hookscope.errors import HookscopeError, ModelError, TargetError
from hookscope.scores import BoxTarget, Objective, SimilarityTarget, objectives
from hookscope.scores.score_targets import detections
from tests.helpers import refused

ONE = torch.tensor([[3.0, 4.0]])
OTHER = torch.tensor([[4.0, 3.0], [0.0, -2.0]])  # cosines 24 / 25 and -4 / 5


@pytest.mark.parametrize(
    "output",
    [
        lambda vectors: vectors,
        lambda vectors: vectors[:, :, None, None].expand(-1, -1, 3, 5),
        lambda vectors: vectors[:, None].expand(-1, 7, -1),
        lambda vectors: {"last_hidden_state": torch.rand(len(vectors), 7, 9), "pooler_output": vectors},
        lambda vectors: [vectors],
    ],
    ids=["vector", "maps", "tokens", "transformers", "list"],
)
def test_similarity_is_the_cosine_of_the_embeddings(output: Any) -> None:
    [goal] = objectives(SimilarityTarget(output(ONE), "dog.png"), output(OTHER[:1]), None)
    assert (goal.score.name, goal.score.key) == ("similarity to dog.png", "similarity-to-dog-png")
    assert goal.score.score == pytest.approx(24 / 25)
    assert goal.of(output(OTHER)).tolist() == pytest.approx([24 / 25, -4 / 5])


def test_the_reference_itself_has_similarity_1_and_large_embeddings_fit_half_precision() -> None:
    numbers = torch.Generator().manual_seed(0)
    for vector in torch.rand(50, 1, 300, generator=numbers):
        [goal] = objectives(SimilarityTarget(vector), vector, None)
        assert 1 - 1e-6 < goal.score.score <= 1
    [goal] = objectives(SimilarityTarget(100 * ONE.half()), 100 * OTHER[:1].half(), None)
    assert goal.score.score == pytest.approx(24 / 25)


def test_its_gradient_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    one, other = torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8, requires_grad=True)
    a, b = net(one).detach()[0], net(other)[0]
    [slopes] = torch.autograd.grad(a @ b / (a.norm() * b.norm()), other)
    [ours] = saliency_maps(net, other.detach(), SimilarityTarget(net(one)))
    assert torch.allclose(ours.values, slopes[0], atol=1e-7) and slopes.any()


@pytest.mark.parametrize(
    ("reference", "output", "says"),
    [
        (ONE, [{"boxes": torch.ones(1, 4), "labels": torch.ones(1)}], "the model gives boxes and labels, no embedding"),
        (
            ONE,
            torch.ones(1),
            "the model gives 1 values, no embedding; use a model that returns a vector for each image",
        ),
        (ONE * 0, ONE, "the embedding of the reference has length 0; choose another reference"),
        (ONE, torch.ones(1, 3), "an embedding of 3 values cannot be compared with the reference, which has 2"),
    ],
)
def test_outputs_without_an_embedding_are_one_line(reference: Tensor, output: Any, says: str) -> None:
    with refused(HookscopeError, says, part="holds"):
        objectives(SimilarityTarget(reference), output, None)


NAMES = ("nothing", "cat", "dog")


def found(*boxes: tuple[int, float, float, float, float, float]) -> dict[str, Tensor]:
    """The detections of one image in torchvision's form: class, score and corners of each."""
    rows = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 6)
    return {"labels": rows[:, 0].long(), "scores": rows[:, 1], "boxes": rows[:, 2:]}


STREET = [found((2, 0.4, 5, 0, 15, 10), (1, 0.9, 0, 0, 10, 10), (1, 0.3, 0, 0, 10, 5))]


def box(index: int, output: Any = STREET, fit: bool = True, size: tuple[int, int] | None = (20, 40)) -> Objective:
    [goal] = objectives(BoxTarget(index, fit), output, NAMES, "the detector", size)
    return goal


def test_boxes_are_numbered_by_score_and_named_by_their_class() -> None:
    scores = [box(index).score for index in range(3)]
    assert [(score.target, score.index, score.label, score.box) for score in scores] == [
        ("box 0: cat", 1, "cat", (0, 0, 10, 10)),
        ("box 1: dog", 2, "dog", (5, 0, 15, 10)),
        ("box 2: cat", 1, "cat", (0, 0, 10, 5)),
    ]
    assert [score.score for score in scores] == pytest.approx([0.9, 0.4, 0.3])
    assert all(score.probability is None for score in scores)


@pytest.mark.parametrize("fit", [True, False])
def test_the_value_of_the_image_itself_is_the_score_of_the_box_also_beside_a_better_one(fit: bool) -> None:
    # box 0 has 0.9 times an overlap of a half with box 2, which is more than the 0.3 of box 2
    for index in range(3):
        goal = box(index, fit=fit)
        assert goal.of(STREET).tolist() == pytest.approx([goal.score.score])


def test_further_images_count_by_score_times_overlap() -> None:
    images = [
        found((1, 0.8, 0, 0, 10, 5)),  # half of box 1
        found((1, 0.8, 0, 0, 10, 4)),
        found((1, 0.7, 5, 0, 15, 10), (1, 0.9, 20, 0, 30, 10)),  # a third
        found((2, 0.9, 0, 0, 10, 10)),  # another class
        found(),
    ]
    alone = [found((1, 0.9, 0, 0, 10, 10))]
    assert box(0, alone).of(images).tolist() == pytest.approx([0.4, 0.32, 0.7 / 3, 0, 0])
    assert box(0, alone, fit=False).of(images).tolist() == pytest.approx([0.8, 0, 0, 0, 0])
    # half of box 0 is all of box 2, and counts for that
    assert box(0).of(images[:1]).tolist() == [0]
    assert box(2).of(images[:1]).tolist() == pytest.approx([0.8])


def test_the_gradient_is_that_of_the_score_and_a_box_without_an_area_has_no_value() -> None:
    image = STREET[0] | {name: STREET[0][name].clone().requires_grad_() for name in ("scores", "boxes")}
    value = box(2, [image]).of([image])
    slopes = torch.autograd.grad(value.sum(), [image["scores"], image["boxes"]], allow_unused=True)
    assert slopes[0].tolist() == [0, 0, 1] and slopes[1] is None
    empty = found()
    empty["scores"].requires_grad_()
    assert box(0).of([empty]).requires_grad  # a picture on which nothing depends has a gradient of 0
    assert box(0, [found((1, 0.9, 3, 3, 3, 3))]).of(STREET).tolist() == [0]


class DetrObjectDetectionOutput(OrderedDict[str, Tensor]):
    """What DETR of transformers puts out: a softmax, of which the last class is no object."""


class RTDetrObjectDetectionOutput(OrderedDict[str, Tensor]):
    """What RT-DETR of transformers puts out: a sigmoid for each class."""


# centre and size as shares of the input
QUERIES = torch.tensor([[[0.5, 0.5, 0.5, 0.5], [0.25, 0.5, 0.5, 1.0], [0.5, 0.25, 1.0, 0.5]]])


def test_softmax_of_transformers_has_a_last_class_without_objects() -> None:
    shares = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.02, 0.01, 0.03, 0.94]]])
    output = DetrObjectDetectionOutput(logits=shares.log(), pred_boxes=QUERIES)
    [image] = detections(output)
    torch.testing.assert_close(image.scores, torch.tensor([0.7, 0.3]))
    assert image.labels.tolist() == [0, 2]
    assert image.boxes.tolist() == [[0, 0, 0.5, 1], [0.25, 0.25, 0.75, 0.75]]
    assert box(0, output).score.box == (0, 0, 20, 20)
    assert box(0, output, size=None).score.box is None  # the size of the input is not known
    assert box(1, output).of(output).tolist() == pytest.approx([0.3])


def test_sigmoid_of_transformers_gives_a_query_several_classes() -> None:
    shares = torch.tensor([[[0.1, 0.2], [0.7, 0.01], [0.02, 0.03]]])
    output = RTDetrObjectDetectionOutput(logits=shares.logit(), pred_boxes=QUERIES)
    [image] = detections(output)
    torch.testing.assert_close(image.scores, torch.tensor([0.7, 0.2, 0.1]))
    assert image.labels.tolist() == [0, 1, 0]
    assert image.boxes[1].tolist() == image.boxes[2].tolist() == [0.25, 0.25, 0.75, 0.75]


def anchors(*rows: tuple[float, ...]) -> tuple[Tensor, dict[str, Any]]:
    """What YOLO puts out: for each anchor its centre and size, and the scores of two classes."""
    values = torch.tensor(rows).T[None]
    return values, {"boxes": values[:, :4], "scores": values[:, 4:], "feats": []}


def test_ultralytics_boxes_that_overlap_count_once() -> None:
    output = anchors(
        (5, 5, 10, 10, 0.6, 0.1),
        (5, 5, 10, 9, 0.8, 0.1),
        (5, 5, 10, 9, 0.1, 0.5),  # of another class
        (5, 9, 10, 10, 0.3, 0.1),
        (50, 5, 10, 10, 0.04, 0.03),
    )
    for form in (output, ((output[0], torch.zeros(1)), output[1]), (output[0], {"one2many": output[1]})):
        [image] = detections(form)
        torch.testing.assert_close(image.scores, torch.tensor([0.8, 0.5, 0.3]))
        assert image.labels.tolist() == [0, 1, 0]
        assert image.boxes[0].tolist() == [0, 0.5, 10, 9.5]


def test_ultralytics_models_without_overlaps_are_read() -> None:
    _, raw = anchors((5, 5, 10, 10, 0.6, 0.1))
    rows = torch.tensor([[[0.0, 0, 10, 10, 0.8, 1], [0, 0, 10, 9, 0.7, 1], [0, 0, 9, 9, 0.01, 0]]])
    [image] = detections((rows, {"one2many": {}, "one2one": raw}))
    assert (image.labels.tolist(), image.boxes[1].tolist(), image.shares) == ([1, 1], [0, 0, 10, 9], False)
    rows[..., :4] = torch.tensor([0.5, 0.5, 0.5, 0.5])
    [image] = detections((rows, (None,) * 5))
    assert (image.boxes[0].tolist(), image.shares) == ([0.25, 0.25, 0.75, 0.75], True)


@pytest.mark.parametrize(
    ("index", "output", "error", "says"),
    [
        (3, STREET, TargetError, "finds 3 boxes: box:0 cat (0.9), box:1 dog (0.4), box:2 cat (0.3)"),
        (-1, STREET, TargetError, "no box -1; the detector finds 3 boxes: box:0 cat (0.9)"),
        (1, [found((7, 0.5, 0, 0, 1, 1))], TargetError, "no box 1; the detector finds 1 box: box:0 class 7 (0.5)"),
        (6, [found(*[(1, 0.5, 0, 0, 1, 1)] * 6)], TargetError, "box:4 cat (0.5), ..."),
        (0, [found()], TargetError, "no box 0; the detector finds no box in this image"),
        (0, STREET * 2, HookscopeError, "expected one image, got 2"),
        (0, torch.ones(1, 3), ModelError, "the detector gives 1x3 values, no boxes with classes and scores"),
        (0, {"out": torch.ones(1, 3, 4, 4)}, ModelError, "no boxes with classes and scores"),
        (0, [], ModelError, "no boxes with classes and scores"),
        (0, (torch.ones(1, 3), {"boxes": torch.ones(1)}), ModelError, "no boxes with classes and scores"),
    ],
)
def test_a_box_that_is_not_there_is_one_line(index: int, output: Any, error: type[Exception], says: str) -> None:
    with refused(error, says, part="holds"):
        box(index, output)


def test_a_detector_asked_for_a_class_says_how_to_ask_for_a_box() -> None:
    for output in (STREET, batched(STREET)):
        with pytest.raises(ModelError, match="cam and saliency explain a box: BoxTarget\\(0\\)"):
            objectives("top:1", output, NAMES)


def batched(images: Any) -> dict[str, Tensor]:
    return {key: torch.stack([image[key] for image in images]) for key in images[0]}


def test_a_mapping_may_hold_the_boxes_of_a_batch() -> None:
    assert box(1, batched(STREET)).score == box(1, STREET).score
    for one in ({**batched(STREET), "scores": torch.ones(1, 3, 2)}, STREET[0]):
        with pytest.raises(ModelError, match="no boxes with classes and scores"):
            box(1, one)
