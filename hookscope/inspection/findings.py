"""Named findings that only the whole network shows: a layer unlike the others, inputs prepared in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageChops
from torch import Tensor, nn

from hookscope.findings import CATALOGUE, Finding, counted, default, single
from hookscope.hooks import MODEL, Selection, as_float, differentiable
from hookscope.inspection.aligned import misaligned, weights_of
from hookscope.inspection.facts import InspectionEvidence
from hookscope.inspection.outliers import deviations
from hookscope.inspection.repeated import unrepeated
from hookscope.inspection.siblings import unlike_siblings
from hookscope.inspection.tried import what_would_fit
from hookscope.inspection.unloaded import unloaded
from hookscope.models import is_random
from hookscope.statistics import FEW_VALUES, BatchNormDrift, StatisticsCollector

_MEAN, _STD = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
_FEW_CHANNELS = 4  # of fewer channels one is easily twice as large as the others
_SMALL = 0.05  # biases and scales below it are noise beside each other
_TRIED, _FAR = 4, 0.7  # BatchNorms whose drift may be undone, and how far their inputs are at least
_SOME_IMAGES = 4  # fewer tell too little of the statistics
_FLAT, _FAINT = 0.02, 0.1  # spread of a picture without contrast, and times that a preprocessing leaves at least
_FIRST = 3  # BatchNorms that judge an input
_POOR = 5.0  # a fit that explains nothing
_SHIFT, _RATIO = default("sudden-drift", "sudden_shift"), default("sudden-drift", "sudden_ratio")
_LARGE_INPUT, _BETTER = default("input-mismatch", "large_input"), default("input-mismatch", "better")
_MUCH_BETTER = default("input-mismatch", "much_better")
_FEW_WEIGHTS = default("initial-weights", "few_weights")
_ALONE, _ALONE_TIMES = default("outlier-layer", "alone"), default("outlier-layer", "alone_times")
_OUTLIER_LAYER = default("outlier-layer", "outlier_layer")
_MOSTLY_DEAD, _FEW_DEAD = 0.7, 0.2  # shares of dead channels: of a layer pushed off, and of the median layer at most
_RMS_ERROR, _KOLMOGOROV = 1.3, 1.63  # three standard deviations of the rms, times the root of the number of values
_EVEN, _ALIKE = 1e-4, 0.8  # spread of the norms of filters, and cosine of any two, that no training leaves
_SAMPLE = 1 << 16  # weights of a layer
_MANY_WEIGHTS = 1024
_FULL = 0.97  # of the bound of an initialisation, which the largest of 256 weights or more exceeds


def network_findings(evidence: InspectionEvidence) -> list[Finding]:
    """The findings on the whole network, in order of `REPORT_ORDER`; the input is judged by the first BatchNorms."""
    weights, undone = list(_weights(evidence.net.model)), list(_undone(evidence))
    weights = [_deciding(evidence, finding) for finding in weights]
    scaled = any(finding.finding == "outlier-layer" for finding in weights)  # another input would undo that
    initial = [finding for finding in weights if finding.finding == "initial-weights"]
    random = list(_random(evidence, initial))
    if random:
        return random + [each for each in weights if each not in initial and each.severity == "note"]
    unlike = list(unlike_siblings(evidence.trace, evidence.net.model))
    unusual = [*unloaded(evidence), *_dead(evidence), *unlike]
    if not unlike:  # a block without its skip reads other channels
        known = {finding.layer for finding in (*weights, *unusual, *single(evidence.findings))}
        feeders, drifts = evidence.feeders(), (*undone, *single(evidence.findings))
        drifted = {feeders.get(finding.layer, "") for finding in drifts if "drift" in finding.finding}
        unusual += misaligned(evidence.trace, evidence.net.model, known, drifted)
    answers = [
        *_probabilities(evidence),
        *_clipped(evidence),
        *unrepeated(evidence.net, evidence.inputs, next(iter(evidence.scores), None)),
    ]
    return [*([] if scaled else _input(evidence)), *answers, *undone, *weights, *unusual]


def _deciding(evidence: InspectionEvidence, finding: Finding) -> Finding:
    """The finding on a bias, as a warning if it gives all of several images its class."""
    last = next((row.name for row in reversed(evidence.parameters)), "")
    answers = [int(scores.argmax()) for scores in evidence.scores if scores is not None]
    kind = CATALOGUE["outlier-weights"]
    decides = finding.finding == kind.name and finding.layer == last and len(answers) >= _SOME_IMAGES
    return kind.as_case(finding, "answer") if decides and {*answers} == {*(finding.channels or ())} else finding


def _probabilities(evidence: InspectionEvidence) -> Iterator[Finding]:
    """Outputs that are positive and add up to 1 for each image."""
    if evidence.softmax:
        last = next((facts.call for facts in reversed(evidence.calls) if facts.call.order is not None), None)
        layer = last.key if last is not None and "Softmax" in last.type else ""
        text = "the outputs of each image are positive and add up to 1"
        yield CATALOGUE["probabilities-as-scores"].finding(layer, text)


def _clipped(evidence: InspectionEvidence) -> Iterator[Finding]:
    """Whether several classes have exactly the best score of an image, for most images."""
    scores = [as_float(each) for each in evidence.scores if each is not None and each.shape[1] > 2]
    tied = [float(each.max()) for each in scores if int((each == each.max()).sum()) > 1]
    if len(tied) * 2 > len(scores) and len(set(tied)) == 1 and all(bool(each.any()) for each in scores):
        text = f"several classes have exactly the best score, {tied[0]:.3g}, for {len(tied)} of {len(scores)} images"
        yield CATALOGUE["saturated"].finding(MODEL, text, "clipped", numbers={"bound": tied[0]})


def _dead(evidence: InspectionEvidence) -> Iterator[Finding]:
    """The first layer most of whose channels are constant, where few are in the others."""
    shares = {
        layer.key: len(layer.dead_channels) / layer.channels
        for layer in evidence.statistics
        if layer.key != MODEL and layer.channels >= _FEW_CHANNELS
    }
    if evidence.totals.images < 2 or len(shares) < _FEW_CHANNELS or np.median([*shares.values()]) > _FEW_DEAD:
        return
    for layer in evidence.statistics:
        dead = layer.dead_channels
        if _MOSTLY_DEAD <= shares.get(layer.key, 0.0) < 1 and not evidence.is_bypassed(layer.key):
            text = f"{len(dead)} of {counted(layer.channels, 'channel')} have one constant value on all images"
            numbers = {"dead": len(dead), "channels": layer.channels, "times": shares[layer.key] / _FEW_DEAD}
            yield CATALOGUE["dead-channels"].finding(layer.key, text, "mostly", channels=dead, numbers=numbers)
            return


def _random(evidence: InspectionEvidence, initial: Sequence[Finding]) -> Iterator[Finding]:
    """One finding: by the label of the weights, by BatchNorms that were never updated, or by uniform weights."""
    label, kind = evidence.net.weights, CATALOGUE["random-weights"]
    every = CATALOGUE["never-updated"].text("all")
    never = next((finding for finding in evidence.findings if finding.meaning == every), None)
    large = [row for row in evidence.parameters if len(row.shape) > 1 and row.count >= _FEW_WEIGHTS]
    if is_random(label):
        yield kind.finding("", f"the weights are {label}")
    elif never is not None:
        yield kind.finding("", never.evidence)
    elif len(initial) > len(large) / 2:
        layers = f"{len(initial)} of {counted(len(large), 'layer')} with {_FEW_WEIGHTS} weights or more"
        yield kind.finding("", f"the weights of {layers} are uniform, as after initialisation")


def _undone(evidence: InspectionEvidence) -> Iterator[Finding]:
    """The first of the BatchNorms farthest from their statistics that a change of the network would cure."""
    drifts = [drift for drift in evidence.totals.drifts() if drift.updated and drift.items >= FEW_VALUES]
    farthest = sorted(drifts[1:], key=lambda drift: drift.fit, reverse=True)[:_TRIED]
    far = [drift.layer for drift in farthest if drift.fit > _FAR]
    if evidence.totals.images >= _SOME_IMAGES:
        for layer in (drift.layer for drift in drifts if drift.layer in far):
            if change := what_would_fit(evidence, layer):
                place, words, times = change
                text = f"{words}, the inputs of {layer} fit its running statistics {times:.2g} times better"
                yield CATALOGUE["sudden-drift"].finding(place, text, "undone", numbers={"times": times})
                return  # what follows drifts for the same reason


def _weights(model: nn.Module) -> Iterator[Finding]:
    """The layers, and the channels of layers, whose weights are on another scale than all others."""
    sizes: dict[str, float] = {}
    spreads: dict[str, float] = {}  # of the norms of filters, over their median
    likeness: dict[str, float] = {}  # the mean cosine of two filters
    for layer, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.numel() == 0 or parameter.is_meta:
                continue
            values = as_float(parameter.detach())
            full = f"{layer}.{name}" if layer else name
            if values.dim() > 1 and name == "weight" and not isinstance(module, nn.Embedding):
                norms = values.flatten(1).norm(dim=1)
                if not bool(norms.isfinite().all()):
                    continue
                if float(norms.max()):
                    sizes[full] = float(norms[norms > 0].median())
                    if len(norms) >= _FEW_CHANNELS:
                        spreads[full] = float(norms.std(correction=0)) / sizes[full]
                    mean = float((values.flatten(1)[norms > 0] / norms[norms > 0, None]).sum(0).square().sum())
                    likeness[full] = (mean - len(norms)) / max(len(norms) * (len(norms) - 1), 1)
                yield from _initial(full, values, norms)
                yield from _outlier(full, norms, "filter")
                if values.shape[1] >= _FEW_CHANNELS:
                    squares = values.square().sum(0).reshape(values.shape[1], -1).sum(1)
                    yield from _outlier(full, squares.sqrt(), "input channel")
            elif values.dim() == 1 and bool(values.isfinite().all()):
                yield from _outlier(full, values, name)
    if len(sizes) < _FEW_CHANNELS:
        return
    of_one_length = [full for full, spread in spreads.items() if spread < _EVEN < np.median([*spreads.values()])]
    for full in of_one_length:
        values = model.get_parameter(full).detach()
        if 2 * len(values.unique()) < values.numel():  # fixed filters, such as a blur or an identity
            continue
        text = f"all its filters have the same norm, {sizes[full]:.4g}"
        yield CATALOGUE["initial-weights"].finding(full, text, "length", numbers={"norm": sizes[full]})
    usual_likeness = np.median([*likeness.values(), 0.0])
    inner = [*likeness.items()][:-1]  # classes that no image had are alike in the last layer
    for full in (full for full, mean in inner if mean > _ALIKE > 2 * usual_likeness):
        text = f"its filters are nearly the same: their mean cosine is {likeness[full]:.2f}"
        yield CATALOGUE["duplicate-filters"].finding(full, text, "alike", numbers={"cosine": likeness[full]})
    norms_of_layers, last = np.array(list(sizes.values())), list(sizes)[-1]  # a head may start small
    usual = float(np.median(norms_of_layers))
    for (full, size), far, factor in zip(sizes.items(), *deviations(norms_of_layers), strict=True):
        times = max(factor, 1 / factor)
        alone = full != last and abs(far) >= _ALONE and times >= _ALONE_TIMES
        if alone or factor > _OUTLIER_LAYER:
            than = f"{'larger' if factor > 1 else 'smaller'} than in the median layer"
            text = f"its filters are {times:.3g} times {than}: their norm is {size:.3g}, there {usual:.3g}"
            numbers = {"norm": size, "usual": usual, "times": times / _ALONE_TIMES}
            yield CATALOGUE["outlier-layer"].finding(full, text, "alone" if alone else "", numbers=numbers)


def _initial(full: str, values: Tensor, norms: Tensor) -> Iterator[Finding]:
    """Whether the weights, with the ``norms`` of their rows, spread evenly up to a sharp bound."""
    kind = CATALOGUE["initial-weights"]
    low, high = values.aminmax()
    peak, rms = max(-float(low), float(high)), float(norms.double().square().sum() / values.numel()) ** 0.5
    if values.numel() < _FEW_WEIGHTS or not rms > 0:
        return
    off, inputs = abs(peak / rms / 3**0.5 - 1), values[0].numel()
    both = inputs + len(values) * inputs // values.shape[1]
    bounds = [(factor / number) ** 0.5 for factor, number in ((1, inputs), (3, inputs), (6, inputs), (6, both))]
    bounds = bounds[: 4 if values.numel() >= _MANY_WEIGHTS else 1]  # few trained weights may end at one of several
    by_chance = off <= _RMS_ERROR * values.numel() ** -0.5 and any(_FULL <= peak / high <= 1.0001 for high in bounds)
    if (off <= default(kind.name, "uniform") or by_chance) and _is_even(values, peak):
        text = f"its {values.numel():,} weights are uniform between -{peak:.3g} and {peak:.3g}"
        yield kind.finding(full, text, numbers={"bound": peak, "rms": rms})


def _is_even(values: Tensor, peak: float) -> bool:
    """Whether values spread evenly from ``-peak`` to ``peak``: the test of Kolmogorov and Smirnov at 1 %."""
    some = values.flatten()[:: -(-values.numel() // _SAMPLE)]
    expected = (some.double().sort().values + peak) / (2 * peak)
    count = len(expected)
    shares = torch.arange(count, device=values.device) / count
    return bool((expected - shares).abs().max() * count**0.5 < _KOLMOGOROV)


def _outlier(full: str, values: Tensor, what: str) -> Iterator[Finding]:
    if len(values) < _FEW_CHANNELS:
        return
    (first, second), order = values.abs().topk(2)
    channel, second = int(order[0]), max(float(second), _SMALL)
    limit = default("outlier-weights", "outlier_filter" if what in ("filter", "input channel") else "outlier_value")
    if (factor := float(first) / second) > limit:
        size = "" if what in ("bias", "weight") else "the norm of "
        which = f"the {'scale' if what == 'weight' else what} of channel" if not size else f"{size}{what}"
        text = f"{which} {channel} is {float(values[channel]):.3g}, {factor:.3g} times the next largest"
        numbers = {"size": float(first), "factor": factor, "times": factor / limit}
        yield CATALOGUE["outlier-weights"].finding(full, text, channels=(channel,), numbers=numbers)


_STATED = 0.5  # what the model states is preferred to what fits up to twice as well
_BGR, _BETTER_COLOURS = "with red and blue exchanged", 2.0  # which changes an input little
_OTHERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "divided by 255, with ImageNet's mean and std": lambda x: (x / 255 - _MEAN.to(x)) / _STD.to(x),
    "divided by 255": lambda x: x / 255,
    "with ImageNet's mean and std": lambda x: (x - _MEAN.to(x)) / _STD.to(x),
    "without ImageNet's mean and std": lambda x: x * _STD.to(x) + _MEAN.to(x),
    "in a range of -1 to 1": lambda x: 2 * x - 1,
    "in a range of 0 to 255": lambda x: 255 * x,
    _BGR: lambda x: x.flip(0),
}
"""Other ways to prepare an image: steps that may be missing, or done twice."""


def _input(evidence: InspectionEvidence) -> Iterator[Finding]:
    """Whether the first BatchNorms would fit the inputs if these were prepared in another way."""
    kind = CATALOGUE["input-mismatch"]
    yield from _pictures(evidence)
    preprocess = evidence.net.preprocess
    images = [tensors[0] for tensors in evidence.inputs if len(tensors) == 1 and tensors[0].dim() == 3]
    if len(images) != len(evidence.inputs) or any(len(image) != 3 for image in images):
        return
    norms = [norm for norm in evidence.totals.drifts() if norm.updated and norm.items >= FEW_VALUES][:_FIRST]
    low, high = (float(getattr(torch.stack([getattr(p, name)() for p in images]), name)()) for name in ("min", "max"))
    if not norms:
        if max(-low, high) > _LARGE_INPUT:
            text = f"the values of the input go from {low:.3g} to {high:.3g}"
            yield kind.finding("", text, "large", numbers={"low": low, "high": high, "times": high / _LARGE_INPUT})
        elif preprocess.stated:
            text = f"the model states {preprocess.stated.describe()}, and these images have {preprocess.describe()}"
            yield kind.finding("", text, "stated")
        return
    now = _fit(norms)
    off = norms[0].median_shift > _SHIFT or float(np.median(norms[0].ratio)) > _RATIO
    if low < 0 and max(-low, high) <= _LARGE_INPUT and not off:
        return
    first = [norm.layer for norm in norms]
    others = dict(_OTHERS)
    if preprocess.stated:
        others[f"with what the model states ({preprocess.stated.describe()})"] = preprocess.as_stated
    fits = {words: _fit(_drifts_of(evidence, first, other)) for words, other in others.items()}
    best = min(fits, key=lambda words: fits[words] * (1 if words in _OTHERS else _STATED))
    if fits[best] * (_BETTER_COLOURS if best == _BGR else _BETTER) < now and fits[best] < _POOR:
        text = f"{best}, the images fit the first BatchNorms {now / fits[best]:.2g} times better"
        numbers = {"low": low, "high": high, "drift": now, "other": fits[best], "times": now / fits[best] / _BETTER}
        yield kind.finding("", text, "" if now / fits[best] > _MUCH_BETTER else "little", numbers=numbers)


def _pictures(evidence: InspectionEvidence) -> Iterator[Finding]:
    """Whether all pictures are grey where the first filters see colours, or nearly black."""
    kind, pictures = CATALOGUE["input-mismatch"], evidence.pictures
    brightest = max((int(np.max(picture.getextrema())) for picture in pictures), default=255)
    if brightest < default(kind.name, "dark_input"):
        text = f"the brightest value of all images is {brightest} of 255"
        yield kind.finding("", text, "dark", numbers={"brightest": brightest})
    contrasts = [
        float(as_float(tensors[0]).flatten(1).std(1).mean()) / spread
        for tensors, picture in zip(evidence.inputs, pictures, strict=False)
        if (spread := float(np.std(np.asarray(picture))) / 255) > _FLAT
    ]
    if contrasts and max(contrasts) < _FAINT:
        text = f"the contrast of the prepared images is {max(contrasts):.2g} times the contrast of the images"
        yield kind.finding("", text, "faint", numbers={"contrast": max(contrasts)})
    weights = (weights_of(module) for module in evidence.net.model.modules())
    first = next((weight for weight in weights if weight is not None and weight.shape[2] > 1), None)
    sees_colours = first is not None and first.shape[1] == 3 and bool((first != first[:, :1]).any())
    if sees_colours and pictures and all(map(_is_grey, pictures)):
        yield kind.finding("", "all images are grey", "grey")


def _is_grey(picture: Image.Image) -> bool:
    red, *others = picture.split()
    return all(ImageChops.difference(red, other).getbbox() is None for other in others)


def _fit(drifts: Sequence[BatchNormDrift]) -> float:
    """How far the inputs of some BatchNorms are from their statistics."""
    return float(np.mean([drift.fit for drift in drifts])) if drifts else np.inf


def _drifts_of(
    evidence: InspectionEvidence, layers: Sequence[str], other: Callable[[Tensor], Tensor]
) -> list[BatchNormDrift]:
    model, names = evidence.net.model, [layer.partition("#")[0] for layer in layers]
    kept = StatisticsCollector(model, Selection.of_names(names))
    with differentiable(model, parameters=False), kept as collector, torch.no_grad():
        for tensors in evidence.inputs:
            model(*evidence.net.inputs(*(other(tensor) for tensor in tensors)))
    return [drift for drift in collector.totals.drifts() if drift.layer in layers]
