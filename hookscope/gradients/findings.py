"""Named findings on gradients that vanish, explode or are missing, each with the layer where it begins."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from hookscope.columns import Row
from hookscope.errors import UsageError
from hookscope.findings import (
    CATALOGUE,
    Finding,
    chains,
    counted,
    default,
    listed,
    merged,
    never_updated,
    nonfinite_words,
    ranked,
)
from hookscope.gradients.anomaly import first_anomaly
from hookscope.gradients.autograd_flow import Stop, gradient_stops
from hookscope.gradients.backward_pass import (
    GRADIENTS,
    PARAMETER_GRADIENTS,
    GradientReport,
    LayerGradient,
    ParameterGradient,
    layer_gradients,
)
from hookscope.hooks import Anomaly, AnyModel, GradientSize, module_of
from hookscope.scores import LossLike

_MOST_CHAINS = 3
_LEARNED, _SMALL_SCALE = (default("vanishing-gradient", name) for name in ("learned", "small_scale"))
_AUXILIARY = re.compile(r"(^|\.)aux", re.IGNORECASE)

Numbers = dict[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class GradientThresholds:
    """Thresholds of the norm of a weight's gradient over the norm of the weight.

    Measured on 36 torchvision models with random weights, in eval mode: where activations keep their size (resnet50,
    vgg, densenet, swin) the ratio is 7e-4 to 48. Near the lower threshold are ConvNeXt's filters beside its layer scale
    (2.5e-7); below it is maxvit (from 2e-9). Random weights really vanish where activations shrink (mobilenet: mostly
    1e-36 to 1e-7), and explode where they grow (resnet152: 7e4 to 7e8). Of trained weights, `shapes` has 1.6e-2 to 3.8.

    Attributes:
        vanishing: A gradient below it vanishes; a gradient of exactly 0 always does.
        exploding: A gradient above it explodes; NaN and Inf always do.

    Raises:
        UsageError: The thresholds are not in order.
    """

    vanishing: float = default("vanishing-gradient", "vanishing")
    exploding: float = default("exploding-gradient", "exploding")

    def __post_init__(self) -> None:
        if not 0 <= self.vanishing < self.exploding:
            asked = f"vanishing below {self.vanishing:g} and exploding above {self.exploding:g}"
            raise UsageError(asked, "the first must be smaller", "give a smaller and a larger number")


def diagnose_gradients(
    report: GradientReport,
    stops: Sequence[Stop] = (),
    thresholds: GradientThresholds | None = None,
    anomaly: Anomaly | None = None,
    *,
    looked_for_anomaly: bool = False,
) -> list[Finding]:
    """Findings on gradients, the most severe first; neighbouring weights are reported once.

    Gradients flow from the loss backwards, so a finding names the layer nearest to the loss. Its evidence says where
    it is worst. `layer_finding_names` and `parameter_finding_names` name the findings of every layer and parameter.

    Args:
        report: The result of `layer_gradients`.
        stops: The result of `gradient_stops`, needed if `anything_unreached`.
        thresholds: Thresholds of the findings.
        anomaly: The result of `first_anomaly`.
        looked_for_anomaly: Whether `first_anomaly` was called; then the advice does not suggest it.

    Example:
        >>> import torch
        >>> from hookscope import layer_gradients
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.ReLU(), torch.nn.Flatten())
        >>> _ = net[0].bias.data.fill_(-9), net[0].weight.data.fill_(1)
        >>> [finding] = diagnose_gradients(layer_gradients(net, torch.ones(1, 1, 1, 1)))
        >>> finding.finding, finding.layer, finding.evidence
        ('vanishing-gradient', '0', "the gradient of '0.weight' is 0 everywhere")
    """
    thresholds = thresholds or GradientThresholds()
    findings = [
        *_non_finite(report, anomaly, looked_for_anomaly),
        *_by_ratio(report, thresholds, "exploding-gradient"),
        *_by_ratio(report, thresholds, "vanishing-gradient"),
        *_stopped(report, stops),
        *_frozen(report, stops),
    ]
    return ranked(merged([*never_updated(report.updated, report.trained, findings), *findings]))


def examine_gradients(
    model: AnyModel,
    inputs: Any,
    loss: LossLike = None,
    *,
    thresholds: GradientThresholds | None = None,
    detect_anomaly: bool = False,
    **options: Any,
) -> tuple[GradientReport, list[Finding], Anomaly | None]:
    """Measure the gradients, look for the causes of missing ones, and return report, findings and the first anomaly.

    ``options`` are further arguments of `layer_gradients`, which raises the same errors. ``detect_anomaly`` runs a
    second pass for the operation behind the first NaN.
    """
    report, model = layer_gradients(model, inputs, loss, **options), module_of(model)
    stops = gradient_stops(model, inputs, loss) if anything_unreached(report) else ()
    anomaly = first_anomaly(model, inputs, loss) if detect_anomaly else None
    findings = diagnose_gradients(report, stops, thresholds, anomaly, looked_for_anomaly=detect_anomaly)
    return report, findings, anomaly


def anything_unreached(report: GradientReport) -> bool:
    """Whether a layer or parameter lacks a gradient, so that `gradient_stops` is worth a second pass."""
    layers = any(layer.grad_output is None for layer in report.layers) or bool(report.did_not_run)
    measured = {layer.call.name for layer in report.layers}
    # for a frozen parameter the gradient of its layer's output shows whether one would arrive
    return layers or any(p.gradient is None and not (p.frozen and p.layer in measured) for p in report.parameters)


def gradient_rows(
    report: GradientReport, thresholds: GradientThresholds | None = None, weights: str = ""
) -> tuple[list[Row], list[Row]]:
    layers = [
        GRADIENTS.row(layer, findings=layer_finding_names(layer, report.parameters, thresholds), weights=weights)
        for layer in report.layers
    ]
    parameters = [
        PARAMETER_GRADIENTS.row(parameter, findings=parameter_finding_names(parameter, thresholds), weights=weights)
        for parameter in report.parameters
    ]
    return layers, parameters


def layer_finding_names(
    layer: LayerGradient, parameters: Iterable[ParameterGradient] = (), thresholds: GradientThresholds | None = None
) -> tuple[str, ...]:
    """The names of the findings on one call and on the layer's own ones of ``parameters``."""
    own = [p for p in parameters if p.layer == layer.call.name]
    names = [name for p in own for name in parameter_finding_names(p, thresholds)]
    size = layer.grad_output
    if size is None:
        names.insert(0, "no-gradient")
    elif is_spoiled(size) or is_spoiled(layer.grad_input) or layer.activation_nonfinite:
        names.insert(0, "exploding-gradient")
    elif size.max_abs == 0:
        names.insert(0, "vanishing-gradient")
    return tuple(dict.fromkeys(names))


