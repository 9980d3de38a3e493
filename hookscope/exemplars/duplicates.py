"""Which images are near-duplicates: copies, re-encoded or resized ones, and ones a little brighter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from hookscope.hooks import as_float

_SIDE = 12  # with 8, small objects on one background are near-duplicates; with 16, JPEG files of low quality are none
_CLIP = (3, 7, 7)
_TOLERANCE = 0.3
_FLAT = 2e-3  # for images of one colour, in units of the input
_LARGEST = 6e4  # of float16
_PAIRS = 4096  # of images, compared at a time

Ints = NDArray[np.int64]

Prints = NDArray[np.float16]
"""``(N, D)``: a small picture of each image, see `prints_of`."""


def prints_of(images: Any) -> Prints:
    """A block mean value hash of each prepared image: the means of its colours in 12 x 12 blocks, not rounded to bits.

    ``images`` are the first input of the model, a tensor or a list of tensors. A clip has 7 x 7 blocks of 3 moments.
    The hash is that of Yang, Gu and Niu (Block Mean Value Based Image Perceptual Hashing, 2006) before its last step: a
    bit of a smooth background is a matter of chance, its mean is not.
    """
    parts = list(images) if isinstance(images, (list, tuple)) else [images]
    listed = parts[0] is not images
    prints = [_print_of(as_float(part)[None] if listed else as_float(part)) for part in parts]
    return np.concatenate(prints)


def _print_of(images: Tensor) -> Prints:
    if images.dim() == 5:
        blocks = F.adaptive_avg_pool3d(images, _CLIP)
    elif images.dim() == 4:
        blocks = F.adaptive_avg_pool2d(images, _SIDE)
    else:
        blocks = images
    flat: Prints = blocks.flatten(1).clamp(-_LARGEST, _LARGEST).to("cpu", torch.float16).numpy()
    return flat


class Duplicates:
    """Which of some images, with hashes ``(U, D)``, are near-duplicates.

    No mean may differ by more than 0.3 standard deviations of the means, the larger one of the two images. Of drawings
    and photographs, copies in JPEG of quality 50 to 95, of half to twice the size, or one level brighter differ by 0.27
    at most, other images by 1.6 at least, and two objects drawn on one background by 0.33 at least.
    """

    def __init__(self, prints: Prints) -> None:
        self._prints = prints.astype(np.float32)
        self._most = _TOLERANCE * self._prints.std(1) + _FLAT
        self._mean = self._prints.mean(1)

    def __call__(self, images: Ints, others: Ints) -> NDArray[np.bool_]:
        """Whether the images ``(E,)`` are near-duplicates of ``others`` ``(E,)``, by their rows; one is of itself."""
        near: NDArray[np.bool_] = images == others
        most = np.maximum(self._most[images], self._most[others])
        perhaps = np.flatnonzero(~near & (np.abs(self._mean[images] - self._mean[others]) <= most))
        pairs, at = np.unique(images[perhaps] * len(self._mean) + others[perhaps], return_inverse=True)
        same = np.zeros(len(pairs), bool)
        for first in range(0, len(pairs), _PAIRS):
            one, other = np.divmod(pairs[first : first + _PAIRS], len(self._mean))
            apart = np.abs(self._prints[one] - self._prints[other]).max(1, initial=0)
            same[first : first + _PAIRS] = apart <= np.maximum(self._most[one], self._most[other])
        near[perhaps] = same[at]
        return near
