"""What is explained or differentiated: classes, functions and losses, for one image and for many."""

import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope import class_activation_maps, saliency_maps
from hookscope.errors import HookscopeError, ModelError, TargetError, UsageError
from hookscope.hooks import output_of
from hookscope.scores import DifferenceTarget, RegionTarget, Score, objectives
from hookscope.scores.objective import Loss, as_loss
from tests.helpers import numbers, refused
from tests.nets import Function

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of libraries that grad-cam imports
    import pytorch_grad_cam as judge
    from pytorch_grad_cam.utils.model_targets import RawScoresOutputTarget, SemanticSegmentationTarget

LOGITS = torch.tensor([[0.0, 3.0, 1.0]])


def test_objectives_read_their_logits_in_any_batch_and_files_are_named_after_the_target() -> None:
    found = objectives("2,top:1", LOGITS, ("a", "b", "c"))
    assert [(goal.score.name, goal.score.key, goal.score.score) for goal in found] == [("c", "2", 1.0), ("b", "1", 3.0)]
    batch = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert [goal.of(batch).tolist() for goal in found] == [[3.0, 6.0], [2.0, 5.0]]
    assert Score(3, "dog", 0.9, 0.9, target="box 0: dog").key == "box-0-dog"
    assert Score(3, "dog", 0.9, 0.9).key == "3"


def margin(output: Tensor) -> Tensor:
    return output[:, 1] - output[:, 2]


def test_a_function_of_the_output_or_of_the_boxes_of_a_detector_is_a_target() -> None:
    [goal] = objectives(margin, LOGITS, None)
    assert goal.score._cells() == {"target": "margin", "class": None, "score": 2.0, "probability": None}
    assert (goal.score.key, goal.score.low_probability) == ("margin", False)
    assert goal.of(torch.ones(2, 3)).tolist() == [0.0, 0.0]
    records = [{"boxes": torch.ones(5, 4), "labels": torch.ones(5), "scores": torch.tensor([0.5] * 5)}]
    total = lambda output: torch.stack([record["scores"].sum() for record in output])  # noqa: E731
    [goal] = objectives(total, records, None)
    assert (goal.score.score, goal.of(records * 2).tolist()) == (2.5, [2.5, 2.5])


def test_a_function_that_looks_at_the_first_image_only_is_one_line() -> None:
    [goal] = objectives(lambda output: output[0, 1], LOGITS, None)
    assert goal.of(LOGITS).tolist() == [3.0]
    with pytest.raises(ModelError, match="<lambda> returns one number for 2 images; compute a number for each image"):
        goal.of(torch.ones(2, 3))


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def test_maps_of_a_function_are_those_of_the_class_that_it_reads() -> None:
    torch.manual_seed(0)
    net, image = classifier(), torch.rand(1, 3, 8, 8)
    second = lambda output: output[:, 1]  # noqa: E731
    for method in ("gradcam", "scorecam", "ablationcam"):
        maps = [class_activation_maps(net, image, "0", target, method)[0] for target in (1, second)]
        assert (maps[0].values == maps[1].values).all()
    with judge.GradCAM(Function(lambda self, x: margin(self.net(x)), net=net), [net[1]]) as cam:
        theirs = cam(image, [RawScoresOutputTarget()])[0]
    [ours] = class_activation_maps(net, image, "name:1", margin)
    scaled = (ours.values - ours.values.min()) / np.ptp(ours.values)
    whole = nn.functional.interpolate(torch.tensor(scaled)[None, None], (8, 8), mode="bilinear")[0, 0].numpy()
    assert np.abs((whole - whole.min()) / np.ptp(whole) - theirs).max() < 1e-4
    pixels = [saliency_maps(net, image, target)[0].values for target in (1, second)]
    assert torch.equal(*pixels)


def test_one_class_against_another_is_the_difference_of_logits() -> None:
    found = objectives(DifferenceTarget("top:3", "c"), LOGITS, ("a", "b", "c"))
    assert [(goal.score.name, goal.score.key, goal.score.score) for goal in found] == [
        ("b against c", "b-against-c", 2.0),
        ("a against c", "a-against-c", -1.0),
    ]
    assert found[0].of(torch.tensor([[0.0, 3.0, 1.0], [1.0, 1.0, 5.0]])).tolist() == [2.0, -4.0]
    torch.manual_seed(0)
    net, image = classifier(), torch.rand(1, 3, 8, 8)
    [first, second, both] = [
        saliency_maps(net, image, target)[0].values for target in (1, 2, DifferenceTarget(target=1, against=2))
    ]
    assert torch.allclose(both, first - second, atol=1e-7) and both.any()


