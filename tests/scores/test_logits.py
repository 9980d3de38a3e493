"""Scores of classes from whatever a family of models puts out, and their probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.errors import CategoriesError, InputError, ModelError, TargetError, UsageError
from hookscope.explain import class_activation_maps
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.models.inputs import example_inputs, family_of
from hookscope.models.load import load_model
from hookscope.models.loaded import LoadedModel
from hookscope.scores.logits import (
    Prediction,
    check_categories,
    check_family,
    class_scores,
    one_picture,
    predictions,
    probabilities,
)
from hookscope.scores.prediction import predict
from hookscope.scores.target import Target

LOGITS = torch.tensor([[1.0, 3.0, -2.0]])


class WithAuxiliary(NamedTuple):
    logits: Tensor
    aux: Tensor


class LikeTransformers(OrderedDict[str, Any]):
    """The outputs of `transformers` are ordered dictionaries; the loss comes first where labels were given."""


@dataclasses.dataclass
class Answer:
    logits: Tensor
    features: Tensor


OTHER = torch.full((1, 5), 9.0)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, OTHER),
        [LOGITS, OTHER],
        WithAuxiliary(LOGITS, OTHER),
        {"logits": LOGITS},
        {"features": OTHER, "logits": LOGITS},
        {"scores": LOGITS, "features": OTHER},
        LikeTransformers(loss=torch.tensor(0.5), logits=LOGITS),
        Answer(LOGITS, torch.zeros(1, 8, 4, 4)),
        {"out": LOGITS[..., None, None].expand(1, 3, 4, 6)},
        {"aux": torch.zeros(1, 3, 2, 2), "out": LOGITS[..., None, None]},
    ],
    ids=lambda output: type(output).__name__,
)
def test_what_has_scores(output: Any) -> None:
    assert class_scores(output).tolist() == LOGITS.tolist()


def test_the_logits_of_a_model_come_as_they_are() -> None:
    assert class_scores((LOGITS, OTHER)) is LOGITS


def test_the_score_of_a_segmentation_is_the_mean_over_the_positions() -> None:
    maps = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, -4.0], [0.0, 0.0]]]], requires_grad=True)
    scores = class_scores({"out": maps, "aux": maps * 7})
    assert scores.tolist() == [[3.0, -1.0]]
    (gradient,) = torch.autograd.grad(scores[0, 0], maps)
    assert gradient.tolist() == [[[[0.25, 0.25], [0.25, 0.25]], [[0.0, 0.0], [0.0, 0.0]]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_point_of_every_width(dtype: torch.dtype) -> None:
    scores = class_scores(LOGITS.to(dtype))
    assert scores.dtype == dtype
    found = predictions(scores[0], None, Target("top:3"))
    assert [one.score for one in found] == [3.0, 1.0, -2.0]
    assert math.fsum(one.probability for one in found) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning")
def test_quantized_scores_are_dequantized() -> None:
    assert class_scores(torch.quantize_per_tensor(LOGITS, 0.5, 8, torch.quint8)).tolist() == LOGITS.tolist()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ([{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}], "boxes and labels and"),
        ([torch.zeros(1, 2, 8, 8)] * 3, "a list of 3 tensors"),
        (torch.zeros(1, 8, 4, 4), "1x8x4x4 values"),
        (torch.zeros(10), "10 values"),
        (torch.zeros(()), "one value"),
        (torch.zeros(1, 7, 16), "1x7x16 values"),
        (LOGITS.long(), "1x3 values"),
        (LOGITS.to(torch.complex64), "1x3 values"),
        ({"0": torch.zeros(1, 8, 4, 4), "pool": torch.zeros(1, 8, 2, 2)}, "0 of 1x8x4x4, pool of 1x8x2x2"),
        ({"out": torch.zeros(3)}, "out of 3"),
        ((), "no tensor"),
        (None, "no tensor"),
        ([], "a list of 0 tensors"),
    ],
)
def test_what_has_none(output: Any, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        class_scores(output, "mynet")
    told = str(caught.value)
    assert told.startswith(f"mynet gives {words}")
    assert told.endswith(", no score for each class; visualize, stats and `gradients --loss mse` work on it")


def test_the_scores_of_the_only_picture_stay_in_the_graph() -> None:
    scores = torch.tensor([[1.0, 3.0]], requires_grad=True)
    found = one_picture(scores * 2)
    assert found.tolist() == [2, 6] and found.requires_grad


@pytest.mark.parametrize("count", [0, 2, 7])
def test_several_pictures_are_not_one(count: int) -> None:
    with pytest.raises(UsageError, match=f"^expected one picture, got {count}; call it for each picture$"):
        one_picture(torch.zeros(count, 3))


def test_no_class_at_all() -> None:
    with pytest.raises(ModelError, match="has no classes: its scores are empty; visualize, stats and `gradients"):
        one_picture(torch.zeros(1, 0))


def test_probabilities_are_torchs_softmax_and_leave_the_graph() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = (30 * torch.randn(4, 1000, generator=generator)).requires_grad_()
    found = probabilities(scores)
    assert torch.equal(found, torch.softmax(scores.detach().double(), dim=1))
    assert torch.allclose(found.sum(1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert found.dtype == torch.float64 and not found.requires_grad
    by_hand = [math.exp(score - 3.0) for score in (1.0, 3.0, -2.0)]
    assert probabilities(LOGITS)[0].tolist() == pytest.approx([value / sum(by_hand) for value in by_hand], rel=1e-12)


def test_scores_too_high_for_exp_have_probabilities() -> None:
    assert probabilities(torch.tensor([[1e4, 0.0]])).tolist() == [[1.0, 0.0]]


def test_predictions() -> None:
    assert predictions(LOGITS[0], ["a", "b", "c"], Target("top:2")) == [
        Prediction(1, "b", 3.0, pytest.approx(0.8756006)),
        Prediction(0, "a", 1.0, pytest.approx(0.1184997)),
    ]
    assert [one.index for one in predictions(LOGITS[0], None)] == [1, 0, 2]
    assert len(predictions(torch.arange(9.0), None)) == 5
    (one,) = predictions(LOGITS[0], ["a", "b", "c"], Target("c"))
    assert (one.index, one.label, one.score) == (2, "c", -2.0)


def test_a_score_is_the_models_to_the_bit() -> None:
    score = torch.tensor([0.1, 0.3], dtype=torch.float32)
    (one,) = predictions(score, None, Target("0"))
    assert torch.tensor(one.score, dtype=torch.float32) == score[0] and one.score != 0.1


def test_errors_of_targets_and_names() -> None:
    with pytest.raises(TargetError, match="no class 3"):
        predictions(LOGITS[0], None, Target("3"))
    with pytest.raises(CategoriesError, match="2 class names for 3 classes of the model; give the class names"):
        predictions(LOGITS[0], ["a", "b"])
    with pytest.raises(CategoriesError, match="1 class name for 1,000 classes of mynet"):
        check_categories(["a"], 1000, "mynet")
    check_categories(["a", "b"], 2)


@pytest.mark.parametrize(
    ("family", "gives"), [("detection", "boxes, labels and scores of objects"), ("optical_flow", "the flow of pixels")]
)
def test_families_without_scores_are_refused_before_a_pass(family: str, gives: str) -> None:
    with pytest.raises(ModelError, match=f"mynet gives {gives}, no score for each class; visualize, stats and"):
        check_family(family, "mynet")


@pytest.mark.parametrize("family", ["classification", "segmentation", "video"])
def test_families_with_scores(family: str) -> None:
    check_family(family)


def test_googlenet_in_train_mode_puts_the_logits_first() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torchvision.models.googlenet(weights=None, num_classes=7, init_weights=False).train()
        output = net(torch.rand(2, 3, 96, 96))
    assert type(output).__name__ == "GoogLeNetOutputs"
    assert class_scores(output) is output.logits


SIZES = {"vit_b_32": 224, "inception_v3": 96, "swin_t": 64, "s3d": 224, "alexnet": 80, "raft_small": 128}
SIZES |= {"quantized_inception_v3": 96, "maxvit_t": 224, "mvit_v1_b": 224, "googlenet": 64}
FAMILIES = {
    "classification": (
        "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 mnasnet0_5 mobilenet_v2"
        " mobilenet_v3_small regnet_x_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11"
        " vit_b_32"
        " quantized_resnet18 quantized_mobilenet_v2 quantized_googlenet quantized_shufflenet_v2_x0_5"
    ),
    "segmentation": "lraspp_mobilenet_v3_large fcn_resnet50 deeplabv3_mobilenet_v3_large",
    "video": "r3d_18 mc3_18 r2plus1d_18",
    "detection": "fasterrcnn_mobilenet_v3_large_320_fpn ssdlite320_mobilenet_v3_large",
    "optical_flow": "raft_small",
}


def put_out(name: str) -> tuple[Any, str, Mapping[str, Any]]:
    """What the model ``name`` gives to zeros of a small size, its family and its classes."""
    side = SIZES.get(name, 64)
    net = load_model(name, weights="none", device="cpu")
    model: nn.Module = net.model
    with torch.no_grad():
        return model(*example_inputs(model, (side, side))), family_of(model), {"categories": net.categories}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in FAMILIES.items() for name in names.split()]
)
def test_torchvisions_models(family: str, name: str) -> None:
    output, found, known = put_out(name)
    assert found == family
    if family in ("detection", "optical_flow"):
        with pytest.raises(ModelError, match="no score for each class"):
            class_scores(output, name)
        with pytest.raises(ModelError, match="no score for each class"):
            check_family(family, name)
        return
    scores = class_scores(output, name)
    expected = output["out"].mean((2, 3)) if family == "segmentation" else output
    assert torch.equal(scores, expected)
    # the names that come with the weights are as many as the classes, or predictions would refuse them
    (best,) = predictions(scores[0], known["categories"], Target("top:1"))
    assert best.label == known["categories"][best.index]
    assert best.index == int(scores[0].argmax())


# --- predict: one pass of a loaded model


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return load_model("squeezenet1_1", weights="none", seed=3, device="cpu", input_size=(40, 40))


@pytest.fixture
def picture() -> Tensor:
    return torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(2))


def test_the_answer_is_the_models_own_to_the_bit(net: LoadedModel, picture: Tensor) -> None:
    with torch.no_grad():
        (own,) = net.model(picture[None])
    found = predict(net, [picture], Target("top:1000"))
    assert sorted(one.index for one in found) == list(range(1000))
    order, scores = [one.index for one in found], [one.score for one in found]
    assert torch.equal(torch.tensor(scores), own[order])  # from doubles back to the same floats
    assert scores == sorted(scores, reverse=True)
    shares = torch.softmax(own.double(), 0)[order]
    assert torch.equal(torch.tensor([one.probability for one in found], dtype=torch.float64), shares)
    assert net.categories is not None
    assert [one.label for one in found] == [net.categories[index] for index in order]


def test_five_unless_told(net: LoadedModel, picture: Tensor) -> None:
    assert [one.index for one in predict(net, [picture])] == [
        one.index for one in predict(net, [picture], Target("top:9"))
    ][:5]


def test_names_of_ones_own(net: LoadedModel, picture: Tensor) -> None:
    names = [f"thing {index}" for index in range(1000)]
    (one,) = predict(net, [picture], Target("thing 999"), names)
    assert (one.index, one.label) == (999, "thing 999")


def test_nothing_of_the_model_changes(net: LoadedModel, picture: Tensor) -> None:
    before = ModelSnapshot(net.model)
    predict(net, [picture])
    assert before.changes() == []


def test_a_target_that_is_none_is_told_before_the_pass(net: LoadedModel) -> None:
    for target in ("tabbi", "1000", "terrier"):
        with pytest.raises(TargetError):
            predict(net, [torch.zeros(0)], Target(target))


def test_errors(net: LoadedModel, picture: Tensor) -> None:
    with pytest.raises(InputError, match="squeezenet1_1 refuses a picture of 3x2x2"):
        predict(net, [picture[:, :2, :2]])
    with pytest.raises(CategoriesError, match="1 class name for 1,000 classes"):
        predict(net, [picture], categories=["a"])
    flow = dataclasses.replace(net, family="optical_flow", name="raft")
    with pytest.raises(ModelError, match="raft gives the flow of pixels, no score for each class; visualize"):
        predict(flow, [picture])


class Given(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.shape)


def test_predictions_and_maps_call_a_model_without_scores_alike(net: LoadedModel, picture: Tensor) -> None:
    features = dataclasses.replace(net, model=nn.Conv2d(3, 8, 1), name="net.py:make", categories=None)
    errors = []
    for explain in (predict, lambda net, pictures: class_activation_maps(net.model, pictures[0][None])):
        with pytest.raises(ModelError) as caught:
            explain(features, [picture])
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and errors[0].startswith("Conv2d gives 1x8x")


def test_scores_that_are_not_of_one_picture_or_of_no_class(net: LoadedModel, picture: Tensor) -> None:
    with pytest.raises(UsageError, match="expected one picture, got 2"):
        predict(dataclasses.replace(net, model=Given(2, 3), name="twice", categories=None), [picture])
    with pytest.raises(ModelError, match="the model has no classes: its scores are empty; visualize, stats"):
        predict(dataclasses.replace(net, model=Given(1, 0), categories=None), [picture])


def test_the_model_that_ships(shapes_file: Path, picture: Tensor) -> None:
    net = load_model("shapes", device="cpu")
    with torch.no_grad():
        (own,) = net.model(picture[None].tile(2, 2))
    found = predict(net, [picture.tile(2, 2)])
    assert len(found) == 5 and net.weights == "shapes.safetensors"
    assert found[0].index == int(own.argmax()) and found[0].label == f"shape {found[0].index}"
    assert torch.tensor(found[0].score) == own.max()
