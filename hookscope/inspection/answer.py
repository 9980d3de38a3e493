"""Places to look at that are no findings: where the answer comes from, and layers unlike those of their kind.

All are notes, in this order. Places of one kind are in the order of their numbers:

| kind | what the place is |
| --- | --- |
| dominates-answer | a channel far larger than its neighbours; without it the answer is another, or much more probable |
| changes-answer | a channel without which another class is the answer |
| carries-answer | a channel without which the probability of the answer falls by at least a quarter of itself |
| supports-answer | if no channel does that: one without which it falls by at least 5 percentage points |
| carries-together | where no channel does that: the fewest channels of one layer without which it falls by half |
| classes-separate | the first layer whose channel means separate images of different answers |
| adds-nothing | a block that hardly changes its input |
| adds-most | the block that changes its input most |
| widest-maps | a layer, or a channel, whose largest absolute value is far above the usual one |
| emptiest-maps | the layer with far more zeros than others, or with the most constant maps |
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.findings import percent
from hookscope.hooks import differentiable
from hookscope.inspection.facts import CallFacts, Evidence, ImageMaps, Place
from hookscope.inspection.outliers import block_places, far_beyond, map_places, sizes_of
from hookscope.interventions import scores_without
from hookscope.scores import class_label, probabilities

_RISE = 2.0  # how far the ratio after the layer is above that before it, at least
_BEFORE = 0.05  # without images of one answer: the distance before the layer over that after it, at most
_AGREE = 0.9  # share of layers that are on their side of the threshold
_FEWEST = 4  # layers
_ROUNDING = 1e-6  # distance of equal images
_PAIRS = 2  # of images with one answer, from which their usual distance is known


def distances(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """``(n, n)`` distances of images with channel means ``(n, C)``: norm of the difference over the root mean square
    of both norms, from 0 to 2."""
    squares = (means**2).sum(1)
    apart = ((means[:, None] - means[None]) ** 2).sum(2)
    both = (squares[:, None] + squares[None]) / 2
    shares: NDArray[np.float64] = np.sqrt(np.divide(apart, both, out=np.zeros_like(apart), where=both > 0))
    return shares


def separation(means: NDArray[np.float64], answers: Sequence[int]) -> float:
    """How far images of different answers are apart.

    With enough pairs of images of one answer, the mean distance of pairs of different answers over theirs; else the
    mean distance of pairs of different answers.
    """
    between, within = _pairs(answers)
    apart = distances(means)
    of_different = float(np.mean([apart[pair] for pair in between]))
    if len(within) < _PAIRS:
        return of_different
    of_one = float(np.mean([apart[pair] for pair in within]))
    return (of_different + _ROUNDING) / (of_one + _ROUNDING)


def _pairs(answers: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The pairs of images of different answers, and those of one answer."""
    pairs = list(itertools.combinations(range(len(answers)), 2))
    return [(i, k) for i, k in pairs if answers[i] != answers[k]], [
        (i, k) for i, k in pairs if answers[i] == answers[k]
    ]


