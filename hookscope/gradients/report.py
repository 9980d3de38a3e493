"""The gradients of one backward pass at layers and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hookscope.columns import Column, Columns
from hookscope.display import Cells, Shown
from hookscope.hooks import CALL, Call, GradientSize, Shape
from hookscope.scores import Prediction


def _of_output(name: str, **more: Any) -> Column:
    """A number of the gradient at the output of a layer."""
    return Column(name, lambda layer: getattr(layer.grad_output, name, None), **more)


def _of_gradient(name: str, **more: Any) -> Column:
    """A number of the gradient of a parameter."""
    return Column(name, lambda parameter: getattr(parameter.gradient, name, None), **more)


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
    _of_output("mean_abs", need=1),
    _of_output("zeros", need=6),
    _of_output("nan", hide="zero"),
    _of_output("inf", hide="zero"),
    Column("ratio"),
    Column("findings", hide="zero"),
    Column("weights", where="rows"),
)
"""What ``gradients`` says of a layer call, a `LayerGradient`."""

PARAMETER_GRADIENTS = Columns(
    Column("name"),
    Column("type", where="wide"),
    Column("shape", need=4),
    _of_gradient("norm"),
    _of_gradient("mean_abs", where="wide"),
    _of_gradient("max_abs", need=2),
    _of_gradient("zeros", need=6),
    _of_gradient("nan", hide="zero"),
    _of_gradient("inf", hide="zero"),
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

    def _cells(self) -> Cells:
        cells = {"index": self.call.index, "name": self.call.key, "type": self.call.type, "shape": self.output_shape}
        norms = {"gradient norm": self.grad_output and self.grad_output.norm, "activation norm": self.activation_norm}
        return cells | norms | {"ratio": self.ratio}

    @property
    def ratio(self) -> float | None:
        """Norm of ``grad_output`` over the norm of the activation."""
        return _ratio(self.grad_output, self.activation_norm)


@dataclass(frozen=True, slots=True)
class ParameterGradient:
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

    @property
    def ratio(self) -> float | None:
        """Norm of the gradient over the norm of the parameter."""
        return _ratio(self.gradient, self.weight_norm)


def _ratio(size: GradientSize | None, norm: float) -> float | None:
    return size.norm / norm if size is not None and norm > 0 else None


@dataclass(frozen=True, repr=False)
class GradientReport(Shown):
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
    layers: tuple[LayerGradient, ...]
    parameters: tuple[ParameterGradient, ...]
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

    def _rows(self) -> tuple[LayerGradient, ...]:
        return self.layers
