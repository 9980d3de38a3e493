"""The first layer whose channel means separate images of different answers."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hookscope.findings import percent
from hookscope.inspection.evidence import Evidence
from hookscope.inspection.facts import Place

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
