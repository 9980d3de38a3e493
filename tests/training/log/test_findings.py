"""Findings on runs that are broken on purpose, on their losses and their totals; sound runs have none."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookscope.findings import ranked
from hookscope.training import Monitor
from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.summary import TimedFinding, summary
from tests.nets import Function
from tests.training import watched


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 60,
    every: int = 5,
    scale: float = 1.0,
    before: Callable[[int], object] = lambda _: None,
) -> Run:
    """The run as its log has it, where NaN and Inf are null."""
    data = ((scale * x, y) for step, (x, y) in enumerate(batches(steps)) if not before(step))
    with Monitor(net, optimizer, every=every) as monitor:
        watched.train(net, optimizer, data)
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


def test_a_new_optimizer_in_each_step_is_named() -> None:
    net, x = nn.Linear(2, 2), torch.ones(3, 2)
    with Monitor(every=1) as monitor:
        for _ in range(12):
            optimizer = torch.optim.Adam(net.parameters(), 1e-3)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    found = [(finding.finding, finding.severity, finding.evidence) for finding in findings_over_time(monitor.run)]
    assert ("optimizer-settings", "warning", "12 optimizers made one step each") in found


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
    assert (finding.finding, finding.step, finding.lasts) == ("learning-rate-vanishes", 0, True)
    assert finding.layers == () and "; learning rate 1e-09, a step changes a weight by up to" in finding.evidence


@pytest.mark.parametrize("relu", [F.relu, torch.relu, lambda x: x.relu(), lambda x: x.clamp(min=0)])
def test_a_layer_below_0_before_a_function_is_dead(relu: Any) -> None:
    """The layer before the function is named, for the weight behind it gets a gradient of 0."""
    model = Function(
        lambda self, x: self.head(relu(self.body(x.flatten(1)))), body=nn.Linear(192, 8), head=nn.Linear(8, 4)
    )
    nn.init.constant_(model.body.bias, -100)
    findings = findings_over_time(train(model, sgd(model)))
    assert named(findings) == [("dead-layer", "body")]
    text = " and its gradient is 0: the activation behind it passes nothing on"
    assert "its largest value is -9" in findings[0].evidence and text in findings[0].evidence


def test_frozen_weights_beside_a_bias_that_learns_and_zeroed_scales_are_sound() -> None:
    model = net()
    for parameter in list(model.parameters())[:-1]:
        parameter.requires_grad_(False)
    assert "no-update" not in [finding.finding for finding in findings_over_time(train(model, sgd(model)))]
    model = net()
    nn.init.zeros_(model[4].weight)
    nn.init.constant_(model[4].bias, 0.1)
    assert "update-too-large" not in dict(named(findings_over_time(train(model, sgd(model), every=1))))


def test_a_bias_far_below_0_kills_the_relu_and_explains_what_comes_before() -> None:
    model = net(norm=False)
    model[2].bias.data.fill_(-10)
    [dead] = findings_over_time(train(model, sgd(model)))
    assert named([dead]) == [("dead-layer", "3")]
    text = "to the end: all 8 channels are 0 for the whole batch; this explains dead-channels in '5', no-gradient in"
    assert dead.evidence.endswith(f"{text} '0' and '2', no-update in '4'")


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
    assert finding.evidence.endswith("; 11 more layers too; at step 15, sampled before, everything was finite")


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


@pytest.mark.parametrize("dead", [0, 20])
def test_steps_that_were_too_large_for_a_while_are_a_note_unless_channels_died_of_them(dead: int) -> None:
    rows = [
        {
            "step": step, "time": float(step), "layer": "a", "type": "ReLU", "optimizer": 0, "loss": 3 - step / 10,
            "weight_norm": 1.0, "update_to_weight": 0.7 if step < 5 else 1e-3, "learning_rate": 3.0,
            "channels": 32, "channel_values": 99, "dead_channels": dead if step > 5 else 0, "activation_std": 1.0,
        }
        for step in range(12)
    ]  # fmt: skip
    severities = {finding.finding: finding.severity for finding in findings_over_time(Run({}, rows))}
    assert severities == (
        {"update-too-large": "warning", "dead-channels": "warning"} if dead else {"update-too-large": "note"}
    )
    assert next(iter(severities)) == "update-too-large"


def told(
    losses: Sequence[float | None], optimizers: int = 1, classes: int | None = None, every: int = 10
) -> list[TimedFinding]:
    rows = [
        {"step": every * at, "time": float(at), "layer": "a", "loss": loss, "optimizer": at % optimizers}
        for at, loss in enumerate(losses)
    ]
    return findings_over_time(Run({}, rows, facts=[{"step": 0, "optimizer": 0, "classes": classes}]))


def noise(count: int, size: float = 0.1) -> np.ndarray:
    return size * np.random.default_rng(0).standard_normal(count)


FALLING = 2 * np.exp(-np.arange(60) / 20) + 0.2


@pytest.mark.parametrize(
    "losses",
    [
        FALLING,
        FALLING + noise(60),
        FALLING - 5,
        FALLING[::-1][:5],
        np.zeros(30),
        [None] * 30,
        1e-6 * FALLING[::-1] * (np.arange(60) > 20) + FALLING * (np.arange(60) <= 20),
    ],
    ids=range(7),
)
def test_sound_losses(losses: Sequence[float]) -> None:
    assert told([None if loss is None else float(loss) for loss in losses]) == []


@pytest.mark.parametrize(
    "losses",
    [1 + noise(60, 0.3), np.full(20, 2.0), 2 + noise(60, 0.01), np.r_[3.0, 2.99, np.full(20, 3.0)]],
    ids=["noise", "constant", "nearly constant", "a little better for one step"],
)
def test_a_loss_that_ends_where_it_began(losses: np.ndarray) -> None:
    [found] = told(losses.tolist())
    assert (found.finding, found.severity, found.step, found.lasts) == ("loss-flat", "warning", 0, True)
    assert found.numbers["last"] == pytest.approx(losses[-max(3, len(losses) // 4) :].mean())


@pytest.mark.parametrize(("classes", "is_chance"), [(8, True), (1000, False), (None, False)])
def test_a_loss_that_stays_at_the_logarithm_of_the_number_of_classes_is_that_of_guessing(
    classes: int | None, is_chance: bool
) -> None:
    [found] = told([2.07] * 30, classes=classes)
    assert ("guessing among 8 classes gives 2.079" in found.evidence) is is_chance  # ln(8)


@pytest.mark.parametrize(("loss", "is_high"), [(20.0, True), (5.0, False)])
def test_a_first_loss_far_above_guessing_is_of_the_initial_weights(loss: float, is_high: bool) -> None:
    rows = [{"step": step, "layer": "a", "loss": loss, "optimizer": 0, "update_to_weight": 3.0} for step in range(8)]
    facts = [
        {
            "step": 0,
            "optimizer": 0,
            "classes": 4,
            "loss_is_mean": True,
            "loss": loss,
            "optimizer_type": "SGD",
            "rate": 1.0,
        }
    ]
    names = [each.finding for each in findings_over_time(Run({}, rows, facts=facts))]
    assert ("initial-loss" in names) is is_high and (names[0] == "initial-loss") is is_high
    other = findings_over_time(Run({}, rows, facts=[facts[0] | {"loss_is_mean": False}]))
    assert "initial-loss" not in [each.finding for each in other]  # a sum of losses or of samples


def test_a_loss_far_below_guessing_may_stay() -> None:
    """As of a run that goes on with trained weights."""
    assert told((0.1 + noise(30, 0.01)).tolist(), classes=4) == []
    assert [each.finding for each in told((0.2 + noise(30, 0.01)).tolist(), classes=4)] == ["loss-flat"]


FEW = [3.16, 3.14, 3.1, 3.08, 3.04, 3.06, 3.0, 3.0, 3.0, 2.99, 3.0, 3.0]


@pytest.mark.parametrize(
    ("losses", "classes"),
    [([2.53, 2.35, 2.55, 2.47, 2.39, 2.52, 2.38, 2.41, 2.41], 10), (FEW, 20)],
    ids=["worse than guessing", "from above to guessing"],
)
def test_few_losses_that_end_with_guessing_are_flat(losses: list[float], classes: int) -> None:
    [found] = told(losses, classes=classes)
    assert found.finding == "loss-flat" and f"guessing among {classes} classes" in found.evidence


@pytest.mark.parametrize("spread", [0.0, 0.004])
def test_a_loss_that_falls_slowly_past_that_of_guessing_is_not_flat(spread: float) -> None:
    """As of a small head on a frozen backbone; ln(4) is 1.386."""
    losses = np.linspace(1.403, 1.378, 40) + noise(40, spread)
    assert told(losses.tolist(), classes=4) == []


def test_a_loss_must_rise_for_good() -> None:
    rising = np.concatenate([FALLING[:40], np.linspace(FALLING[39], 3, 20)]) + noise(60, 0.02)
    [found] = told(rising.tolist())
    assert (found.finding, found.layer, found.lasts, found.last_step) == ("loss-rises", "", True, 590)
    assert 400 <= found.step <= 450
    assert f"at step 590 it is {found.numbers['last']:.4g} (median of the last)" in found.evidence
    bump = FALLING + 0.8 * np.exp(-(((np.arange(60) - 40) / 4) ** 2))
    assert "loss-rises" not in {found.finding for found in told(bump.tolist())}
    for lowest, rises in ((0.1, True), (-0.4, False)):  # a loss of both signs, as of a policy gradient
        losses = np.concatenate([np.linspace(0.4, lowest, 40), np.linspace(lowest, 0.9, 20)]) + noise(60, 0.02)
        assert ("loss-rises" in {found.finding for found in told(losses.tolist())}) is rises


def test_leaps_are_found_but_losses_of_two_optimizers_may_rise_and_few_steps_be_flat() -> None:
    losses = FALLING.tolist()
    losses[30] = 9.0
    [found] = told(losses)
    assert (found.finding, found.step, found.last_step, found.lasts) == ("loss-spike", 300, 300, False)
    assert found.evidence.startswith("at step 300 (30 s): the loss is 9, about 0.7")
    losses[45] = 7.0
    [found] = told(losses)
    assert (found.step, found.last_step, found.numbers["times"]) == (300, 450, 2)
    assert told(FALLING[::-1].tolist(), optimizers=2) == []
    assert told([2.0] * 30, every=1) == []


ROWS: list[dict[str, Any]] = [
    {"step": step, "time": float(step), "layer": layer, "loss": 4.0 - step / 50}
    for step in (0, 50, 100)
    for layer in "ab"
]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (None, "not ended: it still runs, or was killed"),
        ({"reason": "done", "status": 0}, "done"),
        ({"reason": "exception", "status": 1}, "ended by an exception with status 1"),
        ({"reason": "stopped", "status": None}, "stopped"),
        ({"reason": "exit", "status": 2}, "ended by sys.exit with status 2"),
        ({"reason": "struck by lightning"}, "struck by lightning"),
    ],
)
def test_how_it_ended(end: dict[str, Any] | None, words: str) -> None:
    found = summary(Run({}, ROWS, [], end))
    assert str(found) == f"101 steps, 6 sampled, of 2 layers in 1 min 40 s; loss 4 -> 2; {words}".replace("6", "3", 1)


def test_models_optimizers_losses_and_steps_that_are_not_seen() -> None:
    rows = [row | {"optimizer": at % 2, "model": at % 2, "loss": None} for at, row in enumerate(ROWS)]
    found = summary(Run({}, rows))
    assert (found.models, found.optimizers, found.sampled, found.first_loss) == (2, 2, 6, None)
    assert str(found).startswith(
        "202 steps, 6 sampled, of 2 layers in 2 models with 2 optimizers in 1 min 40 s; not ended"
    )
    found = summary(Run({"started": "today"}, ROWS, [], {"step": 140, "time": 7500.0, "reason": "done"}))
    assert (found.steps, found.sampled, found.duration, found.started) == (141, 3, 7500.0, "today")
    assert summary(Run({}, rows, [], {"step": 100, "steps": 205})).steps == 205
    assert found.last_loss == 2.0


def spoiled(lost: set[int]) -> list[dict[str, Any]]:
    return [row | ({"loss": None, "gradient_non_finite": 3} if row["step"] in lost else {}) for row in ROWS]


def test_a_loss_is_lost_unless_it_comes_back_or_was_only_not_seen() -> None:
    found = summary(Run({}, spoiled({50, 100}), [], {"reason": "done"}))
    assert (found.last_loss, found.lost_at) == (None, 50)
    assert "; loss 4 -> nan or inf (from step 50 on); done" in str(found)
    found = summary(Run({}, spoiled({50})))
    assert (found.last_loss, found.lost_at) == (2.0, None)
    unseen = [row | {"loss": row["loss"] if row["step"] == 0 else None} for row in ROWS]
    assert summary(Run({}, unseen)).lost_at is None
    assert summary(Run({}, [row | {"loss": None, "non_finite": 1} for row in ROWS])).lost_at is None


def test_a_run_that_was_stopped_says_at_which_step_and_one_of_nothing_is_empty() -> None:
    note = {"note": "non-finite", "step": 105, "text": "the loss is NaN"}
    found = summary(Run({}, ROWS, [note], {"reason": "stopped", "step": 104}))
    assert (found.stopped_at, found.ended) == (105, "stopped at the first NaN or Inf, in step 105")
    assert str(summary(Run({}))) == "0 steps, 0 sampled, of 0 layers; not ended: it still runs, or was killed"
