"""Named findings on statistics: what is dead, saturated, vanishing, exploding, constant, double or not a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hookscope.findings import Finding, listed, percent
from hookscope.layers import ACTIVATION_FUNCTIONS

if TYPE_CHECKING:
    from hookscope.batchnorm import BatchNormDrift
    from hookscope.statistics import LayerStatistics
    from hookscope.tally import Tally

__all__ = ["MEANINGS", "Thresholds", "diagnose", "find_problems"]

MEANINGS = {
    "non-finite": "NaN or Inf spread to everything after them: look at this layer's weights and its input's range,"
    " and at the loss scale or learning rate of the training.",
    "exploding-activations": "Half precision ends at 65504 and turns larger values into Inf: normalise before this"
    " layer, lower the learning rate or scale its initialisation down.",
    "vanishing-activations": "Signals this small carry almost no gradient: add normalisation or residual connections,"
    " or scale the initialisation up.",
    "constant-output": "Nothing of the picture gets through this layer: look for zeroed weights, a wrong input range"
    " or a layer before it that has died.",
    "saturated": "At its bounds a function passes no gradient: normalise its input, scale down the weights before it,"
    " or use an unbounded function.",
    "dead-channels": "They give the same value whatever the picture and learn no more: prune them, or train with a"
    " lower learning rate, a smaller bias or a leaky ReLU.",
    "duplicate-channels": "They say the same thing twice: prune all but one, or train with more regularisation"
    " (DropBlock, weight decay).",
    "low-rank": "The channels move together in few directions: the layer can be made narrower, or its features have"
    " collapsed.",
    "batchnorm-drift": "The pictures are not what the running statistics were made on: check preprocessing and"
    " normalisation, or update the statistics on data like these.",
    "few-images": "What is dead on a few pictures may wake on others: measure at least a few dozen, of every kind.",
}
"""What each finding means, and what people do about it."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on something is a finding.

    Attributes:
        dead: Share of dead channels in a layer above which they are one, 0 to 1.
        saturated: Share of values near a bound, 0 to 1.
        smallest: Root mean square below which a layer vanishes; the default is the smallest normal number of half
            precision.
        largest: Absolute value above which it explodes; the default is the largest number of half precision.
        correlation: Pearson correlation from which on channels are duplicates, 0 to 1.
        rank: Effective rank below this share of what it can be (the channels, or the positions where these are
            fewer), 0 to 1.
        shift: Distance of a BatchNorm's inputs from its running mean, in running standard deviations (median over
            the channels).
        ratio: How many times the running variance theirs is, or the other way round (median over the channels).
        images: With fewer, a claim of death is one on few images.
    """

    dead: float = 0.0
    saturated: float = 0.5
    smallest: float = 2.0**-14
    largest: float = 65504.0
    correlation: float = 0.999
    rank: float = 0.01
    shift: float = 1.0
    ratio: float = 4.0
    images: int = 16


def diagnose(tally: Tally, thresholds: Thresholds | None = None) -> list[Finding]:
    """All findings on what a `Survey` has counted, the gravest kind first, layers in order of execution.

    Example:
        >>> import torch
        >>> from hookscope.survey import Survey
        >>> _ = torch.manual_seed(1)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU())
        >>> net[0].bias.data[2] = -9.0
        >>> with Survey(net) as survey, torch.no_grad():
        ...     _ = net(torch.rand(20, 3, 8, 8))
        >>> [(found.finding, found.layer, found.channels) for found in diagnose(survey.tally)]
        [('dead-channels', '1', (2,))]
    """
    thresholds = thresholds or Thresholds()
    layers = tally.statistics(thresholds.correlation)
    return find_problems(layers, tally.drifts(), tally.images, thresholds)


def find_problems(
    layers: Sequence[LayerStatistics], drifts: Iterable[BatchNormDrift], images: int, thresholds: Thresholds
) -> list[Finding]:
    """As `diagnose`, on statistics that are at hand."""
    found = list(_non_finite(layers))
    for kind in (_exploding, _vanishing, _constant, _saturated):
        found += [one for layer in layers if (one := kind(layer, thresholds)) is not None]
    constant = {one.layer for one in found if one.finding == "constant-output"}
    alive = [layer for layer in layers if layer.key not in constant]
    found += _new_in_each(alive, lambda layer, before: _dead(layer, before, thresholds))
    found += _new_in_each(alive, _duplicates)
    found += [one for layer in alive if (one := _low_rank(layer, thresholds)) is not None]
    found += [one for drift in drifts if (one := _drift(drift, thresholds)) is not None]
    return found + list(_few_images(found, images, thresholds))


def _finding(name: str, layer: str, evidence: str, **more: object) -> Finding:
    return Finding(name, layer, evidence, MEANINGS[name], **more)  # type: ignore[arg-type]


def _non_finite(layers: Sequence[LayerStatistics]) -> Iterator[Finding]:
    """One finding at the first layer: what comes after it has them from there."""
    bad = [layer for layer in layers if layer.nan or layer.inf]
    if not bad:
        return
    first, place = bad[0], bad[0].nonfinite_at
    where = ""
    if place is not None:
        image = f" of {place.image}" if place.image is not None else ""
        where = f", the first in channel {place.channel} at {'x'.join(map(str, place.position)) or 0}{image}"
    after = f"; {len(bad) - 1} later calls have some too" if len(bad) > 1 else ""
    yield _finding(
        "non-finite",
        first.key,
        f"{first.nan:,} NaN and {first.inf:,} Inf of {first.values:,} values{where}{after}",
        numbers={"nan": first.nan, "inf": first.inf, "values": first.values, "layers": len(bad)},
    )


def _exploding(layer: LayerStatistics, thresholds: Thresholds) -> Finding | None:
    if layer.min is None or layer.max is None:
        return None
    largest = max(-layer.min, layer.max)
    if largest <= thresholds.largest:
        return None
    text = f"values from {layer.min:.4g} to {layer.max:.4g}, beyond {thresholds.largest:g}"
    return _finding("exploding-activations", layer.key, text, numbers={"min": layer.min, "max": layer.max})


def _vanishing(layer: LayerStatistics, thresholds: Thresholds) -> Finding | None:
    if layer.rms is None or not 0 < layer.rms < thresholds.smallest:
        return None
    text = f"root mean square {layer.rms:.4g}, below {thresholds.smallest:.4g}"
    return _finding("vanishing-activations", layer.key, text, numbers={"rms": layer.rms})


def _constant(layer: LayerStatistics, thresholds: Thresholds) -> Finding | None:
    if layer.channels and len(layer.dead_channels) == layer.channels:
        value = f"the value {layer.min:.4g}" if layer.min == layer.max else "one value each"
        text = f"all {layer.channels} channels have {value} throughout"
    elif layer.between_images is not None and layer.std and layer.between_images < 1e-7 * layer.std:
        text = f"the same for all {layer.items} images"
    else:
        return None
    return _finding("constant-output", layer.key, text, numbers={"min": layer.min, "max": layer.max})


def _saturated(layer: LayerStatistics, thresholds: Thresholds) -> Finding | None:
    if layer.saturated is None or layer.saturated <= thresholds.saturated:
        return None
    text = f"{percent(layer.saturated)} of values within 1 % of a bound"
    return _finding("saturated", layer.key, text, numbers={"saturated": layer.saturated})


def _new_in_each(
    layers: Sequence[LayerStatistics], find: Callable[[LayerStatistics, LayerStatistics | None], Finding | None]
) -> Iterator[Finding]:
    """What ``find(layer, before)`` says of each; ``before`` is the layer that an activation function is applied to."""
    before: LayerStatistics | None = None
    for layer in layers:
        follows = layer.call.type in ACTIVATION_FUNCTIONS and before is not None and before.channels == layer.channels
        one = find(layer, before if follows else None)
        if one is not None:
            yield one
        before = layer


def _dead(layer: LayerStatistics, before: LayerStatistics | None, thresholds: Thresholds) -> Finding | None:
    known = set(before.dead_channels) if before is not None else set()
    dead = tuple(at for at in layer.dead_channels if at not in known)
    if not dead or len(layer.dead_channels) <= thresholds.dead * layer.channels:
        return None
    lows = {float(layer.by_channel.low[at]) for at in dead}
    value = f"never leave {lows.pop():.4g}" if len(lows) == 1 else "never leave their value"
    already = f" ({len(known & set(layer.dead_channels))} more were constant before it)" if known else ""
    text = f"{len(dead)} of {layer.channels} channels {value}{already}: {listed(dead)}"
    return _finding(
        "dead-channels",
        layer.key,
        text,
        channels=dead,
        numbers={"dead": len(dead), "channels": layer.channels, "images": layer.items},
    )


def _duplicates(layer: LayerStatistics, before: LayerStatistics | None) -> Finding | None:
    known = {frozenset(group) for group in before.duplicate_channels} if before is not None else set()
    groups = tuple(g for g in layer.duplicate_channels if not any(frozenset(g) <= one for one in known))
    if not groups:
        return None
    channels = tuple(sorted(at for group in groups for at in group))
    text = f"{len(channels)} of {layer.channels} channels are the same: " + listed(
        [" = ".join(map(str, group)) for group in groups], 4
    )
    return _finding(
        "duplicate-channels",
        layer.key,
        text,
        channels=channels,
        groups=groups,
        numbers={"duplicate": len(channels), "channels": layer.channels},
    )


def _low_rank(layer: LayerStatistics, thresholds: Thresholds) -> Finding | None:
    if layer.rank is None or layer.channels < 2:
        return None
    most = min(layer.channels, layer.values // layer.channels - 1)
    if not layer.rank < max(thresholds.rank * most, 1.0 + 1e-6):
        return None
    text = f"effective rank {layer.rank:.3g} of at most {most}"
    return _finding("low-rank", layer.key, text, numbers={"rank": layer.rank, "channels": layer.channels})


def _drift(drift: BatchNormDrift, thresholds: Thresholds) -> Finding | None:
    import numpy as np

    if not drift.updated or drift.items < 2:
        return None
    shift = float(np.median(np.abs(drift.shift)))
    ratio = float(np.exp(np.median(np.abs(np.log(drift.ratio.clip(min=1e-30))))))
    if not (shift > thresholds.shift or ratio > thresholds.ratio):
        return None
    text = f"in the median channel the mean is {shift:.3g} standard deviations off, the variance {ratio:.3g} times"
    return _finding("batchnorm-drift", drift.layer, text, numbers={"shift": shift, "ratio": ratio})


def _few_images(found: Sequence[Finding], images: int, thresholds: Thresholds) -> Iterator[Finding]:
    claims = [one for one in found if one.finding in ("dead-channels", "constant-output")]
    if claims and images < thresholds.images:
        pictures = "1 image" if images == 1 else f"{images} images"
        text = f"{len(claims)} findings of dead or constant channels rest on {pictures}"
        yield _finding("few-images", "", text, numbers={"images": images})
