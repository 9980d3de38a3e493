"""Models for the tests of commands; the fixture `here` copies this file to the current folder."""

import torch
from torch import nn

preprocess = "imagenet"


class Small(nn.Module):
    """Of 32x32 pixels: conv1 gives 6x14x14, conv2 4x6x6, and fc 4 scores that grow with them."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 4, 3, stride=2)
        self.fc = nn.Linear(4, 4)
        nn.init.uniform_(self.fc.weight)

    def forward(self, x):
        return self.fc(self.conv2(self.relu(self.conv1(x))).relu().mean((2, 3)))


class Loud(Small):
    def __init__(self):
        print("a word of the factory")  # noqa: T201
        super().__init__()

    def forward(self, x):
        print("a word of the model")  # noqa: T201
        return super().forward(x)


class Detached(Small):
    """No gradient leads back to conv1."""

    def forward(self, x):
        return self.fc(self.conv2(self.relu(self.conv1(x)).detach()).relu().mean((2, 3)))


class Blind(Small):
    def forward(self, x):
        return super().forward(x).detach()


class Dull(Small):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.fc.weight)


class Broken(Small):
    def __init__(self):
        super().__init__()
        nn.init.constant_(self.fc.bias, float("nan"))


class Looks(nn.Module):
    """Patches of 8x8 pixels, a class token, one call of attention with 2 heads, and 4 scores."""

    def __init__(self):
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, 8, 8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.token, self.fc = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 4)

    def forward(self, x):
        tokens = torch.cat([self.token, self.patches(x).flatten(2).mT], 1)
        return self.fc(self.attention(tokens, tokens, tokens)[0][:, 0])


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, stride=8)

    def forward(self, first, second):
        return self.conv(torch.cat([first, second]))


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 2, 1)
        self.fc = nn.Linear(2, 4)
        nn.init.uniform_(self.fc.weight)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3, 4)))


Flow.__module__ = "torchvision.models.optical_flow.flow"
Clip.__module__ = "torchvision.models.video.clip"


class Interrupted(Small):
    def forward(self, x):
        raise KeyboardInterrupt


class TooLarge(Small):
    def forward(self, x):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: ...")


class Boxes(Small):
    def forward(self, x):
        return [{"boxes": super().forward(x), "labels": torch.zeros(1)}]


def interrupted():
    raise KeyboardInterrupt


def features():
    return nn.Conv2d(3, 4, 1)


class Raises(Small):
    def forward(self, x):
        raise RuntimeError("no way on")
