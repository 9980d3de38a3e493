"""One forward and one backward pass: what gradient every layer gets and gives, and what every parameter gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hookscope.activations import keep_and_hand_on
from hookscope.differentiable import differentiable, leaves_of, passed_on
from hookscope.errors import ModelError
from hookscope.gradient_sizes import Size, norm_and_nonfinite, size_of, total_norm
from hookscope.gradient_stops import gradient_stops
from hookscope.hooks import Door
from hookscope.layers import Call, Layers
from hookscope.losses import Loss
from hookscope.observe import Observer
from hookscope.scores import Prediction
from hookscope.tensors import Shape, map_tensors, shape_of, tensors_in

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor, nn

__all__ = ["GradientReport", "LayerGradient", "ParameterGradient", "Size", "layer_gradients", "size_of"]

Change = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]


@dataclass(frozen=True, slots=True)
class LayerGradient:
    """The gradients of the loss at one layer call.

    Attributes:
        call: Which call.
        output_shape: Of what it put out, and so of ``grad_output``.
        grad_output: The gradient that it gets, None where none arrives.
        input_shape: Of what went in, and so of ``grad_input``.
        grad_input: The gradient that it gives to what went in, by way of this call alone, as a full backward hook
            shows it; None where there is none.
        activation_norm: Euclidean norm of what it put out, over its finite values.
        activation_nonfinite: Count of NaN and Inf in what it put out.
    """

    call: Call
    output_shape: Shape
    grad_output: Size | None
    input_shape: Shape
    grad_input: Size | None
    activation_norm: float
    activation_nonfinite: int = 0

    @property
    def ratio(self) -> float | None:
        """The norm of the gradient by the norm of the activation."""
        return _ratio(self.grad_output, self.activation_norm)


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """The gradient of the loss with respect to one parameter.

    Attributes:
        name: Dotted path in ``named_parameters()``.
        layer: The layer it belongs to.
        type: Class name of that layer.
        shape: Its own.
        gradient: The gradient, None where none arrives.
        weight_norm: Its own Euclidean norm.
        frozen: Whether ``requires_grad`` is False.
        after: The gradient once it was changed, None where nothing was changed or there is none.
    """

    name: str
    layer: str
    type: str
    shape: tuple[int, ...]
    gradient: Size | None
    weight_norm: float
    frozen: bool
    after: Size | None = None

    @property
    def ratio(self) -> float | None:
        """The norm of the gradient by the norm of the parameter."""
        return _ratio(self.gradient, self.weight_norm)


def _ratio(size: Size | None, norm: float) -> float | None:
    return size.norm / norm if size is not None and norm > 0 else None


@dataclass(frozen=True)
class GradientReport:
    """What one backward pass showed.

    Attributes:
        value: Of the loss.
        targets: The classes it was made from; empty for ``mse``.
        layers: The wanted calls in order of execution.
        parameters: Every parameter of the model, in order of registration.
        did_not_run: Wanted layers that the pass did not reach.
        total_norm: Euclidean norm of all parameters' gradients together.
        total_after: The same once they were changed, None where they were not.
        loss: Its name.
    """

    value: float
    targets: tuple[Prediction, ...]
    layers: tuple[LayerGradient, ...]
    parameters: tuple[ParameterGradient, ...]
    did_not_run: tuple[str, ...]
    total_norm: float
    total_after: float | None = None
    loss: str = "score"


def layer_gradients(
    model: nn.Module,
    inputs: Any,
    loss: Loss | None = None,
    layers: Layers = "all",
    types: Iterable[Any] = ("Conv2d",),
    *,
    change: Change | None = None,
) -> GradientReport:
    """Run ``model`` forward and backward once, and measure the gradient at every wanted call and every parameter.

    The model runs in eval mode. Gradients are asked of the picture too, so that they flow through frozen layers. No
    ``.grad`` is written and no flag changed; in-place layers are no obstacle, for tensors and edges of the autograd
    graph are asked, never the module's backward hook.

    Args:
        model: Any eager module.
        inputs: The positional inputs, or the only one.
        loss: What is differentiated; the score of the most likely class unless given.
        layers: A selection, see `hookscope.layers.Selection`.
        types: Class names that indices count.
        change: From the parameters' gradients by name to what an optimizer shall see of them.

    Raises:
        LayerError: no such layer.
        TargetError: no such class.
        ModelError: no scores of classes where the loss needs them, or an output without a gradient.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1, bias=False), torch.nn.Flatten())
        >>> report = layer_gradients(net, torch.full((1, 1, 1, 1), 3.0), Loss("score", "0"))
        >>> report.layers[0].grad_output.norm, report.parameters[0].gradient.norm
        (1.0, 3.0)
    """
    loss = loss or Loss()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with differentiable(model):
        record = _Record(model, layers, types)
        with record:
            output = model(*passed_on(leaves_of(inputs)))
        value, targets = loss.of(output, type(model).__name__)
        if not value.requires_grad:
            raise _without_gradient(model, inputs, loss)
        calls = record.calls
        kept = [tensor for seen in calls for tensor in seen.kept]
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        arrived = _gradients(value, [*kept, *trained.values()])
        by_tensor = iter(arrived[: len(kept)])
        at_layers = tuple(_measured(seen, [next(by_tensor) for _ in seen.kept]) for seen in calls)
        own = {name: g for name, g in zip(trained, arrived[len(kept) :], strict=True) if g is not None}
        after = change(own) if change is not None else None
        return GradientReport(
            value=float(value.detach()),
            targets=targets,
            layers=at_layers,
            parameters=_of_parameters(model, own, after),
            did_not_run=record.observer.did_not_run,
            total_norm=total_norm(own.values()),
            total_after=None if after is None else total_norm(after.values()),
            loss=loss.name,
        )


def _without_gradient(model: nn.Module, inputs: Any, loss: Loss) -> ModelError:
    """The error for an output that is no part of a graph: it says where the graph ends."""
    cut = [stop.why for stop in gradient_stops(model, inputs, loss) if stop.reason != "unused"]
    why = cut[-1] if cut else "it was detached, or made under no_grad"
    return ModelError(f"the output of {type(model).__name__} has no gradient", why, "let forward return it as it is")


@dataclass(frozen=True)
class _Seen:
    """One call of the forward pass: its outputs in the graph, and the edges by which its inputs came."""

    call: Call
    kept: list[Tensor]
    output_shape: Shape
    edges: list[Any]
    input_shape: Shape
    activation_norm: float
    activation_nonfinite: int


class _Record:
    """The hooks of the forward pass, on the model while the ``with`` block runs."""

    def __init__(self, model: nn.Module, layers: Layers, types: Iterable[Any]) -> None:
        self._seen: list[_Seen] = []
        self.observer = Observer(
            model, layers, types, self._on_call, on_input=self._on_input, on_start=lambda *_: self._seen.clear()
        )
        self._model, self._door = model, Door()
        self._watched: set[nn.Module] = set()

    def __enter__(self) -> None:
        try:
            for module in self._model.modules():
                self._door.forward_pre(module, self._parted)
            self.observer.__enter__()
        except BaseException:
            self._door.__exit__(None, None, None)
            raise
        names = {name for layer in self.observer.progress.layers for name in layer.names}
        self._watched = {module for name, module in self._model.named_modules() if name in names}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._door.__exit__(kind, error, trace)
        self.observer.__exit__(kind, error, trace)

    def _parted(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Copies of several inputs, so that what one of them has from another is not counted to the layer."""
        if module not in self._watched:
            return None
        if len({id(tensor) for tensor in tensors_in((args, kwargs)).values() if tensor.requires_grad}) < 2:
            return None
        # one tensor given twice stays one: attention looks whether its inputs are the same
        return map_tensors((args, kwargs), cache(lambda tensor: tensor.clone() if tensor.requires_grad else tensor))

    @property
    def calls(self) -> list[_Seen]:
        """The wanted calls in order of execution, once the pass is over."""
        return [seen for seen in self._seen if self.observer.wanted(seen.call)]

    def _on_input(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        from torch.autograd.graph import get_gradient_edge

        given = args[0] if len(args) == 1 and not kwargs else [*args, *kwargs.values()]
        # an edge stands for the value as it is now: a layer that works in place changes the tensor, not the edge
        edges = {get_gradient_edge(tensor) for tensor in tensors_in(given).values() if tensor.requires_grad}
        return list(edges), shape_of(given)

    def _on_call(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        kept, handed_on = keep_and_hand_on(module, args, kwargs, output)
        tensors = list(tensors_in(kept).values())
        edges, input_shape = self.observer.input
        within = [tensor for tensor in tensors if tensor.requires_grad]
        self._seen.append(_Seen(call, within, shape_of(output), edges, input_shape, *norm_and_nonfinite(tensors)))
        return handed_on


def _gradients(value: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    import torch

    return list(torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True)) if tensors else []


def _measured(seen: _Seen, arrived: Sequence[Tensor | None]) -> LayerGradient:
    import torch

    pairs = [(tensor, g) for tensor, g in zip(seen.kept, arrived, strict=True) if g is not None]
    given: list[Tensor] = []
    if pairs and seen.edges:
        outputs, gradients = zip(*pairs, strict=True)
        # backwards through this call alone: what went in may be used by others too, whose gradient is not this layer's
        back = torch.autograd.grad(outputs, seen.edges, gradients, retain_graph=True, allow_unused=True)
        given = [g for g in back if g is not None]
    return LayerGradient(
        seen.call,
        seen.output_shape,
        size_of([g for _, g in pairs]),
        seen.input_shape,
        size_of(given),
        seen.activation_norm,
        seen.activation_nonfinite,
    )


def _of_parameters(
    model: nn.Module, own: Mapping[str, Tensor], after: Mapping[str, Tensor] | None
) -> tuple[ParameterGradient, ...]:
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    found = []
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        changed = None if after is None or name not in after else size_of([after[name]])
        found.append(
            ParameterGradient(
                name,
                layer,
                types[layer],
                tuple(parameter.shape),
                size_of([own[name]]) if name in own else None,
                total_norm([parameter]),
                not parameter.requires_grad,
                changed,
            )
        )
    return tuple(found)
