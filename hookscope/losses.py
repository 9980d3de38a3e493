"""What is differentiated: the score of a class, the cross-entropy with a label, or the mean square of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, UsageError
from hookscope.scores import Prediction, class_scores, predictions
from hookscope.targets import Target
from hookscope.tensors import tensors_in

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOSSES", "Loss"]

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
        from torch.nn import functional as F

        scores = class_scores(output, what)
        if len(scores) != 1:
            raise UsageError(f"{len(scores)} pictures at once", "a loss is of one", "call it for each")
        found = predictions(scores[0], self.categories, Target(str(self.target)))
        wanted = scores.new_tensor([answer.index for answer in found]).long()
        if self.name == "score":
            return scores[0, wanted].sum(), tuple(found)
        return F.cross_entropy(scores.expand(len(found), -1), wanted), tuple(found)


def _mean_square(output: Any, what: str) -> Tensor:
    import torch

    numbers = [tensor.flatten() for tensor in tensors_in(output).values() if tensor.is_floating_point()]
    numbers = [tensor for tensor in numbers if len(tensor)]
    if not numbers:
        raise ModelError(f"{what} put out no number: there is nothing to differentiate")
    return torch.cat([tensor.float() for tensor in numbers]).square().mean()
