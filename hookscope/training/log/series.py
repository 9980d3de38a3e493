"""The lines of a training log as arrays over the sampled steps: each layer call, and the loss."""

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

METRICS = (
    "activation_mean", "activation_std", "activation_max", "zero_share", "channels", "channel_values", "dead_channels",
    "non_finite", "infinite", "gradient_norm", "weight_gradient_norm", "gradient_non_finite", "weight_norm",
    "weight_non_finite", "update_to_weight",
    "running_mean_shift", "running_var_ratio", "frozen", "learning_rate", "order",
)  # fmt: skip
"""The fields of a layer's line that are numbers or booleans, as the log names them."""

_BEFORE = {"weight_gradient_norm": "gradient_norm", "order": "index"}  # the fields of older logs that come nearest
_MOST = 2**53
_CONVERGED = 0.05  # of the first loss
_SMALL = 0.01  # norm of a weight that is meant to grow, such as a layer scale of 1e-6 or a gamma of 0

_Key = tuple[int, str, int]  # model, layer, call
_Row = Mapping[str, Any]


def in_long_runs(mask: NDArray[np.bool_], needed: float) -> list[int]:
    """The positions in ``(S,)`` at which at least ``needed`` values in a row are true."""
    return [at for begin, end in runs_of_true(mask) if end - begin >= needed for at in range(begin, end)]


