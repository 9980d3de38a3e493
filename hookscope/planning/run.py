"""The cost of a model by its name or of a module: one step without arithmetic, and the largest batch that fits."""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hookscope.display import RowTuple
from hookscope.errors import (
    HookscopeError,
    InputError,
    LayerError,
    ModelError,
    UsageError,
    check_whole,
    is_out_of_memory,
    nearest,
)
from hookscope.geometry import effective_fields
from hookscope.hooks import OPERATION, Selection, enclosing
from hookscope.models import (
    AUTOCAST,
    LoadedModel,
    ModelSource,
    as_loaded,
    dtype_name,
    forward_error,
    load_model,
    model_errors_as_input_errors,
    parse_dtype,
    pick_device,
)
from hookscope.planning.facts import CallCost, Plan
from hookscope.planning.step import Conditions, StepRecord, run_step
from hookscope.planning.subject import OptimizerLike, Subject
from hookscope.planning.timing import CallTimes, measure as measure_step
from hookscope.tracing import Trace, TracedCall, check_traceable, everything_as_before

BALANCE = 10.0
"""Multiply-accumulates for each byte of memory that a device of today does in float32 at the same time.

An NVIDIA H100 SXM does 67 TFLOPS, which are 33.5 tera multiply-accumulates, and moves 3.35 TB/s (its data sheet).
"""
LARGEST_BATCH = 2**31 - 1
_FIELDS = 64  # layers whose effective receptive field is measured: a backward pass for each call


def plan(
    net: str | ModelSource | LoadedModel | nn.Module,
    batch_size: int = 1,
    input_size: Sequence[int] | None = None,
    *,
    train: bool = False,
    optimizer: OptimizerLike = "sgd",
    dtype: str | None = None,
    device: str | None = None,
    checkpoint: Sequence[str] = (),
    memory: int | None = None,
    balance: float | None = None,
    measure: bool = False,
    repeats: int = 10,
    warm_up: int = 3,
    on_progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """What one pass of ``net`` costs, or one step of training: memory, arithmetic and bytes moved, without running it.

    The step runs on the meta device, where tensors have shapes and no values: torch itself keeps and frees each tensor.
    Two things are not counted: memory that a kernel needs while it runs, such as the workspace of a convolution, and
    memory of the driver and the allocator of the device.

    Args:
        net: A MODEL argument as `load_model` takes it, a loaded model, or any eager module.
        batch_size: Images in a batch.
        input_size: ``(H, W)`` of the input, ``(D, H, W)`` of a clip or volume, ``(F,)`` of features, or a shape with
            batch and channels, whose batch does not count; by default the model's.
        train: A step of training in train mode: forward, backward and optimizer, without a loss of its own.
        optimizer: Name of a class of `torch.optim` in any case, with its default arguments, or a function that makes
            an optimizer of a list of parameters.
        dtype: ``float32``, ``float64``, ``float16`` or ``bfloat16`` for parameters and inputs; ``autocast`` for
            `torch.autocast` by the rules of the CPU, or such as ``autocast:float16``. By default the model's.
        device: ``cpu``, ``cuda`` or ``mps``, which need not be there unless ``measure``; ``auto`` for the fastest that
            this machine has. By default the model's.
        checkpoint: Names of layers whose activations are computed again in the backward pass, as by
            `torch.utils.checkpoint.checkpoint` with ``use_reentrant=False``.
        memory: Memory of the device in bytes: also find the largest batch that fits.
        balance: MACs per byte below which a call is bound by memory; by default 10, and with ``measure`` the
            balance of the device.
        measure: Also run it on the device, with random weights where ``net`` is a name: the time of each call, and the
            memory of a step.
        repeats: Number of timed passes.
        warm_up: Number of passes before them.
        on_progress: Called with the passes done and their number.

    Raises:
        UsageError: a batch, data type, device or optimizer that cannot be.
        LayerError: no such layer to checkpoint.
        InputError: the model refuses the input.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> cost = plan(net, batch_size=2, input_size=(9, 9), train=True)
        >>> cost.calls[0].macs, cost.memory.parameters, cost.memory.saved
        (21952, 896, 3136)
    """
    check_whole("batch size", batch_size)
    if batch_size > LARGEST_BATCH:
        raise UsageError(f"batch size must be from 1 to {LARGEST_BATCH}, not {batch_size}")
    memory = int(memory) if isinstance(memory, float) and memory.is_integer() else memory
    if isinstance(memory, str):
        raise UsageError(f"memory is a number of bytes, not '{memory}'", do="write memory=8 * 10**9 for 8 GB")
    check_whole("memory", memory, optional=True)
    device = pick_device(device) if device == "auto" else device
    subject = Subject.of(net, input_size)
    names = _blocks(subject.model, checkpoint)
    where = re.sub(r":[0-9]+$", "", device or subject.device.replace("meta", "cpu"))
    if where not in ("cpu", "cuda", "mps"):
        raise UsageError(f"no device '{device or subject.device}' to plan for", "there are cpu, cuda, mps")
    kind, autocast = (None, None) if dtype is None else parse_dtype(dtype, where)
    conditions = Conditions(where, kind, autocast, optimizer if train else None, names)
    subject, conditions, record = _recorded(subject, batch_size, conditions)
    notes = list(subject.notes)
    if conditions.real:
        what = "the plan is of a real pass of random images on the CPU"
        notes.append(f"{subject.name} cannot run without values: {what}")
    largest = None
    if memory is not None:
        peak = functools.cache(lambda batch: run_step(subject, batch, conditions).memory.peak)
        if conditions.real:
            notes.append("the largest batch is estimated from the peaks of 1 and 2 images")
            largest = _largest_batch(lambda batch: peak(1) + (peak(2) - peak(1)) * (batch - 1), memory)
        else:
            largest = _largest_batch(peak, memory, _least_batch(peak, batch_size))
    measured, effective = None, dict[str, float]()
    if measure:
        measured, effective = _measured(
            subject, record, batch_size, device, conditions, repeats, warm_up, notes, on_progress
        )
        balance = balance or measured.step.macs_per_second / measured.step.bytes_per_second
    called = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "optimizer")
    return Plan(
        model=subject.name,
        input_shape=(batch_size, *subject.shape),
        dtype=f"{AUTOCAST}:{dtype_name(autocast)}" if autocast else dtype_name(kind or subject.dtype),
        device=where,
        optimizer=called.lower() if train else "",
        checkpointed=names,
        calls=RowTuple(_costs(record, balance or BALANCE, measured, effective)),
        memory=record.memory,
        limit=memory,
        largest_batch=largest,
        real=conditions.real,
        measured=None if measured is None else measured.step,
        notes=tuple(notes),
    )


