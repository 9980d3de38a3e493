"""Which models a training run has, and which layer of which model runs now, told by hooks that see every module."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import Module

from hookscope.errors import ModelError
from hookscope.training.modules import Chosen, Layer, Root, is_loss


@dataclass(slots=True)
class Pass:
    """A forward pass of a model, or of a part of it, that runs now.

    Attributes:
        top: What was called.
        root: The model that it is of.
        depth: How often it has called itself.
        counted: How many calls of the chosen types there were.
        measured: Whether its calls are recorded.
        calls: How often each module has run, by ``id``.
        expected: The running statistics of BatchNorms before they ran, by ``id``.
        spoilt: By ``id`` of layers that write over their input what made one that was not finite.
    """

    top: weakref.ref[nn.Module]
    root: Root
    depth: int = 0
    counted: int = 0
    measured: bool = True
    calls: Counter[int] = field(default_factory=Counter)
    expected: dict[int, Any] = field(default_factory=dict)
    spoilt: dict[int, str] = field(default_factory=dict)


class ModelTracker:
    """Follows the passes of the models of a process.

    A model is a module that is called while no other runs; a loss module of torch is none. A part of a model that is
    called by itself keeps the name it has in the model.

    Args:
        model: The only model to follow, None for every one.
        chosen: Which layers are wanted.

    Attributes:
        all: The models, in order of first sight.
        on_root: Called with each model that is found from now on.

    Raises:
        ModelError: for a scripted model.
    """

    def __init__(self, model: nn.Module | None, chosen: Chosen) -> None:
        self.on_root: Callable[[Root], None] | None = None
        self._chosen, self._only = chosen, model is not None
        self.all: list[Root] = []
        self._layers: dict[int, Layer] = {}
        self._strangers: dict[int, weakref.ref[nn.Module]] = {}
        self._running = threading.local()
        if model is not None:
            _check_eager(model)
            self.add(model)

    @property
    def current(self) -> Pass | None:
        """The pass that runs in this thread."""
        return getattr(self._running, "now", None)

    def add(self, module: nn.Module) -> Root:
        """Follow this model too."""
        root = Root(module, len(self.all), self._chosen)
        self.all.append(root)
        self._layers.update(root.layers)
        if self.on_root is not None:
            self.on_root(root)
        return root

    def check(self) -> None:
        """Raise a LayerError for a name or a type that one of the models does not have, with the nearest."""
        for root in self.all:
            root.check()

    def holding(self, parameters: set[int]) -> tuple[Root, ...]:
        """The models that hold any of ``parameters`` (by ``id``); no part of one that was seen after it."""
        holders = [
            root
            for root in self.all
            if any(not parameters.isdisjoint(map(id, own.values())) for _, _, own in root.with_parameters())
        ]
        return tuple(root for root in holders if self._is_whole(root))

    def layer_of(self, module: nn.Module) -> Layer | None:
        """The layer that a module is, as far as it is known."""
        layer = self._layers.get(id(module))
        return layer if layer is not None and layer.module is module else None

    def enter(self, module: nn.Module) -> tuple[Layer | None, bool]:
        """A module begins to run: the layer that it is, and whether a pass begins with it."""
        layer = self.layer_of(module)
        now = self.current
        if now is not None:
            if layer is not None and layer.root is now.root and module is not now.top():
                return layer, False
            if _is_running(now, module):  # else its forward raised, and the script went on
                now.depth += module is now.top()
                return (layer or self._newcomer(module, now)), False
            self._running.now = None
        if layer is None:
            if self._only or is_loss(module) or getattr(module, "_is_replica", False):
                return None, False
            layer = self.add(module).layers[id(module)]
        self._running.now = Pass(weakref.ref(module), layer.root)
        return layer, True

    def leave(self, module: nn.Module) -> tuple[Pass, Layer] | None:
        """A module has run: the pass it ran in and the layer that it is, None for one that is not followed."""
        now = self.current
        if now is None:
            return None
        if module is now.top():
            if now.depth:
                now.depth -= 1
            else:
                self._running.now = None
        layer = self.layer_of(module)
        return None if layer is None else (now, layer)

    def find_owner(self, parameters: set[int]) -> None:
        """Look in memory for the model that holds ``parameters`` (by ``id``), where no hook has told of it.

        Compiled models call no hooks. The outermost modules that hold any are taken for models.
        """
        if self._only:
            return
        # the class itself is asked: `isinstance` would wake what only pretends to be of a class
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        holders = [m for m in modules if "_modules" in m.__dict__ and any(id(p) in parameters for p in m.parameters())]
        inside = {id(part) for holder in holders for part in holder.modules() if part is not holder}
        for holder in holders:
            if id(holder) not in inside:
                self.add(holder)

    def _is_whole(self, root: Root) -> bool:
        """Whether a model is no part of one that was seen after it."""
        module = root.module
        layer = None if module is None else self.layer_of(module)
        return layer is not None and layer.root is root

    def _newcomer(self, module: nn.Module, now: Pass) -> Layer | None:
        """A layer that was put into the model since it was last looked at; None for one that is called from outside."""
        known = self._strangers.get(id(module))
        if known is not None and known() is module:
            return None
        now.root.walk()
        self._layers.update(now.root.layers)
        layer = self.layer_of(module)
        if layer is None:
            self._strangers[id(module)] = weakref.ref(module)
        return layer


def _is_running(now: Pass, beginning: nn.Module) -> bool:
    """Whether the pass goes on still while a module begins: no hook tells of a forward that raised."""
    top, code = now.top(), Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    found = -1 if beginning is top else 0  # the call that begins is one of the frames
    while frame is not None and found < 1:
        found += frame.f_code is code and frame.f_locals.get("self") is top
        frame = frame.f_back
    return found > 0


def _check_eager(model: nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"no model: a {type(model).__name__}", do="pass an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError("the model is scripted or traced: hooks do not fire in it", do="pass the eager model")
