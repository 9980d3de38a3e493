"""Every public function that takes a module also takes what `load_model` returns, with its class names and size."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.optim import SGD
from torchvision.models import VisionTransformer

import hookscope
from hookscope.interventions import Zero

IMAGES = [str(path) for path in sorted((Path(__file__).parents[1] / "samples" / "shapes").glob("*.png"))[:2]]
EARLY, LATE = "features.6.squeeze", "features.12.squeeze"
X = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
Given = dict[str, Any]


def inside(block: AbstractContextManager[Any], net: Any) -> Any:
    """What the block gives, after one pass in it."""
    with block as given:
        getattr(net, "model", net)(X)
    return given


def step(monitor: hookscope.Monitor, net: Any) -> Any:
    module = getattr(net, "model", net)
    with monitor:
        optimizer = SGD(module.parameters(), 0.0)
        module(X).sum().backward()
        optimizer.step()
    return [row["layer"] for row in monitor.rows]


def with_attention(net: Any) -> Any:
    """A transformer in place of ``net``."""
    torch.manual_seed(0)
    module = VisionTransformer(64, 32, 1, 2, 8, 16).eval()
    return module if net is getattr(net, "model", net) else replace(net, model=module)


def exemplars(net: Any) -> Any:
    [layer] = hookscope.find_exemplars(net, IMAGES, LATE, channels=[3], top=1)
    return layer


# What each gives; ``names`` has the class names, ``size`` the input size, for a plain module alone.
CALLS: dict[str, Callable[[Any, Given, Given], Any]] = {
    "Monitor": lambda net, names, size: step(hookscope.Monitor(net), net),
    "StatisticsCollector": lambda net, names, size: inside(
        hookscope.StatisticsCollector(net, EARLY), net
    ).totals.images,
    "ablate_each": lambda net, names, size: hookscope.ablate_each(net, X, LATE, "star", **names).channels,
    "attention_maps": lambda net, names, size: hookscope.attention_maps(with_attention(net), X),
    "cam_faithfulness": lambda net, names, size: hookscope.cam_faithfulness(
        net, X, LATE, "star", ["gradcam"], steps=2, **names
    ),
    "capture": lambda net, names, size: inside(hookscope.capture(net, EARLY), net)[EARLY].sum(),
    "change_gradients": lambda net, names, size: inside(
        hookscope.change_gradients(net, {EARLY: hookscope.ZeroGradient()}), net
    ).__class__,
    "class_activation_maps": lambda net, names, size: hookscope.class_activation_maps(net, X, LATE, "star", **names),
    "compare": lambda net, names, size: len(hookscope.compare(net, net, X, layers=LATE).calls),
    "draw_exemplars": lambda net, names, size: hookscope.draw_exemplars(exemplars(net), net)[0].size,
    "draw_kernels": lambda net, names, size: hookscope.draw_kernels(net, "features.0").size,
    "extract": lambda net, names, size: [batch.features for batch in hookscope.extract(net, [X[0]], LATE)],
    "find_exemplars": lambda net, names, size: exemplars(net).call,
    "find_non_finite": lambda net, names, size: hookscope.find_non_finite(net, X),
    "inspect": lambda net, names, size: hookscope.inspect(net, Image.new("RGB", (128, 128))).calls[0].call,
    "intervene": lambda net, names, size: inside(hookscope.intervene(net, {EARLY: Zero()}), net).changed,
    "intervention_effect": lambda net, names, size: hookscope.intervention_effect(net, (X,), {EARLY: Zero()}).layers,
    "landmark_layers": lambda net, names, size: hookscope.landmark_layers(net, X, "star", **names),
    "layer_gradients": lambda net, names, size: hookscope.layer_gradients(net, X),
    "layer_graph": lambda net, names, size: hookscope.layer_graph(net, **size),
    "layer_totals": lambda net, names, size: hookscope.layer_totals(net, **size),
    "layer_tree": lambda net, names, size: hookscope.layer_tree(net, **size),
    "list_layers": lambda net, names, size: hookscope.list_layers(net, **size),
    "make_side": lambda net, names, size: type(hookscope.make_side(net).net.model),
    "measure_faithfulness": lambda net, names, size: hookscope.measure_faithfulness(
        net, X, {"ones": torch.ones(64, 64)}, "star", steps=2, baselines=False, **names
    ),
    "parameter_statistics": lambda net, names, size: hookscope.parameter_statistics(net, layers=EARLY),
    "plan": lambda net, names, size: [call.macs for call in hookscope.plan(net, **size).calls],
    "saliency_maps": lambda net, names, size: hookscope.saliency_maps(net, X, "star", **names),
    "predict": lambda net, names, size: [row.score for row in hookscope.predict(net, X[0], **names)],
    "sanity_check": lambda net, names, size: hookscope.sanity_check(
        net, lambda: getattr(net, "model", net)(X).detach(), steps=1
    ),
    "synthesize_images": lambda net, names, size: list(hookscope.synthesize_images(net, LATE, [3], steps=1, tries=1)),
    "trace_events": lambda net, names, size: hookscope.trace_events(net, X, EARLY),
    "verify": lambda net, names, size: [check.name for check in hookscope.verify(net, [X[0]], LATE)],
}  # fmt: skip


def annotations() -> dict[str, list[str]]:
    """The annotations of the parameters of each public function that are about a model."""
    found = {}
    for name in hookscope.__all__:
        value = getattr(hookscope, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            parameters = inspect.signature(value).parameters.values()
            found[name] = [
                str(each.annotation)
                for each in parameters
                if each.name in ("model", "net", "a", "b") and name != "load_model"
            ]
    return {name: words for name, words in found.items() if words}


@pytest.mark.parametrize(
    "name", [name for name, words in annotations().items() if "| None" not in words[0] or name == "Monitor"]
)
def test_a_loaded_model_does_what_its_module_does(name: str) -> None:
    net = hookscope.load_model("shapes", device="cpu")
    names = {"categories": net.categories}
    assert repr(CALLS[name](net, {}, {})) == repr(CALLS[name](net.model, names, {"input_size": (128, 128)}))


def test_no_public_function_takes_a_module_alone() -> None:
    assert {word for words in annotations().values() for word in words}.isdisjoint({"nn.Module", "LoadedModel"})
