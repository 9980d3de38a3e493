"""What is differentiated, with numbers that can be worked out on paper."""

import math
from typing import Any

import pytest
import torch

from hookscope.errors import ModelError, TargetError, UsageError
from hookscope.scores.losses import LOSSES, Loss, as_loss
from tests.helpers import numbers


def scores() -> torch.Tensor:
    return torch.tensor([[1.0, 4.0, 2.0]], requires_grad=True)


def gradient(loss: Loss, output: torch.Tensor) -> list[float]:
    value, _ = loss.of(output)
    (slope,) = torch.autograd.grad(value, output)
    return numbers(slope)


def test_there_are_three_losses() -> None:
    assert LOSSES == ("score", "cross-entropy", "mse")
    with pytest.raises(UsageError, match="no loss 'nll'; there are score, cross-entropy, mse"):
        Loss("nll")


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
        (Loss("score"), torch.zeros(2, 3), UsageError, "expected one picture, got 2"),
    ],
)
def test_outputs_without_a_loss_are_refused(loss: Loss, output: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loss.of(output)


def test_a_loss_is_a_name_an_object_or_a_function() -> None:
    assert (as_loss(None), as_loss("mse"), as_loss(Loss("score", "2"))) == (Loss(), Loss("mse"), Loss("score", "2"))

    def margin(output: torch.Tensor) -> torch.Tensor:
        return output[:, 1] - output[:, 0]

    own = as_loss(margin)
    assert (own.name, as_loss(own)) == ("margin", own)
    value, targets = own.of(scores())
    assert (float(value.detach()), value.shape, targets) == (3.0, (), ())
    assert as_loss(torch.nn.Identity()).name == "Identity"


@pytest.mark.parametrize("loss", [3, 0.5, ["mse"], torch.ones(1)])
def test_other_types_are_no_loss(loss: object) -> None:
    with pytest.raises(UsageError, match=r"no loss .*; there are score, cross-entropy, mse; name one, or give a Loss"):
        as_loss(loss)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda output: output, r"'<lambda>' is not a loss: it returned 3 numbers of shape \(1, 3\); return a tensor"),
        (lambda output: 3.0, "it returned float; return a tensor"),
        (lambda output: output.argmax(), "it returned a number of torch.int64"),
        (torch.nn.CrossEntropyLoss, "it returned CrossEntropyLoss"),
    ],
)
def test_a_function_that_returns_no_number_is_refused(gives: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_loss(gives).of(scores())
