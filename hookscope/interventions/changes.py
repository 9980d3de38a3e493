"""What is to be changed where, as a person gives it: pairs of a place and an intervention, judged before any pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hookscope.errors import UsageError
from hookscope.hooks import Selection
from hookscope.interventions.base import Change, Intervention, check_takes
from hookscope.interventions.parameters import Freeze, Prune
from hookscope.interventions.ranges import a_type

AnyChange = Change | Prune | Freeze
Changes = Mapping[Any, AnyChange | Iterable[AnyChange]] | Iterable[tuple[Any, AnyChange]]


def pairs_of(changes: Changes) -> Iterator[tuple[str | Selection, AnyChange]]:
    """Each selection with one change, in order.

    Raises:
        UsageError: for what is no change, and for a place that is no name or index.
    """
    for pair in _items(changes):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _no_change(pair)
        where, several = pair
        if not isinstance(where, str | Selection) and not hasattr(where, "__index__"):
            asked = f"a layer is chosen by its name, not by {a_type(where)}"
            raise UsageError(asked, do="give a text such as 'layer3': model.named_modules() tells names")
        for change in several if isinstance(several, Iterable) and not callable(several) else [several]:
            # a class can be called, too: its brackets were forgotten
            if isinstance(change, type) or not (callable(change) or isinstance(change, Prune | Freeze)):
                raise _no_change(change)
            if callable(change) and not isinstance(change, Intervention):
                check_takes(change, f"the function for '{where}'", "call", "tensor")
            yield where if isinstance(where, Selection) else str(where), change


def _items(changes: Any) -> Iterable[Any]:
    if not isinstance(changes, Iterable):
        raise UsageError(
            f"no layers are told by {a_type(changes)}", do="give a dictionary such as {'layer3': Zero()}, or pairs"
        )
    return changes.items() if isinstance(changes, Mapping) else changes


def _no_change(change: Any) -> UsageError:
    if isinstance(change, type):
        return UsageError(f"'{change.__name__}' is a class, no intervention", do=f"make one, `{change.__name__}(...)`")
    asked = f"no intervention is meant by {a_type(change)}"
    return UsageError(asked, do="give one of hookscope.interventions, or a function (call, tensor) -> tensor")
