"""What is differentiated: the score of a class, the cross-entropy with a label, the mean square, or one's own loss."""

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
    """A number made from what a model put out.

    Attributes:
        name: ``score``, the logit of the target class, of several their sum; ``cross-entropy`` with the target as
            label, of several the mean; ``mse``, the mean square of every floating-point number of the output, the
            squared error against zeros, for which a model needs no classes.
        target: A class index, a class name or ``top:K``.
        categories: Names of the classes.

    Raises:
        UsageError: no such loss.

    Example:
        >>> import torch
        >>> value, [answer] = Loss("score", "top:1").of(torch.tensor([[1.0, 5.0]]))
        >>> float(value), answer.index
        (5.0, 1)
    """

    name: str = "score"
    target: str = "top:1"
    categories: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise UsageError(f"no loss '{self.name}'", f"there are {', '.join(LOSSES)}")

    def of(self, output: Any, what: str = "the model") -> tuple[Tensor, tuple[Prediction, ...]]:
        """The value of the loss, in the graph of ``output``, and the classes it was made from.

        Raises:
            ModelError: no scores of classes, or for ``mse`` no number at all.
            TargetError: no such class.
        """
        if self.name == "mse":
            return _mean_square(output, what), ()
        scores = class_scores(output, what)
        found = predictions(one_picture(scores), self.categories, Target(str(self.target)))
        wanted = scores.new_tensor([answer.index for answer in found]).long()
        if self.name == "score":
            return scores[0, wanted].sum(), tuple(found)
        return F.cross_entropy(scores.expand(len(found), -1), wanted), tuple(found)


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """A loss that somebody wrote: a function from what a model put out to a tensor with one number.

    Attributes:
        function: What computes it.
    """

    function: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """The function's name, or that of its class."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def of(self, output: Any, what: str = "the model") -> tuple[Tensor, tuple[Prediction, ...]]:
        """The value of the loss, in the graph of ``output``; it is made from no class that is known.

        Raises:
            UsageError: the function gives anything but one real number in a tensor.
        """
        value = self.function(output)
        if not isinstance(value, torch.Tensor):
            gives = f"it gives a {type(value).__name__}"
        elif value.numel() != 1:
            gives = f"it gives {value.numel():,} numbers, of shape {tuple(value.shape)}"
        elif not value.is_floating_point():
            gives = f"it gives a number of {value.dtype}"
        else:
            return value.reshape(()), ()
        raise UsageError(f"'{self.name}' is no loss", gives, "return a tensor with one floating-point number")


AnyLoss = Loss | OwnLoss
LossLike = AnyLoss | str | Callable[[Any], Any] | None


def as_loss(loss: LossLike) -> AnyLoss:
    """A loss, the name of one, a function of the model's output, or None for the score of the most likely class.

    Raises:
        UsageError: anything else, or a name that there is not.

    Example:
        >>> as_loss("mse").name, as_loss(None).name
        ('mse', 'score')
        >>> def largest(output): return output.max()
        >>> as_loss(largest).name
        'largest'
    """
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
            f"{what} put out no number: there is nothing to differentiate",
            "a detector that finds nothing gives none",
            "try another picture or other weights",
        )
    return torch.cat([tensor.float() for tensor in numbers]).square().mean()
