"""Layers whose weights do not suit what they read: permuted, foreign, or initialised again, with or without BatchNorm.

Training turns weights towards what they read. Two numbers show that, and neither needs a reference:

- Two input channels whose values go together have weights that go together. With the channels permuted at random this
  is chance; the distance from chance, in standard deviations, is `fit`.
- The largest singular value of random weights is known from their size (Marchenko and Pastur 1967). Trained weights
  have a larger one. The ratio is `spectrum`.

A layer is judged only against the other layers of its kind: of some layers, such as the projections of a small
transformer, training leaves neither number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.findings import CATALOGUE, Finding, default
from hookscope.hooks import as_float, class_names

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a block
_CHANNELS, _POSITIONS = 96, 256  # of a layer, and of one image: enough for both numbers, and fast
_FEWEST = 12  # channels, below which chance is wide
_PERMUTATIONS = 64
_FURTHER, _APART = 1.5, 2.5  # times chance, and how many times further all others are then
_WIDE_OTHERS, _OTHERS = 2, 4  # layers of one kind, beside the first and the one that is judged
_CHANCE, _FITS = default("unsuited-weights", "chance"), default("unsuited-weights", "fits")
_USUAL = default("unsuited-weights", "usual")
_RANDOM, _TRAINED = default("initial-weights", "random_spectrum"), default("initial-weights", "trained_spectrum")


@dataclass
class InputMoments:
    """Sums over what one layer read: of some ``channels``, at some positions of each image."""

    channels: Tensor
    count: int = 0
    total: Tensor | float = 0.0
    products: Tensor | float = 0.0

    def update(self, values: Tensor) -> None:
        """Add values ``(positions, channels)``."""
        step = max(1, len(values) // _POSITIONS)
        values = as_float(values[::step][:, self.channels.to(values.device)]).double().cpu()
        self.count += len(values)
        self.total = self.total + values.sum(0)
        self.products = self.products + values.T @ values

    def correlations(self) -> tuple[Tensor, Tensor]:
        """The channels that vary, and ``(C, C)`` their correlations."""
        mean = torch.as_tensor(self.total) / self.count
        covariance = torch.as_tensor(self.products) / self.count - mean[:, None] * mean
        spread = covariance.diagonal().clamp(min=0).sqrt()
        kept = (spread > 1e-6 * spread.max()).nonzero()[:, 0]
        spread = spread[kept]
        return self.channels[kept], covariance[kept][:, kept] / (spread[:, None] * spread)


class LayerInputs:
    """What the convolutions and Linear layers of a model read, by the name of the layer."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules() if _weights(module) is not None}
        self.moments: dict[str, InputMoments] = {}

    def update(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the input of a call; other modules have none."""
        name, values = self._names.get(module), args[0] if args else None
        if name is None or not isinstance(values, Tensor) or values.dim() < 2 or not values.numel():
            return
        axis = -1 if isinstance(module, nn.Linear) else 1
        rows = values.detach().movedim(axis, -1).flatten(0, -2)
        if name not in self.moments:
            width = rows.shape[1]
            chosen = torch.arange(width)[:: -(-width // _CHANNELS)]
            self.moments[name] = InputMoments(chosen)
        self.moments[name].update(rows)


def _weights(module: nn.Module) -> Tensor | None:
    """The weights ``(outputs, inputs, positions)`` of a convolution without groups or of a Linear layer."""
    convolves = "_ConvNd" in class_names(module) and not getattr(module, "transposed", False)
    weight = getattr(module, "weight", None)
    if not (convolves or isinstance(module, nn.Linear)) or getattr(module, "groups", 1) != 1:
        return None
    if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.is_floating_point() or weight.is_meta:
        return None
    return weight.detach()[..., None].flatten(2)


def unsuited(model: nn.Module, read: Mapping[str, InputMoments]) -> Iterator[Finding]:
    """The layers whose weights are as random as on the day they were made, or in an order that suits nothing."""
    weights = {name: weight for name, module in model.named_modules() if (weight := _weights(module)) is not None}
    wide = {name for name, weight in weights.items() if weight.shape[2] > 1}
    fits = {name: value for name in weights if name in read and (value := fit(weights[name], read[name])) is not None}
    # only where the fit is known: a first layer has few channels, and may look random
    spectra = {name: value for name in fits if (value := spectrum(weights[name])) is not None}
    random = dict(_unlike(spectra, wide, _RANDOM, _TRAINED, _TRAINED))
    unfit = dict(_unlike(fits, wide, _CHANCE, _FITS, _USUAL))
    for name in weights:
        if name in random and fits[name] <= _CHANCE:
            text = f"its largest singular value is {spectra[name]:.3g} times what random weights have;"
            text += f" {random[name]:.3g} is usual"
            numbers = {"spectrum": spectra[name], "usual": random[name], "times": random[name] / spectra[name]}
            yield CATALOGUE["initial-weights"].finding(f"{name}.weight", text, "spectrum", numbers=numbers)
        elif name in unfit:
            text = "its weights suit what they read no better than in a random order:"
            text += f" {fits[name]:.2g} standard deviations from chance, where {unfit[name]:.2g} is usual"
            numbers = {"fit": fits[name], "usual": unfit[name], "times": unfit[name] / _USUAL}
            yield CATALOGUE["unsuited-weights"].finding(f"{name}.weight", text, numbers=numbers)


def _unlike(
    values: Mapping[str, float], wide: Collection[str], low: float, least: float, usual: float
) -> Iterator[tuple[str, float]]:
    """The first layer at most at ``low`` where the others of its kind are above ``least``, with the median of these.

    Convolutions of several positions are one kind: what follows a broken one does not fit either. Other layers are of
    one kind if their names differ by a number alone, and all others are above ``usual``. The first of a kind, which
    reads simple channels, may be at chance in a sound network, and is not judged.
    """
    kinds: dict[str, list[str]] = {}
    for name in values:
        kinds.setdefault("wide" if name in wide else _NUMBER.sub("", name), []).append(name)
    for kind, (_, *names) in kinds.items():
        for name in names:
            below = [other for other in names if values[other] <= max(low, values[name])]
            others = [values[other] for other in names if other not in below]
            most, fewest, shown = (len(names) // 2, _WIDE_OTHERS, least) if kind == "wide" else (1, _OTHERS, usual)
            if len(below) > most or len(others) < fewest or min(others) < shown:
                continue
            # chance reaches further now and then: where all others are far from it, so may this layer be
            is_low = values[name] <= low or (values[name] <= _FURTHER * low and min(others) >= _APART * values[name])
            if is_low and (median := float(np.median(others))) >= usual:
                yield name, median
                break


def spectrum(weight: Tensor) -> float | None:
    """The largest singular value of ``(outputs, inputs, positions)`` over what random weights have; None for few."""
    matrix = as_float(weight[: 2 * _CHANNELS].flatten(1)[:, : 4 * _CHANNELS])
    rows, columns = matrix.shape
    size = math.sqrt(float(matrix.double().square().mean()))
    if min(rows, columns) < _FEWEST or not 0 < size < float("inf"):
        return None
    matrix = matrix if rows <= columns else matrix.T
    largest = float(torch.linalg.eigvalsh((matrix @ matrix.T).double().cpu())[-1].clamp(min=0).sqrt())
    return largest / (size * (math.sqrt(rows) + math.sqrt(columns)))


def fit(weight: Tensor, read: InputMoments) -> float | None:
    """How far weights and correlations of their inputs go together, in standard deviations from chance."""
    if read.count < 2 * _FEWEST or weight.shape[1] <= int(read.channels.max()):
        return None
    channels, together = read.correlations()
    if len(channels) < _FEWEST or not bool(together.isfinite().all()):
        return None
    own = as_float(weight[:, channels.to(weight.device)]).double().cpu()
    products = torch.einsum("ocp,odp->cd", own, own)
    sizes = products.diagonal().sqrt()
    if float(sizes.min()) <= 0:
        return None
    apart = ~torch.eye(len(channels), dtype=torch.bool)
    one, other = (table.where(apart, table[apart].mean()) for table in (products / (sizes[:, None] * sizes), together))
    one, other = one - one[apart].mean(), other - other[apart].mean()
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(channels), generator=generator) for _ in range(_PERMUTATIONS)]
    chance = torch.stack([(one[order][:, order] * other).sum() for order in orders])
    distance: Tensor = ((one * other).sum() - chance.mean()) / chance.std().clamp(min=1e-30)
    return abs(float(distance))
