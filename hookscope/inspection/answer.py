"""Places to look at that are not findings: where the answer comes from, and layers unlike others of their kind.

All are notes, in this order. Places of one kind are in the order of their numbers:

| kind | what the place is |
| --- | --- |
| carries-answer | the fewest channels of a layer without which the answer loses a quarter of its probability |
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

from hookscope.errors import spelled
from hookscope.findings import percent
from hookscope.hooks import differentiable
from hookscope.inspection.facts import CallFacts, ImageMaps, InspectionEvidence, Place
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
    """The pairs of images of different answers, and of images of one answer."""
    pairs = list(itertools.combinations(range(len(answers)), 2))
    return [(i, k) for i, k in pairs if answers[i] != answers[k]], [
        (i, k) for i, k in pairs if answers[i] == answers[k]
    ]


def split(values: Sequence[float]) -> int | None:
    """The first layer of the later side: all values before are low, and all values from there on high.

    A value is high above the geometric mean of the medians of the first and of the last tenth, where the first
    counts as at least a hundredth of the last. None if more than a tenth of the values are on the wrong side.
    """
    tenth = max(len(values) // 10, 1)
    early, late = float(np.median(values[:tenth])), float(np.median(values[-tenth:]))
    high = np.array(values) > math.sqrt(max(early, late / 100) * late)
    right = [int((~high[:at]).sum() + high[at:].sum()) for at in range(len(values) + 1)]
    at = int(np.argmax(right))
    return at if 0 < at < len(values) and late > early and right[at] >= _AGREE * len(values) else None


def separating_places(evidence: InspectionEvidence) -> Iterator[Place]:
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
        f"{after:.3g} times the distance of images of one answer, {before:.3g} times before"
        if related
        else f"{percent(after)} of their size, {percent(before)} before"
    )
    reason = f"At {key} {counts}: their distance is {apart}."
    numbers = {"before": before, "after": after, "images": len(answers), "answers": len(set(answers))}
    show = spelled(f"‹capture(net.model, {key!r})|hookscope visualize MODEL IMAGE --layer {shlex.quote(key)}›")
    meaning = (
        f"Before this layer, the channel means of these images differ little. Compare the maps from here on: {show}"
    )
    yield Place("classes-separate", "note", key, reason, None, None, numbers, meaning)


Floats = NDArray[np.float64]

_LATE = 0.5  # of the multiply-accumulates at most come after a layer whose channels are tried for their gradient
_COST = 1.0  # forward passes that the copies of an image for these may cost
_LAYERS, _OF_LAYER, _OUTLIERS = 3, 3, 2  # layers, channels of each, and outliers that are tried
_TOGETHER = (
    range(2, 6),
    (10, 20, 40),
)  # numbers of channels of one layer that are tried; more where fewer do too little
_LOST = 0.25  # of its probability, which an answer loses at least without the channels that carry it
_MOST = 2  # places of one image

REASONS: list[Callable[[InspectionEvidence], Iterable[Place]]] = [separating_places, block_places, map_places]
"""What finds places after the channels that carry the answer, the most important first."""


def answer_places(evidence: InspectionEvidence) -> list[Place]:
    """The places that are not findings, the most important first; with random weights they would mean nothing."""
    rest = _rest(evidence.calls)
    found = [place for number in range(len(evidence.images)) for place in _of_image(evidence, number, rest)]
    carriers: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for place in sorted(found, key=_rank):
        carriers.setdefault((place.layer, place.channels), place)  # for the image that needs it most
    others = (place for find in REASONS for place in find(evidence))
    return [*carriers.values(), *(place for place in others if (place.layer, place.channels) not in carriers)]


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


def _of_image(evidence: InspectionEvidence, number: int, rest: Mapping[str, float]) -> list[Place]:
    """The places of one image: outliers that decide it, else the channels with most gradient, alone or together."""
    scores = evidence.scores[number]
    if scores is None or not bool(scores.isfinite().all()):
        return []
    layers = list(_explained(evidence, number, scores.shape[1]))
    late = [each for each in layers if rest[each[0].call.key] <= _LATE] or layers
    outliers = [
        _Candidate(facts, (channel,), float(answer[channel]), len(answer), times)
        for facts, maps, answer in layers
        for channel, times in far_beyond(sizes_of(maps)).items()
    ]
    outliers.sort(key=lambda each: -each.times)
    alone = [
        _Candidate(facts, (int(at),), float(answer[at]), len(answer))
        for facts, _, answer in late
        for at in np.argsort(-answer, kind="stable")[:_OF_LAYER]
        if answer[at] > 0
    ]
    together = ([group for layer in late for group in _groups(*layer, sizes)] for sizes in _TOGETHER)
    tries = (_affordable(sorted(each, key=lambda each: -each.answer), rest) for each in (alone, *together))
    for candidates in (outliers[:_OUTLIERS], *tries):
        best: dict[str, Place] = {}
        for place in sorted(_confirmed(evidence, number, candidates, scores), key=_rank):
            best.setdefault(place.layer, place)
        if best:
            return list(best.values())[:_MOST]
    return []


def _explained(
    evidence: InspectionEvidence, number: int, classes: int
) -> Iterator[tuple[CallFacts, ImageMaps, Floats]]:
    """The drawn calls with gradient × activation. Channels that are classes themselves explain nothing."""
    facts = {each.call.key: each for each in evidence.calls}
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
        keys = {each.key for each in (*chosen, candidate)}
        if len(keys) <= _LAYERS and (len(chosen) + 1) * max(rest[key] for key in keys) <= _COST:
            chosen.append(candidate)
    return chosen


def _confirmed(evidence: InspectionEvidence, number: int, candidates: list[_Candidate], scores: Tensor) -> list[Place]:
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


def _place(evidence: InspectionEvidence, number: int, candidate: _Candidate, after: Tensor) -> Place | None:
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
    of_image = f" for {os.path.basename(evidence.images[number].name)}" if len(evidence.images) > 1 else ""
    size = f" with {candidate.times:.3g} times the layer's usual value" if candidate.times else ""
    carry, them = ("carries", "it") if len(candidate.channels) == 1 else ("carry", "them")
    reason = f"{_listed(candidate)} of {key} {carry} the answer{of_image}{size}: without {them} {outcome}."
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
    channels = ",".join(map(str, candidate.channels))
    meaning += spelled(
        f" See the classes without {them}: "
        f"‹intervene(net.model, {{{key!r}: Zero(channels={list(candidate.channels)})}})|"
        f"hookscope intervene MODEL IMAGE --at {shlex.quote(key)} zero:channels={channels} --classes›"
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
