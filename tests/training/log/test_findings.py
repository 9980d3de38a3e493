"""Runs that are broken on purpose have findings that say what is wrong, and where; sound runs have none."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookscope.findings import ranked
from hookscope.training import Monitor
from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.summary import TimedFinding
from tests.nets import Function


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 60,
    every: int = 5,
    scale: float = 1.0,
    before: Callable[[int], None] = lambda _: None,
) -> Run:
    """The run as its log has it, where NaN and Inf are null."""
    with Monitor(net, optimizer, every=every) as monitor:
        for step, (x, y) in enumerate(batches(steps)):
            before(step)
            optimizer.zero_grad()
            F.cross_entropy(net(scale * x), y).backward()
            optimizer.step()
    rows = [{name: value if value == value else None for name, value in row.items()} for row in monitor.rows]
    return Run({"row": "run", "every": every}, rows)


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Noisy pictures of four classes."""
    seeded = torch.Generator().manual_seed(0)
    pictures = torch.randn(4, 3, 8, 8, generator=seeded)
    for _ in range(steps):
        classes = torch.randint(4, (16,), generator=seeded)
        yield pictures[classes] + 0.7 * torch.randn(16, 3, 8, 8, generator=seeded), classes


def net(norm: bool = True, function: type[nn.Module] = nn.ReLU, layers: int = 3, momentum: float = 0.1) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body: list[nn.Module] = []
        for before, wide in pairwise([3] + [8] * layers):
            body.append(nn.Conv2d(before, wide, 3, padding=1))
            body += [nn.BatchNorm2d(wide, momentum=momentum)] if norm else []
            body.append(function())
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)


def named(findings: list[TimedFinding]) -> list[tuple[str, str]]:
    return [(finding.finding, finding.layer) for finding in findings]


@pytest.mark.parametrize("rate", [0.05, 0.001])
def test_a_sound_run_has_no_finding_however_often_it_is_sampled(rate: float) -> None:
    model = net()
    run = train(model, sgd(model, rate), 120, 1)
    assert findings_over_time(run) == []
    assert findings_over_time(Run({}, [row for row in run.rows if row["step"] % 10 == 0])) == []
    [few] = findings_over_time(Run({}, [row for row in run.rows if row["step"] < 2]))
    assert few.finding == "few-samples"
    if rate == 0.05:
        assert run.rows[-1]["loss"] < 0.5 * run.rows[0]["loss"]  # it did learn


def test_adam_and_a_schedule_from_0_to_0_are_sound() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def schedule(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e-3 * min(step / 10, (99 - step) / 30, 1)

    assert findings_over_time(train(model, optimizer, 100, 3, before=schedule)) == []


def test_a_rate_a_hundred_times_too_large() -> None:
    model = net()
    first, *_ = findings_over_time(train(model, sgd(model, 5.0)))
    assert (first.finding, first.step) == ("update-too-large", 0)
    assert "(learning rate 5)" in first.evidence


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.Adam])
def test_a_rate_next_to_0_is_one_finding_for_all_layers(optimizer: Any) -> None:
    model = net()
    [finding] = findings_over_time(train(model, optimizer(model if optimizer is sgd else model.parameters(), 1e-9)))
    assert (finding.finding, finding.step, finding.lasts) == ("update-too-small", 0, True)
    assert finding.layers == ("0", "3", "6", "11")
    assert "; all 3 other layers too" in finding.evidence


def test_zeros_that_a_function_puts_out_are_seen_at_the_layer_behind_it() -> None:
    """The bias of that layer gets a gradient, the weight one of 0; the optimizer is not to blame."""
    model = Function(
        lambda self, x: self.head(torch.relu(self.body(x.flatten(1)))), body=nn.Linear(192, 8), head=nn.Linear(8, 4)
    )
    nn.init.constant_(model.body.bias, -100)
    findings = findings_over_time(train(model, sgd(model)))
    assert named(findings) == [("dead-layer", "head"), ("no-gradient", "body")]
    assert "its input is 0 everywhere: its bias has a gradient of norm" in findings[0].evidence


