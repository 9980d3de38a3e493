"""The rules for findings on a layer in training: what is measured, its limit, and the words of the evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hookscope.findings import CATALOGUE, FindingKind, add_kind, percent, thresholds_for
from hookscope.hooks import passes_values_on
from hookscope.training.log.series import LayerSeries, RunSeries

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

_USUAL_GRADIENT = 1e-4  # of the weight's norm; random weights have 7e-4 or more, see GradientThresholds
_USUAL_UPDATE = 1e-4  # of the weight's norm; weight decay alone changes a weight by up to 5e-5
_RARE = 0.005  # share of the values for which a channel of a sound layer may be active


Limits = Mapping[str, float]
"""The thresholds by their names in the catalogue."""


def limits_of(thresholds: Limits | None = None) -> Limits:
    """All limits for findings on a training run: those given, and else the defaults of the catalogue."""
    return {entry.name: entry.default for entry in thresholds_for("training")} | dict(thresholds or {})


@dataclass(frozen=True, slots=True)
class LayerContext:
    """A layer with its run and the thresholds."""

    layer: LayerSeries
    run: RunSeries
    thresholds: Limits
    is_flat: bool = False  # whether the loss ends where it began

    def __getitem__(self, metric: str) -> Array:
        return self.layer.values[metric]


Measure = Callable[[LayerContext], Array]

RULES: dict[str, Rule] = {}
"""The rule of each finding on a layer, by name; they run in the order of `REPORT_ORDER`."""


@dataclass(slots=True)
class Rule:
    """Registers the function below it as the rule for findings of ``kind``, which joins the catalogue if it is new.

    The function returns ``(S,)`` a value for each sampled step, NaN where the step cannot be judged.
    """

    kind: FindingKind  # the entry of the catalogue
    metric: str  # the field of the log that it is about; the page of the run marks the finding there
    limit: str | float  # the value beyond which it is a finding, or the name of the threshold
    words: Callable[[LayerSeries, int], str]  # the evidence of one sampled step
    lowest: bool = False  # whether low values are the bad ones
    named: str = "first"  # of layers that begin together the first or last in order of execution, or the worst
    patience: int | None = None  # sampled steps in a row, where the thresholds do not say it
    before: str | None = None  # the next less severe finding, see `add_kind`
    severity: str = ""  # its severity in training, where the kind does not say it
    of_all: str = ""  # the severity where every layer has it, if that is another
    flat: str = ""  # the name of the threshold where the loss is flat and nothing else says why
    measure: Measure = field(init=False)

    def __call__(self, measure: Measure) -> Measure:
        self.measure = measure
        RULES[add_kind(self.kind, "training", self.before).name] = self
        return measure

    @property
    def of_parameters(self) -> bool:
        """Whether it concerns the parameters of a layer, which all its calls share."""
        return self.metric in ("gradient_norm", "update_to_weight")


def _ratio(over: Array, under: Array) -> Array:
    """NaN unless the denominator is positive."""
    ratio: Array = np.divide(over, under, out=np.full(len(under), np.nan), where=under > 0)
    return ratio


def _where(condition: Mask | bool, values: Array | float) -> Array:
    return np.where(condition, values, np.nan)


def gradient_to_weight(layer: LayerSeries) -> Array:
    """Gradient norm over weight norm, ``(S,)``; NaN where there is no weight or it is 0."""
    return _ratio(layer.values["gradient_norm"], layer.values["weight_norm"])


def _finite(layer: LayerSeries) -> Mask:
    """``(S,)`` where neither activation nor gradient has NaN or Inf; these have a finding of their own."""
    return ~((layer.values["non_finite"] > 0) | (layer.values["gradient_non_finite"] > 0))


def dead_share(layer: LayerSeries) -> Array:
    """Share of the channels that are 0 for the whole batch, ``(S,)``, 0 to 1; 1 where every value is 0."""
    share = _ratio(layer.values["dead_channels"], layer.values["channels"])
    return _where(_finite(layer), np.where(layer.values["zero_share"] == 1, 1.0, share))


def _gets_zeros(layer: LayerSeries) -> Mask:
    """``(S,)`` where the input is 0 everywhere: then a bias has a gradient, and the weight beside it has one of 0."""
    is_zero = (layer.values["weight_gradient_norm"] == 0) & (layer.values["gradient_norm"] > 0)
    gets_zeros: Mask = is_zero & _finite(layer) & ("Norm" not in layer.type)
    return gets_zeros


def _dead_words(layer: LayerSeries, at: int) -> str:
    if _gets_zeros(layer)[at]:
        norm = layer.values["gradient_norm"][at]
        return f"its input is 0 everywhere: its bias has a gradient of norm {norm:.2g}, its weight one of 0"
    if (largest := layer.values["activation_max"][at]) < 0:
        return f"its largest value is {largest:.2g} and its gradient is 0: the activation behind it passes nothing on"
    dead, channels = layer.values["dead_channels"][at], layer.values["channels"][at]
    if math.isnan(dead) or math.isnan(channels):
        return "every value is 0"
    return f"{'all' if dead == channels else f'{dead:.0f} of'} {channels:.0f} channels are 0 for the whole batch"


def _puts_out_its_own(context: LayerContext) -> bool:
    """Whether the layer itself causes its output, rather than a dead layer before it or a weight near 0."""
    return not (passes_values_on(context.layer.type) or context.layer.starts_small)


@Rule(CATALOGUE["dead-layer"], "dead_channels", "dead_layer", _dead_words)
def _dead_layer(context: LayerContext) -> Array:
    """1 too where an activation behind it cuts all off, or where its input is 0 and no layer is seen to cause that."""
    layer, run = context.layer, context.run
    share = _where(_puts_out_its_own(context) & ~run.lives_in_another_call(layer), dead_share(layer))
    return np.where(run.cut_off(layer) | (_gets_zeros(layer) & ~run.starved(layer)), 1.0, share)


@Rule(CATALOGUE["dead-channels"], "dead_channels", "dead_in_batch", _dead_words, named="worst", severity="warning")
def _dead_channels(context: LayerContext) -> Array:
    """Without layers that begin dead, which have a finding of their own, and with `few_values` taken into account."""
    share, limits, values = dead_share(context.layer), context.thresholds, context["channel_values"]
    by_chance = np.fmax(limits["dead_of_few"], (1 - _RARE) ** values)  # NaN where the number of values is unknown
    few = (values < limits["few_values"]) & (share <= by_chance)
    return _where(_puts_out_its_own(context) & ~few & ((share < 1) | (share[:1] < 1)), share)


def _size(layer: LayerSeries) -> Array:
    """Root mean square of the activation; NaN where it is exactly 0, which is a dead layer."""
    size = np.hypot(layer.values["activation_mean"], layer.values["activation_std"])
    return _where(_finite(layer) & (size > 0), size)


def _spread_words(layer: LayerSeries, at: int) -> str:
    mean, std = layer.values["activation_mean"][at], layer.values["activation_std"][at]
    return f"every value of its activation is {mean:.4g} (standard deviation {std:.1g})"


@Rule(CATALOGUE["constant-output"], "activation_std", "flat", _spread_words, lowest=True)
def _relative_spread(context: LayerContext) -> Array:
    return _where(_puts_out_its_own(context), _ratio(context["activation_std"], _size(context.layer)))


def _size_words(layer: LayerSeries, at: int) -> str:
    return f"the root mean square of its activation is {_size(layer)[at]:.2g}"


@Rule(CATALOGUE["exploding-activations"], "activation_std", "largest", _size_words)
@Rule(CATALOGUE["vanishing-activations"], "activation_std", "smallest", _size_words, lowest=True)
def _activation_size(context: LayerContext) -> Array:
    return _where(_puts_out_its_own(context), _size(context.layer))


def _slope(layer: LayerSeries) -> Array:
    """Mean slope over the steepest slope, from the moments: y (1 - y) for a sigmoid, 1 - y² for a tanh."""
    mean, square = layer.values["activation_mean"], _size(layer) ** 2
    if layer.type in ("Sigmoid", "Hardsigmoid"):
        return 4 * (mean - square)
    return _where((square >= 0) & (layer.type == "Tanh"), 1 - square)


def _slope_words(layer: LayerSeries, at: int) -> str:
    slope = percent(max(float(_slope(layer)[at]), 0.0))
    return f"its values are near its bounds: the mean slope is {slope} of the steepest"


@Rule(CATALOGUE["saturated"], "activation_std", "slope", _slope_words, lowest=True, flat="flat_slope")
def _mean_slope(context: LayerContext) -> Array:
    """Where the loss is flat, without the output of the model: most targets may be near its bounds."""
    layer, layers = context.layer, context.run.layers
    last = max((o.index for o in layers if o.model == layer.model and (o.values["weight_norm"] > 0).any()), default=0)
    return _where(not context.is_flat or layer.index < last, _slope(layer))


def _gradient_words(layer: LayerSeries, at: int) -> str:
    norm, ratio = layer.values["gradient_norm"][at], gradient_to_weight(layer)[at]
    if math.isnan(norm):
        return "the norm of its gradient overflows"
    return f"its gradient has norm {norm:.2g}, {ratio:.2g} of the weight's norm"


def _gradient_ratio(context: LayerContext) -> Array:
    """Without normalisations, whose scale may get almost no gradient, and without weights that start near 0."""
    ratio = gradient_to_weight(context.layer)
    usual = "Norm" not in context.layer.type and not context.layer.starts_small
    return _where(_finite(context.layer) & (ratio > 0) & usual, ratio)


def _moves(context: LayerContext, least: float) -> Mask:
    """``(S,)`` where a step changes the weight by more than this share, whatever its gradient; Adam divides by it."""
    return context["update_to_weight"] > least


@Rule(CATALOGUE["exploding-gradient"], "gradient_norm", "exploding", _gradient_words, named="last", patience=1)
def _large_gradient_ratio(context: LayerContext) -> Array:
    """Inf where the norm overflows single precision, 0 where the step is short in spite of the gradient."""
    overflow = np.isnan(context["gradient_norm"]) & (context["gradient_non_finite"] == 0) & (context["weight_norm"] > 0)
    is_long = np.isnan(context["update_to_weight"]) | _moves(context, context.thresholds["too_large"])
    ratio = _gradient_ratio(context)
    return np.where(overflow, np.inf, np.where(is_long | np.isnan(ratio), ratio, 0.0))


@Rule(
    CATALOGUE["vanishing-gradient"], "gradient_norm", "vanishing", _gradient_words, True, "last", flat="flat_gradient"
)
def _small_gradient_ratio(context: LayerContext) -> Array:
    """Inf where Adam makes a step of usual length of it; NaN where a weight near 0 scales it down on purpose."""
    is_intended = context.run.learned(context.layer) | context.run.scaled_down(context.layer)
    ratio, is_usual = _gradient_ratio(context), _moves(context, _USUAL_UPDATE)
    if context.is_flat:  # also with Adam: beside the largest ratio of its model, where CNNs have 7e-3
        model = [layer for layer in context.run.layers if layer.model == context.layer.model and not layer.starts_small]
        is_usual = ratio > 1e-3 * np.nanmax(np.concatenate([[0.0], *map(gradient_to_weight, model)]))
    return _where(~is_intended, np.where(is_usual & (ratio > 0), np.inf, ratio))


def _no_gradient_words(layer: LayerSeries, at: int) -> str:
    if not math.isnan(layer.values["gradient_norm"][at]):
        return "its gradient is 0 everywhere"
    if math.isnan(layer.values["order"][at]):
        return "it did not run in a pass with gradients, and no gradient arrives"
    return "no gradient arrives"


@Rule(CATALOGUE["no-gradient"], "gradient_norm", 0.5, _no_gradient_words, named="last", of_all="error")
def _no_gradient(context: LayerContext) -> Array:
    """1 where a layer that is not frozen has no gradient, or 0, while others of its model have one, or nothing has.

    A gradient of 0 is not a sign where a weight of the same block is still near 0, nor is a missing one of a layer that
    runs in other steps.
    """
    layer, run = context.layer, context.run
    missing = np.isnan(context["gradient_norm"]) & np.isnan(context["gradient_non_finite"])
    lost = (missing | (context["gradient_norm"] == 0)) & ~(context["gradient_non_finite"] > 0)
    others_learn = np.isin(layer.steps, run.learning_steps.get((layer.model, layer.optimizer), ()))
    learning = [
        step for (_, number), steps in run.learning_steps.items() if number == layer.optimizer for step in steps
    ]
    nothing_learns = ~np.isin(layer.steps, learning) & ~run.learned(layer)
    ran = ~np.isnan(context["order"])
    is_sign = np.where(missing, ran | ~ran.any(), ~run.scaled_down(layer))
    return _where((context["frozen"] == 0) & (others_learn | nothing_learns) & is_sign, lost.astype(float))


def _learns(context: LayerContext) -> Mask:
    """``(S,)`` where the learning rate is at least a hundredth of the highest: warm-up from 0 and decay to 0 are usual.

    An unknown rate counts as usual, as does one that is 0 in all of several sampled steps. A weight that starts near 0
    grows by more than its norm, and is left out.
    """
    rates = context["learning_rate"]
    highest = np.nanmax([0.0, *rates])
    is_always_0 = highest == 0 and len(rates) >= context.thresholds["patience"]
    usual: Mask = np.isnan(rates) | (rates >= highest / 100) & (rates > 0) | is_always_0
    learns: Mask = usual & (context["frozen"] != 1) & _finite(context.layer)
    return learns & (not context.layer.starts_small)


def _no_update_words(layer: LayerSeries, at: int) -> str:
    norm = layer.values["weight_gradient_norm"][at]
    text = f"its gradient has norm {norm:.2g}, but a step does not change its weight"
    rate = layer.values["learning_rate"][at]
    return text if math.isnan(rate) else f"{text} (learning rate {rate:g})"


@Rule(CATALOGUE["no-update"], "update_to_weight", 0.5, _no_update_words)
def _no_update(context: LayerContext) -> Array:
    """1 where a weight with a gradient does not change, while others of its optimizer do, or nothing does."""
    unchanged = np.nan_to_num(context["update_to_weight"]) == 0
    ratio = _ratio(context["weight_gradient_norm"], context["weight_norm"])
    can_learn = (ratio > _USUAL_GRADIENT) & ("Norm" not in context.layer.type)
    nothing_changes = ~context.run.changing(context.layer, 0.0)
    others_change = context.run.changing(context.layer, context.thresholds["too_small"])  # so the rate is not the cause
    judged = _learns(context) & can_learn & (others_change | nothing_changes)
    return _where(judged, unchanged.astype(float))


def _update_words(layer: LayerSeries, at: int) -> str:
    rate, update = layer.values["learning_rate"][at], layer.values["update_to_weight"][at]
    text = f"a step changes its weight by {update:.2g} of its norm" if update else "a step does not change its weight"
    return text if math.isnan(rate) else f"{text} (learning rate {rate:g})"


# patience 2: an update that kills the layer is followed by no other
@Rule(CATALOGUE["update-too-large"], "update_to_weight", "too_large", _update_words, named="worst", patience=2)
def _large_update(context: LayerContext) -> Array:
    return _where(_learns(context), context["update_to_weight"])


@Rule(CATALOGUE["update-too-small"], "update_to_weight", "too_small", _update_words, lowest=True, named="worst")
def _small_update(context: LayerContext) -> Array:
    """NaN where the gradient is small or the loss has converged; and for normalisations, whose scale is large."""
    update = context["update_to_weight"]
    can_learn = (gradient_to_weight(context.layer) > _USUAL_GRADIENT) & ("Norm" not in context.layer.type)
    can_learn &= ~context.run.learned(context.layer)
    some_change = context.run.changing(context.layer, 0.0)
    some_change &= ~context.run.changing(context.layer, context.thresholds["too_small"])
    return _where(_learns(context) & can_learn & ((update > 0) | some_change), update)


def batchnorm_distance(layer: LayerSeries, thresholds: Limits) -> Array:
    """Distance of a batch from the running statistics, ``(S,)``; 1 where mean or variance is at its threshold."""
    shift, ratio = layer.values["running_mean_shift"], layer.values["running_var_ratio"]
    logarithm = np.abs(np.log(_where(ratio > 0, ratio))) / math.log(thresholds["ratio"])
    return _where(_finite(layer), np.fmax(shift / thresholds["shift"], logarithm))


def _drift_words(layer: LayerSeries, at: int) -> str:
    shift, ratio = layer.values["running_mean_shift"][at], layer.values["running_var_ratio"][at]
    text = f"the batch's mean is off by {shift:.2g} running standard deviations"
    return text if math.isnan(ratio) else f"{text}, its variance is {ratio:.2g} times the running one"


@Rule(CATALOGUE["batchnorm-drift"], "running_mean_shift", 1.0, _drift_words)
def _drift(context: LayerContext) -> Array:
    warm = context.layer.steps >= context.thresholds["warm_up"]
    return _where(warm, batchnorm_distance(context.layer, context.thresholds))


@Rule(CATALOGUE["frozen"], "gradient_norm", 0.5, lambda layer, at: "requires_grad is False", named="last")
def _frozen(context: LayerContext) -> Array:
    return context["frozen"]
