"""The prediction of a loaded model for one picture."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import CategoriesError, InputError, ModelError, TargetError, UsageError
from hookscope.explain import class_activation_maps
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.models.load import load_model
from hookscope.models.loaded import LoadedModel
from hookscope.scores.prediction import predict
from hookscope.scores.target import Target


@pytest.fixture(scope="module")
def net() -> LoadedModel:
    return load_model("squeezenet1_1", weights="none", seed=3, device="cpu", input_size=(40, 40))


@pytest.fixture
def picture() -> Tensor:
    return torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(2))


class Constant(nn.Module):
    """Returns zeros of a fixed shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.shape)


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
    with pytest.raises(InputError, match=r"squeezenet1_1: .*forward\(\) failed on 3x2x2"):
        predict(net, [picture[:, :2, :2]])
    with pytest.raises(CategoriesError, match="1 class name for 1,000 classes"):
        predict(net, [picture], categories=["a"])
    flow = dataclasses.replace(net, family="optical_flow", name="raft")
    with pytest.raises(ModelError, match="raft gives the flow of pixels, no score for each class; visualize"):
        predict(flow, [picture])
    with pytest.raises(UsageError, match="expected one picture, got 2"):
        predict(dataclasses.replace(net, model=Constant(2, 3), categories=None), [picture])
    with pytest.raises(ModelError, match="the model has no classes: its scores are empty; visualize, stats"):
        predict(dataclasses.replace(net, model=Constant(1, 0), categories=None), [picture])


def test_predictions_and_maps_call_a_model_without_scores_alike(net: LoadedModel, picture: Tensor) -> None:
    features = dataclasses.replace(net, model=nn.Conv2d(3, 8, 1), name="net.py:make", categories=None)
    errors = []
    for explain in (predict, lambda net, pictures: class_activation_maps(net.model, pictures[0][None])):
        with pytest.raises(ModelError) as caught:
            explain(features, [picture])
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and errors[0].startswith("Conv2d gives 1x8x")
