"""Calls in order of execution, folded by module: the rows of a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from hookscope.hooks import MODEL, Call

_UNFOLDED = 40  # rows that are open at first, at most

Facts = TypeVar("Facts")


@dataclass
class ModuleRow(Generic[Facts]):
    """A line of a list: a call, or a module with the calls in it.

    Attributes:
        number: Its position in the list.
        parents: Positions of the modules that it is in, the outermost first.
        name: Key of the call, or path of the module.
        facts: What was measured; None for a module without a call of its own.
        parts: The facts of all calls in the row.
        is_module: Whether there are calls in it.
        is_open: Whether these are shown at first.
    """

    number: int
    parents: tuple[int, ...]
    name: str
    facts: Facts | None
    parts: Sequence[Facts]
    is_module: bool = False
    is_open: bool = False

    @property
    def path(self) -> str:
        """The name without its last part: ``layer1.0.`` of ``layer1.0.conv1``."""
        return self.name[: self.name.rfind(".") + 1]

    @property
    def label(self) -> str:
        return self.name.removeprefix(self.path) or MODEL

    @property
    def depth(self) -> int:
        return len(self.parents)


Row = TypeVar("Row", bound=ModuleRow)  # type: ignore[type-arg]  # of any facts


def module_rows(
    row: Callable[..., Row], items: Iterable[Facts], call_of: Callable[[Facts], Call], key_of: Callable[[Facts], str]
) -> list[Row]:
    """A ``row`` for each of ``items`` in order of execution, each module before the calls in it."""
    rows: list[Row] = []

    def add(items: Iterable[Facts], depth: int, parents: tuple[int, ...]) -> None:
        """Append the rows of ``items``, whose names share their first ``depth`` parts."""
        for path, run in groupby(items, key=lambda facts: call_of(facts).name.split(".")[: depth + 1]):
            inside = list(run)
            deeper = [facts for facts in inside if call_of(facts).name.count(".") > depth]
            own = [facts for facts in inside if call_of(facts).name.count(".") <= depth]
            if not deeper or len(inside) == 1:
                add_calls(inside, parents)
                continue
            number = len(rows)
            last = own.pop() if own else None  # a block ends after the layers in it
            rows.append(row(number, parents, key_of(last) if last else ".".join(path), last, inside, is_module=True))
            add_calls(own, (*parents, number))
            add(deeper, depth + 1, (*parents, number))

    def add_calls(items: Iterable[Facts], parents: tuple[int, ...]) -> None:
        for facts in items:
            rows.append(row(len(rows), parents, key_of(facts), facts, [facts]))

    add(items, 0, ())
    _open_modules(rows)
    return rows


def _open_modules(rows: Sequence[Row]) -> None:
    """Open level after level of modules as long as the list stays short."""
    for depth in range(max((row.depth for row in rows), default=0)):
        if sum(row.depth <= depth + 1 for row in rows) > _UNFOLDED:
            return
        for row in rows:
            row.is_open |= row.is_module and row.depth == depth
