"""One step on the meta device: its calls, and every storage from its allocation to its end."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hookscope.errors import ModelError
from hookscope.geometry import FieldTracker
from hookscope.hooks import OPERATION, Call, matches_type, tensors_in, usual_types, without_check
from hookscope.planning.facts import MemoryPlan
from hookscope.planning.subject import OptimizerLike, Subject, build_optimizer, create_state, state_tensors, step
from hookscope.scores import Loss
from hookscope.tracing import CallRecorder, MacCounter, Trace, everything_as_before

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
                arguments: list[Any] = [
                    None if t is None else torch.empty_like(t[:1] if t.dim() == 4 else t, device="cpu") for t in given
                ]
                if mask is not None:
                    arguments[3].requires_grad_(mask.requires_grad)
                choice: Any = torch._fused_sdp_choice
                return int(choice(*arguments, dropout, causal))
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


@dataclass(frozen=True)
class Conditions:
    """How a step runs: ``optimizer`` is None for inference, ``blocks`` are the layers to checkpoint."""

    device: str
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    optimizer: OptimizerLike | None = None
    blocks: tuple[str, ...] = ()
    real: bool = False


@dataclass(frozen=True)
class StepRecord:
    """The calls of a step, its memory, and what each call but the calls inside it moved and saved, in bytes."""

    trace: Trace
    calls: tuple[Call, ...]
    counted: tuple[tuple[int, int], ...]
    memory: MemoryPlan


class _SwappedModel(nn.Module):
    """Runs a function while the parameters and buffers of ``model`` are others, until its backward pass is over."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


@dataclass
class _PlannedStep:
    """The step that runs now: its phase, and which call made the nodes of autograd up to each sequence number."""

    recorder: CallRecorder
    phase: str = "forward"
    sequence: list[int] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)

    def moved(self, size: int) -> None:
        if self.phase == "forward":
            self.sequence.append(torch._C._autograd._get_sequence_nr())
            self.owners.append(self.recorder.innermost)
            if self.recorder.innermost is not None:
                self.recorder.innermost.moved += size

    def saved(self, size: int) -> None:
        if self.phase == "forward" and self.recorder.innermost is not None:
            self.recorder.innermost.saved += size

    def place(self) -> tuple[str, Any]:
        """The phase, and the innermost call that runs, or in the backward pass the number of the node."""
        if self.phase == "forward":
            return self.phase, self.recorder.innermost
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        return self.phase, None if node is None else node._sequence_nr()

    def call_at(self, place: tuple[str, Any]) -> int | None:
        phase, owner = place
        if phase == "backward" and owner is not None:
            position = bisect_right(self.sequence, owner)
            owner = self.owners[position] if position < len(self.owners) else None
        return next((n for n, counted in enumerate(self.recorder.counted) if counted is owner), None)


def run_step(subject: Subject, batch: int, conditions: Conditions, *, fields: bool = False) -> StepRecord:
    """Run one step of the model and record it, with ``fields`` also what the units of each call see of the input.

    The model itself stays as it was: the step works on tensors without values in the place of its parameters and
    buffers, or on copies if it is ``real``. Under autocast these pretend to be on the CPU: the meta device has none.
    """
    fake = conditions.autocast is not None and not conditions.real
    with torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        return _run_step(subject, batch, conditions, FieldTracker() if fields else None)


def _run_step(subject: Subject, batch: int, conditions: Conditions, tracker: FieldTracker | None) -> StepRecord:
    model, dtype = subject.model, conditions.dtype
    device = "cpu" if conditions.real or conditions.autocast is not None else "meta"
    training = conditions.optimizer is not None
    recorder = CallRecorder(model, writes=False, tracker=tracker)
    run = _PlannedStep(recorder)
    follower = StorageFollower(recorder.count, run.moved, run.saved)
    follower.place = run.place

    def new(value: Tensor) -> Tensor:
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        if conditions.real:
            return value.detach().to(kind, copy=True)
        return torch.empty_strided(value.size(), value.stride(), dtype=kind, device=device)

    parameters = {
        name: nn.Parameter(new(value), requires_grad=value.requires_grad) for name, value in model.named_parameters()
    }
    buffers = {name: new(value) for name, value in model.named_buffers()}
    given = subject.inputs(batch, device, dtype, training)
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    if training and not trained:
        raise ModelError(f"{subject.name} has no parameter that is trained", do="plan its inference")
    autocast = nullcontext() if conditions.autocast is None else torch.autocast("cpu", conditions.autocast)

    def whole() -> dict[str, int]:
        optimizer = None
        if conditions.optimizer is not None:
            optimizer = build_optimizer(conditions.optimizer, trained, conditions.device)
            create_state(optimizer)
        with follower, follower.saving() if training else torch.no_grad():
            parts = {"parameters": follower.mark(parameters.values(), "parameters")}
            parts["buffers"] = follower.mark(buffers.values(), "buffers")
            parts["optimizer"] = 0 if optimizer is None else follower.mark(state_tensors(optimizer), "optimizer")
            parts["input"] = follower.mark(tensors_in(given).values(), "input")
            with autocast, recorder.watching(), tracker or nullcontext():
                output = model(*given)
            parts["saved"], parts["gradients"] = follower.total("saved"), 0
            if optimizer is not None:
                loss, _ = Loss("mse").of(output)
                run.phase = "backward"
                loss.backward()
                run.phase = "optimizer"
                grads = [parameter.grad for parameter in trained if parameter.grad is not None]
                parts["gradients"] = follower.mark(grads, "gradients")
                step(optimizer)
        return parts

    with everything_as_before(model, training), torch.set_grad_enabled(training), DeviceKernels(conditions.device):
        checkpoint_blocks(model, conditions.blocks)
        replaced = {f"model.{name}": value for name, value in (parameters | buffers).items()}
        parts: dict[str, int] = functional_call(_SwappedModel(model), replaced, (whole,))
    trace = recorder.trace(conditions.real)
    calls = calls_of(trace)
    peak, at_peak, place = follower.peak()
    at, parts["temporary"] = run.call_at(place), at_peak.get("temporary", 0)
    peak_call = "" if at is None else calls[at].key
    memory = MemoryPlan(**parts, peak=peak, at_peak=at_peak, peak_in=place[0], peak_call=peak_call)
    counted = tuple((call.moved, call.saved) for call in recorder.counted)
    return StepRecord(trace, calls, counted, memory)


def checkpoint_blocks(model: nn.Module, names: Sequence[str]) -> None:
    """Make these layers compute again in the backward pass; call it inside `everything_as_before`."""
    for name in names:
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def calls_of(trace: Trace) -> tuple[Call, ...]:
    """Each call of ``trace``, with its index among the calls of the usual types."""
    types = usual_types(layer.types for layer in trace.layers)
    times, indices, orders = Counter[int](), count(), count()
    calls = []
    for call in trace.calls:
        layer, number = trace.layers[call.layer], times[call.layer]
        times[call.layer] += 1
        is_layer = layer.leaf and OPERATION not in layer.name
        index = next(indices) if is_layer and matches_type(layer.types, types, layer.leaf) else None
        calls.append(Call(layer.name, layer.type, number, index, next(orders) if is_layer else None))
    return tuple(calls)
