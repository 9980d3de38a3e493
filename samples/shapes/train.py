"""Train squeezenet1_1 on the pictures of draw.py, and write the weights beside this file.

    python samples/shapes/train.py

Every picture, weight and order follows from SEED; an epoch takes about two minutes on two processor cores
that have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import draw
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models import squeezenet1_1

SEED = 20
TRAINING, HELD_OUT = 1, 2  # streams of pictures: none of one is in another
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pictures(stream: int, count: int) -> tuple[Tensor, Tensor]:
    """So many pictures ``(N, 3, H, W)`` of bytes, and their classes ``(N,)``."""
    with ProcessPoolExecutor() as pool:
        drawn = list(pool.map(_array, [stream] * count, range(count), chunksize=64))
    images = torch.from_numpy(np.stack([image for image, _ in drawn])).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([label for _, label in drawn])


def _array(stream: int, number: int) -> tuple[np.ndarray, int]:
    drawn = draw.draw(stream, number)
    return np.asarray(drawn.image), drawn.label


def prepared(images: Tensor) -> Tensor:
    """Bytes to what the network takes, as its weights' transforms do."""
    return (images.float() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def batches(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All pictures in a new order, each batch turned and mirrored: no class depends on it."""
    for part in torch.randperm(len(images)).split(size):
        batch = prepared(images[part])
        turns, mirrored = int(torch.randint(4, ())), int(torch.randint(2, ()))
        batch = batch.rot90(turns, (2, 3))
        yield (batch.flip(3) if mirrored else batch).contiguous(memory_format=torch.channels_last), labels[part]


class Normalised(nn.Sequential):
    """A convolution and the BatchNorm it is trained with: SqueezeNet has none, and without one it does not begin."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(conv, nn.BatchNorm2d(conv.out_channels))


def with_batch_norms(module: nn.Module) -> None:
    """Put a BatchNorm behind every convolution below ``module``."""
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            setattr(module, name, Normalised(child))
        else:
            with_batch_norms(child)


def without_batch_norms(module: nn.Module) -> None:
    """Fold every BatchNorm into its convolution: the same function, and SqueezeNet as torchvision has it."""
    for name, child in module.named_children():
        if isinstance(child, Normalised):
            setattr(module, name, fuse_conv_bn_eval(child[0].eval(), child[1].eval()))
        else:
            without_batch_norms(child)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, size: int = 64) -> None:
    """Adam under one cycle of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    steps = epochs * math.ceil(len(images) / size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.15)
    for epoch in range(epochs):
        began, right, total = time.time(), 0, 0.0
        model.train()
        for batch, target in batches(images, labels, size):
            output = model(batch)
            loss = F.cross_entropy(output, target, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            right += int((output.argmax(1) == target).sum())
            total += float(loss.detach()) * len(target)
        print(
            f"epoch {epoch + 1}: loss {total / len(images):.3f}, right {right / len(images):.4f},"
            f" {time.time() - began:.0f} s",
            flush=True,
        )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of pictures whose class has the highest score, in eval mode."""
    model.eval()
    with torch.inference_mode():
        scores = torch.cat([model(prepared(part)) for part in images.split(100)])
    return float((scores.argmax(1) == labels).float().mean())


def write(model: nn.Module, into: Path, facts: dict[str, object]) -> None:
    """The weights in half precision, and what one must know to use them, in one safetensors file."""
    state = {key: value.half().contiguous() for key, value in model.state_dict().items()}
    known = {
        "model": "squeezenet1_1",
        "categories": list(draw.CLASSES),
        "resize_size": draw.SIDE,
        "crop_size": draw.SIDE,
        "mean": MEAN,
        "std": STD,
    }
    save_file(state, into, metadata={"hookscope": json.dumps(known | facts)})
    into.chmod(0o644)  # safetensors keeps it to its owner


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--held-out", type=int, default=2_000)
    parser.add_argument("--into", type=Path, default=Path(__file__).with_name("shapes.safetensors"))
    options = parser.parse_args()
    torch.manual_seed(SEED)
    model = squeezenet1_1(num_classes=len(draw.CLASSES))
    with_batch_norms(model.features)
    model.to(memory_format=torch.channels_last)
    train(model, *pictures(TRAINING, options.pictures), options.epochs)
    without_batch_norms(model.features)
    images, labels = pictures(HELD_OUT, options.held_out)
    whole = accuracy(model, images, labels)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    half = accuracy(model, images, labels)
    print(f"held-out accuracy on {len(images)} pictures: {whole:.4f}, in half precision {half:.4f}")
    write(model, options.into, {"accuracy": half, "held_out": len(images)})


if __name__ == "__main__":
    main()
