"""From the output of a layer to one row of features for each image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError
from hookscope.hooks import InputSize, as_plain, by_channel, channel_axis, token_grid

_ADVICE = "choose the block around the layer, or one image for each pass (--batch-size 1, batch_size=1 in Python)"


def pooled(tensor: Tensor, images: int, pool: str, module: nn.Module | None, shown: InputSize, key: str) -> Tensor:
    """One row for each of the ``images``, whose axis is the first one, as `extract` describes.

    Raises:
        LayerError: The first axis is not that of the images, or there is no class token.
    """
    if not tensor.dim() or len(tensor) != images:
        text = "x".join(map(str, tensor.shape)) or "one value"
        exists = f"its output is {text} for {images} images"
        raise LayerError(f"{key} has no row for each image", exists, _ADVICE, name=key)
    rows = as_plain(tensor)
    if pool == "none":
        return rows
    if pool == "flatten":
        return rows.reshape(images, -1)
    axis = (channel_axis(rows, module, shown) or 1) if rows.dim() > 2 else 1
    grid = token_grid(rows.shape[1], shown) if rows.dim() == 3 and axis == 2 else None
    if pool == "cls":
        return _class_token(rows, grid, key)
    if rows.dim() < 3:
        return rows
    values = rows.movedim(axis, 1).flatten(2)
    return _reduced(values if grid is None else values[:, :, grid[0] :], pool)


def pooled_whole(tensor: Tensor, pool: str, module: nn.Module | None, shown: InputSize, key: str) -> Tensor:
    """One row ``(1, ...)`` for the only image of a pass, to which the whole tensor belongs, such as all its boxes.

    Raises:
        LayerError: There is no class token.
    """
    whole = as_plain(tensor)[None]
    if pool == "none":
        return whole
    if pool == "flatten" or whole.dim() < 2:
        return whole.reshape(1, -1)
    if pool == "cls":
        return _class_token(whole, None, key)
    if whole.dim() == 2:  # a value for each box
        return _reduced(whole[:, None], pool)[:, 0]
    return _reduced(by_channel(whole[0], module, shown).transpose(0, 1).flatten(1)[None], pool)


def _class_token(rows: Tensor, grid: tuple[int, int, int, int] | None, key: str) -> Tensor:
    if grid is None or not grid[0]:
        exists = f"its output is {'x'.join(map(str, rows.shape[1:])) or 'one value'} for each image"
        raise LayerError(f"{key} has no class token", exists, "pool by mean or max", name=key)
    return rows[:, 0]


def _reduced(values: Tensor, pool: str) -> Tensor:
    """The mean or the largest of the positions of ``(N, C, positions)``; NaN where there is no position."""
    if not values.is_floating_point():
        values = values.double()
    if not values.shape[2]:
        return values.new_full(values.shape[:2], torch.nan)
    return values.amax(2) if pool == "max" else values.mean(2)


def converted(tensor: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, int]:
    """A copy on the CPU, floating-point numbers in ``dtype``, and how many finite values became Inf.

    Without ``dtype`` it is that of the tensor, but float32 for bfloat16, which NumPy does not have.
    """
    if not tensor.is_floating_point():
        dtype = tensor.dtype
    elif dtype is None:
        dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    copy = torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)
    if torch.promote_types(dtype, tensor.dtype) == dtype or not bool((infinite := copy.isinf()).any()):
        return copy, 0
    return copy, int((infinite & tensor.cpu().isfinite()).sum())
