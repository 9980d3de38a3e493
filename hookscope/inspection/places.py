"""Where to look first: causes before consequences, the most severe first, each cause once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.nn.functional import cosine_similarity

from hookscope.findings import SEVERITIES, Finding, counted, single
from hookscope.inspection.answer import answer_places
from hookscope.inspection.facts import InspectionEvidence, Place
from hookscope.inspection.findings import network_findings

MOST = 12
"""Places of an inspection."""
_FEW_DEAD = 2  # layers with dead filters; an EfficientNet-Lite has 28
_WEAK = 1.5  # times what is usual: single images reach it
_MOST_NOTES = 7  # so that the answer has places too

_SPREADS = {
    "non-finite",
    "negative-variance",
    "exploding-weights",
    "exploding-variance",
    "exploding-activations",
    "vanishing-activations",
    "constant-weights",
    "constant-output",
    "initial-weights",
    "outlier-layer",
    "outlier-weights",
    "sudden-drift",
    "batchnorm-drift",
    "input-mismatch",
}
"""Findings that change what every later layer computes."""


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
        return any(finding.finding in _SPREADS for finding in self.findings)

    @property
    def is_weak(self) -> bool:
        return all(finding.finding == "sudden-drift" and _times(finding) < _WEAK for finding in self.findings)

    @property
    def main(self) -> Finding:
        """The most severe finding on weights, which are the cause, else the most severe of all."""
        return min(
            self.weights or self.findings, key=lambda finding: (SEVERITIES.index(finding.severity), -_times(finding))
        )

    @property
    def channels(self) -> tuple[int, ...] | None:
        """The channels of the main finding, else of another."""
        known = [finding.channels for finding in (self.main, *self.findings) if finding.channels]
        return known[0] if known else None

    @property
    def consequences(self) -> int:
        """Number of later calls that are affected; a finding counts the calls of its chain."""
        own = [int(each.numbers.get("layers") or 1) - 1 for each in self.findings]
        return max(own) + sum(int(each.numbers.get("layers") or 1) for each in self.after)

    @property
    def severity(self) -> str:
        """The highest severity of its findings, here and later."""
        return min((each.severity for each in (*self.findings, *self.after)), key=SEVERITIES.index)


def find_places(evidence: InspectionEvidence) -> tuple[Place, ...]:
    """At most twelve places to look at, the most important first.

    First of all come random weights. Findings follow by severity, then by how many times they exceed what is usual,
    then in order of execution. What follows from a broken layer is reported with that layer.
    """
    findings = [*network_findings(evidence), *_unusual(evidence)]
    random = [_place(_Cause(-1, "", [each], [])) for each in findings if each.finding == "random-weights"]
    causes = _causes(evidence, [finding for finding in findings if finding.finding != "random-weights"])
    causes.sort(key=lambda cause: (SEVERITIES.index(cause.severity), -_times(cause.main), cause.at))
    places = [_place(cause) for cause in causes]
    severe = [place for place in places if place.severity != "note"]
    notes = [place for place in places if place.severity == "note"][:_MOST_NOTES]
    found = [*random, *severe, *notes]
    reported = {(place.layer.removesuffix(".weight"), channel) for place in found for channel in place.channels or ()}
    # what explains an answer means nothing for random weights
    more = [] if random else answer_places(evidence)
    more = [
        each for each in more if not each.channels or {(each.layer, channel) for channel in each.channels} - reported
    ]
    # what is wrong in a layer empties the maps of the calls after it
    at, order = min((cause.at for cause in causes if cause.spreads), default=math.inf), _order(evidence)
    after = {facts.call.key for facts in evidence.calls if order[facts.call.key] >= at}
    more = [place for place in more if not (place.kind == "emptiest-maps" and place.layer in after)]
    return tuple([*found, *more][:MOST])


def _order(evidence: InspectionEvidence) -> dict[str, int]:
    """The number of each call by its key, and of the first call of each layer by its name."""
    order: dict[str, int] = {}
    for number, facts in enumerate(evidence.calls):
        order.setdefault(facts.call.name, number)
        order[facts.call.key] = number
    return order


def _times(finding: Finding) -> float:
    """How many times a finding exceeds what is usual."""
    return float(finding.numbers.get("times") or 1.0)


def _unusual(evidence: InspectionEvidence) -> Iterator[Finding]:
    """The findings on activations and parameters that are unusual: no notes, or unlike the rest of the network.

    Sound networks have dead filters in many layers; dead and duplicate channels of few images are chance.
    """
    found = list(single(evidence.findings))
    dead = [finding for finding in found if finding.finding == "dead-filters"]
    for finding in found:
        unusual = finding.severity != "note" or finding.finding == "duplicate-filters"
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
    return any(
        len(group) > 1
        and group[-1] < len(rows)
        and float(rows[group[0]].norm()) > 0
        and float(cosine_similarity(rows[group[0]], rows[group[1]], 0)) > 0.9999
        for group in finding.groups or ()
    )


def _names(evidence: InspectionEvidence) -> dict[str, str]:
    """The name of the layer of each key."""
    names = {layer.key: layer.call.name for layer in evidence.statistics}
    names |= {facts.call.key: facts.call.name for facts in evidence.calls}
    return names | {row.name: row.layer for row in evidence.parameters}


def _causes(evidence: InspectionEvidence, findings: Sequence[Finding]) -> list[_Cause]:
    names = _names(evidence)
    order = _order(evidence)
    feeders = _feeders(evidence)

    def at(finding: Finding) -> float:
        name = names.get(finding.layer, finding.layer)
        return -1.0 if not finding.layer else order.get(finding.layer, order.get(name, len(order)))

    causes: list[_Cause] = []
    parameters = {row.name for row in evidence.parameters}
    # a weight comes before what it makes of an activation
    for finding in sorted(findings, key=lambda each: (at(each), each.layer not in parameters)):
        layer = names.get(finding.layer, finding.layer)
        own = next((cause for cause in causes if cause.layer in (layer, feeders.get(layer))), None)
        if own is not None:
            own.findings.append(finding)
            own.weights += [finding] * (finding.layer in parameters)
            continue
        weak = finding.finding == "sudden-drift"  # it may matter after a drift that is hardly one
        source = next((cause for cause in causes if cause.spreads and not (weak and cause.is_weak)), None)
        if source is not None and finding.layer not in parameters:
            source.after.append(finding)
        else:
            causes.append(_Cause(at(finding), layer, [finding], [finding] * (finding.layer in parameters)))
    return causes


def _feeders(evidence: InspectionEvidence) -> dict[str, str]:
    """The layer with weights right before each BatchNorm."""
    kinds = {row.layer: row for row in evidence.parameters}
    feeders, last = {}, ""
    for facts in evidence.calls:
        row = kinds.get(facts.call.name)
        if row is None:
            continue
        if row.name.endswith(("running_mean", "running_var")):
            feeders[facts.call.name] = last
        else:
            last = facts.call.name
    return feeders


def _place(cause: _Cause) -> Place:
    finding, after = cause.main, cause.consequences
    reason = finding.evidence.partition("; ")[0]  # later layers are counted here, for all findings of the cause
    if after:
        reason += f"; {counted(after, 'layer')} after it {'is' if after == 1 else 'are'} affected"
    reason = f"{reason[:1].upper()}{reason[1:]}."
    numbers = {**finding.numbers, **({"after": after} if after else {})}
    return Place(
        finding.finding, cause.severity, finding.layer, reason, cause.channels, None, numbers, finding.meaning, finding
    )
