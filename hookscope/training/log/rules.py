"""What can go wrong with a layer in training: for each finding what is measured, from where on it counts, and words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.findings import default, percent
from hookscope.training.log.series import LayerSeries, RunSeries
from hookscope.training.log.thresholds import TrainingThresholds

Array = NDArray[np.float64]


_USUAL_GRADIENT = 1e-4  # of the weight's norm; that of random weights is 7e-4 and more, see GradientThresholds


@dataclass(frozen=True, slots=True)
class LayerContext:
    """One layer, and what it is judged by."""

    layer: LayerSeries
    run: RunSeries
    thresholds: TrainingThresholds

    def __getitem__(self, figure: str) -> Array:
        return self.layer.values[figure]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of finding is told.

    Attributes:
        finding: Its name.
        measure: ``(S,)`` the figure at each sampled step, NaN where there is nothing to judge.
        limit: What the figure must be beyond.
        words: The figures of one sampled step.
        lowest: Whether low figures are the bad ones.
        telling: Which of several layers that begin together is told of: the ``first`` or ``last`` in order of
            execution, or the one with the ``worst`` figure.
        of_parameters: Whether it is about the layer's parameters, which are the same in every call.
        patience: Sampled steps in a row; None for that of the thresholds.
    """

    finding: str
    measure: Callable[[LayerContext], Array]
    limit: Callable[[TrainingThresholds], float]
    words: Callable[[LayerSeries, int], str]
    lowest: bool = False
    telling: str = "first"
    of_parameters: bool = False
    patience: int | None = None


def _divided(over: Array, under: Array) -> Array:
    """NaN where there is nothing to divide by."""
    divided: Array = np.divide(over, under, out=np.full(len(under), np.nan), where=under > 0)
    return divided


def _where(condition: NDArray[np.bool_], figures: Array | float) -> Array:
    return np.where(condition, figures, np.nan)


def gradient_to_weight(layer: LayerSeries) -> Array:
    """Norm of the gradient over norm of the weight, ``(S,)``; NaN without a weight, and while it is 0."""
    return _divided(layer.values["gradient_norm"], layer.values["weight_norm"])


def _sound(layer: LayerSeries) -> NDArray[np.bool_]:
    """``(S,)`` where neither activation nor gradient holds NaN or Inf: those are told of as such."""
    return ~((layer.values["non_finite"] > 0) | (layer.values["gradient_non_finite"] > 0))


def dead_share(layer: LayerSeries) -> Array:
    """Share of the channels that are 0 for the whole batch, ``(S,)``, 0 to 1; 1 where every value is 0."""
    counted = _divided(layer.values["dead_channels"], layer.values["channels"])
    return _where(_sound(layer), np.where(layer.values["zero_share"] == 1, 1.0, counted))


def _some_dead(case: LayerContext) -> Array:
    """Nothing of a layer that begins dead as a whole, which has a name of its own; less of what rests on few values."""
    share, limits = dead_share(case.layer), case.thresholds
    few = (case["channel_values"] < limits.few_values) & (share <= limits.dead_of_few)
    return _where(~few & ((share < 1) | (share[:1] < 1)), share)


def _dead_words(layer: LayerSeries, at: int) -> str:
    dead, channels = layer.values["dead_channels"][at], layer.values["channels"][at]
    if math.isnan(dead) or math.isnan(channels):
        return "every value is 0"
    some = "all" if dead == channels else f"{dead:.0f} of"
    return f"{some} {channels:.0f} channels are 0 for the whole batch"


def _size(layer: LayerSeries) -> Array:
    """Root mean square of the activation; where that is exactly 0 the layer is dead, and not judged by it."""
    size = np.hypot(layer.values["activation_mean"], layer.values["activation_std"])
    return _where(_sound(layer) & (size > 0), size)


def _size_words(layer: LayerSeries, at: int) -> str:
    return f"the root mean square of its activation is {_size(layer)[at]:.2g}"


def _spread(case: LayerContext) -> Array:
    return _divided(case["activation_std"], _size(case.layer))


def _spread_words(layer: LayerSeries, at: int) -> str:
    mean, std = layer.values["activation_mean"][at], layer.values["activation_std"][at]
    return f"every value of its activation is {mean:.4g} (standard deviation {std:.1g})"


