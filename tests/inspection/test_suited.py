"""Signs of a fault that need no BatchNorm and no reference: weights and what they read, answers that do not repeat."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope import load_model, open_image
from hookscope.inspection.findings import network_findings
from hookscope.inspection.reads import InputMoments, LayerInputs
from hookscope.inspection.repeated import unrepeated
from hookscope.inspection.suited import fit
from hookscope.models import LoadedModel, as_loaded
from hookscope.tracing import Trace, trace
from tests.inspection.faults import evidence_of
from tests.nets import Function

SAMPLES = Path(__file__).parents[2] / "samples"
Seen = list[tuple[str, str, str]]


def found(net: LoadedModel | nn.Module, inputs: Tensor) -> Seen:
    return [(each.finding, each.layer, each.severity) for each in network_findings(evidence_of(net, inputs))]


def test_moments_are_those_of_numpy_over_calls() -> None:
    layer = nn.Conv2d(20, 4, 3)
    inputs = LayerInputs(nn.Sequential(layer), Trace((), (), ()))
    images = torch.randn(3, 20, 5, 6) * torch.arange(1.0, 21)[:, None, None]
    for image in images:
        inputs.update(layer, (image[None],))
    assert nn.ReLU() not in inputs and layer in inputs
    channels, together = inputs.moments["0"].correlations()
    values = images.transpose(0, 1).flatten(1).double().numpy()
    assert channels.tolist() == list(range(20)) and list(inputs.moments) == ["0"]
    np.testing.assert_allclose(together, np.corrcoef(values), atol=1e-9)


@pytest.mark.parametrize("last", [False, True])
def test_a_linear_layer_that_reads_flattened_maps_reads_their_channels(last: bool) -> None:
    turn = Function((lambda x: x.permute(0, 2, 3, 1)) if last else (lambda x: x))
    net = nn.Sequential(nn.Conv2d(3, 20, 3), nn.ReLU(), turn, nn.Flatten(), nn.Linear(20 * 6, 4)).eval()
    images = torch.randn(2, 3, 4, 5)
    inputs = LayerInputs(net, trace(net, (images,), sources=True))
    maps = net[:2](images).detach()
    inputs.update(net[4], (turn(maps).flatten(1),))
    _, together = inputs.moments["4"].correlations()
    np.testing.assert_allclose(together, np.corrcoef(maps.transpose(0, 1).flatten(1).double().numpy()), atol=1e-6)
    weight = net[4].weight.detach()
    own = weight.reshape(4, 6, 20).transpose(1, 2) if last else weight.reshape(4, 20, 6)
    assert torch.equal(inputs.weights["4"], own)


def test_weights_in_the_order_of_their_inputs_are_far_from_chance_and_others_are_not() -> None:
    groups = torch.arange(48) // 6
    values = torch.randn(4000, 8)[:, groups] + torch.randn(4000, 48)  # groups of channels that go together
    weight = (torch.randn(32, 8)[:, groups] + 0.5 * torch.randn(32, 48))[..., None]
    read = InputMoments(torch.arange(48))
    read.update(values)
    assert (fit(weight, read) or 0) > 10
    chance = [fit(weight[:, torch.randperm(48)], read) or 0.0 for _ in range(60)]
    chance += [fit(torch.randn_like(weight), read) or 0.0 for _ in range(60)]
    assert sum(value <= 2.2 for value in chance) >= 108
    few = InputMoments(torch.arange(8))
    few.update(values[:, :8])
    assert fit(weight[:, :8], few) is None, "few channels"


@pytest.fixture(scope="module")
def shapes() -> tuple[LoadedModel, Tensor]:
    loaded = load_model("shapes")
    paths = sorted((SAMPLES / "shapes").glob("*.png"))[:8]
    inputs = torch.stack([loaded.preprocess(open_image(path)) for path in paths])
    return loaded, nn.functional.interpolate(inputs, scale_factor=0.5, mode="area")


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        ("permuted", "features.9.expand3x3"),
        ("of another layer", "features.9.expand3x3"),
        ("random", "features.6.expand3x3"),
    ],
)
def test_without_batchnorm_a_layer_with_other_weights_is_named(
    change: str, layer: str, shapes: tuple[LoadedModel, Tensor]
) -> None:
    loaded, inputs = shapes
    assert found(loaded, inputs) == [], "sound"
    net = copy.deepcopy(loaded.model)
    own: Any = net.get_submodule(layer)
    weight = own.weight.data
    own.weight.data = {
        "permuted": lambda: weight[:, torch.randperm(weight.shape[1])],
        "random": lambda: torch.randn_like(weight) * weight.std(),
        "of another layer": lambda: net.get_submodule("features.10.expand3x3").weight.data,
    }[change]()
    named = [each for each in found(net, inputs) if each[0] != "dead-channels"]
    assert named == [("unsuited-weights", f"{layer}.weight", "warning")]


@pytest.mark.parametrize(("factor", "severity"), [(10, "warning"), (0.1, "warning"), (2, None)])
def test_a_layer_on_another_scale_than_layers_that_are_alike_is_named(factor: float, severity: str | None) -> None:
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for layer in net[:6]:
        nn.init.normal_(layer.weight)
    net[2].weight.data *= factor
    named = [each for each in found(net.eval(), torch.randn(2, 8, 5, 5)) if each[0] == "outlier-layer"]
    assert named == ([] if severity is None else [("outlier-layer", "2.weight", severity)])


def noisy(net: Any, x: Tensor) -> Tensor:
    return net.head(nn.functional.dropout(net.conv(x).mean((2, 3)), 0.5))


def mixed(net: Any, x: Tensor) -> Tensor:
    return net.head(net.norm(net.conv(x)).mean((2, 3)))


def sound(net: Any, x: Tensor) -> Tensor:
    return net.head(net.conv(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("forward", "layer", "says"),
    [(sound, None, ""), (noisy, "head", "in a second pass"), (mixed, "norm", "beside another image")],
)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("known", [False, True])
def test_answers_that_do_not_repeat_are_named_with_the_first_layer_that_differs(
    forward: Any, layer: str | None, says: str, count: int, known: bool
) -> None:
    norm = nn.BatchNorm2d(8, track_running_stats=False)  # statistics of the batch, in eval mode too
    net = Function(forward, conv=nn.Conv2d(3, 8, 3), norm=norm, head=nn.Linear(8, 5)).eval()
    before = torch.get_rng_state()
    inputs = torch.randn(count, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        scores = net(inputs[:1]).detach() if known else None
    findings = list(unrepeated(as_loaded(net), [(image,) for image in inputs], scores))
    if layer is None or (layer == "norm" and count == 1):  # two equal images have the statistics of one
        assert findings == []
    else:
        [finding] = findings
        assert (finding.finding, finding.layer, finding.severity) == ("random-output", layer, "warning")
        assert says in finding.evidence
    assert torch.equal(torch.get_rng_state(), before) and not net.training


def test_a_model_that_takes_one_image_alone_is_left_in_peace() -> None:
    net = Function(
        lambda net, x: net.head(net.conv(x).mean((2, 3)).reshape(8)), conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 5)
    )
    assert list(unrepeated(as_loaded(net.eval()), [(torch.randn(3, 9, 9),)] * 2)) == []


def test_the_first_layer_that_is_mostly_dead_is_named_where_the_others_live() -> None:
    layers = [nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()) for _ in range(5)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    for layer in layers:
        layer[0].weight.data.copy_(torch.eye(8)[..., None, None])
        layer[0].bias.data.fill_(0.1)
    inputs = torch.rand(4, 8, 5, 5)
    assert not [each for each in found(net, inputs) if each[0] == "dead-channels"]
    layers[3][0].bias.data[:7] = -9
    named = [each for each in found(net, inputs) if each[0] == "dead-channels"]
    assert named == [("dead-channels", "3.1", "warning")]


@pytest.mark.parametrize(
    ("last", "layer"), [(nn.Softmax(1), "3"), (Function(lambda x: x.softmax(1)), ""), (nn.ReLU(), None)]
)
def test_probabilities_are_not_scores(last: nn.Module, layer: str | None) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), last).eval()
    inputs = torch.randn(2, 3, 2, 2)
    scores = tuple(net(image[None]).detach() for image in inputs)
    evidence = replace(evidence_of(net, inputs), scores=scores)
    named = [each.layer for each in network_findings(evidence) if each.finding == "probabilities-as-scores"]
    assert named == ([] if layer is None else [layer])
