"""Layers, blocks and channels unlike others of their kind, and the layer where classes begin to separate."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hookscope.errors import spelled
from hookscope.findings import percent
from hookscope.hooks import layer_text, passes_values_on
from hookscope.inspection.facts import CallFacts, ImageMaps, InspectedLayer, InspectionEvidence, Place

_FEWEST = 4  # blocks, calls or channels of one kind among which one can be unusual
_DEVIATIONS, _TIMES = 6.0, 8.0  # sound networks have channels at 4.7 deviations (6.6 times the usual value) and less
_LEAST_DEVIATION = 0.15  # of the logarithm: nearly equal values make no outlier of a slightly larger one
_NOTHING, _SOMETHING, _MUCH = 0.02, 0.05, 0.5  # changes: of a block that adds nothing, of others, of one that adds most


def deviations(sizes: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How far each of ``sizes`` is from the median: in robust standard deviations of the logarithm, and as a factor.

    The robust standard deviation is 1.4826 times the median distance from the median. Sizes of 0 do not count.
    """
    logs = np.log(sizes, where=sizes > 0, out=np.full(sizes.shape, -np.inf))
    usual = logs[np.isfinite(logs)]
    if len(usual) < _FEWEST:
        return np.zeros(len(sizes)), np.ones(len(sizes))
    distance = logs - np.median(usual)
    spread = max(1.4826 * float(np.median(abs(usual - np.median(usual)))), _LEAST_DEVIATION)
    return distance / spread, np.exp(distance)


def far_beyond(sizes: NDArray[np.float64], least: float = _DEVIATIONS, least_times: float = _TIMES) -> dict[int, float]:
    """The positions of values far beyond the usual one, the largest first, with the factor between them."""
    distance, times = deviations(sizes)
    far = np.flatnonzero((distance >= least) & (times >= least_times))
    return {int(at): float(times[at]) for at in far[np.argsort(-times[far], kind="stable")]}


def sizes_of(maps: ImageMaps) -> NDArray[np.float64]:
    """``(C,)`` the largest finite \\|value\\| of each channel."""
    tiles = maps.tiles
    if tiles.values:
        return abs(np.nan_to_num(np.array(tiles.values), posinf=0, neginf=0))
    sizes: NDArray[np.float64] = np.nan_to_num(np.maximum(abs(tiles.low), abs(tiles.high)), posinf=0, neginf=0)
    return sizes.astype(np.float64)


def block_places(evidence: InspectionEvidence) -> Iterator[Place]:
    """The blocks that add nothing, and the one that adds most, each against the other blocks of its class."""
    kinds: dict[str, dict[str, float]] = {}
    for key, changes in evidence.changes.items():
        if np.isfinite(changes).all():
            block = evidence.net.model.get_submodule(key.partition("#")[0])
            kinds.setdefault(type(block).__name__, {})[key] = float(changes.mean())
    most: list[Place] = []
    for blocks in kinds.values():
        keys, values = list(blocks), np.array(list(blocks.values()))
        usual = float(np.median(values))
        nothing = [key for key in keys if blocks[key] <= min(_NOTHING, usual / _TIMES)]
        if usual >= _SOMETHING and len(keys) >= _FEWEST:
            yield from (_block("adds-nothing", key, blocks) for key in sorted(nothing, key=lambda key: blocks[key]))
        far = [keys[at] for at in list(far_beyond(values, 4.0, 3.0))[:1]]
        most += [_block("adds-most", key, blocks) for key in far if blocks[key] >= _MUCH]
    yield from most


def _block(kind: str, key: str, blocks: Mapping[str, float]) -> Place:
    change, usual = blocks[key], statistics.median(blocks.values())
    others = f"the median of the {len(blocks)} blocks of its class is {_times(usual)}"
    reason = f"{key} changes its input by {_times(change)}; {others}."
    numbers = {"change": change, "median": usual, "blocks": len(blocks)}
    return _note(kind, key, reason, numbers)


def _times(change: float) -> str:
    return percent(change) if change < 10 else f"{change:.3g} times its norm"


def map_places(evidence: InspectionEvidence) -> Iterator[Place]:
    """The channels with the largest values, else the call."""
    channels = list(_widest_channels(evidence.layers))
    yield from channels
    classes = next((scores.shape[1] for scores in evidence.scores if scores is not None), None)
    if not channels:  # which make the layers after them wide
        yield from _widest_call([facts for facts in evidence.calls if _channels(facts) != classes])


