"""One forward pass of a loaded model: what it answers to a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hookscope.models import LoadedModel, model_errors_as_input_errors
from hookscope.scores.logits import Prediction, check_family, class_scores, one_picture, predictions
from hookscope.scores.target import Target


def predict(
    net: LoadedModel, pictures: Iterable[Tensor], target: Target | None = None, categories: Sequence[str] | None = None
) -> list[Prediction]:
    """The classes that ``net`` gives to a picture, the highest score first.

    Args:
        net: What `load_model` returned.
        pictures: What its ``preprocess`` made, ``(3, H, W)`` or a clip: one.
        target: Which classes; the five with the highest scores unless given.
        categories: Names of the classes; those of ``net`` unless given.

    Raises:
        ModelError: a model without a score for each class: detection, optical flow.
        TargetError: no such class.
        CategoriesError: another number of names than of classes.
        InputError: the model refuses the picture.

    Example:
        >>> import torch
        >>> from hookscope.models import load_model
        >>> net = load_model("squeezenet1_1", weights="none", device="cpu", input_size=(32, 32))
        >>> [found] = predict(net, [torch.zeros(3, 32, 32)], Target("tench"))
        >>> found.index, found.label, 0 < found.probability < 1
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
