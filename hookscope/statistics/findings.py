"""Named findings on statistics: what is dead, saturated, vanishing, exploding, constant, double or not a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hookscope.findings import Finding, counted, listed, percent
from hookscope.hooks import ACTIVATION_FUNCTIONS
from hookscope.statistics.batchnorm import BatchNormDrift
from hookscope.statistics.layer_statistics import LayerStatistics, ValuePosition
from hookscope.statistics.limits import highest_rank, nonfinite_words
from hookscope.statistics.totals import RunningStatistics

Judge = Callable[["LayerStatistics", "StatisticsThresholds"], Finding | None]


MEANINGS = {
    "non-finite": "Whatever this layer feeds is spoiled too, so begin here: look for NaN in its weights, for inputs out"
    " of range, and in training at the learning rate and the loss scale.",
    "exploding-activations": "Half precision ends at 65504 and makes Inf of larger values: normalise before this layer,"
    " lower the learning rate or scale the initialisation down.",
    "vanishing-activations": "Signals this small carry next to no gradient, and half precision rounds them away: add"
    " normalisation or residual connections, or scale the initialisation up.",
    "constant-output": "Nothing of the picture gets through: look for zeroed weights, a dead layer or a wrong input"
    " range before it, or pictures that are all the same.",
    "saturated": "At its bounds a function passes no gradient: normalise its input, scale down the weights before it,"
    " or use an unbounded function.",
    "dead-channels": "They say the same of every picture, and behind a ReLU no gradient wakes them: prune them, or"
    " train with a lower learning rate, a warm-up or a leaky ReLU, and look at the bias before them.",
    "duplicate-channels": "They say the same thing more than once: prune all but one of each group, or look for filters"
    " that were copied or began with equal values.",
    "low-rank": "The channels move together in few directions: the layer can be made narrower, or its features have"
    " collapsed (too high a learning rate or weight decay).",
    "batchnorm-drift": "These pictures are not what the running statistics were made on: check preprocessing and"
    " normalisation, or update the statistics on data like these.",
    "few-images": "What is dead or off on a few pictures may be fine on others: measure a few dozen at least, of every"
    " kind.",
}
"""What each finding means, and what people do about it."""


@dataclass(frozen=True, slots=True)
class StatisticsThresholds:
    """From where on something is a finding.

    Attributes:
        dead: Share of dead channels in a layer above which they are one, 0 to 1.
        saturated: Share of values near a bound, 0 to 1.
        smallest: Root mean square below which a layer vanishes; the default is the smallest normal number of half
            precision.
        largest: Absolute value above which it explodes; the default is the largest number of half precision.
        correlation: Pearson correlation from which on channels are duplicates, 0 to 1.
        rank: Share of what the effective rank can be (the channels, or the values of each where these are fewer) below
            which it is low, 0 to 1; but for 0 a single direction is low too.
        shift: Distance of a BatchNorm's inputs from its running mean, in running standard deviations (median over
            the channels).
        ratio: How many times the running variance theirs is, or the other way round (median over the channels).
        images: With fewer, a claim of death, constancy or drift is one on few images.
    """

    dead: float = 0.0
    saturated: float = 0.5
    smallest: float = 2.0**-14
    largest: float = 65504.0
    correlation: float = 0.9999
    rank: float = 0.01
    shift: float = 1.0
    ratio: float = 4.0
    images: int = 16


_ONE_DIRECTION = 1.0 + 1e-6  # an effective rank below it
_THE_SAME = 1e-5  # of a layer's spread: by so much pictures differ through rounding


def diagnose(tally: RunningStatistics, thresholds: StatisticsThresholds | None = None) -> list[Finding]:
    """All findings on what a `Survey` has counted, the gravest kind first, layers in order of execution.

    Example:
        >>> import torch
        >>> from hookscope.statistics.collector import Survey
        >>> _ = torch.manual_seed(1)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU())
        >>> net[0].bias.data[2] = -9.0
        >>> with Survey(net) as survey, torch.no_grad():
        ...     _ = net(torch.rand(20, 3, 8, 8))
        >>> [(found.finding, found.layer, found.channels) for found in diagnose(survey.tally)]
        [('dead-channels', '1', (2,))]
    """
    thresholds = thresholds or StatisticsThresholds()
    layers = tally.statistics(thresholds.correlation)
    return find_problems(layers, tally.drifts(), tally.images, thresholds)


def find_problems(
    layers: Sequence[LayerStatistics], drifts: Iterable[BatchNormDrift], images: int, thresholds: StatisticsThresholds
) -> list[Finding]:
    """As `diagnose`, on statistics that are at hand."""
    found = list(_non_finite(layers))
    chains = [
        _chains((judge(layer, thresholds), layer.saturated is None) for layer in layers)
        for judge in (_exploding, _vanishing, _constant)
    ]
    found += [_source_of(chain) for kind in chains for chain in kind]
    found += _each(layers, thresholds, _saturated)
    constant = {one.layer for chain in chains[-1] for one in chain}
    alive = [layer for layer in layers if layer.key not in constant]
    after = {layer.key: before for before, layer in pairwise(layers) if before.key not in constant}
    found += [one for layer in alive if (one := _dead(layer, after.get(layer.key), thresholds)) is not None]
    found += [one for layer in alive if (one := _duplicates(layer, after.get(layer.key))) is not None]
    found += _each(alive, thresholds, _low_rank)
    found += [_source_of(chain) for chain in _chains((_drift(drift, thresholds), True) for drift in drifts)]
    return found + list(_few_images(found, images, thresholds))


def _finding(name: str, layer: str, evidence: str, **more: object) -> Finding:
    return Finding(name, layer, evidence, MEANINGS[name], **more)  # type: ignore[arg-type]


def _each(layers: Sequence[LayerStatistics], thresholds: StatisticsThresholds, judge: Judge) -> Iterator[Finding]:
    return (one for layer in layers if (one := judge(layer, thresholds)) is not None)


def _chains(judged: Iterable[tuple[Finding | None, bool]]) -> list[list[Finding]]:
    """Findings of calls that follow one another: what the first has, the others have from it.

    Args:
        judged: The finding of each call, and whether a call without one ends a chain: a bounded function, such as the
            gate beside a layer, does not.
    """
    chains: list[list[Finding]] = []
    unbroken = False
    for one, ends in judged:
        if one is not None and unbroken:
            chains[-1].append(one)
        elif one is not None:
            chains.append([one])
        unbroken = one is not None or (unbroken and not ends)
    return chains


def _source_of(chain: Sequence[Finding]) -> Finding:
    """The first of a chain, which says how far it goes."""
    first, *after = chain
    numbers = {**first.numbers, "layers": len(chain)}
    if not after:
        return replace(first, numbers=numbers)
    text = f"{first.evidence}; {counted(len(after), 'call')} after it too, up to {after[-1].layer}"
    return replace(first, evidence=text, numbers=numbers)


def _non_finite(layers: Sequence[LayerStatistics]) -> Iterator[Finding]:
    """One finding at the first layer: what comes after it has them from there."""
    bad = [layer for layer in layers if layer.nan or layer.inf]
    if not bad:
        return
    first = bad[0]
    text = f"{nonfinite_words(first)} of {first.values:,} values{_where(first.nonfinite_at)}"
    if len(bad) > 1:
        text += f"; {len(bad) - 1} later {'call has' if len(bad) == 2 else 'calls have'} some too"
    numbers = {"nan": first.nan, "inf": first.inf, "values": first.values, "layers": len(bad)}
    yield _finding("non-finite", first.key, text, numbers=numbers)


def _where(place: ValuePosition | None) -> str:
    if place is None:
        return ""
    axes = {0: "", 1: " at {}", 2: " at row {}, column {}"}.get(len(place.position), " at {}")
    at = place.position if len(place.position) == 2 else ["x".join(map(str, place.position))]
    image = "" if place.image is None else f" of {place.image}"
    return f", the first in channel {place.channel}{axes.format(*at)}{image}"


def _exploding(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.min is None or layer.max is None or max(-layer.min, layer.max) <= thresholds.largest:
        return None
    text = f"values from {layer.min:.4g} to {layer.max:.4g}, beyond {thresholds.largest:g}"
    return _finding("exploding-activations", layer.key, text, numbers={"min": layer.min, "max": layer.max})


def _vanishing(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.rms is None or not 0 < layer.rms < thresholds.smallest:
        return None
    text = f"root mean square {layer.rms:.4g}, below {thresholds.smallest:.4g}"
    return _finding("vanishing-activations", layer.key, text, numbers={"rms": layer.rms})


def _constant(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.channels and len(layer.dead_channels) == layer.channels:
        value = f"the value {layer.min:.4g}" if layer.min == layer.max else "one value each"
        text = f"all {layer.channels} channels have {value} throughout"
    elif layer.between_images is not None and layer.std and layer.between_images < _THE_SAME * layer.std:
        text = f"the same for all {layer.items} images"
    else:
        return None
    return _finding("constant-output", layer.key, text, numbers={"min": layer.min, "max": layer.max})


def _saturated(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.saturated is None or layer.saturated <= thresholds.saturated:
        return None
    stuck = len(_stuck(layer))
    text = f"{percent(layer.saturated)} of values within 1 % of a bound"
    text += f"; {stuck} of {layer.channels} channels never {'leaves' if stuck == 1 else 'leave'} one" if stuck else ""
    return _finding("saturated", layer.key, text, numbers={"saturated": layer.saturated, "stuck": stuck})


def _stuck(layer: LayerStatistics) -> set[int]:
    """The channels that are constant because they are at a bound throughout."""
    shares = layer.saturated_by_channel
    return set() if shares is None else {at for at in layer.dead_channels if shares[at] == 1}


def _applied_to(before: LayerStatistics | None, layer: LayerStatistics) -> bool:
    """Whether ``layer`` is an activation function on what ``before``, measured just before it, has put out."""
    if before is None or layer.call.type not in ACTIVATION_FUNCTIONS or before.call.type in ACTIVATION_FUNCTIONS:
        return False
    return before.channels == layer.channels


def _dead(layer: LayerStatistics, before: LayerStatistics | None, thresholds: StatisticsThresholds) -> Finding | None:
    if len(layer.dead_channels) / max(layer.channels, 1) <= thresholds.dead:
        return None
    known = set(before.dead_channels) if before is not None and before.channels == layer.channels else set()
    told = set(known) if _applied_to(before, layer) else set()
    inherited = len(told.intersection(layer.dead_channels))
    if _saturated(layer, thresholds) is not None:
        told |= _stuck(layer)
    dead = tuple(at for at in layer.dead_channels if at not in told)
    if not dead:
        return None
    lows = {float(layer.by_channel.low[at]) for at in dead}
    value = f"{lows.pop():.4g}" if len(lows) == 1 else "their value"
    text = f"{len(dead)} of {layer.channels} channels never {'leaves' if len(dead) == 1 else 'leave'} {value}"
    text += f": {listed(dead)}"
    if inherited:
        text += f" ({inherited} more {'was' if inherited == 1 else 'were'} constant before it)"
    elif before is not None and known.issuperset(dead):  # as in a depthwise convolution
        text += f" (constant in {before.key} before it too)"
    numbers = {"dead": len(dead), "channels": layer.channels, "images": layer.items}
    return _finding("dead-channels", layer.key, text, channels=dead, numbers=numbers)


def _duplicates(layer: LayerStatistics, before: LayerStatistics | None) -> Finding | None:
    known = [set(group) for group in before.duplicate_channels] if before and _applied_to(before, layer) else []
    groups = tuple(group for group in layer.duplicate_channels if not any(one.issuperset(group) for one in known))
    if not groups:
        return None
    channels = tuple(sorted(at for group in groups for at in group))
    same = listed([" = ".join(map(str, group)) for group in groups], 4)
    text = f"{len(channels)} of {layer.channels} channels are the same as another: {same}"
    numbers = {"duplicate": len(channels), "channels": layer.channels}
    return _finding("duplicate-channels", layer.key, text, channels=channels, groups=groups, numbers=numbers)


def _low_rank(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.rank is None or not thresholds.rank or layer.nan or layer.inf:
        return None
    most = highest_rank(layer)
    if most < 2 or layer.rank >= max(thresholds.rank * most, _ONE_DIRECTION):
        return None
    text = f"effective rank {layer.rank:.3g} of at most {most}"
    return _finding("low-rank", layer.key, text, numbers={"rank": layer.rank, "channels": layer.channels, "most": most})


def _drift(drift: BatchNormDrift, thresholds: StatisticsThresholds) -> Finding | None:
    if not drift.updated or drift.items < 2:
        return None
    shift = float(np.median(np.abs(drift.shift)))
    ratio = float(np.exp(np.median(np.abs(np.log(drift.ratio.clip(min=1e-30))))))
    if not (shift > thresholds.shift or ratio > thresholds.ratio):
        return None
    text = f"in the median channel the mean is off by {shift:.3g} standard deviations, the variance by a factor"
    return _finding("batchnorm-drift", drift.layer, f"{text} {ratio:.3g}", numbers={"shift": shift, "ratio": ratio})


def _few_images(found: Sequence[Finding], images: int, thresholds: StatisticsThresholds) -> Iterator[Finding]:
    claims = sum(one.finding in ("dead-channels", "constant-output", "batchnorm-drift") for one in found)
    if not claims or images >= thresholds.images:
        return
    rest = "rests" if claims == 1 else "rest"
    text = f"{counted(claims, 'claim')} of death, constancy or drift {rest} on {counted(images, 'image')}"
    yield _finding("few-images", "", text, numbers={"images": images})
