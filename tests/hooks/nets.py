"""Networks with one oddity each: they overwrite, alias, return containers, or call a layer again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.hooks import Activations
from hookscope.hooks.tensors import map_tensors, tensors_in
from tests.nets import Fails, Function, X, chain, conv, named, row


def captured(net: nn.Module, *selection: Any, x: Tensor = X, **options: Any) -> Activations:
    """What a pass without gradients keeps."""
    with torch.no_grad(), hookscope.capture(net, *selection, **options) as activations:
        net(x)
    return activations


class Pyramid(nn.Module):
    """A head that runs on three levels, a layer with two names, one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.head, self.stem = conv(9), named(conv=conv(10)), conv(1)
        self.twin = self.stem

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.head.conv(self.twin(x) + level) for level in range(3)]


class Halves(NamedTuple):
    low: Tensor
    high: Tensor


def overwrites(layer: nn.Module) -> nn.Module:
    """Overwrites every tensor that ``layer`` returns."""
    return Function(lambda net, x: sum(t.add_(1).relu_().sum() for t in tensors_in(net.layer(x)).values()), layer=layer)


def containers() -> nn.Module:
    """Each kind of container that a layer may return its tensors in."""
    return Function(lambda net, x: {"out": net.conv(x), "aux": [Halves(x * 2, x * 3), None, (x + 1,)]}, conv=conv(3))


def keywords() -> nn.Module:
    """Calls its layers with keywords only."""

    def forward(net: Any, *, picture: Tensor) -> Tensor:
        return net.scale(by=3.0, value=net.conv(input=picture)).relu_()

    return Function(forward, conv=conv(2), scale=Function(lambda *, value, by: value * by))


def passes_through() -> nn.Module:
    """Identity and Dropout return the very tensor they were given."""
    return named(conv=conv(2), identity=nn.Identity(), drop=nn.Dropout(), relu=nn.ReLU(inplace=True), last=conv(3))


def views() -> nn.Module:
    """Layers that return views: flattened, in chunks, transposed, expanded."""

    def forward(net: Any, x: Tensor) -> Tensor:
        left, right = net.chunks(net.turned(net.conv(x)).contiguous())
        return (net.wide(net.flat(left)) + right.clone().flatten()).relu_()

    return Function(
        forward,
        conv=conv(2),
        flat=nn.Flatten(),
        chunks=Function(lambda x: x.chunk(2, dim=-1)),
        turned=Function(lambda x: x.transpose(-1, -2)),
        wide=Function(lambda x: x.expand(4, *x.shape)),
    )


KINDS = [torch.int64, torch.bool, torch.complex64, torch.float16, torch.bfloat16, torch.float64, torch.float32]


def kinds() -> nn.Module:
    """Whole numbers, truth values, complex, half and double numbers."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.conv(x)
        kept = [kind(x) for kind in net.kinds]
        return sum((t if t.dtype == torch.bool else t.abs()).float().sum() for t in kept)

    layers = nn.ModuleList(Function(partial(Tensor.to, dtype=dtype)) for dtype in KINDS)
    return Function(forward, conv=conv(0.3), kinds=layers)


def catches() -> nn.Module:
    """One layer fails at each pass, and the model lives with it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.conv(x)
        try:
            return net.last(net.fails(x))
        except RuntimeError:
            return net.last(x + 1)

    return Function(forward, conv=conv(2), fails=Fails(), last=conv(3))


def strides() -> nn.Module:
    """channels_last and every second column."""
    first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    every_second = Function(lambda x: x[..., ::2])
    return named(first=first, sparse=every_second, relu=nn.ReLU(inplace=True), second=nn.Conv2d(8, 4, 3))


def residual() -> nn.Module:
    """``out += x`` and a functional in-place ReLU, as in every ResNet block; one ReLU runs twice."""

    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.bn(net.conv2(net.relu(net.conv1(x))))
        out += x
        return F.relu_(net.relu(out) - 1)

    return Function(forward, conv1=conv(2, 1), conv2=conv(-1), bn=nn.BatchNorm2d(1), relu=nn.ReLU(inplace=True))


