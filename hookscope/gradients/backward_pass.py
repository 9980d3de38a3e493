"""One forward and one backward pass, with the gradients at every layer and parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookscope.errors import HookscopeError, InputError, LayerError, ModelError, UsageError, nearest
from hookscope.findings import listed
from hookscope.gradients.autograd_flow import in_graph, refuse_reentrant_checkpoints
from hookscope.gradients.cut_points import gradient_stops
from hookscope.gradients.modify import (
    ClampGradientSign,
    ClipGradientValue,
    ScaleGradient,
    ZeroGradient,
    check_positive,
    clip_total_norm,
)
from hookscope.gradients.report import GradientReport, LayerGradient, ParameterGradient
from hookscope.hooks import (
    AnyModel,
    Call,
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
    norm_and_nonfinite,
    passed_on,
    shape_of,
    size_of,
    tensors_in,
    total_norm,
    was_trained,
    was_updated,
)
from hookscope.scores import AnyLoss, LossLike, OwnLoss, as_loss

Change = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class GradientChanges:
    """Changes of all parameter gradients, applied in this order: freeze, scale, sign, clip value, clip norm.

    ``freeze`` names layers (with their children) or parameters whose gradients become 0; gradients that flow through
    these layers stay unchanged. The clips are as in `torch.nn.utils`, ``sign`` is as in `ClampGradientSign`.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        >>> change = GradientChanges(freeze=("0",), clip_value=2.0).of(net)
        >>> {name: g.tolist() for name, g in change({"0.bias": torch.ones(1), "1.bias": torch.full((1,), 9.0)}).items()}
        {'0.bias': [0.0], '1.bias': [2.0]}
    """

    freeze: tuple[str, ...] = ()
    clip_value: float | None = None
    clip_norm: float | None = None
    scale: float | None = None
    sign: str | None = None

    def __post_init__(self) -> None:
        for name, limit in (("clip value", self.clip_value), ("clip norm", self.clip_norm)):
            if limit is not None:
                check_positive(name, limit)
        if self.scale is not None and not math.isfinite(self.scale):
            raise UsageError(f"scale {self.scale:g} is not finite", do="give a finite factor")
        if self.sign is not None:
            ClampGradientSign(self.sign)
        for term in _terms(self.freeze):
            if term.has_call_numbers:
                raise UsageError(f"cannot freeze '{term}'", "freeze takes names, not calls", "name a layer: conv1")

    def __bool__(self) -> bool:
        return self != GradientChanges()

    def describe(self) -> list[str]:
        """The changes in the order in which they are applied: ``['freezing fc', 'clipping the norm to 1']``."""
        steps = [f"freezing {', '.join(self.freeze)}"] if self.freeze else []
        steps += [f"scaling by {self.scale:g}"] if self.scale is not None else []
        steps += [f"clamping to {self.sign}"] if self.sign is not None else []
        steps += [f"clipping values to ±{self.clip_value:g}"] if self.clip_value is not None else []
        return steps + ([f"clipping the norm to {self.clip_norm:g}"] if self.clip_norm is not None else [])

    def frozen(self, model: nn.Module, model_name: str = "") -> tuple[str, ...]:
        """Names of the parameters of ``model`` that ``freeze`` selects."""
        parameters = [name for name, _ in model.named_parameters()]
        layers = [name for name, _ in model.named_modules(remove_duplicate=False)]
        frozen: set[str] = set()
        for term in _terms(self.freeze):
            frozen.update([str(term)] if str(term) in parameters else _inside(term, layers, parameters, model_name))
        return tuple(name for name in parameters if name in frozen)

    def of(self, model: nn.Module, model_name: str = "") -> Change:
        """The change as a function from gradients by parameter name to new gradients.

        ``model_name`` is the name of the model on the command line, for the LayerError of an unknown name.
        """
        frozen = set(self.frozen(model, model_name))
        steps: list[Callable[[Tensor], Tensor]] = []
        steps += [ScaleGradient(self.scale)] if self.scale is not None else []
        steps += [ClampGradientSign(self.sign)] if self.sign is not None else []
        steps += [ClipGradientValue(self.clip_value)] if self.clip_value is not None else []

        def change(gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            changed = {name: ZeroGradient()(g) if name in frozen else g for name, g in gradients.items()}
            for step in steps:
                changed = {name: step(gradient) for name, gradient in changed.items()}
            if self.clip_norm is not None:
                changed = dict(zip(changed, clip_total_norm(changed.values(), self.clip_norm), strict=True))
            return changed

        return change


def _terms(freeze: tuple[str, ...]) -> tuple[Selection, ...]:
    """One selection for each name or pattern."""
    if freeze and not "".join(freeze).strip(", "):
        raise UsageError("nothing to freeze", do="name a layer or a parameter")
    return Selection(freeze).terms if freeze else ()


def _inside(selection: Selection, layers: Sequence[str], parameters: Sequence[str], model_name: str) -> list[str]:
    """The parameters of every layer that ``selection`` names, and of their children; a number is a name here."""
    term = str(selection)
    chosen = [term] if term in layers else [name for name in layers if selection.calls_by_name([name])]
    frozen = [p for p in parameters if any(not name or p.startswith(f"{name}.") for name in chosen)]
    if not chosen:
        outline = listed(list(dict.fromkeys(name.partition(".")[0] for name in parameters)), 6)
        some = nearest(term, [*layers, *parameters]) or f"there are {outline or 'no parameters'}"
        how = f"list them with `hookscope weights {model_name}`" if model_name else ""
        raise LayerError(f"no layer or parameter '{term}'", some, how)
    if not frozen:
        raise LayerError(f"cannot freeze '{term}'", "it has no parameters", "name another layer")
    return frozen


_SATURATING = ("Hardsigmoid", "Hardtanh", "LogSigmoid", "Sigmoid", "Softsign", "Tanh")


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
    model = module_of(model)
    loss = as_loss(loss)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    check_hookable(model)
    if layers is None:
        layers = "all" if types else layers_with_weights(model)
    norms = {name: norm for name, norm in model.named_modules() if _uses_running_statistics(norm)}
    updated = {name: was_updated(norm) for name, norm in norms.items()}
    with differentiable(model):
        record = _Record(model, layers, types or None)
        with _missing_batch_axis_named(model, inputs), record.observer:
            output = model(*passed_on(leaves_of(inputs)))
        value, targets = loss.of(output, type(model).__name__)
        if not value.requires_grad:
            raise _without_gradient(model, inputs, loss, output)
        refuse_reentrant_checkpoints(model, value)
        calls = record.calls
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        tensors = [*(tensor for call in calls for tensor in call.outputs), *trained.values()]
        gradients = iter(torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True) if tensors else ())
        at_layers = tuple(_measured(call, [next(gradients) for _ in call.outputs]) for call in calls)
        before = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
        after = change(before) if change is not None else None
        return GradientReport(
            value=float(value.detach()),
            targets=targets,
            layers=at_layers,
            parameters=_of_parameters(model, before, after),
            did_not_run=record.observer.progress.did_not_run,
            total_norm=total_norm(before.values()),
            total_after=None if after is None else total_norm(after.values()),
            loss=loss.name,
            saturating=tuple(name for name in _SATURATING if name in {type(m).__name__ for m in model.modules()}),
            updated=updated,
            trained=any(was_trained(norm) for name, norm in norms.items() if not updated[name]),
        )


def _uses_running_statistics(module: nn.Module) -> bool:
    buffers = module._buffers
    return not module.training and None not in (buffers.get("running_mean"), buffers.get("running_var"))


def select_parameters(report: GradientReport, model: nn.Module, layers: Layers) -> GradientReport:
    """``report`` with the parameters of the selected layers and of their children only."""
    selection = Selection.of(layers)
    if selection.has_all:
        return report
    names = {name for name, _ in model.named_modules(remove_duplicate=False) if selection.calls_by_name([name])}
    names |= {layer.call.name for layer in report.layers}
    children = tuple(f"{name}." for name in names)
    return replace(report, parameters=tuple(p for p in report.parameters if "" in names or p.name.startswith(children)))


@contextmanager
def _missing_batch_axis_named(model: nn.Module, inputs: tuple[Any, ...]) -> Iterator[None]:
    """Turn the error of a model on an image ``(3, H, W)`` into one that names the missing batch axis."""
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
        asked = f"{type(model).__name__}: forward() failed on an image of {shape}: {' '.join(str(error).split())[:200]}"
        batch = ", ".join(map(str, (1, *shape)))
        raise InputError(asked, "it has no batch axis", f"give it as ({batch}): x[None]") from error


def _without_gradient(model: nn.Module, inputs: Any, loss: AnyLoss, output: Any) -> ModelError:
    """The error for a loss outside the autograd graph, which says where the graph ends."""
    if isinstance(loss, OwnLoss) and any(tensor.requires_grad for tensor in tensors_in(output).values()):
        what = f"the result of '{loss.name}' has no gradient, but the output of {type(model).__name__} has"
        return ModelError(what, do="compute it in torch, without detach, item or no_grad")
    cut = [stop.why for stop in gradient_stops(model, inputs, loss) if stop.reason != "unused"]
    why = cut[-1] if cut else "it was detached, or computed under no_grad"
    return ModelError(f"the output of {type(model).__name__} has no gradient", why, "let forward return it as it is")


@dataclass(frozen=True)
class _RecordedCall:
    """One call of the forward pass: its outputs in the graph, and the edges of its inputs."""

    call: Call
    outputs: list[Tensor]
    output_shape: Shape
    edges: list[Any]
    input_shape: Shape
    activation_norm: float
    activation_nonfinite: int


class _Record:
    """The calls of one forward pass with the hooks of ``observer``."""

    def __init__(self, model: nn.Module, layers: Layers, types: Iterable[Any] | None) -> None:
        self._calls: list[_RecordedCall] = []
        self.observer = Observer(
            model, layers, types, self._on_call, on_input=self._on_input, on_start=lambda *_: self._calls.clear(),
            ordered=True,
        )  # fmt: skip

    @property
    def calls(self) -> list[_RecordedCall]:
        """The selected calls in order of execution, after the pass."""
        return [recorded for recorded in self._calls if self.observer.wanted(recorded.call)]

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
        outputs = [tensor for tensor in tensors if in_graph(tensor)]
        self._calls.append(
            _RecordedCall(call, outputs, shape_of(output), edges, input_shape, *norm_and_nonfinite(tensors))
        )
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


def _measured(recorded: _RecordedCall, gradients: Sequence[Tensor | None]) -> LayerGradient:
    pairs = [(tensor, g) for tensor, g in zip(recorded.outputs, gradients, strict=True) if g is not None]
    at_inputs: list[Tensor] = []
    if pairs and recorded.edges:
        at_inputs = _through_call([tensor for tensor, _ in pairs], recorded.edges, [g for _, g in pairs])
    return LayerGradient(
        recorded.call,
        recorded.output_shape,
        size_of([g for _, g in pairs]),
        recorded.input_shape,
        size_of(at_inputs),
        recorded.activation_norm,
        recorded.activation_nonfinite,
    )


def _of_parameters(
    model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor] | None
) -> tuple[ParameterGradient, ...]:
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    gradients = []
    for name, parameter in model.named_parameters():
        layer = holder_of(name)
        gradient = ParameterGradient(
            name,
            layer,
            types[layer],
            tuple(parameter.shape),
            size_of([before[name]]) if name in before else None,
            total_norm([parameter]),
            not parameter.requires_grad,
            size_of([after[name]]) if after is not None and name in after else None,
        )
        gradients.append(gradient)
    return tuple(gradients)
