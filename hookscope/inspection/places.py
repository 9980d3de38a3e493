"""Where to look first: causes before consequences, the most severe first, each cause once; then places in the answer.

Places that are not findings are notes, in this order. Places of one kind are in the order of their numbers:

| kind | what the place is |
| --- | --- |
| carries-answer | the fewest channels of a layer without which the answer loses a quarter of its probability |
| classes-separate | the first layer whose channel means separate images of different answers |
| adds-nothing | a block that hardly changes its input |
| adds-most | the block that changes its input most |
| widest-maps | a layer, or a channel, whose largest absolute value is far above the usual one |
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from hookscope.errors import spelled
from hookscope.findings import SEVERITIES, Finding, counted, percent, single
from hookscope.hooks import differentiable, enclosing
from hookscope.inspection.facts import CallFacts, ImageMaps, InspectionEvidence, Place
from hookscope.inspection.findings import network_findings
from hookscope.inspection.outliers import block_places, far_beyond, map_places, selected, separating_places, sizes_of
from hookscope.interventions import scores_without
from hookscope.scores import class_label, probabilities
from hookscope.statistics import WEAK_STEP

MOST = 12
"""Places of an inspection."""
_FEW_DEAD = 2  # layers with dead filters; an EfficientNet-Lite has 28
_FEW_BOUNDED = 4  # layers with bounds, such as one Tanh before the last layer, which training may saturate
_MOST_NOTES = 7  # so that the answer has places too

_SPREADS = {
    "non-finite", "negative-variance", "exploding-weights", "exploding-variance", "exploding-activations",
    "vanishing-activations", "constant-weights", "constant-output", "initial-weights", "outlier-layer",
    "outlier-weights", "never-updated", "sudden-drift", "batchnorm-drift", "input-mismatch", "unlike-siblings",
    "attention-axis",
}  # fmt: skip
"""Findings that change what every later layer computes."""
_STORED = {"never-updated", "negative-variance"}  # of buffers, which follow from nothing before them


@dataclass
class _Cause:
    """A layer with findings of its own, and the later calls whose findings follow from them."""

    at: float
    layer: str
    findings: list[Finding]
    weights: list[Finding]
    after: list[Finding] = field(default_factory=list)

    @property
    def spreads(self) -> bool:
        """Whether later layers compute something else; with most filters dead they do."""
        dead = any(each.finding == "dead-filters" and each.severity != "note" for each in self.findings)
        return dead or any(each.finding in _SPREADS for each in self.findings)

    @property
    def is_weak(self) -> bool:
        return all(finding.finding == "sudden-drift" and _times(finding) < WEAK_STEP for finding in self.findings)

    @property
    def main(self) -> Finding:
        """The most severe finding on weights, which are the cause, else the most severe of all."""
        own = self.weights or self.findings
        return min(own, key=lambda finding: (SEVERITIES.index(finding.severity), -_times(finding)))

    @property
    def channels(self) -> tuple[int, ...] | None:
        """The channels of the main finding, else of another."""
        known = [finding.channels for finding in (self.main, *self.findings) if finding.channels]
        return known[0] if known else None

    @property
    def consequences(self) -> int:
        """Number of later calls that are affected; a finding counts the calls of its chain."""
        own = [int(finding.numbers.get("layers") or 1) - 1 for finding in self.findings]
        return max(own) + sum(int(finding.numbers.get("layers") or 1) for finding in self.after)

    @property
    def severity(self) -> str:
        """The highest severity of its findings, here and later."""
        return min((finding.severity for finding in (*self.findings, *self.after)), key=SEVERITIES.index)


def find_places(evidence: InspectionEvidence) -> tuple[Place, ...]:
    """At most twelve places to look at, the most important first.

    First come random weights and outputs, then what a reference shows. Findings follow by severity, then by how many
    times they exceed what is usual, then in order of execution. What follows from a broken layer is told with it.
    """
    findings = [*network_findings(evidence), *_unusual(evidence)]
    random = [_place(_Cause(-1, "", [finding], [])) for finding in findings if finding.finding == "random-weights"]
    causes = _causes(evidence, [finding for finding in findings if finding.finding != "random-weights"])
    causes.sort(key=lambda cause: (SEVERITIES.index(cause.severity), -_times(cause.main), cause.at))
    places = [_place(cause) for cause in causes]
    severe = [place for place in places if place.severity != "note"]
    notes = [place for place in places if place.severity == "note"][:_MOST_NOTES]
    left = evidence.against.finding if evidence.against else None
    told = [_place(_Cause(-1, left.layer, [left], []))] if left else []  # a reference knows more than any rule
    entries = sorted([*random, *told, *severe, *notes], key=lambda place: place.kind != "random-output")
    reported = {(place.layer.removesuffix(".weight"), channel) for place in entries for channel in place.channels or ()}
    # what explains an answer means nothing for random weights
    for spot in [] if random else answer_places(evidence):
        if not spot.channels or {(spot.layer, channel) for channel in spot.channels} - reported:
            entries.append(spot)
    return tuple(entries[:MOST])


def _order(evidence: InspectionEvidence) -> dict[str, int]:
    """The number of each call by its key, and of the first call of each layer, or in each block, by its name."""
    order: dict[str, int] = {}
    for number, facts in enumerate(evidence.calls):
        for name in filter(None, enclosing(facts.call.name)):
            order.setdefault(name, number)
        order[facts.call.key] = number
    return order


def _times(finding: Finding) -> float:
    """How many times a finding exceeds what is usual; of duplicate filters how many work as one."""
    filters, spare = (float(finding.numbers.get(name) or 0) for name in ("filters", "duplicates"))
    return min(filters / (filters - spare), 10.0) if spare else float(finding.numbers.get("times") or 1.0)


def _unusual(evidence: InspectionEvidence) -> Iterator[Finding]:
    """The findings on activations and parameters that are unusual: no notes, or unlike the rest of the network.

    Sound networks have dead filters in many layers; dead and duplicate channels of few images are chance.
    """
    findings = list(single(evidence.findings))
    dead = [finding for finding in findings if finding.finding == "dead-filters"]
    bounded = sum(layer.saturated is not None for layer in evidence.statistics)
    for finding in findings:
        bounded_few = finding.finding == "saturated" and bounded < _FEW_BOUNDED
        if bounded_few or (finding.finding == "dead-channels" and evidence.is_bypassed(finding.layer)):
            yield replace(finding, severity="note")
            continue
        unusual = finding.severity != "note" or finding.finding in ("duplicate-filters", "sudden-drift")
        unusual |= finding in dead and len(dead) <= _FEW_DEAD
        if unusual or (finding.finding == "duplicate-channels" and _same_weights(evidence, finding)):
            yield finding


def _same_weights(evidence: InspectionEvidence, finding: Finding) -> bool:
    """Whether duplicate channels have the same weights, and are not alike on few images only."""
    name = _names(evidence).get(finding.layer, finding.layer)
    weight = dict(evidence.net.model.named_parameters()).get(f"{name}.weight")
    if weight is None or weight.dim() < 2:
        return False
    rows = weight.detach().double().flatten(1)
    groups = (group for group in finding.groups or () if len(group) > 1 and group[-1] < len(rows))
    pairs = ((rows[one], rows[other]) for one, other, *_ in groups)
    return any(float(one.norm()) > 0 and float(cosine_similarity(one, other, 0)) > 0.9999 for one, other in pairs)


def _names(evidence: InspectionEvidence) -> dict[str, str]:
    """The name of the layer of each key."""
    names = {layer.key: layer.call.name for layer in evidence.statistics}
    names |= {facts.call.key: facts.call.name for facts in evidence.calls}
    return names | {row.name: row.layer for row in evidence.parameters}


def _causes(evidence: InspectionEvidence, findings: Sequence[Finding]) -> list[_Cause]:
    names = _names(evidence)
    order = _order(evidence)
    feeders = evidence.feeders()

    def at(finding: Finding) -> float:
        name = names.get(finding.layer, finding.layer)
        return -1.0 if not finding.layer else order.get(finding.layer, order.get(name, len(order)))

    causes: list[_Cause] = []
    parameters = {row.name for row in evidence.parameters}
    # a weight comes before what it makes of an activation
    for finding in sorted(findings, key=lambda item: (at(item), item.layer not in parameters)):
        layer = names.get(finding.layer, finding.layer)
        own = next((cause for cause in causes if cause.layer in (layer, feeders.get(layer))), None)
        if own is not None:
            own.findings.append(finding)
            own.weights += [finding] * (finding.layer in parameters)
            continue
        source = next((cause for cause in causes if cause.spreads and not cause.is_weak), None)
        if source is not None and finding.layer not in parameters and finding.finding not in _STORED:
            source.after.append(finding)
        else:
            causes.append(_Cause(at(finding), layer, [finding], [finding] * (finding.layer in parameters)))
    return causes


def _place(cause: _Cause) -> Place:
    finding, after = cause.main, cause.consequences
    reason = finding.evidence.partition("; ")[0]  # later layers are counted here, for all findings of the cause
    if after:
        reason += f"; {counted(after, 'layer')} after it {'is' if after == 1 else 'are'} affected"
    reason = f"{reason[:1].upper()}{reason[1:]}."
    numbers = {**finding.numbers, **({"after": after} if after else {})}
    about = finding.finding, cause.severity, finding.layer, reason, cause.channels
    return Place(*about, None, numbers, finding.meaning, finding)


Floats = NDArray[np.float64]

_LATE = 0.5  # of the multiply-accumulates at most come after a layer whose channels are tried for their gradient
_COST = 1.0  # forward passes that the copies of an image for these may cost
_LAYERS, _OF_LAYER, _OUTLIERS = 3, 3, 2  # layers, channels of each, and outliers that are tried
# numbers of channels of one layer that are tried; more where fewer do too little
_TOGETHER = (range(2, 6), (10, 20, 40))
_LOST = 0.25  # of its probability, which an answer loses at least without the channels that carry it
_LIKELY = 0.25  # of that loss, which gradient × activation foretells at least: of 500 that lose it, 499 have more
_MOST = 2  # places of one image
_CARRIERS = 4  # places of channels that carry an answer, before all other reasons have theirs

REASONS: list[Callable[[InspectionEvidence], Iterable[Place]]] = [separating_places, block_places, map_places]
"""What finds places after the channels that carry the answer, the most important first."""


def answer_places(evidence: InspectionEvidence) -> list[Place]:
    """The places that are not findings, the most important first; with random weights they would mean nothing."""
    rest = _rest(evidence.calls)
    refused: set[str] = set()
    places = [place for number in range(len(evidence.images)) for place in _of_image(evidence, number, rest, refused)]
    carriers: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for place in sorted(places, key=_rank):
        carriers.setdefault((place.layer, place.channels), place)  # for the image that needs it most
    others = (place for find in REASONS for place in find(evidence))
    first, later = [*carriers.values()][:_CARRIERS], [*carriers.values()][_CARRIERS:]
    return [*first, *(place for place in others if (place.layer, place.channels) not in carriers), *later]


def _rank(place: Place) -> tuple[int, bool, float]:
    """Few channels first, then outliers, then those that move the probability most."""
    before, after = (float(place.numbers[name] or 0) for name in ("probability", "probability_after"))
    return len(place.channels or ()), "times" not in place.numbers, -abs(before - after)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A channel, or several of one layer, that may carry the answer.

    ``answer`` is the gradient × activation; ``of`` the number of channels of the layer; ``times`` the size of a channel
    over the usual one, 0 if it is not an outlier.
    """

    facts: CallFacts
    channels: tuple[int, ...]
    answer: float
    of: int
    times: float = 0.0

    @property
    def key(self) -> str:
        return self.facts.call.key


