"""Named findings on activations: one rule for each kind, registered with its entry in the catalogue.

This file needs no torch: the help of ``hookscope stats`` reads the thresholds of every registered rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from hookscope.display import Rows
from hookscope.findings import (
    CATALOGUE,
    Finding,
    FindingKind,
    Rules,
    Thresholds,
    alike,
    chains,
    counted,
    default,
    existing,
    listed,
    merged,
    never_updated,
    nonfinite_words,
    percent,
    ranked,
)
from hookscope.hooks import ACTIVATION_FUNCTIONS
from hookscope.statistics.drifts import WEAK_STEP, sudden_drifts

if TYPE_CHECKING:
    from hookscope.statistics.facts import LayerStatistics, ValuePosition
    from hookscope.statistics.totals import BatchNormDrift, RunningStatistics


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
    """What the rules judge."""

    layers: Sequence[LayerStatistics]
    drifts: Sequence[BatchNormDrift]
    images: int
    thresholds: StatisticsThresholds
    assumed: bool = False  # the mean and the standard deviation of the preprocessing

    @property
    def few(self) -> bool:
        """Whether there are too few images to call a channel dead."""
        return self.images < self.thresholds.images

    @property
    def untrained(self) -> bool:
        return bool(self.drifts) and not any(drift.updated or drift.trained for drift in self.drifts)

    @cached_property
    def constant(self) -> set[str]:
        """Keys of the calls whose output is constant: nothing else is said about their channels."""
        return {layer.key for layer in self.layers if _constant(layer, self.thresholds) is not None}

    @cached_property
    def varying(self) -> list[tuple[LayerStatistics, LayerStatistics | None]]:
        """The other calls that make channels of their own, each with the last call before of as many channels.

        The channels of a call may come from that call. A gate of one value for each channel stands beside the maps
        that it scales, so it is not before them; nor is an activation function before another one.
        """
        pairs: list[tuple[LayerStatistics, LayerStatistics | None]] = []
        latest: dict[tuple[int, bool], LayerStatistics] = {}
        for layer in self.layers:
            if layer.key in self.constant:
                continue
            if not _PASSES_ON.match(layer.call.type):
                before = latest.get((layer.channels, _is_squeezed(layer)))
                both = before is not None and _is_function(layer) and _is_function(before)
                pairs.append((layer, None if both else before))
            latest[layer.channels, True] = layer
            if not _is_squeezed(layer):
                latest[layer.channels, False] = layer
        return pairs


LayerRule = Callable[["LayerStatistics", StatisticsThresholds], Finding | None]


# Types of layers that hand on or rearrange what they are given: their channels are not their own work.
_PASSES_ON = re.compile(
    r"(Feature)?(Alpha)?Drop|Identity|Stochastic|Flatten|Unflatten|Permute|Swap|Rearrange|Pixel|ChannelShuffle"
    r"|Window|Fold|Unfold|\w+Pad[123]d$|view|reshape|transpose|cat|chunk|split|pad|getitem",
    re.IGNORECASE,
)

_FUNCTIONS = {name.lower() for name in ACTIVATION_FUNCTIONS}
# Ranks below it are 1: float32 rounding adds up to 4e-6 (measured), a second direction of 0.3 % of the spread 1e-4.
_ONE_DIRECTION = 1.0 + 1e-4
_SAME = default("constant-output", "same")
_MANY_DEAD, _PROOF = default("dead-channels", "many_dead"), default("dead-channels", "proof")
_MANY_DUPLICATE = default("duplicate-channels", "many_duplicate")
_WIDE_SHIFT, _WIDE_RATIO = default("batchnorm-drift", "wide_shift"), default("batchnorm-drift", "wide_ratio")

RULES = Rules("activations", lambda measured: measured.layers)
rule, layer_rule = RULES.rule, RULES.row_rule


def diagnose(statistics: RunningStatistics, thresholds: StatisticsThresholds | None = None) -> Rows[Finding]:
    """All findings on what a `StatisticsCollector` measured, the most severe first.

    Findings of one severity are in order of causes, then of execution. More than three alike are `merged`.

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
        >>> diagnose(collector.totals)[0].severity
        'note'
    """
    thresholds = thresholds or StatisticsThresholds()
    layers = statistics.statistics(thresholds.correlation)
    found = find_problems(layers, statistics.drifts(), statistics.images, thresholds)
    return found if statistics.images else ranked(found, layers.nothing)


def find_problems(
    layers: Sequence[LayerStatistics],
    drifts: Iterable[BatchNormDrift],
    images: int,
    thresholds: StatisticsThresholds,
    assumed: bool = False,
) -> Rows[Finding]:
    """`diagnose` for statistics that are already computed, on inputs whose normalisation may be ``assumed``."""
    measured = Measured(layers, list(drifts), images, thresholds, assumed)
    findings = list(RULES.findings(measured))
    updated = {drift.layer: drift.updated for drift in measured.drifts}
    trained = any(drift.trained for drift in measured.drifts if not drift.updated)
    return ranked(merged([*never_updated(updated, trained, findings), *findings]))


def _is_squeezed(layer: LayerStatistics) -> bool:
    """Whether there is one value for each channel, as in squeeze-and-excitation; a vector of features is not."""
    return len(layer.shape) > 1 and all(axis == 1 for axis in layer.shape[1:])


def _is_function(layer: LayerStatistics) -> bool:
    return layer.call.type.lower() in _FUNCTIONS


def _sources(judged: Iterable[tuple[Finding | None, bool]]) -> Iterator[tuple[Finding, bool]]:
    """The first finding of each chain of calls, with the length of the chain: the later calls inherit it.

    Each call has its finding, and whether it ends the chain without one. A bounded function, such as the gate beside a
    layer, does not. The second item says whether the chain goes on to the last call.
    """
    calls = list(judged)
    positions = [at for at, (finding, _) in enumerate(calls) if finding is not None]

    def ends(start: int, stop: int | None = None) -> bool:
        return any(ends for _, ends in calls[start:stop])

    for chain in chains(positions, lambda chain, at: not ends(chain[-1] + 1, at)):
        yield _source([*existing(calls[at][0] for at in chain)]), not ends(chain[-1] + 1)


def _source(chain: Sequence[Finding]) -> Finding:
    first, *after = chain
    text = f"; also affected: {counted(len(after), 'call')} after it, up to {after[-1].layer}" if after else ""
    return replace(first, evidence=first.evidence + text, numbers={**first.numbers, "layers": len(chain)})


def _source_rule(
    kind: FindingKind, case: Callable[[bool], str] = lambda through: ""
) -> Callable[[LayerRule], LayerRule]:
    """Register a rule that judges one call at a time; only the source of a chain is reported.

    ``case`` names the case of the finding, from whether the chain goes on to the last call. Before the first training
    it is ``untrained``.
    """

    def register(judge: LayerRule) -> LayerRule:
        @rule(kind)
        def judge_sources(measured: Measured) -> Iterator[Finding]:
            judged = ((judge(layer, measured.thresholds), layer.saturated is None) for layer in measured.layers)
            for finding, through in _sources(judged):
                yield kind.as_case(finding, "untrained" if measured.untrained else case(through))

        return judge

    return register


# Registers a rule that judges one call and the call before it, both of varying output.
_varying_rule = partial(RULES.each_rule, cases=lambda measured: ((*pair, measured) for pair in measured.varying))


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
    image = "" if place.image is None else f" of image {place.image}"
    return f", the first in channel {place.channel}{axes.format(*at)}{image}"


@_source_rule(CATALOGUE["exploding-activations"])
def _exploding(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.min is None or layer.max is None or max(-layer.min, layer.max) <= thresholds.largest:
        return None
    text = f"values from {layer.min:.4g} to {layer.max:.4g}, beyond {thresholds.largest:g}"
    numbers = {"min": layer.min, "max": layer.max}
    return CATALOGUE["exploding-activations"].finding(layer.key, text, numbers=numbers)


@_source_rule(CATALOGUE["vanishing-activations"], lambda through: "" if through else "recovers")
def _vanishing(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.rms is None or not 0 < layer.rms < thresholds.smallest:
        return None
    text = f"root mean square {layer.rms:.4g}, below {thresholds.smallest:.4g}"
    return CATALOGUE["vanishing-activations"].finding(layer.key, text, numbers={"rms": layer.rms})


@rule(CATALOGUE["constant-output"])
def _constants(measured: Measured) -> Iterator[Finding]:
    kind, keys = CATALOGUE["constant-output"], [layer.key for layer in measured.layers]
    vanished = any(_vanishing(layer, measured.thresholds) for layer in measured.layers)
    judged = ((_constant(layer, measured.thresholds), layer.saturated is None) for layer in measured.layers)
    for finding, through in _sources(judged):
        layer, *later = measured.layers[keys.index(finding.layer) :]
        whole = len(layer.dead_channels) == layer.channels
        case = "" if through else "bypassed"
        if measured.untrained and (vanished or not whole):
            case = "untrained"
        elif through and layer.min == layer.max == 0 and not _is_function(layer):
            case = "" if any(call.channels != layer.channels for call in later) else "head"
        elif not through and (not whole or layer.values == layer.items * layer.channels or "Norm" in layer.call.type):
            case = "side"
        yield kind.as_case(finding, case)


def _constant(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
    if layer.channels and len(layer.dead_channels) == layer.channels:
        value = f"the value {layer.min:.4g}" if layer.min == layer.max else "one value each"
        text = f"all {layer.channels} channels have {value} everywhere"
    elif layer.between_images is not None and layer.std and layer.between_images < _SAME * layer.std:
        text = f"the output is the same for all {layer.items} images"
    else:
        return None
    numbers = {"min": layer.min, "max": layer.max}
    return CATALOGUE["constant-output"].finding(layer.key, text, numbers=numbers)


@rule(CATALOGUE["saturated"])
def _saturations(measured: Measured) -> Iterator[Finding]:
    kind, last = CATALOGUE["saturated"], measured.layers[-1:]
    for layer in measured.layers:
        if (finding := _saturated(layer, measured.thresholds)) is not None:
            is_gate = _is_squeezed(layer) or (layer.channels == 1 and len(layer.shape) > 1)  # one map for all channels
            yield kind.as_case(finding, "gate" if is_gate else "output" if layer in last else "")


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
    shares = layer.saturated_by_channel
    return set() if shares is None else {at for at in layer.dead_channels if shares[at] == 1}


def _own_dead(layer: LayerStatistics, before: LayerStatistics | None) -> tuple[int, ...]:
    return tuple(at for at in layer.dead_channels if before is None or at not in before.dead_channels)


@_varying_rule(CATALOGUE["dead-channels"])
def _dead(layer: LayerStatistics, before: LayerStatistics | None, measured: Measured) -> Finding | None:
    if measured.few or len(layer.dead_channels) / max(layer.channels, 1) <= measured.thresholds.dead:
        return None
    reported = _stuck(layer) if _saturated(layer, measured.thresholds) is not None else set()
    dead = tuple(at for at in _own_dead(layer, before) if at not in reported)
    if not dead:
        return None
    lows = {float(layer.by_channel.low[at]) for at in dead}
    value = f"{lows.pop():.4g}" if len(lows) == 1 else "their value"
    text = f"{len(dead)} of {layer.channels} channels never {'leaves' if len(dead) == 1 else 'leave'} {value}"
    text += f": {listed(dead)}"
    inherited = len(layer.dead_channels) - len(_own_dead(layer, before))
    if before is not None and inherited:
        text += f" ({inherited} more {'was' if inherited == 1 else 'were'} constant before it, in {before.key})"
    numbers = {"dead": len(dead), "channels": layer.channels, "images": layer.items}
    case = "" if _is_function(layer) else "weights"
    case = "proven" if measured.images >= _PROOF else "bounded" if layer.saturated is not None else case
    many = len(layer.dead_channels) / layer.channels > _MANY_DEAD and not _is_squeezed(layer)
    severity = "warning" if many else "note"
    kind = CATALOGUE["dead-channels"]
    return kind.finding(layer.key, text, case, channels=dead, numbers=numbers, severity=severity)


@_varying_rule(CATALOGUE["duplicate-channels"])
def _duplicates(layer: LayerStatistics, before: LayerStatistics | None, measured: Measured) -> Finding | None:
    inherited = [set(group) for group in before.duplicate_channels] if before is not None else []
    groups = tuple(
        group for group in layer.duplicate_channels if not any(other.issuperset(group) for other in inherited)
    )
    if not groups:
        return None
    channels = tuple(sorted(at for group in groups for at in group))
    text = f"{len(channels)} of {layer.channels} channels are the same as another: {alike(groups)}"
    numbers = {"duplicate": len(channels), "channels": layer.channels}
    kind, many = CATALOGUE["duplicate-channels"], len(channels) - len(groups) > _MANY_DUPLICATE * layer.channels
    case = "many" if many and not measured.few and not _is_squeezed(layer) else ""
    return kind.finding(layer.key, text, case, channels=channels, groups=groups, numbers=numbers)


@_varying_rule(CATALOGUE["low-rank"])
def _low_rank(layer: LayerStatistics, before: LayerStatistics | None, measured: Measured) -> Finding | None:
    if layer.rank is None or not measured.thresholds.rank or layer.nan or layer.inf:
        return None
    most = layer.highest_rank
    if most < 2 or layer.rank >= max(measured.thresholds.rank * most, _ONE_DIRECTION):
        return None
    text = f"effective rank {layer.rank:.3g} of at most {most}"
    numbers = {"rank": layer.rank, "channels": layer.channels, "most": most}
    return CATALOGUE["low-rank"].finding(layer.key, text, numbers=numbers)


@rule(CATALOGUE["negative-variance"])
def _negative(measured: Measured) -> Iterator[Finding]:
    for drift in measured.drifts:
        if channels := tuple((drift.ratio < 0).nonzero()[0].tolist()):
            text = f"the running variance of {counted(len(channels), 'channel')} of {len(drift.ratio)} is below 0"
            text += f": {listed(channels)}"
            yield CATALOGUE["negative-variance"].finding(drift.layer, text, channels=channels)


@rule(CATALOGUE["batchnorm-drift"])
def _drifts(measured: Measured) -> Iterator[Finding]:
    """The first BatchNorms whose inputs do not match their statistics, or suddenly match them far less than before."""
    is_off = math.isinf(measured.thresholds.shift) and math.isinf(measured.thresholds.ratio)
    steps = {} if is_off else sudden_drifts(measured.drifts, measured.images)
    found: dict[int, Finding] = {}
    for at, drift in enumerate(measured.drifts):
        finding, step = _drift(drift, measured), steps.get(drift.layer)
        if step is not None:
            finding = replace(step, severity="warning") if finding and finding.severity == "warning" else step
        found |= {at: finding} if finding is not None else {}
    strong = [at for at, finding in found.items() if float(finding.numbers.get("times") or 0) >= WEAK_STEP]

    def follows(chain: list[int], at: int) -> bool:
        own = found[at].layer in steps and found[chain[0]].severity == "note"
        return at > min(strong, default=at) or (at - 1 in chain and not own)

    yield from (_source([found[at] for at in chain]) for chain in chains(found, follows))


def _drift(drift: BatchNormDrift, measured: Measured) -> Finding | None:
    if not drift.updated or drift.items < 2:
        return None
    shift, ratio = drift.median_shift, drift.median_ratio
    if not (shift > measured.thresholds.shift or ratio > measured.thresholds.ratio):
        return None
    wide = shift > _WIDE_SHIFT or ratio > _WIDE_RATIO
    words = ["assumed"] * measured.assumed + ["few"] * (measured.few and not wide)
    text = f"in the median channel the mean is off by {shift:.3g} standard deviations, the variance by a factor"
    numbers = {"shift": shift, "ratio": ratio}
    return CATALOGUE["batchnorm-drift"].finding(drift.layer, f"{text} {ratio:.3g}", " ".join(words), numbers=numbers)


@rule(CATALOGUE["few-images"])
def _few_images(measured: Measured) -> Iterator[Finding]:
    dead = [layer for layer, before in measured.varying if _own_dead(layer, before)]
    if not measured.few or not dead:
        return
    channels = sum(len(_own_dead(layer, before)) for layer, before in measured.varying)
    are = "is" if channels == 1 else "are"
    text = f"{counted(channels, 'channel')} of {counted(len(dead), 'call')} {are} constant on"
    text += f" {counted(measured.images, 'image')}"
    numbers = {"images": measured.images, "channels": channels, "calls": len(dead)}
    yield CATALOGUE["few-images"].finding("", text, numbers=numbers)
