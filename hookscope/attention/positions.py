"""Where in the picture each value of a tensor comes from, followed through the functions of one pass.

The coordinates of a tensor are tensors of its own shape, one for each of ``(t,) y, x``, as shares 0..1 of the input:
NaN for values that come from no place, such as a class token, and `OUTSIDE` for padding. The logits of attention have
them twice: the coordinates of the query, then of the key. Functions that move values move the coordinates too, so that
windows find back to their place, whoever cut and shifted them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.hooks import map_tensors, tensors_in

Coordinates = tuple[Tensor, ...]

OUTSIDE = -1.0

# fmt: off
_MOVES = frozenset((
    "T", "cat", "chunk", "clone", "concat", "concatenate", "constant_pad_nd", "contiguous", "expand", "expand_as",
    "flatten", "flip", "getitem", "hstack", "index_select", "mT", "moveaxis", "movedim", "narrow", "pad", "permute",
    "pixel_shuffle", "pixel_unshuffle", "repeat", "reshape", "reshape_as", "roll", "select", "split", "squeeze",
    "stack", "swapaxes", "swapdims", "t", "tensor_split", "tile", "transpose", "unbind", "unflatten", "unfold",
    "unsafe_chunk", "unsafe_split", "unsqueeze", "view", "view_as", "vstack",
))
# fmt: on
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
_LETTERS = re.compile(r"[a-zA-Z]+,[a-zA-Z]+->[a-zA-Z]+")  # the equation of a product
_RESAMPLES = re.compile("conv|pool|interpolate|upsample")


class Positions:
    """The coordinates of the tensors of one pass, for as long as these live."""

    def __init__(self, inputs: Any) -> None:
        self._of = WeakTensorKeyDictionary()
        pictures = [tensor for tensor in tensors_in(inputs).values() if tensor.dim() in (3, 4, 5)]
        self.axes = 3 if pictures and pictures[0].dim() == 5 else 2
        for picture in pictures:
            if picture.dim() != 3 or isinstance(inputs[0], list):
                self._of[picture] = _even(picture, self.axes)

    def of(self, tensor: Tensor) -> Coordinates:
        """The coordinates of ``tensor``; empty if it has none."""
        found: Coordinates = self._of.get(tensor, ())
        return found

    def of_queries(self, logits: Tensor) -> Coordinates:
        """The coordinates of the queries, ``(..., L)``, of the logits or weights ``(..., L, S)`` of attention."""
        found = self.of(logits)
        return tuple(each[..., 0] for each in found[: self.axes]) if len(found) > self.axes else ()

    def of_keys(self, logits: Tensor) -> Coordinates:
        """The coordinates of the keys, ``(..., S)``, of the logits or weights ``(..., L, S)`` of attention."""
        return tuple(each[..., 0, :] for each in self.of(logits)[self.axes :])

    @torch.no_grad()
    def follow(self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Give ``output``, the result of ``function(*args, **kwargs)``, its coordinates."""
        tensors = list(tensors_in(output).values())
        given = [tensor for tensor in tensors_in((args, kwargs)).values() if self.of(tensor)]
        if name in PRODUCTS and len(tensors) == 1:
            self._set(output, self._product(name, args))
        elif not tensors or not tensors[0].is_floating_point():
            return
        elif not given:
            if "conv" in name and tensors[0].dim() == self.axes + 2 and len(tensors[0]) == 1:
                self._of[tensors[0]] = _even(tensors[0], self.axes)  # a detector makes its batch in its own way
        elif name in _MOVES:
            for at, moved in enumerate(zip(*self._moved(name, function, args, kwargs), strict=True)):
                self._set(tensors[at], moved)
        elif name == "scaled_dot_product_attention":
            self._set(output, tuple(each[..., :1].expand(output.shape) for each in self.of(args[0])))
        else:
            self._set(tensors[0], self._passed_on(name, given, tensors[0]))

    def _set(self, tensor: Tensor, coordinates: Coordinates) -> None:
        if coordinates:
            self._of[tensor] = coordinates

    def _moved(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> list[tuple[Tensor, ...]]:
        """The coordinates of each tensor that ``function`` gives, by axis."""
        count = max(len(self.of(tensor)) for tensor in tensors_in((args, kwargs)).values())
        if name in ("pad", "constant_pad_nd") and (args[2:3] or (kwargs.get("mode", "constant"),))[0] == "constant":
            args, kwargs = args[:2], {**kwargs, "value": OUTSIDE}
        moved = []
        for axis in range(count):
            own = map_tensors((args, kwargs), partial(self._one_axis, axis=axis))
            moved.append(tuple(tensors_in(function(*own[0], **own[1])).values()))
        return moved

    def _one_axis(self, tensor: Tensor, axis: int) -> Tensor:
        if not tensor.is_floating_point():  # an index
            return tensor
        own = self.of(tensor)
        return own[axis] if axis < len(own) else _nowhere(tensor)

    def _passed_on(self, name: str, given: list[Tensor], output: Tensor) -> Coordinates:
        """The coordinates of the first of ``given`` that fits: same shape, other channels, or another resolution."""
        if _RESAMPLES.search(name):
            own = self.of(given[0])
            fits = given[0].dim() == output.dim() == self.axes + 2 and len(own) == self.axes
            return tuple(_resampled(each[:, :1], output, axis) for axis, each in enumerate(own)) if fits else ()
        for tensor in given:
            if tensor.shape == output.shape:
                return self.of(tensor)
        first = self.of(given[0])
        if name in ("linear", "layer_norm") and given[0].shape[:-1] == output.shape[:-1]:
            return tuple(_of_rows(each, output) for each in first)
        return ()

    def _product(self, name: str, args: Any) -> Coordinates:
        """The coordinates of a product of two: logits of queries and keys, weighted values, or other channels."""
        operands = [value for value in args if isinstance(value, Tensor)]
        if name == "einsum" and (len(operands) != 2 or not _LETTERS.fullmatch(str(args[0]).replace(" ", ""))):
            return ()
        if len(operands) < 2:
            return ()
        left, right = operands[-2:]  # baddbmm has what it adds before them
        a, b = self.of(left), self.of(right)
        multiply = partial(_multiplied, args[0] if name == "einsum" else None, left, right)
        if len(a) > self.axes:
            return tuple(multiply(each, None) for each in a[: self.axes])
        if len(b) > self.axes:
            return tuple(multiply(None, each) for each in b[: self.axes])
        if not b:
            return tuple(multiply(each, None) for each in a)
        queries = [multiply(each, None) for each in a or [_nowhere(left)] * self.axes]
        return (*queries, *(multiply(None, each) for each in b))


def _even(picture: Tensor, axes: int) -> Coordinates:
    """The coordinates of a picture ``(..., H, W)`` or a clip ``(..., T, H, W)``: the centres of its pixels."""
    found = []
    for axis in range(-axes, 0):
        size = picture.shape[axis]
        centres = (torch.arange(size, device=picture.device, dtype=torch.float32) + 0.5) / size
        found.append(centres.reshape([-1 if at == axis else 1 for at in range(-axes, 0)]).expand(picture.shape))
    return tuple(found)


def _nowhere(tensor: Tensor) -> Tensor:
    return torch.full((), math.nan, device=tensor.device).expand(tensor.shape)


def _of_rows(coordinates: Tensor, output: Tensor) -> Tensor:
    """The coordinates of the rows ``(..., C)``, the mean over their values, for rows of another length."""
    if coordinates.stride(-1) == 0:
        return coordinates[..., :1].expand(output.shape)
    inside = coordinates >= 0
    count = inside.sum(-1, keepdim=True)
    mean = torch.where(inside, coordinates, 0).sum(-1, keepdim=True) / count
    return torch.where(count > 0, mean, coordinates[..., :1]).expand(output.shape)


def _resampled(coordinates: Tensor, output: Tensor, axis: int) -> Tensor:
    """The coordinates of a grid ``(N, 1, ..., H, W)``, linear along each axis, for a grid of another resolution."""
    if len(coordinates) != len(output):
        return coordinates.new_full((), math.nan).expand(output.shape)
    if bool((coordinates < 0).any()):  # a convolution after a border
        return _even(output, output.dim() - 2)[axis]
    for along in range(2, output.dim()):
        old, new = coordinates.shape[along], output.shape[along]
        if old == new or old == 1:
            continue
        points = (torch.arange(new, device=output.device, dtype=torch.float32) + 0.5) * old / new - 0.5
        low = points.long().clamp(0, old - 2)
        share = (points - low).reshape([-1 if at == along else 1 for at in range(output.dim())])
        before, after = coordinates.index_select(along, low), coordinates.index_select(along, low + 1)
        coordinates = before + share * (after - before)
    return coordinates.expand(output.shape)


def _multiplied(equation: str | None, a: Tensor, b: Tensor, of_a: Tensor | None, of_b: Tensor | None) -> Tensor:
    """The coordinates of one operand of a product, in the shape of the product.

    Values that are added up must come from one place: where they do not, as in attention among channels, the
    coordinates are NaN.
    """
    left = a.new_ones(()).expand(a.shape) if of_a is None else of_a
    right = b.new_ones(()).expand(b.shape) if of_b is None else of_b
    left, right = left.float(), right.float()
    if equation is None:
        axes = {-1}, {-2}
    else:
        terms, _, result = equation.replace(" ", "").partition("->")
        of_left, of_right = terms.split(",")
        summed = set(of_left) & set(of_right) - set(result)
        axes = {of_left.index(x) - len(of_left) for x in summed}, {of_right.index(x) - len(of_right) for x in summed}
    one = _only(left, axes[0] if left.dim() > 1 else set()), _only(right, axes[1] if right.dim() > 1 else {-1})
    product: Tensor = torch.matmul(*one) if equation is None else torch.einsum(equation, *one)
    return product


def _only(coordinates: Tensor, axes: set[int]) -> Tensor:
    """The first along each of ``axes``; NaN where the others differ."""
    for axis in axes:
        first = coordinates.narrow(axis, 0, 1)
        if coordinates.stride(axis) == 0:  # expanded: they are the same
            coordinates = first
            continue
        same = torch.isclose(coordinates, first, atol=1e-5, equal_nan=True).all(axis, keepdim=True)
        coordinates = torch.where(same, first, math.nan)
    return coordinates