def parameter_finding_names(
    parameter: ParameterGradient, thresholds: GradientThresholds | None = None
) -> tuple[str, ...]:
    thresholds = thresholds or GradientThresholds()
    if parameter.gradient is None:
        return ("no-gradient",)
    if is_spoiled(parameter.gradient):
        return ("exploding-gradient",)
    if not _is_weight(parameter):  # the gradient of a bias or a scale may be near 0
        return ()
    ratio = parameter.ratio
    if parameter.gradient.max_abs == 0 or (ratio is not None and ratio < thresholds.vanishing):
        return ("vanishing-gradient",)
    return ("exploding-gradient",) if ratio is not None and ratio > thresholds.exploding else ()


def is_spoiled(size: GradientSize | None) -> bool:
    return size is not None and bool(size.nan or size.inf)


def _is_weight(parameter: ParameterGradient) -> bool:
    """Whether it is a matrix or a filter bank, unlike ConvNeXt's layer scale (C, 1, 1)."""
    shape = parameter.shape
    return len(shape) >= 2 and (math.prod(shape) > max(shape) or parameter.name.endswith("weight"))


def _non_finite(report: GradientReport, anomaly: Anomaly | None, searched: bool) -> Iterator[Finding]:
    """One finding, at the operation if it is known, else at the first activation or the last gradient."""
    kind, case = CATALOGUE["exploding-gradient"], "anomaly" if searched else "non-finite"
    if anomaly is not None:
        yield _of_anomaly(anomaly)
        return
    forward = [layer for layer in report.layers if layer.activation_nonfinite]
    if forward or not math.isfinite(report.value):
        key = forward[0].call.key if forward else ""
        what = f"{forward[0].activation_nonfinite:,} values of its activation are" if forward else "the loss is"
        numbers: Numbers = {"phase": "forward", "values": forward[0].activation_nonfinite if forward else 1}
        yield kind.finding(key, f"{what} NaN or Inf already in the forward pass", case, numbers=numbers)
        return
    bad = [p for p in report.parameters if is_spoiled(p.gradient)]
    if bad and (size := bad[-1].gradient) is not None:
        text = f"{nonfinite_words(size.nan, size.inf)} in the gradient of '{bad[-1].name}'"
        text += f", and in {counted(len(bad) - 1, 'parameter')} before it" if len(bad) > 1 else ""
        numbers = {"phase": "backward", "nan": size.nan, "inf": size.inf, "parameters": len(bad)}
        yield kind.finding(bad[-1].layer, text, case, numbers=numbers)
        return
    layers = [layer for layer in report.layers if is_spoiled(layer.grad_output) or is_spoiled(layer.grad_input)]
    if layers:
        text = "NaN or Inf in the gradients at its output or input"
        numbers = {"phase": "backward", "calls": len(layers)}
        yield kind.finding(layers[-1].call.key, text, case, numbers=numbers)


