"""How each side resized an image: which of the usual ways gives its input, whatever the normalisation after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as F

from hookscope.images import AnyImage, as_picture
from hookscope.models import LoadedModel, Resize

_UNLIKE = 2e-4  # of the variance of a channel: what rounding to 8 bits leaves unexplained, and another filter exceeds
_SMOOTH = ("bilinear", "bicubic", "lanczos", "box", "hamming")  # with antialias
_PLAIN = ("bilinear", "bicubic", "nearest", "nearest-exact")  # without


def resizes_apart(picture: AnyImage, a: LoadedModel, b: LoadedModel) -> str:
    """How both sides resize ``picture``, where they do it differently; empty if one of them does it in no usual way."""
    source = as_picture(picture)
    image = source.image
    inputs = [net.prepare(source).cpu().double() for net in (a, b)]
    if inputs[0].shape != inputs[1].shape or inputs[0].dim() != 3 or len(inputs[0]) != 3:
        return ""
    size = (int(inputs[0].shape[1]), int(inputs[0].shape[2]))
    own = [net.preprocess.transforms.resize for net in (a, b)]
    unlike: list[dict[str, float]] = [{}, {}]
    for resize, resized in _ways(image, size, own):
        words = _described(resize)
        for found, tensor in zip(unlike, inputs, strict=True):
            found[words] = min(found.get(words, 1.0), _unlike(resized, tensor))
    explained = [{words for words, share in found.items() if share < _UNLIKE} for found in unlike]
    if not all(explained) or explained[0] & explained[1]:
        return ""
    ways = [min(found, key=lambda words: found[words]) for found in unlike]
    return f"The images are resized differently: {ways[0]} in A, {ways[1]} in B"


def _ways(image: Image.Image, size: tuple[int, int], own: list[Resize]) -> Iterator[tuple[Resize, Tensor]]:
    """The usual ways to make an image of ``size``, and what they make."""
    usual = [Resize("stretch", size), *(Resize(mode, size, size) for mode in ("shorter", "pad"))]
    usual.append(Resize("shorter", (round(size[0] * 256 / 224), round(size[1] * 256 / 224)), size))
    ways: dict[str, Resize] = {}
    for way in [*(way for way in own if way.made == size), *usual]:
        ways.setdefault(replace(way, interpolation="bilinear", antialias=True).describe(), way)
    pixels = F.pil_to_tensor(image)
    for way in ways.values():
        for interpolation in _SMOOTH:
            smooth = replace(way, interpolation=interpolation, antialias=True)
            yield smooth, F.pil_to_tensor(smooth(image))
        for interpolation in _PLAIN:
            plain = replace(way, interpolation=interpolation, antialias=False)
            yield plain, plain(pixels)


def _described(resize: Resize) -> str:
    filter_ = resize.interpolation.removesuffix("-exact")
    plain = "" if resize.antialias or filter_ == "nearest" else " without antialias"
    return f"{replace(resize, interpolation='bilinear').describe()} {filter_}{plain}"


def _unlike(resized: Any, tensor: Tensor) -> float:
    """The largest share of the variance of a channel that no channel of ``resized`` explains, of RGB or of BGR."""
    if resized.shape != tensor.shape:
        return 1.0
    both = torch.cat([resized.double().flatten(1), tensor.flatten(1)])
    alike = torch.corrcoef(both)[:3, 3:].nan_to_num(0).clamp(min=0) ** 2
    return 1 - max(float(alike.diagonal().min()), float(alike.fliplr().diagonal().min()))