def _of_image(evidence: InspectionEvidence, number: int, rest: Mapping[str, float], refused: set[str]) -> list[Place]:
    """The places of one image: outliers that decide it, else the channels with most gradient, alone or together.

    ``refused`` is for `scores_without`.
    """
    scores = evidence.scores[number]
    if scores is None or not bool(scores.isfinite().all()):
        return []
    if scores.shape[1] == 1 and not evidence.net.categories and not evidence.softmax:
        return []  # one number may be of a regression, which has no probability
    layers = list(_explained(evidence, number, scores.shape[1]))
    late = [layer for layer in layers if rest[layer[0].call.key] <= _LATE]
    likely = _LIKELY if late else 0.0  # of early layers, gradient × activation foretells little
    late = late or layers
    outliers = [
        _Candidate(facts, (channel,), float(answer[channel]), len(answer), times)
        for facts, maps, answer in layers
        for channel, times in far_beyond(sizes_of(maps)).items()
    ]
    outliers.sort(key=lambda outlier: -outlier.times)
    alone = [
        _Candidate(facts, (int(at),), float(answer[at]), len(answer))
        for facts, _, answer in late
        for at in np.argsort(-answer, kind="stable")[:_OF_LAYER]
        if answer[at] > 0
    ]
    together = ([group for layer in late for group in _groups(*layer, sizes)] for sizes in _TOGETHER)
    now = min(max(evidence.images[number].predictions[0].probability, 1e-12), 1 - 1e-12)
    now, then = (math.log(share / (1 - share)) for share in (now, (1 - _LOST) * now))
    groups = ([each for each in group if each.answer >= likely * (now - then)] for group in (alone, *together))
    tries = (_affordable(sorted(group, key=lambda candidate: -candidate.answer), rest) for group in groups)
    for candidates in (outliers[:_OUTLIERS], *tries):
        best: dict[str, Place] = {}
        for place in sorted(_confirmed(evidence, number, candidates, scores, refused), key=_rank):
            best.setdefault(place.layer, place)
        if best:
            return list(best.values())[:_MOST]
    return []


