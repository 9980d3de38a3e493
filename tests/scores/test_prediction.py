"""One pass of a loaded model: its answer is the model's own, and it is asked nothing that it cannot tell."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import CategoriesError, InputError, ModelError, TargetError, UsageError
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


class Two(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(2, 3)


def test_two_rows_of_scores_for_one_picture_are_no_answer(net: LoadedModel, picture: Tensor) -> None:
    with pytest.raises(UsageError, match="2 pictures at once; what is asked for is of one"):
        predict(dataclasses.replace(net, model=Two(), name="twice", categories=None), [picture])


class Classless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(1, 0)


def test_a_model_without_any_class_is_told(net: LoadedModel, picture: Tensor) -> None:
    with pytest.raises(ModelError, match="the model has no class at all: its scores are empty; visualize, stats"):
        predict(dataclasses.replace(net, model=Classless(), categories=None), [picture])


def test_the_model_that_ships(shapes_file: Path, picture: Tensor) -> None:
    net = load_model("shapes", device="cpu")
    with torch.no_grad():
        (own,) = net.model(picture[None].tile(2, 2))
    found = predict(net, [picture.tile(2, 2)])
    assert len(found) == 5 and net.weights == "shapes.safetensors"
    assert found[0].index == int(own.argmax()) and found[0].label == f"shape {found[0].index}"
    assert torch.tensor(found[0].score) == own.max()
