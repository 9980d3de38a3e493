"""Faults that tests plant into trained networks, and what an inspection records of such a network."""

import copy
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hookscope import StatisticsCollector
from hookscope.findings import ranked
from hookscope.hooks import Observer, is_single
from hookscope.inspection import InspectionEvidence, Place, run
from hookscope.inspection.facts import CallFacts
from hookscope.models import LoadedModel, WeightsMetadata
from hookscope.parameters import parameter_findings, parameter_statistics
from hookscope.statistics import StatisticsThresholds, find_problems
from hookscope.tracing import trace

IMAGENET = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
ON_WEIGHTS = ("zero", "copy", "channel", "column", "reinit", "sign", "bias", "nan", "scale")
ON_BATCH_NORMS = ("foreign", "dataset", "shift", "bias")
ON_INPUTS = ("255", "0..1", "bgr")


def evidence_of(net: LoadedModel | nn.Module, inputs: Tensor, weights: str = "trained.pth") -> InspectionEvidence:
    """What `find_places` reads of an inspection, without maps and gradients: a pass for each image."""
    loaded = net if isinstance(net, LoadedModel) else LoadedModel.of(net, "net", weights, WeightsMetadata())
    calls: dict[str, CallFacts] = {}

    def seen(call: Any, module: nn.Module, *_: Any) -> None:
        if is_single(call.name, module):
            calls.setdefault(call.key, CallFacts(call, None, 0, 0, None, None, None, None, 0, ()))

    thresholds, collector = StatisticsThresholds(), StatisticsCollector(loaded.model)
    traced = trace(loaded.model, (inputs[:1],), sources=True)
    with Observer(loaded.model, "*", None, seen, ordered=True), collector, torch.no_grad():
        for image in inputs:
            loaded.model(image[None])
    totals = collector.totals
    measured, parameters = tuple(totals.statistics()), tuple(parameter_statistics(loaded.model))
    problems = find_problems(measured, totals.drifts(), totals.images, thresholds)
    return InspectionEvidence(
        net=loaded,
        inputs=tuple((image,) for image in inputs),
        images=(),
        calls=tuple(calls.values()),
        layers=(),
        totals=totals,
        statistics=measured,
        parameters=parameters,
        findings=tuple(ranked([*problems, *parameter_findings(parameters)])),
        changes={},
        trace=traced,
        scores=(),
    )


def recorded(net: LoadedModel | nn.Module, images: Sequence[Any], **options: Any) -> InspectionEvidence:
    """What a whole inspection recorded, before places are found in it."""
    kept: list[InspectionEvidence] = []
    if isinstance(net, nn.Module):
        net = LoadedModel.of(net, "net", "trained.pth", WeightsMetadata())
    with mock.patch.object(run, "find_places", lambda evidence: kept.append(evidence) or ()):
        run.inspect(net, images, **options)
    return kept[0]


def with_batch_norms(model: nn.Module, inputs: Tensor) -> nn.Module:
    """The same function with a BatchNorm behind each convolution, whose running statistics are those of ``inputs``."""
    model = copy.deepcopy(model)
    with StatisticsCollector(model, types=[nn.Conv2d]) as collector, torch.no_grad():
        model(inputs)
    for name, layer in collector.totals.layers.items():
        conv: Any = model.get_submodule(name)
        norm = nn.BatchNorm2d(conv.out_channels).eval()
        mean, variance = (torch.from_numpy(each).float() for each in (layer.moments.mean, layer.moments.variance))
        norm.running_mean, norm.running_var = mean - conv.bias.data, variance
        norm.weight.data, norm.bias.data, conv.bias = (variance + norm.eps).sqrt(), mean, None
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, nn.Sequential(conv, norm))
    return model


@dataclass
class Planted:
    """A network with a fault, its inputs, and where the fault is; the layer is empty for the input."""

    net: nn.Module
    inputs: Tensor
    layer: str
    channels: tuple[int, ...] | None = None

    def rank(self, places: Sequence[Place]) -> int | None:
        """The rank of the place that names the planted layer and, if there is one, its channel."""
        for rank, place in enumerate(places, 1):
            layers = {place.layer, place.layer.rpartition(".")[0] if self._is_parameter(place.layer) else place.layer}
            named = self.layer in layers or (bool(self.layer) and self.partner in layers)
            if named and (self.channels is None or set(self.channels) & set(place.channels or ())):
                return rank
        return None

    def _is_parameter(self, name: str) -> bool:
        return name in self.net.state_dict()

    @property
    def partner(self) -> str:
        """The BatchNorm behind a layer with weights, or the layer before a BatchNorm: on activations they are one."""
        names = [name for name, module in self.net.named_modules() if getattr(module, "weight", None) is not None]
        at, norms = names.index(self.layer), batch_norms(self.net)
        beside = names[at - 1 : at] if self.layer in norms else names[at + 1 : at + 2]
        return next((name for name in beside if (name in norms) != (self.layer in norms)), self.layer)


