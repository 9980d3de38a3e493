"""Common mistakes in training scripts are named by their cause, and watching them changes nothing."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler as schedules

from hookscope.training import Monitor, findings_over_time, read_runs
from hookscope.training.log.file import Run
from tests.nets import Function
from tests.training.watched import train, validations

CLASSES = 8
MISTAKES: dict[str, tuple[Callable[[], None], str]] = {}
"""The script of each mistake, and the finding that names it."""


def mistake(finding: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(script: Callable[[], None]) -> Callable[[], None]:
        MISTAKES[script.__name__] = (script, finding)
        return script

    return register


class Convolutional(nn.Module):
    """A backbone with BatchNorm and dropout, and a classifier."""

    def __init__(self, features: Callable[..., Callable[[Tensor], Tensor]] = lambda backbone: backbone) -> None:
        super().__init__()
        self.features = features
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(16 * 3 * 3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.features(self.backbone)(x).flatten(1)))
        return logits


def perceptron(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES), *last
    )


def stacked(activation: nn.Module, depth: int, factor: float = 1.0) -> nn.Module:
    body = [part for _ in range(depth) for part in (nn.Linear(32, 32), activation)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 32), activation, *body, nn.Linear(32, CLASSES))
    for parameter in net.parameters():
        parameter.data *= factor
    return net


def batches(steps: int = 60, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy pictures ``(N, 1, 12, 12)`` of zero mean and unit size, and their classes."""
    random = torch.Generator().manual_seed(5)
    templates = torch.randn(CLASSES, 1, 12, 12, generator=random)
    for _ in range(steps):
        labels = torch.randint(0, CLASSES, (size,), generator=random)
        yield 0.8 * templates[labels] + 0.6 * torch.randn(size, 1, 12, 12, generator=random), labels


def plain(
    build: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], Optimizer],
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda inputs, labels: (inputs, labels),
    loss_of: Callable[..., Tensor] = F.cross_entropy,
    size: int = 16,
    schedule: Callable[[Optimizer], Any] | None = None,
    spoil: Callable[[nn.Module], object] = lambda net: None,
    **options: Any,
) -> Callable[[], None]:
    """A script that is the plain loop on batches that are changed, with a schedule of each step.

    The model is spoilt when its optimizer exists.
    """

    def script() -> None:
        net = build()
        own = optimizer(net)
        spoil(net)
        data = (change(inputs, labels) for inputs, labels in batches(size=size))
        if schedule is not None:
            options["after_step"] = schedule(own).step
        train(net, own, data, loss_of, **options)

    return script


def by(kind: Callable[..., Optimizer], **options: Any) -> Callable[[nn.Module], Optimizer]:
    """An optimizer of all parameters."""
    return lambda net: kind(net.parameters(), **options)


def sgd(rate: float, **options: Any) -> Callable[[nn.Module], Optimizer]:
    return by(SGD, lr=rate, **options)


def as_picture(x: Tensor) -> Tensor:
    """From 0 to 1."""
    return (x * 0.2 + 0.5).clamp(0, 1)


def normalised(x: Tensor) -> Tensor:
    return (x - 0.45) / 0.22


def scheduler_alone(optimizer: Optimizer) -> Any:
    scheduler = schedules.LambdaLR(optimizer, lambda step: 1.0)
    scheduler.optimizer._opt_called = True  # no warning
    return scheduler


def with_validation(in_eval_mode: bool, measure: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> None:
    """Three epochs, each with a validation that leaves the mode as it is."""
    net, criterion, data = Convolutional(), nn.CrossEntropyLoss(), list(batches())
    optimizer = sgd(0.05)(net)
    for epoch in range(3):
        train(net, optimizer, data[20 * epoch : 20 * epoch + 20], criterion)
        net.train(not in_eval_mode)
        with torch.inference_mode():
            for inputs, labels in data[:2]:
                measure(net(inputs), labels)


def with_new_weights(net: nn.Module) -> None:
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(nn.init.kaiming_normal_(layer.weight.detach().clone()))


def fading() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    steps = count()
    return lambda x, y: (x / (1 + 0.2 * next(steps)), y)


def dice(p: Tensor, targets: Tensor, is_squared: bool = False) -> Tensor:
    return 1 - ((2 * (targets * p).sum(1) + 1) / (((p * p if is_squared else p) + targets).sum(1) + 1)).mean()


def with_equal_weights(net: nn.Module) -> nn.Module:
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.02)
    return net


