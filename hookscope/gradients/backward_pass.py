"""One forward and one backward pass, with the gradients at every layer and parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookscope.columns import Column, Columns
from hookscope.display import Cells, RowTuple, Shown
from hookscope.errors import ModelError
from hookscope.gradients.autograd_flow import gradient_stops, in_graph, refuse_reentrant_checkpoints
from hookscope.gradients.modify import Change
from hookscope.hooks import (
    CALL,
    AnyModel,
    Call,
    GradientSize,
    HookHandles,
    Layers,
    Observer,
    Selection,
    Shape,
    check_hookable,
    differentiable,
    holder_of,
    keep_and_hand_on,
    layers_with_weights,
    leaves_of,
    module_of,
    names_of,
    norm_and_nonfinite,
    output_of,
    passed_on,
    shape_of,
    size_of,
    tensors_in,
    total_norm,
    was_trained,
    was_updated,
)
from hookscope.models import takes_inputs
from hookscope.scores import AnyLoss, LossLike, OwnLoss, Prediction, as_loss


def _of(gradient: str, name: str, **more: Any) -> Column:
    return Column(name, lambda row: getattr(getattr(row, gradient), name, None), **more)


def _norm_after(parameter: ParameterGradient) -> float | None:
    """The norm after the change; None without a finite value, where it is 0 as if no gradient were left."""
    after = parameter.after
    return after.norm if after is not None and after.nan + after.inf != after.count else None


GRADIENTS = Columns(
    *CALL.but(type={"where": "wide"}),
    Column("grad_output", lambda layer: layer.output_shape, need=3),
    Column("grad_output_norm", lambda layer: layer.grad_output and layer.grad_output.norm),
    Column("grad_input", lambda layer: layer.input_shape, where="wide"),
    Column("grad_input_norm", lambda layer: layer.grad_input and layer.grad_input.norm, need=5),
    _of("grad_output", "mean_abs", need=1),
    _of("grad_output", "zeros", need=6),
    _of("grad_output", "nan", hide="zero"),
    _of("grad_output", "inf", hide="zero"),
    Column("ratio"),
    Column("findings", hide="zero"),
    Column("weights", where="rows"),
)
"""What ``gradients`` says of a layer call, a `LayerGradient`."""

PARAMETER_GRADIENTS = Columns(
    Column("name"),
    Column("type", where="wide"),
    Column("shape", need=4),
    _of("gradient", "norm"),
    _of("gradient", "mean_abs", where="wide"),
    _of("gradient", "max_abs", need=2),
    _of("gradient", "zeros", need=6),
    _of("gradient", "nan", hide="zero"),
    _of("gradient", "inf", hide="zero"),
    Column("ratio"),
    Column("norm_after", _norm_after, hide="unknown"),
    Column("frozen", hide="zero"),
    Column("findings", hide="zero"),
    Column("weights", where="rows"),
)
"""What ``gradients`` says of a parameter, a `ParameterGradient`."""


@dataclass(frozen=True, slots=True, repr=False)
class LayerGradient(Shown):
    """The gradients of the loss at one layer call.

    Attributes:
        call: The call.
        output_shape: Shape of its output and of ``grad_output``.
        grad_output: The gradient at its output, None if none arrives.
        input_shape: Shape of its input and of ``grad_input``.
        grad_input: The gradient at its input through this call only, as a full backward hook has it, None if there is
            none.
        activation_norm: Euclidean norm of the finite values of its output.
        activation_nonfinite: Count of NaN and Inf in its output.
    """

    call: Call
    output_shape: Shape
    grad_output: GradientSize | None
    input_shape: Shape
    grad_input: GradientSize | None
    activation_norm: float
    activation_nonfinite: int = 0

    def _columns(self) -> Columns:
        return GRADIENTS

    @property
    def ratio(self) -> float | None:
        """Norm of ``grad_output`` over the norm of the activation."""
        return _ratio(self.grad_output, self.activation_norm)


@dataclass(frozen=True, slots=True, repr=False)
class ParameterGradient(Shown):
    """The gradient of the loss with respect to one parameter.

    Attributes:
        name: Dotted path in ``named_parameters()``.
        layer: The layer it belongs to.
        type: Class name of that layer.
        shape: Shape of the parameter.
        gradient: Its gradient, None if none arrives.
        weight_norm: Euclidean norm of the parameter.
        frozen: Whether ``requires_grad`` is False.
        after: The changed gradient, None without a change or a gradient.
    """

    name: str
    layer: str
    type: str
    shape: tuple[int, ...]
    gradient: GradientSize | None
    weight_norm: float
    frozen: bool
    after: GradientSize | None = None

    def _columns(self) -> Columns:
        return PARAMETER_GRADIENTS

    @property
    def ratio(self) -> float | None:
        """Norm of the gradient over the norm of the parameter."""
        return _ratio(self.gradient, self.weight_norm)


def _ratio(size: GradientSize | None, norm: float) -> float | None:
    return size.norm / norm if size is not None and norm > 0 else None


@dataclass(frozen=True, repr=False)
class GradientReport(Shown, rows="layers"):
    """The gradients of one backward pass.

    Attributes:
        value: Value of the loss.
        targets: The classes that the loss is computed from; empty for ``mse``.
        layers: The selected calls in order of execution.
        parameters: Every parameter of the model, in order of registration.
        did_not_run: Selected layers that the pass did not reach.
        total_norm: Common Euclidean norm of all parameter gradients.
        total_after: The same after the change, None without a change.
        loss: Name of the loss.
        saturating: Class names of the model's activation functions with bounds, such as ``Sigmoid``.
        updated: Whether the running statistics of each BatchNorm in eval mode were ever updated, by its name.
        trained: Whether the scales and biases of a BatchNorm that was never updated were trained.
    """

    value: float
    targets: tuple[Prediction, ...]
    layers: RowTuple[LayerGradient]
    parameters: RowTuple[ParameterGradient]
    did_not_run: tuple[str, ...]
    total_norm: float
    total_after: float | None = None
    loss: str = "score"
    saturating: tuple[str, ...] = ()
    updated: Mapping[str, bool] = field(default_factory=dict)
    trained: bool = False

    def _cells(self) -> Cells:
        counts = {"layers": len(self.layers), "parameters": len(self.parameters)}
        return {"loss": self.loss, "value": self.value, **counts, "total norm": self.total_norm}


_SATURATING = ("Hardsigmoid", "Hardtanh", "LogSigmoid", "Sigmoid", "Softsign", "Tanh")


@takes_inputs
def layer_gradients(
    model: AnyModel,
    inputs: Any,
    loss: LossLike = None,
    layers: Layers | None = None,
    types: Iterable[Any] | None = None,
    *,
    change: Change | None = None,
) -> GradientReport:
    """Run ``model`` forward and backward once, and measure the gradient at every selected call and every parameter.

    The model runs in eval mode. The input requires a gradient too, so that gradients flow through frozen layers. No
    ``.grad`` is written and no flag changes. In-place layers are supported: gradients are taken at tensors and edges
    of the autograd graph, not by backward hooks of modules.

    Args:
        model: Any eager module.
        inputs: The positional inputs, or the only one.
        loss: A `Loss`, the name of a loss, or a function from the model's output to a tensor with one number; None
            for the score of the most likely class.
        layers: A selection, see `Selection`; None for every layer that holds a parameter of two or more
            dimensions: convolutions, linear layers.
        types: Class names that indices count; None for Conv2d (Conv3d in models of clips).
        change: A function from gradients by parameter name to changed gradients, see `GradientChanges.of`.

    Raises:
        LayerError: There is no such layer.
        TargetError: There is no such class.
        ModelError: The loss needs class scores and there are none, the output has no gradient, or there is a reentrant
            checkpoint.
        InputError: The model refuses an image without a batch axis.
        UsageError: There is no such loss, or a function does not return one number.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1, bias=False), torch.nn.Flatten())
        >>> report = layer_gradients(net, torch.full((1, 1, 1, 1), 3.0), lambda output: output.sum())
        >>> report.layers[0].grad_output.norm, report.parameters[0].gradient.norm
        (1.0, 3.0)
    """
    loss, model = as_loss(loss, names_of(model)), module_of(model)
    check_hookable(model)
    if layers is None:
        layers = "all" if types else layers_with_weights(model)
    held = {name: norm for name, norm in model.named_modules() if not norm.training}  # use running statistics
    norms = {n: m for n, m in held.items() if None not in map(m._buffers.get, ("running_mean", "running_var"))}
    updated = {name: was_updated(norm) for name, norm in norms.items()}
    with differentiable(model):
        record = _GradientRecord(model, layers, types or None)
        with record.observer:
            output = output_of(model, *passed_on(leaves_of(inputs)))
        value, targets = loss.of(output, type(model).__name__)
        if not value.requires_grad:
            raise _without_gradient(model, inputs, loss, output)
        refuse_reentrant_checkpoints(model, value)
        calls = record.calls
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        tensors = [*(tensor for _, outputs, _ in calls for tensor in outputs), *trained.values()]
        gradients = iter(torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True) if tensors else ())
        at_layers = tuple(_measured(call, [next(gradients) for _ in call[1]]) for call in calls)
        before = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
        after = change(before) if change is not None else None
        return GradientReport(
            value=float(value.detach()),
            targets=targets,
            layers=RowTuple(at_layers),
            parameters=RowTuple(_of_parameters(model, before, after)),
            did_not_run=record.observer.progress.did_not_run,
            total_norm=total_norm(before.values()),
            total_after=None if after is None else total_norm(after.values()),
            loss=loss.name,
            saturating=tuple(name for name in _SATURATING if name in {type(m).__name__ for m in model.modules()}),
            updated=updated,
            trained=any(was_trained(norm) for name, norm in norms.items() if not updated[name]),
        )


def select_parameters(report: GradientReport, model: nn.Module, layers: Layers) -> GradientReport:
    """``report`` with the parameters of the selected layers and of their children only."""
    selection = Selection.of(layers)
    if selection.has_all:
        return report
    names = {name for name, _ in model.named_modules(remove_duplicate=False) if selection.calls_by_name([name])}
    names |= {layer.call.name for layer in report.layers}
    children = tuple(f"{name}." for name in names)
    kept = (p for p in report.parameters if "" in names or p.name.startswith(children))
    return replace(report, parameters=RowTuple(kept))


def _without_gradient(model: nn.Module, inputs: Any, loss: AnyLoss, output: Any) -> ModelError:
    """The error for a loss outside the autograd graph, which says where the graph ends."""
    if isinstance(loss, OwnLoss) and any(tensor.requires_grad for tensor in tensors_in(output).values()):
        what = f"the result of '{loss.name}' has no gradient, but the output of {type(model).__name__} has"
        return ModelError(what, do="compute it in torch, without detach, item or no_grad")
    cut = [stop.why for stop in gradient_stops(model, inputs, loss) if stop.reason != "unused"]
    why = cut[-1] if cut else "it was detached, or computed under no_grad"
    return ModelError(f"the output of {type(model).__name__} has no gradient", why, "let forward return it as it is")


_Recorded = tuple[LayerGradient, list[Tensor], list[Any]]
"""A call of the forward pass without its gradients, its outputs in the graph, and the edges of its inputs."""


class _GradientRecord:
    """The calls of one forward pass with the hooks of ``observer``."""

    def __init__(self, model: nn.Module, layers: Layers, types: Iterable[Any] | None) -> None:
        self._calls: list[_Recorded] = []
        self.observer = Observer(
            model, layers, types, self._on_call, on_input=self._on_input, on_start=lambda *_: self._calls.clear(),
            ordered=True,
        )  # fmt: skip

    @property
    def calls(self) -> list[_Recorded]:
        return [recorded for recorded in self._calls if self.observer.wanted(recorded[0].call)]

    def _on_input(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = args[0] if len(args) == 1 and not kwargs else [*args, *kwargs.values()]
        # an edge keeps standing for the current value when a layer overwrites the tensor in place
        with torch.inference_mode(False):  # the model may have enabled it
            edges = {get_gradient_edge(tensor) for tensor in tensors_in(inputs).values() if in_graph(tensor)}
        return list(edges), shape_of(inputs)

    def _on_call(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        returned, handed_on = keep_and_hand_on(module, args, kwargs, output)
        tensors = list(tensors_in(returned).values())
        edges, input_shape = self.observer.input
        layer = LayerGradient(call, shape_of(output), None, input_shape, None, *norm_and_nonfinite(tensors))
        self._calls.append((layer, [tensor for tensor in tensors if in_graph(tensor)], edges))
        return handed_on


def _through_call(outputs: Sequence[Tensor], edges: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradient at each edge through this call only.

    If one input depends on another, the path between them is blocked, because that gradient is not the layer's.
    """

    def back(nothing: Callable[[Any], Any]) -> list[Tensor]:
        with HookHandles() as handles:
            for node in {edge.node for edge in edges} if len(edges) > 1 else ():
                handles.node_before(node, lambda gradients: tuple(map(nothing, gradients)))
            at_edges = torch.autograd.grad(outputs, edges, gradients, retain_graph=True, allow_unused=True)
        return [g for g in at_edges if g is not None]

    try:
        return back(lambda _: None)  # not zeros: 0 times the slope of a square root at 0 is NaN
    except (AttributeError, TypeError):  # a tensor hook of the model expects a tensor
        return back(lambda g: g if g is None else torch.zeros_like(g))


def _measured(recorded: _Recorded, gradients: Sequence[Tensor | None]) -> LayerGradient:
    layer, outputs, edges = recorded
    pairs = [(tensor, g) for tensor, g in zip(outputs, gradients, strict=True) if g is not None]
    at_outputs = [g for _, g in pairs]
    at_inputs = _through_call([tensor for tensor, _ in pairs], edges, at_outputs) if pairs and edges else []
    return replace(layer, grad_output=size_of(at_outputs), grad_input=size_of(at_inputs))


def _of_parameters(
    model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor] | None
) -> tuple[ParameterGradient, ...]:
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    gradients = []
    for name, parameter in model.named_parameters():
        layer, shape, frozen = holder_of(name), tuple(parameter.shape), not parameter.requires_grad
        size, changed = (size_of([of[name]] if name in of else []) for of in (before, after or {}))
        norm = total_norm([parameter])
        gradients.append(ParameterGradient(name, layer, types[layer], shape, size, norm, frozen, changed))
    return tuple(gradients)
