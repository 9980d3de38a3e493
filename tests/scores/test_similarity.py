"""The similarity of embeddings as a target."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope import saliency_maps
from hookscope.errors import HookscopeError
from hookscope.scores import SimilarityTarget, objectives
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
    with refused(HookscopeError, says, begins=False):
        objectives(SimilarityTarget(reference), output, None)