def segmented(values: Any = None) -> dict[str, Tensor]:
    """Two rows of three pixels, whose best classes are 0, 1, 1 and 0, 0, 2; the fourth class is nowhere."""
    maps = torch.full((4, 2, 3), -1.0)
    maps[0], maps[1, 0, 1:], maps[2, 1, 2] = 1.0, torch.tensor([3.0, 5.0]), 4.0
    return {"out": maps[None], "aux": torch.zeros(1, 4, 2, 3)}


NAMES = ("sky", "cat", "dog", "bus")
NO_LOSS = 3, 0.5, ["mse"], torch.ones(1)


def test_a_class_of_a_segmentation_is_its_mean_logit_where_it_is_the_best() -> None:
    found = objectives("cat,top:9", segmented(), NAMES)
    assert [(goal.score.name, goal.score.score, goal.score.target) for goal in found] == [
        ("cat", 4.0, ""),
        ("sky", 1.0, ""),
        ("dog", 4.0, ""),
    ]
    share = sum(math.exp(best) / (math.exp(best) + math.e + 2 / math.e) for best in (3, 5)) / 2
    assert found[0].score.probability == pytest.approx(share)
    # the pixels stay, whatever the copy shows there
    assert found[0].of({"out": -segmented()["out"].repeat(2, 1, 1, 1)}).tolist() == [-4.0, -4.0]
    [goal] = objectives(DifferenceTarget("cat", "sky"), segmented(), NAMES)
    assert (goal.score.score, goal.of(segmented()).tolist()) == (3.0, [3.0])


def test_a_region_is_averaged_to_the_size_of_the_logits() -> None:
    region = torch.zeros(4, 12, dtype=torch.bool)
    region[1, 4:10] = True  # four of the cells (0, 1), two of (0, 2)
    [cat, sky] = objectives(RegionTarget(region, "top:2", "in m.png"), segmented(), NAMES)
    assert (cat.score.name, cat.score.key, cat.score.index) == ("cat in m.png", "cat-in-m-png", 1)
    assert cat.score.box == (4, 1, 10, 2)
    assert cat.score.score == pytest.approx((4 * 3 + 2 * 5) / 6) and sky.score.score == 1
    target = RegionTarget(region.numpy(), DifferenceTarget("cat", "bus"))
    [goal] = objectives(target, segmented(), NAMES, size=(4, 12))
    assert goal.score.name == "cat against bus in the region"
    assert goal.score.score == pytest.approx((4 * 3 + 2 * 5) / 6 + 1) == float(goal.of(segmented()))


@pytest.mark.filterwarnings("ignore::hookscope.errors.OutputNote")
def test_after_a_sigmoid_each_class_of_a_region_has_a_probability_of_its_own() -> None:
    logits = torch.tensor([[[[2.0, 0.0]], [[1.0, -3.0]]]])
    output = output_of(Function(lambda x: {"out": x.sigmoid()}), logits)
    goals = objectives(RegionTarget(torch.ones(1, 2), "0,1"), output, None)
    by_hand = (1 / (1 + np.exp(-logits.numpy()[0]))).mean((1, 2))
    assert [goal.score.probability for goal in goals] == pytest.approx(by_hand)


def test_a_region_of_another_size_is_one_line() -> None:
    assert objectives(RegionTarget(torch.ones(2, 3)), segmented(), NAMES, size=(4, 12))
    with pytest.raises(UsageError, match="the region is 4x4, and the input 4x12; give a mask of the network's input"):
        objectives(RegionTarget(torch.ones(4, 4)), segmented(), NAMES, size=(4, 12))


def test_a_segmentation_of_one_class_is_explained_where_its_score_is_above_zero() -> None:
    maps = torch.tensor([[[[-1.0, 3.0], [1.0, -5.0]]]])
    [goal] = objectives(0, maps, None)
    assert goal.score.score == 2.0
    assert goal.score.probability == pytest.approx(sum(1 / (1 + math.exp(-logit)) for logit in (3, 1)) / 2)