def split(values: Sequence[float]) -> int | None:
    """The first layer of the later side: all values before are low, and all values from there on high.

    A value is high above the geometric mean of the median of the first and that of the last tenth, where the first
    counts as at least a hundredth of the last. None if more than a tenth of the values are on the wrong side.
    """
    tenth = max(len(values) // 10, 1)
    early, late = float(np.median(values[:tenth])), float(np.median(values[-tenth:]))
    high = np.array(values) > math.sqrt(max(early, late / 100) * late)
    right = [int((~high[:at]).sum() + high[at:].sum()) for at in range(len(values) + 1)]
    at = int(np.argmax(right))
    return at if 0 < at < len(values) and late > early and right[at] >= _AGREE * len(values) else None


def separating_places(evidence: Evidence) -> Iterator[Place]:
    """The layer where classes begin to separate, if there are two answers or more, and a clear rise."""
    answers = [image.predictions[0].index for image in evidence.images if image.predictions]
    if len(answers) < len(evidence.images) or len(set(answers)) < 2:
        return
    measured: dict[str, float] = {}
    for layer in evidence.layers:
        maps = [image for image in layer.images if image is not None]
        if len(maps) == len(answers) and layer.call.key not in measured:
            measured[layer.call.key] = separation(np.array([image.mean for image in maps]), answers)
    values = list(measured.values())
    at = split(values) if np.isfinite(values).all() and len(values) >= _FEWEST else None
    if at is None:
        return
    before, after = float(np.median(values[:at])), float(np.median(values[at:]))
    related = len(_pairs(answers)[1]) >= _PAIRS
    if after < _RISE * before or (not related and before > _BEFORE * after):
        return
    key = list(measured)[at]
    counts = f"the {len(set(answers))} answers to {len(answers)} images begin to separate"
    apart = (
        f"{after:.3g} times that of images of one answer, {before:.3g} times before"
        if related
        else f"{percent(after)} of their size, {percent(before)} before"
    )
    reason = f"At {key} {counts}: their distance is {apart}."
    numbers = {"before": before, "after": after, "images": len(answers), "answers": len(set(answers))}
    show = f"hookscope visualize MODEL IMAGE --layer {shlex.quote(key)}"
    meaning = (
        f"Before this layer, the channel means of these images differ little. Compare the maps from here on: {show}"
    )
    yield Place("classes-separate", "note", key, reason, None, None, numbers, meaning)


Floats = NDArray[np.float64]

_KINDS = ("dominates-answer", "changes-answer", "carries-answer", "supports-answer", "carries-together")
_LATE = 0.5  # of the multiply-accumulates at most come after a layer whose channels are tried for their gradient
_COST = 1.0  # forward passes that the copies of an image for these may cost
_LAYERS, _OF_LAYER, _DOMINANT = 3, 3, 2  # layers, channels of each, and dominating channels that are tried
_LOST = 0.25  # of its probability, which an answer loses at least without a channel that carries it
_LOST_A_LITTLE = 0.05  # probability that it loses at least without a channel that supports it
_LOST_TOGETHER = 0.5  # of its probability, which an answer loses at least without channels that carry it together
_FEW_TOGETHER = 5  # channels of each layer that are tried, and up to eight times as many of one if these do too little
_MOST, _MOST_SUPPORTING = 2, 2  # places of one image; in all
_DEPENDS = "The answer to this image depends on this channel. See its map, and the classes without it:"
_MEANINGS = {
    "dominates-answer": "One channel decides this answer: its weights may be wrong. See the classes without it:",
    "changes-answer": _DEPENDS,
    "carries-answer": _DEPENDS,
    "supports-answer": "No channel that was tried decides the answer alone. See the classes without this one:",
    "carries-together": "The answer depends on these channels: their maps show on what. See the classes without them:",
}

REASONS: list[Callable[[Evidence], Iterable[Place]]] = [separating_places, block_places, map_places]
"""What finds places after the channels that carry the answer, the most important first."""


def answer_places(evidence: Evidence) -> list[Place]:
    """The places that are no findings, the most important first; with random weights they would mean nothing."""
    carriers = list(_carriers(evidence))
    known = {(place.layer, place.channels) for place in carriers}
    others = (place for find in REASONS for place in find(evidence))
    return [*carriers, *(place for place in others if (place.layer, place.channels) not in known)]


def _carriers(evidence: Evidence) -> Iterator[Place]:
    """The channels without which the answer to an image changes or falls."""
    rest = _rest(evidence.calls)
    found = [place for number in range(len(evidence.images)) for place in _of_image(evidence, number, rest)]
    best: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for place in sorted(found, key=_rank):
        best.setdefault((place.layer, place.channels), place)  # for the image that needs it most
    yield from [place for place in best.values() if place.kind not in _KINDS[3:]]
    for kind in _KINDS[3:]:
        yield from [place for place in best.values() if place.kind == kind][:_MOST_SUPPORTING]


def _rank(place: Place) -> tuple[int, float]:
    before, after = (float(place.numbers[name] or 0) for name in ("probability", "probability_after"))
    return _KINDS.index(place.kind), -abs(before - after)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A channel, or several of one layer, that may carry the answer.

    ``answer`` is the gradient × activation; ``of`` the number of channels of the layer; ``times`` the size of a channel
    over the usual one, 0 if it is no outlier.
    """

    facts: CallFacts
    channels: tuple[int, ...]
    answer: float
    of: int
    times: float = 0.0

    @property
    def key(self) -> str:
        return self.facts.call.key


def _of_image(evidence: Evidence, number: int, rest: Mapping[str, float]) -> list[Place]:
    """The places of one image: dominating channels, or those of the largest gradient, alone or together."""
    scores = evidence.scores[number]
    if scores is None or not bool(scores.isfinite().all()):
        return []
    maps = list(_explained(evidence, number, scores.shape[1]))
    candidates = list(_candidates(maps))
    dominant = sorted((each for each in candidates if each.times), key=lambda each: -each.times)[:_DOMINANT]
    late = (each for each in candidates if each.answer > 0 and rest[each.key] <= _LATE)
    best = _affordable(sorted(late, key=lambda each: -each.answer), rest)
    places = _best_of_layers(_confirmed(evidence, number, dominant, scores))
    if not any(place.kind == _KINDS[0] for place in places):
        places += _best_of_layers(_confirmed(evidence, number, best, scores))
    places.sort(key=_rank)
    alone = [place for place in places if place.kind != _KINDS[3]][:_MOST]
    return alone or [*places[:1], *_together(evidence, number, maps, rest, scores)]


def _best_of_layers(places: Iterable[Place]) -> list[Place]:
    best: dict[str, Place] = {}
    for place in sorted(places, key=_rank):
        best.setdefault(place.layer, place)
    return list(best.values())


def _explained(evidence: Evidence, number: int, classes: int) -> Iterator[tuple[CallFacts, ImageMaps, Floats]]:
    """The drawn calls with gradient × activation. Channels that are classes themselves explain nothing."""
    facts = {each.call.key: each for each in evidence.calls}
    for layer in evidence.layers:
        maps = layer.images[number]
        if maps is not None and maps.answer is not None and layer.call.key in facts and len(maps.answer) != classes:
            yield facts[layer.call.key], maps, np.nan_to_num(maps.answer, posinf=0, neginf=0)


def _candidates(layers: Iterable[tuple[CallFacts, ImageMaps, Floats]]) -> Iterator[_Candidate]:
    """Of each drawn call the best channels and the outliers."""
    for facts, maps, answer in layers:
        times = far_beyond(sizes_of(maps))
        best = np.argsort(-answer, kind="stable")[:_OF_LAYER].tolist()
        for channel in dict.fromkeys([*best, *times]):
            yield _Candidate(facts, (channel,), float(answer[channel]), len(answer), times.get(channel, 0.0))


def _together(
    evidence: Evidence,
    number: int,
    layers: Sequence[tuple[CallFacts, ImageMaps, Floats]],
    rest: Mapping[str, float],
    scores: Tensor,
) -> list[Place]:
    """The fewest channels of one layer that carry the answer together; more than five only where these do not."""
    late = [each for each in layers if rest[each[0].call.key] <= _LATE] or layers
    groups = [group for facts, _, answer in late for group in _groups(facts, answer, range(2, _FEW_TOGETHER + 1))]
    groups = _affordable(sorted(groups, key=lambda each: (-len(each.channels), -each.answer)), rest)
    places = _confirmed(evidence, number, groups, scores)
    if not any(place.kind == _KINDS[4] for place in places) and groups:
        sizes = [_FEW_TOGETHER * 2**power for power in range(1, 4)]
        best = groups[0].key
        more = [group for facts, _, answer in late if facts.call.key == best for group in _groups(facts, answer, sizes)]
        places = _confirmed(evidence, number, _affordable(more, rest), scores)
    together = [place for place in places if place.kind == _KINDS[4]]
    return sorted(together, key=lambda place: (len(place.channels or ()), _rank(place)))[:1]


def _groups(facts: CallFacts, answer: Floats, sizes: Iterable[int]) -> Iterator[_Candidate]:
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
        keys = {each.key for each in (*chosen, candidate)}
        if len(keys) <= _LAYERS and (len(chosen) + 1) * max(rest[key] for key in keys) <= _COST:
            chosen.append(candidate)
    return chosen


def _confirmed(evidence: Evidence, number: int, candidates: list[_Candidate], scores: Tensor) -> list[Place]:
    """The candidates without which the answer changes or falls far."""
    if not candidates:
        return []
    net = evidence.net
    order = {call.call.key: at for at, call in enumerate(evidence.calls)}
    candidates = sorted(candidates, key=lambda each: order[each.key])
    channels = [(each.facts.call, each.facts.shape, each.channels) for each in candidates]
    with differentiable(net.model):  # in eval mode
        without = scores_without(net.model, net.inputs(*evidence.inputs[number]), scores, channels)
    places = (_place(evidence, number, *pair) for pair in zip(candidates, without, strict=True))
    return [place for place in places if place is not None]


def _place(evidence: Evidence, number: int, candidate: _Candidate, after: Tensor) -> Place | None:
    """The place of channels without which the scores are ``after`` ``(K,)``; None if that changes little."""
    answer = evidence.images[number].predictions[0]
    probability, best = float(probabilities(after)[answer.index]), int(after.argmax())
    lost = answer.probability - probability
    rises = bool(candidate.times) and -lost >= _LOST
    together = len(candidate.channels) > 1
    least = _LOST_TOGETHER * answer.probability if together else _LOST_A_LITTLE
    if not bool(after.isfinite().all()) or not (rises or lost >= least):
        return None
    names, key = evidence.net.categories, candidate.key
    label, other = answer.name, class_label(best, names) or f"class {best}"
    moves = f"{label} {'falls' if lost > 0 else 'rises'} from {_share(answer.probability)} to {_share(probability)}"
    outcome = moves if best == answer.index else f"{moves}, and the answer is {other}"
    of_image = f" for {os.path.basename(evidence.images[number].name)}" if len(evidence.images) > 1 else ""
    carries = lost >= _LOST * answer.probability
    if together:
        kind = _KINDS[4]
        reason = f"{_listed(candidate)} of {key} carry the answer{of_image} together: without them {outcome}."
    elif candidate.times and (rises or carries):
        kind = _KINDS[0]
        outcome = moves if best == answer.index else f"{other} is the answer, not {label}"
        size = f"{candidate.times:.3g} times the layer's usual value"
        reason = f"Channel {candidate.channels[0]} of {key} reaches {size}: without it {outcome}."
    else:
        kind = _KINDS[3 if not carries else 2 if best == answer.index else 1]
        does = "carries" if carries else "supports"
        reason = f"Channel {candidate.channels[0]} of {key} {does} the answer{of_image}: without it {outcome}."
    numbers = {
        "probability": answer.probability,
        "probability_after": probability,
        "score": answer.score,
        "score_after": float(after[answer.index]),
        "gradient_x_activation": candidate.answer,
        "class": answer.index,
        "class_after": best,
    }
    if candidate.times:
        numbers["times"] = candidate.times
    channels = ",".join(map(str, candidate.channels))
    show = f"hookscope intervene MODEL IMAGE --at {shlex.quote(key)} zero:channels={channels} --classes"
    return Place(kind, "note", key, reason, candidate.channels, number, numbers, f"{_MEANINGS[kind]} {show}")


def _listed(candidate: _Candidate) -> str:
    """The channels of a group; of a large group their number."""
    *others, last = candidate.channels
    if len(others) < _FEW_TOGETHER:
        return f"Channels {', '.join(map(str, others))} and {last}"
    return f"{len(candidate.channels)} of the {candidate.of} channels"


def _share(probability: float) -> str:
    """A probability in percent, short: what differs stays different."""
    return f"{100 * probability:.0f} %" if 0.01 <= probability <= 0.99 else percent(probability)
