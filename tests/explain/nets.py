"""Nets and pictures of the tests of class activation maps and saliency."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import seeded
from tests.nets import Function, named


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
    net.head.register_forward_hook(lambda module, args, output: output + 1e-6 * torch.rand(1))
    return net


class Gives(Function):
    """Puts out what a function makes of the maps of its convolution."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__(lambda net, x: output(net.relu(net.conv(x))), conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU())


CELL = 8


class FindsCells(nn.Module):
    """Finds squares of 8x8 pixels, red ones of class 1 and green ones of class 2, in torchvision's form."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 2, 1, bias=False)
        self.body.weight.data.copy_(torch.tensor([[1.0, -1, 0], [-1, 1, 0]])[..., None, None])
        self.relu = nn.ReLU(inplace=True)
        self.head = Function(found_cells, mean=nn.AvgPool2d(CELL))

    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        maps = torch.cat([self.relu(self.body(picture[None])) for picture in pictures])
        return self.head(maps)


def found_cells(head: Any, maps: Tensor) -> list[dict[str, Tensor]]:
    """The scores are ``sigmoid(8 x - 4)`` of the mean of each cell."""
    images = []
    for scores in (8 * head.mean(maps) - 4).sigmoid():
        label, y, x = (scores > 0.1).nonzero(as_tuple=True)
        corner = CELL * torch.stack([x, y], 1).float()
        boxes = torch.cat([corner, corner + CELL], 1)
        images.append({"boxes": boxes, "labels": label + 1, "scores": scores[label, y, x]})
    return images


def street() -> Tensor:
    """Two red squares, of which the left one is stronger, and a green one below the right one."""
    picture = torch.zeros(3, 24, 32)
    picture[0, 8:16, 0:8] = 1
    picture[0, 8:16, 24:32] = 0.8
    picture[1, 16:24, 24:32] = 0.9
    return picture
