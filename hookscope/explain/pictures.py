"""The one picture among a model's inputs, and further pictures in its place."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def picture_of(inputs: tuple[Any, ...]) -> Tensor | None:
    """The picture ``(1, C, H, W)``, or the clip, if it is the only input.

    Detectors of torchvision take a list of pictures ``(C, H, W)``.
    """
    only = inputs[0] if len(inputs) == 1 else None
    if isinstance(only, list) and len(only) == 1 and isinstance(only[0], Tensor) and only[0].dim() == 3:
        return only[0][None]
    return only if isinstance(only, Tensor) else None


def in_place_of(inputs: tuple[Any, ...], pictures: Tensor) -> tuple[Any, ...]:
    """The inputs for ``pictures`` ``(N, C, H, W)``, in the form of ``inputs``."""
    return (list(pictures),) if isinstance(inputs[0], list) else (pictures,)
