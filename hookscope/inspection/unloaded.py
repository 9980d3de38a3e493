"""Layers and parameters that were not loaded, do not run, were rounded, or are set unlike the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isqrt

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from hookscope.findings import CATALOGUE, Finding, counted, default, percent
from hookscope.hooks import as_float, class_names, differentiable, is_closed, is_leaf, tensors_in
from hookscope.inspection.aligned import from_chance
from hookscope.inspection.facts import InspectionEvidence

_FEW_OTHERS = 4  # of one class, for each that is unlike them
_LARGE_EPS, _TIMES_EPS = 1e-2, 100.0
_OPPOSITE = 0.9  # share of the scales of a norm below 0, where others have as many above
_TIMES_SCALE = 30.0  # last norms of trained transformers have up to ten times the usual scale
_ROUNDED, _FEW_ROUNDED = default("rounded-weights", "values"), default("rounded-weights", "few_weights")
_LARGE_BIAS, _PRUNED = default("outlier-layer", "large_bias"), default("rounded-weights", "zeros")
_NEIGHBOURS = default("unordered-positions", "neighbours")
_BLOCK, _FEW_SCALARS = re.compile(r"(?<![^.])\d+(?:\.|$)"), 3  # the number of a block, and values of one kind
_EMPTY, _NO_ZEROS = 0.25, 1e-3  # shares of zeros in weights that were pruned, and in the others


def unloaded(evidence: InspectionEvidence) -> Iterator[Finding]:
    """The findings on layers and parameters that were not loaded, do not run, or are not set as the others are."""
    model = evidence.net.model
    yield from (*_norms(model), *_biases(model), *_rounded(model), *_loaded_twice(evidence), *_scalars(model))
    yield from (*_loose(evidence), *_idle(evidence))


def _norms(model: nn.Module) -> Iterator[Finding]:
    """The norms at their first values, and those with another eps, where most of their class have others."""
    kinds: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        kind = [each for each in class_names(module) if "Norm" in each]
        if kind and is_leaf(module):
            kinds.setdefault(kind[-1], {})[name] = module
    for norms in kinds.values():
        names = [name for name, module in norms.items() if _is_new(module)]
        others = f"the other {counted(len(norms) - len(names), 'layer')} of its kind"
        if len(names) * _FEW_OTHERS <= len(norms):
            text = f"its scale is exactly 1 and its shift exactly 0, and {others} have other values"
            for name in names:
                yield CATALOGUE["initial-weights"].finding(f"{name}.weight", text, "norm")
        weights = {name: module.weight for name, module in norms.items() if isinstance(module.weight, Tensor)}
        scales = {name: float(as_float(weight.detach()).abs().median()) for name, weight in weights.items()}
        usual = float(np.median([*scales.values()])) if scales else 0.0
        for name in (name for name, scale in scales.items() if scale > _TIMES_SCALE * usual > 0):
            text = f"its scales are {scales[name] / usual:.3g} times the scales of the other layers of its kind"
            yield CATALOGUE["outlier-layer"].finding(f"{name}.weight", text, "alone")
        shares = {name: float((weight < 0).float().mean()) for name, weight in weights.items()}
        usual = float(np.median([*shares.values()])) if shares else 1.0
        for name in (name for name, share in shares.items() if share > _OPPOSITE and usual < 1 - _OPPOSITE):
            text = f"{percent(shares[name])} of its scales are below 0, and {percent(usual)} in the median layer"
            yield CATALOGUE["outlier-layer"].finding(f"{name}.weight", text, "sign", numbers={"below": shares[name]})
        sizes = {name: float(eps) for name, module in norms.items() if (eps := getattr(module, "eps", None))}
        usual = float(np.median([*sizes.values()])) if sizes else 0.0
        odd = [name for name, eps in sizes.items() if eps >= max(_LARGE_EPS, _TIMES_EPS * usual)]
        if len(odd) * _FEW_OTHERS <= len(sizes):
            for name in odd:
                text = f"its eps is {sizes[name]:.3g}, the eps of the others is {usual:.3g}"
                yield CATALOGUE["unlike-siblings"].finding(name, text, numbers={"eps": sizes[name], "usual": usual})


def _is_new(module: nn.Module) -> bool:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return isinstance(weight, Tensor) and isinstance(bias, Tensor) and bool(weight.eq(1).all() and bias.eq(0).all())


def _biases(model: nn.Module) -> Iterator[Finding]:
    """The layers whose biases are far larger than in all other layers, or exactly 0 where other biases are not."""
    biases: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        bias, is_norm = getattr(module, "bias", None), any("Norm" in kind for kind in class_names(module))
        if isinstance(bias, nn.Parameter) and is_leaf(module) and not is_norm:
            biases |= {name: as_float(bias.detach()).abs()} if bias.numel() > 1 else {}
    zero = [name for name, bias in biases.items() if not bias.any()]
    if len(zero) * _FEW_OTHERS <= len(biases) * (_FEW_OTHERS - 1):
        text = f"its biases are exactly 0, and the biases of {counted(len(biases) - len(zero), 'other layer')} are not"
        for name in zero:
            yield CATALOGUE["initial-weights"].finding(f"{name}.bias", text, "bias")
    if len(biases) > _FEW_OTHERS:
        sizes = {name: float(bias.median()) for name, bias in biases.items()}
        *_, second, largest = sorted(sizes, key=lambda name: sizes[name])
        size, usual = sizes[largest], sizes[second]
        if size >= _LARGE_BIAS * max(usual, 1):
            text = f"the median size of its biases is {size:.3g}, and at most {usual:.3g} in the other layers"
            numbers = {"size": size, "usual": usual}
            yield CATALOGUE["outlier-layer"].finding(f"{largest}.bias", text, "bias", numbers=numbers)


def _rounded(model: nn.Module) -> Iterator[Finding]:
    """The few weights with a handful of different values, or nearly all 0, in a network that has others elsewhere."""
    large = {name: each for name, each in _learning(model) if each.dim() > 1 and each.numel() >= _FEW_ROUNDED}
    kind, some = CATALOGUE["rounded-weights"], 8 * int(_FEW_ROUNDED)
    different = {name: len(values.flatten()[:some].unique()) for name, values in large.items()}
    rounded = [name for name, count in different.items() if 1 < count <= _ROUNDED]
    zeros = {name: float((values == 0).float().mean()) for name, values in large.items()}
    least = _PRUNED if np.median([*zeros.values(), 0.0]) > _NO_ZEROS else _EMPTY
    pruned = [name for name, share in zeros.items() if least <= share < 1 and not _is_one_to_one(large[name])]
    if len(rounded) * 2 <= len(large):
        for name in (name for name in rounded if name not in pruned):
            text = f"its {large[name].numel():,} weights have only {different[name]} different values"
            yield kind.finding(name, text, numbers={"values": different[name]})
    if len(pruned) * _FEW_OTHERS <= len(large) and np.median([*zeros.values(), 1.0]) < _PRUNED / 2:
        for name in pruned:
            text = f"{percent(zeros[name])} of its {large[name].numel():,} weights are zero, as after pruning"
            yield kind.finding(name, text, "zeros", numbers={"zeros": zeros[name]})


def _loaded_twice(evidence: InspectionEvidence) -> Iterator[Finding]:
    """The weights that equal the weights of an earlier layer in every bit, and do not share their memory.

    A copy that does not run is meant.
    """
    ran = {facts.call.name for facts in evidence.calls}
    seen: dict[tuple[torch.Size, float], tuple[str, Tensor]] = {}
    for name, values in _learning(evidence.net.model):
        if values.dim() > 1 and name.rpartition(".")[0] in ran and bool(values.std(correction=0) > 0):
            first, other = seen.setdefault((values.shape, float(values.double().sum())), (name, values))
            if first != name and other.data_ptr() != values.data_ptr() and torch.equal(values, other):
                text = f"its {values.numel():,} weights are the weights of {first.removesuffix('.weight')} in every bit"
                yield CATALOGUE["copied-weights"].finding(name, text)


def _scalars(model: nn.Module) -> Iterator[Finding]:
    """Single numbers, such as the scale of a block, that are exactly 0 or 1 where others are not, or all of them."""
    kinds: dict[str, dict[str, float]] = {}
    for name, value in _learning(model):
        if value.numel() == 1:
            kinds.setdefault([*filter(None, _BLOCK.split(name))][-1], {})[name] = float(value)
    for values in kinds.values():
        initial = [name for name, value in values.items() if value in (0.0, 1.0)]
        rest = len(values) - len(initial)
        if len(values) >= _FEW_SCALARS and (not rest or len(initial) < rest):
            for name in initial[: len(initial) if rest else 1]:
                others = f"{counted(len(values) - 1, 'number')} like it {'are not' if rest else 'are too'}"
                text = f"it is exactly {values[name]:g}, and {others}"
                finding = CATALOGUE["initial-weights"].finding(name, text, "loose", numbers={"value": values[name]})
                yield finding if rest else replace(finding, severity="note")


def _learning(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The values of the parameters that learn: one that is frozen alone, as in a teacher, was set on purpose."""
    learns = any(parameter.requires_grad for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and (parameter.requires_grad or not learns):
            yield name, as_float(parameter.detach())


def _is_one_to_one(values: Tensor) -> bool:
    """Whether each channel reads one other channel, as in bilinear upsampling by a convolution."""
    return values.dim() > 2 and int(values.flatten(2).any(2).sum()) <= max(values.shape[:2])


def _loose(evidence: InspectionEvidence) -> Iterator[Finding]:
    """Parameters beside the layers: all values equal where the answer depends on them; positions in no order."""
    constant = dict[str, str]()  # the first of each kind
    for name, values in _learning(evidence.net.model):
        layer, _, own = name.rpartition(".")
        is_loose = own not in ("weight", "bias") and not is_closed(evidence.net.model.get_submodule(layer))
        if not is_loose or values.numel() < _FEW_OTHERS:
            continue
        first = float(values.flatten()[0])
        if bool((values == first).all()):
            alike = constant.setdefault(_BLOCK.sub("", own), name) != name  # such as the second factor of LoRA
            if not alike and _matters(evidence, [name]):
                text = f"its {counted(values.numel(), 'value')} are all {f'{first:.3g}' if first else 'zero'}"
                yield CATALOGUE["initial-weights"].finding(name, text, "loose", numbers={"value": first})
            continue
        order = _order(values.squeeze()) if "pos" in own and "bias" not in own else None
        if order is not None and order < _NEIGHBOURS:
            text = f"neighbouring positions are no more alike than others: {order:.2g} standard deviations from chance"
            yield CATALOGUE["unordered-positions"].finding(name, text, numbers={"order": order})


def _order(positions: Tensor) -> float | None:
    """How much more alike the vectors ``(T, D)`` of neighbours in a square are, in standard deviations from chance."""
    side = isqrt(len(positions))
    if positions.dim() != 2 or side < _FEW_OTHERS or len(positions) - side**2 > _FEW_OTHERS:
        return None
    square = positions[-(side**2) :]  # after class and register tokens
    square = normalize(square - square.mean(0), dim=1)
    row, column = torch.arange(side**2) // side, torch.arange(side**2) % side
    away = (row[:, None] - row).abs() + (column[:, None] - column).abs()
    return from_chance(square @ square.T, (away == 1).to(square))


def _idle(evidence: InspectionEvidence) -> Iterator[Finding]:
    """The layers with weights that did not run beside others that did; the last one on which no answer depends."""
    ran = {facts.call.name for facts in evidence.calls} | {""}
    ran |= {name.rpartition(".")[0] for name in ran}
    for name, module in evidence.net.model.named_modules():
        held = [f"{name}.{own}" for own in module._parameters if module._parameters[own] is not None]
        beside = name and is_leaf(module) and name not in ran and name.rpartition(".")[0] in ran
        if beside and held and not _matters(evidence, held):
            text = f"this {type(module).__name__} has weights, and the model does not run it"
            yield CATALOGUE["idle-layer"].finding(name, text)
    answers = {
        layer.call.key: [maps.answer for maps in layer.images if maps is not None and maps.answer is not None]
        for layer in evidence.layers
    }
    known = [key for key, each in answers.items() if each]
    unread = [key for key in known if not any(answer.any() for answer in answers[key])]
    if len(unread) * _FEW_OTHERS <= len(known) and unread and unread[-1] != known[-1]:
        also = f", nor on {counted(len(unread) - 1, 'layer')} before it" * (len(unread) > 1)
        text = f"what it computes is lost: no answer depends on it{also}"
        yield CATALOGUE["idle-layer"].finding(unread[-1], text, "unread")


def _matters(evidence: InspectionEvidence, names: Sequence[str]) -> bool:
    """Whether the answer to the first image is another one with other values of these parameters; True if unknown."""
    model, inputs = evidence.net.model, evidence.net.inputs(*evidence.inputs[0])
    own = dict(model.named_parameters())
    other = {name: own[name].detach() + 1 for name in names}
    try:
        with differentiable(model, parameters=False), torch.no_grad():
            before, after = (tensors_in(functional_call(model, given, inputs)) for given in ({}, other))
    except Exception:  # whatever a model raises that cannot be called so
        return True
    return any(not torch.equal(tensor, after[name]) for name, tensor in before.items() if name in after)