def _of_anomaly(anomaly: Anomaly) -> Finding:
    origin = anomaly.origin
    if origin.source and origin.operation in ("", "the output"):
        text = f"the output holds {origin.kind} from an operation that torch does not report"
    elif origin.source:
        text = f"{origin.source} holds {origin.kind}, which {origin.operation_and_place} uses"
    else:
        text = f"{origin.operation_and_place} makes the first {origin.kind} of the {origin.phase} pass"
    if origin is not anomaly:
        then = anomaly.operation_and_place if anomaly.layer == origin.layer else str(anomaly)
        text += f"; {then} turns it into NaN"
    numbers: Numbers = {name: getattr(origin, name) for name in ("phase", "kind", "operation", "place", "source")}
    numbers["nan_operation"] = anomaly.operation if anomaly.kind == "NaN" else None
    return CATALOGUE["exploding-gradient"].finding(origin.layer, text, "anomaly", numbers=numbers)


def _by_ratio(report: GradientReport, thresholds: GradientThresholds, name: str) -> Iterator[Finding]:
    weights = [p for p in report.parameters if p.gradient is not None and _is_weight(p) and not is_spoiled(p.gradient)]
    order = {layer.call.name: at for at, layer in reversed(list(enumerate(report.layers)))}
    if all(p.layer in order for p in weights):  # else they stay in order of registration
        weights.sort(key=lambda p: order[p.layer])
    bad = [at for at, weight in enumerate(weights) if parameter_finding_names(weight, thresholds) == (name,)]
    runs = chains(bad, lambda run, at: at == run[-1] + 1)
    if len(runs) > _MOST_CHAINS:  # scattered over the whole model: one finding instead of thirty
        runs = [bad]
    for chain in reversed(runs):
        yield _of_chain(name, [weights[at] for at in chain], weights, report)


