"""Parameters that were not loaded, layers that do not run, rounded weights, and settings unlike the others."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hookscope.inspection.findings import network_findings
from hookscope.inspection.unloaded import unloaded
from tests.inspection.faults import evidence_of
from tests.nets import Function

INPUTS = torch.randn(2, 4, 5, 5)


def stages(count: int = 4) -> Any:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(count)]
    for layer in layers:
        layer[1].weight.data.normal_(1, 0.1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def found(net: nn.Module, inputs: Tensor = INPUTS) -> list[tuple[str, str, str]]:
    return [(each.finding, each.layer, each.severity) for each in unloaded(evidence_of(net, inputs))]


def test_one_norm_as_before_training_is_named_and_all_of_them_are_not() -> None:
    net = stages()
    for layer in net[:4]:
        nn.init.ones_(layer[1].weight)
    assert found(net) == []
    for layer in (0, 1, 3):
        net[layer][1].weight.data.normal_(1, 0.1)
    assert found(net) == [("initial-weights", "2.1.weight", "warning")]


def test_a_norm_whose_scales_changed_their_sign_is_named() -> None:
    net = stages()
    net[2][1].weight.data.neg_()
    assert found(net) == [("outlier-layer", "2.1.weight", "warning")]


@pytest.mark.parametrize(("eps", "named"), [(1.0, True), (1e-6, False), (1e-3, False)])
def test_a_norm_with_an_eps_far_above_the_others_is_named(eps: float, named: bool) -> None:
    net = stages()
    net[1][1].eps = eps
    assert found(net) == [("unlike-siblings", "1.1", "warning")] * named


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounded_weights_are_named_where_the_others_are_not_rounded(bits: int) -> None:
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(5))).eval()

    def round_(layer: Any) -> None:
        step = layer.weight.abs().max().item() / (2 ** (bits - 1) - 1)
        layer.weight.data = (layer.weight.data / step).round() * step

    round_(net[2])
    inputs = torch.randn(1, 8, 12, 12)
    assert found(net, inputs) == [("rounded-weights", "2.weight", "warning")] * (bits <= 4)
    for layer in net:
        round_(layer)
    assert found(net, inputs) == [], "all layers"


@pytest.mark.parametrize(("change", "named"), [("fresh", True), ("xavier", True), ("scaled", False), ("normal", False)])
def test_a_small_layer_is_initial_if_it_is_uniform_up_to_the_bound_of_an_initialisation(
    change: str, named: bool
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(4)), nn.Flatten(), nn.Linear(8 * 16, 4)).eval()
    for layer in net[:4]:
        nn.init.normal_(layer.weight, std=0.1)
    weight = net[5].weight.data  # 512 weights
    if change == "scaled":
        weight *= 1.3
    elif change == "xavier":
        nn.init.xavier_uniform_(weight)
    elif change != "fresh":
        nn.init.normal_(weight, std=0.05)
    evidence = evidence_of(net, torch.randn(1, 8, 12, 12))
    layers = [each.layer for each in network_findings(evidence) if each.finding == "initial-weights"]
    assert layers == ["5.weight"] * named


def test_a_weight_of_zeros_among_full_ones_is_named() -> None:
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(5))).eval()
    dropped = torch.rand(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.95
    net[2].weight.data[dropped] = 0
    evidence = evidence_of(net, torch.randn(1, 8, 12, 12))
    [finding] = unloaded(evidence)
    share = float(dropped.float().mean())
    assert (finding.finding, finding.layer) == ("rounded-weights", "2.weight")
    assert finding.evidence == f"{100 * share:.1f} % of its 576 weights are zero, as after pruning"
    for layer in net:
        layer.weight.data[dropped] = 0
    assert found(net, torch.randn(1, 8, 12, 12)) == [], "all layers"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, [("initial-weights", "2.bias", "note")]),
        (-20.0, [("outlier-layer", "2.bias", "warning")]),
        (-4.6, []),  # such as the prior of a detector
    ],
)
def test_biases_of_one_layer_that_are_0_or_far_larger_are_named(value: float, expected: list[Any]) -> None:
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(5))).eval()
    net[2].bias.data[:] = value
    assert found(net, torch.randn(1, 8, 12, 12)) == expected


def test_what_was_frozen_alone_or_copies_channels_or_is_complex_is_no_fault() -> None:
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(4)), nn.ConvTranspose2d(8, 8, 4, 2)).eval()
    net[4].weight.data[~torch.eye(8, dtype=torch.bool)] = 0  # as bilinear upsampling
    net.blur = Function(lambda x: x)
    net.blur.kernel = nn.Parameter(torch.ones(8, 1, 3, 3) / 9, requires_grad=False)
    net.blur.forward = lambda x: nn.functional.conv2d(x, net.blur.kernel, groups=8)
    net.waves = nn.Parameter(torch.randn(8, 40, dtype=torch.complex64))
    assert found(net, torch.randn(1, 8, 16, 16)) == []


class Tokens(nn.Module):
    """Tokens of 4 x 4 patches, with positions, a token that is read, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)
        at = torch.arange(16)
        waves = [torch.sin((at // 4 * a + at % 4 * b) / 2.0 + c) for a, b, c in torch.randn(8, 3)]
        self.positions = nn.Parameter(torch.stack(waves, 1)[None])
        self.read, self.unread = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x: Tensor) -> Any:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(torch.cat([self.read.expand(len(x), -1, -1), tokens], 1).relu().mean(1))


def test_parameters_beside_the_layers_that_were_not_loaded_are_named_if_the_answer_needs_them() -> None:
    net, inputs = Tokens().eval(), torch.randn(2, 3, 16, 16)
    assert found(net, inputs) == []
    positions = net.positions.data
    net.positions.data = positions[:, torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    assert found(net, inputs) == [("unordered-positions", "positions", "note")]
    net.positions.data = torch.zeros_like(positions)
    nn.init.ones_(net.read)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    expected = [("initial-weights", name, "warning") for name in ("positions", "read")]
    assert found(net, inputs) == expected
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_layer_that_does_not_run_is_named_unless_its_weights_are_used() -> None:
    layers = {
        "one": nn.Linear(6, 6),
        "norm": nn.LayerNorm(6),
        "used": nn.Linear(6, 6),
        "aux": nn.Sequential(nn.Linear(6, 2)),
    }
    net = Function(lambda net, x: nn.functional.linear(net.one(x), net.used.weight, net.used.bias), **layers).eval()
    assert found(net, torch.randn(1, 6)) == [("idle-layer", "norm", "warning")]


def answers(*sizes: float) -> Any:
    """Layers with this gradient x activation of two channels, for one image."""
    each = [SimpleNamespace(answer=np.array([size, 0.0])) for size in sizes]
    return tuple(SimpleNamespace(call=SimpleNamespace(key=f"{at}.0"), images=(maps,)) for at, maps in enumerate(each))


@pytest.mark.parametrize(
    ("sizes", "named"),
    [((1, 0, 2, 3, 4, 5, 6, 7), "1.0"), ((1, 0, 0, 3, 4, 5, 6, 7), "2.0"), ((1, 2, 3, 0), None), ((0, 0, 3, 4), None)],
)
def test_the_last_layer_on_which_no_answer_depends_is_named(sizes: tuple[float, ...], named: str | None) -> None:
    evidence = replace(evidence_of(stages(), INPUTS), layers=answers(*sizes))
    layers = [each.layer for each in unloaded(evidence) if each.finding == "idle-layer"]
    assert layers == ([] if named is None else [named])


@pytest.mark.parametrize(("change", "says"), [("L", "all images are grey"), ("dark", "is 21 of 255"), (None, None)])
def test_grey_and_dark_images_are_notes_on_the_input(change: str | None, says: str | None) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    pixels[0, 0] = 255
    picture = Image.fromarray(pixels // 12 if change == "dark" else pixels)
    picture = picture.convert("L").convert("RGB") if change == "L" else picture
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    evidence = replace(evidence_of(net, torch.randn(1, 3, 8, 8)), pictures=(picture,))
    named = [(each.severity, each.evidence) for each in network_findings(evidence) if each.finding == "input-mismatch"]
    assert len(named) == (says is not None)
    assert all(severity == "note" and str(says) in text for severity, text in named)


def normal(net: Any) -> Any:
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight)
    return net.eval()


def test_weights_that_were_loaded_into_two_layers_are_named_and_shared_ones_are_not() -> None:
    net = normal(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))))
    assert found(net) == []
    net[3] = net[0]
    assert found(net) == [], "shared"
    net[2].load_state_dict(net[1].state_dict())
    assert found(net) == [("copied-weights", "2.weight", "warning")]