def _explained(
    evidence: InspectionEvidence, number: int, classes: int
) -> Iterator[tuple[CallFacts, ImageMaps, Floats]]:
    """The drawn calls with gradient × activation. Channels that are classes themselves explain nothing."""
    facts = {call.call.key: call for call in evidence.calls}
    for layer in evidence.layers:
        maps = layer.images[number]
        if maps is not None and maps.answer is not None and layer.call.key in facts and len(maps.answer) != classes:
            yield facts[layer.call.key], maps, np.nan_to_num(maps.answer, posinf=0, neginf=0)


def _groups(facts: CallFacts, maps: ImageMaps, answer: Floats, sizes: Iterable[int]) -> Iterator[_Candidate]:
    """So many of the best channels of a call, where as many raise the score."""
    best = np.argsort(-answer, kind="stable")
    raising = int((answer > 0).sum())
    for size in sizes:
        if size <= raising:
            yield _Candidate(facts, tuple(best[:size].tolist()), float(answer[best[:size]].sum()), len(answer))


def _rest(calls: Iterable[CallFacts]) -> dict[str, float]:
    """The share of the multiply-accumulates that come after each call."""
    done = {call.call.key: call.macs for call in calls}
    sums = np.cumsum(list(done.values()))
    return dict(zip(done, (1 - sums / max(sums[-1:].sum(), 1)).tolist(), strict=True))


