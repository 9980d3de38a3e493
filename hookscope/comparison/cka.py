"""Linear CKA of layers, added up over batches: each layer of a batch is an n x n matrix, whatever its size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks import as_plain

LEAST_IMAGES = 4
"""Fewer images in a batch say nothing: the unbiased estimate divides by n - 3."""

_SLICE = 1 << 17  # values that are converted to double precision at a time: they stay in the cache
_ROUNDING = 1e-12  # of the norm of a Gram matrix: what is left of a constant layer is below


def gram(output: Tensor) -> Tensor:
    """``(n, n)`` scalar products in float64 of the images of ``output`` ``(n, ...)``, without their common offset."""
    output = as_plain(output)
    features = (torch.view_as_real(output) if output.is_complex() else output)[..., None].flatten(1)
    products = torch.zeros(len(features), len(features), dtype=torch.float64, device=features.device)
    for part in features.split(max(1, _SLICE // max(1, len(features))), 1):
        part = part.double()
        part = part - part[:1]  # exactly 0 where all images are equal
        part = part - part.mean(0)
        products += part @ part.T
    return products.cpu()


def _centred(gram: Tensor | None, images: int) -> Tensor:
    """``(n * n,)``: the U-centred matrix, of which two have the scalar product ``n (n - 3) HSIC_1``.

    Székely and Rizzo 2014, Partial distance correlation with methods for dissimilarities, proposition 1.
    """
    if gram is None or gram.shape != (images, images):
        return torch.full((images * images,), torch.nan, dtype=torch.float64)
    hollow = gram.clone().fill_diagonal_(0)
    rows = hollow.sum(1) / (images - 2)
    centred = (hollow - rows[:, None] - rows + rows.sum() / (images - 1)).fill_diagonal_(0)
    if centred.norm() <= _ROUNDING * gram.norm():
        centred.zero_()
    return centred.flatten()


class CkaSums:
    """Minibatch linear CKA of every layer of A against every layer of B (Nguyen et al. 2020, arXiv:2010.15327).

    The unbiased HSIC_1 of batches is added up, each with the weight ``n (n - 3)``: for batches of equal size this is
    the paper's mean. Batches with fewer than four images do not count.
    """

    def __init__(self, of_a: int, of_b: int) -> None:
        self._products = torch.zeros(of_a, of_b, dtype=torch.float64)
        self._own_a, self._own_b = (torch.zeros(number, dtype=torch.float64) for number in (of_a, of_b))

    def add(self, grams_a: Sequence[Tensor | None], grams_b: Sequence[Tensor | None]) -> None:
        """Add a batch: the `gram` of each layer; None where a layer has none.

        The first gram says how many images the batch has; layers with another number have no CKA.
        """
        images = next((len(gram) for gram in (*grams_a, *grams_b) if gram is not None), 0)
        if images < LEAST_IMAGES:
            return
        a, b = (torch.stack([_centred(gram, images) for gram in grams]) for grams in (grams_a, grams_b))
        self._products += a @ b.T
        self._own_a += a.square().sum(1)
        self._own_b += b.square().sum(1)

    @property
    def matrix(self) -> NDArray[np.float64]:
        """``(A, B)``; NaN where a layer is constant or not finite."""
        values = self._products / self._own_a.sqrt()[:, None] / self._own_b.sqrt()
        return np.asarray(values).round(12)  # so that 1 is 1


class PairCka:
    """Minibatch linear CKA of one pair of layers, as `CkaSums` computes it."""

    def __init__(self) -> None:
        self._sums = CkaSums(1, 1)

    def add(self, features_a: Tensor, features_b: Tensor) -> None:
        self._sums.add([gram(features_a)], [gram(features_b)])

    @property
    def value(self) -> float | None:
        """The CKA; None where a layer is constant or not finite, and without a batch of at least four images."""
        value = float(self._sums.matrix[0, 0])
        return value if np.isfinite(value) else None
