"""Signs of a fault that need no BatchNorm and no reference: weights that do not fit, answers that do not repeat."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope import load_model, open_image
from hookscope.inspection.aligned import Pair, misaligned
from hookscope.inspection.findings import network_findings
from hookscope.inspection.repeated import unrepeated
from hookscope.models import LoadedModel, as_loaded
from hookscope.tracing import trace
from tests.inspection.faults import evidence_of
from tests.nets import Function

SAMPLES = Path(__file__).parents[2] / "samples"
Seen = list[tuple[str, str, str]]


def found(net: LoadedModel | nn.Module, inputs: Tensor) -> Seen:
    return [(each.finding, each.layer, each.severity) for each in network_findings(evidence_of(net, inputs))]


CHANNELS = 30


def grouped() -> Tensor:
    """The group of each channel; channels of one group are computed alike, and read alike."""
    return (torch.arange(CHANNELS) // 5)[torch.randperm(CHANNELS)]


def weight(of: Tensor, read: Tensor, places: int) -> Tensor:
    """A weight ``(outputs, inputs, places)`` between two groupings, as training leaves it."""
    groups = nn.init.orthogonal_(torch.empty(6, 6 * places)).view(6, 6, places) * places**0.5
    return groups[of][:, read] + 0.2 * torch.randn(len(of), len(read), places)


def chain(last: bool = False) -> nn.Sequential:
    """Four convolutions and three Linear layers that fit each other; maps may be flattened place by place."""
    turn = Function((lambda x: x.permute(0, 2, 3, 1)) if last else (lambda x: x))
    convolutions = [layer for _ in range(4) for layer in (nn.Conv2d(CHANNELS, CHANNELS, 3), nn.ReLU())]
    linear: list[nn.Module] = [nn.Linear(4 * CHANNELS, CHANNELS)]
    linear += [layer for _ in range(2) for layer in (nn.ReLU(), nn.Linear(CHANNELS, CHANNELS))]
    net = nn.Sequential(*convolutions, turn, nn.Flatten(), *linear)
    layers: list[Any] = [layer for layer in net if isinstance(layer, nn.Conv2d | nn.Linear)]
    groupings = [grouped() for _ in range(len(layers) + 1)]
    for at, layer in enumerate(layers):
        values = weight(groupings[at + 1], groupings[at], layer.weight[0, 0].numel() if at < 4 else 4 if at == 4 else 1)
        values = values.transpose(1, 2) if last and at == 4 else values
        layer.weight.data = values.reshape(layer.weight.shape)
    return net.eval()


def named(net: nn.Module, inputs: Tensor, **options: Any) -> list[tuple[str, str]]:
    findings = misaligned(trace(net, (inputs,), sources=True), net, **options)
    return [(each.layer, each.evidence.partition(";")[0].partition(":")[0]) for each in findings]


def test_alignment_is_the_distance_from_permutations_by_numpy() -> None:
    shared = grouped()
    weights = {"a": weight(shared, grouped(), 1), "b": weight(grouped(), shared, 4)}
    likeness = []
    for values in (weights["a"].flatten(1), weights["b"].transpose(0, 1).flatten(1)):
        rows = values.double().numpy()
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        apart = ~np.eye(CHANNELS, dtype=bool)
        likeness.append(np.where(apart, rows @ rows.T - (rows @ rows.T)[apart].mean(), 0))
    one, other = likeness
    numbers = np.random.default_rng(0)
    orders = [numbers.permutation(CHANNELS) for _ in range(4000)]
    chance = [(one[np.ix_(order, order)] * other).sum() for order in orders]
    expected = ((one * other).sum() - np.mean(chance)) / np.std(chance)
    pair = Pair("a", "b", reads=True)
    assert expected > 5 and pair.alignment(weights) == pytest.approx(expected, rel=0.05)
    assert abs(pair.alignment({**weights, "b": weight(grouped(), grouped(), 4)})) < 4
    assert np.isnan(pair.alignment({"a": weights["a"][:12], "b": weights["b"][:, :12]})), "few channels"


@pytest.mark.parametrize("last", [False, True])
def test_weights_that_do_not_fit_their_neighbours_are_named_with_what_would_fit(last: bool) -> None:
    inputs = torch.randn(1, CHANNELS, 10, 10)
    net = chain(last)
    assert named(net, inputs) == [], "sound"
    layers: Any = net
    order = torch.randperm(CHANNELS)
    sound = {at: layers[at].weight.data.clone() for at in (6, 10, 12)}
    layers[6].weight.data = sound[6][:, order]
    assert named(net, inputs) == [("6.weight", "its weights fit the weights of 4 no better than in a random order")]
    assert named(net, inputs, drifted={"4"})[0][0] == "4.weight", "a BatchNorm after the other drifts"
    assert named(net, inputs, known={"6.weight"}) == [], "said before"
    layers[6].weight.data = sound[6].transpose(0, 1)
    assert named(net, inputs) == [("6.weight", "it would fit if it were transposed")]
    layers[6].weight.data = sound[6]
    turned = sound[10].view(CHANNELS, *((4, CHANNELS) if last else (CHANNELS, 4))).transpose(1, 2).flatten(1)
    layers[10].weight.data = turned
    assert named(net, inputs) == [("10.weight", "it would fit if the maps before it were flattened in another order")]
    layers[10].weight.data = sound[10]
    layers[12].weight.data, layers[14].weight.data = layers[14].weight.data, sound[12]
    [(layer, cure)] = named(net, inputs)
    other = {"12.weight": "14", "14.weight": "12"}[layer]
    assert cure == f"the weights of {other} would fit here"


def test_queries_keys_and_values_in_another_order_are_named() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
            shared = grouped()
            parts = [weight(of, grouped(), 1)[..., 0] for of in (shared, shared, grouped())]
            self.qkv.weight.data = torch.cat(parts)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(x).chunk(3, -1)
            return x + (query @ key.transpose(1, 2)).softmax(-1) @ value

    net = nn.Sequential(*(Attends() for _ in range(5))).eval()
    inputs = torch.randn(1, 7, CHANNELS)
    assert named(net, inputs) == []
    own: Any = net[3]
    query, key, value = own.qkv.weight.data.chunk(3)
    own.qkv.weight.data = torch.cat([value, key, query])
    assert named(net, inputs) == [("3.qkv.weight", "queries, keys and values seem to be in another order")]
    heads = torch.stack([query, key, value]).unflatten(1, (5, 6)).transpose(0, 1).flatten(0, 2)  # by head first
    own.qkv.weight.data = heads
    assert named(net, inputs) == [("3.qkv.weight", "its rows seem to be ordered by head first, of 5 heads")]


@pytest.fixture(scope="module")
def shapes() -> tuple[LoadedModel, Tensor]:
    loaded = load_model("shapes")
    paths = sorted((SAMPLES / "shapes").glob("*.png"))[:8]
    inputs = torch.stack([loaded.preprocess(open_image(path)) for path in paths])
    inputs = nn.functional.interpolate(inputs, scale_factor=0.5, mode="area")
    assert found(loaded, inputs) == [], "sound"
    return loaded, inputs


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
    [(sound, None, ""), (noisy, "head", "in a second pass"), (mixed, "norm", "the other images of the batch")],
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


def test_a_block_that_is_left_out_now_and_then_is_found_by_the_numbers_that_it_draws() -> None:
    def seldom(net: Any, x: Tensor) -> Tensor:
        kept = float(torch.rand(()) < 0.5)
        return net.head(net.conv(x).mean((2, 3)) * kept)

    net = Function(seldom, conv=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 5)).eval()
    inputs = torch.randn(1, 3, 9, 9)
    with torch.random.fork_rng():
        [finding] = unrepeated(as_loaded(net), [(inputs[0],)], net(inputs).detach())
    assert (finding.finding, finding.layer) == ("random-output", "head")


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


_OF_A_SOFTMAX = "probabilities-as-scores"


@pytest.mark.parametrize(
    ("last", "layer"), [(nn.Softmax(1), "3"), (Function(lambda x: x.softmax(1)), ""), (nn.ReLU(), None)]
)
def test_probabilities_are_not_scores(last: nn.Module, layer: str | None) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), last).eval()
    inputs = torch.randn(2, 3, 2, 2)
    sums = torch.stack([net(image[None]).sum() for image in inputs])
    evidence = replace(evidence_of(net, inputs), softmax=bool((sums - 1).abs().max() < 1e-6))
    named = [(each.layer, each.severity) for each in network_findings(evidence) if each.finding == _OF_A_SOFTMAX]
    assert named == ([] if layer is None else [(layer, "note")])
