"""Interventions, ablations and events over torchvision's models, judged by plain hooks and by changed weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hookscope.hooks import same_bits
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.hooks.tensors import map_tensors, tensors_in
from hookscope.interventions import DropBlock, Dropout, Prune, Scale, Zero
from hookscope.interventions.ablation import ablate_each
from hookscope.interventions.effect import Effect, intervention_effect
from hookscope.models.load import load_model
from hookscope.models.loaded import LoadedModel
from hookscope.tracing.events import trace_events
from tests.helpers import hooked

# the side of a picture that a model runs on and is quick with; 64 unless it says otherwise
SIDES = {
    "inception_v3": 96,
    "maxvit_t": 224,
    "vit_b_32": 224,
    "fasterrcnn_mobilenet_v3_large_320_fpn": 96,
    "r3d_18": 32,
    "raft_small": 128,
    "ssdlite320_mobilenet_v3_large": 96,
}
CLASSIFICATION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
    mobilenet_v2 mobilenet_v3_large mobilenet_v3_small quantized_googlenet quantized_mobilenet_v2 quantized_resnet18
    regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1
    swin_v2_t vgg11 vgg11_bn vit_b_32
"""
OTHERS = """
    fasterrcnn_mobilenet_v3_large_320_fpn fcn_resnet50 lraspp_mobilenet_v3_large r3d_18 raft_small
    ssdlite320_mobilenet_v3_large
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSIFICATION.split(), *OTHERS.split()])
def test_models_do_as_plain_hooks_and_other_weights_make_them(name: str) -> None:
    subject = Subject(name, SIDES.get(name, 64))
    for check in CHECKS if name in OTHERS.split() else (*CHECKS, *CHECKS_OF_CLASSIFIERS):
        check(subject)
        assert subject.state.changes() == [], check.__name__


class Subject:
    """A model with random weights, its inputs, and layers to change, which hooks of its own choose."""

    def __init__(self, name: str, side: int) -> None:
        self.net: LoadedModel = load_model(name, weights="none", device="cpu")
        self.model = self.net.model
        self.inputs = self.net.inputs(*pictures(self.net.family, side))
        let_signals_through(self.model, self.inputs)
        self.order: list[str] = []
        with hooked(self.model, lambda layer, output: self.order.append(layer)):
            self.output = self.run()
        leaves = self.leaves()
        self.convolutions = [layer for layer in leaves if isinstance(self.model.get_submodule(layer), _ConvNd)]
        self.middle = leaves[len(leaves) // 2]
        self.state = ModelSnapshot(self.model)

    def leaves(self) -> list[str]:
        """The layers without children or with parameters of their own, in order of execution."""
        layers = [(name, self.model.get_submodule(name)) for name in self.order]
        return [name for name, layer in layers if not list(layer.children()) or list(layer.parameters(recurse=False))]

    @torch.no_grad()
    def run(self) -> Any:
        return self.model(*map_tensors(self.inputs, torch.clone))

    def run_with(self, layer: str, change: Callable[[Tensor], Tensor]) -> Any:
        """The output where what ``layer`` puts out is changed by a plain hook."""
        with hooked(self.model, lambda _, out: map_tensors(out, change), layer):
            return self.run()

    def run_with_weights(self, change: Callable[[Tensor], Tensor], *names: str) -> Any:
        """The output where parameters are others, put back without a trace."""
        parameters = [self.model.get_parameter(name) for name in names]
        own = [parameter.data for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.data = change(parameter.data.clone())
            return self.run()
        finally:
            for parameter, values in zip(parameters, own, strict=True):
                parameter.data = values

    def effect(self, changes: dict[str, Any], seed: int | None = None) -> Effect:
        effect = intervention_effect(self.model, self.inputs, changes, seed=seed)
        assert same_bits(effect.before, self.output)
        return effect


def pictures(family: str, side: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (3, 8, side, side) if family == "video" else (3, side, side)
    return [torch.rand(shape, generator=generator) for _ in range(2 if family == "optical_flow" else 1)]


@torch.no_grad()
def let_signals_through(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Let each BatchNorm bring what it is given to size 1, and no layer be near 0: else early layers hardly matter."""

    torch.manual_seed(2)
    for weight in model.parameters():
        if weight.dim() > 1 and weight.abs().max() < 1e-4:  # the head of ViT, the scale of ConvNeXt's branches
            weight.normal_(std=0.1)

    def fit(norm: Any, args: tuple[Tensor, ...]) -> None:
        norm.running_var.fill_(args[0].square().mean().clamp(min=1e-6))

    norms = [module for module in model.modules() if isinstance(getattr(module, "running_var", None), Tensor)]
    handles = [norm.register_forward_pre_hook(fit) for norm in norms]
    model(*map_tensors(inputs, torch.clone))
    for handle in handles:
        handle.remove()


def a_scaled_layer(subject: Subject) -> None:
    effect = subject.effect({subject.middle: Scale(0.5)})
    assert same_bits(effect.after, subject.run_with(subject.middle, lambda tensor: tensor * 0.5))
    assert sum(effect.changed.values()) == subject.order.count(subject.middle)
    first, *later = effect.layers
    assert (first.call.name, first.changed) == (subject.middle, True)
    assert first.relative_l2 == pytest.approx(0.5) and first.cosine == pytest.approx(1.0)
    assert any(layer.relative_l2 for layer in later)