def _of_chain(
    name: str, chain: Sequence[ParameterGradient], weights: Sequence[ParameterGradient], report: GradientReport
) -> Finding:
    source, lowest = chain[-1], name == "vanishing-gradient"
    worst = (min if lowest else max)(chain, key=lambda p: p.ratio or 0.0)
    text = _size_words(source) + _input_words(source, report) + _chain_words(chain, weights, worst, lowest)
    if report.value == 0 and report.loss in ("cross-entropy", "mse"):  # there is nothing left to learn
        text = f"the loss is 0: {text}"
    norm = None if source.gradient is None else source.gradient.norm
    numbers: Numbers = {"ratio": source.ratio, "norm": norm, "weights": len(chain), "of": len(weights)}
    numbers |= {"worst": worst.name, "worst_ratio": worst.ratio}
    case, scale = _case(name, chain, weights, report), _small_scale(source, weights, report)
    if case == "small scale" and scale is not None:
        text += f"; '{scale.name}' after it has norm {scale.weight_norm:.2g}"
    finding = CATALOGUE[name].finding(source.layer, text, case, numbers=numbers)
    if name == "vanishing-gradient" and not case and report.saturating:
        advice = f"The model's {' and '.join(report.saturating)} layers shrink a gradient: try ReLU or GELU."
        finding = replace(finding, meaning=f"{finding.meaning} {advice}")
    return finding


def _case(
    name: str, chain: Sequence[ParameterGradient], weights: Sequence[ParameterGradient], report: GradientReport
) -> str:
    """What makes the gradients of ``chain`` usual, or more severe than usual."""
    source = chain[-1]
    if report.updated and not any(report.updated.values()) and not report.trained:
        return "untrained"
    if name == "exploding-gradient":
        return "small weights" if all(map(_is_small, chain)) else ""
    if report.loss in ("cross-entropy", "mse") and report.value < _LEARNED:
        return "learned"
    if _small_scale(source, weights, report) is not None:
        return "small scale"
    if source.gradient is None or source.gradient.max_abs:
        return ""
    all_before = list(weights).index(source) + 1
    return "zero up to the input" if len(chain) == all_before and not any(p.ratio for p in chain) else "zero"


def _small_scale(
    source: ParameterGradient, weights: Sequence[ParameterGradient], report: GradientReport
) -> ParameterGradient | None:
    """A scale near 0, or zeroed weights, with a gradient: between ``source`` and the next weight, or around it."""
    at = list(weights).index(source) + 1
    begin = report.parameters.index(source) + 1
    end = report.parameters.index(weights[at]) + 1 if at < len(weights) else len(report.parameters)
    blocks = {source.layer.rsplit(".", levels)[0] for levels in (1, 2) if source.layer.count(".") >= levels}
    near = [*report.parameters[begin:end], *(p for p in report.parameters if p.layer in blocks)]
    for p in near:
        small = not p.weight_norm if _is_weight(p) else _is_small(p)
        if small and p.gradient is not None and p.gradient.max_abs and not p.name.endswith("bias"):
            return p
    return None


def _is_small(parameter: ParameterGradient) -> bool:
    return parameter.weight_norm < _SMALL_SCALE * math.sqrt(math.prod(parameter.shape))


def _chain_words(
    chain: Sequence[ParameterGradient], weights: Sequence[ParameterGradient], worst: ParameterGradient, lowest: bool
) -> str:
    more, nearer = len(chain) - 1, list(weights).index(chain[-1])
    if not more:
        return ""
    which = f"{more} of the {nearer} weights" if more < nearer else f"all {more} weights" if more > 1 else "the weight"
    if lowest and not any(p.ratio for p in chain):
        return f"; also affected: {which} nearer the input"
    figure = f"{'least' if lowest else 'most'} in '{worst.name}': {worst.ratio or 0:.2g}"
    return f"; also affected: {which} nearer the input, {figure}"


def _input_words(parameter: ParameterGradient, report: GradientReport) -> str:
    """The input is the cause if the layer gets a gradient and its weight does not."""
    if parameter.gradient is None or parameter.gradient.max_abs:
        return ""
    arrives = [layer.grad_output for layer in report.layers if layer.call.name == parameter.layer]
    return ", because the input is 0" if any(size is not None and size.max_abs for size in arrives) else ""