@pytest.mark.parametrize(
    ("target", "output", "says"),
    [
        ("bus", segmented(), "the segmentation has no pixel of bus; it has sky, cat, dog; choose one of these"),
        (0, -torch.ones(1, 1, 2, 2), "the segmentation has no pixel of sky"),
        ("top:1", torch.ones(1, 4, 2, 3), "the model gives 1x4x2x3 values, no score for each class; inspect, capture"),
        (0, {"tokens": torch.ones(1, 4, 2), "pooler_output": torch.ones(1, 2)}, "no score for each class; explain the"),
        (0, {"image_embeds": torch.ones(1, 4)}, "gives image_embeds of 1x4, no score for each class; explain the"),
        (RegionTarget(torch.ones(2, 2)), LOGITS, "gives 1x3 values, no scores of classes at each pixel; a region"),
        (DifferenceTarget("cat", "1"), LOGITS[:, :2], "'1' is subtracted from itself; give two classes"),
        (DifferenceTarget("0,1", 1), LOGITS, "'1' is subtracted from itself; give two classes"),
        (lambda output: 3.0, LOGITS, "<lambda> returns float"),
        (lambda output: output, LOGITS, "returns a tensor of torch.float32 with shape (1, 3)"),
        (lambda output: output[0].long(), LOGITS, "returns a tensor of torch.int64"),
        (lambda output: output[0], LOGITS, "<lambda> returns 3 numbers for one image"),
        (lambda output: output["out"], LOGITS, "<lambda> raised IndexError: "),
    ],
)
def test_a_target_that_the_output_does_not_have_is_one_line(target: Any, output: Any, says: str) -> None:
    names = NAMES[: (next(iter(output.values())) if isinstance(output, dict) else output).shape[1]]
    with refused(HookscopeError, says, part="holds"):
        objectives(target, output, names if len(names) != 3 else None)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RegionTarget(torch.ones(1, 2, 2)), "a region is a mask (H, W), not 1x2x2"),
        (lambda: RegionTarget(torch.zeros(2, 2)), "the region is empty; give a mask that is above 0"),
        (lambda: DifferenceTarget(1, "top:2"), "'top:2' is not one class to subtract; give a class number"),
        (lambda: Loss("nll"), "no loss 'nll'; there are score, cross-entropy, mse"),
        *((partial(as_loss, loss), f"no loss {loss!r}; there are score, cross-entropy, mse; name") for loss in NO_LOSS),
    ],
)
def test_targets_and_losses_that_cannot_be(make: Any, says: str) -> None:
    with refused(UsageError, says, part="begins"):
        make()


def test_maps_of_a_region_are_those_of_autograd_and_of_grad_cam() -> None:
    def segments(net: Any, x: Tensor) -> dict[str, Tensor]:
        """Scores of three classes at each pixel, which see their neighbours."""
        logits = net.head(net.act(net.features(x)))
        return {"out": nn.functional.interpolate(logits, x.shape[-2:], mode="bilinear")}

    features, head = nn.Conv2d(3, 5, 3, stride=2), nn.Conv2d(5, 3, 3, padding=1)
    net = Function(segments, features=features, act=nn.GELU(), head=head).eval()
    image, region = torch.rand(1, 3, 17, 21), torch.zeros(17, 21)
    region[4:9, 3:8] = 1
    target = RegionTarget(region, 2)
    leaf = image.clone().requires_grad_()
    [slopes] = torch.autograd.grad(net(leaf)["out"][0, 2][region > 0].mean(), leaf)
    assert torch.allclose(saliency_maps(net, image, target)[0].values, slopes[0], atol=1e-8)
    [ours] = class_activation_maps(net, image, "act", target)
    bare = nn.Sequential(net)
    bare.forward = lambda x: net(x)["out"]
    with judge.GradCAM(bare, [net.act]) as cam:
        theirs = cam(image, [SemanticSegmentationTarget(2, region.numpy())])[0]
    whole = nn.functional.interpolate(torch.tensor(ours.values)[None, None], (17, 21), mode="bilinear")[0, 0]
    whole = (whole - whole.min()) / (whole.max() - whole.min())
    assert theirs.max() > 0.9 and np.abs(whole.numpy() - theirs).max() < 2e-2


def scores() -> torch.Tensor:
    return torch.tensor([[1.0, 4.0, 2.0]], requires_grad=True)


