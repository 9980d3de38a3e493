"""Faults planted into trained networks are reported first; sound networks have only notes."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope import diagnose, load_model, open_image
from hookscope.findings import CATALOGUE
from hookscope.inspection.findings import network_findings
from hookscope.inspection.places import MOST, find_places
from hookscope.models import LoadedModel
from hookscope.models.choices import PreprocessChoice
from tests.inspection import faults
from tests.nets import Function

Loaded = tuple[LoadedModel, Tensor]
SAMPLES = Path(__file__).parents[2] / "samples"


def inputs_of(loaded: LoadedModel, *names: str) -> Tensor:
    return torch.stack([loaded.preprocess(open_image(SAMPLES / name)) for name in names])


@pytest.fixture(scope="module")
def large() -> Loaded:
    loaded = load_model("shapes")
    return loaded, inputs_of(loaded, *sorted(f"shapes/{path.name}" for path in (SAMPLES / "shapes").glob("*.png")))


@pytest.fixture(scope="module")
def shapes(large: Loaded) -> Loaded:
    """Pictures of half the size: a quarter of the time."""
    return large[0], nn.functional.interpolate(large[1], scale_factor=0.5, mode="area")


@pytest.fixture(scope="module")
def normalised(shapes: Loaded) -> Loaded:
    """The same network with a BatchNorm behind each convolution, whose statistics are those of the pictures."""
    loaded, inputs = shapes
    return replace(loaded, model=faults.with_batch_norms(loaded.model, inputs)), inputs


@pytest.fixture(scope="module")
def lite() -> Loaded:
    pytest.importorskip("efficientnet_lite_pytorch")
    loaded = load_model("efficientnet-lite0")
    return loaded, inputs_of(loaded, "cat.jpg", "coffee.jpg", "rocket.jpg")


def plant(
    kind: str, loaded: Loaded, layer: str, inputs: Tensor, raw: Tensor | None = None, seed: Any = 0
) -> faults.Planted:
    planted = faults.plant(kind, loaded[0].model, layer, inputs, loaded[1] if raw is None else raw, random.Random(seed))
    assert planted is not None
    return planted


@pytest.mark.parametrize(
    ("network", "kind", "layer"),
    [
        ("shapes", "zero", "features.9.squeeze"),
        ("shapes", "copy", "features.7.expand1x1"),
        ("shapes", "channel", "features.3.squeeze"),
        ("shapes", "column", "features.11.squeeze"),
        ("shapes", "bias", "features.10.expand3x3"),
        ("shapes", "nan", "features.12.squeeze"),
        ("shapes", "scale", "features.4.expand3x3"),
        ("shapes", "255", ""),
        ("normalised", "scale", "features.10.squeeze.0"),
        ("normalised", "foreign", "features.7.squeeze.1"),
        ("normalised", "shift", "features.7.expand1x1.1"),
        ("normalised", "sign", "features.6.squeeze.0"),
        ("normalised", "reinit", "features.9.squeeze.0"),
        ("normalised", "255", ""),
        ("normalised", "0..1", ""),
    ],
)
def test_a_fault_is_among_the_first_three(network: str, kind: str, layer: str, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(network)
    raw = loaded[1] * faults.IMAGENET[1] + faults.IMAGENET[0]
    planted = plant(kind, loaded, layer, loaded[1][3:4], raw[3:4], kind)
    assert planted.rank(find_places(faults.evidence_of(planted.net, planted.inputs))) in (1, 2, 3)


@pytest.mark.parametrize("count", [1, 3])
def test_a_sound_network_has_only_notes(count: int, normalised: Loaded) -> None:
    net, inputs = normalised
    places = find_places(faults.evidence_of(net, inputs[:count]))
    assert {place.severity for place in places} <= {"note"} and len(places) <= MOST


def test_an_answer_that_depends_on_the_batch_comes_before_what_is_larger(normalised: Loaded) -> None:
    net, inputs = normalised
    model: Any = copy.deepcopy(net.model)
    model.features[10].squeeze[0].weight.data *= 30
    norm = model.features[3].squeeze[1]
    norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    first, second, *_ = find_places(faults.evidence_of(replace(net, model=model), inputs[:3]))
    assert (first.kind, first.layer, second.severity) == ("random-output", "features.3.squeeze.1", "warning")


def test_a_trained_network_of_imagenet_has_only_notes_of_the_answer(lite: Loaded) -> None:
    found = find_places(faults.evidence_of(lite[0], lite[1][1:2]))  # the slow test has the other images
    assert [place for place in found if place.severity != "note" or place.finding is not None] == []


def test_what_follows_from_a_zeroed_layer_is_told_with_it(lite: Loaded) -> None:
    planted = plant("zero", lite, "_conv_head", lite[1][:1, :, ::2, ::2])
    first, *others = find_places(faults.evidence_of(planted.net, planted.inputs))
    assert (first.layer, first.kind, first.severity) == ("_conv_head.weight", "constant-weights", "warning")
    assert first.numbers["after"] == 1 and first.reason.endswith("; 1 layer after it is affected.")
    assert others == []


def test_a_layer_that_was_initialised_again_is_reported(shapes: Loaded) -> None:
    layer = "features.10.expand3x3"
    planted = plant("reinit", shapes, layer, shapes[1][:1])
    net: Any = planted.net
    bound = (9 * 48) ** -0.5  # of PyTorch's initialisation: 1 / sqrt(inputs of a filter)
    assert net.get_submodule(layer).weight.abs().max() <= bound
    first = find_places(faults.evidence_of(net, planted.inputs))[0]
    assert (first.kind, first.layer) == ("initial-weights", f"{layer}.weight")
    assert first.numbers["bound"] == pytest.approx(bound, rel=0.01)


def test_the_first_place_is_the_first_of_stats_too(normalised: Loaded) -> None:
    planted = plant("foreign", normalised, "features.7.squeeze.1", normalised[1])
    evidence = faults.evidence_of(planted.net, planted.inputs)
    found, (place, *_) = diagnose(evidence.totals)[:1], find_places(evidence)
    assert [(each.finding, each.layer, each.severity) for each in found] == [(place.kind, planted.layer, "warning")]
    assert place.layer == planted.layer


def test_findings_on_one_layer_and_the_batchnorm_behind_it_are_one_place(normalised: Loaded) -> None:
    layer = "features.10.squeeze.0"
    planted = plant("scale", normalised, layer, normalised[1][:3])
    evidence = faults.evidence_of(planted.net, planted.inputs)
    found = {finding.finding for finding in (*evidence.findings, *network_findings(evidence))}
    assert {"sudden-drift", "outlier-layer"} <= found
    first, *others = find_places(evidence)
    assert (first.kind, first.layer) == ("outlier-layer", f"{layer}.weight")
    assert [other for other in others if other.finding is not None] == []


def test_random_weights_are_told_first_by_their_label_their_batchnorms_or_their_values() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    first = find_places(faults.evidence_of(net, torch.randn(1, 3, 16, 16), weights="random (seed 0)"))[0]
    assert (first.kind, first.severity, first.layer) == ("random-weights", "error", "")
    assert first.meaning == CATALOGUE["random-weights"].text()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    first = find_places(faults.evidence_of(net, torch.randn(1, 3, 16, 16), weights="as given"))[0]
    assert first.kind == "random-weights"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    places = find_places(faults.evidence_of(net.eval(), torch.randn(2, 3, 16, 16), weights="as given"))
    assert [(place.kind, place.severity) for place in places[:1]] == [("random-weights", "error")]


NOT_KNOWN = {"bgr"}
"""Faults that no place can tell; in networks without BatchNorm also a wrong sign and a missing mean and std."""


@pytest.fixture(scope="module", params=["large", "lite"])
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    """A trained network, inputs, and these from 0 to 1; networks of other families are in the collection."""
    loaded, inputs = request.getfixturevalue(request.param)
    raw = inputs * faults.IMAGENET[1] + faults.IMAGENET[0] if request.param == "large" else (inputs * 128 + 127) / 255
    return loaded.model, inputs, raw


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("half", [0, 1])
def test_nine_of_ten_faults_in_each_half_of_a_network_are_among_the_first_three(
    half: int, count: int, network: tuple[nn.Module, Tensor, Tensor]
) -> None:
    net, inputs, raw = network
    known = NOT_KNOWN if faults.batch_norms(net) else NOT_KNOWN | {"sign", "0..1"}
    told = []
    for kind, layer, rng in faults.faults(net, half):
        planted = None if kind in known else faults.plant(kind, net, layer, inputs[:count], raw[:count], rng)
        if planted is not None:
            places = find_places(faults.evidence_of(planted.net, planted.inputs))
            told.append((planted.rank(places) in (1, 2, 3), kind, layer))
    assert len(told) > 6
    assert sum(found for found, *_ in told) >= 0.9 * len(told), [fault for found, *fault in told if not found]


@pytest.mark.slow
def test_sound_networks_have_only_notes_on_each_image_and_all(network: tuple[nn.Module, Tensor, Tensor]) -> None:
    net, inputs, _ = network
    for part in (*inputs.split(1), *inputs.split(3), inputs):
        places = find_places(faults.evidence_of(net, part))
        assert {place.severity for place in places} <= {"note"}, places


def test_the_mean_and_std_that_the_model_states_are_tried(normalised: Loaded) -> None:
    loaded, _ = normalised
    changed = loaded.preprocess.changed(PreprocessChoice.parse("weights", 0.9, 0.05, None, None))
    images = [str(SAMPLES / "shapes" / f"{name}.png") for name in ("circle", "cross", "star")]
    found = network_findings(faults.recorded(replace(loaded, preprocess=changed), images))
    [mismatch] = [finding for finding in found if finding.finding == "input-mismatch"]
    assert f"with what the model states ({loaded.preprocess.transforms.values.describe()})" in mismatch.evidence


def test_values_that_were_not_loaded_do_not_follow_from_a_small_drift_before_them(normalised: Loaded) -> None:
    loaded, inputs = normalised
    norms = faults.batch_norms(loaded.model)
    net = copy.deepcopy(loaded.model)
    early: Any = net.get_submodule(norms[1])
    early.running_var *= 1.6
    late: Any = net.get_submodule(norms[-2])
    late.running_mean.zero_()
    late.running_var.fill_(1)
    places = find_places(faults.evidence_of(net, inputs))
    [place] = [place for place in places if place.kind == "never-updated"]
    assert (place.layer, place.severity) == (norms[-2], "warning")


def test_scales_of_a_norm_far_above_the_others_and_rows_of_zeros_are_named() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), *(nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12)) for _ in range(6)))
    for block in net[1:]:
        nn.init.normal_(block[1].weight, 1, 0.1)
        nn.init.normal_(block[1].bias, 0, 0.1)
    net[6][1].weight.data *= 100
    net[3][0].weight.data[2] = 0
    found = {
        (place.kind, place.layer) for place in find_places(faults.evidence_of(net.eval(), torch.randn(4, 3, 2, 2)))
    }
    assert {("outlier-layer", "6.1.weight"), ("dead-filters", "3.0.weight")} <= found


def test_what_a_layer_does_in_its_second_call_follows_from_the_cause_before_it(shapes: Loaded) -> None:
    layers = {"relu": nn.ReLU(), "first": nn.Conv2d(3, 8, 3), "second": nn.Conv2d(8, 8, 3), "norm": nn.BatchNorm2d(8)}
    net = Function(
        lambda net, x: net.last(net.relu(net.norm(net.second(net.relu(net.first(x)))))).mean((2, 3)),
        **layers, last=nn.Conv2d(8, 4, 3),
    )  # fmt: skip
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    net(shapes[1])
    net.norm.weight.data[1] = torch.nan
    net.eval()
    places = find_places(faults.evidence_of(net, shapes[1][:1]))
    assert [place.layer for place in places if place.severity == "error"] == ["norm.weight"]
