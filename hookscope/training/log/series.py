"""What a training log says of each layer and of the loss, as arrays over its sampled steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.hooks import call_key
from hookscope.training.log.file import Run

Array = NDArray[np.float64]


FIGURES = (
    "activation_mean", "activation_std", "zero_share", "channels", "channel_values", "dead_channels", "non_finite",
    "gradient_norm", "gradient_non_finite", "weight_norm", "weight_non_finite", "update_to_weight",
    "running_mean_shift", "running_var_ratio", "frozen", "learning_rate",
)  # fmt: skip
"""The fields of a layer's line that are numbers, or true and false, by the names that the log gives them."""

_BEHIND = 1_000_000
_MOST = 2**53
_LEARNED = 0.05  # of the first loss

_Key = tuple[int, str, int]
_Steps = dict[int, dict[int, dict[str, Any]]]


@dataclass(frozen=True)
class LayerSeries:
    """One call of a layer at each sampled step in which it ran.

    Attributes:
        label: How people are told of it: ``name`` or ``name#call``, with the number of its model where there are more.
        name: The dotted path of the layer.
        call: Which execution of it.
        model: The number of its root model.
        optimizer: The number of the optimizer that changes its parameters, or those around it; the steps are its.
        type: Class name.
        index: Its place in order of execution.
        steps: ``(S,)`` steps of that optimizer, rising.
        times: ``(S,)`` seconds since the run began, of the whole step.
        values: ``(S,)`` for each of `FIGURES`; NaN where the log has none.
    """

    label: str
    name: str
    call: int
    model: int
    optimizer: int
    type: str
    index: int
    steps: NDArray[np.int64]
    times: Array
    values: Mapping[str, Array]


@dataclass(frozen=True)
class LossSeries:
    """Loss and learning rate at the sampled steps of one optimizer.

    Attributes:
        optimizer: Its number.
        steps: ``(S,)`` its steps, rising.
        times: ``(S,)`` seconds since the run began.
        losses: ``(S,)`` NaN where it was not seen.
        rates: ``(S,)`` learning rates, NaN where not known.
    """

    optimizer: int
    steps: NDArray[np.int64]
    times: Array
    losses: Array
    rates: Array


@dataclass(frozen=True)
class RunSeries:
    """A run as arrays.

    Attributes:
        layers: Calls in order of execution, one model after the other.
        losses: One for each optimizer.
        models: How many root models ran.
    """

    layers: tuple[LayerSeries, ...] = ()
    losses: tuple[LossSeries, ...] = ()
    models: int = 0

    @cached_property
    def learning_steps(self) -> dict[tuple[int, int], list[int]]:
        """At which steps of an optimizer some layer of a model has a gradient, by model and optimizer."""
        found: dict[tuple[int, int], set[int]] = {}
        for layer in self.layers:
            steps = found.setdefault((layer.model, layer.optimizer), set())
            steps.update(layer.steps[layer.values["gradient_norm"] > 0].tolist())
        return {key: sorted(steps) for key, steps in found.items()}

    def samples(self, optimizer: int) -> int:
        """How many steps of an optimizer were sampled."""
        return sum(len(one.steps) for one in self.losses if one.optimizer == optimizer)

    @cached_property
    def largest_updates(self) -> dict[int, Array]:
        """By how much of its norm a weight changes at most, ``(S,)`` at the steps of each optimizer."""
        steps = {one.optimizer: one.steps for one in self.losses}
        found = {optimizer: np.zeros(len(at)) for optimizer, at in steps.items()}
        for layer in self.layers:
            at = np.searchsorted(steps[layer.optimizer], layer.steps)
            found[layer.optimizer][at] = np.fmax(found[layer.optimizer][at], layer.values["update_to_weight"])
        return found

    def changing(self, layer: LayerSeries, least: float) -> NDArray[np.bool_]:
        """``(S,)`` where the optimizer of a layer changes some weight by more than this share of its norm."""
        [steps] = [one.steps for one in self.losses if one.optimizer == layer.optimizer]
        found: NDArray[np.bool_] = self.largest_updates[layer.optimizer][np.searchsorted(steps, layer.steps)] > least
        return found

    def starved(self, layer: LayerSeries) -> NDArray[np.bool_]:
        """``(S,)`` where the call before it puts out nothing but 0."""
        before = [one for one in self.layers if one.model == layer.model and one.index < layer.index]
        if not before:
            return np.zeros(len(layer.steps), bool)
        nothing: NDArray[np.bool_] = np.isin(layer.steps, before[-1].steps[before[-1].values["zero_share"] == 1])
        return nothing

    def learned(self, layer: LayerSeries) -> NDArray[np.bool_]:
        """``(S,)`` where the loss is next to nothing, beside what it was in the first step it was seen."""
        of_steps = next((one for one in self.losses if one.optimizer == layer.optimizer), None)
        seen = np.zeros(0) if of_steps is None else of_steps.losses[np.isfinite(of_steps.losses)]
        if of_steps is None or not len(seen):
            return np.zeros(len(layer.steps), bool)
        small = of_steps.steps[np.abs(of_steps.losses) < _LEARNED * abs(seen[0])]
        return np.isin(layer.steps, small)