def gradient(loss: Loss, output: torch.Tensor) -> list[float]:
    value, _ = loss.of(output)
    (slope,) = torch.autograd.grad(value, output)
    return numbers(slope)


def test_the_score_is_the_logit_of_the_target_or_the_sum_over_several() -> None:
    value, (answer,) = Loss("score", "fox", ["cat", "dog", "red fox"]).of(scores())
    assert (float(value.detach()), answer.index, answer.score, answer.label) == (2.0, 2, 2.0, "red fox")
    assert gradient(Loss("score", "2"), scores()) == [0, 0, 1]
    value, answers = Loss("score", "top:2").of(scores())
    assert (float(value.detach()), [answer.index for answer in answers]) == (6.0, [1, 2])
    assert gradient(Loss("score", "top:2"), scores()) == [0, 1, 1]


def test_cross_entropy_takes_the_target_as_label_or_the_mean_over_several() -> None:
    value, _ = Loss("cross-entropy", "0").of(scores())
    total = sum(math.exp(score) for score in (1, 4, 2))
    assert float(value.detach()) == pytest.approx(-math.log(math.exp(1) / total))
    shares = [math.exp(score) / total for score in (1, 4, 2)]
    assert gradient(Loss("cross-entropy", "0"), scores()) == pytest.approx([shares[0] - 1, *shares[1:]])
    one, two = (float(Loss("cross-entropy", label).of(scores())[0].detach()) for label in "12")
    assert float(Loss("cross-entropy", "top:2").of(scores())[0].detach()) == pytest.approx((one + two) / 2)


def test_the_mean_square_is_of_every_number_and_asks_for_no_class() -> None:
    output = {"boxes": torch.tensor([[3.0]], requires_grad=True), "labels": torch.tensor([7]), "more": [torch.ones(3)]}
    value, answers = Loss("mse", "no such class").of(output)
    assert (float(value.detach()), answers) == ((9 + 3) / 4, ())
    assert gradient(Loss("mse"), scores()) == pytest.approx([2 / 3, 8 / 3, 4 / 3])


@pytest.mark.parametrize(
    ("loss", "output", "error", "message"),
    [
        (Loss("score", "3"), torch.zeros(1, 3), TargetError, "no class 3"),
        (Loss("score", "fox"), torch.zeros(1, 3), TargetError, "no class 'fox'"),
        (Loss("score"), [{"boxes": torch.zeros(2, 4)}], ModelError, "the model gives boxes"),
        (Loss("cross-entropy"), torch.zeros(1, 2, 4, 4), ModelError, "no score for each class"),
        (Loss("mse"), [{"boxes": torch.zeros(0, 4)}], ModelError, "returned no numbers"),
        (Loss("score"), torch.zeros(2, 3), UsageError, "expected one image, got 2"),
        (
            lambda output: output,
            LOGITS,
            UsageError,
            "'<lambda>' is not a loss: it returned 3 numbers of shape (1, 3); ",
        ),
        (lambda output: 3.0, LOGITS, UsageError, "it returned float; return a tensor"),
        (lambda output: output.argmax(), LOGITS, UsageError, "it returned a number of torch.int64"),
        (torch.nn.CrossEntropyLoss, LOGITS, UsageError, "it returned CrossEntropyLoss"),
    ],
)
def test_outputs_without_a_loss_are_refused(loss: Any, output: object, error: type[Exception], message: str) -> None:
    with refused(error, message, part="holds"):
        as_loss(loss).of(output)


def test_a_loss_is_a_name_an_object_or_a_function() -> None:
    assert (as_loss(None), as_loss("mse"), as_loss(Loss("score", "2"))) == (Loss(), Loss("mse"), Loss("score", "2"))

    def margin(output: torch.Tensor) -> torch.Tensor:
        return output[:, 1] - output[:, 0]

    own = as_loss(margin)
    assert (own.name, as_loss(own)) == ("margin", own)
    value, targets = own.of(scores())
    assert (float(value.detach()), value.shape, targets) == (3.0, (), ())
    assert as_loss(torch.nn.Identity()).name == "Identity"


def test_one_number_without_a_class_name_has_no_probability() -> None:
    output = torch.tensor([[3.0]])
    assert [goal.score.probability for goal in objectives(0, output, None)] == [None]
    assert objectives(0, output, ["ship"])[0].score.probability == pytest.approx(1 / (1 + math.exp(-3)))
