"""Rules of operations with a window: convolution, pooling, upsampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookscope.geometry.operation import Followed, Operation, Reach, rule
from hookscope.hooks import tensors_in


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def _convolution(operation: Operation) -> Followed:
    sizes = operation["weight"].shape[2:]
    count = len(sizes)
    strides, pads = operation.per_axis("stride", count, 1), operation.per_axis("padding", count, 0)
    spread = operation.per_axis("dilation", count, 1)
    first = operation.input.dim() - count

    def convolve(reach: Reach) -> Reach:
        reach = reach.without({first - 1}, "convolution over channels")
        for at, (size, stride, pad, step) in enumerate(zip(sizes, strides, pads, spread, strict=True)):
            dim, length, made = first + at, operation.input.shape[first + at], operation.output.shape[first + at]
            if size == stride == step == 1 and pad == 0:
                continue
            if operation["transposed"]:
                out = np.arange(made)
                low, high = np.ceil((out + pad - step * (size - 1)) / stride), np.floor((out + pad) / stride)
                reach = reach.resampled(dim, length, 1 / stride, low, high, made)
            else:
                reach = reach.resampled(dim, length, stride, -pad, step * (size - 1) - pad, made)
        return reach

    return operation.followed.each(convolve)


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d_with_indices", "mkldnn_max_pool2d")
@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", "mkldnn_max_pool3d", "max_pool1d", "max_pool2d", "max_pool3d")
def _pool(operation: Operation) -> Followed:
    count = _axes(operation.name)
    sizes = operation.per_axis("kernel_size", count)
    strides = operation.per_axis("stride", count) if operation["stride"] else sizes
    pads, spread = operation.per_axis("padding", count, 0), operation.per_axis("dilation", count, 1)
    made = next(iter(tensors_in(operation.output).values())).shape
    first = operation.input.dim() - count

    def pool(reach: Reach) -> Reach:
        for at, (size, stride, pad, step) in enumerate(zip(sizes, strides, pads, spread, strict=True)):
            dim = first + at
            last = step * (size - 1) - pad
            reach = reach.resampled(dim, operation.input.shape[dim], stride, -pad, last, made[dim])
        return reach

    return operation.followed.each(pool)


def _axes(name: str) -> int:
    """2 for ``avg_pool2d``."""
    return int(next(letter for letter in name if letter in "123"))


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d")
def _adaptive_pool(operation: Operation) -> Followed:
    count = _axes(operation.name)
    made = next(iter(tensors_in(operation.output).values())).shape
    first = operation.input.dim() - count

    def pool(reach: Reach) -> Reach:
        for dim in range(first, first + count):
            length, index = operation.input.shape[dim], np.arange(made[dim])
            if made[dim] == 1:
                reach = reach.without({dim}, f"{operation.name} over positions")
                continue
            low = index * length // made[dim]
            high = -(-(index + 1) * length // made[dim]) - 1
            reach = reach.resampled(dim, length, length / made[dim], low, high, made[dim])
        return reach

    return operation.followed.each(pool)


@rule(*(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)))
@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
@rule("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _upsample(operation: Operation) -> Followed:
    count, shape, made = _axes(operation.name), operation.input.shape, operation.output.shape
    first = operation.input.dim() - count
    factors = operation.per_axis("scale_factors", count)
    if not operation["scale_factors"]:
        names = ("scales",) if count == 1 else ("scales_d", "scales_h", "scales_w")[-count:]
        factors = [operation[name] for name in names]
    flat = {dim for dim in range(first, len(shape)) if shape[dim] == 1 < made[dim]} | set(operation.followed.flat)

    def upsample(reach: Reach) -> Reach:
        for dim, factor in zip(range(first, len(shape)), factors, strict=True):
            if dim in flat:
                reach = reach.without({dim}, "")
                continue
            low, high, ratio = _sources(operation, shape[dim], made[dim], factor)
            reach = reach.resampled(dim, shape[dim], ratio, low, high, made[dim])
        return reach

    return operation.followed.each(upsample, flat)


def _sources(operation: Operation, length: int, made: int, factor: float | None) -> tuple[Any, Any, float]:
    """First and last index that each new value of an upsampling is made of, and how far the sources move for each."""
    name, index = operation.name, np.arange(made)
    ratio = 1 / factor if factor else length / made
    if "nearest" in name:
        low = high = np.floor((index + 0.5 * ("exact" in name)) * ratio)
    elif name.endswith("_aa"):
        reach = max(1.0, ratio) * (2 if "cubic" in name else 1)
        centre = (index + 0.5) * ratio
        low, high = np.floor(centre - reach + 0.5), np.floor(centre + reach + 0.5) - 1
    else:
        if operation["align_corners"]:
            ratio = (length - 1) / (made - 1) if made > 1 else 0.0
        at = index * ratio if operation["align_corners"] else (index + 0.5) * ratio - 0.5
        # torch calculates in float32: a source beside a whole number gets a small weight
        low, high = np.floor(at - 1e-4), np.ceil(at + 1e-4)
        low, high = (np.floor(at) - 1, np.floor(at) + 2) if "cubic" in name else (low, high)
    return np.clip(low, 0, length - 1), np.clip(high, 0, length - 1), ratio


@rule("pixel_shuffle")
def _pixel_shuffle(operation: Operation) -> Followed:
    factor, dims = operation["upscale_factor"], operation.input.dim()

    def shuffle(reach: Reach) -> Reach:
        for dim in (dims - 2, dims - 1):
            low, made = np.arange(operation.output.shape[dim]) // factor, operation.output.shape[dim]
            reach = reach.resampled(dim, operation.input.shape[dim], 1 / factor, low, low, made)
        return reach

    return operation.followed.each(shuffle)


@rule("pixel_unshuffle")
def _pixel_unshuffle(operation: Operation) -> Followed:
    factor, dims = operation["downscale_factor"], operation.input.dim()

    def unshuffle(reach: Reach) -> Reach:
        for dim in (dims - 2, dims - 1):
            made = operation.output.shape[dim]
            reach = reach.resampled(dim, operation.input.shape[dim], factor, 0, factor - 1, made)
        return reach

    return operation.followed.each(unshuffle)