def with_constant_layer(build: Callable[[], nn.Module]) -> nn.Module:
    net = build()
    nn.init.constant_(net.get_parameter("backbone.0.weight"), 0.1)
    return net


def with_zeroed_weights(net: nn.Module) -> None:
    for parameter in net.parameters():
        nn.init.zeros_(parameter)


FIRST, _ = next(batches())
SMOOTH, BCE = nn.CrossEntropyLoss(label_smoothing=0.1), nn.BCEWithLogitsLoss()
PLAIN: dict[str, dict[str, Callable[[], None]]] = {
    "no-step": {
        "no_step": plain(Convolutional, by(Adam), leaves_out="step"),
        "only_the_scheduler_steps": plain(perceptron, sgd(0.1), schedule=scheduler_alone, leaves_out="step"),
    },
    "gradients-accumulate": {"no_zero_grad": plain(Convolutional, sgd(0.02), leaves_out="zero_grad")},
    "no-gradient": {
        "no_backward": plain(perceptron, sgd(0.1), leaves_out="backward"),
        "zero_grad_after_backward": plain(perceptron, sgd(0.1), before_step=nn.Module.zero_grad),
        "all_frozen": plain(
            lambda: perceptron().requires_grad_(False),
            sgd(0.1),
            loss_of=lambda logits, y: F.cross_entropy(logits, y).requires_grad_(),
        ),
        "clipped_to_zero": plain(
            Convolutional, sgd(0.1), before_step=lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.0)
        ),
        "clipped_to_almost_nothing": plain(
            Convolutional, sgd(0.1), before_step=lambda net: nn.utils.clip_grad_value_(net.parameters(), 1e-12)
        ),
        "clipped_to_a_thousandth": plain(
            Convolutional, sgd(0.01), before_step=lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        ),
        "detached_loss": plain(
            Convolutional,
            by(Adam),
            loss_of=lambda logits, y: torch.tensor(F.cross_entropy(logits, y).item(), requires_grad=True),
        ),
        "backbone_under_no_grad": plain(partial(Convolutional, features=torch.no_grad()), sgd(0.1)),
        "detached_features": plain(
            partial(Convolutional, features=lambda backbone: lambda x: backbone(x).detach()), sgd(0.1)
        ),
        "loss_times_zero": plain(perceptron, sgd(0.1), loss_of=lambda logits, y: 0.0 * F.cross_entropy(logits, y)),
        "accuracy_as_loss": plain(
            perceptron, sgd(0.1), loss_of=lambda logits, y: (logits.argmax(1) != y).float().mean().requires_grad_()
        ),
    },
    "eval-mode": {
        "trained_in_eval_mode": plain(lambda: Convolutional().eval(), sgd(0.05)),
        "no_train_after_validation": partial(with_validation, in_eval_mode=True),
        "validated_in_train_mode": partial(with_validation, in_eval_mode=False),
        "loss_module_in_train_mode": partial(with_validation, in_eval_mode=False, measure=nn.CrossEntropyLoss()),
        "accuracy_in_train_mode": partial(
            with_validation, in_eval_mode=False, measure=lambda logits, labels: logits.argmax(1) == labels
        ),
    },
    "duplicate-filters": {
        "weights_of_one_value": plain(lambda: with_equal_weights(perceptron()), sgd(0.05)),
        "one_layer_of_one_value": plain(partial(with_constant_layer, Convolutional), by(Adam)),
    },
    "input-scale": {
        "inputs_up_to_255": plain(perceptron, sgd(0.01), lambda x, y: ((x * 60 + 128).clamp(0, 255).round(), y)),
        "divided_by_255_twice": plain(perceptron, sgd(0.1), lambda x, y: (as_picture(x) / 255, y)),
        "divided_twice_and_normalised": plain(perceptron, sgd(0.1), lambda x, y: (normalised(as_picture(x) / 255), y)),
        "inputs_that_fade": lambda: plain(perceptron, sgd(0.3), fading())(),
        "normalised_twice": plain(Convolutional, sgd(0.05), lambda x, y: (normalised(normalised(as_picture(x))), y)),
    },
    "target-scale": {
        name: plain(perceptron, optimizer, loss_of=lambda z, y, loss=loss: loss(z[:, 0], 1e5 * (1 + y)))
        for name, optimizer, loss in (
            ("prices_as_targets", by(Adam), F.mse_loss),
            ("prices_that_explode", sgd(0.01), nn.SmoothL1Loss(beta=1e9)),
            ("prices_and_absolute_errors", by(Adam), nn.L1Loss()),
        )
    }
    | {
        f"targets_beyond_{kind.__name__}": plain(
            partial(perceptron, kind()), by(Adam), loss_of=lambda z, y: F.mse_loss(z[:, :1], (y[:, None] - 3.5) / 2)
        )
        for kind in (nn.Sigmoid, nn.Tanh, nn.ReLU)
    },
    "input-constant": {
        "one_picture_for_all": plain(Convolutional, sgd(0.05), lambda x, y: (x[:1].expand_as(x).contiguous(), y)),
        "the_first_batch_again_and_again": plain(perceptron, by(Adam), lambda x, y: (FIRST, y)),
        "empty_pictures": plain(Convolutional, sgd(0.05), lambda x, y: (torch.zeros_like(x), y)),
    },
    "target-constant": {"one_label_for_all": plain(perceptron, sgd(0.05), lambda x, y: (x, torch.zeros_like(y)))},
    "probabilities-as-logits": {
        "softmax_in_the_model": plain(lambda: perceptron(nn.Softmax(dim=1)), sgd(0.1), loss_of=nn.CrossEntropyLoss()),
        "softmax_and_functional_loss": plain(
            Convolutional, by(Adam), loss_of=lambda logits, y: F.cross_entropy(torch.softmax(logits, -1), y)
        ),
        "softmax_by_hand": plain(
            perceptron, sgd(0.1), loss_of=lambda z, y: SMOOTH(z.exp() / z.exp().sum(1, keepdim=True), y)
        ),
        "sigmoid_and_bce_with_logits": plain(
            lambda: perceptron(nn.Sigmoid()), by(Adam), loss_of=lambda p, y: BCE(p, F.one_hot(y, CLASSES).float())
        ),
    },
    "loss-input": {
        "relu_before_cross_entropy": plain(lambda: perceptron(nn.ReLU()), sgd(0.1)),
        "softmax_over_the_batch": plain(
            perceptron, by(Adam), loss_of=lambda logits, y: F.nll_loss(F.log_softmax(logits, dim=0), y)
        ),
        "column_against_row": plain(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 1)),
            sgd(0.01),
            lambda x, y: (x, y.float()),
            nn.MSELoss(),
        ),
        "nll_loss_of_logits": plain(perceptron, sgd(0.001), loss_of=nn.NLLLoss()),
        "nll_loss_of_probabilities": plain(lambda: perceptron(nn.Softmax(1)), by(Adam), loss_of=nn.NLLLoss()),
        "nll_loss_of_another_activation": plain(lambda: perceptron(nn.ELU()), sgd(0.001), loss_of=nn.NLLLoss()),
        "kl_div_of_probabilities": plain(
            perceptron,
            sgd(0.1),
            loss_of=lambda z, y: (
                F.cross_entropy(z, y) + F.kl_div(z.softmax(1), F.one_hot(y, CLASSES).float(), reduction="sum")
            ),
        ),
        "kl_div_of_logits": plain(
            perceptron, sgd(0.01), loss_of=lambda z, y: F.kl_div(z, torch.full_like(z, 1 / CLASSES), reduction="sum")
        ),
        "log_of_a_softmax_that_reaches_0": plain(
            perceptron, sgd(0.5), lambda x, y: (20 * x, y), lambda z, y: -z.softmax(1).log()[range(len(y)), y].mean()
        ),
        "several_labels_of_a_sample": plain(
            perceptron,
            by(Adam),
            loss_of=lambda z, y: F.cross_entropy(z, (F.one_hot(y, CLASSES) + F.one_hot(y // 2, CLASSES)).float()),
        ),
        "batches_without_a_target": plain(
            perceptron,
            sgd(0.05),
            lambda x, y: (x, y if y[0] > 3 else torch.full_like(y, 255)),
            nn.CrossEntropyLoss(ignore_index=255),
        ),
        "softmax_over_the_columns": plain(
            lambda: nn.Conv2d(1, 2, 3, padding=1),
            by(Adam),
            lambda x, y: (x, (x[:, 0] > 0).long()),
            lambda z, y: F.nll_loss(F.log_softmax(z, -1), y),
        ),
        "dice_of_logits": plain(perceptron, by(Adam), loss_of=lambda z, y: dice(z, F.one_hot(y, CLASSES))),
        "labels_of_minus_1": plain(
            perceptron, sgd(0.01), loss_of=lambda z, y: BCE(z, 2 * F.one_hot(y, CLASSES).float() - 1)
        ),
    },
    "loss-maximized": {
        "negated_loss": plain(perceptron, sgd(0.01), loss_of=lambda logits, y: -F.cross_entropy(logits, y)),
        "loss_maximised": plain(perceptron, sgd(0.01, maximize=True)),
    },
    "learning-rate-vanishes": {
        "rate_of_zero": plain(perceptron, sgd(0.0)),
        "rate_too_small_for_float32": plain(Convolutional, by(Adam, lr=1e-12)),
        "rate_too_small_for_the_run": plain(perceptron, by(Adam, lr=1e-6)),
        "warm_up_longer_than_the_run": plain(
            perceptron, by(Adam), schedule=lambda optimizer: schedules.LinearLR(optimizer, 1e-4, 1.0, 10_000)
        ),
        "cosine_of_epochs_each_batch": plain(
            Convolutional, by(Adam), schedule=lambda optimizer: schedules.CosineAnnealingLR(optimizer, 10)
        ),
        "exponential_decay_each_batch": plain(
            Convolutional, sgd(0.1), schedule=lambda optimizer: schedules.ExponentialLR(optimizer, 0.1)
        ),
        "steps_of_epochs_each_batch": plain(
            Convolutional, by(AdamW, lr=1e-3), schedule=lambda optimizer: schedules.StepLR(optimizer, 2)
        ),
        "epochs_given_where_steps_are_counted": plain(
            perceptron, sgd(0.1), schedule=lambda optimizer: schedules.PolynomialLR(optimizer, 5, power=2)
        ),
    },
    "optimizer-settings": {
        "rate_of_100": plain(perceptron, by(Adam, lr=100)),
        "momentum_of_1": plain(perceptron, sgd(0.05, momentum=1.0)),
        "weight_decay_of_10": plain(perceptron, sgd(0.05, weight_decay=10)),
    },
    "batchnorm-small-batch": {
        "batches_of_two": plain(
            lambda: nn.Sequential(
                nn.Flatten(), nn.Linear(144, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES)
            ),
            sgd(0.05),
            size=2,
        ),
        "batches_of_one": plain(Convolutional, sgd(0.01), size=1),
    },
    "not-optimized": {
        "new_head_after_the_optimizer": plain(
            Convolutional, sgd(0.05), spoil=lambda net: setattr(net, "head", nn.Linear(16 * 3 * 3, CLASSES))
        ),
        "optimizer_of_a_copy": plain(perceptron, lambda net: sgd(0.1)(copy.deepcopy(net))),
        "parameters_replaced": plain(perceptron, sgd(0.1), spoil=with_new_weights),
        "backbone_forgotten": plain(Convolutional, lambda net: sgd(0.05)(net.head)),
    },
    "loss-scale": {
        "every_step_is_skipped": torch.autocast("cpu", torch.float16)(
            plain(
                perceptron,
                sgd(0.05),
                loss_of=lambda logits, y: F.cross_entropy(logits.float(), y) + logits.float().sum() * float("inf"),
                scaled=True,
            )
        ),
        "clipped_before_unscale": plain(
            Convolutional,
            sgd(0.05),
            before_step=lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
            scaled=True,
        ),
    },
    "dead-layer": {
        "all_weights_zero": plain(perceptron, sgd(0.1), spoil=with_zeroed_weights),
        "biases_far_below_zero": plain(
            perceptron, sgd(0.05), spoil=lambda net: nn.init.constant_(net.get_parameter("3.bias"), -30.0)
        ),
        "relu_after_the_output": plain(
            lambda: perceptron(nn.ReLU()),
            sgd(0.05),
            loss_of=lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).float()),
            spoil=lambda net: nn.init.constant_(net.get_parameter("5.bias"), -30.0),
        ),
    },
    "non-finite": {
        "slope_of_a_root_at_0": plain(
            perceptron,
            sgd(0.05),
            loss_of=lambda z, y: F.cross_entropy((z - z.detach()).square().sum(1, True).sqrt() + z, y),
        ),
        "mean_of_no_value": plain(
            perceptron, sgd(0.05), loss_of=lambda z, y: F.cross_entropy(z, y, reduction="none")[y < 0].mean()
        ),
    },
    "vanishing-gradient": {
        f"eight_sigmoids_and_{kind.__name__}": plain(
            lambda: stacked(nn.Sigmoid(), 7), by(kind, lr=rate), lambda x, y: (torch.randn_like(x), y)
        )
        for kind, rate in ((SGD, 0.05), (Adam, 1e-3))
    },
    "saturated": {
        "weights_of_a_tanh_net_far_too_large": plain(
            lambda: stacked(nn.Tanh(), 3, 20.0), sgd(0.003), lambda x, y: (torch.randn_like(x), y)
        )
    },
    "loss-flat": {"noise_as_pictures": plain(perceptron, sgd(0.003), lambda x, y: (torch.randn_like(x), y))},
}
MISTAKES |= {name: (script, finding) for finding, named in PLAIN.items() for name, script in named.items()}


