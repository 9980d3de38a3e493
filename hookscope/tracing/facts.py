"""The layers and calls of a model as facts, and the rows that list-layers prints of them. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from hookscope.columns import Column, Columns
from hookscope.display import Cells, Rows, Shown
from hookscope.geometry import ReceptiveField
from hookscope.hooks import CALL, OPERATION, Pixels, Shape, matches_type, no_such_type, select_types, usual_types

INPUT = -1
"""Stands for the input of the model among the calls that made what a call read."""


@dataclass(frozen=True, slots=True)
class LayerCall(Shown):
    """One row of ``list-layers``: a call with its shapes and cost, or a layer that did not run.

    Attributes:
        index: Position among the calls of the chosen types in order of execution. None for a call of another type, and
            for a layer that did not run.
        name: Dotted path in ``named_modules()``.
        type: Class name of the layer.
        call: 0 for the first execution of the layer, None for a layer that did not run.
        order: The index that the call has if every layer counts. None for a layer that did not run,
            and for a block of other layers.
        input_shape: Such as ``(N, C, H, W)``; ``{part: shape}`` for several tensors.
        output_shape: Shape of the first output tensor, in the same form.
        params: Number of parameters of the layer and of the layers inside it that have no row of their own.
        macs: Multiply-accumulates of this call, with the MACs of layers inside that have no row: half of torch's FLOPs,
            and the bias of convolutions.
        receptive_field: Height and width, in pixels of the input, that a unit of the output depends on. It may be
            larger than the input; for a unit that sees all, it is the size of the input. None where it is not known.
        stride: Pixels of the input from one unit to the next, down and to the right; None without positions.
        note: ``without the layers inside``, ``call 2 of 3``, ``overwritten by NAME``, ``shared with NAME``, ``did not
            run``.
    """

    index: int | None
    name: str
    type: str
    call: int | None
    order: int | None
    input_shape: Shape
    output_shape: Shape
    params: int
    macs: int
    receptive_field: Pixels | None
    stride: Pixels | None
    note: str

    def _columns(self) -> Columns:
        return LAYER_CALLS


LAYER_CALLS = Columns(
    *CALL.but(
        index={"help": "position among the calls of the chosen type, as layer selections take it"},
        type={"need": 8},
        order={"help": "position among all calls: the index with the type all"},
    ),
    Column("input_shape", need=2),
    Column("output_shape", need=7),
    Column("params", None, "parameters of the layer", 5),
    Column("macs", None, "multiply-accumulates: half of torch's FLOPs, and the bias of convolutions", 6, "unknown"),
    Column("receptive_field", None, "pixels of the input that a unit of the output depends on: height x width", 3),
    Column("stride", None, "distance between two units, in pixels of the input", 1),
    Column(
        "note",
        None,
        "called more than once, shared, did not run, layers inside have rows of their own, or which later layer"
        " overwrites the output in place",
        4,
        "zero",
    ),
)
"""What ``list-layers`` says of a call, a `LayerCall`."""

LAYER_TOTALS = Columns(
    *("model", "input_size", "params", "macs", "type", "type_calls", "type_params", "type_macs", "did_not_run")
)
"""The totals of ``list-layers`` of a model, a `LayerTotals`."""


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer: class names (its own first), whether ``all`` counts it, positions in `Trace.sizes` of the parameters
    that it holds itself, and which layers share these."""

    name: str
    types: tuple[str, ...]
    leaf: bool
    parameters: tuple[int, ...]
    shared_with: str

    @property
    def type(self) -> str:
        return self.types[0] if self.types else "Module"


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call: the position of its layer in `Trace.layers`, how many calls it runs in, shapes, MACs without
    the calls inside it, the layer that overwrote its output, and what its units see of the input, if that was followed.

    ``reads`` are positions of the calls that made the values that it read, -1 for the input of the model; only calls
    without calls in them have some, and only where sources were followed. ``settings`` of an operation are the number
    by which it multiplies or divides, the axis, from the end, of a softmax, or 1 for attention to earlier positions."""

    layer: int
    depth: int
    input_shape: Shape
    output_shape: Shape
    macs: int
    overwritten_by: str | None
    field: ReceptiveField | None = None
    reads: tuple[int, ...] = ()
    settings: tuple[float, ...] = ()

    @property
    def seen(self) -> tuple[Pixels | None, Pixels | None]:
        """Size and stride of the receptive field; None where it is not known, or has no stride."""
        if self.field is None:
            return None, None
        return _pixels(self.field.size), _pixels(self.field.stride) if any(self.field.stride) else None


@dataclass(frozen=True, slots=True, repr=False)
class Trace(Shown):
    """A pass as facts: every module under its first name, and every call in the order in which the layers returned.

    ``sizes`` are the numbers of values of the parameters, each once. ``real`` says that the pass calculated, because a
    pass without values was not possible. ``notes`` are those on the model, such as which factory was taken. ``answer``
    are the positions of the calls that made the output of the model, where sources were followed.
    """

    layers: tuple[TracedLayer, ...]
    calls: tuple[TracedCall, ...]
    sizes: tuple[int, ...]
    real: bool = False
    notes: tuple[str, ...] = ()
    answer: tuple[int, ...] = ()

    def _cells(self) -> Cells:
        return {"layers": len(self.layers), "calls": len(self.calls), "params": self.params, "macs": self.macs}

    @property
    def params(self) -> int:
        return sum(self.sizes)

    @property
    def macs(self) -> int:
        return sum(call.macs for call in self.calls)

    @property
    def operations(self) -> Counter[str]:
        """How often each function ran that is not a module."""
        names = [self.layers[call.layer].name for call in self.calls]
        return Counter(name.rpartition(OPERATION)[2] for name in names if OPERATION in name)

    def without_operations(self) -> Trace:
        """The layers alone, with the MACs of operations in the calls in which these ran."""
        calls: list[TracedCall] = []
        macs: Counter[int] = Counter()  # of operations, by their depth
        for call in self.calls:
            if OPERATION in self.layers[call.layer].name:
                macs[call.depth] += call.macs
            else:
                by = call.overwritten_by
                by = by if by is None else by.partition(OPERATION)[0] or "the model"
                calls.append(replace(call, macs=call.macs + macs.pop(call.depth + 1, 0), overwritten_by=by))
        layers = tuple(layer for layer in self.layers if OPERATION not in layer.name)
        return replace(self, layers=layers, calls=tuple(calls))

    def params_of(self, layers: Iterable[int]) -> int:
        """How many values the parameters of these layers have, shared ones once."""
        held = {parameter for layer in layers for parameter in self.layers[layer].parameters}
        return sum(self.sizes[parameter] for parameter in held)


@dataclass(frozen=True, slots=True, repr=False)
class LayerTotals(Shown):
    """Sums over a model, and over its calls of the chosen types.

    Attributes:
        params: Number of parameters of the model, each once.
        macs: Multiply-accumulates of one forward pass.
        type_calls: Number of calls of the chosen types.
        type_params: Number of parameters of the layers of these types, each once.
        type_macs: Multiply-accumulates of these calls.
        did_not_run: Number of layers of these types that did not run.
    """

    params: int
    macs: int
    type_calls: int
    type_params: int
    type_macs: int
    did_not_run: int

    def _cells(self) -> Cells:
        return asdict(self)


def rows_of_type(traced: Trace, types: Iterable[Any] | None = None, ops: bool = False) -> Rows[LayerCall]:
    """The rows of ``list-layers``: calls of the chosen types in order of execution, then layers that did not run.

    ``types`` are None for the usual ones. With ``all`` there is also a row without an index for each call that computes
    beside the layers in it. With ``ops`` operations are calls too, of the type of their function, and without ``types``
    all calls are listed.

    Raises:
        LayerError: when the model has no layer of these types; it says which it has.
    """
    return Rows(_listed(traced, types, ops)[0])


def totals_of_type(traced: Trace, types: Iterable[Any] | None = None, ops: bool = False) -> LayerTotals:
    """The sums of the rows of ``list-layers``, and of the whole model."""
    rows, layers = _listed(traced, types, ops)
    ran = [row for row in rows if row.call is not None]
    macs = sum(row.macs for row in ran)
    return LayerTotals(traced.params, traced.macs, len(ran), traced.params_of(layers), macs, len(rows) - len(ran))


def _listed(traced: Trace, types: Iterable[Any] | None, ops: bool) -> tuple[list[LayerCall], list[int]]:
    """The rows, and the layers that they count: each with the layers inside it that have no row."""
    traced = traced if ops else traced.without_operations()
    usual = usual_types(layer.types for layer in traced.layers) if types is None else select_types(types)
    names = ("all",) if types is None and ops else usual
    counted, chosen = (
        {place for place, layer in enumerate(traced.layers) if matches_type(layer.types, kinds, layer.leaf)}
        for kinds in (usual, names)
    )
    if not chosen:
        raise no_such_type(names, Counter(layer.type for layer in traced.layers))
    shown = chosen | ({call.layer for call in traced.calls if call.macs} if "all" in names else set())
    inside, parted = _layers_inside(traced, shown)
    params = {place: traced.params_of(places) for place, places in inside.items()}
    total = Counter(call.layer for call in traced.calls)
    so_far: Counter[int] = Counter()
    unlisted: Counter[int] = Counter()  # MACs of calls without a row, by the depth of the calls
    rows: list[LayerCall] = []
    indices, orders = count(), count()
    for call in traced.calls:
        number, times, layer = so_far[call.layer], total[call.layer], traced.layers[call.layer]
        so_far[call.layer] += 1
        macs = call.macs + unlisted.pop(call.depth + 1, 0)
        index = next(indices) if call.layer in counted else None
        order = next(orders) if layer.leaf else None
        if call.layer not in shown or (call.layer not in chosen and not call.macs):
            unlisted[call.depth] += macs
            continue
        notes = ["without the layers inside"] if call.layer in parted else []
        notes += [f"call {number + 1} of {times}"] if times > 1 else []
        notes += [f"overwritten by {call.overwritten_by}"] if call.overwritten_by is not None else []
        numbers = number, order, call.input_shape, call.output_shape, params[call.layer], macs, *call.seen
        rows.append(LayerCall(index, layer.name, layer.type, *numbers, _note(layer, notes)))
    idle = sorted(chosen - set(total))
    for place in idle:
        layer = traced.layers[place]
        note = _note(layer, ["did not run"])
        rows.append(LayerCall(None, layer.name, layer.type, None, None, None, None, params[place], 0, None, None, note))
    return rows, [place for places in inside.values() for place in places]


def _layers_inside(traced: Trace, shown: Collection[int]) -> tuple[dict[int, list[int]], set[int]]:
    """For each shown layer itself and the layers inside it, but for those that an inner shown layer counts.

    And the shown layers that have such a layer inside.
    """
    innermost: dict[str, int | None] = {}  # the shown layer around each layer
    inside: dict[int, list[int]] = {place: [] for place in shown}
    parted: set[int] = set()
    for place, layer in enumerate(traced.layers):  # a layer stands before those inside it
        outer = layer.name.rpartition(OPERATION if OPERATION in layer.name else ".")[0]
        around = innermost.get(outer) if layer.name else None
        if place in shown:
            parted |= set() if around is None else {around}
            around = place
        innermost[layer.name] = around
        if around is not None:
            inside[around].append(place)
    return inside, parted


def _pixels(numbers: tuple[float, float]) -> Pixels:
    """Whole numbers where they are, as in all networks that do not resize inside."""
    height, width = (int(number) if number.is_integer() else round(number, 2) for number in map(float, numbers))
    return height, width


def _note(layer: TracedLayer, notes: list[str]) -> str:
    return "; ".join(notes + ([f"shared with {layer.shared_with}"] if layer.shared_with else []))