def recursive() -> nn.Module:
    """A layer that calls itself, and a root that does."""

    def inside(net: Any, x: Tensor, left: int = 2) -> Tensor:
        return net.conv(net(x + 1, left - 1) if left else x).relu_()

    def outside(net: Any, x: Tensor, left: int = 1) -> Tensor:
        return net.inner(net(x, left - 1) if left else x)

    return Function(outside, inner=Function(inside, conv=conv(2)))


def remembers() -> nn.Module:
    """Layers that return a parameter, a buffer, and the same memory at each call."""

    def forward(net: Any, x: Tensor) -> Tensor:
        out = net.own("weight") * x + net.own("mean")
        first = net.workspace(x * 2) + 0
        return out + first + net.workspace(x * 3)

    own, space = Function(lambda which: getattr(own, which)), torch.zeros(1, 1, 1, 2)
    own.weight = nn.Parameter(row(5, -5))
    own.register_buffer("mean", row(1, 2))
    return Function(forward, own=own, workspace=Function(lambda x: space.copy_(x.detach())))


class TwoBranches(nn.Module):  # fx takes no function of any arguments
    """One module for two inputs, and a loop over it, with the next layer working in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            x = self.act(self.conv(x))
        return x + self.act(self.conv(y))


@dataclass
class Output:
    logits: Tensor

    @cached_property
    def probabilities(self) -> Tensor:
        return self.logits.softmax(-1)


def gives_output(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """A dataclass whose cached property is read before the logits are overwritten."""
    output = net.inner(x + y)
    before = output.probabilities
    output.logits.mul_(0)
    return before


class Labelled(Tensor):
    """A tensor of a class of its own, as fastai's."""


PAIR = {"x": torch.linspace(-1, 1, 108).reshape(1, 3, 6, 6), "y": torch.linspace(1, -2, 108).reshape(1, 3, 6, 6)}
ZOO: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "in-place layers": (chain, {"input": X}),
    "pyramid": (Pyramid, {"x": X}),
    "residual": (lambda: residual().eval(), {"x": X}),
    "residual in train mode": (residual, {"x": X}),
    "keywords": (keywords, {"picture": X}),
    "recursive": (recursive, {"x": X}),
    "passes through": (lambda: passes_through().eval(), {"input": X}),
    "dropout in train mode": (passes_through, {"input": torch.ones(1, 1, 8, 8)}),
    "views": (views, {"x": torch.arange(16.0).reshape(1, 1, 4, 4) - 8}),
    "remembers": (remembers, {"x": X}),
    "kinds": (kinds, {"x": X}),
    "catches": (catches, {"x": X}),
    "strides": (strides, {"input": torch.linspace(-1, 1, 300).reshape(1, 3, 10, 10)}),
    "is a convolution": (lambda: conv(4, 1), {"input": X}),
    "no convolution": (lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True)), {"input": X}),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8).train(), {"src": torch.ones(3, 1, 4)}),
    "recurrent": (lambda: nn.LSTM(2, 3), {"input": torch.ones(2, 1, 2)}),
    "containers": (lambda: overwrites(containers()), {"x": X}),
    "two branches and a loop": (TwoBranches, PAIR),
    "tensors of a class of their own": (TwoBranches, map_tensors(PAIR, lambda x: x.as_subclass(Labelled))),
    "data parallel": (lambda: nn.DataParallel(TwoBranches()), PAIR),
    "moving average": (lambda: torch.optim.swa_utils.AveragedModel(TwoBranches()), PAIR),
    "fx": (lambda: torch.fx.symbolic_trace(TwoBranches()), PAIR),
    "a dataclass with a cached property": (
        lambda: Function(gives_output, inner=Function(lambda x: Output(x.mean((2, 3))))),
        PAIR,
    ),
}


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "gradients": torch.enable_grad,
}


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    build, inputs = ZOO[name]
    return build(), map_tensors(inputs, lambda tensor: tensor.clone())


def raises(*call: Any, **options: Any) -> None:
    raise RuntimeError("as asked")
