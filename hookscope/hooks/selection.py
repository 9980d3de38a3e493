"""Layers and their calls: names, types, indices, and the grammar that selects them. Needs no torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hookscope.errors import LayerError, SelectionError, nearest

# fmt: off
ACTIVATION_FUNCTIONS = (
    "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
    "Mish", "PReLU", "ReLU", "ReLU6", "RReLU", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh",
    "Tanhshrink", "Threshold",
)
# fmt: on
"""Class names of torch's activation functions."""

Shape = tuple[int, ...] | dict[str, tuple[int, ...]] | None
Layers = str | int | Iterable[str | int]


def call_key(name: str, call: int) -> str:
    """``name`` for the first call of a layer, ``name#1`` for the second.

    Example:
        >>> call_key("head.conv", 1)
        'head.conv#1'
    """
    return f"{name}#{call}" if call else name


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a layer: ``index`` is its place among the calls of the chosen types, None outside them."""

    name: str
    type: str
    call: int
    index: int | None

    @property
    def key(self) -> str:
        """``name`` or ``name#call``, as activations are keyed."""
        return call_key(self.name, self.call)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One row of ``list-layers``: a call with shapes, cost and what is to be known of it.

    Attributes:
        index: Position among the calls of the chosen types in order of execution, None when it did not run.
        name: Dotted path in ``named_modules()``.
        type: Class name of the layer.
        call: 0 for the first execution of the layer, None when it did not run.
        input_shape: ``(N, C, H, W)`` or as it is; ``{part: shape}`` for several tensors.
        output_shape: Likewise.
        params: Number of parameters of the layer, those of its children included.
        macs: Multiply-accumulates of this call by torchinfo's rule, children included.
        note: ``overwritten by NAME``, ``call 2 of 3``, ``shared with NAME``, ``did not run``.
    """

    index: int | None
    name: str
    type: str
    call: int | None
    input_shape: Shape
    output_shape: Shape
    params: int
    macs: int
    note: str


def matches_type(type_names: Sequence[str], types: Sequence[str], leaf: bool) -> bool:
    """Whether a layer with the class names ``type_names`` (its own first, then its bases') is of one of ``types``.

    Args:
        type_names: Class names along the method resolution order.
        types: Class names, globs of them, or ``all`` for every leaf.
        leaf: Whether the layer has no children.

    Example:
        >>> matches_type(["Conv2d", "_ConvNd"], ["Conv*"], leaf=True)
        True
    """
    return any(leaf if t == "all" else any(fnmatch.fnmatchcase(n, t) for n in type_names) for t in types)


def usual_types(layers: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The types that count where none were asked for: Conv2d, and Conv3d in a model of clips, which has no other.

    Args:
        layers: The class names of each layer of the model, its own first.

    Example:
        >>> usual_types([["Conv3DSimple", "Conv3d", "_ConvNd"], ["ReLU"]])
        ('Conv3d',)
    """
    found = {name for names in layers for name in names}
    return ("Conv3d",) if "Conv3d" in found and "Conv2d" not in found else ("Conv2d",)


def select_types(types: Iterable[Any]) -> tuple[str, ...]:
    """``types`` as class names; classes themselves are taken too, one name may stand alone."""
    if isinstance(types, (str, type)):
        types = (types,)
    names = tuple(t.__name__ if isinstance(t, type) else str(t) for t in types)
    if not names:
        raise SelectionError("no layer type given", do="name one, such as Conv2d, or `all`")
    return names


@dataclass(frozen=True, slots=True)
class _Indices:
    """``30``, ``-1``, ``0:10``, ``0:36:5`` or ``all``: calls by their index."""

    text: str
    window: slice

    def certain(self, index: int) -> bool:
        """Whether the call is wanted however many more will come."""
        w = self.window
        if (w.start or 0) < 0 or (w.stop is not None and w.stop < 0) or (w.step or 1) < 0:
            return False
        return (
            index >= (w.start or 0)
            and (w.stop is None or index < w.stop)
            and not (index - (w.start or 0)) % (w.step or 1)
        )

    @property
    def from_the_end(self) -> bool:
        """Whether the number of calls must be known first."""
        w = self.window
        return (w.start or 0) < 0 or (w.stop is not None and w.stop < 0) or (w.step or 1) < 0

    @property
    def reach(self) -> int | None:
        """How many of the latest calls may still be wanted; None for any."""
        w = self.window
        if (w.start or 0) < 0 and (w.stop is None or w.stop < 0) and (w.step or 1) > 0:
            return -int(w.start)
        return None

    def within(self, total: int) -> range:
        return range(*self.window.indices(total))


@dataclass(frozen=True, slots=True)
class _Names:
    """``conv1``, ``layer4.*``, ``re:…``, each with or without ``#call``: calls by the name of their layer."""

    text: str
    pattern: re.Pattern[str] | str
    call: int | None

    def names(self, name: str) -> bool:
        # a name is itself before it is a pattern: a layer may be called `[z]`
        if isinstance(self.pattern, str):
            return name == self.pattern
        return name == self.text or self.pattern.search(name) is not None

    def names_any(self, names: Iterable[str]) -> bool:
        return any(self.names(name) for name in names)

    def wants(self, name: str, call: int) -> bool:
        return (self.call is None or self.call == call) and self.names(name)


def _parse_term(text: str) -> _Indices | _Names:
    if text == "all":
        return _Indices(text, slice(0, None))
    if re.fullmatch(r"[+-]?\d+", text):
        at = int(text)
        return _Indices(text, slice(at, at + 1 if at != -1 else None))
    if ":" in text and re.fullmatch(r"[+\-\d:\s]*", text):
        return _Indices(text, _parse_slice(text))
    if text.startswith("re:"):
        try:
            return _Names(text, re.compile(text[3:]), None)
        except re.error as error:
            raise SelectionError(f"bad regular expression '{text[3:]}': {error}") from None
    name, hash_sign, call = text.partition("#")
    if hash_sign and not call.isdecimal():
        raise SelectionError(f"bad call in '{text}'", do="write `name#1` for the second call of a layer")
    pattern = re.compile(rf"\A(?:{fnmatch.translate(name)})") if re.search(r"[*?\[]", name) else name
    return _Names(text, pattern, int(call) if hash_sign else None)


def _parse_slice(text: str) -> slice:
    try:
        parts = [int(part) if part.strip() else None for part in text.split(":")]
        if len(parts) > 3 or (len(parts) == 3 and parts[2] == 0):
            raise ValueError
    except ValueError:
        raise SelectionError(f"bad range '{text}'", do="write start:stop or start:stop:step, such as 0:36:5") from None
    return slice(*parts)


def _split(layers: Layers) -> list[str]:
    if isinstance(layers, (str, int)):
        layers = [layers]
    terms: list[str] = []
    for text in map(str, layers):
        # a regular expression may hold commas, so it takes the rest of its text
        regex = re.search(r"(?:^|,)\s*(re:.*)", text, re.DOTALL)
        head = text[: regex.start()] if regex else text
        terms += [term.strip() for term in head.split(",") if term.strip()]
        terms += [regex[1]] if regex else []
    if not terms:
        raise SelectionError("empty layer selection", do="give an index, a range, a name or `all`")
    return terms


class Selection:
    """Which calls are wanted, as ``--layer`` and ``layers=`` spell it.

    ``30``, ``-1``, ``0:10``, ``0:36:5`` and ``all`` count the calls of the chosen types in order of execution;
    ``conv1``, ``layer4.*`` (glob), ``re:…`` (regular expression, found anywhere in the name) and ``name#1`` (second
    call) name layers of any type. Terms are separated by commas; ``re:`` takes the rest of its text.

    Raises:
        SelectionError: for a term that cannot be read.

    Example:
        >>> selection = Selection("0:3,fc")
        >>> selection.wants("conv1", 0, index=2), selection.wants("bn1", 0, index=None)
        (True, False)
    """

    def __init__(self, layers: Layers) -> None:
        terms = [_parse_term(text) for text in _split(layers)]
        self._indices = [term for term in terms if isinstance(term, _Indices)]
        self._names = [term for term in terms if isinstance(term, _Names)]
        self._from_the_end = [term for term in self._indices if term.from_the_end]
        self._every_index = any(term.window in (slice(None), slice(0, None)) for term in self._indices)

    @property
    def counts(self) -> bool:
        """Whether calls of the chosen types must be counted."""
        return bool(self._indices)

    @property
    def wants_every_index(self) -> bool:
        """Whether the calls of the chosen types are wanted one and all."""
        return self._every_index

    @property
    def from_the_end(self) -> bool:
        """Whether some wanted calls are known only when the pass is over."""
        return bool(self._from_the_end)

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The names that are no patterns and mean every call."""
        return tuple(term.text for term in self._names if isinstance(term.pattern, str) and term.call is None)

    @property
    def end_is_known(self) -> bool:
        """Whether the last wanted call is told by the selection: no index from the end, no name without a call."""
        closed = all(not t.from_the_end and t.window.stop is not None for t in self._indices)
        return closed and all(t.call is not None and isinstance(t.pattern, str) for t in self._names)

    def check_names(self, names: Sequence[str], what: str = "the model") -> None:
        """Raise a LayerError, with the nearest names, for a name or pattern that none of ``names`` fits."""
        for term in self._names:
            if not any(term.names(name) for name in names):
                text = term.text.partition("#")[0] if isinstance(term.pattern, str) else term.text
                some = nearest(text, names) or _sample(names)
                raise LayerError(f"no layer '{text}' in {what}", some, "list them with list-layers --type all")

    def calls_by_name(self, names: Sequence[str]) -> frozenset[int | None]:
        """Which calls of a layer, known under all of ``names``, are wanted by name; None among them for every call."""
        return frozenset([term.call for term in self._names if term.names_any(names)]) if self._names else frozenset()

    def wants_index(self, index: int) -> bool:
        """Whether the call with this index is wanted, as far as it can be known while the pass runs."""
        return self._every_index or any(term.certain(index) for term in self._indices)

    def wants(self, name: str, call: int, index: int | None) -> bool:
        """Whether this call is wanted, as far as it can be known while the pass runs."""
        if any(term.wants(name, call) for term in self._names):
            return True
        return index is not None and self.wants_index(index)

    def may_want(self, index: int | None, calls_so_far: int) -> bool:
        """Whether this call may turn out to be wanted once the number of calls is known."""
        if index is None:
            return False
        return any(term.reach is None or index >= calls_so_far - term.reach for term in self._from_the_end)

    def wants_of(self, name: str, call: int, index: int | None, total: int) -> bool:
        """Whether this call is wanted, with ``total`` calls of the chosen types in the whole pass."""
        if any(term.wants(name, call) for term in self._names):
            return True
        return index is not None and any(index in term.within(total) for term in self._indices)

    def required(self, layers: Iterable[Sequence[str]]) -> set[int | tuple[str, int]] | None:
        """What must have run before a pass may stop: indices and ``(name, call)``; None when only its end will do.

        A name without ``#call`` asks for its first call: no pass can know of a second.

        Args:
            layers: The names of each layer; what must have run is told by the first of them.
        """
        wanted: set[int | tuple[str, int]] = set()
        for term in self._indices:
            last = [] if term.from_the_end or term.window.stop is None else term.within(term.window.stop)[-1:]
            if not last:  # an open range, or an empty one, which no call will meet
                return None
            wanted |= set(last)
        for names in layers:
            wanted |= {(names[0], call or 0) for call in self.calls_by_name(names)}
        return wanted

    def check_ran(
        self, ran: Iterable[tuple[Sequence[str], int]], total: int, types: Sequence[str], named: Iterable[str] = ()
    ) -> None:
        """Raise a LayerError when an index, a range or a ``name#call`` met nothing in a whole pass.

        Args:
            ran: The names of each layer and how often it ran.
            total: How many calls of the chosen types there were.
            types: What those types are called.
            named: The names of all layers, read only for an error: an index may be meant as a name.
        """
        of_type = "/".join(types)
        for term in self._indices:
            if not term.within(total):
                what = "range" if ":" in term.text else "index"
                have = f"there are {total} {of_type} calls: 0 to {total - 1}" if total else f"no {of_type} ran"
                meant = f"the layer named {term.text} is re:^{term.text}$" if term.text in named else ""
                raise LayerError(f"no {what} {term.text}", have, meant or "indices are those of list-layers")
        counts = list(ran)
        for by_name in self._names:
            if by_name.call is None:
                continue
            calls = max((times for names, times in counts if by_name.names_any(names)), default=0)
            if by_name.call >= calls:
                ran_times = f"{calls} times: #0 to #{calls - 1}" if calls > 1 else "once"
                have = f"the layer ran {ran_times}" if calls else "the layer did not run"
                raise LayerError(f"no call '{by_name.text}'", have)


def _sample(names: Sequence[str], count: int = 3) -> str:
    named = [name for name in names if name]
    return f"it has {len(named)} layers: {', '.join(named[:count])}, ..." if named else "it has no layers"
