"""One pass without arithmetic: every call in order, shapes, parameters, MACs, what overwrites what, what never ran."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookscope.dry import dry_forward
from hookscope.errors import InputError
from hookscope.hooks import Door, check_hookable, other_hooks_set_aside
from hookscope.layers import LayerCall, matches_type, select_types
from hookscope.observe import class_names, is_leaf, no_such_type
from hookscope.tensors import Shape, shape_of, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Trace", "TracedLayer", "list_layers", "rows_of_type", "trace"]


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer of the model and its calls; everything a row of ``list-layers`` is made from."""

    name: str
    types: tuple[str, ...]
    leaf: bool
    params: int
    shared_with: str


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call in a trace: the position of its layer in ``Trace.layers``, shapes, MACs, who overwrote its output."""

    layer: int
    input_shape: Shape
    output_shape: Shape
    macs: int
    overwritten_by: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A pass as facts: the layers in order of registration, the calls in order of execution, totals of the model.

    Attributes:
        layers: Every module under its first name.
        calls: Every call, in the order in which the layers returned.
        params: Parameters of the whole model, shared ones once.
        macs: Multiply-accumulates of all leaves, as torchinfo totals them.
        real: Whether the pass calculated, because a pass without values could not be had.
    """

    layers: tuple[TracedLayer, ...]
    calls: tuple[TracedCall, ...]
    params: int
    macs: int
    real: bool = False


@dataclass(slots=True)
class _OpenCall:
    """A call that has begun: what came in, and the MACs of the children that ran in it."""

    input_shape: Shape
    macs: int = 0


@dataclass(slots=True)
class _Written:
    """An output watched for writes: its alias (same version counter) and the version when it was returned."""

    call: int
    alias: Tensor
    version: int


@dataclass(slots=True)
class _Recorder:
    positions: dict[int, int]
    names: list[str]
    calls: list[TracedCall] = field(default_factory=list)
    overwritten: dict[int, str] = field(default_factory=dict)
    _open: list[_OpenCall] = field(default_factory=list)
    _running: list[str] = field(default_factory=list)
    _watched: list[_Written] = field(default_factory=list)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._look_for_writes()
        self._running.append(self.names[self.positions[id(module)]])
        self._open.append(_OpenCall(shape_of((*args, *kwargs.values())) if len(args) != 1 else shape_of(args[0])))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._look_for_writes()
        self._running.pop()
        opened = self._open.pop()
        shape = shape_of(output)
        macs = count_macs(module, shape) if is_leaf(module) else opened.macs
        if self._open:
            self._open[-1].macs += macs
        for tensor in tensors_in(output).values():
            alias = tensor.detach()
            self._watched.append(_Written(len(self.calls), alias, alias._version))
        self.calls.append(TracedCall(self.positions[id(module)], opened.input_shape, shape, macs, None))

    def _look_for_writes(self) -> None:
        """Blame the layer that is running now for every output written to since the last look."""
        changed = [written for written in self._watched if written.alias._version != written.version]
        if not changed:
            return
        for written in changed:
            self.overwritten[written.call] = self._running[-1] if self._running else "the model"
        gone = {id(written) for written in changed}
        self._watched = [written for written in self._watched if id(written) not in gone]


def count_macs(module: nn.Module, output_shape: Shape) -> int:
    """Multiply-accumulates of one call of a leaf, by torchinfo's rule and equal to its integers.

    A convolution costs its parameters times the batch and the positions of its output, any other layer its
    ``weight`` and ``bias`` times the batch, a recurrent one its weights times batch and steps.

    Args:
        module: A layer without children.
        output_shape: ``(N, C, H, W)`` or what the layer returned; the first part of several counts.

    Example:
        >>> import torch
        >>> count_macs(torch.nn.Conv2d(3, 64, 7, bias=False), (1, 64, 112, 112))
        118013952
    """
    shape = next(iter(output_shape.values()), ()) if isinstance(output_shape, dict) else output_shape or ()
    macs = 0
    for name, parameter in module.named_parameters():
        name, count = _unpruned(module, name, parameter)
        if name in ("weight", "bias"):
            spread = math.prod(shape[:1] + shape[2:]) if "Conv" in type(module).__name__ else shape[0] if shape else 0
            macs += count * int(spread)
        elif "weight" in name or "bias" in name:
            macs += count * math.prod(shape[:2])
    return macs


def _unpruned(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[str, int]:
    """A pruned parameter under the name it had, with the elements its mask leaves."""
    mask = getattr(module, f"{name[:-5]}_mask", None) if name.endswith("_orig") else None
    return (name, parameter.numel()) if mask is None else (name[:-5], int(mask.sum()))


@contextmanager
def _everything_as_before(model: nn.Module) -> Iterator[None]:
    """Eval mode, nobody else's hooks, random state forked; afterwards all that the pass changed is put back.

    That is more than modes and buffers: a detector keeps the anchors it computed as an attribute, and those of a pass
    on the meta device would spoil every later one.
    """
    import torch

    attributes = [(module, dict(vars(module))) for module in model.modules()]
    tables = [(table, dict(table)) for _, kept in attributes for table in (kept["_parameters"], kept["_buffers"])]
    values = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), other_hooks_set_aside(model):
        try:
            model.eval()
            yield
        finally:
            for module, kept in attributes:
                vars(module).clear()
                vars(module).update(kept)
            for table, entries in tables:
                table.clear()
                table.update(entries)
            for buffer, value in values:
                buffer.copy_(value)


