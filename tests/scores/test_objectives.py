"""What a map explains: classes, functions, and what they return for one image and for many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope import class_activation_maps, saliency_maps
from hookscope.errors import HookscopeError
from hookscope.scores import Score, objectives

LOGITS = torch.tensor([[0.0, 3.0, 1.0]])


def test_objectives_of_classes_read_their_logits_in_any_batch() -> None:
    found = objectives("2,top:1", LOGITS, ("a", "b", "c"))
    assert [(goal.score.name, goal.score.key, goal.score.score) for goal in found] == [("c", "2", 1.0), ("b", "1", 3.0)]
    batch = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert [goal.of(batch).tolist() for goal in found] == [[3.0, 6.0], [2.0, 5.0]]


def margin(output: Tensor) -> Tensor:
    return output[:, 1] - output[:, 2]


def test_a_function_of_the_output_is_a_target() -> None:
    [goal] = objectives(margin, LOGITS, None)
    assert goal.score.cells() == {"target": "margin", "class": None, "score": 2.0, "probability": None}
    assert (goal.score.key, goal.score.unseen) == ("margin", False)
    assert goal.of(torch.ones(2, 3)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda output: 3.0, "<lambda> returns float"),
        (lambda output: output, "returns a tensor of torch.float32 with shape (1, 3)"),
        (lambda output: output[0].long(), "returns a tensor of torch.int64"),
        (lambda output: output[0], "<lambda> returns 3 numbers for one image"),
    ],
)
def test_a_function_that_returns_something_else_is_one_line(function: Any, says: str) -> None:
    with pytest.raises(HookscopeError) as error:
        objectives(function, LOGITS, None)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_maps_of_a_function_are_those_of_the_class_that_it_reads() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    image = torch.rand(1, 3, 8, 8)
    second = lambda output: output[:, 1]  # noqa: E731
    for method in ("gradcam", "scorecam", "ablationcam"):
        maps = [class_activation_maps(net, image, "0", target, method)[0] for target in (1, second)]
        assert (maps[0].values == maps[1].values).all()
    pixels = [saliency_maps(net, image, target)[0].values for target in (1, second)]
    assert torch.equal(*pixels)


def test_names_of_files_come_from_the_target() -> None:
    assert Score(3, "dog", 0.9, 0.9, target="box 0: dog").key == "box-0-dog"
    assert Score(3, "dog", 0.9, 0.9).key == "3"
