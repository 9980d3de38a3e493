"""Scores of classes from the output of a model of any family, and the prediction for one picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import CategoriesError, ModelError, UsageError
from hookscope.findings import counted
from hookscope.hooks import shape_of, tensors_in
from hookscope.models import LoadedModel, model_errors_as_input_errors
from hookscope.scores.target import Target, class_label

_LOGITS = ("out", "logits")  # as torchvision and transformers call them
_GIVES = {"detection": "boxes, labels and scores of objects", "optical_flow": "the flow of pixels"}
_INSTEAD = "visualize, stats and `gradients --loss mse` work on it"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The score of one class.

    Attributes:
        index: Number of the class.
        label: Name of the class, None if unknown.
        score: The logit.
        probability: The softmax over all classes, 0 to 1.
    """

    index: int
    label: str | None
    score: float
    probability: float


def class_scores(output: Any, what: str = "the model") -> Tensor:
    """The scores ``(N, K)`` of ``K`` classes in a model's output, in its autograd graph.

    They are logits ``(N, K)``, alone or first in a container (auxiliary classifiers follow), or the mean over all
    positions of a segmentation model's logits ``(N, K, H, W)``, which a mapping holds under ``out`` or ``logits``.

    Args:
        output: What the model returned.
        what: Name of the model, for the error.

    Raises:
        ModelError: the output has no classes: boxes, flow, embeddings of another shape.

    Example:
        >>> class_scores(torch.tensor([[1.0, 3.0]])).shape, class_scores({"out": torch.ones(1, 21, 4, 4)}).shape
        (torch.Size([1, 2]), torch.Size([1, 21]))
    """
    logits = _first(output)
    if logits is not None:
        logits = logits.dequantize() if logits.is_quantized else logits
        if logits.is_floating_point() and logits.dim() == 2:
            return logits
        if logits.is_floating_point() and logits.dim() == 4 and isinstance(output, Mapping):
            return logits.mean((2, 3))
    raise ModelError(f"{what} gives {_described(output)}, no score for each class", do=_INSTEAD)


def _first(output: Any) -> Tensor | None:
    """The tensor that may hold the logits; None for the output of a detector or a feature pyramid."""
    if _is_a_list_of_records(output):
        return None
    within = tensors_in(output)
    named = [within[name] for name in _LOGITS if name in within]
    if named or not isinstance(output, Mapping):
        return next(iter(named or within.values()), None)
    # Maps under another name may be features: only vectors can be scores.
    first = next(iter(within.values()), None)
    return first if first is not None and first.dim() == 2 else None


def _is_a_list_of_records(output: Any) -> bool:
    """Whether it is a detector's output: boxes, labels and scores of each picture."""
    return isinstance(output, list) and bool(output) and isinstance(output[0], dict)


def _described(output: Any) -> str:
    if _is_a_list_of_records(output):
        return " and ".join(output[0])
    if isinstance(output, list):
        return f"a list of {len(output)} tensors"
    shape = shape_of(output)
    if isinstance(shape, dict):
        return ", ".join(f"{part} of {'x'.join(map(str, sizes))}" for part, sizes in list(shape.items())[:3])
    if shape is None:
        return "no tensor"
    return f"{'x'.join(map(str, shape))} values" if shape else "one value"


def check_family(family: str, what: str = "the model") -> None:
    """Refuse, before a forward pass, a model of a family without a score for each class.

    Args:
        family: The model's family, see `family_of`.
        what: Name of the model, for the error.

    Raises:
        ModelError: the family is detection or optical flow.
    """
    if family in _GIVES:
        raise ModelError(f"{what} gives {_GIVES[family]}, no score for each class", do=_INSTEAD)


def without_scores(output: Any, family: str, what: str = "the model") -> str:
    """Why ``output`` has no score for each class; empty if it has.

    Args:
        output: What the model returned.
        family: The model's family, see `family_of`.
        what: Name of the model.

    Example:
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
    """Refuse class names of another model.

    Raises:
        CategoriesError: the number of names differs from the number of classes.
    """
    if len(categories) != classes:
        named = f"{counted(len(categories), 'class name')} for {classes:,} {'class' if classes == 1 else 'classes'}"
        raise CategoriesError(f"{named} of {what}", do="give the class names of this model")


def one_picture(scores: Tensor) -> Tensor:
    """The scores ``(K,)`` of the only picture in ``(1, K)``.

    Raises:
        UsageError: the scores are of several pictures, or of none.
        ModelError: there are no classes.
    """
    if len(scores) != 1:
        raise UsageError(f"expected one picture, got {len(scores)}", do="call it for each picture")
    if not scores.shape[1]:
        raise ModelError("the model has no classes: its scores are empty", do=_INSTEAD)
    return scores[0]


def probabilities(scores: Tensor) -> Tensor:
    """The softmax of ``scores`` ``(N, K)`` over the classes, in double precision."""
    return scores.detach().cpu().double().softmax(-1)  # not every device has double precision


def predictions(scores: Tensor, categories: Sequence[str] | None, target: Target | None = None) -> list[Prediction]:
    """The classes of ``target`` with their scores for one picture, in the order of `Target.indices`.

    Args:
        scores: Logits ``(K,)``.
        categories: Names of the classes.
        target: The classes, by default the five highest scores.

    Raises:
        TargetError: no such class.
        CategoriesError: the number of names differs from the number of scores.

    Example:
        >>> [best] = predictions(torch.tensor([0.0, 2.0]), ["cat", "dog"], Target("top:1"))
        >>> best.label, best.score, round(best.probability, 3)
        ('dog', 2.0, 0.881)
    """
    if categories:
        check_categories(categories, len(scores))
    shares = probabilities(scores).tolist()
    values = scores.detach().cpu().double().tolist()
    classes = (target or Target("top:5")).indices(values, categories)
    return [Prediction(at, class_label(at, categories), values[at], shares[at]) for at in classes]


def predict(
    net: LoadedModel, pictures: Iterable[Tensor], target: Target | None = None, categories: Sequence[str] | None = None
) -> list[Prediction]:
    """The scores that ``net`` gives to the classes of ``target`` for one picture.

    Args:
        net: The loaded model.
        pictures: One prepared picture, ``(3, H, W)``, or clip, ``(3, T, H, W)``.
        target: The classes, by default the five highest scores.
        categories: Names of the classes, by default those of ``net``.

    Raises:
        ModelError: the model has no score for each class: detection, optical flow.
        TargetError: no such class.
        CategoriesError: the number of names differs from the number of classes.
        InputError: the model refuses the picture.

    Example:
        >>> from hookscope.models import load_model
        >>> net = load_model("squeezenet1_1", weights="none", device="cpu", input_size=(32, 32))
        >>> [tench] = predict(net, [torch.zeros(3, 32, 32)], Target("tench"))
        >>> tench.index, tench.label, 0 < tench.probability < 1
        (0, 'tench', True)
    """
    check_family(net.family, net.name)
    names = net.categories if categories is None else categories
    if target is not None:
        target.check(names)
    prepared = list(pictures)
    with model_errors_as_input_errors(net.name, prepared), torch.no_grad():
        scores = class_scores(net.model(*net.inputs(*prepared)), net.name)
    return predictions(one_picture(scores), names, target)
