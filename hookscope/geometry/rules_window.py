"""Rules of operations with a window: convolution, pooling, upsampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hookscope.geometry.operation import AxisField, Followed, Indices, Operation, rule
from hookscope.hooks import tensors_in

Window = tuple[Indices, Indices, float] | None
"""First and last index that each value is made of, and how far they move from one value to the next; None for all."""


def _moved(
    operation: Operation, axes: int, window: Callable[[int, int, int], Window], flat: Iterable[int] = ()
) -> Followed:
    """What values see behind a window along each of the last ``axes``.

    ``window`` gets the number of an axis and its length before and after. A pooling of 3 at stride 2 without padding
    has the window ``(0, 2, 2)``: value 5 is made of the indices 10 to 12.
    """
    before, after = operation.input.shape, next(iter(tensors_in(operation.output).values())).shape
    first = len(before) - axes
    windows = {dim: window(dim - first, before[dim], after[dim]) for dim in range(first, len(before))}

    def move(reach: AxisField) -> AxisField:
        for dim, found in windows.items():
            if found is None:
                reach = reach.without({dim}, f"{operation.name} over positions")
            elif isinstance(found[0], np.ndarray) or found != (0, 0, 1):
                low, high, ratio = found
                reach = reach.resampled(dim, before[dim], ratio, low, high, after[dim])
        return reach

    return operation.followed.each(move, flat)


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def _convolution(operation: Operation) -> Followed:
    sizes = operation["weight"].shape[2:]
    strides, pads, spread = _per_axis(operation, len(sizes), stride=1, padding=0, dilation=1)
    channels = operation.input.dim() - len(sizes) - 1
    operation.known[id(operation.input)] = operation.followed.each(
        lambda reach: reach.without({channels}, "convolution over channels")
    )

    def window(at: int, length: int, made: int) -> Window:
        last = spread[at] * (sizes[at] - 1) - pads[at]
        if not operation["transposed"]:
            return -pads[at], last, strides[at]
        out = np.arange(made)
        return np.ceil((out - last) / strides[at]), np.floor((out + pads[at]) / strides[at]), 1 / strides[at]

    return _moved(operation, len(sizes), window)


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d_with_indices", "mkldnn_max_pool2d")
@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", "mkldnn_max_pool3d", "max_pool1d", "max_pool2d", "max_pool3d")
def _pool(operation: Operation) -> Followed:
    sizes, pads, spread = _per_axis(operation, _axes(operation), kernel_size=1, padding=0, dilation=1)
    strides = operation.per_axis("stride", len(sizes)) if operation["stride"] else sizes
    return _moved(
        operation, len(sizes), lambda at, *lengths: (-pads[at], spread[at] * (sizes[at] - 1) - pads[at], strides[at])
    )


def _per_axis(operation: Operation, count: int, **defaults: int) -> list[list[Any]]:
    return [operation.per_axis(name, count, default) for name, default in defaults.items()]


def _axes(operation: Operation) -> int:
    """2 for ``avg_pool2d``."""
    return int(next(letter for letter in operation.name if letter in "123"))


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d")
def _adaptive_pool(operation: Operation) -> Followed:
    def window(at: int, length: int, made: int) -> Window:
        index = np.arange(made)
        last = -(-(index + 1) * length // made) - 1
        return None if made == 1 else (index * length // made, last, length / made)

    return _moved(operation, _axes(operation), window)


@rule(*(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)))
@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
@rule("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _upsample(operation: Operation) -> Followed:
    count, shape, made = _axes(operation), operation.input.shape, operation.output.shape
    first = len(shape) - count
    factors = operation.per_axis("scale_factors", count)
    if not operation["scale_factors"]:
        names = ("scales",) if count == 1 else ("scales_d", "scales_h", "scales_w")[-count:]
        factors = [operation[name] for name in names]
    flat = {dim for dim in range(first, len(shape)) if shape[dim] == 1 < made[dim]} | operation.followed.flat

    def window(at: int, length: int, made: int) -> Window:
        return None if first + at in flat else _sources(operation, length, made, factors[at])

    return _moved(operation, count, window, flat)


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
    factor = operation["upscale_factor"]

    def window(at: int, length: int, made: int) -> Window:
        return np.arange(made) // factor, np.arange(made) // factor, 1 / factor

    return _moved(operation, 2, window)


@rule("pixel_unshuffle")
def _pixel_unshuffle(operation: Operation) -> Followed:
    factor = operation["downscale_factor"]
    return _moved(operation, 2, lambda at, *lengths: (0, factor - 1, factor))
