"""The weights of attention in one forward pass, also where a fused kernel never writes them down."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.attention.positions import PRODUCTS, Coordinates, Positions
from hookscope.errors import LayerError, NoMapError
from hookscope.findings import counted
from hookscope.hooks import MODEL, Call, HookHandles, Layers, Operations, Selection, enclosing

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
        queries: Where the queries ``(N, L)`` lie in the picture, see `hookscope.attention.positions`; empty if unknown.
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
    seen = _Seen(model, inputs, selection, reduce)
    with HookHandles() as handles:
        seen.operations.modules.watch(handles)
        output = model(*inputs)
    if not seen.calls:
        exists = "in its pass no softmax weighs values, and no scaled_dot_product_attention runs"
        raise NoMapError(f"{type(model).__name__} has no attention", exists, "visualize and cam show feature maps")
    chosen = selected_attention(seen.calls, selection)
    return output, [(call, value) for call, value in seen.kept if call in chosen]


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
        queries, keys = (tuple(each.expand(*lead, -1) for each in of) for of in (queries, keys))
        axis, heads = self._heads(call.name, weights, keys)
        of_queries, of_keys = (
            tuple(each.movedim(axis, -2).reshape(-1, heads, each.shape[-1])[:, 0].cpu() for each in of)
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
    return all(torch.allclose(each, each.narrow(axis, 0, 1), atol=1e-5, equal_nan=True) for each in coordinates)


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
