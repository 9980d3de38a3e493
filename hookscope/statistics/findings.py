"""Named findings on activations: one rule for each kind, registered with its entry in the catalogue.

This file needs no torch: the help of ``hookscope stats`` reads the thresholds of every registered rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from hookscope.findings import (
    CATALOGUE,
    Finding,
    FindingKind,
    Rules,
    Thresholds,
    chains,
    counted,
    default,
    existing,
    listed,
    nonfinite_words,
    percent,
)
from hookscope.hooks import ACTIVATION_FUNCTIONS

if TYPE_CHECKING:
    from hookscope.statistics.batchnorm import BatchNormDrift
    from hookscope.statistics.layer_statistics import LayerStatistics, ValuePosition
    from hookscope.statistics.totals import RunningStatistics


@dataclass(frozen=True)
class StatisticsThresholds(Thresholds):
    """Thresholds of the findings on activations; the catalogue says what each one means and where it comes from."""

    question = "activations"

    dead: float = default("dead-channels", "dead")
    saturated: float = default("saturated", "saturated")
    smallest: float = default("vanishing-activations", "smallest")
    largest: float = default("exploding-activations", "largest")
    correlation: float = default("duplicate-channels", "correlation")
    rank: float = default("low-rank", "rank")
    shift: float = default("batchnorm-drift", "shift")
    ratio: float = default("batchnorm-drift", "ratio")
    images: int = int(default("few-images", "images"))


@dataclass(frozen=True)
class Measured:
    """What the rules judge, and the graver ``findings``."""

    layers: Sequence[LayerStatistics]
    drifts: Sequence[BatchNormDrift]
    images: int
    thresholds: StatisticsThresholds
    findings: list[Finding] = field(default_factory=list)

    @cached_property
    def constant(self) -> set[str]:
        """Keys of the calls whose output is constant: nothing else is said about their channels."""
        return {layer.key for layer in self.layers if _constant(layer, self.thresholds) is not None}

    @cached_property
    def varying(self) -> list[tuple[LayerStatistics, LayerStatistics | None]]:
        """The other calls, each with the call before it unless that one is constant."""
        before = {after.key: layer for layer, after in pairwise(self.layers) if layer.key not in self.constant}
        return [(layer, before.get(layer.key)) for layer in self.layers if layer.key not in self.constant]


LayerRule = Callable[["LayerStatistics", StatisticsThresholds], Finding | None]
VaryingRule = Callable[["LayerStatistics", "LayerStatistics | None", StatisticsThresholds], Finding | None]

# Ranks below it are 1: float32 rounding adds up to 4e-6 (measured), a second direction of 0.3 % of the spread 1e-4.
_ONE_DIRECTION = 1.0 + 1e-4
_SAME = default("constant-output", "same")

RULES = Rules("activations", lambda measured: measured.layers)
rule, layer_rule = RULES.rule, RULES.row_rule


def diagnose(statistics: RunningStatistics, thresholds: StatisticsThresholds | None = None) -> list[Finding]:
    """All findings on what a `StatisticsCollector` measured, the gravest kind first, layers in order of execution.

    Example:
        >>> import torch
        >>> from hookscope import StatisticsCollector
        >>> _ = torch.manual_seed(1)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU())
        >>> net[0].bias.data[2] = -9.0
        >>> with StatisticsCollector(net) as collector, torch.no_grad():
        ...     _ = net(torch.rand(20, 3, 8, 8))
        >>> [(finding.finding, finding.layer, finding.channels) for finding in diagnose(collector.totals)]
        [('dead-channels', '1', (2,))]
    """
    thresholds = thresholds or StatisticsThresholds()
    layers = statistics.statistics(thresholds.correlation)
    return find_problems(layers, statistics.drifts(), statistics.images, thresholds)


def find_problems(
    layers: Sequence[LayerStatistics], drifts: Iterable[BatchNormDrift], images: int, thresholds: StatisticsThresholds
) -> list[Finding]:
    """`diagnose` for statistics that are already computed."""
    measured = Measured(layers, list(drifts), images, thresholds)
    for finding in RULES.findings(measured):
        measured.findings.append(finding)  # at once: the rule of few images counts the findings before it
    return measured.findings


def _sources(judged: Iterable[tuple[Finding | None, bool]]) -> Iterator[Finding]:
    """The first finding of each chain of calls, with the length of the chain: the later calls inherit it.

    Each call has its finding, and whether it ends the chain without one. A bounded function, such as the gate beside a
    layer, does not.
    """
    calls = list(judged)
    positions = [at for at, (finding, _) in enumerate(calls) if finding is not None]
    for chain in chains(positions, lambda chain, at: not any(ends for _, ends in calls[chain[-1] + 1 : at])):
        first, *after = existing(calls[at][0] for at in chain)
        text = f"; {counted(len(after), 'call')} after it too, up to {after[-1].layer}" if after else ""
        yield replace(first, evidence=first.evidence + text, numbers={**first.numbers, "layers": len(chain)})


def _source_rule(kind: FindingKind) -> Callable[[LayerRule], LayerRule]:
    """Register a rule that judges one call at a time; only the source of a chain is reported."""

    def register(judge: LayerRule) -> LayerRule:
        @rule(kind)
        def judge_sources(measured: Measured) -> Iterator[Finding]:
            return _sources((judge(layer, measured.thresholds), layer.saturated is None) for layer in measured.layers)

        return judge

    return register


def _varying_rule(kind: FindingKind) -> Callable[[VaryingRule], VaryingRule]:
    """Register a rule that judges one call and the call before it, both of varying output."""

    def register(judge: VaryingRule) -> VaryingRule:
        @rule(kind)
        def judge_varying(measured: Measured) -> Iterator[Finding]:
            return existing(judge(layer, before, measured.thresholds) for layer, before in measured.varying)

        return judge

    return register


@rule(CATALOGUE["non-finite"])
def _non_finite(measured: Measured) -> Iterator[Finding]:
    """One finding at the first layer, which spoils the layers after it."""
    layers = [layer for layer in measured.layers if layer.nan or layer.inf]
    if not layers:
        return
    first = layers[0]
    text = f"{nonfinite_words(first.nan, first.inf)} of {first.values:,} values{_where(first.nonfinite_at)}"
    if len(layers) > 1:
        text += f"; {len(layers) - 1} later {'call has' if len(layers) == 2 else 'calls have'} NaN or Inf too"
    numbers = {"nan": first.nan, "inf": first.inf, "values": first.values, "layers": len(layers)}
    yield CATALOGUE["non-finite"].finding(first.key, text, numbers=numbers)


def _where(place: ValuePosition | None) -> str:
    if place is None:
        return ""
    axes = {0: "", 1: " at {}", 2: " at row {}, column {}"}.get(len(place.position), " at {}")
    at = place.position if len(place.position) == 2 else ["x".join(map(str, place.position))]
    image = "" if place.image is None else f" of {place.image}"
    return f", the first in channel {place.channel}{axes.format(*at)}{image}"


@_source_rule(CATALOGUE["exploding-activations"])
def _exploding(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.min is None or layer.max is None or max(-layer.min, layer.max) <= thresholds.largest:
        return None
    text = f"values from {layer.min:.4g} to {layer.max:.4g}, beyond {thresholds.largest:g}"
    numbers = {"min": layer.min, "max": layer.max}
    return CATALOGUE["exploding-activations"].finding(layer.key, text, numbers=numbers)


@_source_rule(CATALOGUE["vanishing-activations"])
def _vanishing(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.rms is None or not 0 < layer.rms < thresholds.smallest:
        return None
    text = f"root mean square {layer.rms:.4g}, below {thresholds.smallest:.4g}"
    return CATALOGUE["vanishing-activations"].finding(layer.key, text, numbers={"rms": layer.rms})


@_source_rule(CATALOGUE["constant-output"])
def _constant(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.channels and len(layer.dead_channels) == layer.channels:
        value = f"the value {layer.min:.4g}" if layer.min == layer.max else "one value each"
        text = f"all {layer.channels} channels have {value} throughout"
    elif layer.between_images is not None and layer.std and layer.between_images < _SAME * layer.std:
        text = f"the output is the same for all {layer.items} images"
    else:
        return None
    numbers = {"min": layer.min, "max": layer.max}
    return CATALOGUE["constant-output"].finding(layer.key, text, numbers=numbers)


@layer_rule(CATALOGUE["saturated"])
def _saturated(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.saturated is None or layer.saturated <= thresholds.saturated:
        return None
    stuck = len(_stuck(layer))
    text = f"{percent(layer.saturated)} of values within 1 % of a bound"
    if stuck:
        text += f"; {stuck} of {layer.channels} channels never {'leaves' if stuck == 1 else 'leave'} a bound"
    numbers = {"saturated": layer.saturated, "stuck": stuck}
    return CATALOGUE["saturated"].finding(layer.key, text, numbers=numbers)


def _stuck(layer: LayerStatistics) -> set[int]:
    """The channels whose values are all at one bound."""
    shares = layer.saturated_by_channel
    return set() if shares is None else {at for at in layer.dead_channels if shares[at] == 1}


def _applied_to(before: LayerStatistics | None, layer: LayerStatistics) -> bool:
    """Whether ``layer`` is an activation function on the output of ``before``, the call measured just before it."""
    if before is None or layer.call.type not in ACTIVATION_FUNCTIONS or before.call.type in ACTIVATION_FUNCTIONS:
        return False
    return before.channels == layer.channels


@_varying_rule(CATALOGUE["dead-channels"])
def _dead(layer: LayerStatistics, before: LayerStatistics | None, thresholds: StatisticsThresholds) -> Finding | None:
    if len(layer.dead_channels) / max(layer.channels, 1) <= thresholds.dead:
        return None
    dead_before = set(before.dead_channels) if before is not None and before.channels == layer.channels else set()
    reported = set(dead_before) if _applied_to(before, layer) else set()
    inherited = len(reported.intersection(layer.dead_channels))
    if _saturated(layer, thresholds) is not None:
        reported |= _stuck(layer)
    dead = tuple(at for at in layer.dead_channels if at not in reported)
    if not dead:
        return None
    lows = {float(layer.by_channel.low[at]) for at in dead}
    value = f"{lows.pop():.4g}" if len(lows) == 1 else "their value"
    text = f"{len(dead)} of {layer.channels} channels never {'leaves' if len(dead) == 1 else 'leave'} {value}"
    text += f": {listed(dead)}"
    if inherited:
        text += f" ({inherited} more {'was' if inherited == 1 else 'were'} constant before it)"
    elif before is not None and dead_before.issuperset(dead):  # as in a depthwise convolution
        text += f" (also constant before it, in {before.key})"
    numbers = {"dead": len(dead), "channels": layer.channels, "images": layer.items}
    return CATALOGUE["dead-channels"].finding(layer.key, text, channels=dead, numbers=numbers)


@_varying_rule(CATALOGUE["duplicate-channels"])
def _duplicates(
    layer: LayerStatistics, before: LayerStatistics | None, thresholds: StatisticsThresholds
) -> Finding | None:
    inherited = [set(group) for group in before.duplicate_channels] if before and _applied_to(before, layer) else []
    groups = tuple(
        group for group in layer.duplicate_channels if not any(other.issuperset(group) for other in inherited)
    )
    if not groups:
        return None
    channels = tuple(sorted(at for group in groups for at in group))
    same = listed([" = ".join(map(str, group)) for group in groups], 4)
    text = f"{len(channels)} of {layer.channels} channels are the same as another: {same}"
    numbers = {"duplicate": len(channels), "channels": layer.channels}
    kind = CATALOGUE["duplicate-channels"]
    return kind.finding(layer.key, text, channels=channels, groups=groups, numbers=numbers)


@_varying_rule(CATALOGUE["low-rank"])
def _low_rank(
    layer: LayerStatistics, before: LayerStatistics | None, thresholds: StatisticsThresholds
) -> Finding | None:
    if layer.rank is None or not thresholds.rank or layer.nan or layer.inf:
        return None
    most = layer.highest_rank
    if most < 2 or layer.rank >= max(thresholds.rank * most, _ONE_DIRECTION):
        return None
    text = f"effective rank {layer.rank:.3g} of at most {most}"
    numbers = {"rank": layer.rank, "channels": layer.channels, "most": most}
    return CATALOGUE["low-rank"].finding(layer.key, text, numbers=numbers)


@rule(CATALOGUE["batchnorm-drift"])
def _drifts(measured: Measured) -> Iterator[Finding]:
    return _sources((_drift(drift, measured.thresholds), True) for drift in measured.drifts)


def _drift(drift: BatchNormDrift, thresholds: StatisticsThresholds) -> Finding | None:
    if not drift.updated or drift.items < 2:
        return None
    shift, ratio = drift.median_shift, drift.median_ratio
    if not (shift > thresholds.shift or ratio > thresholds.ratio):
        return None
    text = f"in the median channel the mean is off by {shift:.3g} standard deviations, the variance by a factor"
    numbers = {"shift": shift, "ratio": ratio}
    return CATALOGUE["batchnorm-drift"].finding(drift.layer, f"{text} {ratio:.3g}", numbers=numbers)


@rule(CATALOGUE["few-images"])
def _few_images(measured: Measured) -> Iterator[Finding]:
    uncertain = ("dead-channels", "constant-output", "batchnorm-drift")
    claims = sum(finding.finding in uncertain for finding in measured.findings)
    if not claims or measured.images >= measured.thresholds.images:
        return
    depend = "depends" if claims == 1 else "depend"
    text = f"{counted(claims, 'finding')} of dead, constant or drifting layers {depend} on"
    numbers = {"images": measured.images}
    yield CATALOGUE["few-images"].finding("", f"{text} {counted(measured.images, 'image')}", numbers=numbers)
