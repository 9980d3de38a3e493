"""One pass without arithmetic: every call in order, shapes, parameters, MACs, what overwrites what, what never ran."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hookscope.errors import InputError, ModelError
from hookscope.hooks import (
    HookHandles,
    LayerCall,
    check_hookable,
    class_names,
    is_leaf,
    other_hooks_set_aside,
    tensors_in,
)
from hookscope.models import example_inputs, meta_forward
from hookscope.tracing.facts import Trace, TracedCall, TracedLayer, rows_of_type
from hookscope.tracing.recorder import Recorder


@contextmanager
def _everything_as_before(model: nn.Module) -> Iterator[None]:
    """Eval mode, random state forked, no hooks of others on the model; afterwards modes, attributes and buffers are put
    back.

    A detector keeps the anchors it computed as an attribute, and those of a pass on the meta device would spoil every
    later one. Containers among the attributes are put back too, but not what lies deeper in them.
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    containers = [(value, copy.copy(value)) for _, kept in attributes for value in kept.values() if _is_plain(value)]
    values = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    with (
        torch.inference_mode(False),  # inside it no tensor tells how often it was written
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        other_hooks_set_aside(model),
    ):
        try:
            model.eval()
            yield
        finally:
            for module, kept in attributes:
                vars(module).clear()
                vars(module).update(kept)
            for container, content in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
            for buffer, value in values:
                if not torch.equal(buffer, value):  # a write that changes nothing still spoils a pending backward
                    buffer.copy_(value)


def _is_plain(value: Any) -> bool:
    return type(value) in (dict, OrderedDict, list, set)


def trace(model: nn.Module, args: tuple[Any, ...], *, dry: bool = True) -> Trace:
    """Run ``model(*args)`` without arithmetic, or with it where the model needs values, and record every call.

    The model is as before afterwards: modes, hooks, buffers, random state. Its hooks do not fire meanwhile; a model
    that needs one of them to take the input is refused.

    Args:
        model: Any eager module.
        args: Its positional inputs, such as one tensor ``(N, C, H, W)``.
        dry: Try the pass without arithmetic first; False goes straight to the real one.

    Raises:
        InputError: when the model refuses the input, or wants values and is on the meta device.
        ModelError: for scripted and compiled models, and lazy ones that never ran.

    Example:
        >>> import torch
        >>> found = trace(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), (torch.zeros(1, 3, 9, 9),))
        >>> [call.output_shape for call in found.calls], found.macs
        ([(1, 8, 7, 7), (1, 8, 7, 7)], 10976)
    """
    check_hookable(model)
    named = list(model.named_modules())
    _check_has_shapes(model)
    recorder, real = _record(model, named, args, dry)
    calls = tuple(
        TracedCall(c.layer, c.input_shape, c.output_shape, c.macs, recorder.overwritten.get(at))
        for at, c in enumerate(recorder.calls)
    )
    layers = tuple(_traced_layers(model, named))
    total = sum(call.macs for call in calls if layers[call.layer].leaf)
    return Trace(layers, calls, sum(p.numel() for p in model.parameters()), total, real)


def _check_has_shapes(model: nn.Module) -> None:
    """Refuse lazy layers: their first pass makes them other layers, and cannot be undone."""
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ModelError(f"'{lazy}' has no shape yet: the model is lazy", do="run it once on a real input first")


def _record(
    model: nn.Module, named: list[tuple[str, nn.Module]], args: tuple[Any, ...], dry: bool
) -> tuple[Recorder, bool]:
    """What a dry pass shows, or a real one where the model wants values."""
    refusal: Exception | None = None
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    for real in [False] * dry + [True] * (not on_meta or not dry):
        with _everything_as_before(model):
            try:
                return _record_pass(model, named, args, dry=not real), real
            except Exception as error:
                refusal = error
    assert refusal is not None
    raise _refusal(model, args, refusal) from refusal


def _refusal(model: nn.Module, args: tuple[Any, ...], error: Exception) -> InputError:
    shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in tensors_in(args).values())
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return InputError(f"{type(model).__name__} refuses an input of {shapes}: {lines[0][:200]}")


def _record_pass(model: nn.Module, named: list[tuple[str, nn.Module]], args: tuple[Any, ...], dry: bool) -> Recorder:
    recorder = Recorder({id(m): at for at, (_, m) in enumerate(named)}, [name for name, _ in named])
    with HookHandles() as door:
        for _, module in named:
            door.forward_pre(module, recorder.before)
            door.forward(module, recorder.after)
        _ = meta_forward(model, args) if dry else model(*args)
    return recorder


def _traced_layers(model: nn.Module, named: list[tuple[str, nn.Module]]) -> Iterator[TracedLayer]:
    """The layers with whom they share themselves (one module, two names) or a parameter (tied weights)."""
    aliases: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(id(module), []).append(name)
    owners: dict[int, list[str]] = {}
    for name, module in named:
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for name, module in named:
        others = aliases[id(module)][1:]
        tied = [owners[id(p)] for p in module._parameters.values() if p is not None]
        others += [other for group in tied for other in group if other != name]
        params = sum(parameter.numel() for parameter in module.parameters())
        yield TracedLayer(name, tuple(class_names(module)), is_leaf(module), params, ", ".join(dict.fromkeys(others)))


def list_layers(
    model: nn.Module,
    input_size: Sequence[int] = (224, 224),
    types: Iterable[Any] = ("Conv2d",),
    inputs: tuple[Any, ...] | None = None,
) -> list[LayerCall]:
    """Every call of the chosen types in one forward pass of ``model``, in order of execution.

    Args:
        model: Any eager module; torchvision's detectors, clips and flow models get the input their family needs.
        input_size: ``(H, W)`` of the picture, or a whole shape such as ``(1, 1, 28, 28)``.
        types: Class names (or classes), ``("all",)`` for every leaf.
        inputs: The positional inputs themselves, instead of ``input_size``.

    Returns:
        Rows with index, name, type, call, shapes, params, MACs and a note; layers that did not run come last.

    Raises:
        LayerError: when the model has no layer of the types.
        InputError: when the model refuses the input.

    Example:
        >>> import torch
        >>> rows = list_layers(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), (9, 9))
        >>> rows[0].name, rows[0].output_shape, rows[0].macs
        ('0', (1, 8, 7, 7), 10976)
    """
    return rows_of_type(trace(model, example_inputs(model, input_size) if inputs is None else inputs), types)
