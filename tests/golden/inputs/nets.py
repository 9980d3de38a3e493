"""Models of a few layers, each for one oddity."""

import torch
from torch import nn


class Small(nn.Module):
    """Two convolutions with a BatchNorm, an in-place ReLU and two classes; `relu` runs twice."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 7, stride=8)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 12, 3, stride=2)
        self.fc = nn.Linear(12, 4)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.relu(self.conv2(x)).mean((2, 3)))


def small():
    torch.manual_seed(0)
    return Small()


def ones():
    """Every weight is 1, so that each number can be checked by hand."""
    net = nn.Sequential(nn.Conv2d(3, 2, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    net(torch.zeros(1, 3, 4, 4))
    for parameter in net.parameters():
        nn.init.constant_(parameter, 1.0)
    return net


def sick():
    """Dead and duplicate filters, a constant output, a collapsed variance and a frozen layer."""
    net = small()
    with torch.no_grad():
        net.conv1.weight[0] = 0
        net.conv1.bias[0] = -1.0
        net.conv1.weight[2] = net.conv1.weight[1]
        net.conv1.bias[2] = net.conv1.bias[1]
        net.bn1.bias[0] = -5.0
        net.bn1.running_var[3] = 1e-9
    net.conv2.requires_grad_(False)
    return net


def nan():
    """NaN from the second convolution on."""
    net = small()
    with torch.no_grad():
        net.conv2.bias[1] = float("nan")
    return net


class Detached(Small):
    """The first convolution is cut off from the loss."""

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x).detach()))
        return self.fc(self.conv2(x).mean((2, 3)))


def detached():
    torch.manual_seed(0)
    return Detached()


def raising():
    raise ValueError("this factory always raises")


number = 7
