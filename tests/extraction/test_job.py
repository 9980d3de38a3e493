"""What each pool makes of each kind of output; expected numbers come from torch, without hookscope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import Permute

from hookscope.errors import LayerError
from hookscope.extraction.job import converted, pooled, pooled_whole
from hookscope.hooks import InputSize

SQUARE, CLIP = InputSize(32, 32), InputSize(32, 32, 16)
MAPS, TOKENS = torch.randn(3, 5, 4, 4), torch.randn(3, 17, 6)
LAST = torch.randn(3, 4, 4, 5)
FRAMES = torch.randn(3, 5, 2, 4, 4)

MEANS = {
    "maps": (MAPS, nn.Conv2d(1, 1, 1), SQUARE, MAPS.mean((2, 3)), MAPS.amax((2, 3))),
    "channels last": (LAST, Permute([0, 2, 3, 1]), SQUARE, LAST.mean((1, 2)), LAST.amax((1, 2))),
    "tokens with class token": (TOKENS, nn.LayerNorm(6), SQUARE, TOKENS[:, 1:].mean(1), TOKENS[:, 1:].amax(1)),
    "tokens": (TOKENS[:, 1:], nn.Identity(), SQUARE, TOKENS[:, 1:].mean(1), TOKENS[:, 1:].amax(1)),
    "tokens without a grid": (TOKENS[:, :7], nn.Identity(), SQUARE, TOKENS[:, :7].mean(1), TOKENS[:, :7].amax(1)),
    "clips": (FRAMES, nn.Conv3d(1, 1, 1), CLIP, FRAMES.mean((2, 3, 4)), FRAMES.amax((2, 3, 4))),
    "signals": (TOKENS, nn.Conv1d(1, 1, 1), SQUARE, TOKENS.mean(2), TOKENS.amax(2)),
    "vectors": (MAPS[..., 0, 0], nn.Linear(1, 1), SQUARE, MAPS[..., 0, 0], MAPS[..., 0, 0]),
    "numbers": (torch.tensor([1.0, 2, 3]), None, SQUARE, torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 3])),
}


@pytest.mark.parametrize("kind", MEANS)
def test_mean_and_max_are_taken_over_positions_and_none_and_flatten_keep_every_value(kind: str) -> None:
    tensor, module, shown, mean, most = MEANS[kind]
    torch.testing.assert_close(pooled(tensor, 3, "mean", module, shown, "x"), mean)
    assert torch.equal(pooled(tensor, 3, "max", module, shown, "x"), most)
    assert torch.equal(pooled(tensor, 3, "none", module, shown, "x"), tensor)
    assert torch.equal(pooled(tensor, 3, "flatten", module, shown, "x"), tensor.reshape(3, -1))


@pytest.mark.parametrize(("tokens", "has_one"), [(17, True), (16, False), (18, True), (21, True), (7, False)])
def test_cls_is_the_first_token_where_tokens_fold_to_a_grid_with_class_tokens(tokens: int, has_one: bool) -> None:
    tensor = torch.randn(3, tokens, 6)
    if has_one:
        assert torch.equal(pooled(tensor, 3, "cls", nn.LayerNorm(6), SQUARE, "x"), tensor[:, 0])
    else:
        with pytest.raises(LayerError, match=f"x has no class token; its output is {tokens}x6 for each image"):
            pooled(tensor, 3, "cls", nn.LayerNorm(6), SQUARE, "x")


def test_outputs_without_a_class_token_or_a_row_for_each_image_are_refused_with_advice() -> None:
    for tensor in (MAPS, MAPS[..., 0, 0], torch.randn(3)):
        with pytest.raises(LayerError, match="no class token"):
            pooled(tensor, 3, "cls", None, SQUARE, "x")
    words = r"heads has no row for each image; its output is .* for 3 images; .*size=1"
    for tensor in (torch.randn(7, 4), torch.tensor(1.0)):
        with pytest.raises(LayerError, match=words):
            pooled(tensor, 3, "mean", None, SQUARE, "heads")


BOXES = torch.randn(7, 5, 2, 2)


@pytest.mark.parametrize(
    ("tensor", "pool", "expected"),
    [
        (BOXES, "none", BOXES[None]),
        (BOXES, "flatten", BOXES.reshape(1, -1)),
        (BOXES, "mean", BOXES.mean((0, 2, 3))[None]),
        (BOXES, "max", BOXES.amax((0, 2, 3))[None]),
        (BOXES[..., 0, 0], "mean", BOXES[..., 0, 0].mean(0)[None]),
        (BOXES[:, 0, 0, 0], "max", BOXES[:, 0, 0, 0].amax()[None]),
        (BOXES[:0], "mean", torch.full((1, 5), torch.nan)),
        (BOXES[:0, 0, 0, 0], "max", torch.full((1,), torch.nan)),
        (torch.tensor(2.0), "mean", torch.tensor([[2.0]])),
        (torch.tensor([1, 2]), "mean", torch.tensor([1.5], dtype=torch.float64)),
        (BOXES[:1], "none", BOXES[:1][None]),
    ],
)
def test_the_whole_output_of_a_pass_belongs_to_its_only_image(tensor: Tensor, pool: str, expected: Tensor) -> None:
    torch.testing.assert_close(pooled_whole(tensor, pool, None, SQUARE, "x"), expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_values_are_decoded() -> None:
    whole = torch.quantize_per_tensor(torch.tensor([[0.5, 1.0]]), 0.5, 0, torch.quint8)
    assert torch.equal(pooled(whole, 1, "none", None, SQUARE, "x"), torch.tensor([[0.5, 1.0]]))


def test_a_conversion_copies_and_counts_what_became_infinite() -> None:
    values = torch.tensor([1.0, 65519.0, 65520.0, -1e6, torch.inf, torch.nan])
    copy, overflowed = converted(values, torch.float16)
    assert copy.tolist()[:5] == [1.0, 65504.0, torch.inf, -torch.inf, torch.inf] and overflowed == 2
    same, overflowed = converted(values, None)
    assert same.data_ptr() != values.data_ptr() and overflowed == 0


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float16),
        (torch.float64, None, torch.float64),
        (torch.int64, torch.float16, torch.int64),
        (torch.bfloat16, torch.float64, torch.float64),
    ],
)
def test_floating_point_numbers_get_the_data_type(before: torch.dtype, asked: Any, after: torch.dtype) -> None:
    assert converted(torch.ones(2, dtype=before), asked)[0].dtype == after
