"""Carry a function of (call, tensors) through a forward pass: which calls are wanted, which index each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hookscope.errors import LayerError
from hookscope.hooks import Door, StopForward, check_hookable
from hookscope.layers import Call, Layers, Selection, matches_type, select_types

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Observer", "describe_types", "types_in"]

OnCall = Callable[[Call, "nn.Module", tuple[Any, ...], dict[str, Any], Any], Any]
OnInput = Callable[["nn.Module", tuple[Any, ...], dict[str, Any]], None]


def class_names(module: nn.Module) -> list[str]:
    """The class names a layer goes by, its own first, without those that every layer has."""
    return [cls.__name__ for cls in type(module).__mro__[:-1] if cls.__name__ != "Module"]


def is_leaf(module: nn.Module) -> bool:
    """Whether the layer has no children."""
    return not any(True for _ in module.children())


def types_in(model: nn.Module) -> Counter[str]:
    """How many layers of each class the model has, containers included."""
    return Counter(type(module).__name__ for module in model.modules())


def describe_types(counts: Counter[str], most: int = 12) -> str:
    """``Conv2d (36), ReLU (17)``: what a model has, for an error that says so."""
    shown = [f"{name} ({count})" for name, count in counts.most_common(most)]
    return ", ".join(shown) + (", ..." if len(counts) > most else "")


class Observer:
    """Calls ``on_call`` for every wanted layer call of each forward pass inside the ``with`` block.

    Each pass of the model starts clean. A part of the model called alone goes on counting where the last stopped.

    Args:
        model: Any eager module.
        layers: A selection, see `Selection`.
        types: Class names that indices count, ``all`` for every leaf.
        on_call: ``(call, module, args, kwargs, output)``; what it returns, if not None, goes on in the output's place.
        on_input: ``(module, args, kwargs)`` before each call that may be wanted.
        on_start: Called when a pass starts.

    Raises:
        LayerError: on entry for a name or type the model does not have; on leaving for an index no pass reached.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU())
        >>> names = []
        >>> with Observer(net, "all", ("all",), lambda call, *rest: names.append(call.key)):
        ...     _ = net(torch.zeros(1, 3, 2, 2))
        >>> names
        ['0', '1']
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        types: Iterable[Any],
        on_call: OnCall,
        *,
        on_input: OnInput | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.selection = Selection(layers)
        self.types = select_types(types)
        self.total = 0
        self.complete = False
        self.stopped = False
        self._on_call, self._on_input, self._on_start = on_call, on_input, on_start
        self._stop: StopForward | None = None
        self._calls: Counter[str] = Counter()
        self._waiting: set[int | tuple[str, int]] | None = None
        self._door = Door()
        self._names: dict[int, str] = {}
        self._watched: list[nn.Module] = []

    def stop_early(self) -> None:
        """End the pass, and with it the block, after the last wanted call."""
        self._stop = StopForward()

    def __enter__(self) -> Self:
        check_hookable(self.model)
        named = dict(self.model.named_modules(remove_duplicate=False))
        counted = self._counted(named)
        wanted = self._wanted_by_name(named)
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._counted_ids = {id(module) for module in counted}
        self._required = self.selection.required(self._names[id(module)] for module in wanted)
        watched = {id(module): module for module in [*counted, *wanted]}
        try:
            self._door.forward_pre(self.model, self._start)
            for module in watched.values():
                if self._on_input is not None:
                    self._door.forward_pre(module, self._on_input)
                self._door.forward(module, self._after)
            self._door.forward(self.model, self._end)
        except BaseException:
            self._door.__exit__(None, None, None)
            raise
        self._watched = list(watched.values())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._door.__exit__(kind, error, trace)
        if error is not None:
            return error is self._stop
        if self.complete:
            self.selection.check_ran(self._calls_ran(), self.total, self.types)
        return False

    @property
    def did_not_run(self) -> tuple[str, ...]:
        """Names of watched layers that the last pass did not reach, in order of registration."""
        return tuple(name for name in map(self.name_of, self._watched) if not self._calls[name])

    def name_of(self, module: nn.Module) -> str:
        """The dotted path of a layer of this model."""
        return self._names[id(module)]

    def _calls_ran(self) -> Iterable[tuple[str, int]]:
        return ((name, call) for name, calls in self._calls.items() for call in range(calls))

    def _counted(self, named: dict[str, nn.Module]) -> list[nn.Module]:
        """The layers whose calls have an index, when the selection speaks of indices or they are to be labelled."""
        found = [m for m in named.values() if matches_type(class_names(m), self.types, is_leaf(m))]
        if not found and self.selection.counts:
            raise no_such_type(self.types, types_in(self.model))
        return list({id(m): m for m in found}.values())

    def _wanted_by_name(self, named: dict[str, nn.Module]) -> list[nn.Module]:
        self.selection.check_names(list(named), type(self.model).__name__)
        # the same layer under two names is one layer: each of its names finds it
        self._aliases: dict[int, list[str]] = {}
        for name, module in named.items():
            self._aliases.setdefault(id(module), []).append(name)
        return list({id(m): m for name, m in named.items() if self.selection.named(name)}.values())

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.total, self.complete, self.stopped = 0, False, False
        self._calls.clear()
        self._waiting = None if self._required is None else set(self._required)
        if self._on_start is not None:
            self._on_start()

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.complete = True

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        name = self._names[id(module)]
        call = self._calls[name]
        self._calls[name] += 1
        index = None
        if id(module) in self._counted_ids:
            index, self.total = self.total, self.total + 1
        handed = None
        wanted = any(self.selection.wants(alias, call, index) for alias in self._aliases[id(module)])
        if wanted or self.selection.may_want(index, self.total):
            handed = self._on_call(Call(name, type(module).__name__, call, index), module, args, kwargs, output)
        self._stop_when_done(name, call, index)
        return handed

    def _stop_when_done(self, name: str, call: int, index: int | None) -> None:
        if self._stop is None or self._waiting is None:
            return
        self._waiting -= {(name, call)} if index is None else {(name, call), index}
        if not self._waiting:
            self.stopped = True
            raise self._stop


def no_such_type(types: Iterable[str], have: Counter[str]) -> LayerError:
    """The error for a model without a layer of the types asked for: it says which there are and how many."""
    asked = "/".join(types)
    return LayerError(f"no layer of type {asked}", f"the model has {describe_types(have)}", "choose by --type")
