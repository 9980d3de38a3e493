"""The causes of a run that does not learn: how each shows in the facts of a step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookscope.findings import CATALOGUE, FindingKind, add_kind, counted, listed, percent
from hookscope.training.log.series import RunSeries
from hookscope.training.log.summary import NON_FINITE

Facts = Mapping[str, Any]

_ADAPTIVE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop")  # whose steps are as long as the rate
_CLIPPED = 1e-6  # a limit up to which clipping leaves no gradient
_LOW_LIMIT, _SHORT_STEP = 0.01, 2e-5  # of the norm, and times the rate: all weights together move no farther in a step
_DRIFT = 2.5  # times the scale of the input
_ROUNDING, _UNLEARNED = 1e-3, 0.8  # of a loss that cannot pass 0; of the first loss
_PROBABILITIES = ("Softmax", "Sigmoid")
_RANGES = {"Sigmoid": (0.0, 1.0), "Softmax": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Relu": (0.0, math.inf)}
_LINEAR = ("Convolution", "Addmm", "Mm", "Bmm", "NativeBatchNorm", "CudnnBatchNorm")  # whose values have no bounds
_SUMS_TO_1 = 1.01  # with rounding of half precision
_FLAT = 0.1  # of the mean of an input: less is hardly an image after mean and std were applied
_CUTTING = ("Relu", "Hardtanh", "Tanh", "Threshold")
# symptoms of weights that do not change
_LIFELESS = frozenset(("no-gradient", "no-update", "update-too-small", "vanishing-gradient", "loss-flat", "frozen",
                       "learning-rate-vanishes"))  # fmt: skip
# symptoms of values that grow, vanish or are not numbers
_UNSTABLE = frozenset(
    ("non-finite", "loss-rises", "loss-spike", "dead-layer", "dead-channels", "constant-output",
     "exploding-activations", "vanishing-activations", "saturated", "exploding-gradient", "update-too-large",
     "no-gradient", "no-update", "update-too-small", "vanishing-gradient", "batchnorm-drift")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one sampled step shows; ``case`` is a case of the catalogue."""

    words: str
    case: str = ""
    layers: tuple[str, ...] = ()
    numbers: Mapping[str, float | int | str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class History:
    """The facts of the sampled steps of one optimizer, and the step in question."""

    rows: Sequence[Facts]
    at: int
    run: RunSeries
    limits: Mapping[str, float]

    def __getitem__(self, name: str) -> Any:
        return self.rows[self.at].get(name)

    def number(self, name: str) -> float:
        """NaN where the log has none."""
        value = self[name]
        return float(value) if isinstance(value, (int, float)) else math.nan

    def is_not_finite(self, name: str) -> bool:
        """Whether it was NaN or Inf, which the log writes as null."""
        return name in self.rows[self.at] and self[name] is None


Look = Callable[[History], Evidence | None]


CAUSES: list[Cause] = []
"""In the order in which causes of the same step are reported."""


@dataclass(slots=True)
class Cause:
    """Registers the function below it, which looks for the cause ``kind`` in the facts of a step.

    The kind joins the catalogue if it is new.
    """

    kind: FindingKind
    patience: int | None = None  # sampled steps in a row, where the thresholds do not say it
    explains: Collection[str] = ()  # findings that are left out, because the cause says more
    precedes: Collection[str] = ()  # findings that follow from the cause, and from which it takes its severity
    before: str | None = None  # the next less severe finding, see `add_kind`
    look: Look = field(init=False)

    def __call__(self, look: Look) -> Look:
        self.look = look
        add_kind(self.kind, "training", self.before)
        CAUSES.append(self)
        return look


# Gradients and steps


@Cause(CATALOGUE["loss-scale"], 1, explains=("no-step", "loss-flat", "no-gradient"), precedes=_UNSTABLE)
def _loss_scale(now: History) -> Evidence | None:
    scale, first, ran = now.number("loss_scale"), now.number("first_loss_scale"), now["backwards"]
    if now["optimizer_steps"] == 0 and scale == scale and now["weights_changed"] is False:
        words = f"backward ran {ran:,} times, the GradScaler skipped every step, and its scale is {scale:.4g}"
        return Evidence(words, numbers={"scale": scale, "backwards": ran})
    if now["step_scaled"] and now["optimizer_type"] not in _ADAPTIVE:  # whose steps have the same length
        words = f"{now['optimizer_type']} made a step with gradients that were {scale:,.0f} times too large"
        return Evidence(words, "scaled step", numbers={"scale": scale})
    if now["clip_scaled"]:
        limit = now["clip_limit"]
        words = f"{now['clip_function']} clipped to {limit} gradients that were {scale:,.0f} times too large"
        return Evidence(words, "scaled clipping", numbers={"scale": scale, "limit": limit})
    limits = now.limits
    if scale < limits["least_scale"] or scale < first * limits["scale_fall"]:
        words = f"the loss scale is {scale:.4g}, {first:.4g} at first: each halving is a skipped step"
        return Evidence(words, numbers={"scale": scale, "first": first})
    return None


@Cause(CATALOGUE["no-step"], 1, explains=_LIFELESS | {"gradients-accumulate", "not-optimized"})
def _no_step(now: History) -> Evidence | None:
    backwards = now["backwards"] or 0
    if now["optimizer_steps"] == 0 and backwards >= now.limits["few_backwards"] and not now["weights_changed"]:
        holders = now["optimizers"] or []
        held = f"{listed(holders)} holds them" if holders else "no optimizer of torch holds them"
        words = f"backward ran {backwards:,} times, no optimizer stepped, and the weights did not change; {held}"
        return Evidence(words, numbers={"backwards": backwards})
    if (now["waiting"] or 0) > 0 and now["step"] >= now.limits["few_backwards"]:
        holders = listed(now["waiting_optimizers"])
        words = f"{counted(now['waiting'], 'parameter')} of {holders} got gradients, but {holders} made no step in"
        words += f" {now['step'] + 1:,} steps of {now['optimizer_type']}"
        return Evidence(words, numbers={"parameters": now["waiting"]})
    return None


def _has_no_gradient(now: History) -> bool:
    return bool(now["trainable"]) and now["with_gradient"] == now["zero_gradients"]


@Cause(CATALOGUE["not-optimized"], 1, explains=_LIFELESS)
def _not_optimized(now: History) -> Evidence | None:
    lost, layers = now["not_optimized"] or 0, tuple(now["not_optimized_layers"] or ())
    if not lost:
        return None
    names = listed([f"'{name}'" for name in layers], 3)
    are = "is" if lost == 1 else "are"
    text = f"{counted(lost, 'parameter')} with a gradient {are} held by no optimizer ({names})"
    numbers = {"parameters": lost, "without_gradient": now["parameters"] - now["with_gradient"]}
    if _has_no_gradient(now):
        words = f"{text}, and none of the {now['parameters']} that {now['optimizer_type']} holds has one"
        return Evidence(words, "replaced", layers, numbers)
    if now["of_no_model"]:
        words = f"{text}; {now['of_no_model']} of the {now['parameters']} that {now['optimizer_type']} holds are in no"
        return Evidence(f"{words} model and have no gradient", "replaced", layers, numbers)
    if now["held_twice"] and now["not_optimized_models"]:
        words = f"{text}, and another optimizer holds all that this {now['optimizer_type']} holds"
        return Evidence(words, "twice", layers, numbers)
    case = "outside" if now["not_optimized_outside"] else "other model" if now["not_optimized_models"] else ""
    return Evidence(text, case, layers, numbers)


@Cause(CATALOGUE["no-gradient"], 1, explains=_LIFELESS | {"gradients-accumulate"})
def _nothing_gets_a_gradient(now: History) -> Evidence | None:
    held, loss = now["parameters"] or 0, now["loss"]
    numbers = {"parameters": held, "backwards": now["backwards"], "loss": loss}
    if held and now["trainable"] == 0:
        return Evidence(f"all {held} parameters of {now['optimizer_type']} are frozen", "all frozen", numbers=numbers)
    limit, size = now.number("clip_limit"), now.number("gradient_norm")
    is_tiny = limit <= _LOW_LIMIT and limit * now.number("rate") <= _SHORT_STEP and size > 0.99 * limit
    is_tiny = is_tiny and now["clip_function"] == "clip_grad_norm_" and now["optimizer_type"] not in _ADAPTIVE
    if (limit <= _CLIPPED or is_tiny) and now["gradients_after_backward"]:
        words = f"{now['clip_function']} with a limit of {limit:g} left a gradient of norm {size:.2g}"
        return Evidence(words, "clipped", numbers={**numbers, "limit": limit})
    if not _has_no_gradient(now) or (now["with_gradient"] and now.is_not_finite("loss")):
        return None
    if not now["backwards"]:
        words = f"no backward pass ran before the step of {now['optimizer_type']}"
        return Evidence(words, "no backward", numbers=numbers)
    if now["loss_without_graph"]:
        words = f"none of {held} parameters gets a gradient: the loss has no graph, so backward reaches nothing"
        return Evidence(words, "no path", numbers=numbers)
    had_some = any(row.get("with_gradient") != row.get("zero_gradients") for row in now.rows[: now.at])
    if now["with_gradient"] and had_some:  # the loss has converged, or layers have died: a symptom
        return None
    if now["with_gradient"] and loss == 0:
        words = "all gradients are 0, and so is the loss: it is multiplied by 0, or depends on no weight"
        return Evidence(words, "loss of 0", numbers=numbers)
    if now["gradients_after_backward"] and not now["zero_after_backward"]:
        what = "are 0" if now["with_gradient"] else "are gone"
        words = f"after the backward pass {now['gradients_after_backward']} parameters had a gradient; at the step they"
        return Evidence(f"{words} {what}", "cleared", numbers=numbers)
    if now["with_gradient"]:
        numbers |= {"zero_gradients": now["zero_gradients"]}
        return Evidence(f"all gradients are 0, although the loss is {loss:.4g}", "all zero", numbers=numbers)
    words = (
        f"the loss has a graph, but it leads to none of {held} parameters of {listed(now['models'] or ['no model'])}"
    )
    return Evidence(words, "no path", numbers=numbers)


@Cause(CATALOGUE["no-gradient"], explains=("no-gradient",))
def _under_no_grad(now: History) -> Evidence | None:
    count, names = now["under_no_grad_layers"] or 0, tuple(now["under_no_grad"] or ())
    if not count or _has_no_gradient(now):
        return None
    more = f" and {count - 1} more layers" if count > 2 else f" and '{names[1]}'" if count == 2 else ""
    words = f"'{names[0]}'{more} ran under no_grad and got no gradient, but {now['optimizer_type']} holds the weights"
    return Evidence(words, "under no_grad", names, {"layers": count})


@Cause(CATALOGUE["gradients-accumulate"], 1, explains=("loss-flat",), precedes=_UNSTABLE)
def _gradients_accumulate(now: History) -> Evidence | None:
    stale = now["stale_gradients"] or 0
    if not stale or not now["backwards"]:
        return None
    words = f"when backward began, {stale} of {now['parameters']} parameters still had the gradient of the step before"
    return Evidence(words, numbers={"parameters": stale, "gradient_norm": now["gradient_norm"]})


# Loss functions


@Cause(CATALOGUE["probabilities-as-logits"], 1, explains=("loss-flat", "update-too-small", "vanishing-gradient"))
def _probabilities(now: History) -> Evidence | None:
    function, fed_by = now["loss_function"], str(now["loss_input"])
    by_name = function in ("cross_entropy", "binary_cross_entropy_with_logits") and fed_by in _PROBABILITIES
    if not by_name and not now["loss_input_sums_to_1"]:
        return None
    made = f"made by {fed_by.lower()}" if by_name else "positive and sums to 1"
    own = "sigmoid" if function == "binary_cross_entropy_with_logits" else "softmax"
    words = f"the input of {function or 'cross_entropy'} is {made}, but the loss computes the {own} itself"
    return Evidence(words, numbers={"loss_input": fed_by})


@Cause(CATALOGUE["loss-input"], 1, explains=("loss-flat", "update-too-small", "loss-rises"), precedes=_UNSTABLE)
def _loss_input(now: History) -> Evidence | None:
    function, fed_by = now["loss_function"], str(now["loss_input"])
    numbers = {"loss_input": fed_by}
    if now["loss_shapes"]:
        words = "the loss pairs each output of {} with each target of {}"
        return Evidence(words.format(*map(tuple, now["loss_shapes"])), "pairs")
    if (dim := now["softmax_dim"]) is not None:
        what = "the batch" if dim == 0 else "not over the classes"
        return Evidence(f"the softmax before nll_loss runs over dim {dim}, {what}", "wrong dim", numbers=numbers)
    if now["targets"] == 0 and now.is_not_finite("loss"):
        return Evidence(f"every target of the batch has the ignored class, so {function} is NaN", "no target")
    if (total := now.number("soft_target_sum")) > _SUMS_TO_1:
        return Evidence(f"the targets of cross_entropy sum to up to {total:.4g} over the classes, not to 1", "soft")
    if (highest := now.number("loss_input_max")) > _ROUNDING and function == "nll_loss":
        words = f"nll_loss gets the output of {fed_by.lower()} with values up to {highest:.3g}, not log-probabilities"
        return Evidence(words, "no logarithm", numbers=numbers)
    divergent = now["kl_div_input"] or ""
    if divergent in _PROBABILITIES or (divergent and now.number("loss") < -_ROUNDING):
        words = f"kl_div gets the output of {divergent.lower()}, not log-probabilities; the loss is {now['loss']:.4g}"
        return Evidence(words, "divergence", numbers={"loss_input": divergent})
    if now["log_input"] and now.is_not_finite("loss") and not now.is_not_finite("input_mean"):
        words = f"the loss is NaN or Inf, and it takes the log of the output of {now['log_input'].lower()}"
        return Evidence(words, "logarithm", numbers={"loss_input": now["log_input"]})
    if (made := now["overlap_input"]) in _LINEAR:
        words = f"the loss divides an overlap by a sum, as Dice does, and its input is the raw output of {made.lower()}"
        return Evidence(words, "overlap", numbers={"loss_input": made})
    lowest, highest = now.number("target_lowest"), now.number("target_highest")
    if str(function).startswith("binary_cross_entropy") and (lowest < 0 or highest > 1):
        return Evidence(f"the targets of {function} go from {lowest:.4g} to {highest:.4g}", "targets")
    if function in ("cross_entropy", "binary_cross_entropy_with_logits") and fed_by in _CUTTING:
        return Evidence(f"{fed_by.lower()} cuts off the logits that go into {function}", numbers=numbers)
    return None


@Cause(CATALOGUE["non-finite"], 1, explains=("no-gradient", "loss-flat"))
def _loss_is_lost(now: History) -> Evidence | None:
    columns = (layer.values[name][layer.steps == now["step"]] for layer in now.run.layers for name in NON_FINITE)
    is_known = now["targets"] == 0 or now["log_input"] or any((column > 0).any() for column in columns)
    words = f"the loss is NaN or Inf and all layers are finite; made by {now['made_by']}, as far as the graph shows"
    return Evidence(words) if now["made_by"] and now.is_not_finite("loss") and not is_known else None


@Cause(CATALOGUE["loss-maximized"], 1, explains=("loss-rises",), precedes=_UNSTABLE)
def _maximized(now: History) -> Evidence | None:
    signs = {row.get("loss_negated") for row in now.rows if row.get("loss_function") == now["loss_function"]}
    if signs == {True} and not now["maximize"]:  # a policy gradient has both, by the sign of the reward
        return Evidence(f"backward starts at the negative of {now['loss_function']}", numbers={"loss": now["loss"]})
    if now["maximize"] and not now["loss_negated"] and now["loss_function"]:
        words = f"{now['optimizer_type']} has maximize=True, and the loss is {now['loss_function']}"
        return Evidence(words, numbers={"loss": now["loss"]})
    return None


# Data


@Cause(CATALOGUE["input-constant"], explains=("loss-flat", "constant-output"), precedes=_UNSTABLE)
def _input_constant(now: History) -> Evidence | None:
    shape, lowest = now["input_shape"] or [0], now["input_min"]
    words = ""
    if lowest is not None and lowest == now["input_max"]:
        words = f"every value of the input {tuple(shape)} is {lowest:g}"
    elif shape[0] > 1 and now["input_spread"] == 0:
        words = f"all {shape[0]} samples of the input {tuple(shape)} are equal"
    return Evidence(words, numbers={"samples": shape[0]}) if words else None


@Cause(CATALOGUE["input-constant"])
def _input_repeats(now: History) -> Evidence | None:
    names = ("input_shape", "input_mean", "input_std", "input_min", "input_max", "input_key")
    own = [now[name] for name in names]
    neighbours = [now.rows[at] for at in (now.at - 1, now.at + 1) if 0 <= at < len(now.rows)]
    repeats = any([row.get(name) for name in names] == own for row in neighbours)
    if not repeats or now["optimizer"] is None or own[1] is None or own[3] == own[4]:
        return None
    words = f"the input {tuple(own[0])} is the same at each sampled step: mean {own[1]:.6g}, standard deviation"
    return Evidence(f"{words} {own[2]:.6g}", "repeats", numbers={"mean": own[1], "std": own[2]})


@Cause(CATALOGUE["input-layout"], explains=("loss-flat",))
def _input_layout(now: History) -> Evidence | None:
    period, shape = now.number("input_period"), tuple(now["input_shape"] or ())
    words = f"columns of the input {shape} are more alike 3 apart than 2 or 4 apart (by {period:.2g} in correlation)"
    return Evidence(words, numbers={"period": period}) if period > now.limits["period"] else None


@Cause(CATALOGUE["target-constant"], explains=("loss-flat",), precedes=("loss-rises",))
def _target_constant(now: History) -> Evidence | None:
    count, target = now["targets"] or 0, now["target_min"]
    if count < now.limits["few_targets"] or target != now["target_max"]:
        return None
    others = {row.get("target_min") for row in now.rows if row.get("target_min") == row.get("target_max")}
    numbers = {"targets": count, "class": target}
    if len(others) > 1:
        words = f"all {count} targets of a batch are of one class: here class {target:.0f}, in other batches another"
        return Evidence(words, "sorted", numbers=numbers)
    return Evidence(f"all {count} targets are class {target:.0f}", numbers=numbers)


@Cause(CATALOGUE["input-scale"], explains=("initial-loss",), precedes=_UNSTABLE | {"loss-flat"})
def _input_scale(now: History) -> Evidence | None:
    size = math.hypot(now.number("input_mean"), now.number("input_std"))
    limits = now.limits
    if not size or math.isnan(size) or now["input_min"] == now["input_max"]:
        return None
    pairs = ((row.get("input_mean"), row.get("input_std")) for row in (*now.rows[:3], *now.rows[-3:]))
    sizes = [math.hypot(mean or 0, std or 0) for mean, std in pairs]
    drifts = 0 < _DRIFT * max(sizes[:3]) < min(sizes[-3:]) or 0 < _DRIFT * max(sizes[-3:]) < min(sizes[:3])
    is_flat = now.number("input_std") < _FLAT * (mean := abs(now.number("input_mean"))) and mean > 1
    is_odd = is_flat or (drifts and now.at >= len(now.rows) - 3)
    if limits["small_input"] <= size <= limits["odd_input"] and not is_odd:
        return None
    words = f"the input has mean {now['input_mean']:.4g} and standard deviation {now['input_std']:.4g}, from"
    words += f" {now['input_min']:.4g} to {now['input_max']:.4g}"
    words += f"; its root mean square is {sizes[0]:.3g} at first and {sizes[-1]:.3g} at last" if drifts else ""
    numbers = {name: now[f"input_{name}"] for name in ("mean", "std", "min", "max")}
    case = "flat" if is_flat else "" if not limits["small_input"] <= size <= limits["large_input"] else "odd"
    return Evidence(words, case, numbers=numbers)


@Cause(CATALOGUE["target-scale"], 1, explains=("loss-flat",), precedes=_UNSTABLE)
def _target_scale(now: History) -> Evidence | None:
    size, losses = now.number("target_size"), [row.get("loss") for row in now.rows]
    has_learned = any(loss is not None and loss < _UNLEARNED * (losses[0] or 0.0) for loss in losses[-3:])
    low, high = _RANGES.get(str(now["loss_input"]), (-math.inf, math.inf))
    lowest, highest = now.number("target_lowest"), now.number("target_highest")
    is_beyond = max(low - lowest, highest - high) > now.limits["beyond"] * size
    if is_beyond and not str(now["loss_function"]).startswith("binary_cross_entropy"):  # which has a finding
        words = f"the targets go from {lowest:.4g} to {highest:.4g}, and the outputs of {now['loss_input'].lower()}"
        numbers = {"lowest": lowest, "highest": highest}
        return Evidence(f"{words} only from {low:g} to {high:g}", "out of range", numbers=numbers)
    is_one = size > now.limits["large_target"] and not has_learned and now["loss_alone"] is not False
    words = f"the targets have root mean square {size:.4g}, and the loss is {now.number('loss'):.4g}"
    return Evidence(words, numbers={"size": size, "loss": now["loss"]}) if is_one else None


# Modes and settings


@Cause(CATALOGUE["duplicate-filters"], explains=("loss-flat",))
def _equal_filters(now: History) -> Evidence | None:
    first, last = now.rows[0].get("equal_at_first"), now.rows[-1].get("equal_filters")
    names, when = tuple(last or first or ()), "after" if last else "only before"
    words = f"all filters are equal {when} the first step in {listed([repr(name) for name in names], 3)}"
    return Evidence(words, "equal" if last else "at first", names, {"layers": len(names)}) if names else None


@Cause(CATALOGUE["eval-mode"], 2)
def _eval_mode(now: History) -> Evidence | None:
    count, layers = now["eval_modes"] or 0, tuple(now["eval_layers"] or ())
    if not count or not now["backwards"]:
        return None
    names = listed([f"'{name}'" for name in layers], 3)
    words = f"{count} of {counted(now['modes'], 'layer')} with dropout or BatchNorm ran in eval mode ({names})"
    return Evidence(words, "some" if now["train_mode"] else "", layers, {"layers": count, "of": now["modes"]})


@Cause(CATALOGUE["eval-mode"], 1)
def _validation(now: History) -> Evidence | None:
    step, loss = now["validation_in_train_mode"], now["validation_loss"]
    words = f"before step {step} the model ran in train mode without gradients"
    words += f", and {loss} measured it" if loss else ""
    return Evidence(words, "validation", numbers={"before_step": step}) if step else None


@Cause(CATALOGUE["initial-loss"], 1, explains=("loss-flat", "optimizer-settings"), precedes=_UNSTABLE)
def _initial_loss(now: History) -> Evidence | None:
    loss, chance = now.number("loss"), math.log(max(now["classes"] or 1, 1))
    words = f"the loss is {loss:.4g} before the first step; guessing among {now['classes']} classes gives {chance:.4g}"
    is_high = now["step"] == 0 and now["loss_is_mean"] and 0 < chance * now.limits["first_loss"] < loss
    return Evidence(words, numbers={"loss": loss, "chance": chance}) if is_high else None


@Cause(CATALOGUE["optimizer-settings"], 1, explains=("loss-flat", "learning-rate-vanishes"), precedes=_UNSTABLE)
def _settings(now: History) -> Evidence | None:
    kind, rate, decay = now["optimizer_type"], now.number("rate"), now.number("weight_decay")
    limits = now.limits
    if (momentum := now.number("momentum")) >= 1:
        words = f"{kind} has momentum {momentum:g}: each step repeats all earlier ones"
        return Evidence(words, numbers={"momentum": momentum})
    if rate >= limits["adaptive_rate"] and kind in _ADAPTIVE:
        words = f"{kind} has a learning rate of {rate:g}: each step changes each weight by about as much"
        return Evidence(words, "rate", numbers={"rate": rate})
    layers = [layer for layer in now.run.layers if layer.optimizer == now["optimizer"]]
    updates = (value for layer in layers for value in layer.values["update_to_weight"][layer.steps == now["step"]])
    update = statistics.median([float(value) for value in updates if value == value] or [0.0])
    if update > limits["overwriting"]:
        words = f"a step of {kind} changes a weight by {update:.2g} times its norm (median of the layers; learning rate"
        return Evidence(f"{words} {rate:g})", "rate", numbers={"rate": rate, "update": update})
    if rate * decay > limits["decay"]:
        words = f"{kind} has weight decay {decay:g} and learning rate {rate:g}: each step takes"
        words += f" {percent(min(rate * decay, 1))} of every weight"
        return Evidence(words, "decay", numbers={"rate": rate, "weight_decay": decay})
    return None


@Cause(CATALOGUE["learning-rate-vanishes"], 2, explains=_LIFELESS - {"no-gradient", "frozen"})
def _rate_vanishes(now: History) -> Evidence | None:
    rates, last = [row.get("rate") for row in now.rows], now.rows[-1]
    if swings := last.get("rate_swings"):
        words = f"in {last['step'] + 1:,} steps the learning rate fell to almost 0 and rose again"
        return Evidence(f"{words} {counted(swings, 'time')}", "swings")
    rate, peak = now["rate"], max((r for r in rates if r is not None), default=None)
    if rate is None or peak is None:
        return None
    if peak == 0 and len(rates) >= now.limits["patience"]:
        return Evidence("the learning rate is 0", "zero", numbers={"rate": 0.0})
    low = [r is not None and r <= 1.001 * now.limits["rate_fall"] * peak for r in rates]
    first = max((at for at, is_low in enumerate(low) if not is_low), default=-1) + 1
    steps = [row["step"] for row in now.rows]
    if 0 < first <= now.at and steps[-1] - steps[first] >= steps[-1] / 3:
        words = f"the learning rate is {rate:.2g}, {peak:.2g} at most: it fell to a thousandth before step"
        words += f" {steps[first]}, and {steps[-1] - steps[first] + 1:,} of {steps[-1] + 1:,} steps came after"
        return Evidence(words, numbers={"rate": rate, "highest": peak})
    return None


@Cause(CATALOGUE["batchnorm-small-batch"], explains=("loss-flat", "batchnorm-drift"), precedes=_UNSTABLE)
def _small_batch(now: History) -> Evidence | None:
    values, samples, name = now["batchnorm_values"], now["batchnorm_samples"], now["batchnorm"]
    if values is None or (values > 2 and samples > 2):
        return None
    words = f"a BatchNorm normalises {counted(values, 'value')} of a channel, from {counted(samples, 'sample')}"
    return Evidence(words, "" if values <= 2 else "few samples", (name,), {"values": values, "samples": samples})