def _slope(layer: LayerSeries) -> Array:
    """Mean slope as a share of the steepest: of a sigmoid y it is y (1 - y), of a tanh 1 - y², so moments tell it."""
    mean, square = layer.values["activation_mean"], _size(layer) ** 2
    if layer.type in ("Sigmoid", "Hardsigmoid"):
        return 4 * (mean - square)
    return _where((square >= 0) & (layer.type == "Tanh"), 1 - square)


def _slope_words(layer: LayerSeries, at: int) -> str:
    slope = percent(max(float(_slope(layer)[at]), 0.0))
    return f"so near its bounds that its mean slope is {slope} of the steepest"


def _gradient_ratio(case: LayerContext) -> Array:
    """Of weights: the scale of a normalisation may well get next to no gradient."""
    ratio = gradient_to_weight(case.layer)
    return _where(_sound(case.layer) & (ratio > 0) & ("Norm" not in case.layer.type), ratio)


def _small_gradient_ratio(case: LayerContext) -> Array:
    """As above, while there is something to learn."""
    return _where(~case.run.learned(case.layer), _gradient_ratio(case))


def _large_gradient_ratio(case: LayerContext) -> Array:
    """As above; beyond what single precision can hold it is Inf. A weight that grows from 0 is small at first."""
    finite = case["gradient_non_finite"] == 0
    overflown = np.isnan(case["gradient_norm"]) & finite & (case["weight_norm"] > 0)
    return _where(case["weight_norm"][:1] != 0, np.where(overflown, np.inf, _gradient_ratio(case)))


def _gradient_words(layer: LayerSeries, at: int) -> str:
    norm, ratio = layer.values["gradient_norm"][at], gradient_to_weight(layer)[at]
    if math.isnan(norm):
        return "the norm of its gradient is beyond what numbers can hold"
    return f"its gradient has norm {norm:.2g}, {ratio:.2g} of the weight's norm"


def _no_gradient(case: LayerContext) -> Array:
    """1 where a layer that is not frozen has no gradient, or 0, while others of its model have one."""
    none = np.isnan(case["gradient_norm"]) & np.isnan(case["gradient_non_finite"])
    lost = (none | (case["gradient_norm"] == 0)) & ~(case["gradient_non_finite"] > 0)
    others = np.isin(case.layer.steps, case.run.learning_steps.get((case.layer.model, case.layer.optimizer), ()))
    return _where((case["frozen"] == 0) & others, lost.astype(float))


def _no_gradient_words(layer: LayerSeries, at: int) -> str:
    none = math.isnan(layer.values["gradient_norm"][at])
    return "no gradient arrives" if none else "its gradient is 0 everywhere"


def _frozen(case: LayerContext) -> Array:
    return case["frozen"]


def _frozen_words(layer: LayerSeries, at: int) -> str:
    return "requires_grad is False"


def _taught(case: LayerContext) -> NDArray[np.bool_]:
    """``(S,)`` where the rate is a hundredth of the run's highest or more: a warm-up from 0 and a fall to 0 are usual.

    Where the rate is not known, it is taken to be usual. A weight that begins at 0 grows by more than its norm.
    """
    rates = case["learning_rate"]
    highest = np.nanmax([0.0, *rates])
    usual: NDArray[np.bool_] = np.isnan(rates) | ((rates > 0) & (rates >= highest / 100))
    taught: NDArray[np.bool_] = usual & (case["frozen"] != 1) & (case["weight_norm"][:1] != 0) & _sound(case.layer)
    return taught


def _update(case: LayerContext) -> Array:
    return _where(_taught(case), case["update_to_weight"])


def _changing(case: LayerContext) -> NDArray[np.bool_]:
    """``(S,)`` where the optimizer changes some weight by more than is too small: the rate is not to blame."""
    return case.run.changing(case.layer, case.thresholds.too_small)


def _small_update(case: LayerContext) -> Array:
    """While there is something to learn: not of a small gradient, nor once the loss is next to nothing."""
    update = case["update_to_weight"]
    wanted = (gradient_to_weight(case.layer) > _USUAL_GRADIENT) & ~case.run.learned(case.layer)
    return _where(_taught(case) & wanted & ((update > 0) | ~_changing(case)), update)