def test_frozen_weights_beside_a_bias_that_learns_and_zeroed_scales_are_sound() -> None:
    model = net()
    for parameter in list(model.parameters())[:-1]:
        parameter.requires_grad_(False)
    assert "no-update" not in [finding.finding for finding in findings_over_time(train(model, sgd(model)))]
    model = net()
    nn.init.zeros_(model[4].weight)
    nn.init.constant_(model[4].bias, 0.1)
    assert "update-too-large" not in dict(named(findings_over_time(train(model, sgd(model), every=1))))


def test_a_bias_far_below_0_kills_the_relu_and_what_comes_before_gets_no_gradient() -> None:
    model = net(norm=False)
    model[2].bias.data.fill_(-10)
    dead, cut_off = findings_over_time(train(model, sgd(model)))
    assert named([dead, cut_off]) == [("dead-layer", "3"), ("no-gradient", "2")]
    text = "to the end: all 8 channels are 0 for the whole batch; this explains dead-channels in '5', no-update in '4'"
    assert dead.evidence.endswith(text)
    assert cut_off.evidence.endswith("to the end: its gradient is 0 everywhere; '0' too")
    assert cut_off.layers == ("0", "2")


def test_a_root_of_0_spoils_the_gradient_before_it_and_then_everything() -> None:
    model = net()
    root = model[5] = Function(lambda x: (x - x.amin()).sqrt() if root.is_on else x.relu())

    def switch(step: int) -> None:
        model[5].is_on = step >= 20

    [finding] = findings_over_time(train(model, sgd(model), before=switch))
    assert (finding.finding, finding.layer, finding.step, finding.lasts) == ("non-finite", "4", 20, True)
    assert finding.numbers["phase"] == "backward"
    text = "its gradient are NaN or Inf; all activations are finite, and so is the gradient of '6' after it"
    assert text in finding.evidence
    assert finding.evidence.endswith("; 11 more layers too; at step 15 everything was finite")


def test_twenty_sigmoids_vanish() -> None:
    model = net(False, nn.Sigmoid, 20)
    findings = findings_over_time(train(model, sgd(model), 30))
    assert {finding.finding for finding in findings} == {"vanishing-gradient"}
    assert findings[0].layers[0] == "0" and findings[0].layer == findings[0].layers[-1]
    assert "worst in '0'" in findings[0].evidence


def branches(is_detached: bool) -> Function:
    """Two branches, of which the right one can be detached."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        left, right = net.left(x).relu().mean((2, 3)), net.right(x).relu().mean((2, 3))
        return net.fc(torch.cat([left, right.detach() if is_detached else right], 1))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Function(forward, left=nn.Conv2d(3, 8, 3), right=nn.Conv2d(3, 8, 3), fc=nn.Linear(16, 4))


def test_a_branch_that_does_not_learn() -> None:
    model = branches(is_detached=True)
    [detached] = findings_over_time(train(model, sgd(model)))
    assert (detached.finding, detached.layer) == ("no-gradient", "right")
    assert detached.evidence.endswith("to the end: no gradient arrives")
    model = branches(is_detached=False)
    left_out = torch.optim.SGD([*model.left.parameters(), *model.fc.parameters()], 0.05)
    assert named(findings_over_time(train(model, left_out))) == [("no-update", "right")]
    model.right.requires_grad_(False)
    [frozen] = findings_over_time(train(model, sgd(model)))
    assert (frozen.finding, frozen.layers) == ("frozen", ("right",))


def test_running_statistics_that_hardly_move() -> None:
    model = net(momentum=1e-4)
    [finding] = findings_over_time(train(model, sgd(model), 100, scale=5.0))
    assert (finding.finding, finding.layer, finding.step, finding.lasts) == ("batchnorm-drift", "1", 50, True)


def test_a_rate_that_jumps_is_a_finding_from_there_on() -> None:
    model = net()
    optimizer = sgd(model)

    def jump(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 if step < 60 else 20.0

    findings = findings_over_time(train(model, optimizer, 120, 2, before=jump))
    assert {"loss-rises", "update-too-large"} <= {finding.finding for finding in findings}
    assert all(finding.step >= 60 for finding in findings)
    assert findings == ranked(sorted(findings, key=lambda finding: finding.time or 0))
