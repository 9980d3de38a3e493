"""One pass of a model without hooks and one under `capture`, with the outputs and state changes of both."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torchvision.models import feature_extraction

from hookscope.errors import ModelError, first_line, is_out_of_memory
from hookscope.hooks import (
    Call,
    ModelSnapshot,
    Observer,
    Selection,
    StateChange,
    call_key,
    capture,
    is_leaf,
    map_tensors,
    random_states_kept,
    split_inputs,
    tensors_in,
)
from hookscope.models import LoadedModel, model_errors_as_input_errors


@dataclass(frozen=True, slots=True)
class Edge:
    """The output of call ``source`` is the positional or keyword input ``argument`` of call ``target``.

    ``overwritten``: it is overwritten on the way.
    """

    source: str
    target: str
    argument: int | str
    overwritten: bool = False


def run_fx_graph(model: nn.Module, inputs: tuple[Any, ...], on_output: Callable[[str, Any], None]) -> list[Edge]:
    """Trace a copy of ``model`` as `torchvision.models.feature_extraction` does, and run the graph on ``inputs``.

    One pass shows the value of every node. `create_feature_extractor` could return one node at a time only: several
    would be in memory that later in-place layers have overwritten. Every layer without children is a node, also those
    inside torchvision's own blocks (``Conv2dNormActivation``). ``on_output`` gets the key of a layer's call and its
    output, before the next node may overwrite it. A ModelError says why a model has no graph.
    """
    # a copy: tracing may leave proxies in attributes, and the graph calls the layers it was traced from
    twin = _step("it cannot be copied", lambda: copy.deepcopy(model))
    interpreter = _NodeByNode(_step("fx cannot trace it", lambda: _traced(twin)), on_output)
    _step("its graph does not run", lambda: interpreter.run(*inputs))
    return interpreter.edges


def _step(refusal: str, action: Callable[[], Any]) -> Any:
    result, error = attempted(action)
    if error is not None:
        raise ModelError(f"{refusal}: {first_line(error).partition('. ')[0][:120]}") from error
    return result


def attempted(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What ``action`` returns, or its error."""
    try:
        return action(), None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None, error


def _traced(model: nn.Module) -> fx.GraphModule:
    class Tracer(feature_extraction.NodePathTracer):  # type: ignore[misc]
        """torchvision's tracer, with every layer without children as a node, and no layer of torchvision with any."""

        def is_leaf_module(self, m: nn.Module, module_qualname: str) -> bool:
            if is_leaf(m) or isinstance(m, tuple(self.leaf_modules)):
                return is_leaf(m)
            return bool(super().is_leaf_module(m, module_qualname))

    tracer = Tracer(**feature_extraction._set_default_tracer_kwargs(None))
    return fx.GraphModule(model, tracer.trace(model))


class _NodeByNode(fx.Interpreter):
    """Runs a graph and shows the output of each call of a module at once."""

    def __init__(self, module: fx.GraphModule, on_output: Callable[[str, Any], None]) -> None:
        super().__init__(module)
        self.edges: list[Edge] = []
        self._on_output = on_output
        self._calls: Counter[str] = Counter()
        self._outputs: dict[fx.Node, tuple[str, list[int]]] = {}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of a node, with mutable lists as in the code: a function may change its own."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(_mutable, args)), {name: _mutable(value) for name, value in kwargs.items()}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_module":
            return super().run_node(n)
        name = str(n.target)
        key = call_key(name, self._calls[name])
        self._calls[name] += 1
        self._note_edges(n, key)
        output = super().run_node(n)
        self._outputs[n] = key, _versions(output)
        self._on_output(key, output)
        return output

    def _note_edges(self, node: fx.Node, key: str) -> None:
        arguments: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
        for argument, source in arguments:
            if isinstance(source, fx.Node) and source in self._outputs:
                fed_by, versions = self._outputs[source]
                self.edges.append(Edge(fed_by, key, argument, _versions(self.env[source]) != versions))


def _mutable(value: Any) -> Any:
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [_mutable(part) for part in value]
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {name: _mutable(part) for name, part in value.items()}
    return value


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in tensors_in(value).values()]


Shapes = tuple[tuple[int, ...], ...]


def noise_pictures(net: LoadedModel, seed: int = 0) -> list[Tensor]:
    """Prepared pictures of seeded noise in the input size of ``net``; the global random state is not touched.

    One tensor ``(3, H, W)``, or ``(3, T, H, W)`` for clips, two for optical flow; uniform in 0..1 for detection and in
    -1..1 for optical flow, standard normal for the others.
    """
    preprocess = net.preprocess
    shape = preprocess.input_shape
    generator = torch.Generator().manual_seed(seed)
    if net.family == "detection":
        noise = [torch.rand(shape, generator=generator)]
    elif net.family == "optical_flow":
        noise = [torch.rand(shape, generator=generator) * 2 - 1 for _ in range(2)]
    else:
        noise = [torch.randn(shape, generator=generator)]
    return [picture.to(preprocess.device, preprocess.dtype) for picture in noise]


