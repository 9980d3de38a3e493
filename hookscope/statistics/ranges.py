"""How the output of each call varies from image to image: the range that other images of the same kind stay in."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hookscope.hooks import Call, key_of, merge_moments
from hookscope.statistics.moments import Accumulator, Floats

INPUT_CALL = "(input)"
"""Name of the call that stands for what the model gets."""
NUMBERS = ("mean", "spread", "highest", "grain")
"""What is known of a channel on one image; a map of one position has the mean only.

``spread`` is the standard deviation of its values, ``highest`` the largest, and ``grain`` the root mean square
difference of neighbours.
"""


_MIXTURES = 16


@dataclass
class CallRange(Accumulator):
    """Moments over images of a few numbers of each channel, see `NUMBERS`.

    Attributes:
        call: The call; ``(input)`` is what the model gets.
        shape: Of its output for one image, None on an axis that varies.
        parameters: Shapes of the parameters of its layer.
        images: Number of images.
        mean, m2: ``(F, C)`` mean over images, and squared distances from it.
        low, high: ``(C,)`` lowest and highest value.
        mixed, mixed_m2: ``(2, K)`` and ``(2, K, K)`` the same of K fixed mixtures of the channels, of the mean and of
            the spread: images differ in a few directions only, and what leaves these stands out.
    """

    call: Call
    shape: tuple[int | None, ...]
    parameters: Mapping[str, tuple[int, ...]]
    images: int
    mean: Floats
    m2: Floats
    low: Floats
    high: Floats
    mixed: Floats
    mixed_m2: Floats

    @classmethod
    def of(
        cls, call: Call, values: Tensor, images: int, shape: tuple[int, ...], parameters: Mapping[str, tuple[int, ...]]
    ) -> Self:
        """The range of outputs ``(N, C, P)``, N a multiple of ``images``; the parts of an image count as one."""
        numbers = _numbers(values).double().cpu().numpy()
        numbers = numbers.reshape(images, -1, *numbers.shape[1:]).mean(1)
        mean = numbers.mean(0)
        low, high = (end.double().cpu().numpy() for end in (values.amin((0, 2)), values.amax((0, 2))))
        mixed = numbers[:, :2] @ _mixtures(numbers.shape[2])
        away = mixed - mixed.mean(0)
        squares = np.einsum("nfk,nfl->fkl", away, away)
        m2 = ((numbers - mean) ** 2).sum(0)
        return cls(call, shape, parameters, images, mean, m2, low, high, mixed.mean(0), squares)

    @property
    def key(self) -> str:
        return key_of(self.call, "")

    @property
    def channels(self) -> int:
        return len(self.low)

    def merge(self, other: CallRange) -> None:
        """Add the range of the same call on other images; one with other channels is left out."""
        if self.mean.shape != other.mean.shape:
            return
        away = other.mixed - self.mixed
        share = self.images * other.images / (self.images + other.images)
        self.mixed_m2 = self.mixed_m2 + other.mixed_m2 + away[:, :, None] * away[:, None] * share
        self.mixed = self.mixed + away * other.images / (self.images + other.images)
        self.images, self.mean, self.m2 = merge_moments(
            (self.images, self.mean, self.m2), (other.images, other.mean, other.m2)
        )
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        if self.shape != other.shape:
            self.shape = tuple(a if a == b else None for a, b in zip(self.shape, other.shape, strict=False))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"call": astuple(self.call)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        parameters = {name: tuple(shape) for name, shape in state["parameters"].items()}
        about = {"call": Call(*state["call"]), "shape": tuple(state["shape"]), "parameters": parameters}
        return cls(**{**state, **about})


def _numbers(values: Tensor) -> Tensor:
    """``(N, F, C)`` the `NUMBERS` of each map of ``values`` ``(N, C, P)``."""
    mean = values.mean(2)
    if values.shape[2] == 1:
        return mean[:, None]
    away = values - mean[:, :, None]
    spread, grain = (each.square().mean(2).sqrt() for each in (away, values.diff(dim=2)))
    return torch.stack([mean, spread, values.amax(2), grain], 1)


@functools.lru_cache(256)
def _mixtures(channels: int) -> Floats:
    """``(C, K)`` fixed mixtures of the channels, or the channels themselves where they are few."""
    if channels <= _MIXTURES:
        return np.eye(channels)
    signs = np.random.default_rng(channels).integers(0, 2, (channels, _MIXTURES)) * 2 - 1
    mixtures: Floats = signs / channels**0.5
    return mixtures
