"""The layers and calls of a model as facts, and the rows that list-layers prints of them. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hookscope.hooks import LayerCall, Shape, matches_type, no_such_type, select_types


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer: class names (its own first), whether it is a leaf, parameters, and which layers share these."""

    name: str
    types: tuple[str, ...]
    leaf: bool
    params: int
    shared_with: str

    @property
    def type(self) -> str:
        return self.types[0] if self.types else "Module"


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call: the position of its layer in `Trace.layers`, shapes, MACs, and the layer that overwrote its output."""

    layer: int
    input_shape: Shape
    output_shape: Shape
    macs: int
    overwritten_by: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    """A pass as facts: every module under its first name, and every call in the order in which the layers returned.

    ``params`` counts shared parameters once, ``macs`` are those of all leaves, as torchinfo totals them; ``real`` says
    that the pass calculated, because a pass without values was not possible.
    """

    layers: tuple[TracedLayer, ...]
    calls: tuple[TracedCall, ...]
    params: int
    macs: int
    real: bool = False


def rows_of_type(traced: Trace, types: Iterable[Any] = ("Conv2d",)) -> list[LayerCall]:
    """The rows of ``list-layers``: calls of the chosen types in order of execution, then layers that did not run.

    Raises:
        LayerError: when the model has no layer of these types; it says which it has.
    """
    names = select_types(types)
    chosen = {place for place, layer in enumerate(traced.layers) if matches_type(layer.types, names, layer.leaf)}
    if not chosen:
        raise no_such_type(names, Counter(layer.type for layer in traced.layers))
    total = Counter(call.layer for call in traced.calls)
    so_far: Counter[int] = Counter()
    rows: list[LayerCall] = []
    for call in traced.calls:
        number, times, layer = so_far[call.layer], total[call.layer], traced.layers[call.layer]
        so_far[call.layer] += 1
        if call.layer not in chosen:
            continue
        notes = [f"call {number + 1} of {times}"] if times > 1 else []
        notes += [f"overwritten by {call.overwritten_by}"] if call.overwritten_by is not None else []
        shapes = call.input_shape, call.output_shape
        rows.append(
            LayerCall(len(rows), layer.name, layer.type, number, *shapes, layer.params, call.macs, _note(layer, notes))
        )
    idle = [traced.layers[place] for place in sorted(chosen - set(total))]
    return rows + [
        LayerCall(None, layer.name, layer.type, None, None, None, layer.params, 0, _note(layer, ["did not run"]))
        for layer in idle
    ]


def _note(layer: TracedLayer, notes: list[str]) -> str:
    return "; ".join(notes + ([f"shared with {layer.shared_with}"] if layer.shared_with else []))
