"""Call a function at each wanted layer call of a forward pass, and count the calls."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock, get_ident
from types import FrameType, TracebackType
from typing import Any, Self, cast

import torch
from torch import nn

from hookscope.errors import LayerError, OutputNote
from hookscope.hooks.calls import Call, matches_type, no_such_type
from hookscope.hooks.operations import Operations, class_names, is_single, operation_of, types_in, types_of
from hookscope.hooks.registration import HookHandles, HookOwner, StopForward, check_hookable
from hookscope.hooks.selection import Layers, Selection
from hookscope.hooks.tensors import tensors_in

OnCall = Callable[[Call, Any, tuple[Any, ...], dict[str, Any], Any], Any]
OnBefore = Callable[[Call, "nn.Module", tuple[Any, ...], dict[str, Any]], Any]
OnInput = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


_MISSING = object()


@dataclass(slots=True)
class _Watched:
    """A layer with hooks on it, and its calls in this pass so far."""

    names: tuple[str, ...]
    counted: bool
    in_all: bool
    ordered: bool
    by_name: frozenset[int | None]
    calls: int = 0
    index: int | None = None
    open_inputs: list[tuple[dict[str, Any], Any]] = field(default_factory=list)


@dataclass(slots=True)
class PassProgress:
    """The progress of the latest pass: its calls of the chosen types and of all so far, and how it ended.

    ``total`` stays 0 where no index is asked for: only layers of other types, by their names.
    """

    total: int = 0
    ordered: int = 0
    complete: bool = False
    layers: tuple[_Watched, ...] = ()

    @property
    def did_not_run(self) -> tuple[str, ...]:
        """The watched layers that the pass did not reach, in order of registration."""
        return tuple(layer.names[0] for layer in self.layers if not layer.calls and (layer.counted or layer.by_name))

    def restart(self) -> None:
        self.total, self.ordered, self.complete = 0, 0, False
        for layer in self.layers:
            layer.calls = 0
            layer.open_inputs.clear()


class Observer(HookOwner):
    """Calls ``on_call`` for every wanted layer call of each forward pass inside the ``with`` block.

    Each pass of the model counts from 0. When a part of the model is called alone, counting continues.

    Args:
        model: Any eager module.
        layers: A selection, see `Selection`.
        types: Class names that indices count, ``all`` for every layer without children or with own parameters. None for
            Conv2d, or Conv3d in models of clips; ``layers="all"`` then means every layer, whatever its type.
        on_call: Called with ``(call, module, args, kwargs, output)``; a value other than None replaces the output.
        on_input: Called with ``(module, args, kwargs)`` before each call that may be wanted; while ``on_call`` runs,
            `input` holds the result for that call.
        on_start: Called with the model's ``(args, kwargs)`` when a pass starts.
        on_end: Called when a pass has come to its end.
        on_before: Called with ``(call, module, args, kwargs)`` before each wanted call; ``(args, kwargs)`` returned
            replace the inputs. Indices count calls in the order in which they end, so layers of the chosen types may
            not contain each other.
        again: Also call ``on_call`` and ``on_before`` when checkpointing computes a call again in the backward pass.
        ops: Operations are calls too, of the type of their function. ``on_call`` gets an `Operation` in the place of
            the module, ``on_input`` gets None. ``on_before`` sees layers only.
        ordered: Count all calls for `Call.order`, with a hook on every layer.

    Raises:
        LayerError: on entry for a name or type that the model does not have; on exit for an index that no pass
            reached.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        types: Iterable[Any] | None,
        on_call: OnCall,
        *,
        on_input: OnInput | None = None,
        on_start: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
        on_end: Callable[[], None] | None = None,
        on_before: OnBefore | None = None,
        again: bool = False,
        ops: bool = False,
        ordered: bool = False,
    ) -> None:
        self.model = model
        self.selection = Selection.of(layers)
        self.types, self._all_types = types_of(model, types)
        self._ordered = ordered
        self.progress = PassProgress()
        self.input: Any = None
        self._on_call, self._on_input, self._on_start, self._on_end = on_call, on_input, on_start, on_end
        self._on_before, self._again = on_before, again
        self._stops_early = False
        self._stop: StopForward | None = None
        self._waiting: set[int | tuple[str, int]] | None = None
        self._pass: FrameType | None = None
        self._thread = 0  # of the pass; 0 before the first
        self._entered_in = 0
        self._lock = RLock()  # a pass of this thread begins between two calls of another
        self._handles = HookHandles()
        self._watched: dict[int, _Watched] = {}
        self._named: dict[str, _Watched] = {}
        self._numbers: set[str] = set()  # names of layers that the selection reads as indices
        self.operations = Operations(model, self._on_operation) if ops else None
        if self.operations is not None:
            pause = partial(partial, self.operations.paused)  # their own calculations are not operations of the model
            self._on_call, self._on_input = pause(on_call), on_input and pause(on_input)
        self._operations: dict[str, _Watched] = {}

    def stop_early(self) -> None:
        """Make the observer end the pass, and with it the block, after the last wanted call."""
        self._stops_early = True

    def __enter__(self) -> Self:
        watched = self._layers_to_watch()
        self._watched = {id(module): layer for module, layer in watched}
        self._named = {layer.names[0]: layer for _, layer in watched}
        self.progress.layers = tuple(self._named.values())
        self.progress.restart()
        self._entered_in = get_ident()
        self._required = self.selection.required(layer.names for _, layer in watched if layer.by_name)
        self._operations = {}
        try:
            if self.operations is not None:
                self.operations.modules.watch(self._handles)
            self._handles.forward_pre(self.model, self._start)
            for module, layer in watched:
                needs_inputs = self._on_input is not None or self._on_before is not None
                if needs_inputs and (layer.by_name or (layer.counted and self.selection.counts)):
                    self._handles.forward_pre(module, self._before)
                self._handles.forward(module, self._after)
            self._handles.forward(self.model, self._end)
        except BaseException:
            self._handles.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._handles.__exit__(kind, error, trace)
        # an exception keeps its frames alive, and a frame its tensors
        stop, self._stop, self._pass, self.input = self._stop, None, None, None
        # what they belong to often refers to this observer: such a cycle would keep the model in memory; a pass of
        # another thread may still call them
        self._on_call = self._on_input = self._on_start = self._on_end = self._on_before = cast(Any, lambda *_: None)
        for layer in self.progress.layers:
            layer.open_inputs.clear()
        if error is not None:
            return error is stop
        if self.progress.complete:
            layers = (*self.progress.layers, *self._operations.values())
            ran = [(layer.names, layer.calls) for layer in layers]
            in_all = sum(layer.calls for layer in layers if layer.in_all), self._all_types
            if self.operations is not None:
                self.selection.check_operations(list(self._operations))
            named = (name for name, _ in self.model.named_modules(remove_duplicate=False))
            self.selection.check_ran(ran, self.progress.total, self.types, named, in_all)
        return False

    def warn_of_compiled_code(self) -> None:
        """Warn that no layer ran in the block, if torch.compile made code: this calls no hooks younger than itself."""
        ran = self._thread or any(layer.calls for layer in self.progress.layers)
        users = sys._getframe(2)  # the `with` of the `__exit__` that calls this
        is_ours = str(users.f_globals.get("__name__", "")).startswith(("hookscope.", "contextlib"))
        if not is_ours and not ran and getattr(sys.modules.get("torch._dynamo.utils"), "counters", {}).get("frames"):
            text = f"no pass of {type(self.model).__name__} called a hook, and code of torch.compile calls none; run"
            warnings.warn(f"{text} the model that was given, not what torch.compile made", stacklevel=3)

    @property
    def first_names(self) -> dict[str, str]:
        """The name that calls have, for each further name of a watched layer."""
        return {alias: name for name, layer in self._named.items() for alias in layer.names[1:]}

    def wanted(self, call: Call) -> bool:
        """Whether ``call`` is wanted, now that the pass is over."""
        return self.wants(call, self.progress.total)

    def wants(self, call: Call, total: int | None = None) -> bool:
        """Whether ``call`` is wanted in a pass with ``total`` calls; None as far as is known while the pass runs."""
        if call.index is not None and self.selection.wants_index(call.index, total):
            return True
        by_name = self._named[call.name].by_name
        return None in by_name or call.call in by_name

    def may_want(self, call: Call) -> bool:
        """Whether ``call`` may turn out to be wanted once the number of calls is known."""
        return self.selection.may_want(call.index, self.progress.total)

    def _layers_to_watch(self) -> list[tuple[nn.Module, _Watched]]:
        """Layers whose calls are counted, and layers wanted by name or ``all``, in order of registration."""
        # the same layer under two names is one layer: each of its names finds it
        walked = list(self.model.named_modules(remove_duplicate=False))
        check_hookable(self.model, walked)
        named: dict[int, tuple[nn.Module, list[str]]] = {}
        for name, module in walked:
            named.setdefault(id(module), (module, []))[1].append(name)
        self.selection.check_names([name for name, _ in walked], type(self.model).__name__, self.operations is not None)
        self._numbers = {name for name, _ in walked if self.selection.reads_as_index(name)}
        fits: dict[tuple[type, bool], tuple[bool, bool]] = {}
        watched = []
        asks_single = self._ordered or self.selection.has_all or "all" in self.types
        for module, names in named.values():
            kind = (type(module), asks_single and is_single(names[0], module))
            if kind not in fits:
                fits[kind] = self._fits(class_names(module), kind[1])
            counted, in_all = fits[kind]
            by_name = self.selection.calls_by_name(names, in_all)
            ordered = self._ordered and kind[1]
            if counted or by_name or ordered:
                watched.append((module, _Watched(tuple(names), counted, in_all, ordered, by_name)))
        if self.operations is None:
            if self.selection.counts and not any(layer.counted for _, layer in watched):
                raise no_such_type(self.types, types_in(self.model))
            if self.selection.has_all and not any(layer.in_all for _, layer in watched):
                raise no_such_type(self._all_types, types_in(self.model))
        if self._on_before is not None and self.selection.counts:
            self._check_order(watched)
        asks_index = self.selection.counts or any(layer.counted and layer.by_name for _, layer in watched)
        if not (asks_index or self._ordered or self.operations is not None):  # nothing to count: fewer hooks
            watched = [(module, layer) for module, layer in watched if layer.by_name]
        return watched

    def _fits(self, classes: Sequence[str], single: bool) -> tuple[bool, bool]:
        """Whether indices count calls of a layer with these class names, and whether ``all`` means them."""
        return matches_type(classes, self.types, single), matches_type(classes, self._all_types, single)

    def _check_order(self, watched: list[tuple[nn.Module, _Watched]]) -> None:
        """Refuse indices for `on_before` where a layer of the chosen types contains another, which ends first."""
        counted = {id(module): layer.names[0] for module, layer in watched if layer.counted}
        for module, layer in watched:
            within = [counted[id(part)] for part in module.modules() if part is not module and id(part) in counted]
            if layer.counted and within:
                name = layer.names[0]
                what = f"the index of '{name}' is not known before it runs: '{within[0]}' inside it ends first"
                raise LayerError(what, do="choose the layer by its name", name=name)

    # `kwargs` and `output` are missing where another thread runs the layer while this one registers or removes the hook

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if module is not self.model or kwargs is None or self._is_elsewhere():
            return
        with self._lock:
            frame = sys._getframe(1)
            if self._is_elsewhere() or any(above is self._pass for above in _frames_above(frame)):
                return  # the model calls itself: still the same pass
            self._pass, self._thread = frame, get_ident()
            self.progress.restart()
            for operation in self._operations.values():
                operation.calls = 0
            self._waiting = set(self._required) if self._stops_early and self._required is not None else None
            if self._on_start is not None:
                self._on_start(args, kwargs)

    def _is_elsewhere(self) -> bool:
        """Whether this thread is in a pass of its own that does not count.

        Passes of the thread of the block count; until it has one, passes of another thread do. A part of such a pass
        may run in a thread without a pass. This is asked before the lock, which a user's function may hold, and again.
        """
        thread, here = self._thread, get_ident()
        if here in (thread, self._entered_in):
            return False
        call, above_this = nn.Module._call_impl.__code__, _frames_above(sys._getframe())
        if not any(above.f_code is call and above.f_locals.get("self") is self.model for above in above_this):
            return False
        return thread == self._entered_in or self._pass is not None

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        if sys._getframe(1) is self._pass:
            self._pass = None
            self.progress.complete = True
            if self._on_end is not None:
                self._on_end()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        layer = self._watched.get(id(module))
        if layer is None or kwargs is None:
            return None
        if is_recomputing():  # which a backward pass may do in a thread of its own
            if self._on_before is None or not self._again:
                return None
            call = self._call_again(module, layer)
            return self._on_before(call, module, args, kwargs) if self.wants(call) else None
        if self._is_elsewhere():
            return None
        with self._lock:
            if self._is_elsewhere():
                return None
            if self._on_input is not None:
                layer.open_inputs.append((kwargs, self._on_input(module, args, kwargs)))
            if self._on_before is None:
                return None
            index = self.progress.total if layer.counted else None
            call = Call(layer.names[0], type(module).__name__, layer.calls, index)
            return self._on_before(call, module, args, kwargs) if self.wants(call) else None

    def _call_again(self, module: nn.Module, layer: _Watched) -> Call:
        """The call that is computed again; which of several calls it is, is unknown, so all must be wanted."""
        name, kind = layer.names[0], type(module).__name__
        if layer.calls == 1 or None in layer.by_name or self.selection.wants_every_index:
            return Call(name, kind, 0, layer.index)
        what = f"checkpointing computes '{name}' again, and which of its {layer.calls} calls that is, is unknown"
        raise LayerError(what, do="choose all calls of the layer, by its name alone", name=name)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = _MISSING) -> Any:
        layer = self._watched.get(id(module))
        if layer is None or output is _MISSING:
            return None
        if is_recomputing():
            if not self._again or not self.wants(call := self._call_again(module, layer)):
                return None
            return self._on_call(call, module, args, kwargs, output)
        if self._is_elsewhere():
            return None
        with self._lock:
            if self._is_elsewhere():
                return None
            inputs = _pop_inputs(layer.open_inputs, kwargs) if layer.open_inputs else None
            return self._returned(layer, type(module).__name__, inputs, module, args, kwargs, output)

    def _returned(self, layer: _Watched, kind: str, inputs: Any, module: Any, *made: Any) -> Any:
        """Count a call that has returned, with its arguments and output in ``made``; returns what `on_call` does."""
        # every line costs time at each call of each layer, which in a fast network is short itself
        number = layer.calls
        layer.calls = number + 1
        index = order = None
        if layer.ordered:
            order = self.progress.ordered
            self.progress.ordered = order + 1
        if layer.counted:
            index = layer.index = self.progress.total
            self.progress.total = index + 1
        elif not layer.by_name:
            return None
        call = Call(layer.names[0], kind, number, index, order)
        replacement = None
        if None in layer.by_name or self.wants(call) or self.may_want(call):
            if str(index) in self._numbers and str(index) not in layer.names:
                self._numbers.discard(str(index))
                text = f"index {index} is the layer '{call.name}'; the layer named {index} is name:{index}"
                warnings.warn(text, OutputNote, stacklevel=2)
            self.input = inputs
            replacement = self._on_call(call, module, *made)
            self.input = None
        if self._waiting is not None:
            self._stop_when_done((layer.names[0], number), index)
        return replacement

    def _on_operation(self, place: str, kind: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"{place}::{kind}"
        layer = self._operations.get(name)
        if layer is None:
            counted, in_all = self._fits((kind,), True)
            by_name = self.selection.calls_by_name([name], in_all)
            layer = _Watched((name,), counted, in_all, self._ordered, by_name)
        if is_recomputing():
            return function(*args, **kwargs)
        inputs = operation = None
        if layer.counted or layer.by_name:
            inputs = self._on_input and self._on_input(None, args, kwargs)
            operation, output = operation_of(name, kind, function, args, kwargs)
        else:
            output = function(*args, **kwargs)
        result = args[0] if kind == "setitem" else output
        if not tensors_in(result):
            return output
        self._operations[name] = self._named[name] = layer
        replacement = self._returned(layer, kind, inputs, operation, args, kwargs, result)
        return output if replacement is None else replacement

    def _stop_when_done(self, call: tuple[str, int], index: int | None) -> None:
        assert self._waiting is not None
        self._waiting -= {call} if index is None else {call, index}
        if not self._waiting and get_ident() == self._entered_in:  # the pass of another thread goes on
            self._stop = StopForward()
            raise self._stop


def is_recomputing() -> bool:
    """Whether a backward pass runs: a call that checkpointing computes again in it is not a new call."""
    return torch._C._current_graph_task_id() != -1


def _frames_above(frame: FrameType) -> Iterator[FrameType]:
    above = frame.f_back
    while above is not None:
        yield above
        above = above.f_back


def _pop_inputs(open_inputs: list[tuple[dict[str, Any], Any]], kwargs: dict[str, Any]) -> Any:
    """Pop the inputs of the call that returns now; records of inner calls that raised may be above them.

    A call has the same dictionary of keywords before and after it, unless another hook has replaced it.
    """
    last = len(open_inputs) - 1
    position = next((i for i in range(last, -1, -1) if open_inputs[i][0] is kwargs), last)
    inputs = open_inputs[position][1]
    del open_inputs[position:]
    return inputs
