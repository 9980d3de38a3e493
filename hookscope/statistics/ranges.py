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
NUMBERS = ("mean", "spread", "highest", "grain", "mixture")
"""What is known of a channel on one image; a map of one position has the mean only.

``spread`` is the standard deviation of its values, ``highest`` the largest, ``grain`` the root mean square difference
of neighbours, and ``mixture`` the covariance with a fixed mixture of all channels, over the spread of the mixture.
"""


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
    """

    call: Call
    shape: tuple[int | None, ...]
    parameters: Mapping[str, tuple[int, ...]]
    images: int
    mean: Floats
    m2: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(
        cls, call: Call, values: Tensor, images: int, shape: tuple[int, ...], parameters: Mapping[str, tuple[int, ...]]
    ) -> Self:
        """The range of outputs ``(N, C, P)``, N a multiple of ``images``; the parts of an image count as one."""
        numbers = _numbers(values).double().cpu().numpy()
        numbers = numbers.reshape(images, -1, *numbers.shape[1:]).mean(1)
        mean = numbers.mean(0)
        low, high = (end.double().cpu().numpy() for end in (values.amin((0, 2)), values.amax((0, 2))))
        return cls(call, shape, parameters, images, mean, ((numbers - mean) ** 2).sum(0), low, high)

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
    mixed = _signs(values.shape[1]).to(away) @ away
    mixture = (away @ mixed[:, :, None])[:, :, 0] / (mixed.norm(dim=1, keepdim=True) * values.shape[2] ** 0.5 + 1e-30)
    return torch.stack([mean, spread, values.amax(2), grain, mixture], 1)


@functools.lru_cache(256)
def _signs(channels: int) -> Tensor:
    """A fixed sign for each channel."""
    return torch.randint(0, 2, (channels,), generator=torch.Generator().manual_seed(channels)) * 2 - 1