def trace(model: nn.Module, args: tuple[Any, ...], *, dry: bool = True) -> Trace:
    """Run ``model(*args)`` without arithmetic, or with it where the model needs values, and record every call.

    The model is as before afterwards: modes, hooks, buffers, random state.

    Args:
        model: Any eager module.
        args: Its positional inputs, such as one tensor ``(N, C, H, W)``.
        dry: Try the pass without arithmetic first; False goes straight to the real one.

    Raises:
        InputError: when the model refuses the input, or wants values and is on the meta device.
        ModelError: for scripted and compiled models.

    Example:
        >>> import torch
        >>> found = trace(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), (torch.zeros(1, 3, 9, 9),))
        >>> [call.output_shape for call in found.calls], found.macs
        ([(1, 8, 7, 7), (1, 8, 7, 7)], 10976)
    """
    check_hookable(model)
    named = list(model.named_modules())
    recorder, real = _record(model, named, args, dry)
    calls = tuple(
        TracedCall(c.layer, c.input_shape, c.output_shape, c.macs, recorder.overwritten.get(at))
        for at, c in enumerate(recorder.calls)
    )
    layers = tuple(_traced_layers(model, named))
    total = sum(call.macs for call in calls if layers[call.layer].leaf)
    return Trace(layers, calls, sum(p.numel() for p in model.parameters()), total, real)


def _record(
    model: nn.Module, named: list[tuple[str, nn.Module]], args: tuple[Any, ...], dry: bool
) -> tuple[_Recorder, bool]:
    for real in [False, True] if dry else [True]:
        with _everything_as_before(model):
            try:
                return _record_pass(model, named, args, dry=not real), real
            except Exception as error:  # the model wants values: whatever it raised, a real pass decides
                on_meta = any(parameter.is_meta for parameter in model.parameters())
                if real or on_meta:
                    raise _refusal(model, args, error) from error
    raise AssertionError("unreachable")


def _refusal(model: nn.Module, args: tuple[Any, ...], error: Exception) -> InputError:
    shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in tensors_in(args).values())
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return InputError(f"{type(model).__name__} refuses an input of {shapes}: {lines[0][:200]}")


def _record_pass(model: nn.Module, named: list[tuple[str, nn.Module]], args: tuple[Any, ...], dry: bool) -> _Recorder:
    recorder = _Recorder({id(m): at for at, (_, m) in enumerate(named)}, [name for name, _ in named])
    with Door() as door:
        for _, module in named:
            door.forward_pre(module, recorder.before)
            door.forward(module, recorder.after)
        _ = dry_forward(model, args) if dry else model(*args)
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


def rows_of_type(found: Trace, types: Iterable[Any] = ("Conv2d",)) -> list[LayerCall]:
    """The rows of ``list-layers``: calls of the chosen types in order of execution, then layers that did not run.

    Raises:
        LayerError: when the model has no layer of these types; it says which it has.
    """
    names = select_types(types)
    chosen = {at for at, layer in enumerate(found.layers) if matches_type(layer.types, names, layer.leaf)}
    if not chosen:
        raise no_such_type(names, Counter(layer.types[0] if layer.types else "Module" for layer in found.layers))
    times = Counter(call.layer for call in found.calls)
    seen: Counter[int] = Counter()
    rows: list[LayerCall] = []
    for call in found.calls:
        number, seen[call.layer] = seen[call.layer], seen[call.layer] + 1
        if call.layer in chosen:
            rows.append(_row(found, call, len(rows), number, times[call.layer]))
    return rows + [_row_of_idle(found.layers[at]) for at in sorted(chosen - set(times))]


def _row(found: Trace, call: TracedCall, index: int, number: int, times: int) -> LayerCall:
    layer = found.layers[call.layer]
    notes = [f"call {number + 1} of {times}"] if times > 1 else []
    notes += [f"overwritten by {call.overwritten_by}"] if call.overwritten_by is not None else []
    notes += [f"shared with {layer.shared_with}"] if layer.shared_with else []
    return LayerCall(
        index, layer.name, _type(layer), number, call.input_shape, call.output_shape, layer.params, call.macs,
        "; ".join(notes),
    )  # fmt: skip


def _row_of_idle(layer: TracedLayer) -> LayerCall:
    notes = ["did not run"] + ([f"shared with {layer.shared_with}"] if layer.shared_with else [])
    return LayerCall(None, layer.name, _type(layer), None, None, None, layer.params, 0, "; ".join(notes))


def _type(layer: TracedLayer) -> str:
    return layer.types[0] if layer.types else "Module"


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
    from hookscope.inputs import example_inputs

    return rows_of_type(trace(model, example_inputs(model, input_size) if inputs is None else inputs), types)
