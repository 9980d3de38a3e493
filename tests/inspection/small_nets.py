"""A ResNet and a ViT, trained in a minute on drawn shapes: sound networks to plant faults in."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.inspection.faults import IMAGENET

SIDE = 48
_SHAPES = (0, 4, 8, 1, 3)  # classes of samples/shapes/draw.py that a small network tells apart


def pictures(stream: int, count: int) -> tuple[Tensor, Tensor]:
    """So many pictures ``(N, 3, H, W)`` from 0 to 1 and their classes, 0 to 4."""
    path = Path(__file__).parents[2] / "samples" / "shapes" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw_shapes", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["draw_shapes"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    drawn = [module.draw(stream, number, _SHAPES[number % 5], SIDE).image for number in range(count)]
    images = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in drawn])
    return images.float() / 255, torch.arange(count) % 5


def prepared(raw: Tensor) -> Tensor:
    return (raw - IMAGENET[0]) / IMAGENET[1]


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu, self.down = nn.ReLU(inplace=True), nn.Sequential()
        if stride > 1:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + self.down(x))  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    blocks = _Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 32, 1), _Block(32, 64, 2)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))


class _Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ln2, self.fc1, self.act = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU()
        self.fc2 = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        images, tokens, width = x.shape
        query, key, value = self.qkv(self.ln1(x)).reshape(images, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(mixed)
        return x + self.fc2(self.act(self.fc1(self.ln2(x))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 48, patch: int = 6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (SIDE // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(_Encoder(width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))  # type: ignore[no-any-return]


def trained(make: Callable[[], nn.Module], seed: int, epochs: int, rate: float) -> nn.Module:
    """The network after some epochs on 2,000 pictures; on others it is right twice as often as chance, or more."""
    images, labels = pictures(1, 2000)
    images = prepared(images)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = make()
        optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * 40)
        for _ in range(epochs):
            for part in torch.randperm(len(images)).split(50):
                loss = F.cross_entropy(net(images[part]), labels[part])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    others, truth = pictures(2, 200)
    with torch.no_grad():
        assert float((net.eval()(prepared(others)).argmax(1) == truth).float().mean()) >= 0.4
    return net
