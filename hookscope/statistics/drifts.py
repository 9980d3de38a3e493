"""The BatchNorms whose inputs suddenly drift: by how much, and why.

This file needs no torch, see `hookscope.statistics.findings`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from hookscope.findings import CATALOGUE, Finding, counted, listed

if TYPE_CHECKING:
    from hookscope.statistics.totals import BatchNormDrift

WEAK_STEP = 1.5
"""Times a threshold of ``sudden-drift``: single images reach it."""
FEW_VALUES = 16
"""Values of a channel, of which no variance is known."""
_STEPS = {threshold.name: threshold.default for threshold in CATALOGUE["sudden-drift"].thresholds}
_STEP, _SURE = _STEPS["sudden_step"], _STEPS["sudden_sure"]
_MANY_IMAGES = 8  # of which the variances of channels are known well enough
_OPPOSITE = 0.5
_LOST = 1e3  # ratio of the variances of a channel, over the median ratio


def sudden_drifts(drifts: Iterable[BatchNormDrift], images: int) -> dict[str, Finding]:
    """The BatchNorms whose inputs differ far more from their statistics than the inputs of the BatchNorms before.

    On few images all drift a little, later ones more: only a sudden step is a finding.
    """
    largest, found = dict[str, float](), dict[str, Finding]()
    for drift in drifts:
        if not (drift.updated and drift.items >= FEW_VALUES and all(map(math.isfinite, (*drift.shift, *drift.ratio)))):
            continue
        now = drift.distances()
        times = {name: value / max(_STEPS[name], _STEP * largest.get(name, 0.0)) for name, value in now.items()}
        if images < _MANY_IMAGES:
            times["sudden_variance"] = 0.0
        if images == 1 and not largest.get("sudden_profile") and now["sudden_profile"] <= 1 + _OPPOSITE:
            times["sudden_profile"] = 0.0  # the means of one image are its own, and no earlier BatchNorm says how much
        most = max(times, key=lambda name: times[name])
        if largest and times[most] > 1:
            sure = images >= _MANY_IMAGES and times[most] >= _SURE
            finding = _step(drift, most, times[most], now, largest, images)
            found[drift.layer] = replace(finding, severity="warning") if sure else finding
        largest = {name: max(value, largest.get(name, 0.0)) for name, value in now.items()}
    return found


def _step(
    drift: BatchNormDrift, most: str, times: float, now: dict[str, float], before: dict[str, float], images: int
) -> Finding:
    kind, value, numbers = CATALOGUE["sudden-drift"], now[most], {**now, "times": times}
    lost = tuple((drift.ratio > _LOST * drift.median_ratio).nonzero()[0].tolist())
    if lost:
        text = f"the running variance of {counted(len(lost), 'channel')} is near 0, but the inputs vary: {listed(lost)}"
        return kind.finding(drift.layer, text, "lost", channels=lost, numbers=numbers)
    if now["sudden_profile"] and drift.correlation < -_OPPOSITE:
        text = f"the means of its inputs correlate with the running means by {drift.correlation:.2f}, as if signs were"
        return kind.finding(drift.layer, f"{text} wrong", "sign", numbers=numbers)
    channel = int(abs(drift.shift).argmax())
    value, usual = (
        math.exp(min(x, 80)) if most == "sudden_variance" else 1 - x if most == "sudden_profile" else x
        for x in (value, before.get(most, 0.0))
    )
    text = {
        "sudden_shift": f"the mean of its inputs is off by {value:.3g} standard deviations",
        "sudden_variance": f"the median variance of its inputs is off by a factor of {value:.3g}",
        "sudden_ratio": f"the variance of its inputs is off by a factor of {value:.3g}",
        "sudden_channel": f"the mean of channel {channel} is off by {value:.3g} standard deviations",
        "sudden_profile": f"the means of its inputs correlate with the running means by only {value:.2f}",
    }[most]
    if before.get(most):  # 0 is not measured
        text += f" (earlier BatchNorms: at {'least' if most == 'sudden_profile' else 'most'} {usual:.2g})"
    text += f", on only {counted(images, 'image')}" if images < _MANY_IMAGES else ""
    channels = (channel,) if most == "sudden_channel" else None
    return kind.finding(drift.layer, text, channels=channels, numbers=numbers)
