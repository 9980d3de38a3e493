"""The grammar that selects calls of layers. Needs no torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookscope.errors import LayerError, SelectionError, kind_of, nearest
from hookscope.hooks.calls import EVERY_OPERATION, MODEL, OPERATION, Call

_MANY = 1 << 40  # calls: a range that is empty of so many is empty


@dataclass(frozen=True, slots=True)
class _Indices:
    """``30``, ``-1``, ``0:10`` or ``0:36:5``: calls by their index."""

    text: str
    window: slice

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
class _All:
    """``all``: every call of the given types, and without types every call of every layer."""

    text: str = "all"


@dataclass(frozen=True, slots=True)
class _Names:
    """Calls by the name of their layer: exact names or a pattern, of every call (None) or of one."""

    text: str
    exact: frozenset[str]
    pattern: re.Pattern[str] | None = None
    call: int | None = None

    def names(self, name: str) -> bool:
        return name in self.exact or (self.pattern is not None and self.pattern.search(name) is not None)

    def names_any(self, names: Iterable[str]) -> bool:
        if self.pattern is None:
            return not self.exact.isdisjoint(names)
        return any(self.names(name) for name in names)

    def wants(self, name: str, call: int) -> bool:
        return (self.call is None or self.call == call) and self.names(name)

    def missing(self, names: Sequence[str]) -> list[str]:
        """The names, or the pattern, that fit none of ``names``."""
        if self.pattern is None:
            return sorted(self.exact.difference(names))
        return [] if self.names_any(names) else [self.text]


_Term = _All | _Indices | _Names


def _parse_term(text: str) -> _Term:
    if text == "all":
        return _All()
    if text.startswith("name:"):
        name, call = re.fullmatch(r"name:(.*?)(?:#(\d+))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
        return _Names(text, frozenset([name]), call=None if call is None else int(call))
    if re.fullmatch(r"[+-]?\d+", text):
        index = int(text)
        return _Indices(text, slice(index, index + 1 if index != -1 else None))
    if ":" in text and re.fullmatch(r"[+\-\d:\s]*", text):
        return _Indices(text, _parse_slice(text))
    if text.startswith("re:"):
        try:
            return _Names(text, frozenset(), re.compile(text[3:]))
        except re.error as error:
            do = "correct it, or give a pattern such as layer4.*"
            raise SelectionError(f"bad regular expression '{text[3:]}': {error}", do=do) from None
    name, hash_sign, call = text.partition("#")
    name = "" if name == MODEL else name
    if hash_sign and not call.isdecimal():
        raise SelectionError(f"bad call in '{text}'", do="write `name#1` for the second call of a layer")
    glob = name.replace("…", "*")  # as a table shortens a name
    pattern = re.compile(rf"\A(?:{fnmatch.translate(glob)})") if re.search(r"[*?\[]", glob) else None
    # the text of a pattern is a name too: a layer may be called `[z]`
    return _Names(text, frozenset([name]), pattern, int(call) if hash_sign else None)


def layer_text(name: str) -> str:
    """What a selection takes for the layer of this name: ``name:0`` where the name alone means something else."""
    try:
        is_plain = Selection(name).plain_names == (name,)
    except SelectionError:
        is_plain = not name
    if is_plain:
        return name or MODEL
    return f"re:^{re.escape(name)}$" if re.search(r"#\d+$", name) else f"name:{name}"


def _parse_slice(text: str) -> slice:
    try:
        parts = [int(part) if part.strip() else None for part in text.split(":")]
        if len(parts) > 3 or (len(parts) == 3 and parts[2] == 0):
            raise ValueError
    except ValueError:
        raise SelectionError(f"bad range '{text}'", do="write start:stop or start:stop:step, such as 0:36:5") from None
    return slice(*parts)


def _parse(layers: Any) -> Iterator[_Term]:
    if isinstance(layers, _Term):
        yield layers
    elif isinstance(layers, Selection):
        yield from layers._terms
    elif hasattr(layers, "call"):  # a call, or a row of one
        yield from Selection.of_calls([layers if isinstance(layers.call, int) else layers.call])._terms
    elif isinstance(layers, (str, int)):
        # a regular expression and a name may hold commas, so they take the rest of their text
        text = str(layers)
        rest = re.search(r"(?:^|,)\s*((?:re|name):.*)", text, re.DOTALL)
        head = text[: rest.start()] if rest else text
        yield from (_parse_term(term.strip()) for term in head.split(",") if term.strip())
        if rest:
            yield _parse_term(rest[1])
    elif isinstance(layers, (bytes, Mapping, type)) or not isinstance(layers, Iterable):
        do = "give a name, an index or a list of them, such as 'layer4.*'"
        raise SelectionError(f"a selection of layers cannot be {kind_of(layers)}", do=do)
    else:
        for part in layers:
            yield from _parse(str(part) if hasattr(part, "__index__") else part)


class Selection:
    """Which calls are wanted, as the command line and ``layers=`` spell it.

    ``30``, ``-1``, ``0:10`` and ``0:36:5`` count the calls of the chosen types in order of execution; ``conv1``,
    ``layer4.*`` (glob), ``re:…`` (regular expression, found anywhere in the name), ``name:0`` (exactly this name) and
    ``conv1#1`` (second call) name layers of any type, and ``(model)`` the model itself. ``all`` is every call of the
    chosen types, and where none are chosen every call of every layer that has no children or has parameters of its own.
    Commas separate terms; ``re:`` and ``name:`` take the rest of their text. Selections that are equal have equal terms
    in the same order.

    Raises:
        SelectionError: for a term that cannot be read.

    Example:
        >>> Selection("0:3,fc").wants("conv1", 0, index=2), Selection(["0:3", "fc"])
        (True, Selection('0:3,fc'))
    """

    __slots__ = ("_from_the_end", "_indices", "_names", "_terms", "has_all", "wants_every_index")

    def __init__(self, layers: Layers) -> None:
        self._terms = tuple(_parse(layers))
        if not self._terms:
            raise SelectionError("empty layer selection", do="give an index, a range, a name or `all`")
        self._indices = [term for term in self._terms if isinstance(term, _Indices)]
        self._names = [term for term in self._terms if isinstance(term, _Names)]
        self._from_the_end = [term for term in self._indices if term.from_the_end]
        self.has_all = any(isinstance(term, _All) for term in self._terms)
        self.wants_every_index = any(term.window in (slice(None), slice(0, None)) for term in self._indices)

    @classmethod
    def of(cls, layers: Layers) -> Selection:
        """``layers`` itself where it is a selection, else the selection that it spells."""
        return layers if isinstance(layers, Selection) else cls(layers)

    @classmethod
    def of_names(cls, names: Iterable[str], call: int | None = None) -> Selection:
        """The layers with exactly these names, even if these look like indices or patterns; ``""`` is the model."""
        names = list(names)
        suffix = "" if call is None else f"#{call}"
        return cls([_Names(",".join(names) + suffix, frozenset(names), call=call)] if names else [])

    @classmethod
    def of_calls(cls, calls: Iterable[Call]) -> Selection:
        """Exactly these calls."""
        by_number: dict[int, list[str]] = {}
        for call in calls:
            by_number.setdefault(call.call, []).append(call.name)
        return cls([cls.of_names(names, number) for number, names in by_number.items()])

    def __str__(self) -> str:
        return ",".join(term.text for term in self._terms)

    def __repr__(self) -> str:
        return f"Selection({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return self._terms == other._terms if isinstance(other, Selection) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def terms(self) -> tuple[Selection, ...]:
        """The terms, each as a selection of its own."""
        return tuple(map(Selection, self._terms))  # type: ignore[arg-type]

    @property
    def counts(self) -> bool:
        """Whether a term is an index or a range, which count the calls of the chosen types."""
        return bool(self._indices)

    def reads_as_index(self, name: str) -> bool:
        """Whether the name of a layer is a term that means an index."""
        return any(term.text == name for term in self._indices)

    @property
    def from_the_end(self) -> bool:
        """Whether some wanted calls are known only when the pass is over."""
        return bool(self._from_the_end)

    @property
    def has_call_numbers(self) -> bool:
        """Whether a term asks for one call of a layer, as ``name#1`` does."""
        return any(term.call is not None for term in self._names)

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The names that are not patterns and mean every call."""
        plain = [term for term in self._names if term.pattern is None and term.call is None]
        return tuple(name for term in plain for name in sorted(term.exact))

    @property
    def single_indices(self) -> tuple[str, ...]:
        """The indices, without ranges, as they were written: a layer may have such a name too."""
        return tuple(term.text for term in self._indices if ":" not in term.text)

    @property
    def end_is_known(self) -> bool:
        """Whether the selection itself says which call is the last: no index from the end, no name without a call."""
        closed = all(not t.from_the_end and t.window.stop is not None for t in self._indices)
        return closed and not self.has_all and all(t.call is not None and t.pattern is None for t in self._names)

    def check_named_ran(self, did_not_run: Collection[str], any_ran: bool = True) -> None:
        """Raise a LayerError if a layer that is chosen by its name did not run, or if no layer ran."""
        idle = [name for name in did_not_run if name in self.plain_names]
        if idle or not any_ran:
            asked = f"{', '.join(name or MODEL for name in idle[:3]) or 'no chosen layer'} did not run"
            do = "choose a layer that runs: ‹list_layers|list-layers›"
            raise LayerError(asked, do=do, name=idle[0] if idle else "")

    def is_explicit(self, call: Call) -> bool:
        """Whether the exact name or the index of ``call`` is a term, rather than a pattern, a range or ``all``."""
        return any(term.pattern is None and term.wants(call.name, call.call) for term in self._names) or any(
            term.text.lstrip("+") == str(call.index) for term in self._indices
        )

    def check_names(self, names: Sequence[str], what: str = "the model", ops: bool = False) -> None:
        """Raise a LayerError, with the nearest names, for a name or pattern that fits none of ``names``.

        With ``ops`` the names of operations are not looked for: no pass has shown them yet.
        """
        for term in self._names:
            for name in [] if ops and OPERATION in term.text else term.missing(names):
                named = [name for name in names if name]
                some = f"it has {len(named)} layers: {', '.join(named[:3])}, ..." if named else "it has no layers"
                some = nearest(name, names) or some
                do = "list them with ‹list_layers(model, types='all')|list-layers --type all›"
                if OPERATION in name:
                    some = "it names an operation"
                    do = "‹record it with trace_events(…, ops=True, values=10_000)|add --ops›"
                raise LayerError(f"no layer '{name}' in {what}", some, do, kind="layer", name=name)

    def check_operations(self, names: Sequence[str]) -> None:
        """Raise a LayerError for a name of operations that fits none of ``names``, those that ran."""
        for term in self._names:
            if OPERATION in term.text and term.text != EVERY_OPERATION:
                for name in term.missing(names):
                    ran = f"{len(names)} others ran: {', '.join(names[:3])}, ..." if names else "no operation ran"
                    do = "list them with ‹list_layers(model, ops=True)|list-layers --ops›"
                    raise LayerError(f"no operation '{name}' ran", nearest(name, names) or ran, do)

    def calls_by_name(self, names: Iterable[str], in_all: bool = False) -> frozenset[int | None]:
        """Which calls of a layer, known under all of ``names``, are wanted by name; None among them for every call.

        ``in_all`` says whether ``all`` means this layer.
        """
        named = [term.call for term in self._names if term.names_any(names)]
        return frozenset(named + [None] * (in_all and self.has_all))

    def wants_index(self, index: int, total: int | None = None) -> bool:
        """Whether the call with this index is wanted in a pass with ``total`` calls, None while the pass runs."""
        if total is None:  # what is certain, whatever number of calls follows
            return self.wants_every_index or any(
                not term.from_the_end and index in term.within(index + 1) for term in self._indices
            )
        return any(index in term.within(total) for term in self._indices)

    def wants(
        self, name: str, call: int, index: int | None, total: int | None = None, in_all: bool | None = None
    ) -> bool:
        """Whether this call is wanted in a pass with ``total`` calls of the chosen types, None while the pass runs.

        ``in_all`` says whether ``all`` means it; by default it means the calls with an index.
        """
        if any(term.wants(name, call) for term in self._names):
            return True
        if self.has_all and (index is not None if in_all is None else in_all):
            return True
        return index is not None and self.wants_index(index, total)

    def may_want(self, index: int | None, calls_so_far: int) -> bool:
        """Whether this call may turn out to be wanted once the number of calls is known."""
        if index is None:
            return False
        return any(term.reach is None or index >= calls_so_far - term.reach for term in self._from_the_end)

    def required(self, layers: Iterable[Sequence[str]]) -> set[int | tuple[str, int]] | None:
        """What must have run before a pass may stop: indices and ``(name, call)``; None when only its end will do.

        ``layers`` has all names of each layer; the first stands in the result. A name without ``#call`` asks for its
        first call: no pass can know of a second.
        """
        required: set[int | tuple[str, int]] = set()
        if self.has_all:
            return None
        for term in self._indices:
            last = [] if term.from_the_end or term.window.stop is None else term.within(term.window.stop)[-1:]
            if not last:  # an open range, or an empty one, in which no call can be
                return None
            required |= set(last)
        for names in layers:
            required |= {(names[0], call or 0) for call in self.calls_by_name(names)}
        return required

    def check_ran(
        self,
        ran: Iterable[tuple[Sequence[str], int]],
        total: int,
        types: Sequence[str],
        named: Iterable[str] = (),
        in_all: tuple[int, Sequence[str]] | None = None,
    ) -> None:
        """Raise a LayerError for an index, a range, a ``name#call`` or ``all`` without a call in a whole pass.

        ``ran`` has all names of each layer and how often it ran. ``total`` calls are of ``types``, which indices count;
        ``in_all`` has the number and the types of those that ``all`` means, if they are others. ``named`` has the names
        of all layers: an index may be meant as a name.
        """
        counts, of_type = list(ran), _in_words(types)
        calls, all_types = in_all or (total, types)
        if self.has_all and not calls:
            asked = f"no {_in_words(all_types)} ran as a module"
            do = "‹ops=True measures|stats --ops measures› other operations"
            raise LayerError(asked, do=do, kind="index", name="all")
        for term in self._indices:
            if not term.within(total):
                kind = "range" if ":" in term.text else "index"
                have = f"there are {total} {of_type} calls: 0 to {total - 1}" if total else f"no {of_type} ran"
                meant = f"the layer named {term.text} is name:{term.text}" if term.text in named else ""
                do = meant or "indices are as in ‹list_layers|list-layers›"
                asked = f"no {kind} {term.text}"
                if not (term.from_the_end or term.within(_MANY)):
                    asked, do = f"the range {term.text} is empty", "the start comes first, and the stop is not in it"
                raise LayerError(asked, have, do, kind=kind, name=term.text)
        for by_name in self._names:
            if by_name.call is None:
                continue
            calls = max((times for names, times in counts if by_name.names_any(names)), default=0)
            if by_name.call >= calls:
                ran_times = f"{calls} times: #0 to #{calls - 1}" if calls > 1 else "once"
                have = f"the layer ran {ran_times}" if calls else "the layer did not run"
                raise LayerError(f"no call '{by_name.text}'", have, kind="call", name=by_name.text)


def _in_words(types: Sequence[str]) -> str:
    return "layer" if "all" in types else "/".join(types)


Layers = Selection | Call | str | int | Iterable[Any]
