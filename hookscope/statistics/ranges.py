"""How the output of each call varies from image to image: the range that other images of the same kind stay in."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.hooks import Call, key_of, merge_moments
from hookscope.statistics.moments import Accumulator, Floats

INPUT_CALL = "(input)"
"""Name of the call that stands for what the model gets."""
READ, ANSWERS = "input", "answers"
"""Parts of a call: what it reads, if an operation made that; of the model its best class, of maps shares of classes."""
NUMBERS = ("mean", "spread", "highest", "grain")
"""What is known of a channel on one image.

``spread`` is the standard deviation of its values, ``highest`` the largest, and ``grain`` the root mean square
difference of neighbours. Where a channel has one value, these are of the whole vector, with zeros in place of grain.
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
        part: `READ`, `ANSWERS`, or empty for the output.
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
    part: str = ""

    @classmethod
    def of(
        cls, call: Call, values: Tensor, images: int, shape: tuple[int, ...], layer: nn.Module | None, part: str = ""
    ) -> Self:
        """The range of outputs ``(N, C, P)``, N a multiple of ``images``; the parts of an image count as one."""
        own = () if layer is None else layer.named_parameters(recurse=False)
        parameters = {name: tuple(parameter.shape) for name, parameter in own}
        if part == ANSWERS:
            values = nn.functional.one_hot(values.argmax(1), values.shape[1]).double().mean(1)[:, :, None]
        numbers = _numbers(values).double().cpu().numpy()
        numbers = numbers.reshape(images, -1, *numbers.shape[1:]).mean(1)
        mean = numbers.mean(0)
        low, high = (end.double().cpu().numpy() for end in (values.amin((0, 2)), values.amax((0, 2))))
        mixed = numbers[:, :2] @ _mixtures(numbers.shape[2])
        away = mixed - mixed.mean(0)
        squares = np.einsum("nfk,nfl->fkl", away, away)
        m2 = ((numbers - mean) ** 2).sum(0)
        return cls(call, shape, parameters, images, mean, m2, low, high, mixed.mean(0), squares, part)

    @property
    def key(self) -> str:
        return key_of(self.call, self.part)

    @property
    def channels(self) -> int:
        return len(self.low)

    def merge(self, other: CallRange) -> None:
        """Add the range of the same call on other images; one with other channels is left out."""
        if self.mean.shape != other.mean.shape:
            return
        _, self.mixed, self.mixed_m2 = merge_moments(
            (self.images, self.mixed, self.mixed_m2), (other.images, other.mixed, other.mixed_m2), outer=True
        )
        self.images, self.mean, self.m2 = merge_moments(
            (self.images, self.mean, self.m2), (other.images, other.mean, other.m2)
        )
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        if self.shape != other.shape:
            self.shape = tuple(a if a == b else None for a, b in zip(self.shape, other.shape, strict=False))

    def state_dict(self) -> dict[str, Any]:
        """With seven digits of each number, which take half the space of all."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        short = {name: value.astype(np.float32).astype(np.float64) for name, value in arrays.items()}
        return super().state_dict() | short | {"call": astuple(self.call)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        parameters = {name: tuple(shape) for name, shape in state["parameters"].items()}
        about = {"call": Call(*state["call"]), "shape": tuple(state["shape"]), "parameters": parameters}
        return cls(**{**state, **about})


def held_by(model: nn.Module) -> dict[str, Any]:
    """A sketch of each parameter and buffer, and the numbers that layers are set to, by name.

    A sketch has 16 sums of values with random signs; two are about as far apart as the values (Charikar et al. 2002).
    """
    held: dict[str, Any] = {}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.dim() and not each.is_complex():  # counts of batches have no axis
            flat = each.detach().double().cpu().numpy().reshape(-1)
            flat = np.pad(flat, (0, -len(flat) % _MIXTURES))
            bits = np.unpackbits(np.frombuffer(np.random.RandomState(0).bytes(len(flat) // 8), np.uint8))
            held[name] = (flat * (bits * 2.0 - 1)).reshape(-1, _MIXTURES).sum(0)
    for name, layer in model.named_modules():
        for key, value in vars(layer).items():
            numbers = value if isinstance(value, tuple) else (value,)
            if key[0] != "_" and key != "training" and all(isinstance(number, int | float) for number in numbers):
                held[f"{name}.{key}".removeprefix(".")] = str(value)
    return held


def _numbers(values: Tensor) -> Tensor:
    """``(N, F, C)`` the `NUMBERS` of each map of ``values`` ``(N, C, P)``."""
    mean = values.mean(2)
    if values.shape[2] == 1:
        whole = [mean.std(1, correction=0), mean.amax(1), (mean == 0).to(mean.dtype).mean(1)]
        return torch.stack([mean, *(each[:, None].expand_as(mean) for each in whole)], 1)
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
