"""From which to which sampled step a layer has a finding, and which layers began to have it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hookscope.findings import chains
from hookscope.training.log.rules import LayerContext, Rule
from hookscope.training.log.series import LayerSeries, runs_of_true

_MOST_GROUPS = 3  # of one kind of finding


@dataclass(frozen=True, eq=False)
class FindingInterval:
    """From when to when a layer has a finding.

    Attributes:
        layer: The layer.
        first: Position of the first step that shows it, among the sampled steps of the layer; likewise ``last`` and
            ``worst``.
        value: The measured value at the worst.
        times: How many sampled steps from the first to the last show it.
        lasts: Whether the last sampled step of the layer shows it.
    """

    layer: LayerSeries
    first: int
    last: int
    worst: int
    value: float
    times: int
    lasts: bool

    @property
    def step(self) -> int:
        """The first step that shows it."""
        return int(self.layer.steps[self.first])

    @property
    def last_step(self) -> int:
        return int(self.layer.steps[self.last])

    @property
    def worst_step(self) -> int:
        return int(self.layer.steps[self.worst])


def judge(rule: Rule, context: LayerContext) -> tuple[bool, FindingInterval | None]:
    """Whether a rule could be applied to a layer, and when the layer has the finding; None for never.

    The finding lasts from the first to the last long enough series of bad sampled steps.
    """
    values, limit = rule.measure(context), rule.limit_of(context.thresholds)
    known = np.flatnonzero(~np.isnan(values))
    bad = values[known] < limit if rule.lowest else values[known] > limit
    patience = context.thresholds.patience if rule.patience is None else rule.patience
    needed = min(patience, len(context.run.loss_of(context.layer.optimizer).steps))
    at = known[[n for begin, end in runs_of_true(bad) if end - begin >= needed for n in range(begin, end)]]
    if not len(at):
        return bool(len(known)), None
    worst = at[np.argmin(values[at]) if rule.lowest else np.argmax(values[at])]
    first, last = int(at[0]), int(at[-1])
    lasts = last == known[-1] == len(values) - 1
    return True, FindingInterval(context.layer, first, last, int(worst), float(values[worst]), len(at), lasts)


def grouped(intervals: Sequence[FindingInterval], patience: int) -> list[list[FindingInterval]]:
    """Layers that began together, give or take ``patience`` sampled steps; late groups are merged into the third."""
    groups = chains(
        sorted(intervals, key=lambda interval: interval.step),
        lambda group, interval: interval.step - group[0].step <= patience * spacing(interval.layer),
    )
    if len(groups) > _MOST_GROUPS:
        groups[_MOST_GROUPS - 1 :] = [[interval for group in groups[_MOST_GROUPS - 1 :] for interval in group]]
    return [sorted(group, key=lambda interval: interval.layer.index) for group in groups]


def spacing(layer: LayerSeries) -> float:
    """Mean number of steps between two sampled steps."""
    return (int(layer.steps[-1]) - int(layer.steps[0])) / max(len(layer.steps) - 1, 1)