def _affordable(candidates: Iterable[_Candidate], rest: Mapping[str, float]) -> list[_Candidate]:
    """The first candidates of a few layers; all copies of the image begin at the first of these layers."""
    chosen: list[_Candidate] = []
    for candidate in candidates:
        keys = {member.key for member in (*chosen, candidate)}
        if len(keys) <= _LAYERS and (len(chosen) + 1) * max(rest[key] for key in keys) <= _COST:
            chosen.append(candidate)
    return chosen


def _confirmed(
    evidence: InspectionEvidence, number: int, candidates: list[_Candidate], scores: Tensor, refused: set[str]
) -> list[Place]:
    """The candidates without which the answer changes or falls far."""
    if not candidates:
        return []
    net = evidence.net
    order = {call.call.key: at for at, call in enumerate(evidence.calls)}
    candidates = sorted(candidates, key=lambda candidate: order[candidate.key])
    channels = [(candidate.facts.call, candidate.facts.shape, candidate.channels) for candidate in candidates]

    def places(without: Tensor) -> list[Place]:
        found = (_without_channels(evidence, number, *pair) for pair in zip(candidates, without, strict=True))
        return [place for place in found if place is not None]

    with differentiable(net.model):  # in eval mode
        inputs = net.inputs(*evidence.inputs[number])
        return places(scores_without(net.model, inputs, scores, channels, places, refused))