@dataclass(frozen=True, slots=True)
class CallSignature:
    """How a call was given its tensors, which recorded inputs alone do not say.

    ``args`` counts the positional inputs. ``same`` has for each tensor the position of the first one that is the same
    object, on which attention depends. ``strides`` has the memory layout of each, on which rounding depends.
    """

    args: int
    keywords: bool
    same: tuple[int, ...]
    shapes: Shapes
    strides: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSignature:
        tensors = list(tensors_in((args, kwargs)).values())
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(tensor), position) for position, tensor in enumerate(tensors))
        return cls(len(args), bool(kwargs), same, shapes_in(tensors), tuple(map(_strides_of, tensors)))

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` from what `Activations.inputs` holds of the call."""
        return split_inputs(inputs, self.args, self.keywords)

    def copied_arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` in memory of their own: a layer may work in place."""
        copies: list[Tensor] = []

        def copied(tensor: Tensor) -> Tensor:
            at = len(copies)
            first = self.same[at]
            copies.append(copies[first] if first < at else _laid_out(tensor, self.strides[at]))
            return copies[-1]

        args, kwargs = map_tensors(self.arguments(inputs), copied)
        return args, kwargs


def _strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides, None for a tensor that is not dense and for one that repeats itself (``expand``)."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return tensor.stride() if plain and 0 not in tensor.stride() else None


def _laid_out(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """A copy with these strides: a vectorised kernel may round the last bit otherwise in another layout."""
    if strides is None or strides == tensor.stride():
        return tensor.clone()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def shapes_in(value: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value).values())


class _HalfWay(BaseException):
    """Raised in the middle of a pass; no Exception, so that the model does not catch it."""


class PairedPasses:
    """One pass without hooks and one under `capture`, from the same random state.

    ``calls`` are the wanted calls as an observer beside the capture sees them; ``total`` counts all calls of the types.
    Of the ``parts`` of the model's state, the pass without hooks changed ``own_changes``, the pass under `capture`
    ``changes``.
    """

    def __init__(
        self, net: LoadedModel, pictures: Sequence[Tensor], selection: Selection, types: tuple[Any, ...] | None
    ) -> None:
        self.net, self.model, self.pictures, self.selection, self.types = net, net.model, pictures, selection, types
        signatures: dict[Call, CallSignature] = {}

        def note_signature(call: Call, *rest: Any) -> None:
            signatures[call] = observer.input

        before = ModelSnapshot(net.model)
        with random_states_kept():
            self.plain = run_model(net, pictures)
            self.own_changes = before.changes()
        before = ModelSnapshot(net.model)
        self.parts = len(before)
        # an observer beside the capture: a call that the capture loses must be missed; `ordered` counts all calls
        observer = Observer(net.model, selection, types, note_signature, on_input=CallSignature.of, ordered=True)
        with random_states_kept():
            with capture(net.model, selection, types, inputs=True) as self.activations, observer:
                self.hooked = run_model(net, pictures)
            self.changes = before.changes()
        self.calls = tuple(call for call in signatures if observer.wanted(call))
        self.signatures = {call.key: signatures[call] for call in self.calls}
        self.total = observer.progress.total

    def changes_after_exception(self) -> list[StateChange]:
        """The parts of the state that a capture changes when an exception ends its pass half-way."""
        before = ModelSnapshot(self.model)
        left, until = 0, len(self.calls) // 2

        def raise_half_way(output: Any) -> None:
            nonlocal left
            left += 1
            if left > until:
                raise _HalfWay

        with random_states_kept():
            try:
                with capture(self.model, self.selection, self.types, inputs=True, transform=raise_half_way):
                    self.model(*inputs_of(self.net, self.pictures))
            except _HalfWay:
                pass
            return before.changes()


def inputs_of(net: LoadedModel, pictures: Sequence[Tensor]) -> tuple[Any, ...]:
    """The inputs of one pass, in memory of their own: the first layer may work in place."""
    inputs: tuple[Any, ...] = map_tensors(net.inputs(*pictures), lambda tensor: tensor.clone())
    return inputs


def run_model(net: LoadedModel, pictures: Sequence[Tensor]) -> Any:
    """The output of one pass; an InputError when the model refuses the pictures."""
    with model_errors_as_input_errors(net.name, pictures):
        return net.model(*inputs_of(net, pictures))
