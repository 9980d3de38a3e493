"""A model that runs through `torch.compile`, and and whose inner calls can be observed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import list_backends, lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch.utils import _pytree as pytree

from hookscope.errors import ModelError, UsageError, nearest
from hookscope.hooks import HookHandles, check_hookable, is_single, tensors_in


class CompiledPass:
    """The forward pass of a model whose layers give what they gave inside a compiled program.

    Hooks on a compiled model fire only if they were there at its first call, and then are part of its program. So two
    copies are compiled: a plain one gives the output. In the other one hooks copy what each layer returns; the layers
    of `model`, a third copy, are then called in the same order, without inputs, and return these copies. All copies
    share the parameters and buffers of the given model.

    Attributes:
        model: The module to hook and to call.
        apart: The largest relative L2 difference of the outputs of the two programs so far.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any]) -> None:
        check_hookable(model)
        known = list_backends(exclude_tags=())
        if isinstance(backend, str) and backend not in known:
            raise UsageError(f"no backend '{backend}' of torch.compile", nearest(backend, known))
        self.model, self.apart = _copied(model), 0.0
        watched = _copied(model)
        self._name, self._backend = type(model).__name__, backend
        self._plain, self._watched = (self._compiled(net) for net in (_copied(model), watched))
        self._layers = {name: layer for name, layer in self.model.named_modules() if name and is_single(name, layer)}
        self._calls: list[tuple[str, Any]] = []
        self._handles = HookHandles()
        for name in self._layers:
            self._handles.forward(watched.get_submodule(name), self._keeper(name))
        self.model.forward = self._forward
        self.model._compiled_pass = self  # type: ignore[assignment]

    def _compiled(self, model: nn.Module) -> Any:
        # torch takes the program of another instance of a class if the backend is the same object, hooks or not
        return torch.compile(model, backend=lambda graph, inputs: lookup_backend(self._backend)(graph, inputs))

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._calls.append((name, pytree.tree_map_only(Tensor, torch.clone, output)))

        return keep

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        output = self._run(self._plain, *inputs)
        self._calls.clear()
        again = self._run(self._watched, args, kwargs)
        self.apart = max(self.apart, _apart(output, again))
        for name, value in self._calls:
            layer = self._layers[name]
            layer.forward = lambda value=value: value
            layer()
        self._calls.clear()
        return output

    def _run(self, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return program(*args, **kwargs)
        except TorchDynamoException as error:
            why = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split()
            what = f"torch.compile failed on {self._name}: {' '.join(why)[:200]}"
            raise ModelError(what, do="compare it without compile") from error


def _copied(model: nn.Module) -> nn.Module:
    """Other modules with the same parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _apart(a: Any, b: Any) -> float:
    pairs = [(a, b) for a, b in zip(tensors_in(a).values(), tensors_in(b).values(), strict=False) if a.shape == b.shape]
    moved = sum(float((b.double() - a.double()).nan_to_num().square().sum()) for a, b in pairs)
    size = sum(float(a.double().nan_to_num().square().sum()) for a, _ in pairs)
    return (moved / size) ** 0.5 if moved and size else 0.0
