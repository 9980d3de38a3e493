"""One operation of a pass, and the register of rules that say what it does to fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hookscope.geometry.reach import Followed
from hookscope.hooks import tensors_in


class Operation:
    """One operation of a pass: its name, its arguments by name, its output, and what is known of its tensors."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], of: Callable[[Tensor], Any]) -> None:
        names = [argument.name for argument in function._schema.arguments]
        self.name = function.overloadpacket.__name__
        self.given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        self.tensors = [tensor for value in self.given.values() for tensor in tensors_in(value).values()]
        self.known = {id(tensor): known for tensor in self.tensors if (known := of(tensor)) is not None}
        self.takes = set(names)
        self.output: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)

    @property
    def input(self) -> Tensor:
        """The first tensor."""
        return self.tensors[0]

    @property
    def followed(self) -> Followed:
        """What is known of the first tensor."""
        known: Followed = self.known[id(self.input)]
        return known

    @property
    def only_input(self) -> bool:
        return set(self.known) == {id(self.input)}

    def per_axis(self, name: str, count: int, default: float | None = None) -> list[Any]:
        """An argument that has a number for each of ``count`` axes, or one for all."""
        value = self[name]
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values or values == [None]:
            values = [default]
        return values if len(values) == count else values[:1] * count


Rule = Callable[[Operation], "Followed | list[Followed] | None"]
RULES: dict[str, Rule] = {}
"""What each operation does to fields, by its internal name without a trailing ``_``; None where it is not followed."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register
