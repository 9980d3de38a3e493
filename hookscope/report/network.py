"""The network as a list: the calls of an inspection in order of execution, folded by module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from hookscope.drawing import shape_text
from hookscope.hooks import MODEL, Call
from hookscope.inspection import CallFacts, Inspection
from hookscope.report.pictures import small_cam
from hookscope.structure import size_of

_UNFOLDED = 40  # rows that are open at first, at most

Facts = TypeVar("Facts")
_HEIGHT = 20  # of a distribution, in units of its drawing


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


_AnyRow = TypeVar("_AnyRow", bound=ModuleRow)  # type: ignore[type-arg]  # of any facts


def module_rows(
    row: Callable[..., _AnyRow],
    items: Iterable[Facts],
    call_of: Callable[[Facts], Call],
    key_of: Callable[[Facts], str],
) -> list[_AnyRow]:
    """A ``row`` for each of ``items`` in order of execution, each module before the calls in it."""
    rows: list[_AnyRow] = []

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


def _open_modules(rows: Sequence[_AnyRow]) -> None:
    """Open level after level of modules as long as the list stays short."""
    for depth in range(max((row.depth for row in rows), default=0)):
        if sum(row.depth <= depth + 1 for row in rows) > _UNFOLDED:
            return
        for row in rows:
            row.is_open |= row.is_module and row.depth == depth


@dataclass
class NetworkRow(ModuleRow[CallFacts]):
    """A line of the list: a call, or a module with the calls in it.

    Attributes:
        layer: Position of its view in `Inspection.layers`; None without one.
        cam: Address of the picture of its Grad-CAM, a module shows its last layer; empty without one.
        cam_of: Key of the layer of that Grad-CAM.
    """

    layer: int | None = None
    cam: str = ""
    cam_of: str = ""

    @property
    def is_call(self) -> bool:
        """Whether it is itself a call of a layer, also where calls in it fold."""
        return self.facts is not None and self.facts.call.order is not None

    @property
    def orders(self) -> str:
        """Its position in order of execution; a module has the first and the last call in it."""
        orders = [part.call.order for part in self.parts if part.call.order is not None]
        if len(orders) < 2:
            return str(orders[0]) if orders else ""
        return f"{min(orders)}–{max(orders)}"

    @property
    def type(self) -> str:
        return self.facts.call.type if self.facts else ""

    @property
    def shape(self) -> str:
        return shape_text(self.facts.shape).replace("x", "×") if self.facts else ""

    @property
    def calls(self) -> int:
        """Number of calls of layers without layers in them."""
        return sum(part.call.order is not None for part in self.parts)

    @property
    def params(self) -> int:
        """Parameters of all layers in the row, of a layer that is called twice once."""
        return sum({part.call.name: part.params for part in self.parts}.values())

    @property
    def macs(self) -> int:
        return sum(part.macs for part in self.parts)

    @property
    def values(self) -> int | None:
        """Number of values of the output for one image."""
        return None if self.facts is None or self.facts.shape is None else size_of(self.facts.shape)

    @property
    def largest(self) -> float | None:
        """The largest absolute value of the output."""
        if self.facts is None or self.facts.low is None or self.facts.high is None:
            return None
        return max(abs(self.facts.low), abs(self.facts.high))


def network_rows(inspection: Inspection) -> list[NetworkRow]:
    """The rows of all calls in order of execution, each module before the calls in it."""
    rows = module_rows(NetworkRow, inspection.calls, lambda facts: facts.call, lambda facts: facts.call.key)
    numbers = {layer.call.key: number for number, layer in reversed(list(enumerate(inspection.layers)))}
    for row in rows:
        row.layer = numbers.get(row.facts.call.key) if row.facts else None
        if row.layer is not None and (cam := small_cam(inspection, row.layer)):
            for shown in (row, *(rows[parent] for parent in row.parents if rows[parent].layer is None)):
                shown.cam, shown.cam_of = cam, row.name
    return rows


def outline(histogram: Sequence[int]) -> str:
    """The path of a histogram in a drawing of its length × 20; heights are square roots, so that few are seen too."""
    highest = max(histogram, default=0) or 1
    heights = (_HEIGHT * (1 - (count / highest) ** 0.5) for count in histogram)
    return f"M0 {_HEIGHT}" + "".join(f"V{height:.3g}h1" for height in heights) + f"V{_HEIGHT}Z"
