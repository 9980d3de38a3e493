"""What a watched run wraps in torch: the start of the backward pass, the loss scale, calls of compiled code."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _disable_current_modes

from hookscope.hooks import graph_nodes, hook_tensor
from hookscope.system import after_import
from hookscope.training.loss_graph import SCALE


@contextlib.contextmanager
def _outside_all() -> Any:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def are_tensors_fake() -> bool:
    """Whether the script computes shapes only, in a ``FakeTensorMode``."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_backward_compiled() -> bool:  # with the hooks in it
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False) is True


def outside_modes() -> AbstractContextManager[Any]:
    """A block in which no ``TorchFunctionMode`` and no ``TorchDispatchMode`` of the script sees what is called."""
    return _outside_all() if torch._C._len_torch_dispatch_stack() else torch._C.DisableTorchFunction()


_MOST_NODES = 8  # searched for a loss scale: scripts divide a scaled loss or add others to it
_MODULE_CALLS = (modules.Module._call_impl.__code__, modules.Module._wrapped_call_impl.__code__)
_HOOK_TABLES = ("backward_pre_hooks", "backward_hooks", "forward_pre_hooks", "forward_hooks")


class Patch:
    """Calls ``wrapper(original, *args, **kwargs)`` in place of ``owner.name`` while on."""

    def __init__(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        self._owner, self._name, self._wrapper = owner, name, wrapper
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None
        self._is_on = False

    def on(self) -> None:
        if self._is_on:
            return
        self._is_on = True
        original, wrapper = getattr(self._owner, self._name), self._wrapper
        if self._ours is not None and original is self._original:  # compiled code switches often
            setattr(self._owner, self._name, self._ours)
            return

        @wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            # when this one is off, a later wrapper of somebody else may still call it
            if not self._is_on or self._ours is not ours:
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        self._original, self._ours = original, ours
        setattr(self._owner, self._name, ours)

    def off(self) -> None:
        """Put the original back, unless somebody else has wrapped ours since."""
        if self._is_on and getattr(self._owner, self._name, None) is self._ours:
            setattr(self._owner, self._name, self._original)
        self._is_on = False


class Tap:
    """Patches that are on together."""

    _patches: Sequence[Patch] = ()

    def on(self) -> None:
        for patch in self._patches:
            patch.on()

    def off(self) -> None:
        for patch in reversed(self._patches):
            patch.off()


class LossTap(Tap):
    """Calls ``on_loss(value, roots)`` before each backward pass that starts at scalars, and ``on_done()`` after it.

    Torch has no hook there. To wrap ``torch.autograd.backward`` would put a frame into the traceback of each error of a
    backward pass, and miss copies that a script imported by name. So a small function is wrapped that it calls first,
    and that returns before anything can fail. ``value`` is the sum of the scalars, detached and divided by the scale
    of a ``GradScaler``: ``GradScaler.scale`` is wrapped to note the scale in the autograd node of its result. What
    ``on_loss`` raises is raised in the script, in place of the backward pass. With ``notes_clipping``, the facts of the
    last clipping of gradients are in ``clipping``, and whether the gradients still had a loss scale.
    """

    def __init__(
        self, on_loss: Callable[[Tensor, Sequence[Tensor]], None], on_done: Callable[[], None] = lambda: None
    ) -> None:
        self._on_loss, self._on_done = on_loss, on_done
        self._scaler: weakref.ref[Any] | None = None
        self._last_scale: Tensor | None = None  # changed in place by the scaler
        self._has_scales = self._loss_is_scaled = self._waits_for_end = self.notes_clipping = False
        self.clipping: dict[str, Any] = {}
        self._clips = [
            Patch(owner, name, self._clip)
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad)
            for name in ("clip_grad_norm_", "clip_grad_value_")
        ]

    def on(self) -> None:
        if self._patches:
            return
        scalers = {torch.amp.GradScaler, *_subclasses(torch.amp.GradScaler)}
        patches = [Patch(scaler, "scale", self._scale) for scaler in scalers if "scale" in vars(scaler)]
        patches.append(Patch(torch.autograd, "_tensor_or_tensors_to_tuple", self._backward))
        self._patches = [*patches, *self._clips]
        super().on()

    def off(self) -> None:
        super().off()
        self._patches = ()

    def scale(self) -> float | None:
        """The scale of the ``GradScaler`` that was used last, read back from its device; None without one."""
        return None if self._last_scale is None else float(self._last_scale)

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.notes_clipping and not torch.compiler.is_compiling():
            with contextlib.suppress(Exception):
                limit = next((kwargs[name] for name in ("max_norm", "clip_value") if name in kwargs), None)
                limit = args[1] if limit is None else limit
                number = float(limit) if isinstance(limit, (int, float)) else None
                facts = {"clip_function": original.__name__, "clip_limit": number}
                self.clipping = facts | {"clip_scaled": self.is_scaled()}
        return original(*args, **kwargs)

    def is_scaled(self, optimizer: Any = None) -> bool:
        """Whether the gradients, of ``optimizer`` if it steps now, still have the scale of a ``GradScaler``."""
        scaler = None if self._scaler is None else self._scaler()
        is_fused = getattr(optimizer, "grad_scale", None) is not None  # such a step divides by it
        if not self._loss_is_scaled or scaler is None or is_fused:
            return False
        states: Mapping[int, Mapping[str, Any]] = scaler._per_optimizer_states
        return all(state["stage"] is OptState.READY for state in states.values())

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)
        if caller.f_code.co_name == "backward" and caller.f_globals is vars(torch.autograd):
            names = caller.f_locals
            if names.get("grad_tensors") is None and not torch.compiler.is_compiling():  # else it has no loss
                roots, value = names.get("tensors", ()), None
                with contextlib.suppress(Exception), outside_modes():  # backward itself reports bad arguments
                    value = self._unscaled_sum(roots)
                if value is not None:
                    self._on_loss(value, roots)
                    self._call_when_done(roots[0])
        return original(*args, **kwargs)

    def _call_when_done(self, root: Tensor) -> None:
        if not root.requires_grad or torch._C._current_graph_task_id() != -1:
            return
        if not is_backward_compiled():
            self._waits_for_end = True
            queue = torch.autograd.Variable._execution_engine.queue_callback
            hook_tensor(root, lambda gradient: queue(self._end))

    def _end(self) -> None:
        if self._waits_for_end:  # once, although the hook is called again for each later pass from the same root
            self._waits_for_end = False
            self._on_done()

    def _unscaled_sum(self, roots: Sequence[Any]) -> Tensor | None:
        values, self._loss_is_scaled = list[Tensor](), False
        for root in roots:
            value = scalar_of(root)
            if value is None:
                return None
            nodes = islice(graph_nodes([root.grad_fn] if self._has_scales else ()), _MOST_NODES)
            scale = next((node.metadata[SCALE] for node in nodes if SCALE in node.metadata), None)
            self._loss_is_scaled |= scale is not None
            values.append(value if scale is None else value.float() / scale.to(value.device))
        if len(values) < 2:
            return values[0] if values else None
        return torch.stack([value.float().to(values[0].device) for value in values]).sum()

    def _scale(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        if not torch.compiler.is_compiling():
            with contextlib.suppress(Exception), outside_modes():  # a scaler that is not built like torch's
                if scaler.is_enabled():
                    self._scaler, self._last_scale = weakref.ref(scaler), scaler._scale
                    self._note_scale(scaled, scaler._scale.detach())  # `update` comes after the backward pass
        return scaled

    def _note_scale(self, scaled: Any, scale: Tensor) -> None:
        if isinstance(scaled, torch.Tensor):
            node: Any = scaled.grad_fn
            if node is not None:
                node.metadata[SCALE] = scale
                self._has_scales = True
        elif isinstance(scaled, (list, tuple)):  # an iterator is left to the script: it can be consumed only once
            for part in scaled:
                self._note_scale(part, scale)


@dataclass(slots=True)
class _Switch:
    """A function of dynamo that has switched compiled code on or off for what it calls."""

    frame: FrameType
    is_on: bool
    shows_inside: bool = True
    token: Any = None


class CompiledCalls(Tap):
    """Tells when compiled code runs, so that nothing of the watching is in torch where dynamo looks.

    Dynamo compiles a function again if hooks have come or gone since. It switches itself on with ``set_eval_frame``
    right before it looks, and off again right afterwards, and around functions that are not to be compiled.

    ``on_switch`` gets True before compiled code runs in any thread, and False when it runs in none. ``on_call`` gets
    the function, the arguments and the keywords before each call of compiled code. ``on_return`` gets what ``on_call``
    returned, unless it is None, and the result, after a call that did not raise. With ``shows_inside``, calls of
    modules are told, and functions that are not compiled count as outside where compiled code calls them.
    """

    def __init__(
        self,
        on_switch: Callable[[bool], None],
        on_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        on_return: Callable[[Any, Any], None],
    ) -> None:
        self._on_switch, self._on_call, self._on_return = on_switch, on_call, on_return
        self.shows_inside = True
        self._thread = threading.local()
        self._running: set[int] = set()  # the threads
        self._cancel: Callable[[], None] = lambda: None

    def on(self) -> None:
        self._cancel = after_import("torch._dynamo.eval_frame", self._wrap)

    def off(self) -> None:
        self._cancel()
        super().off()

    def _wrap(self) -> None:
        module = sys.modules["torch._dynamo.eval_frame"]
        names = ("set_eval_frame", "_maybe_set_eval_frame")  # the second is the first, or calls it
        same = [name for name in names if getattr(module, name, None) is module.set_eval_frame]
        self._patches = [Patch(module, name, self._set) for name in same]
        super().on()

    def _set(self, original: Callable[[Any], Any], callback: Any) -> Any:
        switches: list[_Switch] | None = self._thread.__dict__.get("switches")
        if callback is None and not switches:  # it was off already
            return original(None)
        frame = sys._getframe(2)
        if frame.f_code.co_name == "_maybe_set_eval_frame" and frame.f_back is not None:
            frame = frame.f_back
        if switches is None:
            switches = self._thread.switches = []
        last = switches[-1] if switches else None
        if last is not None and last.frame is not frame and not last.shows_inside:
            return original(callback)  # what hides stays hidden until the outermost compiled code ends
        if callback is not None:
            if last is not None and last.frame is frame and not last.is_on:
                switches.pop()
            elif last is None or last.frame is not frame:
                switch = _Switch(frame, True, self.shows_inside)
                is_told = self.shows_inside or frame.f_back is None or frame.f_back.f_code not in _MODULE_CALLS
                if is_told and (last is None or not last.is_on) and (call := _call_of(frame)) is not None:
                    switch.token = self._on_call(*call)
                switches.append(switch)
            self._switch(switches)
            return original(callback)
        before = original(None)
        if before is not None:  # else it was off already, as it is while dynamo compiles
            if last is not None and last.frame is frame and last.is_on:
                switches.pop()
            else:
                switches.append(_Switch(frame, False))
                last = None
            self._switch(switches)
            if last is not None and last.token is not None and "result" in (names := frame.f_locals):
                self._on_return(last.token, names["result"])
        return before

    def _switch(self, switches: Sequence[_Switch]) -> None:
        was_running, thread = bool(self._running), threading.get_ident()
        runs = bool(switches) and (switches[-1].is_on or not self.shows_inside)
        (self._running.add if runs else self._running.discard)(thread)
        if bool(self._running) != was_running:
            self._on_switch(not was_running)


def _call_of(frame: FrameType) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The function, the arguments and the keywords of the call of compiled code that begins in ``frame``."""
    names = frame.f_locals
    if not {"fn", "args", "kwargs"} <= names.keys():
        return None
    function = names["fn"]
    if not hasattr(function, "__self__"):  # dynamo wraps modules and methods of torch once more
        function = getattr(function, "__wrapped__", function)
    return function, names["args"], names["kwargs"]


def hidden_from_compile(hooks: Sequence[Callable[..., Any]]) -> Patch:
    """A patch with which compiled models do not warn that ``hooks`` are global; filters of scripts come before ours."""

    def has_other_hooks(original: Callable[[], Any]) -> bool:
        registered = (hook for table in _HOOK_TABLES for hook in getattr(modules, f"_global_{table}", {}).values())
        return any(all(hook is not own for own in hooks) for hook in registered)

    return Patch(modules, "_has_any_global_hook", has_other_hooks)


def scalar_of(value: Any) -> Tensor | None:
    """A detached copy, of shape (), of a floating-point tensor with one element; None for anything else."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() != 1 or value.is_meta:
        return None
    return value.detach().reshape(()).clone()


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