@mistake("no-step")
def one_of_two_optimizers_steps() -> None:
    net = Convolutional()
    optimizers = [SGD(net.backbone.parameters(), 0.05), SGD(net.head.parameters(), 0.05)]
    for inputs, labels in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        optimizers[1].step()


@mistake("no-gradient")
def everything_under_no_grad() -> None:
    net = Convolutional()
    optimizer = Adam(net.parameters())
    for inputs, labels in batches():
        optimizer.zero_grad()
        with torch.no_grad():
            loss = F.cross_entropy(net(inputs), labels)
        loss.requires_grad_().backward()
        optimizer.step()


@mistake("gradients-accumulate")
def no_zero_grad_with_accumulation() -> None:
    net = perceptron()
    optimizer = Adam(net.parameters())
    for number, (inputs, labels) in enumerate(batches(120)):
        (F.cross_entropy(net(inputs), labels) / 4).backward()
        if number % 4 == 3:
            optimizer.step()


@mistake("gradients-accumulate")
def zero_grad_of_the_wrong_optimizer() -> None:
    net, other = perceptron(), perceptron()
    optimizer, wrong = SGD(net.parameters(), 0.02), SGD(other.parameters(), 0.02)
    for inputs, labels in batches():
        wrong.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        optimizer.step()


@mistake("gradients-accumulate")
def no_zero_grad_in_closure() -> None:
    net = perceptron()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=2)
    for inputs, labels in batches(30):

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure)