def _without_channels(evidence: InspectionEvidence, number: int, candidate: _Candidate, after: Tensor) -> Place | None:
    """The place of channels without which the scores are ``after`` ``(K,)``; None if that changes little."""
    answer = evidence.images[number].predictions[0]
    probability, best = float(probabilities(after)[answer.index]), int(after.argmax())
    change = probability - answer.probability
    matters = change <= -_LOST * answer.probability or (candidate.times and change >= _LOST)
    if not matters or not bool(after.isfinite().all()):
        return None
    names, key = evidence.net.categories, candidate.key
    outcome = f"{answer.name} {'falls' if change < 0 else 'rises'} from {_share(answer.probability)}"
    outcome += f" to {_share(probability)}"
    if best != answer.index:
        outcome += f", and the answer is {class_label(best, names) or f'class {best}'}"
    name = os.path.basename(evidence.images[number].name) or f"image {number}"
    of_image = f" for {name}" if len(evidence.images) > 1 else ""
    size = f" with {candidate.times:.3g} times the layer's usual value" if candidate.times else ""
    carry, them = ("carries the answer", "it") if len(candidate.channels) == 1 else ("carry the answer", "them")
    reason = f"{_listed(candidate)} of {key} {carry}{of_image}{size}: without {them} {outcome}."
    numbers = {
        "probability": answer.probability,
        "probability_after": probability,
        "score": answer.score,
        "score_after": float(after[answer.index]),
        "gradient_x_activation": candidate.answer,
        "class": answer.index,
        "class_after": best,
        **({"times": candidate.times} if candidate.times else {}),
    }
    meaning = "The answer to this image depends on " + ("this channel." if them == "it" else "these channels.")
    meaning += " Its weights may be wrong." if candidate.times else ""
    channels, layer = ",".join(map(str, candidate.channels)), selected(key)
    meaning += spelled(
        f" See the classes without {them}: "
        f"‹intervene(net.model, {{{layer!r}: Zero(channels={list(candidate.channels)})}})|"
        f"hookscope intervene MODEL IMAGE --at {shlex.quote(layer)} zero:channels={channels} --classes›"
    )
    return Place("carries-answer", "note", key, reason, candidate.channels, number, numbers, meaning)


def _listed(candidate: _Candidate) -> str:
    """The channels of a group; of a large group their number."""
    *others, last = candidate.channels
    if not others:
        return f"Channel {last}"
    if len(others) < max(_TOGETHER[0]):
        return f"Channels {', '.join(map(str, others))} and {last}"
    return f"{len(candidate.channels)} of the {candidate.of} channels"


def _share(probability: float) -> str:
    """A probability in percent, short: what differs stays different."""
    return f"{100 * probability:.0f} %" if 0.01 <= probability <= 0.99 else percent(probability)
