"""What one pass tells of a model, as facts without torch: its layers, their calls, and the rows of ``list-layers``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hookscope.hooks import LayerCall, Shape, matches_type, select_types


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer of the model and its calls; everything a row of ``list-layers`` is made from."""

    name: str
    types: tuple[str, ...]
    leaf: bool
    params: int
    shared_with: str


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


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call in a trace: the position of its layer in ``Trace.layers``, shapes, MACs, who overwrote its output."""

    layer: int
    input_shape: Shape
    output_shape: Shape
    macs: int
    overwritten_by: str | None


def rows_of_type(found: Trace, types: Iterable[Any] = ("Conv2d",)) -> list[LayerCall]:
    """The rows of ``list-layers``: calls of the chosen types in order of execution, then layers that did not run.

    Raises:
        LayerError: when the model has no layer of these types; it says which it has.
    """
    names = select_types(types)
    chosen = {at for at, layer in enumerate(found.layers) if matches_type(layer.types, names, layer.leaf)}
    if not chosen:
        from hookscope.hooks import no_such_type  # imports torch, which a cached list of layers avoids

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
