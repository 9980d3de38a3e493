"""What would undo a drift of a BatchNorm: tried on the images, and named only where it does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.inspection.findings import network_findings
from hookscope.inspection.tried import what_would_fit
from tests.inspection.faults import evidence_of


class Block(nn.Module):
    """Two convolutions with BatchNorms and a skip around them."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.step, self.conv1, self.conv2 = step, nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def usual(b: Any, x: Tensor) -> Tensor:
    return b.bn2(b.conv2(b.bn1(b.conv1(x)).relu())) + x


def no_skip(b: Any, x: Tensor) -> Tensor:
    return b.bn2(b.conv2(b.bn1(b.conv1(x)).relu()))


def twice(b: Any, x: Tensor) -> Tensor:
    return usual(b, x) + x


def joined(b: Any, x: Tensor) -> Tensor:
    half = b.bn1(b.conv1(x)).relu()
    return b.bn2(b.conv2(torch.cat([half[:, :4], x[:, :4]], 1))) + x


def turned(b: Any, x: Tensor) -> Tensor:
    half = b.bn1(b.conv1(x)).relu()
    return b.bn2(b.conv2(torch.cat([x[:, :4], half[:, :4]], 1))) + x


@pytest.mark.parametrize(
    ("right", "wrong", "layer", "place", "words"),
    [
        (usual, no_skip, "2.bn1", "1", "with the input of 1 added before 2.conv1"),
        (usual, twice, "2.bn1", "1", "without the input of 1 before 2.conv1"),
        (joined, turned, "1.bn2", "1.bn2", "with what 1.conv2 reads in another order"),
    ],
)
def test_the_change_that_undoes_a_drift_is_named(
    right: Callable[[Any, Tensor], Tensor], wrong: Callable[[Any, Tensor], Tensor], layer: str, place: str, words: str
) -> None:
    head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    net: Any = nn.Sequential(Block(right), Block(right), Block(right), head)
    images = torch.randn(300, 8, 10, 10).cumsum(-1).div(3) + torch.randn(8, 1, 1)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.3)
        elif isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.weight.data.uniform_(0.5, 2)
            module.bias.data.normal_()
    net.train()
    for batch in images.split(50):
        net(batch)
    net.eval()
    few = images[:8]
    assert not [each for each in network_findings(evidence_of(net, few)) if each.finding == "sudden-drift"], "sound"
    net[1].step = wrong
    evidence = evidence_of(net, few)
    found = what_would_fit(evidence, layer)
    assert found is not None and found[:2] == (place, words) and found[2] > 2.5
    [finding] = [each for each in network_findings(evidence) if "fit its running" in each.evidence]
    assert (finding.layer, finding.severity) == (place, "warning")
    assert finding.evidence.startswith(f"{words}, the inputs of {layer} fit")


def test_statistics_of_two_layers_that_were_exchanged_are_named_and_a_strange_layer_is_not() -> None:
    net: Any = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)))
    images = torch.randn(100, 8, 12, 12) + torch.arange(8.0)[:, None, None]
    for at, layer in enumerate(net):
        nn.init.normal_(layer[0].weight, std=0.2 + 0.3 * at)
        layer[1].momentum = None
    net.train()(images)
    net.eval()
    first, second = (net[at][1] for at in (1, 3))
    kept = {name: value.clone() for name, value in first.state_dict().items()}
    theirs = {name: value.clone() for name, value in second.state_dict().items()}
    first.load_state_dict(theirs)
    second.load_state_dict(kept)
    found = what_would_fit(evidence_of(net, images[:8]), "1.1")
    assert found is not None and found[1] == "with the running statistics of 3.1"
    first.load_state_dict(kept)
    second.load_state_dict(theirs)
    net[1][0].weight, net[2][0].weight = net[2][0].weight, net[1][0].weight
    found = what_would_fit(evidence_of(net, images[:8]), "1.1")
    assert found is not None and found[1] == "with the weights of 2.0 in 1.0"
    net[1][0].weight, net[2][0].weight = net[2][0].weight, net[1][0].weight
    nn.init.normal_(net[1][0].weight, std=2.0)
    assert what_would_fit(evidence_of(net, images[:8]), "1.1") is None