@dataclass
class _Lines:
    """The lines of one call, by optimizer and step; of two for the same step the later counts."""

    at: dict[int, dict[int, Mapping[str, Any]]] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        self.at.setdefault(_whole(row.get("optimizer")), {})[row["step"]] = row

    def count(self, name: str) -> Counter[int]:
        """In how many lines of each optimizer a figure is there, and not 0."""
        return Counter({at: sum(bool(row.get(name)) for row in rows.values()) for at, rows in self.at.items()})


def series_of(run: Run) -> RunSeries:
    """The lines of a run as arrays; lines without a layer or a step are passed over.

    Example:
        >>> from types import SimpleNamespace
        >>> rows = [{"step": step, "layer": "conv1", "loss": 2.0 - step / 50, "zero_share": None} for step in (0, 50)]
        >>> found = series_of(SimpleNamespace(rows=rows))
        >>> found.layers[0].label, found.layers[0].steps.tolist(), found.losses[0].losses.tolist()
        ('conv1', [0, 50], [2.0, 1.0])
    """
    lines: dict[_Key, _Lines] = {}
    steps: _Steps = {}
    for row in run.rows:
        if not isinstance(row.get("layer"), str) or not _is_whole(row.get("step")):
            continue
        key = (_whole(row.get("model")), row["layer"], _whole(row.get("call")))
        seen = steps.setdefault(_whole(row.get("optimizer")), {}).setdefault(row["step"], {"lines": 0})
        lines.setdefault(key, _Lines()).add({**row, "place": seen["lines"]})
        seen["lines"] += 1
        for name in ("time", "loss", "learning_rate"):
            seen[name] = row.get(name) if seen.get(name) is None else seen[name]
    models = {model for model, _, _ in lines}
    owners = _owners(lines)
    layers = [_layer(key, some, owners[key[:2]], len(models), steps) for key, some in lines.items()]
    layers.sort(key=lambda one: (one.model, one.index))
    return RunSeries(tuple(layers), tuple(_loss(at, steps[at]) for at in sorted(steps)), len(models))


def _layer(key: _Key, lines: _Lines, owner: int, models: int, seen: _Steps) -> LayerSeries:
    model, name, call = key
    at = owner if owner in lines.at else min(lines.at)
    rows = [lines.at[at][step] for step in sorted(lines.at[at])]
    label = call_key(name or str(rows[0].get("type") or "(model)"), call)
    return LayerSeries(
        label=f"{label} of model {model}" if models > 1 else label,
        name=name,
        call=call,
        model=model,
        optimizer=at,
        type=str(rows[0].get("type") or ""),
        index=_usual_index(rows),
        steps=np.array([row["step"] for row in rows], np.int64),
        times=_numbers([seen[at][row["step"]] for row in rows], "time"),
        values={figure: _numbers(rows, figure) for figure in FIGURES},
    )


def _usual_index(rows: Sequence[Mapping[str, Any]]) -> int:
    """The median over its lines; of a layer that was never seen to run, behind all others as the log has them."""
    indices = sorted(_whole(row["index"]) for row in rows if _is_whole(row.get("index")))
    return indices[len(indices) // 2] if indices else _BEHIND + min(_whole(row["place"]) for row in rows)


def _owners(lines: Mapping[_Key, _Lines]) -> dict[tuple[int, str], int]:
    """The optimizer of each layer: that which updates it, else that which sees its gradient, else its model's."""
    own: dict[tuple[int, str], Counter[int]] = {}
    of_model: dict[int, Counter[int]] = {}
    for (model, name, _), some in lines.items():
        counts = own.setdefault((model, name), Counter())
        updated = some.count("update_to_weight")
        counts.update(updated if updated.total() else some.count("gradient_norm"))
        of_model.setdefault(model, Counter()).update(counts)
    return {key: _most(counts, _most(of_model[key[0]], 0)) for key, counts in own.items()}


def _most(counts: Counter[int], otherwise: int) -> int:
    return min(counts, key=lambda at: (-counts[at], at)) if counts.total() else otherwise


def _loss(optimizer: int, steps: Mapping[int, Mapping[str, Any]]) -> LossSeries:
    at = sorted(steps)
    rows = [steps[step] for step in at]
    of_figures = (_numbers(rows, name) for name in ("time", "loss", "learning_rate"))
    return LossSeries(optimizer, np.array(at, np.int64), *of_figures)


def _numbers(rows: Iterable[Mapping[str, Any]], name: str) -> Array:
    found = (row.get(name) for row in rows)
    return np.array([float(value) if isinstance(value, (int, float)) else np.nan for value in found], np.float64)


def _is_whole(value: object) -> bool:
    """Whether it is a number of steps or the like; what is longer than any run comes from a damaged line."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST


def _whole(value: Any) -> int:
    return int(value) if _is_whole(value) else 0
