"""Layers whose weights do not suit what they read: permuted, foreign, or initialised again, with or without BatchNorm.

Two channels whose values go together have weights that go together: training does that, and it needs no reference. With
the channels in a random order this is chance. How far a layer is from chance, in standard deviations, is its `fit`.

A layer is judged only against the other layers of its kind. Of some layers, such as the projections of a small
transformer, training leaves no fit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from hookscope.findings import CATALOGUE, Finding, default
from hookscope.hooks import as_float
from hookscope.inspection.reads import InputMoments, LayerInputs

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a block
_FEWEST = 12  # channels, below which chance is wide
_PERMUTATIONS = 64
_WIDE_OTHERS, _OTHERS = 2, 4  # layers of one kind, beside the first and the one that is judged
_CHANCE, _FITS = default("unsuited-weights", "chance"), default("unsuited-weights", "fits")
_USUAL = default("unsuited-weights", "usual")


def unsuited(read: LayerInputs) -> Iterator[Finding]:
    """The first layer of each kind whose weights suit what it reads no better than in a random order."""
    weights = read.weights
    fits = {name: value for name in weights if (value := fit(weights[name], read.moments[name])) is not None}
    wide = {name for name in fits if weights[name].shape[2] > 1}
    for name, usual in _unlike(fits, wide):
        text = "its weights fit what the layer reads no better than weights in a random order:"
        text += f" {fits[name]:.2g} standard deviations from chance, {usual:.2g} in the other layers"
        numbers = {"fit": fits[name], "usual": usual, "times": usual / _USUAL}
        yield CATALOGUE["unsuited-weights"].finding(f"{name}.weight", text, numbers=numbers)


def _unlike(fits: Mapping[str, float], wide: Collection[str]) -> Iterator[tuple[str, float]]:
    """The first layer of each kind that is at chance where others are far from it, with the median of these.

    Convolutions of several positions are one kind: what follows a broken one does not fit either. Other layers are of
    one kind if their names differ by a number alone. The first of a kind, which reads simple channels, may be at chance
    in a sound network, and is not judged.
    """
    kinds: dict[str, list[str]] = {}
    for name in fits:
        kinds.setdefault("wide" if name in wide else _NUMBER.sub("", name), []).append(name)
    for kind, (_, *names) in kinds.items():
        below = [name for name in names if fits[name] <= _CHANCE]
        others = [fits[name] for name in names if name not in below]
        most, fewest, least = (len(names) // 2, _WIDE_OTHERS, _FITS) if kind == "wide" else (1, _OTHERS, _USUAL)
        if 0 < len(below) <= most and len(others) >= fewest and min(others) >= least:
            usual = float(np.median(others))
            yield from [(below[0], usual)] * (usual >= _USUAL)


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
