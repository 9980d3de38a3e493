"""Runs of extraction made by hand, for tests of what is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import ImageError
from hookscope.extraction import ExtractionJob, FeatureBatch, FeatureSource, WritingRun, WrittenFeatures, check_output
from hookscope.images import Listener
from hookscope.jobs import Part, RunSettings, SkippedImage

SOURCE = FeatureSource("net", "random (seed 0)", "f" * 64, "resize 8", "a, b", "mean", "", ("cat",), False)
NAMES = [f"{'cat' if number % 2 else 'dög'}/{number}.png" for number in range(23)]


def features(position: int) -> dict[str, Tensor]:
    """What an image gives, known from its position."""
    return {
        "layer4.0.relu#1": torch.arange(6).reshape(2, 3) + 10.0 * position,
        "backbone out": torch.tensor([position, -position, 0.5], dtype=torch.float32),
        "probability cat": torch.tensor(position / 100),
    }


def parts(
    first: int = 0,
    size: int = 4,
    lost: tuple[int, ...] = (0, 5, 6, 22),
    of: Callable[[int], dict[str, Tensor]] = features,
    names: list[str] = NAMES,
    stop: int | None = None,
) -> Generator[Part[FeatureBatch]]:
    """Parts of at most ``size`` images from position ``first`` on; KeyboardInterrupt before image ``stop``."""
    for begin in range(first, len(names), size):
        end = min(begin + size, len(names))
        if stop is not None and end > stop:
            raise KeyboardInterrupt
        used = [position for position in range(begin, end) if position not in lost]
        errors = tuple(
            SkippedImage(p, names[p], ImageError(f"{names[p]}: bad\tfile")) for p in range(begin, end) if p in lost
        )
        if not used:
            yield Part(None, end, skipped=errors)
            continue
        texts = tuple(names[p] for p in used)
        digests = tuple(hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest() for name in texts)
        rows = [of(position) for position in used]
        values = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        batch = FeatureBatch(tuple(used), texts, digests, tuple(name.split("/")[0] for name in texts), values)
        yield Part(batch, end, batch.positions, batch.names, batch.sha256, errors)


class Parts:
    """An engine whose parts are made by hand, by a function of the first position."""

    def __init__(self, parts: Callable[[int], Iterator[Part[FeatureBatch]]]) -> None:
        self.parts = parts

    def run(self, job: Any, net: Any, paths: Any, first: int = 0) -> Generator[Part[FeatureBatch]]:
        yield from self.parts(first)


def write(
    path: str | Path,
    first_parts: dict[str, Any] | Callable[[int], Iterator[Part[FeatureBatch]]] | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> WrittenFeatures:
    """Write the features of `parts` with these arguments, or of the parts that a function gives."""
    source, resume = replace(SOURCE, **options.pop("source", {})), options.get("resume", False)
    listener = replace(Listener(skipped=lambda *image: None), **options.pop("listener", {}))
    arguments = first_parts if isinstance(first_parts, dict) else {}
    names = arguments.get("names", NAMES) if names is None else names
    count = options.pop("count", len(names))
    output = check_output(path, **options)
    engine = Parts(first_parts if callable(first_parts) else lambda first: parts(first, **arguments))
    job, settings = ExtractionJob("a, b", None, "mean", "", 4, 0), RunSettings(engine=engine, listener=listener)
    net: Any = None
    return WritingRun(net, names, job, settings, output.state, output, source, count).written(resume)
