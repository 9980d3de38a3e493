"""What is differentiated: the score of a class, the cross-entropy, the mean square, or a loss function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hookscope.errors import ModelError, UsageError
from hookscope.hooks import tensors_in
from hookscope.scores.logits import Prediction, class_scores, one_picture, predictions
from hookscope.scores.target import Target

LOSSES = ("score", "cross-entropy", "mse")


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar computed from a model's output.

    Attributes:
        name: ``score``: the logit of the target class, or the sum over several. ``cross-entropy``: with the target
            as label, or the mean over several. ``mse``: the mean square of all floating-point outputs, which needs no
            classes.
        target: A `Target`, class index, class name or ``top:K``.
        categories: Names of the classes.

    Raises:
        UsageError: no such loss, or a bad target.

    Example:
        >>> import torch
        >>> value, [answer] = Loss("score", "top:1").of(torch.tensor([[1.0, 5.0]]))
        >>> float(value), answer.index
        (5.0, 1)
    """

    name: str = "score"
    target: Target | str | int = "top:1"
    categories: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", Target.of(self.target))
        if self.name not in LOSSES:
            raise UsageError(f"no loss '{self.name}'", f"there are {', '.join(LOSSES)}")

    def of(self, output: Any, what: str = "the model") -> tuple[Tensor, tuple[Prediction, ...]]:
        """The value of the loss, in the graph of ``output``, and the classes that it is computed from.

        Raises:
            ModelError: the output has no scores of classes, or for ``mse`` no numbers.
            TargetError: no such class.
        """
        if self.name == "mse":
            return _mean_square(output, what), ()
        scores = class_scores(output, what)
        targets = predictions(one_picture(scores), self.categories, Target.of(self.target))
        labels = scores.new_tensor([prediction.index for prediction in targets]).long()
        if self.name == "score":
            return scores[0, labels].sum(), tuple(targets)
        return F.cross_entropy(scores.expand(len(targets), -1), labels), tuple(targets)


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A user's loss: a function from a model's output to a tensor with one number."""

    function: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """The function's name, or the name of its class."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def of(self, output: Any, what: str = "the model") -> tuple[Tensor, tuple[Prediction, ...]]:
        """The value of the loss, in the graph of ``output``, and no classes."""
        value = self.function(output)
        if not isinstance(value, torch.Tensor):
            returned = type(value).__name__
        elif value.numel() != 1:
            returned = f"{value.numel():,} numbers of shape {tuple(value.shape)}"
        elif not value.is_floating_point():
            returned = f"a number of {value.dtype}"
        else:
            return value.reshape(()), ()
        do = "return a tensor with one floating-point number"
        raise UsageError(f"'{self.name}' is not a loss: it returned {returned}", do=do)


AnyLoss = Loss | OwnLoss
LossLike = AnyLoss | str | Callable[[Any], Any] | None


def as_loss(loss: LossLike) -> AnyLoss:
    """The loss for a `Loss`, a name, a function of the model's output, or None (the score of the most likely class)."""
    if loss is None:
        return Loss()
    if isinstance(loss, Loss | OwnLoss):
        return loss
    if isinstance(loss, str):
        return Loss(loss)
    if callable(loss):
        return OwnLoss(loss)
    exists = f"there are {', '.join(LOSSES)}"
    raise UsageError(f"no loss {loss!r}", exists, "name one, or give a Loss or a function of the model's output")


def _mean_square(output: Any, what: str) -> Tensor:
    numbers = [tensor.flatten() for tensor in tensors_in(output).values() if tensor.is_floating_point()]
    numbers = [tensor for tensor in numbers if len(tensor)]
    if not numbers:
        raise ModelError(
            f"{what} returned no numbers: there is nothing to differentiate",
            "a detector without detections returns none",
            "try another picture or other weights",
        )
    return torch.cat([tensor.float() for tensor in numbers]).square().mean()
