"""Training scripts in several styles, each with one common mistake, and the findings that name it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

CLASSES = 8
MISTAKES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {}
"""The script of each mistake, and the findings of which one names it."""


def mistake(*findings: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(script: Callable[[], None]) -> Callable[[], None]:
        MISTAKES[script.__name__] = (script, findings)
        return script

    return register


class Convolutional(nn.Module):
    """A backbone with BatchNorm and dropout, and a classifier."""

    def __init__(self, dropout: float = 0.25, classes: int = CLASSES) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16 * 3 * 3, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.backbone(x).flatten(1)))
        return logits


def perceptron(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES), *last
    )


def batches(steps: int = 60, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy pictures ``(N, 1, 12, 12)`` of zero mean and unit size, and their classes."""
    random = torch.Generator().manual_seed(5)
    templates = torch.randn(CLASSES, 1, 12, 12, generator=random)
    for _ in range(steps):
        labels = torch.randint(0, CLASSES, (size,), generator=random)
        yield 0.8 * templates[labels] + 0.6 * torch.randn(size, 1, 12, 12, generator=random), labels


def train(
    net: nn.Module,
    optimizer: Optimizer,
    data: Any = None,
    loss_of: Callable[..., Tensor] = F.cross_entropy,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
) -> None:
    """The plain loop."""
    for inputs, labels in data or batches():
        optimizer.zero_grad()
        loss_of(net(inputs), labels).backward()
        before_step()
        optimizer.step()
        after_step()


def changed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    return (change(inputs, labels) for inputs, labels in batches())


@mistake("no-step")
def no_step() -> None:
    net = Convolutional()
    optimizer = Adam(net.parameters())
    for inputs, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()


@mistake("no-step")
def step_without_parentheses() -> None:
    net, criterion = perceptron(), nn.CrossEntropyLoss()
    optimizer = SGD(net.parameters(), 0.1)
    for inputs, labels in batches():
        net.zero_grad()
        criterion(net(inputs), labels).backward()
        optimizer.step  # noqa: B018


@mistake("no-step")
def only_the_scheduler_steps() -> None:
    net = perceptron()
    optimizer = SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scheduler.optimizer._opt_called = True  # no warning
    for inputs, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels).backward()
        scheduler.step()


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
def no_backward() -> None:
    net = perceptron()
    optimizer = SGD(net.parameters(), 0.1)
    for inputs, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), labels)
        optimizer.step()


@mistake("no-gradient")
def zero_grad_after_backward() -> None:
    net = perceptron()
    optimizer = SGD(net.parameters(), 0.1)
    train(net, optimizer, before_step=optimizer.zero_grad)


@mistake("no-gradient")
def clipped_to_zero() -> None:
    net = Convolutional()
    train(net, SGD(net.parameters(), 0.1), before_step=lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.0))


@mistake("no-gradient")
def clipped_to_almost_nothing() -> None:
    net = Convolutional()
    train(net, SGD(net.parameters(), 0.1), before_step=lambda: nn.utils.clip_grad_value_(net.parameters(), 1e-12))


@mistake("no-gradient")
def detached_loss() -> None:
    net = Convolutional()

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.tensor(F.cross_entropy(logits, labels).item(), requires_grad=True)

    train(net, Adam(net.parameters()), loss_of=loss_of)


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


@mistake("no-gradient")
def backbone_under_no_grad() -> None:
    class Net(Convolutional):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.backbone(x).flatten(1)
            logits: Tensor = self.head(self.dropout(features))
            return logits

    net = Net()
    train(net, SGD(net.parameters(), 0.1))


@mistake("no-gradient")
def detached_features() -> None:
    class Net(Convolutional):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.dropout(self.backbone(x).detach().flatten(1)))
            return logits

    net = Net()
    train(net, SGD(net.parameters(), 0.1))


@mistake("no-gradient")
def all_frozen() -> None:
    net = perceptron()
    optimizer = SGD(net.parameters(), 0.1)
    net.requires_grad_(False)
    train(net, optimizer, loss_of=lambda logits, labels: F.cross_entropy(logits, labels).requires_grad_())


@mistake("no-gradient")
def loss_times_zero() -> None:
    net, weight = perceptron(), 0.0
    train(net, SGD(net.parameters(), 0.1), loss_of=lambda logits, labels: weight * F.cross_entropy(logits, labels))


@mistake("no-gradient")
def accuracy_as_loss() -> None:
    net = perceptron()

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.argmax(1) != labels).float().mean().requires_grad_()

    train(net, SGD(net.parameters(), 0.1), loss_of=loss_of)


@mistake("gradients-accumulate")
def no_zero_grad() -> None:
    net = Convolutional()
    optimizer = SGD(net.parameters(), 0.02)
    for inputs, labels in batches():
        F.cross_entropy(net(inputs), labels).backward()
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


