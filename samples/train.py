"""Train a small network on drawn shapes: a plain loop that knows nothing of hookscope, to be watched by it.

    python samples/train.py --epochs 3
    hookscope watch --every 5 --log run.ndjson -- samples/train.py --epochs 3 --fault dead-relu
    hookscope show-run run.ndjson --plot run.png

``--fault`` breaks it as trainings are broken: ``dead-relu`` (a bias far below 0), ``frozen`` (a layer forgotten with
requires_grad=False), ``rate`` (a learning rate a thousand times too large), ``nan`` (a logarithm of 0 in the loss).
"""

import argparse

import torch
from shapes.draw import CLASSES, draw
from torch import nn
from torchvision.transforms.functional import to_tensor

FAULTS = ("none", "dead-relu", "frozen", "rate", "nan")


def network(fault: str) -> nn.Sequential:
    """Three convolutions, each with a BatchNorm, and a linear layer."""
    blocks, channels = [], 3
    for width in (16, 32, 64):
        blocks += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        blocks += [nn.MaxPool2d(2)]
        channels = width
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, len(CLASSES)))
    if fault == "dead-relu":
        nn.init.constant_(net[5].bias, -20.0)
    if fault == "frozen":
        net[4].requires_grad_(False)
    return net


def main() -> None:
    """Draw, train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(description="Train a small network on drawn shapes.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=160)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--save", help="where to write the trained weights")
    words = parser.parse_args()

    torch.manual_seed(0)
    drawn = [draw(0, number, side=32) for number in range(words.pictures)]
    pictures = torch.stack([to_tensor(one.image) for one in drawn])
    labels = torch.tensor([one.label for one in drawn])
    data = torch.utils.data.TensorDataset(pictures, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)

    net = network(words.fault)
    rate = words.rate * (1000 if words.fault == "rate" else 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    for epoch in range(words.epochs):
        total = 0.0
        for batch, wanted in loader:
            optimizer.zero_grad()
            scores = net(batch)
            loss = nn.functional.cross_entropy(scores, wanted)
            if words.fault == "nan" and epoch:
                loss = loss + (scores - scores).abs().log().clamp(max=0).mean() * 0
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch}: loss {total / len(data):.4f}")
    if words.save:
        torch.save(net.state_dict(), words.save)


if __name__ == "__main__":
    main()
