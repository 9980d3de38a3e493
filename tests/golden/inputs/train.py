"""Six steps of a training that prints its losses and becomes NaN where asked to."""

import sys

import torch
from torch import nn


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(6):
        images, labels = torch.randn(8, 3, 8, 8), torch.randint(3, (8,))
        if step == 4 and "--nan" in sys.argv:
            images[0, 0, 0, 0] = float("nan")
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, f"{loss.item():.4f}")  # noqa: T201  (a watched script prints)


if __name__ == "__main__":
    main()