def _recorded(subject: Subject, batch: int, conditions: Conditions) -> tuple[Subject, Conditions, StepRecord]:
    """The record of a step without values, or of a real one where the model needs them; and how it ran."""
    check_traceable(subject.model)
    refusal: Exception | None = None
    for real in (False, True):
        try:
            conditions = replace(conditions, real=real)
            if real and subject.bare:
                subject = replace(subject, model=load_model(subject.name, "none", device="cpu").model, bare=False)
            return subject, conditions, run_step(subject, batch, conditions, fields=True)
        except HookscopeError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            refusal = error
            if subject.bare and not isinstance(error, NotImplementedError) and "meta" not in str(error):
                break  # not for want of values
    assert refusal is not None
    trace = refusal.__traceback__
    while trace is not None and trace.tb_frame.f_locals.get("self") is not subject.model:
        trace = trace.tb_next  # to the model itself, after which layers are named
    refusal = refusal.with_traceback(trace or refusal.__traceback__)
    raise forward_error(subject.name, subject.inputs(batch, "meta"), refusal) from refusal


def _measured(
    subject: Subject,
    record: StepRecord,
    batch: int,
    device: str | None,
    conditions: Conditions,
    repeats: int,
    warm_up: int,
    notes: list[str],
    on_progress: Callable[[int, int], None] | None,
) -> tuple[CallTimes, dict[str, float]]:
    """Times, memory and effective fields of the model with values, in the data type and on the device of the plan."""
    if repeats < 1 or warm_up < 0:
        raise UsageError(f"cannot time {repeats} passes after {warm_up}", do="give repeats from 1 and warm_up from 0")
    where = pick_device(device or subject.device)
    model = subject.model
    if any(parameter.is_meta for parameter in model.parameters()):
        model = load_model(subject.name, "none", device=where).model
    elif conditions.dtype not in (None, subject.dtype) or where != subject.device:
        model = copy.deepcopy(model)
    model = model.to(where, conditions.dtype)
    inputs = subject.inputs(batch, where, conditions.dtype, conditions.optimizer is not None)
    with model_errors_as_input_errors(subject.name, inputs):
        times = measure_step(model, inputs, conditions, repeats=repeats, warm_up=warm_up, on_progress=on_progress)
    image = subject.inputs(1, where, conditions.dtype)
    return times, _effective_fields(model, subject.name, image, record.trace.calls, notes, on_progress)


