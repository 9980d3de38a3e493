"""How similar the embedding of an image is to the embedding of another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import InputError, ModelError
from hookscope.hooks import tensors_in
from hookscope.images import InputImage
from hookscope.models import LoadedModel, model_errors_as_input_errors
from hookscope.scores.logits import Score, described, embeddings, is_a_list_of_records
from hookscope.scores.objective import Objective, ScoreTarget, Size


@dataclass(frozen=True, slots=True, eq=False)
class SimilarityTarget(ScoreTarget):
    """The cosine similarity of a model's embedding of an image to the embedding of a reference image, -1 to 1.

    The embedding is the vector that the model returns (of a classifier its logits), or the mean over the tokens or
    over the positions of maps that it returns. For an embedding inside a model, wrap the layers up to it in a module.

    Args:
        reference: The model's output for one reference image.
        name: The words for the reference, in tables and on pages.

    Raises:
        ModelError: the output holds no embedding, such as a detector's.
        InputError: the embedding of the reference is 0 or not finite.

    Example:
        >>> import torch, hookscope
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> image = torch.ones(1, 3, 8, 8)
        >>> [cam] = hookscope.class_activation_maps(net, image, target=SimilarityTarget(net(image)))
        >>> cam.prediction.name, round(cam.prediction.score, 4)
        ('similarity to the reference', 1.0)
    """

    reference: Any
    name: str = "the reference"

    @classmethod
    def of_picture(cls, net: LoadedModel, picture: InputImage) -> SimilarityTarget:
        """The similarity to ``picture``, which is called by the name of its file."""
        prepared = net.prepare(picture)
        with model_errors_as_input_errors(net.name, [prepared]), torch.no_grad():
            return cls(net.model(*net.inputs(prepared)), os.path.basename(picture.name))

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        reference = _embedding(self.reference, what).detach()
        length = float(reference.norm())
        if not 0 < length < float("inf"):
            raise InputError(f"the embedding of {self.name} has length {length:g}", do="choose another reference")
        own = _embedding(output, what)
        if own.shape[1] != reference.shape[1]:
            asked = f"an embedding of {own.shape[1]:,} values cannot be compared with {self.name}, which has"
            raise ModelError(f"{asked} {reference.shape[1]:,}", do="give the output of the same model")
        of = partial(_similarity, reference, what)
        value = min(float(of(output).detach()[0]), 1.0)  # rounding: 1.0000001 for the reference itself
        return [Objective(Score(None, None, value, None, target=f"similarity to {self.name}"), of)]


def _similarity(reference: Tensor, what: str, output: Any) -> Tensor:
    return torch.nn.functional.cosine_similarity(_embedding(output, what), reference)


def _embedding(output: Any, what: str) -> Tensor:
    """The embeddings ``(N, D)`` in a model's output."""
    tensors = {} if is_a_list_of_records(output) else tensors_in(output)
    tensor = next(iter([*embeddings(output), *tensors.values()]), None)
    if tensor is None or tensor.dim() not in (2, 3, 4) or not (tensor.is_floating_point() or tensor.is_quantized):
        do = "use a model that returns a vector for each image"
        raise ModelError(f"{what} gives {described(output)}, no embedding", do=do)
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))  # squares of half precision overflow
    return tensor if tensor.dim() == 2 else tensor.mean(1) if tensor.dim() == 3 else tensor.mean((2, 3))
