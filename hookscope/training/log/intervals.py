"""From when to when a layer has a finding, and which layers began to have it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.findings import chains
from hookscope.training.log.rules import LayerContext, Rule
from hookscope.training.log.series import LayerSeries

_MOST_GROUPS = 3  # of one kind of finding; more of them are one thing to know, not thirty


@dataclass(frozen=True, eq=False)
class FindingInterval:
    """From when to when a layer has a finding: positions among its sampled steps."""

    layer: LayerSeries
    first: int
    last: int
    worst: int
    figure: float
    times: int
    lasts: bool

    @property
    def step(self) -> int:
        """The first sampled step that shows it."""
        return int(self.layer.steps[self.first])

    @property
    def last_step(self) -> int:
        """The last."""
        return int(self.layer.steps[self.last])


def interval_of(judge: Rule, case: LayerContext) -> FindingInterval | bool | None:
    """When a layer has it: from the first sampled step of a row of them that is long enough to the last of such.

    Returns:
        False if it does not have it, None if it could not: there is nothing to judge.
    """
    figures, limit = judge.measure(case), judge.limit(case.thresholds)
    judged = np.flatnonzero(~np.isnan(figures))
    bad = figures[judged] < limit if judge.lowest else figures[judged] > limit
    patience = case.thresholds.patience if judge.patience is None else judge.patience
    at = judged[_in_a_row(bad, min(patience, case.run.samples(case.layer.optimizer)))]
    if not len(at):
        return False if len(judged) else None
    worst = at[np.argmin(figures[at]) if judge.lowest else np.argmax(figures[at])]
    first, last = int(at[0]), int(at[-1])
    lasts = last == judged[-1] == len(figures) - 1
    return FindingInterval(case.layer, first, last, int(worst), float(figures[worst]), len(at), lasts)


def _in_a_row(bad: NDArray[np.bool_], patience: int) -> NDArray[np.bool_]:
    """``(S,)`` those that are bad together with their neighbours, so many in a row at least.

    Example:
        >>> import numpy as np
        >>> _in_a_row(np.array([1, 0, 1, 1, 1, 0], bool), 3).astype(int).tolist()
        [0, 0, 1, 1, 1, 0]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bad.astype(int), [0]])))
    found = np.zeros(len(bad), bool)
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        found[begin:end] = end - begin >= patience
    return found


def grouped(spells: Sequence[FindingInterval], patience: int) -> list[list[FindingInterval]]:
    """Layers that began together, give or take a few sampled steps; the latest groups are one where there are many."""
    groups = chains(
        sorted(spells, key=lambda one: one.step),
        lambda group, spell: spell.step - group[0].step <= patience * spacing(spell.layer),
    )
    if len(groups) > _MOST_GROUPS:
        groups[_MOST_GROUPS - 1 :] = [[spell for group in groups[_MOST_GROUPS - 1 :] for spell in group]]
    return [sorted(group, key=lambda one: one.layer.index) for group in groups]


def spacing(layer: LayerSeries) -> float:
    """Steps from one sampled step to the next."""
    return (int(layer.steps[-1]) - int(layer.steps[0])) / max(len(layer.steps) - 1, 1)
