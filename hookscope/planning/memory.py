"""Every storage of a step: when it is allocated and freed, whether autograd keeps it, and the largest sum."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hookscope.hooks import without_check
from hookscope.tracing import MacCounter

_FLASH, _EFFICIENT = 1, 2  # of torch.nn.attention.SDPBackend


class DeviceKernels(TorchFunctionMode):
    """Runs attention and dropout on meta tensors by the kernels that ``device`` (``cpu``, ``cuda``) would take."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # what it calls is to come here too
            with self:
                return without_check(func)(*args, **kwargs)
        if func in (F.dropout, torch.dropout) and self._device == "cuda":
            return _dropout_of_cuda(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        aten = torch.ops.aten
        inputs = query, key, value
        if query.is_meta and query.dim() == 4 and not enable_gqa:
            kernel = self._chosen(query, key, value, attn_mask, dropout_p, is_causal)
            if kernel == _FLASH and self._device == "cpu":
                return aten._scaled_dot_product_flash_attention_for_cpu(
                    *inputs, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
                )[0]
            if kernel == _FLASH:
                return aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, scale=scale)[0]
            if kernel == _EFFICIENT:
                bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
                keeps = any(tensor.requires_grad for tensor in inputs) and torch.is_grad_enabled()
                return aten._scaled_dot_product_efficient_attention(
                    *inputs, bias, keeps, dropout_p, is_causal, scale=scale
                )[0]
        return F.scaled_dot_product_attention(
            *inputs, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _chosen(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
    ) -> int:
        if self._device == "cpu":  # it is here, and can be asked with the tensors of one image
            given = query, key, value, mask
            with torch._C._DisableTorchDispatch():
                one: list[Any] = [
                    None if t is None else torch.empty_like(t[:1] if t.dim() == 4 else t, device="cpu") for t in given
                ]
                if mask is not None:
                    one[3].requires_grad_(mask.requires_grad)
                choice: Any = torch._fused_sdp_choice
                return int(choice(*one, dropout, causal))
        if self._device != "cuda" or query.dtype is torch.float64:
            return 0
        short = query.dtype in (torch.float16, torch.bfloat16)
        return _FLASH if short and mask is None and query.shape[-1] <= 256 else _EFFICIENT


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    bias = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype is torch.bool else mask
    return bias.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _dropout_of_cuda(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    fused = training and 0 < p < 1 and not inplace
    return torch.native_dropout(input, p, True)[0] if fused else F.dropout(input, p, training, inplace)


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Any, mean: Tensor | None, var: Any, training: bool, *numbers: float
) -> tuple[Tensor, Tensor, Tensor]:
    given = next((tensor for tensor in (mean, weight) if tensor is not None), input)
    means = given.new_empty(input.shape[1] if training else 0)
    return torch.empty_like(input), means, torch.empty_like(means)


def _batch_norm_backward(grad: Tensor, input: Tensor, weight: Tensor | None, *others: Any) -> tuple[Any, ...]:
    _, scales, shifts = others[-1]
    given = (input if weight is None else weight).new_empty
    channels = input.shape[1]
    return torch.empty_like(input), given(channels) if scales else None, given(channels) if shifts else None


# Torch's own kernels on the meta device cost twenty times as much, and return float32 means for other inputs too.
RESULTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""Functions that return what a kernel does on the meta device."""


class StorageFollower(MacCounter):
    """Follows every storage that an operation allocates inside the ``with`` block, on the meta device or a real one.

    Args:
        count: As `MacCounter` calls it.
        on_moved: Called with the bytes of the inputs and outputs of each operation that is not a view.
        on_saved: Called with the bytes of each storage that autograd keeps and did not keep before.
    """

    def __init__(
        self, count: Callable[[int, int], None], on_moved: Callable[[int], None], on_saved: Callable[[int], None]
    ) -> None:
        super().__init__(count)
        self._on_moved, self._on_saved = on_moved, on_saved
        self._alive: dict[int, tuple[int, Any]] = {}  # number of a storage by its address, and what tells of its end
        self._events: list[tuple[int, bool, Any]] = []
        self._sizes: list[int] = []
        self._kinds: dict[int, str] = {}
        self.place: Callable[[], Any] = str  # of the step, at a peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RESULTS and args[0].is_meta:
            output = RESULTS[func](*args)
        else:
            output = super().__torch_dispatch__(func, types, args, kwargs)
        results = list(_tensors([output]))
        for tensor in results:
            self.see(tensor)
        if not getattr(func, "is_view", False):
            given = list(_tensors([args, kwargs.values() if kwargs else ()]))
            self._on_moved(sum(map(_bytes, given)) + sum(map(_bytes, results)))
        return output

    def see(self, tensor: Tensor, kind: str = "") -> int | None:
        """The number of the storage of ``tensor``, which lives from now on if it was not known; None if it has none."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor has several
            return None
        size, (number, _) = storage.nbytes(), self._alive.get(storage._cdata, (None, None))
        if number is None or self._sizes[number] != size:
            if number is not None:
                self._events.append((number, False, self.place()))
            number = len(self._sizes)
            self._sizes.append(size)
            self._events.append((number, True, self.place()))
            self._alive[storage._cdata] = number, weakref.ref(storage, partial(self._freed, storage._cdata, number))
        if kind:
            self._kinds.setdefault(number, kind)
        return number

    def _freed(self, address: int, number: int, _: Any) -> None:
        if self._alive.get(address, (None, None))[0] == number:
            del self._alive[address]
            self._events.append((number, False, self.place()))

    def saving(self) -> saved_tensors_hooks:
        """A context whose operations tell of every tensor that autograd keeps."""

        def pack(tensor: Tensor) -> Tensor:
            number = self.see(tensor)
            if number is not None and number not in self._kinds:
                self._kinds[number] = "saved"
                self._on_saved(self._sizes[number])
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def mark(self, tensors: Iterable[Tensor], kind: str) -> int:
        """Say what ``tensors`` are, unless it is known; returns the bytes of all storages of this kind."""
        for tensor in tensors:
            self.see(tensor, kind)
        return self.total(kind)

    def total(self, kind: str) -> int:
        """The bytes of all storages of a kind."""
        return sum(self._sizes[number] for number, named in self._kinds.items() if named == kind)

    def peak(self) -> tuple[int, dict[str, int], Any]:
        """The largest sum of living storages, its parts by kind, and the place where it was reached."""
        now: Counter[str] = Counter()
        total, largest, parts, where = 0, 0, dict[str, int](), None
        for number, allocated, place in self._events:
            change = self._sizes[number] if allocated else -self._sizes[number]
            total += change
            now[self._kinds.get(number, "temporary")] += change
            if total > largest:
                largest, parts, where = total, dict(now), place
        return largest, {kind: size for kind, size in parts.items() if size}, where


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list) or type(value).__name__ == "dict_values":
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """What a kernel reads or writes of ``tensor``: no more than its storage, which an expanded tensor has less of."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