@mistake("eval-mode")
def trained_in_eval_mode() -> None:
    net = Convolutional().eval()
    train(net, SGD(net.parameters(), 0.05))


@mistake("eval-mode")
def no_train_after_validation() -> None:
    net = Convolutional()
    optimizer = SGD(net.parameters(), 0.05)
    data = list(batches())
    net.train()
    for epoch in range(3):
        train(net, optimizer, data[20 * epoch : 20 * epoch + 20])
        net.eval()
        with torch.no_grad():
            for inputs, labels in data[:2]:
                F.cross_entropy(net(inputs), labels)


@mistake("eval-mode")
def validated_in_train_mode() -> None:
    net, criterion = Convolutional(), nn.CrossEntropyLoss()
    optimizer = SGD(net.parameters(), 0.05)
    data = list(batches())
    for epoch in range(3):
        train(net, optimizer, data[20 * epoch : 20 * epoch + 20], criterion)
        with torch.no_grad():
            for inputs, labels in data[:2]:
                criterion(net(inputs), labels)


@mistake("not-optimized")
def new_head_after_the_optimizer() -> None:
    net = Convolutional()
    optimizer = SGD(net.parameters(), 0.05)
    net.head = nn.Linear(16 * 3 * 3, CLASSES)
    train(net, optimizer)


@mistake("not-optimized")
def optimizer_of_another_model() -> None:
    net, other = Convolutional(), Convolutional()
    train(net, Adam(other.parameters()))


@mistake("not-optimized")
def optimizer_of_a_copy() -> None:
    net = perceptron()
    optimizer = SGD(net.parameters(), 0.1)
    net = copy.deepcopy(net)
    train(net, optimizer)


@mistake("not-optimized")
def parameters_replaced() -> None:
    net = perceptron()
    optimizer = SGD(net.parameters(), 0.1)
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(nn.init.kaiming_normal_(layer.weight.detach().clone()))
    train(net, optimizer)


@mistake("not-optimized")
def backbone_forgotten() -> None:
    net = Convolutional()
    train(net, SGD(net.head.parameters(), 0.05))


@mistake("input-scale")
def inputs_up_to_255() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.01), changed(lambda x, y: ((x * 60 + 128).clamp(0, 255).round(), y)))


@mistake("input-scale")
def divided_by_255_twice() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.1), changed(lambda x, y: ((x * 0.2 + 0.5).clamp(0, 1) / 255, y)))


@mistake("input-scale")
def normalised_twice() -> None:
    net = Convolutional()

    def normalised(pictures: Tensor) -> Tensor:
        return (pictures - 0.45) / 0.22

    twice = changed(lambda x, y: (normalised(normalised((x * 0.2 + 0.5).clamp(0, 1))), y))
    train(net, SGD(net.parameters(), 0.05), twice)


@mistake("input-constant")
def one_picture_for_all() -> None:
    net = Convolutional()
    train(net, SGD(net.parameters(), 0.05), changed(lambda x, y: (x[:1].expand_as(x).contiguous(), y)))


@mistake("input-constant")
def empty_pictures() -> None:
    net = Convolutional()
    train(net, SGD(net.parameters(), 0.05), changed(lambda x, y: (torch.zeros_like(x), y)))


@mistake("input-constant")
def the_first_batch_again_and_again() -> None:
    net, data = perceptron(), list(batches())
    train(net, Adam(net.parameters()), ((data[0][0], labels) for _, labels in data))


@mistake("target-constant")
def one_label_for_all() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.05), changed(lambda x, y: (x, torch.zeros_like(y))))


