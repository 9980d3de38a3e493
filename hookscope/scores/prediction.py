"""The prediction of a loaded model for one picture."""

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
    """The scores that ``net`` gives to the classes of ``target`` (default ``top:5``) for one prepared picture or clip.

    Raises:
        ModelError: the model has no score for each class: detection, optical flow.
        TargetError: no such class.
        CategoriesError: the number of names differs from the number of classes.
        InputError: the model refuses the picture.
    """
    check_family(net.family, net.name)
    names = net.categories if categories is None else categories
    if target is not None:
        target.check(names)
    prepared = list(pictures)
    with model_errors_as_input_errors(net.name, prepared), torch.no_grad():
        scores = class_scores(net.model(*net.inputs(*prepared)), type(net.model).__name__)
    return predictions(one_picture(scores), names, target)
