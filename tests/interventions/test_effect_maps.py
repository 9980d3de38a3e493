"""The maps of a call before and after interventions, part by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookscope.drawing import MapDifference
from hookscope.errors import NoMapError
from hookscope.hooks.calls import Call
from hookscope.hooks.tensors import shape_of
from hookscope.interventions.effect import MovedLayer
from hookscope.interventions.effect_maps import moved_maps


def moved(before: Any, after: Any, module: nn.Module | None = None, **more: Any) -> list[MapDifference]:
    call = Call("conv", "Conv2d", 0, 0)
    return moved_maps(MovedLayer(call, shape_of(after), True, 0.5, 0.5, 0, before, after), module, **more)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_tokens_clips_and_parts_are_read_as_maps() -> None:
    before, after = random(1, 17, 5), random(1, 17, 5, seed=1)
    grid, token = moved(before, after)
    assert (grid.part, token.part) == ("", "class token")
    assert grid.tiles is not None and token.tiles is not None
    assert grid.tiles[0].levels.shape == (5, 4, 4)
    assert token.tiles[0].levels.shape == (5, 1, 1)
    [last] = moved(random(1, 4, 6, 3), random(1, 4, 6, 3, seed=1), nn.Linear(3, 3))
    assert last.tiles is not None and last.tiles[0].levels.shape == (3, 4, 6)
    [clip] = moved(random(1, 3, 2, 4, 4), random(1, 3, 2, 4, 4, seed=1), nn.Conv3d(1, 1, 1))
    assert (clip.frames, clip.total) == (2, 3)
    several = moved({"a": random(1, 2, 4, 4), "b": before}, {"a": random(1, 2, 4, 4), "b": after})
    assert [(one.part, one.moved) for one in several] == [("a", 0), ("b", 5), ("b, class token", 5)]


def test_a_vector_is_a_map_of_one_position_for_each_channel() -> None:
    before = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    after = torch.tensor([[1.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    first, second = moved(before, after, nn.Linear(3, 3))
    assert (first.part, first.channels, first.distances) == ("item 0 of 2", (1, 2), (2.0, 1.0))
    assert second.moved == 0


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 5, 4), "the shapes differ: 1x3x4x4 before, 1x3x5x4 after"),
        (torch.zeros(4), torch.ones(4), "not a feature map"),
        (None, None, "no tensor"),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused(before: Any, after: Any, words: str) -> None:
    with pytest.raises(NoMapError, match=words):
        moved(before, after)
