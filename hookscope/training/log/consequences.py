"""What follows from a layer that died, and is no finding of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hookscope.training.log.intervals import FindingInterval, spacing
from hookscope.training.log.series import LayerSeries, RunSeries
from hookscope.training.log.thresholds import TrainingThresholds

_FINDINGS = ("dead-channels", "constant-output", "vanishing-activations", "saturated", "batchnorm-drift")
_OF_STILL = ("no-update", "no-gradient", "frozen")  # each says of a weight why it stays as it is


def consequences(
    spells: Mapping[str, Sequence[FindingInterval]],
    layers: Sequence[LayerSeries],
    run: RunSeries,
    thresholds: TrainingThresholds,
) -> dict[str, list[FindingInterval]]:
    """What layers have because one before them is dead, by name of the finding.

    Args:
        spells: What all layers of a model have, by name of the finding.
        layers: Those whose parameters are judged.
        run: The run.
        thresholds: Those that ``spells`` were found with.
    """
    dead = spells["dead-layer"]
    found = {name: [one for one in spells[name] if _follows(one, dead, thresholds)] for name in _FINDINGS}
    told = {one.layer.label for name in _OF_STILL for one in spells[name]}
    still = [one for layer in layers if layer.label not in told for one in _still(layer, dead, run)]
    return {name: some for name, some in {**found, "no-update": still}.items() if some}


def consequences_words(
    group: Sequence[FindingInterval], hidden: Mapping[str, Sequence[FindingInterval]], thresholds: TrainingThresholds
) -> str:
    """What is not told of layers behind the dead ones in ``group``."""
    own = {spell.layer.label for spell in group}
    parts = []
    for name, spells in hidden.items():
        some = [one for one in spells if one.layer.label not in own and _follows(one, group, thresholds)]
        labels = [one.layer.label for one in sorted(some, key=lambda one: one.layer.index)]
        parts += [f"{name} in {_span(labels)}"] if labels else []
    return f"; not told, for it follows from that: {', '.join(parts)}" if parts else ""


def _follows(one: FindingInterval, dead: Sequence[FindingInterval], thresholds: TrainingThresholds) -> bool:
    """Whether a layer behind a dead one, or that itself, begins about when that died."""
    near = max(thresholds.patience * spacing(one.layer), thresholds.warm_up)
    return any(spell.layer.index <= one.layer.index and abs(spell.step - one.step) <= near for spell in dead)


def _still(layer: LayerSeries, dead: Sequence[FindingInterval], run: RunSeries) -> list[FindingInterval]:
    """When a weight behind a dead layer stays as it is from when that died on, while others change."""
    for spell in (one for one in dead if one.layer.index < layer.index):
        during = (layer.steps >= spell.step) & (layer.steps <= spell.last_step) & (layer.values["frozen"] != 1)
        if not during.any() or not run.changing(layer, 0.0)[during].any():
            continue
        if (layer.values["update_to_weight"][during] == 0).all():
            [first, *_] = [*_, last] = during.nonzero()[0].tolist()
            return [FindingInterval(layer, first, last, first, 0.0, int(during.sum()), spell.lasts)]
    return []


def _span(labels: Sequence[str]) -> str:
    """Which layers, in words.

    Example:
        >>> _span(["a"]), _span(["a", "b"]), _span(["a", "b", "c"])
        ("'a'", "'a' and 'b'", "3 layers from 'a' to 'c'")
    """
    if len(labels) > 2:
        return f"{len(labels)} layers from '{labels[0]}' to '{labels[-1]}'"
    return " and ".join(f"'{label}'" for label in labels)
