"""Scores of classes from whatever a family of models puts out, and their probabilities."""

import dataclasses
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import CategoriesError, InputError, ModelError, TargetError, UsageError
from hookscope.explain import class_activation_maps
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.models.load import load_model
from hookscope.models.loaded import LoadedModel, example_inputs
from hookscope.scores.logits import (
    Prediction,
    check_family,
    class_scores,
    one_picture,
    predict,
    predictions,
    probabilities,
)
from hookscope.scores.target import Target
from tests.nets import Function


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return load_model("squeezenet1_1", weights="none", seed=3, device="cpu", input_size=(40, 40))


@pytest.fixture
def picture() -> Tensor:
    return torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(2))


def test_the_scores_are_the_models_own_to_the_bit(net: LoadedModel, picture: Tensor) -> None:
    with torch.no_grad():
        (logits,) = net.model(picture[None])
    before = ModelSnapshot(net.model)
    classes = predict(net, [picture], Target("top:1000"))
    assert before.changes() == []
    order, scores = [each.index for each in classes], [each.score for each in classes]
    assert sorted(order) == list(range(1000))
    assert torch.equal(torch.tensor(scores), logits[order])  # from doubles back to the same floats
    assert scores == sorted(scores, reverse=True)
    shares = torch.softmax(logits.double(), 0)[order]
    assert torch.equal(torch.tensor([each.probability for each in classes], dtype=torch.float64), shares)
    assert net.categories is not None
    assert [each.label for each in classes] == [net.categories[index] for index in order]
    assert predict(net, [picture]) == classes[:5]


def test_class_names_may_be_given(net: LoadedModel, picture: Tensor) -> None:
    (best,) = predict(net, [picture], Target("thing 999"), [f"thing {index}" for index in range(1000)])
    assert (best.index, best.label) == (999, "thing 999")


@pytest.mark.parametrize("target", ["tabbi", "1000", "terrier"])
def test_a_wrong_target_is_refused_before_the_pass(net: LoadedModel, target: str) -> None:
    with pytest.raises(TargetError):
        predict(net, [torch.zeros(0)], Target(target))


def test_a_picture_or_a_model_that_does_not_fit_is_refused(net: LoadedModel, picture: Tensor) -> None:
    with pytest.raises(InputError, match=r"squeezenet1_1: .*forward\(\) failed on 1x3x2x2"):
        predict(net, [picture[:, :2, :2]])
    with pytest.raises(CategoriesError, match="1 class name for 1,000 classes of the model; give the class names"):
        predict(net, [picture], categories=["a"])
    flow = dataclasses.replace(net, family="optical_flow", name="raft")
    with pytest.raises(ModelError, match="raft gives the flow of pixels, no score for each class; inspect, capture"):
        predict(flow, [picture])
    with pytest.raises(UsageError, match="expected one image, got 2"):
        predict(dataclasses.replace(net, model=Function(lambda x: x.new_zeros(2, 3)), categories=None), [picture])
    with pytest.raises(ModelError, match="the model has no classes: its scores are empty; inspect, capture"):
        predict(dataclasses.replace(net, model=Function(lambda x: x.new_zeros(1, 0)), categories=None), [picture])


def test_predictions_and_maps_call_a_model_without_scores_alike(net: LoadedModel, picture: Tensor) -> None:
    features = dataclasses.replace(net, model=nn.Conv2d(3, 8, 16, 16), name="net.py:make", categories=None)
    errors = []
    for explain in (predict, lambda net, pictures: class_activation_maps(net.model, pictures[0][None])):
        with pytest.raises(ModelError) as caught:
            explain(features, [picture])
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and errors[0].startswith("Conv2d gives 1x8x")


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
@pytest.mark.filterwarnings("ignore::hookscope.errors.OutputNote")
def test_outputs_with_scores(output: Any) -> None:
    assert class_scores(output).tolist() == LOGITS.tolist()
    assert class_scores((LOGITS, output)) is LOGITS


