"""What a model answers: one score a class, from whatever its family puts out, and the classes with the highest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookscope.errors import CategoriesError, ModelError, UsageError
from hookscope.findings import counted
from hookscope.hooks import shape_of, tensors_in
from hookscope.scores.target import Target, class_label

_LOGITS = ("out", "logits")  # as torchvision and transformers call them
_GIVES = {"detection": "boxes, labels and scores of objects", "optical_flow": "the flow of pixels"}
_INSTEAD = "visualize, stats and `gradients --loss mse` work on it"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One class and how sure the model is of it.

    Attributes:
        index: The number of the class.
        label: Its name, None where none is known.
        score: Its logit.
        probability: Its share of the softmax over all classes, 0 to 1.
    """

    index: int
    label: str | None
    score: float
    probability: float


def class_scores(output: Any, what: str = "the model") -> Tensor:
    """The scores ``(N, K)`` of the ``K`` classes in what a model put out, in its autograd graph where it has one.

    Understood are logits ``(N, K)``, alone or first in a container (auxiliary classifiers follow), and maps of logits
    ``(N, K, H, W)`` of a segmentation model under ``out`` or ``logits``, whose mean over the positions is the score of
    a class for the picture.

    Args:
        output: What the model returned.
        what: What the model is called, for the error.

    Raises:
        ModelError: for what has no classes: boxes, flow, embeddings of another shape.

    Example:
        >>> import torch
        >>> class_scores(torch.tensor([[1.0, 3.0]])).shape, class_scores({"out": torch.ones(1, 21, 4, 4)}).shape
        (torch.Size([1, 2]), torch.Size([1, 21]))
    """
    found = _first(output)
    if found is not None:
        found = found.dequantize() if found.is_quantized else found
        if found.is_floating_point() and found.dim() == 2:
            return found
        if found.is_floating_point() and found.dim() == 4 and isinstance(output, Mapping):
            return found.mean((2, 3))
    raise ModelError(f"{what} gives {_described(output)}, no score for each class", do=_INSTEAD)


def _first(output: Any) -> Tensor | None:
    """The tensor that a container keeps the logits in; None for what detectors and pyramids of features give."""
    if _is_a_list_of_records(output):
        return None
    within = tensors_in(output)
    named = [within[name] for name in _LOGITS if name in within]
    if named or not isinstance(output, Mapping):
        return next(iter(named or within.values()), None)
    # maps under a name of another kind may be features: only vectors are taken for scores
    first = next(iter(within.values()), None)
    return first if first is not None and first.dim() == 2 else None


def _is_a_list_of_records(output: Any) -> bool:
    """What detectors give: boxes, labels and scores of each picture."""
    return isinstance(output, list) and bool(output) and isinstance(output[0], dict)


def _described(output: Any) -> str:
    if _is_a_list_of_records(output):
        return " and ".join(output[0])
    if isinstance(output, list):
        return f"a list of {len(output)} tensors"
    shape = shape_of(output)
    if isinstance(shape, dict):
        return ", ".join(f"{part} of {'x'.join(map(str, one))}" for part, one in list(shape.items())[:3])
    if shape is None:
        return "no tensor"
    return f"{'x'.join(map(str, shape))} values" if shape else "one value"


def check_family(family: str, what: str = "the model") -> None:
    """Refuse, before a forward pass, the families of models that have no score for each class.

    Args:
        family: What `family_of` says.
        what: What the model is called.

    Raises:
        ModelError: for detection and optical flow; says what can be asked of them.
    """
    if family in _GIVES:
        raise ModelError(f"{what} gives {_GIVES[family]}, no score for each class", do=_INSTEAD)


def without_scores(output: Any, family: str, what: str = "the model") -> str:
    """Why there is no score for each class in ``output``; empty where there is one.

    Args:
        output: What the model returned.
        family: What `family_of` says.
        what: What the model is called.

    Example:
        >>> import torch
        >>> without_scores(torch.zeros(1, 2, 9, 9), "optical_flow", "raft")
        'raft gives the flow of pixels, no score for each class'
    """
    try:
        check_family(family, what)
        class_scores(output, what)
    except ModelError as error:
        return error.asked
    return ""


def check_categories(categories: Sequence[str], classes: int, what: str = "the model") -> None:
    """Refuse names that are not as many as the classes: they are those of another model.

    Raises:
        CategoriesError: it says both numbers.
    """
    if len(categories) != classes:
        named = f"{counted(len(categories), 'class name')} for {classes:,} {'class' if classes == 1 else 'classes'}"
        raise CategoriesError(f"{named} of {what}", do="give --categories of the same model")


def one_picture(scores: Tensor) -> Tensor:
    """The scores ``(K,)`` of the only picture in ``(1, K)``.

    Raises:
        UsageError: for those of several pictures.
        ModelError: for no class at all.
    """
    if len(scores) != 1:
        raise UsageError(f"{len(scores)} pictures at once", "what is asked for is of one", "call it for each")
    if not scores.shape[1]:
        raise ModelError("the model has no class at all: its scores are empty", do=_INSTEAD)
    return scores[0]


def probabilities(scores: Tensor) -> Tensor:
    """The softmax of ``scores`` ``(N, K)`` over the classes, in double precision."""
    return scores.detach().cpu().double().softmax(-1)  # not every device has double precision


def predictions(scores: Tensor, categories: Sequence[str] | None, target: Target | None = None) -> list[Prediction]:
    """The classes ``target`` means, the highest score first, for the scores ``(K,)`` of one picture.

    Args:
        scores: ``(K,)`` logits.
        categories: Names of the classes.
        target: Which classes; the five with the highest scores unless given.

    Raises:
        TargetError: no such class.
        CategoriesError: another number of names than of scores.

    Example:
        >>> import torch
        >>> [found] = predictions(torch.tensor([0.0, 2.0]), ["cat", "dog"], Target("top:1"))
        >>> found.label, found.score, round(found.probability, 3)
        ('dog', 2.0, 0.881)
    """
    if categories:
        check_categories(categories, len(scores))
    share = probabilities(scores).tolist()
    values = scores.detach().cpu().double().tolist()
    chosen = (target or Target("top:5")).indices(values, categories)
    return [Prediction(at, class_label(at, categories), values[at], share[at]) for at in chosen]
