"""What a run was done on: the identity of its weights, of its layers and of its images."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hookscope.hooks import Layers, Selection, tensors_in


def fingerprint_of(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers with their names."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name}\0".encode())
        for tensor in tensors_in(value).values():  # a quantized layer packs weight and bias
            values = tensor.dequantize() if tensor.is_quantized else tensor
            digest.update(f"{values.dtype} {tuple(values.shape)}\0".encode())
            digest.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def layers_in_words(layers: Layers, types: Iterable[Any] | None = None) -> str:
    """A selection of layers, as saved files hold it."""
    words = str(layers) if isinstance(layers, str | int | Selection) else ", ".join(map(str, layers))
    return words + (f" of {', '.join(map(str, types))}" if types else "")


def picture_of(sha256: str) -> int:
    """The identity of an image: the first 64 bits of the SHA-256 of its file, which has the same under any name."""
    return int.from_bytes(bytes.fromhex(sha256[:16]), "big", signed=True)


def pictures_in(paths: Iterable[str]) -> list[int | None]:
    """The identity of each image file; None for pipes and files that cannot be read."""
    pictures: list[int | None] = []
    for path in paths:
        pictures.append(None)
        with contextlib.suppress(OSError, ValueError):
            if os.path.isfile(path):
                with open(path, "rb") as stream:
                    pictures[-1] = picture_of(hashlib.file_digest(stream, "sha256").hexdigest())
    return pictures
