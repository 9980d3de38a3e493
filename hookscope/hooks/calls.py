"""Layers and their calls: names, types, indices, shapes. Needs no torch."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hookscope.columns import Column, Columns
from hookscope.errors import LayerError, SelectionError, near_misses

# fmt: off
ACTIVATION_FUNCTIONS = (
    "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
    "Mish", "PReLU", "ReLU", "ReLU6", "RReLU", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink", "Threshold",
)
# fmt: on
"""Class names of torch's activation functions."""

_ACTIVATION_CLASSES = {name.lower(): name for name in ACTIVATION_FUNCTIONS}


def activation_class(kind: str) -> str:
    """The activation function that a call of this type computes: ``LeakyReLU`` for ``leaky_relu_``; else empty."""
    return _ACTIVATION_CLASSES.get(kind.replace("_", "").lower(), "")


MODEL = "(model)"
"""What the model itself is called where its name, which is empty, would be unreadable."""

OPERATION = "::"
"""Stands between the module in which an operation runs and its function: ``block1::relu``, ``::add`` at the top."""

EVERY_OPERATION = "*::*"

_PASSES_ON = re.compile(
    "Dropout|DropPath|DropBlock|StochasticDepth|^Identity|[Ff]latten|(Max|Avg|LP|Adaptive)Pool|Unpool|Upsampl|Shuffle"
    "|Pad([123]d)?$|^(Unf|F)old$"
)

Pixels = tuple[float, float]
"""Height and width, or down and to the right, in pixels of the network's input."""

Shape = tuple[int, ...] | dict[str, tuple[int, ...]] | None


def enclosing(name: str) -> Iterator[str]:
    """``layer4.0.conv1``, ``layer4.0``, ``layer4``, and the empty name of the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def call_key(name: str, call: int) -> str:
    """``name`` for the first call of a layer, ``name#1`` for the second."""
    return f"{name}#{call}" if call else name


def in_order(mine: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """The keys of both, each in its order of execution: a layer that only ran for ``theirs`` keeps its place."""
    order, at = list(mine), 0
    for key in theirs:
        if key not in order:
            order.insert(at, key)
        at = order.index(key) + 1
    return order


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a layer.

    Attributes:
        name: Dotted path of the layer in ``named_modules()``, empty for the model itself.
        type: Class name of the layer.
        call: 0 for the first execution of the layer in the pass.
        index: Position among the calls of the chosen types, None for a call of another type.
        order: The index that the call has if every layer counts. None for a block of other layers, and
            where the positions were not counted.
    """

    name: str
    type: str
    call: int
    index: int | None
    order: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.key or MODEL

    @property
    def key(self) -> str:
        """``name`` or ``name#call``, the key of its activation."""
        return call_key(self.name, self.call)


def _of_call(name: str, fact: Any) -> Any:
    """An attribute of a call, which is the ``call`` of a fact or the fact itself."""
    return getattr(fact.call if isinstance(fact.call, Call) else fact, name)


CALL = Columns(
    Column("index", partial(_of_call, "index"), hide="unknown"),
    Column("name", lambda fact: _of_call("name", fact) or MODEL),
    Column("type", partial(_of_call, "type")),
    Column("call", partial(_of_call, "call"), hide="zero"),
    Column("order", partial(_of_call, "order")),
)
"""The columns that say of which call a row is; ``name`` selects the layer, and the model itself has one too."""


def key_of(call: Call, part: str) -> str:
    """The key of one tensor that a call returned."""
    key = call.key or MODEL
    return f"{key} {part}" if part else key


def matches_type(type_names: Sequence[str], types: Sequence[str], leaf: bool) -> bool:
    """Whether a layer with these class names is of one of ``types``.

    These are class names, globs, and ``all`` for every ``leaf``: without children, or with own parameters.
    """
    return any(leaf if t == "all" else any(fnmatch.fnmatchcase(n, t) for n in type_names) for t in types)


def passes_values_on(type_name: str) -> bool:
    """Whether layers of this class only pass on, drop, average or rearrange the values of the layer before them."""
    return _PASSES_ON.search(type_name) is not None


def usual_types(layers: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The default types that indices count: Conv2d, or Conv3d in a model of clips, which has no Conv2d."""
    present = {name for names in layers for name in names}
    return ("Conv3d",) if "Conv3d" in present and "Conv2d" not in present else ("Conv2d",)


def select_types(types: Iterable[Any]) -> tuple[str, ...]:
    """``types`` as class names, from names and classes, one or several."""
    if isinstance(types, (str, type)):
        types = (types,)
    names = tuple(t.__name__ if isinstance(t, type) else str(t) for t in types) if isinstance(types, Iterable) else ()
    if not names:
        raise SelectionError("no layer type given", do="name one, such as Conv2d, or `all`")
    return names


def describe_types(counts: Counter[str], most: int = 12) -> str:
    """``Conv2d (36), ReLU (17), ...``, the most frequent first."""
    shown = [f"{name} ({count})" for name, count in counts.most_common(most)]
    return ", ".join(shown) + (", ..." if len(counts) > most else "")


def no_such_type(types: Iterable[str], have: Counter[str]) -> LayerError:
    """The error for a model without a layer of ``types``; ``have`` counts the layers of each class."""
    asked = "/".join(types)
    near = ", ".join(f"perhaps {name}" for kind in types for name in near_misses(kind, have, 1) if name != kind)
    exists, do = f"the model has {describe_types(have)}", near or "choose by ‹types|--type›, or take ‹'all'|all›"
    return LayerError(f"no layer of type {asked}", exists, do, kind="type", name=asked)