def silent_channels(subject: Subject) -> None:
    def silenced(tensor: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(tensor[:, :2]), tensor[:, 2:]], 1)

    last = subject.convolutions[-1]
    effect = subject.effect({last: Zero(channels="0-1")})
    assert same_bits(effect.after, subject.run_with(last, silenced))
    assert effect.layers[0].changed


def a_pruned_weight(subject: Subject) -> None:
    def without_the_smallest(weight: Tensor) -> Tensor:
        places = weight.abs().flatten().argsort()[: round(weight.numel() / 2)]
        return weight * torch.ones(weight.numel()).index_fill(0, places, 0).view_as(weight)

    name = f"{subject.convolutions[len(subject.convolutions) // 2]}.weight"
    effect = subject.effect({name: Prune(0.5)})
    assert effect.changed == {name: 1}
    assert same_bits(effect.after, subject.run_with_weights(without_the_smallest, name))
    assert next(layer for layer in effect.layers if layer.relative_l2).call.name == name.removesuffix(".weight")


def dropped_with_a_seed(subject: Subject) -> None:
    last = subject.convolutions[-1]
    changes = {subject.middle: Dropout(0.3, when="always"), last: DropBlock(0.2, block_size=3, when="always")}
    one, again = (subject.effect(changes, seed=3) for _ in range(2))
    assert same_bits(one.after, again.after) and one.layers == again.layers
    assert any(layer.relative_l2 for layer in one.layers)
    assert subject.effect({last: DropBlock(0.2, block_size=3)}, seed=3).changed == {}  # eval mode


def events_in_order(subject: Subject) -> None:
    trace = trace_events(subject.model, subject.inputs)
    assert [record.call.name for record in trace.calls] == subject.leaves()
    running: list[Any] = []  # a layer with parameters of its own may run others
    for event in trace.events:
        running.append(event.call) if event.event == "pre-hook" else running.remove(event.call)
        assert event.depth == len(running) - (event.event == "pre-hook")
    assert len(trace.events) == 2 * len(trace.calls) and not running


def gradients_of_the_score(subject: Subject) -> None:
    """Against tensor hooks on copies, which no layer after them can overwrite."""
    gradients: list[Tensor | None] = []

    def keep(at: int, gradient: Tensor) -> None:
        gradients[at] = gradient

    def watch(layer: str, output: Any) -> Any:
        if layer not in leaves or len(tensors_in(output)) != 1:
            return None
        own = map_tensors(output, torch.clone)  # a layer that does nothing returns what others are given too
        [tensor] = tensors_in(own).values()
        gradients.append(None)
        if tensor.requires_grad:
            tensor.register_hook(partial(keep, len(gradients) - 1))
        return map_tensors(own, torch.clone)

    leaves = set(subject.leaves())
    with hooked(subject.model, watch):
        leaf = subject.inputs[0].clone().requires_grad_()
        scores = subject.model(leaf.clone())
        leaves_of_graph = [leaf, *(weight for weight in subject.model.parameters() if weight.requires_grad)]
        torch.autograd.grad(scores[0, scores[0].argmax()], leaves_of_graph, allow_unused=True)
    trace = trace_events(subject.model, subject.inputs, backward=True)
    records = [record for record in trace.calls if len(record.output) == 1]
    assert trace.loss == "score" and len(records) == len(gradients)
    assert [next(((part.min, part.max) for part in record.gradient.values()), None) for record in records] == [
        None if gradient is None else (gradient.min().item(), gradient.max().item()) for gradient in gradients
    ]


def channels_without_weights(subject: Subject) -> None:
    """Against the score without the filter: its weights and its bias at 0."""

    def width(layer: str) -> int:
        return len(subject.model.get_parameter(f"{layer}.weight"))

    def without(channel: int, values: Tensor) -> Tensor:
        return values.index_fill(0, torch.tensor(channel), 0)

    narrow = [layer for layer in subject.convolutions if width(layer) <= 128]
    if not narrow:
        return  # ViT: each of 768 channels of its first layer is a whole pass
    layer = narrow[len(narrow) * 3 // 4]
    ranking = ablate_each(subject.model, subject.inputs, layer)
    assert len(ranking.channels) == width(layer)
    names = [f"{layer}.{own}" for own, _ in subject.model.get_submodule(layer).named_parameters()]
    scores = subject.output[0]
    assert ranking.prediction.index == int(scores.argmax())
    rounding = 1e-5 * float(scores.abs().max())
    assert max(abs(row.score_drop) for row in ranking.channels) > 10 * rounding
    for channel in range(3):
        [worth] = [row for row in ranking.channels if row.channel == channel]
        silenced = subject.run_with_weights(partial(without, channel), *names)
        expected = float(silenced[0, ranking.prediction.index])
        assert worth.score_after == pytest.approx(expected, abs=rounding)


CHECKS = (a_scaled_layer, silent_channels, a_pruned_weight, dropped_with_a_seed, events_in_order)
CHECKS_OF_CLASSIFIERS = (gradients_of_the_score, channels_without_weights)