def runs_of_true(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where the values of ``(S,)`` are true: begin and end of each run, the end not included."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True)
class LayerSeries:
    """One call of a layer at the sampled steps in which it ran."""

    label: str  # ``name`` or ``name#call``, with the number of its model if there are several
    name: str
    call: int
    model: int
    optimizer: int  # that changes it or the layers around it, whose ``steps`` count
    type: str
    called_as: str
    index: int  # of its lines among the lines of a step, which are in order of execution
    steps: NDArray[np.int64]
    times: Array  # ``(S,)`` seconds since the run began
    values: Mapping[str, Array]  # ``(S,)`` for each of `METRICS`; NaN where the log has none

    @property
    def starts_small(self) -> bool:
        """Whether its weight is almost 0 when it is first sampled, so that it and its output grow by large factors."""
        return bool((self.values["weight_norm"][:1] < _SMALL).any())


@dataclass(frozen=True)
class LossSeries:
    """Loss and learning rate at the sampled steps of one optimizer, ``(S,)`` each."""

    optimizer: int
    steps: NDArray[np.int64]
    times: Array  # seconds since the run began
    losses: Array  # NaN where unknown
    rates: Array

    def falls_after(self, step: int) -> bool:
        """Whether the median of the last losses is below the loss at ``step``."""
        since = self.losses[(self.steps >= step) & np.isfinite(self.losses)]
        return len(since) > 1 and bool(np.median(since[1:][-5:]) < since[0])


@dataclass(frozen=True)
class RunSeries:
    """A run as arrays: layer calls in order of execution, model after model, and the loss of each optimizer."""

    layers: tuple[LayerSeries, ...] = ()
    losses: tuple[LossSeries, ...] = ()
    made_by: Mapping[tuple[Any, Any], str] = field(default_factory=dict)  # NaN or Inf, by optimizer and step

    def loss_of(self, optimizer: int) -> LossSeries:
        return next(loss for loss in self.losses if loss.optimizer == optimizer)

    @cached_property
    def learning_steps(self) -> dict[tuple[int, int], list[int]]:
        """The steps in which some layer has a gradient that is not 0, by model and optimizer."""
        learning: dict[tuple[int, int], set[int]] = {}
        for layer in self.layers:
            steps = learning.setdefault((layer.model, layer.optimizer), set())
            norms = layer.values["gradient_norm"]
            overflows = np.isnan(norms) & ~np.isnan(layer.values["gradient_non_finite"])
            steps.update(layer.steps[(norms > 0) | overflows].tolist())
        return {key: sorted(steps) for key, steps in learning.items()}

    @cached_property
    def _largest_updates(self) -> dict[int, tuple[NDArray[np.int64], Array]]:
        """The steps of each optimizer, and the largest update of a weight over its norm, both ``(S,)``."""
        updates = {loss.optimizer: (loss.steps, np.zeros(len(loss.steps))) for loss in self.losses}
        for layer in self.layers:
            steps, largest = updates[layer.optimizer]
            at = np.searchsorted(steps, layer.steps)
            largest[at] = np.fmax(largest[at], layer.values["update_to_weight"])
        return updates

    def changing(self, layer: LayerSeries, least: float) -> NDArray[np.bool_]:
        """``(S,)`` where the optimizer of a layer changes some weight by more than this share of its norm."""
        steps, largest = self._largest_updates[layer.optimizer]
        changing: NDArray[np.bool_] = largest[np.searchsorted(steps, layer.steps)] > least
        return changing

    def _ran(self, model: int) -> list[LayerSeries]:
        return [layer for layer in self.layers if layer.model == model and not np.isnan(layer.values["order"]).all()]

    def starved(self, layer: LayerSeries) -> NDArray[np.bool_]:
        """``(S,)`` where the output of the call before it is all 0, at least behind its activation."""
        before = [other for other in self._ran(layer.model) if other.index < layer.index]
        zeros = [o.steps[(o.values["zero_share"] == 1) | self.cut_off(o)] for o in before[-1:]]
        return np.isin(layer.steps, zeros)

    def cut_off(self, layer: LayerSeries) -> NDArray[np.bool_]:
        """``(S,)`` where all values are below 0 and the gradient is 0, as before ``F.relu``, which has no line."""
        values = layer.values
        is_cut = (values["activation_max"] < 0) & (values["gradient_norm"] == 0) & ~self.scaled_down(layer)
        behind = [other for other in self._ran(layer.model) if other.index > layer.index][:1] if is_cut.any() else []
        is_dead = [o.steps[o.values["zero_share"] == 1] for o in behind if np.isnan(o.values["weight_norm"]).all()]
        cut_off: NDArray[np.bool_] = is_cut & ~np.isin(layer.steps, is_dead)
        return cut_off

    def lives_in_another_call(self, layer: LayerSeries) -> NDArray[np.bool_]:
        """``(S,)`` where another call of the same weights has values other than 0: the first state of an RNN is 0."""
        others = [o for o in self.layers if (o.model, o.name) == (layer.model, layer.name) and o is not layer]
        alive = [o.steps[o.values["zero_share"] < 1] for o in others]
        has_weights = not np.isnan(layer.values["weight_norm"]).all()
        return np.isin(layer.steps, np.concatenate(alive) if alive and has_weights else [])

    def scaled_down(self, layer: LayerSeries) -> NDArray[np.bool_]:
        """``(S,)`` where a weight of its block is still almost 0, as layer scales and last gammas are at first."""
        block = [
            other.steps[other.values["weight_norm"] < _SMALL]
            for other in self._small
            if (other.model, other.optimizer) == (layer.model, layer.optimizer)
            and layer.name != other.name
            and layer.name.startswith((f"{other.name}.", other.name[: other.name.rfind(".") + 1]))
        ]
        return np.isin(layer.steps, np.concatenate(block) if block else [])

    @cached_property
    def _small(self) -> list[LayerSeries]:
        return [layer for layer in self.layers if layer.starts_small]

    def learned(self, layer: LayerSeries) -> NDArray[np.bool_]:
        """``(S,)`` where the loss has converged: it is small beside the first loss."""
        loss = self.loss_of(layer.optimizer)
        known = loss.losses[np.isfinite(loss.losses)]
        limit = _CONVERGED * abs(known[0]) if len(known) else 0.0
        return np.isin(layer.steps, loss.steps[np.abs(loss.losses) < limit])


def series_of(run: Run) -> RunSeries:
    """The lines of a run as arrays, but those without layer or step; of two lines for a call and step, the later."""
    lines: dict[_Key, dict[int, dict[int, _Row]]] = {}  # by call, optimizer and step
    steps: dict[int, dict[int, dict[str, Any]]] = {}  # by optimizer and step
    for row in run.rows:
        if not isinstance(row.get("layer"), str) or not _is_whole(row.get("step")):
            continue
        key, optimizer = (_whole(row.get("model")), row["layer"], _whole(row.get("call"))), _whole(row.get("optimizer"))
        of_step = steps.setdefault(optimizer, {}).setdefault(row["step"], {"lines": 0})
        lines.setdefault(key, {}).setdefault(optimizer, {})[row["step"]] = {**row, "place": of_step["lines"]}
        of_step["lines"] += 1
        for name in ("time", "loss", "learning_rate"):
            of_step[name] = row.get(name) if of_step.get(name) is None else of_step[name]
    models, owners = {model for model, _, _ in lines}, _owners(lines)
    layers = [_layer(key, by_optimizer, owners[key[:2]], len(models), steps) for key, by_optimizer in lines.items()]
    layers.sort(key=lambda layer: (layer.model, layer.index))
    made_by = {(row.get("optimizer"), row.get("step")): row["made_by"] for row in run.facts if row.get("made_by")}
    return RunSeries(tuple(layers), tuple(_loss(number, steps[number]) for number in sorted(steps)), made_by)


def _layer(
    key: _Key, lines: Mapping[int, Mapping[int, _Row]], owner: int, models: int, steps: Mapping[int, Mapping[int, _Row]]
) -> LayerSeries:
    model, name, call = key
    optimizer = owner if owner in lines else min(lines)
    rows = [row for _, row in sorted(lines[optimizer].items())]
    label = call_key(name or str(rows[0].get("type") or "(model)"), call)
    places = sorted(_whole(row["place"]) for row in rows)
    label = f"{label} of model {model}" if models > 1 else label
    words = str(rows[0].get("type") or ""), str(rows[-1].get("called_as") or "")
    times = _numbers([steps[optimizer][row["step"]] for row in rows], "time")
    values = {metric: _numbers(rows, metric, _BEFORE.get(metric, metric)) for metric in METRICS}
    numbers = np.array([row["step"] for row in rows], np.int64)
    return LayerSeries(label, name, call, model, optimizer, *words, places[len(places) // 2], numbers, times, values)


def _owners(lines: Mapping[_Key, Mapping[int, Mapping[int, _Row]]]) -> dict[tuple[int, str], int]:
    """The optimizer of each layer: the one that updates it, has its gradient, or belongs to its model."""
    own: dict[tuple[int, str], Counter[int]] = {}
    of_model: dict[int, Counter[int]] = {}
    for (model, name, _), by_optimizer in lines.items():
        counts = own.setdefault((model, name), Counter())
        updates, gradients = (
            Counter({n: sum(bool(row.get(metric)) for row in rows.values()) for n, rows in by_optimizer.items()})
            for metric in ("update_to_weight", "gradient_norm")
        )
        counts.update(updates if updates.total() else gradients)
        of_model.setdefault(model, Counter()).update(counts)
    return {key: _most_common(counts, _most_common(of_model[key[0]], 0)) for key, counts in own.items()}


def _most_common(counts: Counter[int], otherwise: int) -> int:
    return min(counts, key=lambda number: (-counts[number], number)) if counts.total() else otherwise


def _loss(optimizer: int, steps: Mapping[int, _Row]) -> LossSeries:
    numbers = sorted(steps)
    rows = [steps[step] for step in numbers]
    arrays = (_numbers(rows, name) for name in ("time", "loss", "learning_rate"))
    return LossSeries(optimizer, np.array(numbers, np.int64), *arrays)


def _numbers(rows: Sequence[_Row], name: str, before: str = "") -> Array:
    """The numbers ``name`` of the rows, NaN where it is none; rows without the field have it as ``before``."""
    values: Iterable[Any] = (row.get(name, row.get(before)) for row in rows)
    return np.array([float(value) if isinstance(value, (int, float)) else np.nan for value in values], np.float64)


def _is_whole(value: object) -> bool:
    """Whether it can be the number of a step or the like; larger numbers come from damaged lines."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST


def _whole(value: Any) -> int:
    return int(value) if _is_whole(value) else 0