def _no_update(case: LayerContext) -> Array:
    """1 where a weight with a gradient stays as it is, while others of its optimizer change.

    Not of normalisations, nor where the layer is given nothing but 0: a gradient of the bias alone is no wonder there.
    """
    still = np.nan_to_num(case["update_to_weight"]) == 0
    wanted = (gradient_to_weight(case.layer) > _USUAL_GRADIENT) & ("Norm" not in case.layer.type)
    return _where(_taught(case) & wanted & _changing(case) & ~case.run.starved(case.layer), still.astype(float))


def _no_update_words(layer: LayerSeries, at: int) -> str:
    return f"its gradient has norm {layer.values['gradient_norm'][at]:.2g}, but a step leaves its weight as it is"


def _update_words(layer: LayerSeries, at: int) -> str:
    rate, update = layer.values["learning_rate"][at], layer.values["update_to_weight"][at]
    text = f"a step changes its weight by {update:.2g} of its norm" if update else "a step leaves its weight as it is"
    return text if math.isnan(rate) else f"{text} (learning rate {rate:g})"


def batchnorm_distance(layer: LayerSeries, thresholds: TrainingThresholds) -> Array:
    """How far a batch is from the running statistics, ``(S,)``; 1 where mean or variance are at their thresholds."""
    shift, ratio = layer.values["running_mean_shift"], layer.values["running_var_ratio"]
    logarithm = np.abs(np.log(_where(ratio > 0, ratio))) / math.log(thresholds.ratio)
    return _where(_sound(layer), np.fmax(shift / thresholds.shift, logarithm))


def _drift(case: LayerContext) -> Array:
    return _where(case.layer.steps >= case.thresholds.warm_up, batchnorm_distance(case.layer, case.thresholds))


def _drift_words(layer: LayerSeries, at: int) -> str:
    shift, ratio = layer.values["running_mean_shift"][at], layer.values["running_var_ratio"][at]
    text = f"the batch's mean is off by {shift:.2g} running standard deviations"
    return text if math.isnan(ratio) else f"{text}, its variance is {ratio:.2g} times the running one"


RULES = (
    Rule("dead-layer", lambda case: dead_share(case.layer), lambda _: default("dead-layer", "dead_layer"), _dead_words),
    Rule("dead-channels", _some_dead, lambda limits: limits.dead, _dead_words, telling="worst"),
    Rule("constant-output", _spread, lambda limits: limits.flat, _spread_words, lowest=True),
    Rule("exploding-activations", lambda case: _size(case.layer), lambda limits: limits.largest, _size_words),
    Rule(
        "vanishing-activations",
        lambda case: _size(case.layer),
        lambda limits: limits.smallest,
        _size_words,
        lowest=True,
    ),
    Rule("saturated", lambda case: _slope(case.layer), lambda limits: limits.slope, _slope_words, lowest=True),
    Rule(
        "exploding-gradient",
        _large_gradient_ratio,
        lambda limits: limits.exploding,
        _gradient_words,
        telling="last",
        of_parameters=True,
        patience=1,
    ),
    Rule(
        "vanishing-gradient",
        _small_gradient_ratio,
        lambda limits: limits.vanishing,
        _gradient_words,
        lowest=True,
        telling="last",
        of_parameters=True,
    ),
    Rule("no-gradient", _no_gradient, lambda _: 0.5, _no_gradient_words, telling="last", of_parameters=True),
    Rule("no-update", _no_update, lambda _: 0.5, _no_update_words, of_parameters=True),
    Rule(
        "update-too-large",
        _update,
        lambda limits: limits.too_large,
        _update_words,
        telling="worst",
        of_parameters=True,
        patience=2,  # where it kills what it changes, there are no more
    ),
    Rule(
        "update-too-small",
        _small_update,
        lambda limits: limits.too_small,
        _update_words,
        lowest=True,
        telling="worst",
        of_parameters=True,
    ),
    Rule("batchnorm-drift", _drift, lambda _: 1.0, _drift_words),
    Rule("frozen", _frozen, lambda _: 0.5, _frozen_words, telling="last", of_parameters=True),
)
"""All kinds of findings on a layer, the gravest first."""