def test_the_score_of_a_segmentation_is_the_mean_over_the_positions() -> None:
    maps = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, -4.0], [0.0, 0.0]]]], requires_grad=True)
    scores = class_scores({"out": maps, "aux": maps * 7})
    assert scores.tolist() == [[3.0, -1.0]]
    (gradient,) = torch.autograd.grad(scores[0, 0], maps)
    assert gradient.tolist() == [[[[0.25, 0.25], [0.25, 0.25]], [[0.0, 0.0], [0.0, 0.0]]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning")  # of quantized numbers
def test_floating_point_of_every_width_and_quantized_scores(dtype: torch.dtype) -> None:
    scores = class_scores(LOGITS.to(dtype))
    assert scores.dtype == dtype
    classes = predictions(scores[0], None, Target("top:3"))
    assert [each.score for each in classes] == [3.0, 1.0, -2.0]
    assert math.fsum(each.probability for each in classes) == pytest.approx(1.0, abs=1e-12)
    assert class_scores(torch.quantize_per_tensor(LOGITS, 0.5, 8, torch.quint8)).tolist() == LOGITS.tolist()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}],
            "boxes, labels and scores",
        ),
        ([torch.zeros(1, 2, 8, 8)] * 3, "a list of 3 tensors"),
        (torch.zeros(1, 8, 4, 4), "1x8x4x4 values"),
        (torch.zeros(10), "10 values"),
        (torch.zeros(()), "one value"),
        (torch.zeros(1, 7, 16), "1x7x16 values"),
        (LOGITS.long(), "1x3 values"),
        (LOGITS.to(torch.complex64), "1x3 values"),
        ({"0": torch.zeros(1, 8, 4, 4), "pool": torch.zeros(1, 8, 2, 2)}, "0 of 1x8x4x4, pool of 1x8x2x2"),
        ({"out": torch.zeros(3)}, "out of 3"),
        ({"loss": torch.tensor(1.0), "maps": torch.zeros(1, 3, 4, 4)}, "loss of one value, maps of 1x3x4x4"),
        ((), "no tensor"),
        (None, "no tensor"),
        ([], "a list of 0 tensors"),
    ],
)
def test_outputs_without_scores(output: Any, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        class_scores(output, "mynet")
    assert caught.value.asked.startswith(f"mynet gives {words}")
    assert caught.value.asked.endswith(", no score for each class")
    assert caught.value.do.startswith("inspect, capture and layer_gradients(loss='mse') work on it")


def test_the_scores_of_the_only_picture_stay_in_the_graph() -> None:
    scores = torch.tensor([[1.0, 3.0]], requires_grad=True)
    only = one_picture(scores * 2)
    assert only.tolist() == [2, 6] and only.requires_grad
    for count in (0, 7):
        with pytest.raises(UsageError, match=f"^expected one image, got {count}; call it once for each image; a model"):
            one_picture(torch.zeros(count, 3))


def test_probabilities_are_the_softmax_or_of_a_single_class_the_sigmoid() -> None:
    shares = probabilities(LOGITS.clone().requires_grad_())
    by_hand = [math.exp(score - 3.0) for score in (1.0, 3.0, -2.0)]
    assert shares[0].tolist() == pytest.approx([value / sum(by_hand) for value in by_hand], rel=1e-12)
    assert shares.dtype == torch.float64 and not shares.requires_grad
    assert probabilities(torch.tensor([[1e4, 0.0]])).tolist() == [[1.0, 0.0]]  # too high for exp
    scores = torch.tensor([[0.0], [2.0]], requires_grad=True)
    assert probabilities(scores)[:, 0].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-2.0))])
    assert predictions(scores[1], None)[0].probability == pytest.approx(0.8807971)


def test_predictions() -> None:
    assert predictions(LOGITS[0], ["a", "b", "c"], Target("top:2")) == [
        Prediction(1, "b", 3.0, pytest.approx(0.8756006)),
        Prediction(0, "a", 1.0, pytest.approx(0.1184997)),
    ]
    assert [each.index for each in predictions(LOGITS[0], None)] == [1, 0, 2]
    assert len(predictions(torch.arange(9.0), None)) == 5
    (best,) = predictions(LOGITS[0], ["a", "b", "c"], Target("c"))
    assert (best.index, best.label, best.score) == (2, "c", -2.0)
    with pytest.raises(CategoriesError, match="2 class names for 3 classes of the model; give the class names"):
        predictions(LOGITS[0], ["a", "b"])
    with pytest.raises(UsageError, match="there is no image to predict"):
        predict(nn.Flatten(), [])
    with pytest.raises(ModelError, match=r"gives 1x3x4x4 values.*; for a segmentation, .* take a class: try target=1"):
        class_scores(torch.zeros(1, 3, 4, 4))


@pytest.mark.parametrize(
    ("family", "gives"), [("detection", "boxes, labels and scores of objects"), ("optical_flow", "the flow of pixels")]
)
def test_families_without_scores_are_refused_before_a_pass(family: str, gives: str) -> None:
    with pytest.raises(ModelError, match=f"mynet gives {gives}, no score for each class; inspect, capture and"):
        check_family(family, "mynet")
    for other in ("classification", "segmentation", "video"):
        check_family(other)


SIZES = {"vit_b_32": 224, "inception_v3": 96, "alexnet": 80, "raft_small": 128, "quantized_inception_v3": 96}
FAMILIES = {
    "classification": "alexnet googlenet inception_v3 swin_t vit_b_32 quantized_resnet18 quantized_googlenet",
    "segmentation": "lraspp_mobilenet_v3_large fcn_resnet50 deeplabv3_mobilenet_v3_large",
    "video": "r3d_18",
    "detection": "fasterrcnn_mobilenet_v3_large_320_fpn ssdlite320_mobilenet_v3_large",
    "optical_flow": "raft_small",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, names in FAMILIES.items() for name in names.split()]
)
def test_torchvisions_models(family: str, name: str) -> None:
    net = load_model(name, weights="none", device="cpu")
    side = SIZES.get(name, 64)
    with torch.no_grad():
        output = net.model(*example_inputs(net.model, (side, side)))
    assert net.family == family
    if family in ("detection", "optical_flow"):
        with pytest.raises(ModelError, match="no score for each class"):
            class_scores(output, name)
        return
    scores = class_scores(output, name)
    assert torch.equal(scores, output["out"].mean((2, 3)) if family == "segmentation" else output)
    (best,) = predictions(scores[0], net.categories, Target("top:1"))  # refuses another number of names
    assert best.index == int(scores[0].argmax())
