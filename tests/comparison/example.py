"""A comparison made by hand."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hookscope.comparison import (
    Agreement,
    Answer,
    ChangedImage,
    CkaMatrix,
    ComparedMaps,
    Comparison,
    Difference,
    LargestDifference,
    PairedCall,
    SideFacts,
)
from hookscope.hooks import Call

SIDE = SideFacts("resnet18", "IMAGENET1K_V1", "float32", "cpu", "resize 256, crop 224")
IMAGES = ("photos/cat.jpg", "photos/rocket.jpg", "photos/star.png", "photos/ring.png")


def pair(name: str, order: int, relative_l2: float | None = 0.0, kind: str = "Conv2d", **more: Any) -> PairedCall:
    """A pair of equal names; without ``relative_l2`` of other shapes."""
    call = Call(name, kind, 0, order, order)
    different = relative_l2 is not None and relative_l2 > 0
    largest = LargestDifference(2.0 * (relative_l2 or 0.0), 1, (3, 0, 2), 1.5, 1.25) if different else None
    difference = None
    if relative_l2 is not None:
        difference = Difference(1024, 0 if different else 1024, relative_l2, largest, 1 - relative_l2 / 2)
    shape = (8, 16, 16)
    if "cka" in more:
        more["similarities"] = {"cka": more.pop("cka")}
    fields: dict[str, Any] = {"b": call, "part": "", "paired_by": "name", "shape_b": shape, "difference": difference}
    return PairedCall(a=call, shape_a=shape, **fields | more)


def relative(a: Tensor, b: Tensor) -> float:
    """The relative L2 difference by torch; B may be quantized."""
    b = b.dequantize() if b.is_quantized else b
    return float((b.double() - a.double()).norm() / a.double().norm())


def example(calls: int = 8, *, name: str = "layer", images: Sequence[str] = IMAGES, **more: Any) -> Comparison:
    """The first fifth is the same to the bit, then differences grow; blocks of four calls, stages of five blocks."""
    noise = np.random.default_rng(0)
    pairs = [pair("(input)", -1, kind="")]
    for at in range(calls - 2):
        path = f"{name}{at // 20 + 1}.{at // 4 % 5}.{('conv1', 'bn1', 'relu', 'conv2')[at % 4]}"
        type_ = ("Conv2d", "BatchNorm2d", "ReLU", "Conv2d")[at % 4]
        distance = 0.0 if at < calls / 5 else 1e-4 * (1 + at) * float(noise.uniform(0.5, 2))
        alone = distance / 10 if distance else 0.0
        pairs.append(pair(path, at, distance, type_, noise=1e-7, isolated_l2=alone, cka=1 - distance, parameters=alone))
    pairs.append(pair("(model)", calls, 0.05, "", noise=1e-7, cka=0.9))
    first = next(each.key for each in pairs if each.difference and not each.difference.is_same)
    facts: dict[str, Any] = {
        "answer": Answer("parameters", first, pairs[-2].key, 2, f"The parameters of {first} differ.", "Look there."),
        "agreement": Agreement(4, 0.75, 0.9, (ChangedImage(0, images[0], f"{name} A", f"{name} B", 0.6, 0.5),)),
        "matrix": matrix([each.key for each in pairs[1:-1]]),
        "maps": (maps(first, image=1),),
        "provenance": {"hookscope": "1.0", "command": f"hookscope compare {name}"},
        "notes": (f"1 image was lost: {name}.jpg",),
    }
    return Comparison(SIDE, SIDE, tuple(images), calls=tuple(pairs), **facts | more)


def matrix(names: Sequence[str]) -> CkaMatrix:
    """CKA that is smaller the farther two layers are apart; the last layer of A is constant."""
    at = np.arange(len(names))
    values = np.exp(-np.abs(at[:, None] - at) / len(at))
    values[-1] = math.nan
    return CkaMatrix(tuple(names), tuple(names), values, 4)


def maps(key: str, image: int = 0, channels: Sequence[int] = (7, 2, 5), size: int = 6) -> ComparedMaps:
    """Random maps; B differs by less and less, and has one NaN in the first channel."""
    noise = np.random.default_rng(image)
    a = noise.normal(size=(len(channels), size, size)).astype(np.float32)
    b = a + np.float32(0.5) ** np.arange(1, len(channels) + 1, dtype=np.float32)[:, None, None]
    b[0, 0, 0] = math.nan
    return ComparedMaps(key, image, tuple(channels), a, b, np.sqrt(np.square(np.nan_to_num(b - a)).sum((1, 2))))