def test_numbers_at_their_first_value_are_named_where_others_are_not() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(4, 4, 3, padding=1), nn.Parameter(torch.tensor([float(scale)]))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * self.conv(x)

    def named(*scales: float) -> list[tuple[str, str]]:
        net = normal(nn.Sequential(*map(Scaled, scales)))
        return [(each.layer, each.evidence) for each in unloaded(evidence_of(net, INPUTS))]

    assert named(0.3, 0.7, 0.9, 1.2) == [] and named(1, 1) == [], "two are too few"
    assert named(0.3, 1, 0.9, 1.2) == [("1.scale", "it is exactly 1, and 3 numbers like it are not")]
    assert named(0, 0, 0) == [("0.scale", "it is exactly 0, and 2 numbers like it are too")]


def test_filters_of_one_length_and_filters_that_are_nearly_one_are_named() -> None:
    net = normal(nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(6))))
    inputs = torch.randn(1, 8, 14, 14)

    def named() -> list[tuple[str, str]]:
        findings = network_findings(evidence_of(net, inputs))
        return [(each.layer, each.evidence.partition(":")[0]) for each in findings if each.finding != "rounded-weights"]

    assert named() == []
    net[2].weight.data /= net[2].weight.data.flatten(1).norm(dim=1)[:, None, None, None] / 8
    net[4].weight.data = net[4].weight.data.mean(0) * 3 + 0.2 * net[4].weight.data
    assert named() == [
        ("2.weight", "all its filters have the same norm, 8"),
        ("4.weight", "its filters are nearly the same"),
    ]


