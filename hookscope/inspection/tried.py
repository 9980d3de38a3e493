"""What would undo a drift: a lost skip, another order, other statistics. Each is tried on the images.

The running statistics of a BatchNorm are two numbers for each channel that a sound network meets closely. A change with
which it meets them again is the cause; wrong ones hardly help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hookscope.hooks import HookHandles, differentiable, is_leaf, tensors_in
from hookscope.inspection.facts import InspectionEvidence
from hookscope.statistics import BatchNormAccumulator
from hookscope.tracing import INPUT

_IMAGES, _BLOCKS = 8, 6  # the first, and the last blocks before the layer, whose inputs may be missing
_BETTER = 2.5  # times, which a change must improve the fit
_GOOD = 0.5  # a fit of sound layers on a few images

Values = Sequence[Tensor]
"""One tensor of a pass, for each image."""


def what_would_fit(evidence: InspectionEvidence, layer: str) -> tuple[str, str, float] | None:
    """The layer or block to change, the change with which a BatchNorm meets its statistics, and how many times better.

    None if no change does.
    """
    norms, feeder = evidence.totals.batch_norms, evidence.feeders().get(layer, "")
    modules = dict(evidence.net.model.named_modules())
    if layer not in modules or feeder not in modules:  # a later call of the same layer
        return None
    now = norms[layer].drift(layer).fit
    with differentiable(evidence.net.model, parameters=False), torch.no_grad():
        read = _inputs(evidence, modules, layer, feeder)
        own, before, computes = read.pop(layer), read.pop(feeder, ()), _computes(modules[feeder])
        changed = [*_changes(own, read, "", lambda values: values)]
        if before and _same(computes(before[0]), own[0]):
            if parts := _parts(evidence, feeder):
                turned = [computes(torch.cat(values.split(parts, 1)[::-1], 1)) for values in before]
                changed.append((f"with what {feeder} reads in another order", turned))
            changed += _changes(before, read, f" before {feeder}", computes)
            changed += _exchanged(modules, feeder, before)
        tried = {words: _distance(evidence, values, layer) for words, values in changed}
        for other, norm in norms.items():
            if other != layer and norm.channels == norms[layer].channels:
                tried[f"with the running statistics of {other}"] = _distance(evidence, own, other)
    best = min(tried, key=lambda words: tried[words], default="")
    if not best or tried[best] > min(_GOOD, now / _BETTER):
        return None
    block = best.partition(" the input of ")[2].partition(" ")[0]
    return block or layer, best, now / tried[best]


def _computes(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The first tensor that a layer returns for its first argument; empty if it takes others too."""

    def compute(values: Tensor) -> Tensor:
        try:
            return next(iter(tensors_in(layer(values)).values()), torch.empty(0))
        except Exception:  # whatever a layer raises that is called so
            return torch.empty(0)

    return compute


def _inputs(
    evidence: InspectionEvidence, modules: Mapping[str, nn.Module], layer: str, feeder: str
) -> dict[str, Values]:
    """What ``layer`` and ``feeder`` read for each image, and the last blocks that began before them, by name."""
    net, passes = evidence.net, list[dict[str, Tensor]]()

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            values = next(iter(tensors_in(args).values()), None)
            if layer not in passes[-1] and values is not None:
                passes[-1].pop(name, None)  # the last call counts
                passes[-1][name] = values

        return hook

    with HookHandles() as handles:
        for name, module in modules.items():
            if name in (layer, feeder) or (name and not is_leaf(module)):
                handles.forward_pre(module, keep(name))
        for tensors in evidence.inputs[:_IMAGES]:
            passes.append({})
            net.model(*net.inputs(*tensors))
            shapes = {passes[-1][name].shape for name in (layer, feeder) if name in passes[-1]}
            fitting = [name for name, values in passes[-1].items() if values.shape in shapes]
            passes[-1] = {name: passes[-1][name] for name in fitting[-_BLOCKS - 2 :]}
    return {name: [each[name] for each in passes] for name in passes[0] if all(name in each for each in passes)}


def _changes(
    values: Values, read: Mapping[str, Values], where: str, computes: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Values]]:
    """The input of each block added or taken away."""
    for block, inputs in read.items():
        pairs = list(zip(values, inputs, strict=True))
        if all(one.shape == other.shape for one, other in pairs) and not _same(*pairs[0]):
            yield f"with the input of {block} added{where}", [computes(one + other) for one, other in pairs]
            yield f"without the input of {block}{where}", [computes(one - other) for one, other in pairs]


def _exchanged(modules: Mapping[str, nn.Module], feeder: str, before: Values) -> Iterator[tuple[str, Values]]:
    """What the layer ``feeder`` returns with the weights of each other layer of its class and size."""
    own: Any = modules[feeder]
    for name, other in modules.items():
        weight = getattr(other, "weight", None)
        if type(other) is not type(own) or other is own or not isinstance(weight, Tensor):
            continue
        if weight.shape == own.weight.shape:
            values = [functional_call(own, {"weight": weight}, (each,)) for each in before]
            yield f"with the weights of {name} in {feeder}", values


def _parts(evidence: InspectionEvidence, feeder: str) -> list[int]:
    """The numbers of channels of what a layer reads, if that is a concatenation."""
    trace = evidence.trace
    call = next((call for call in trace.calls if trace.layers[call.layer].name == feeder), None)
    source = trace.calls[call.reads[0]] if call and call.reads and call.reads[0] != INPUT else None
    if source is None or trace.layers[source.layer].type not in ("cat", "concat"):
        return []
    return [shape[1] for shape in source.input_shape.values()] if isinstance(source.input_shape, dict) else []


def _distance(evidence: InspectionEvidence, values: Values, layer: str) -> float:
    """The `fit` of some values to the running statistics of a layer."""
    norm = BatchNormAccumulator.of(evidence.net.model.get_submodule(layer))
    for each in values:
        norm.update(each)
    return norm.drift(layer).fit


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)
