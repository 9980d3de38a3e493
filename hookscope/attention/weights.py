"""The weights of attention in one pass, fused kernels too, and where in the picture its queries and keys lie."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.errors import LayerError, NoMapError
from hookscope.findings import counted
from hookscope.hooks import MODEL, Call, HookHandles, Layers, Operations, Selection, enclosing, map_tensors, tensors_in

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
    """The coordinates of the tensors of one pass, for as long as the tensors live.

    The coordinates of a tensor are tensors of its own shape, one for each of ``(t,) y, x``, as shares 0..1 of the
    input: NaN for values that come from no place, such as a class token, and `OUTSIDE` for padding. The logits of
    attention have them twice: the coordinates of the query, then of the key. Functions that move values move the
    coordinates too, so that windows find back to their place, whoever cut and shifted them.
    """

    def __init__(self, inputs: Any) -> None:
        self._of = WeakTensorKeyDictionary()
        pictures = [tensor for tensor in tensors_in(inputs).values() if tensor.dim() in (3, 4, 5)]
        self.axes = 3 if pictures and pictures[0].dim() == 5 else 2
        for picture in pictures:
            if picture.dim() != 3 or isinstance(inputs[0], list):
                self._of[picture] = _even(picture, self.axes)

    def of(self, tensor: Tensor) -> Coordinates:
        """The coordinates of ``tensor``; empty if it has none."""
        coordinates: Coordinates = self._of.get(tensor, ())
        return coordinates

    def of_queries(self, logits: Tensor) -> Coordinates:
        """The coordinates of the queries, ``(..., L)``, of the logits or weights ``(..., L, S)`` of attention."""
        coordinates = self.of(logits)
        return tuple(tensor[..., 0] for tensor in coordinates[: self.axes]) if len(coordinates) > self.axes else ()

    def of_keys(self, logits: Tensor) -> Coordinates:
        """The coordinates of the keys, ``(..., S)``, of the logits or weights ``(..., L, S)`` of attention."""
        return tuple(coordinate[..., 0, :] for coordinate in self.of(logits)[self.axes :])

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
            self._set(output, tuple(coordinate[..., :1].expand(output.shape) for coordinate in self.of(args[0])))
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
            return tuple(_resampled(values[:, :1], output, axis) for axis, values in enumerate(own)) if fits else ()
        for tensor in given:
            if tensor.shape == output.shape:
                return self.of(tensor)
        first = self.of(given[0])
        if name in ("linear", "layer_norm") and given[0].shape[:-1] == output.shape[:-1]:
            return tuple(_of_rows(coordinate, output) for coordinate in first)
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
            return tuple(multiply(coordinate, None) for coordinate in a[: self.axes])
        if len(b) > self.axes:
            return tuple(multiply(None, coordinate) for coordinate in b[: self.axes])
        if not b:
            return tuple(multiply(coordinate, None) for coordinate in a)
        queries = [multiply(coordinate, None) for coordinate in a or [_nowhere(left)] * self.axes]
        return (*queries, *(multiply(None, coordinate) for coordinate in b))


def _even(picture: Tensor, axes: int) -> Coordinates:
    """The coordinates of a picture ``(..., H, W)`` or a clip ``(..., T, H, W)``: the centres of its pixels."""
    coordinates = []
    for axis in range(-axes, 0):
        size = picture.shape[axis]
        centres = (torch.arange(size, device=picture.device, dtype=torch.float32) + 0.5) / size
        coordinates.append(centres.reshape([-1 if at == axis else 1 for at in range(-axes, 0)]).expand(picture.shape))
    return tuple(coordinates)


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
    operands = _only(left, axes[0] if left.dim() > 1 else set()), _only(right, axes[1] if right.dim() > 1 else {-1})
    product: Tensor = torch.matmul(*operands) if equation is None else torch.einsum(equation, *operands)
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


Value = TypeVar("Value")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "nhead", "n_head", "heads")
# fmt: off
_HAND_ON = (  # what a model does to the weights before it weighs values with them
    "bfloat16", "clone", "contiguous", "dropout", "float", "getitem", "half", "linear", "mT", "mul", "permute",
    "reshape", "swapaxes", "to", "transpose", "type", "type_as", "unsqueeze", "view",
)
# fmt: on


@dataclass(frozen=True)
class Attention:
    """One call of attention.

    Attributes:
        call: Its place: the innermost module that computes it, and its index among all calls of attention.
        weights: ``(N, heads, L, S)``: the weight of each of ``S`` keys for each of ``L`` queries, in each of ``N``
            windows, or 1; in the graph where the pass has one.
        queries: Where the queries ``(N, L)`` lie in the picture, see `hookscope.attention.weights`; empty if unknown.
        keys: Where the keys ``(N, S)`` lie.
        source: The tensor that ``weights`` is a view of, with which values are weighed: gradients reach this one.
    """

    call: Call
    weights: Tensor
    queries: Coordinates
    keys: Coordinates
    source: Tensor


def follow_attention(
    model: nn.Module,
    inputs: tuple[Any, ...],
    layers: Layers,
    reduce: Callable[[Attention], Value],
) -> tuple[Any, list[tuple[Call, Value]]]:
    """Run the model; returns its output, and ``reduce(attention)`` of each wanted call in order of execution.

    ``layers`` selects calls by the name of their module or of one around it; indices count all calls of attention. In
    a graph, gradients reach the weights.

    Raises:
        NoMapError: for a model without attention.
        LayerError: if nothing is selected.
    """
    selection = Selection.of(layers)
    selection.check_names([name for name, _ in model.named_modules()], type(model).__name__)
    record = _Seen(model, inputs, selection, reduce)
    with HookHandles() as handles:
        record.operations.modules.watch(handles)
        output = model(*inputs)
    if not record.calls:
        exists = "in its pass no softmax weighs values, and no scaled_dot_product_attention runs"
        raise NoMapError(
            f"{type(model).__name__} has no attention",
            exists,
            "‹capture|visualize› keeps feature maps",
        )
    chosen = selected_attention(record.calls, selection)
    return output, [(call, value) for call, value in record.kept if call in chosen]


def selected_attention(calls: Sequence[Call], selection: Selection) -> list[Call]:
    """The calls of attention, of all ``calls`` of a pass, that are selected by index or by name."""
    chosen = [call for call in calls if _wants(selection, call, len(calls))]
    if not chosen:
        keys = [call.key or MODEL for call in calls]
        last = f" to {len(keys) - 1} ({keys[-1]})" if len(keys) > 1 else ""
        exists = f"the model has {counted(len(keys), 'call')} of attention: 0 ({keys[0]}){last}"
        raise LayerError(f"no attention in {selection}", exists, "choose by index or by name, such as -1")
    return chosen


def _wants(selection: Selection, call: Call, total: int | None) -> bool:
    """Whether a call of attention is selected, by its index or the name of its module or of one around it."""
    assert call.index is not None
    around = [name for name in enclosing(call.name) if name or not call.name]
    by_name = selection.calls_by_name(around, in_all=True)
    return bool(by_name & {None, call.call}) or selection.wants_index(call.index, total)


class _Seen:
    """What one pass shows of attention: each call, and what is kept of those that are or may be wanted."""

    def __init__(self, model: nn.Module, inputs: Any, selection: Selection, reduce: Callable[[Attention], Any]) -> None:
        self.operations = Operations(model, self._around, closed=True)
        self.calls: list[Call] = []
        self.kept: list[tuple[Call, Any]] = []
        self._modules = dict(model.named_modules())
        self._positions = Positions(inputs)
        self._selection, self._reduce = selection, reduce
        self._weighed = WeakTensorKeyDictionary()
        self._sources = WeakTensorKeyDictionary()  # a softmax: None; what was made of one: that softmax

    def _around(self, place: str, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "scaled_dot_product_attention":
            call = self._next_call(place)
            output = self._fused(call, function, args, kwargs) if self._may_want(call) else function(*args, **kwargs)
        else:
            if name in PRODUCTS and (softmax := self._softmax_in(args)) is not None:
                self._weighs(place, softmax)
            output = function(*args, **kwargs)
        self._positions.follow(name, function, args, kwargs, output)
        if isinstance(output, Tensor) and output.dim() > 2:
            if name == "softmax" and (args[1:2] or (kwargs.get("dim"),))[0] in (-1, output.dim() - 1):
                self._sources[output] = None
            elif name in _HAND_ON and args[0] is not output and (softmax := self._softmax_in(args[:1])) is not None:
                self._sources[output] = softmax
        return output

    def _softmax_in(self, args: Any) -> Tensor | None:
        """The softmax that one of ``args`` is or was made of."""
        for value in args:
            if isinstance(value, Tensor) and value in self._sources:
                source: Tensor | None = self._sources[value]
                return value if source is None else source
        return None

    def _next_call(self, place: str) -> Call:
        number = sum(call.name == place for call in self.calls)
        call = Call(place, type(self._modules[place]).__name__, number, len(self.calls))
        self.calls.append(call)
        return call

    def _may_want(self, call: Call) -> bool:
        return _wants(self._selection, call, None) or self._selection.may_want(call.index, len(self.calls))

    def _weighs(self, place: str, softmax: Tensor) -> None:
        """Values are weighed with ``softmax``, the first time or again."""
        if softmax in self._weighed:
            return
        self._weighed[softmax] = True
        call = self._next_call(place)
        if self._may_want(call):
            self._keep(call, softmax, self._positions.of_queries(softmax), self._positions.of_keys(softmax))

    def _fused(self, call: Call, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """What the function returns; in a graph computed from the weights, so that gradients reach them."""
        query, key, value, weights = _weights_of(*args, **kwargs)
        queries, keys = (tuple(c[..., 0] for c in self._positions.of(tensor)) for tensor in (query, key))
        self._keep(call, weights, queries, keys)
        return weights @ value if weights.requires_grad else function(*args, **kwargs)

    def _keep(self, call: Call, weights: Tensor, queries: Coordinates, keys: Coordinates) -> None:
        lead = weights.shape[:-2]
        queries, keys = (tuple(coordinate.expand(*lead, -1) for coordinate in of) for of in (queries, keys))
        axis, heads = self._heads(call.name, weights, keys)
        of_queries, of_keys = (
            tuple(tensor.movedim(axis, -2).reshape(-1, heads, tensor.shape[-1])[:, 0].cpu() for tensor in of)
            for of in (queries, keys)
        )
        shaped = weights.movedim(axis, -3).reshape(-1, heads, *weights.shape[-2:])
        self.kept.append((call, self._reduce(Attention(call, shaped, of_queries, of_keys, weights))))

    def _heads(self, place: str, weights: Tensor, keys: Coordinates) -> tuple[int, int]:
        """The axis of the heads, and how many there are: keys of all heads have the same positions, of windows not.

        Without an axis of their own they follow each other in the batch.
        """
        if weights.dim() == 4:
            return 1, weights.shape[1]
        alike = [axis for axis in range(weights.dim() - 2) if _are_alike(keys, axis)]
        if weights.dim() > 4:
            axis = alike[-1] if alike else weights.dim() - 3
            return axis, weights.shape[axis]
        said = (getattr(self._modules[place], name, None) for name in _HEADS)
        count = next((n for n in said if isinstance(n, int) and n > 0 and not len(weights) % n), None)
        return 0, count or (len(weights) if alike else 1)


def _are_alike(coordinates: Coordinates, axis: int) -> bool:
    return all(torch.allclose(tensor, tensor.narrow(axis, 0, 1), atol=1e-5, equal_nan=True) for tensor in coordinates)


def _weights_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of ``scaled_dot_product_attention``, and the weights ``(..., L, S)`` that its kernels hide."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    weights = logits.softmax(-1)
    if attn_mask is not None:  # a query that may see nothing
        weights = weights.masked_fill(logits.isneginf().all(-1, keepdim=True), 0)
    return query, key, value, torch.dropout(weights, dropout_p, True) if dropout_p else weights
