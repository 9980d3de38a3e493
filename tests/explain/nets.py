"""Nets and pictures of the tests of class activation maps and saliency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import seeded
from tests.nets import named


def picture(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(1, 3, *(shape or (16, 16)), generator=torch.Generator().manual_seed(seed))


def small(inplace: bool = True, act: Callable[..., nn.Module] = nn.ReLU) -> nn.Module:
    """Two convolutions before activations, in place by default; BatchNorm and Dropout; a head on the mean."""
    options = {"inplace": True} if inplace else {}
    return seeded(
        lambda: named(
            first=nn.Conv2d(3, 6, 3, padding=1),
            norm=nn.BatchNorm2d(6),
            relu=act(**options),
            drop=nn.Dropout(0.5),
            pool=nn.MaxPool2d(2),
            second=nn.Conv2d(6, 8, 3, padding=1),
            again=act(**options),
            mean=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            head=nn.Linear(8, 5),
        )
    )


def busy() -> nn.Module:
    """A model in use: part in train mode, part frozen, with gradients, with hooks of others that draw numbers."""
    net = small()
    net(picture(seed=9)).sum().backward()
    net.drop.train()
    net.head.weight.requires_grad_(False)
    net.first.register_forward_hook(lambda module, args, output: None)
    net.second.register_forward_pre_hook(lambda module, args: None)
    net.head.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    net.head.register_forward_hook(lambda module, args, output: output + torch.rand(1))
    return net


class Gives(nn.Module):
    """Puts out what a function makes of the maps of its convolution."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.relu, self.output = nn.Conv2d(3, 4, 1), nn.ReLU(), output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.relu(self.conv(x)))