def _widest_channels(layers: Sequence[InspectedLayer]) -> Iterator[Place]:
    """Of each layer the channel with values far beyond the other channels; the two largest."""
    outliers: list[tuple[float, InspectedLayer, int, NDArray[np.float64]]] = []
    for layer in layers:
        sizes = np.max([sizes_of(maps) for maps in layer.images if maps is not None], axis=0)
        outliers += [(times, layer, channel, sizes) for channel, times in list(far_beyond(sizes).items())[:1]]
    for times, layer, channel, sizes in sorted(outliers, key=lambda outlier: -outlier[0])[:2]:
        usual = float(np.median(sizes[sizes > 0]))
        reaches = f"{sizes[channel]:.3g}, {times:.3g} times the layer's usual {usual:.3g}"
        reason = f"Channel {channel} of {layer.key} reaches {reaches}."
        numbers = {"largest": float(sizes[channel]), "usual": usual, "times": times}
        yield _note("widest-maps", layer.call.key, reason, numbers, channel)


def _of_type(calls: Sequence[CallFacts]) -> Iterator[list[CallFacts]]:
    """The calls of single layers that make values, type by type."""
    kinds: dict[str, list[CallFacts]] = {}
    for facts in calls:
        if facts.call.order is not None and facts.low is not None and not passes_values_on(facts.call.type):
            kinds.setdefault(facts.call.type, []).append(facts)
    yield from (facts for facts in kinds.values() if len(facts) >= 2 * _FEWEST)


def _channels(facts: CallFacts) -> int | None:
    return facts.shape[1] if isinstance(facts.shape, tuple) and len(facts.shape) > 1 else None


def _widest_call(calls: Sequence[CallFacts]) -> Iterator[Place]:
    outliers: list[tuple[float, CallFacts, float, float]] = []
    for alike in _of_type(calls):
        sizes = np.array([max(abs(facts.low or 0.0), abs(facts.high or 0.0)) for facts in alike])
        usual = float(np.median(sizes[sizes > 0])) if sizes.any() else 0.0
        outliers += [(times, alike[at], sizes[at], usual) for at, times in list(far_beyond(sizes).items())[:1]]
    for times, facts, largest, usual in sorted(outliers, key=lambda outlier: -outlier[0])[:1]:
        key, kind = facts.call.key, facts.call.type
        reason = f"{key} reaches {largest:.3g}, {times:.3g} times the {usual:.3g} that is usual for {kind} here."
        numbers = {"largest": float(largest), "usual": usual, "times": times}
        yield _note("widest-maps", key, reason, numbers)


_MEANINGS = {
    "classes-separate": "Before this layer, the channel means of these images differ little. "
    "Compare the maps from here on:",
    "adds-nothing": "The network may not need this block for these images. See its maps:",
    "adds-most": "This block changes its input more than others of its class. See its maps:",
    "widest-maps": "Such large values may decide an answer alone, and are hard to quantize. See the maps:",
}


def selected(key: str) -> str:
    """What a selection takes for the call of this key."""
    name, mark, call = key.partition("#")
    return layer_text(name) + mark + call


def _note(kind: str, key: str, reason: str, numbers: Mapping[str, float], *channels: int) -> Place:
    layer = selected(key)
    show = spelled(f"‹capture(net.model, {layer!r})|hookscope visualize MODEL IMAGE --layer {shlex.quote(layer)}›")
    return Place(kind, "note", key, reason, channels or None, None, numbers, f"{_MEANINGS[kind]} {show}")


_RISE = 2.0  # how far the ratio after the layer is above that before it, at least
_BEFORE = 0.05  # without images of one answer: the distance before the layer over that after it, at most
_AGREE = 0.9  # share of layers that are on their side of the threshold
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
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
    for i, k in itertools.combinations(range(len(answers)), 2):
        pairs[answers[i] == answers[k]].append((i, k))
    return pairs


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
    apart = f"{percent(after)} of their size, {percent(before)} before"
    if related:
        apart = f"{after:.3g} times the distance of images of one answer, {before:.3g} times before"
    reason = f"At {key} {counts}: their distance is {apart}."
    numbers = {"before": before, "after": after, "images": len(answers), "answers": len(set(answers))}
    yield _note("classes-separate", key, reason, numbers)
