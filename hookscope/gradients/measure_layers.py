"""One forward and one backward pass: what gradient every layer gets and gives, and what every parameter gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookscope.errors import HookscopeError, InputError, ModelError
from hookscope.gradients.autograd_flow import in_graph, refuse_reentrant_checkpoints
from hookscope.gradients.changes import Change
from hookscope.gradients.cut_points import gradient_stops
from hookscope.gradients.report import GradientReport, LayerGradient, ParameterGradient
from hookscope.hooks import (
    Call,
    HookHandles,
    Layers,
    Observer,
    Shape,
    check_hookable,
    class_names,
    differentiable,
    keep_and_hand_on,
    layers_with_weights,
    leaves_of,
    norm_and_nonfinite,
    passed_on,
    shape_of,
    size_of,
    tensors_in,
    total_norm,
    usual_types,
)
from hookscope.scores import AnyLoss, LossLike, OwnLoss, as_loss

_SATURATING = ("Hardsigmoid", "Hardtanh", "LogSigmoid", "Sigmoid", "Softsign", "Tanh")


def layer_gradients(
    model: nn.Module,
    inputs: Any,
    loss: LossLike = None,
    layers: Layers | None = None,
    types: Iterable[Any] | None = None,
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
        loss: What is differentiated: a `Loss`, the name of one, or a function from the model's output to a tensor with
            one number; the score of the most likely class unless given.
        layers: A selection, see `Selection`; None for every layer without children that has a
            parameter of two or more dimensions: convolutions, linear layers.
        types: Class names that indices count; None for Conv2d (Conv3d in models of clips).
        change: From the parameters' gradients by name to what an optimizer shall see of them.

    Raises:
        LayerError: no such layer.
        TargetError: no such class.
        ModelError: no scores of classes where the loss needs them, an output without a gradient, or a reentrant
            checkpoint.
        InputError: the model refuses a picture that has no batch axis.
        UsageError: no such loss, or a function that gives no number.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1, bias=False), torch.nn.Flatten())
        >>> report = layer_gradients(net, torch.full((1, 1, 1, 1), 3.0), lambda output: output.sum())
        >>> report.layers[0].grad_output.norm, report.parameters[0].gradient.norm
        (1.0, 3.0)
    """
    loss = as_loss(loss)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    check_hookable(model)
    if layers is None:
        layers = "all" if types else layers_with_weights(model)
    types = types or usual_types(map(class_names, model.modules()))
    with differentiable(model):
        record = _Record(model, layers, types)
        with _missing_batch_axis_told(model, inputs), record:
            output = model(*passed_on(leaves_of(inputs)))
        value, targets = loss.of(output, type(model).__name__)
        if not value.requires_grad:
            raise _without_gradient(model, inputs, loss, output)
        refuse_reentrant_checkpoints(model, value)
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
            saturating=_saturating(model),
        )


def _saturating(model: nn.Module) -> tuple[str, ...]:
    found = {type(module).__name__ for module in model.modules()}
    return tuple(name for name in _SATURATING if name in found)


@contextmanager
def _missing_batch_axis_told(model: nn.Module, inputs: tuple[Any, ...]) -> Iterator[None]:
    """What a model raises on a picture ``(3, H, W)``, as an error that says what is missing."""
    try:
        yield
    except (HookscopeError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        first = [m.in_channels for m in model.modules() if isinstance(m, torch.nn.Conv2d)][:1]
        single = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 3 and len(x) in (first or (1, 3))]
        if not single:
            raise
        shape = tuple(single[0].shape)
        asked = f"{type(model).__name__} refuses a picture of {shape}: {' '.join(str(error).split())[:200]}"
        batch = ", ".join(map(str, (1, *shape)))
        raise InputError(asked, "it has no batch axis", f"give it as ({batch}): x[None]") from error


def _without_gradient(model: nn.Module, inputs: Any, loss: AnyLoss, output: Any) -> ModelError:
    """The error for a value that is no part of a graph: it says where the graph ends."""
    if isinstance(loss, OwnLoss) and any(tensor.requires_grad for tensor in tensors_in(output).values()):
        what = f"what '{loss.name}' gives has no gradient, though the output of {type(model).__name__} has"
        return ModelError(what, do="compute it in torch, without detach, item or no_grad")
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

    def __enter__(self) -> None:
        self.observer.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.observer.__exit__(kind, error, trace)

    @property
    def calls(self) -> list[_Seen]:
        """The wanted calls in order of execution, once the pass is over."""
        return [seen for seen in self._seen if self.observer.wanted(seen.call)]

    def _on_input(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and not kwargs else [*args, *kwargs.values()]
        # an edge stands for the value as it is now: a layer that works in place changes the tensor, not the edge
        with torch.inference_mode(False):  # the model may have turned it on
            edges = {get_gradient_edge(tensor) for tensor in tensors_in(given).values() if in_graph(tensor)}
        return list(edges), shape_of(given)

    def _on_call(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        kept, handed_on = keep_and_hand_on(module, args, kwargs, output)
        tensors = list(tensors_in(kept).values())
        edges, input_shape = self.observer.input
        within = [tensor for tensor in tensors if in_graph(tensor)]
        self._seen.append(_Seen(call, within, shape_of(output), edges, input_shape, *norm_and_nonfinite(tensors)))
        return handed_on


def _gradients(value: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True)) if tensors else []


def _through_call(outputs: Sequence[Tensor], edges: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients at ``edges`` by way of the call alone, which others may use too.

    Of several inputs one may be made from another: what flows from it to the other is not the layer's, and ends at
    the edge, once it is measured. The forward pass knows nothing of it, so that no result differs.
    """

    def back(nothing: Callable[[Any], Any]) -> list[Tensor]:
        with HookHandles() as door:
            for node in {edge.node for edge in edges} if len(edges) > 1 else ():
                door.node_before(node, lambda taken: tuple(map(nothing, taken)))
            found = torch.autograd.grad(outputs, edges, gradients, retain_graph=True, allow_unused=True)
        return [g for g in found if g is not None]

    try:
        return back(lambda _: None)  # no zeros: 0 times the slope of a root at 0 is NaN
    except (AttributeError, TypeError):  # a tensor hook of the model's own, which wants a tensor
        return back(lambda g: g if g is None else torch.zeros_like(g))


def _measured(seen: _Seen, arrived: Sequence[Tensor | None]) -> LayerGradient:
    pairs = [(tensor, g) for tensor, g in zip(seen.kept, arrived, strict=True) if g is not None]
    given: list[Tensor] = []
    if pairs and seen.edges:
        outputs, gradients = zip(*pairs, strict=True)
        given = _through_call(outputs, seen.edges, gradients)
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