@pytest.mark.parametrize(("bias", "severity"), [(30.0, "warning"), (-30.0, "note")])
def test_one_bias_of_the_head_is_a_warning_if_every_image_gets_its_class(bias: float, severity: str) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    net[-1].bias.data[3] = bias
    evidence = evidence_of(net.eval(), torch.randn(4, 4, 5, 5))
    scores = tuple(net(image[None]).detach() for (image,) in evidence.inputs)
    [decides] = [each for each in network_findings(replace(evidence, scores=scores)) if each.layer == "4.bias"]
    assert (decides.finding, decides.channels, decides.severity) == ("outlier-weights", (3,), severity)
    assert f"the bias of channel 3 is {bias:g}, " in decides.evidence


def test_scores_that_are_cut_at_a_bound_are_named() -> None:
    net = normal(nn.Sequential(nn.Flatten(), nn.Linear(12, 8)))
    inputs = 5 * torch.randn(4, 3, 2, 2)
    for last, expected in ((nn.Identity(), []), (nn.Hardtanh(), ["(model)"]), (nn.Softsign(), [])):
        scores = tuple(last(net(image[None])).detach() for image in inputs)
        evidence = replace(evidence_of(nn.Sequential(*net, last).eval(), inputs), scores=scores)
        cut = [each for each in network_findings(evidence) if "exactly the best score" in each.evidence]
        assert [each.layer for each in cut] == expected and all(each.severity == "warning" for each in cut)


@pytest.mark.parametrize(("factor", "named"), [(1, False), (1 / 255, True)])
def test_images_that_lost_their_contrast_are_named(factor: float, named: bool) -> None:
    values = np.random.default_rng(0).integers(0, 256, (2, 9, 9, 3), dtype=np.uint8)
    inputs = torch.from_numpy(values).permute(0, 3, 1, 2) / 255 * factor / 0.2 - 2
    net = normal(nn.Sequential(nn.Conv2d(3, 4, 3)))
    evidence = replace(evidence_of(net, inputs), pictures=tuple(map(Image.fromarray, values)))
    findings = [each for each in network_findings(evidence) if each.finding == "input-mismatch"]
    assert ["contrast" in each.evidence for each in findings] == [True] * named


def test_fixed_filters_teachers_and_counters_are_no_fault() -> None:
    net = normal(nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5))))
    net[1].weight.data = torch.ones(8, 8, 3, 3) / 9  # a blur
    nn.init.dirac_(net[2].weight)
    single = nn.Conv2d(8, 1, 3)
    net.teacher = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(2))).eval()
    net.teacher.load_state_dict(
        {name: value for name, value in net.state_dict().items() if name[:2] in ("0.", "3.")}, strict=False
    )
    net.forward = lambda x: single(net[4](net[3](net[2](net[1](net[0](x))))))
    net.single = single
    findings = network_findings(evidence_of(net, torch.randn(2, 8, 9, 9)))
    assert not [each for each in findings if each.finding == "copied-weights" or "same norm" in each.evidence]
