"""Files that deployment tools write: ONNX and programs of torch.export."""

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Deployed(nn.Module):
    """What exporters change: a BatchNorm to fold, a layer called twice, an addition, a resize."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.fc = nn.Linear(32, 32)
        self.fc2 = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)) + x)
        return self.fc2(self.fc(self.head(self.up(x)).flatten(1)))


@functools.cache
def deployed() -> nn.Module:
    """The network with running statistics as training leaves them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Deployed().eval()
        for bn in (net.bn1, net.bn2):
            nn.init.uniform_(bn.running_mean, -1, 1)
            nn.init.uniform_(bn.running_var, 0.01, 0.5)
            nn.init.uniform_(bn.weight, 0.5, 2)
    return net


def to_onnx(net: nn.Module, path: Path, *, size: Any = (1, 3, 16, 16), free: bool = True, **settings: Any) -> str:
    """The ONNX file of ``net`` that torch's older exporter writes; the newer one with ``dynamo``."""
    dynamo = settings.pop("dynamo", False)
    example = torch.rand(size, dtype=next(net.parameters()).dtype)
    if dynamo:
        batch = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)} if free else {}
        example = torch.cat([example, example]) if free else example
    else:
        batch = {"dynamic_axes": {"input": {0: "batch"}}} if free else {}
        settings = {"opset_version": 17, "input_names": ["input"]} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (example,), str(path), dynamo=dynamo, verbose=False, **batch, **settings)
    return str(path)


def to_pt2(net: nn.Module, path: Path, *, size: Any = (2, 3, 16, 16), free: bool = True) -> str:
    """The file that `torch.export.save` writes."""
    shapes = ({0: torch.export.Dim("batch")},) if free else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(net, (torch.rand(size),), dynamic_shapes=shapes), path)
    return str(path)
