"""A small network with all that a monitor measures, how it is trained, and logs that are written by hand."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from hookscope.training.log.file import Run

Row = dict[str, Any]


class Small(nn.Module):
    """Convolution, BatchNorm, an in-place ReLU that runs twice, dropout, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.25)
        self.fc1 = nn.Linear(4 * 16, 6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = self.relu(self.fc1(self.drop(x.flatten(1))))
        return self.fc2(x)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    net = Small()
    with torch.no_grad():
        net.bn.bias[2] = -50  # a dead channel
    return net


def batches(count: int = 4, size: int = 5) -> list[tuple[Tensor, Tensor]]:
    seeded = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, 1, 6, 6, generator=seeded), torch.randint(0, 3, (size,), generator=seeded))
        for _ in range(count)
    ]


def filled(layer: nn.Linear, weight: float, bias: float = 0.0) -> nn.Linear:
    nn.init.constant_(layer.weight, weight)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, bias)
    return layer


def sgd(net: nn.Module, rate: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=rate, **options)


class OwnOptimizer:
    """Plain gradient descent that knows nothing of torch.optim, and writes where no version is counted."""

    def __init__(self, net: nn.Module, rate: float = 0.1) -> None:
        self.parameters, self.rate = list(net.parameters()), rate

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-self.rate)
                parameter.grad = None


def train(
    net: nn.Module,
    optimizer: Any,
    data: Iterable[tuple[Tensor, Tensor]],
    loss_of: Callable[..., Tensor] = F.cross_entropy,
    *,
    before_step: Callable[[nn.Module], object] = lambda net: None,
    after_step: Callable[[], object] = lambda: None,
    leaves_out: str = "",
    scaled: bool = False,
) -> nn.Module:
    """The plain loop, with a scale of the loss or without, and without the call that it leaves out."""
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    for x, y in data:
        if leaves_out != "zero_grad":
            optimizer.zero_grad()
        loss = loss_of(net(x), y)
        if leaves_out != "backward":
            (scaler.scale(loss) if scaler else loss).backward()
        before_step(net)
        if leaves_out != "step":
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        after_step()
    return net


@contextmanager
def validations(every: int = 10, has_gradients: bool = False) -> Iterator[None]:
    """Before each ``every``-th pass of a model, it is validated: in eval mode, with fewer and other samples."""
    counts, running = Counter[int](), [0]

    def before(module: nn.Module, args: Any) -> None:
        running[0] += 1
        if running[0] > 1 or not torch.is_grad_enabled() or isinstance(module, nn.modules.loss._Loss):
            return
        counts[id(module)] += 1
        if counts[id(module)] % every or not all(isinstance(value, torch.Tensor) for value in args):
            return
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        with torch.set_grad_enabled(has_gradients):
            module(*(x[:3].flip(0) + 0.1 * torch.randn_like(x[:3]) if x.is_floating_point() else x[:3] for x in args))
        for part, is_training in modes:
            part.training = is_training

    def after(module: nn.Module, args: Any, output: Any) -> None:
        running[0] -= 1

    hooks = [modules.register_module_forward_pre_hook(before)]
    hooks.append(modules.register_module_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor | None = None) -> None:
    net(torch.ones(1, 2) if x is None else x).sum().backward()
    optimizer.step()


def keys(rows: Iterable[Row], step: int | None = None) -> list[tuple[str, int]]:
    return [(row["layer"], row["call"]) for row in rows if step in (None, row["step"])]


def by_key(rows: list[Row], step: int = 0, optimizer: int = 0) -> dict[tuple[str, int], Row]:
    return {(r["layer"], r["call"]): r for r in rows if r["step"] == step and r["optimizer"] == optimizer}


def close(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=2e-4, abs_tol=2e-6)


ORDER = [("conv", 0), ("bn", 0), ("relu", 0), ("drop", 0), ("fc1", 0), ("relu", 1), ("fc2", 0)]


LAYERS = {name for name, _ in ORDER}


SOUND: dict[str, Any] = {
    "activation_mean": 0.1, "activation_std": 1.0, "zero_share": 0.0, "channels": 64, "dead_channels": 0,
    "non_finite": 0, "gradient_norm": 0.1, "gradient_non_finite": 0, "weight_norm": 1.0, "weight_non_finite": 0,
    "update_to_weight": 1e-3, "running_mean_shift": None, "running_var_ratio": None, "frozen": False,
}  # fmt: skip


def row(step: int, layer: str, index: int, **more: Any) -> dict[str, Any]:
    """A line of a layer in a sound run."""
    loss = max(0.5, 1 - step / 1000)
    of_step = {"step": step, "time": step / 10, "loss": loss, "learning_rate": 0.1, "optimizer": 0, "model": 0}
    return of_step | {"layer": layer, "call": 0, "index": index, "type": "Conv2d"} | SOUND | more


def log(
    change: Callable[[int, str], dict[str, Any]] = lambda step, layer: {},
    layers: Iterable[str] = ("a", "b", "c"),
    steps: Iterable[int] = range(0, 500, 50),
    **more: Any,
) -> Run:
    """A sound run with ``more`` in every line, and what ``change`` gives for a step and a layer."""
    layers = list(layers)
    return Run({}, [row(s, name, at) | more | change(s, name) for s in steps for at, name in enumerate(layers)])