def _size_words(parameter: ParameterGradient) -> str:
    size = parameter.gradient
    if size is None or size.max_abs == 0:
        return f"the gradient of '{parameter.name}' is 0 everywhere"
    ratio = parameter.ratio or 0.0
    share = f"{ratio:.2g} {'times' if ratio >= 1 else 'of'} the weight's norm"
    return f"the gradient of '{parameter.name}' has norm {size.norm:.2g}, {share}"


def _stopped(report: GradientReport, stops: Sequence[Stop]) -> Iterator[Finding]:
    for stop in stops:
        parts = [counted(len(stop.calls), "call") if stop.calls else ""]
        parts += [counted(len(stop.parameters), "parameter") if stop.parameters else ""]
        lost = " and ".join(part for part in parts if part)
        along = f", from '{stop.calls[0]}' on," if len(stop.calls) > 1 else ""
        get = "get" if len(stop.calls) + len(stop.parameters) > 1 else "gets"
        text = f"{stop.why}; {lost}{along} {get} none"
        numbers: Numbers = {"reason": stop.reason, "place": stop.place, "calls": len(stop.calls)}
        numbers["parameters"] = len(stop.parameters)
        case = "auxiliary" if stop.reason == "unused" and _AUXILIARY.search(stop.layer) else stop.reason
        case = "other output" if stop.in_output else case
        yield CATALOGUE["no-gradient"].finding(stop.layer, text, case, numbers=numbers)
    unreached = [] if stops else [p for p in report.parameters if p.gradient is None and not p.frozen]
    if unreached:
        text = f"no gradient arrives at {listed([p.name for p in unreached], 4)}"
        numbers = {"reason": "unused", "parameters": len(unreached)}
        yield CATALOGUE["no-gradient"].finding(unreached[-1].layer, text, "unused", numbers=numbers)


def _frozen(report: GradientReport, stops: Sequence[Stop]) -> Iterator[Finding]:
    """One finding for consecutive frozen layers, one for each parameter that is frozen alone."""
    cut_off = {layer.call.name for layer in report.layers if layer.grad_output is None}
    cut_off |= {key.partition("#")[0] for stop in stops for key in stop.calls}
    cut_off -= {layer.call.name for layer in report.layers if layer.grad_output is not None}
    layers: dict[str, list[ParameterGradient]] = {}
    for parameter in report.parameters:
        layers.setdefault(parameter.layer, []).append(parameter)
    for frozen, run in groupby(layers, key=lambda layer: all(parameter.frozen for parameter in layers[layer])):
        names = list(run)
        parameters = [parameter for name in names for parameter in layers[name]]
        if frozen:
            yield _of_frozen(names, parameters, len(layers), cut_off)
        else:
            yield from (_of_frozen([p.layer], [p], 0, cut_off) for p in parameters if p.frozen)


def _of_frozen(
    run: Sequence[str], parameters: Sequence[ParameterGradient], layers: int, cut_off: Collection[str]
) -> Finding:
    if not layers:
        who = f"'{parameters[0].name}' is frozen"
    elif len(run) == 1:
        who = f"'{run[0]}' is frozen" if run[0] else "the model is frozen"
    else:
        all_of = "all " if len(run) == layers else ""
        who = f"{all_of}{len(run)} layers from '{run[0]}' to '{run[-1]}' are frozen"
    text = f"{who} (requires_grad is False): {counted(len(parameters), 'parameter')}"
    lost = sum(name in cut_off for name in run)
    if lost:
        which = "it" if len(run) == 1 else "them" if lost == len(run) else f"{lost} of them"
        text += f", and no gradient reaches {which}"
    numbers: Numbers = {"reason": "frozen", "layers": len(run), "parameters": len(parameters), "cut_off": lost}
    case = "frozen and cut off" if lost else "frozen"
    return CATALOGUE["no-gradient"].finding(run[-1], text, case, numbers=numbers)