def _effective_fields(
    model: nn.Module,
    name: str,
    inputs: tuple[Any, ...],
    calls: Iterable[TracedCall],
    notes: list[str],
    on_progress: Callable[[int, int], None] | None,
) -> dict[str, float]:
    """Calls of the layers that hold a weight and return several positions; of many, some at even distances."""
    named = list(model.named_modules())
    placed = {call.layer for call in calls if tuple(call.output_shape or ())[2:] not in ((), (1, 1))}
    layers = [
        name
        for at, (name, module) in enumerate(named)
        if at in placed and any(w.dim() > 1 for w in module.parameters(False))
    ]
    if not layers:
        return {}
    chosen = Selection.of_names(layers[:: -(-len(layers) // _FIELDS)])
    try:
        with everything_as_before(model):
            return effective_fields(replace(as_loaded(model), name=name), inputs, chosen, on_progress=on_progress)
    except (InputError, ModelError) as error:  # inference needs no gradient
        notes.append(f"the effective receptive fields were not measured: {error}")
        return {}


def _costs(
    record: StepRecord, balance: float, times: CallTimes | None, effective: Mapping[str, float]
) -> tuple[CallCost, ...]:
    """A row for each call of a leaf, and for each other call that computes, keeps or holds something itself."""
    trace = record.trace
    params = _params_of_calls(trace)
    forward, backward = ({}, {}) if times is None else (times.forward, times.backward)
    rows = []
    for place, (call, key, (moved, saved)) in enumerate(zip(trace.calls, record.calls, record.counted, strict=True)):
        layer = trace.layers[call.layer]
        is_layer = layer.leaf and OPERATION not in layer.name
        if is_layer or call.macs or moved or saved or params[place]:
            planned = params[place], call.macs, moved, saved, _bound(call.macs, moved, balance), *call.seen
            measured = effective.get(key.key), forward.get(key.key), backward.get(key.key)
            rows.append(CallCost(key, call.input_shape, call.output_shape, *planned, *measured))
    return tuple(rows)


def _params_of_calls(trace: Trace) -> Counter[int]:
    first: dict[str, int] = {}
    for place, call in enumerate(trace.calls):
        first.setdefault(trace.layers[call.layer].name, place)
    params: Counter[int] = Counter()
    counted: set[int] = set()
    for layer in trace.layers:
        name = next((name for name in enclosing(layer.name) if name in first), None)
        own = set(layer.parameters) - counted
        counted |= own
        if name is not None:
            params[first[name]] += sum(trace.sizes[parameter] for parameter in own)
    return params


def _bound(macs: int, moved: int, balance: float) -> str:
    if not moved:
        return "arithmetic" if macs else ""
    return "memory" if macs / moved < balance else "arithmetic"


def _least_batch(peak: Callable[[int], int], batch: int) -> int:
    """1, or 2 for a model that takes ``batch`` images and not one, such as for BatchNorm of one value in train mode."""
    if batch > 1:
        try:
            peak(1)
        except Exception as error:
            if isinstance(error, HookscopeError) or is_out_of_memory(error):
                raise
            return 2
    return 1


def _largest_batch(peak: Callable[[int], int], limit: int, least: int = 1) -> int:
    """The largest batch whose peak is at most ``limit``; 0 if the peak of the ``least`` batch is larger.

    The peak is a line in the batch, or several lines that meet, so few steps find it. Both the batch and the next one
    are tried.
    """
    if peak(least) > limit:
        return 0
    low, high = least, least + 1
    while peak(high) <= limit:
        if high == LARGEST_BATCH:
            return high
        slope = (peak(high) - peak(low)) / (high - low)
        beyond = int(high + (limit - peak(high)) / slope) + 1 if slope > 0 else 2 * high
        low, high = high, min(LARGEST_BATCH, beyond)
    while high - low > 1:
        slope = (peak(high) - peak(low)) / (high - low)
        middle = min(max(int(low + (limit - peak(low)) / slope), low + 1), high - 1)
        low, high = (middle, high) if peak(middle) <= limit else (low, middle)
    return low


def _blocks(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """``names`` without those inside another, checked."""
    chosen = (names,) if isinstance(names, str) else tuple(names)
    known = [name for name, _ in model.named_modules() if name]
    for name in chosen:
        if name not in known:
            do = "see ‹list_layers(model, types='all')|list-layers --type all›"
            raise LayerError(f"no layer '{name}' to checkpoint", nearest(name, known), do, kind="layer", name=name)
    return chosen