@mistake("not-optimized")
def optimizer_of_another_model() -> None:
    net, other = Convolutional(), Convolutional()
    train(net, Adam(other.parameters()), batches())


@mistake("not-optimized")
def both_optimizers_hold_the_discriminator() -> None:
    made, judge = nn.Linear(8, 144), perceptron()
    optimizers = [Adam(judge.parameters(), 1e-3) for _ in range(2)]
    for inputs, labels in batches():
        for optimizer, x in zip(optimizers, (inputs.flatten(1), made(torch.randn(16, 8))), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(judge(x), labels).backward()
            optimizer.step()


@mistake("target-constant")
def sorted_data() -> None:
    net = perceptron()
    sorted_batches = ((x, torch.full_like(y, at // 8)) for at, (x, y) in enumerate(batches()))
    train(net, SGD(net.parameters(), 0.05), sorted_batches, nn.CrossEntropyLoss())


@mistake("loss-scale")
def the_scale_collapses() -> None:
    net, factors = perceptron(), cycle((1.0, float("inf"), float("inf")))
    train(net, sgd(0.05)(net), batches(), lambda logits, y: F.cross_entropy(logits, y) * next(factors), scaled=True)


@mistake("loss-scale")
def a_plain_step_under_a_scaler() -> None:
    net, scaler = perceptron(), torch.amp.GradScaler("cpu")
    optimizer = SGD(net.parameters(), 1e-4)
    for inputs, labels in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(net(inputs), labels)).backward()
        optimizer.step()


@mistake("loss-scale")
def no_more_steps_after_nan() -> None:
    net, steps = perceptron(), count()

    def spoilt(logits: Tensor, labels: Tensor) -> Tensor:
        if next(steps) == 20:
            nn.init.constant_(next(net.parameters()), float("nan"))
        return F.cross_entropy(logits, labels)

    train(net, sgd(0.05)(net), batches(), spoilt, scaled=True)


FIRSTS = {finding: name for name, (_, finding) in reversed(MISTAKES.items())}.values()  # one for each finding
ALONE = [pytest.param(name, nullcontext, marks=[pytest.mark.slow] * (name not in FIRSTS)) for name in MISTAKES]


@pytest.mark.filterwarnings("default:Using a target size")
@pytest.mark.parametrize(("name", "between"), [*ALONE, *((name, validations) for name in MISTAKES)])
def test_a_mistake_is_named_by_its_cause_before_its_symptoms(name: str, between: Any, tmp_path: Path) -> None:
    every = 50 if between is validations else 5
    with between(), Monitor(every=every, log=tmp_path / "log", on_trouble=lambda text: None) as monitor:
        MISTAKES[name][0]()
    assert monitor.trouble is None or "watching has ended" not in monitor.trouble
    findings = findings_over_time(read_runs(tmp_path / "log")[-1])
    place = next((at for at, finding in enumerate(findings) if finding.finding == MISTAKES[name][1]), 99)
    assert place <= (2 if name == "the_first_batch_again_and_again" else 0), findings  # there it is a note
    assert MISTAKES[name][1] != "non-finite" or "made by" in findings[0].evidence
    assert "under no_grad" not in findings[0].evidence or "no_grad" in name


def recurrent() -> Function:
    """A plain recurrent net without a bias, whose first state is 0."""

    def forward(net: Any, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 8)
        for row in x.flatten(1).split(12, 1):
            state = torch.tanh(net.inner(row) + net.state(state))
        return net.head(state)

    layers = {"inner": nn.Linear(12, 8), "state": nn.Linear(8, 8, bias=False), "head": nn.Linear(8, CLASSES)}
    return Function(forward, **layers)


def soft_loss(sign: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: sign * (F.log_softmax(z, 1) * F.one_hot(y, CLASSES)).sum(1).mean()


@pytest.mark.parametrize(
    ("build", "loss_of", "found"),
    [
        (recurrent, F.cross_entropy, {"loss-flat"}),  # it is too small to learn in 60 steps, but not dead
        (perceptron, soft_loss(-1.0), set()),
        (perceptron, lambda z, y: dice(z.sigmoid(), F.one_hot(y, CLASSES)), set()),
        (perceptron, lambda z, y: dice(z, F.one_hot(y, CLASSES), is_squared=True), set()),
        (perceptron, soft_loss(1.0), {"loss-maximized"}),
        (perceptron, lambda z, y: F.log_softmax(z, 1).gather(1, y[:, None]).mean(), {"loss-maximized"}),
        (perceptron, lambda z, y: (F.log_softmax(z, 1).gather(1, y[:, None]) * -torch.ones(1)).mean(), set()),
    ],
)
def test_first_states_and_losses_written_by_hand(build: Any, loss_of: Any, found: set[str]) -> None:
    with Monitor(every=50) as monitor:
        plain(build, by(Adam), loss_of=loss_of)()
    findings = findings_over_time(Run({}, monitor.rows, facts=monitor.facts))
    assert {finding.finding for finding in findings if finding.severity != "note"} == found


@pytest.mark.parametrize(
    ("is_viewed", "found"), [(True, {"input-layout"}), (False, set[str]())], ids=["viewed", "permuted"]
)
def test_colours_that_are_viewed_as_rows(is_viewed: bool, found: set[str]) -> None:
    def coloured(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = F.avg_pool2d(x, 5, 1, 2) * 5
        pictures = torch.cat([x, x + 0.5 * x.flip(2), x + 0.5 * x.flip(3)], 1)
        return (pictures.permute(0, 2, 3, 1).reshape(-1, 3, 12, 12) if is_viewed else pictures), y

    with Monitor(every=5) as monitor:
        plain(
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 8)), by(Adam), coloured
        )()
    assert {finding.finding for finding in monitor.findings if finding.severity != "note"} == found


def test_layers_in_a_list_are_held_by_no_optimizer(tmp_path: Path) -> None:
    outside = [nn.Linear(32, 32) for _ in range(2)]
    body, head = nn.Linear(144, 32), nn.Linear(32, CLASSES)
    net = Function(lambda net, x: head(outside[1](outside[0](body(x.flatten(1)).relu()).relu())), body=body, head=head)
    with Monitor(every=5, log=tmp_path / "log"):
        plain(lambda: net, by(Adam))()
    [finding] = findings_over_time(tmp_path / "log")
    assert (finding.finding, finding.severity) == ("not-optimized", "warning")
    assert "4 parameters with a gradient are held by no optimizer ('Linear outside the model')" in finding.evidence
    assert "an attribute or an nn.ModuleList" in finding.meaning


def test_one_pass_of_equal_samples_is_no_constant_input(tmp_path: Path) -> None:
    """As the first move of games that begin alike."""
    net = perceptron()
    optimizer = by(Adam)(net)
    with Monitor(every=5, log=tmp_path / "log"):
        for x, y in batches():
            optimizer.zero_grad()
            (F.cross_entropy(net(x[:1].expand_as(x)), y) + F.cross_entropy(net(x), y)).backward()
            optimizer.step()
    assert findings_over_time(tmp_path / "log") == []


def test_a_policy_gradient_is_turned_around_where_the_reward_is_low_and_that_is_no_mistake(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Monitor(every=2, log=tmp_path / "run.ndjson"):
        for step in range(20):
            (F.cross_entropy(net(torch.randn(1, 4)), torch.tensor([step % 3])) * (0.5 - step // 2 % 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    [run] = read_runs(tmp_path / "run.ndjson")
    assert "loss-maximized" not in {finding.finding for finding in findings_over_time(run)}