@mistake("target-constant")
def sorted_data() -> None:
    net = perceptron()
    sorted_batches = ((x, torch.full_like(y, at // 8)) for at, (x, y) in enumerate(batches()))
    train(net, SGD(net.parameters(), 0.05), sorted_batches, nn.CrossEntropyLoss())


@mistake("probabilities-as-logits")
def softmax_in_the_model() -> None:
    net = perceptron(nn.Softmax(dim=1))
    train(net, SGD(net.parameters(), 0.1), loss_of=nn.CrossEntropyLoss())


@mistake("probabilities-as-logits")
def softmax_and_functional_loss() -> None:
    net = Convolutional()
    train(net, Adam(net.parameters()), loss_of=lambda logits, y: F.cross_entropy(torch.softmax(logits, -1), y))


@mistake("probabilities-as-logits")
def softmax_by_hand() -> None:
    net = perceptron()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    train(net, SGD(net.parameters(), 0.1), loss_of=lambda z, y: criterion(z.exp() / z.exp().sum(1, keepdim=True), y))


@mistake("probabilities-as-logits")
def sigmoid_and_bce_with_logits() -> None:
    net = perceptron(nn.Sigmoid())
    criterion = nn.BCEWithLogitsLoss()
    train(net, Adam(net.parameters()), loss_of=lambda p, y: criterion(p, F.one_hot(y, CLASSES).float()))


@mistake("loss-input")
def relu_before_cross_entropy() -> None:
    net = perceptron(nn.ReLU())
    train(net, SGD(net.parameters(), 0.1))


@mistake("loss-input")
def softmax_over_the_batch() -> None:
    net = perceptron()
    train(net, Adam(net.parameters()), loss_of=lambda logits, y: F.nll_loss(F.log_softmax(logits, dim=0), y))


@mistake("loss-input")
def nll_loss_of_logits() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.001), loss_of=nn.NLLLoss())


@mistake("loss-input")
def nll_loss_of_probabilities() -> None:
    net = perceptron(nn.Softmax(1))
    train(net, Adam(net.parameters()), loss_of=nn.NLLLoss())


@mistake("loss-maximized")
def negated_loss() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.01), loss_of=lambda logits, y: -F.cross_entropy(logits, y))


@mistake("learning-rate-vanishes")
def exponential_decay_each_batch() -> None:
    net = Convolutional()
    optimizer = SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    train(net, optimizer, after_step=scheduler.step)


@mistake("learning-rate-vanishes")
def steps_of_epochs_each_batch() -> None:
    net = Convolutional()
    optimizer = AdamW(net.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    train(net, optimizer, after_step=scheduler.step)


@mistake("learning-rate-vanishes")
def schedule_of_epochs_each_batch() -> None:
    """The number of epochs is given where steps are counted."""
    net = perceptron()
    optimizer = SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=5, power=2)
    train(net, optimizer, after_step=scheduler.step)


@mistake("learning-rate-vanishes")
def rate_of_zero() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.0))


@mistake("learning-rate-vanishes")
def rate_too_small_for_float32() -> None:
    net = Convolutional()
    train(net, Adam(net.parameters(), 1e-12))


@mistake("optimizer-settings")
def rate_of_100() -> None:
    net = perceptron()
    train(net, Adam(net.parameters(), 100))


@mistake("optimizer-settings")
def momentum_of_1() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.05, momentum=1.0))


@mistake("optimizer-settings")
def weight_decay_of_10() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.05, weight_decay=10))


@mistake("loss-maximized")
def loss_maximised() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.01, maximize=True))


@mistake("loss-scale")
def every_step_is_skipped() -> None:
    net = perceptron()
    optimizer, scaler = SGD(net.parameters(), 0.05), torch.amp.GradScaler("cpu")
    for inputs, labels in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = net(inputs)
        loss = F.cross_entropy(logits.float(), labels) + logits.float().sum() * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@mistake("loss-scale")
def the_scale_collapses() -> None:
    net = perceptron()
    optimizer, scaler = SGD(net.parameters(), 0.05), torch.amp.GradScaler("cpu")
    for number, (inputs, labels) in enumerate(batches(90)):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), labels) * (1.0 if number % 3 == 0 else float("inf"))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@mistake("loss-scale")
def no_more_steps_after_nan() -> None:
    net = perceptron()
    optimizer, scaler = SGD(net.parameters(), 0.05), torch.amp.GradScaler("cpu")
    for number, (inputs, labels) in enumerate(batches()):
        if number == 20:
            nn.init.constant_(next(net.parameters()), float("nan"))
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(net(inputs), labels)).backward()
        scaler.step(optimizer)
        scaler.update()


@mistake("loss-scale")
def clipped_before_unscale() -> None:
    net = Convolutional()
    optimizer, scaler = SGD(net.parameters(), 0.05), torch.amp.GradScaler("cpu")
    for inputs, labels in batches():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(net(inputs), labels)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@mistake("batchnorm-small-batch")
def batches_of_two() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))
    train(net, SGD(net.parameters(), 0.05), batches(size=2))


@mistake("batchnorm-small-batch")
def batches_of_one() -> None:
    net = Convolutional()
    train(net, SGD(net.parameters(), 0.01), batches(size=1))


@mistake("dead-layer", "constant-output")
def all_weights_zero() -> None:
    net = perceptron()
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    train(net, SGD(net.parameters(), 0.1))


@mistake("dead-layer", "dead-channels")
def biases_far_below_zero() -> None:
    net = perceptron()
    nn.init.constant_(net.get_parameter("3.bias"), -30.0)
    train(net, SGD(net.parameters(), 0.05))


@mistake("loss-flat")
def noise_as_pictures() -> None:
    net = perceptron()
    train(net, SGD(net.parameters(), 0.003), changed(lambda x, y: (torch.randn_like(x), y)))