def batch_norms(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)]


def _weighted(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def _alive(weight: Tensor, rng: random.Random) -> list[int]:
    """Two channels whose weights are no smaller than usual."""
    norms = weight.flatten(1).norm(dim=1)
    return rng.sample((norms > 0.3 * norms[norms > 0].median()).nonzero()[:, 0].tolist(), 2)


def candidates(net: nn.Module, kind: str, half: int) -> list[str]:
    """The layers that a fault fits, every second of all: two halves."""
    if kind in ON_INPUTS:
        return [""]
    named = dict(net.named_modules())
    layers = batch_norms(net) if kind in ("foreign", "dataset", "shift") else _weighted(net)[half::2]
    if kind == "bias":
        layers = [name for name, module in named.items() if getattr(module, "bias", None) is not None]
    layers = layers[half::2] if layers and kind in ("foreign", "dataset", "shift", "bias") else layers
    if kind in ("copy", "channel"):
        layers = [layer for layer in layers if len(named[layer].weight) >= 8]  # type: ignore[arg-type]
    if kind == "column":
        layers = [layer for layer in layers if named[layer].weight.shape[1] >= 8]  # type: ignore[union-attr,index]
    return layers


@torch.no_grad()
def plant(kind: str, net: nn.Module, layer: str, inputs: Tensor, raw: Tensor, rng: random.Random) -> Planted | None:
    """A copy of ``net`` with a fault, None if it has no effect; ``raw`` are the images from 0 to 1."""
    if kind in ON_INPUTS:
        return Planted(net, {"255": raw * 255, "0..1": raw, "bgr": inputs.flip(1)}[kind], "")
    net = copy.deepcopy(net)
    module: Any = net.get_submodule(layer)
    planted = Planted(net, inputs, layer)
    if kind == "zero":
        module.weight.zero_()
    elif kind == "scale":
        module.weight.mul_(100)
    elif kind == "sign":
        module.weight.neg_()
    elif kind == "reinit":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.randrange(1000))
            module.reset_parameters()
    elif kind == "nan":
        module.weight.view(-1)[rng.randrange(module.weight.numel())] = math.nan
    elif kind == "bias":
        planted.channels = (rng.randrange(len(module.bias)),)
        module.bias[planted.channels[0]] = 100.0
    elif kind == "copy":
        one, other = _alive(module.weight, rng)
        for parameter in module.parameters():
            parameter[other] = parameter[one]
        planted.channels = (one, other)
    elif kind in ("channel", "column"):
        return _decisive(planted, module.weight if kind == "channel" else module.weight.transpose(0, 1), rng)
    elif kind == "shift":
        signs = torch.tensor([rng.choice((-1.0, 1.0)) for _ in module.running_mean])
        module.running_mean.add_(4 * module.running_var.sqrt() * signs)
    else:
        _replace_statistics(kind, planted, module, rng)
    return planted


def _decisive(planted: Planted, weight: Tensor, rng: random.Random) -> Planted | None:
    """Scale a channel up until the answer changes."""
    before = planted.net(planted.inputs).argmax(1)
    channel = _alive(weight, rng)[0]
    own = weight[channel].clone()
    for factor in (5, 10, 30, 100, 300):
        weight[channel] = own * factor
        if bool((planted.net(planted.inputs).argmax(1) != before).any()):
            planted.channels = (channel,)
            return planted
    return None


def _replace_statistics(kind: str, planted: Planted, module: Any, rng: random.Random) -> None:
    """Running statistics of another layer, or of noise."""
    seed = torch.Generator().manual_seed(rng.randrange(100))
    if kind == "dataset":
        with StatisticsCollector(planted.net) as collector:
            planted.net(torch.randn(8, *planted.inputs.shape[1:], generator=seed))
        moments = collector.totals.batch_norms[planted.layer].moments
        mean, variance = torch.from_numpy(moments.mean), torch.from_numpy(moments.variance)
    else:
        norms: list[Any] = [
            planted.net.get_submodule(name) for name in batch_norms(planted.net) if name != planted.layer
        ]
        others = [norm for norm in norms if norm.num_features == module.num_features]
        order = torch.randperm(module.num_features, generator=seed) if not others else slice(None)
        source = rng.choice(others) if others else module
        mean, variance = source.running_mean[order].clone(), source.running_var[order].clone()
    module.running_mean.copy_(mean)
    module.running_var.copy_(variance)


def faults(net: nn.Module, half: int) -> Iterator[tuple[str, str, random.Random]]:
    """Kind and layer of a fault of every kind, in half of the layers."""
    rng = random.Random(f"1 {half}")
    for kind in dict.fromkeys((*ON_WEIGHTS, *ON_BATCH_NORMS, *ON_INPUTS)):
        if layers := candidates(net, kind, half):
            yield kind, rng.choice(layers), rng
