"""What one backward pass showed: the gradients of layers and of parameters, as facts. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hookscope.hooks import Call, GradientSize, Shape
from hookscope.scores import Prediction


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
    grad_output: GradientSize | None
    input_shape: Shape
    grad_input: GradientSize | None
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
    gradient: GradientSize | None
    weight_norm: float
    frozen: bool
    after: GradientSize | None = None

    @property
    def ratio(self) -> float | None:
        """The norm of the gradient by the norm of the parameter."""
        return _ratio(self.gradient, self.weight_norm)


def _ratio(size: GradientSize | None, norm: float) -> float | None:
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
        saturating: Class names of the model's activation functions that are flat at their ends, such as ``Sigmoid``.
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
