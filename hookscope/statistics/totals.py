"""Running statistics of every layer of a model, which can be merged, saved and resumed."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np

from hookscope.display import Rows
from hookscope.errors import InputError
from hookscope.findings import counted
from hookscope.statistics.accumulator import LayerAccumulator, has_fixed_channels
from hookscope.statistics.batchnorm import BatchNormAccumulator, BatchNormDrift
from hookscope.statistics.layer_statistics import LayerStatistics

_Part = TypeVar("_Part", LayerAccumulator, BatchNormAccumulator)


@dataclass
class RunningStatistics:
    """Accumulators of layer calls and BatchNorms, in order of execution, over ``images`` images.

    Attributes:
        images: Number of images.
        layers: The accumulators of layer calls by name.
        batch_norms: The accumulators of BatchNorms by name.
        pictures: 64 bits of the SHA-256 of each image file; empty for tensors, and unknown in files of version 0.1.0.

    Raises:
        InputError: `merge` is given statistics of other layers, of the same images, or the object itself.

    Example:
        >>> import torch
        >>> from hookscope import StatisticsCollector
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1))
        >>> halves = []
        >>> for half in torch.rand(8, 3, 5, 5).split(4):
        ...     with StatisticsCollector(net) as collector, torch.no_grad():
        ...         _ = net(half)
        ...     halves.append(collector.totals)
        >>> halves[0].merge(halves[1])
        >>> halves[0].images, halves[0].statistics()[0].items
        (8, 8)
    """

    images: int = 0
    layers: dict[str, LayerAccumulator] = field(default_factory=dict)
    batch_norms: dict[str, BatchNormAccumulator] = field(default_factory=dict)
    pictures: array[int] = field(default_factory=lambda: array("q"))

    def statistics(self, duplicate_correlation: float = 0.9999) -> list[LayerStatistics]:
        """Statistics of each call so far, in order of execution.

        Args:
            duplicate_correlation: Pearson correlation from which two channels are duplicates.
        """
        calls: dict[str, int] = {}
        for layer in self.layers.values():
            calls[layer.call.name] = max(calls.get(layer.call.name, 0), layer.call.call + 1)
        return Rows(layer.statistics(calls[layer.call.name], duplicate_correlation) for layer in self.layers.values())

    def drifts(self) -> list[BatchNormDrift]:
        """Distance of the inputs of each BatchNorm from its running statistics."""
        return [norm.drift(name) for name, norm in self.batch_norms.items()]

    def merge(self, other: RunningStatistics) -> None:
        """Add ``other``, which shares no state with this object afterwards."""
        common = len(set(self.pictures).intersection(other.pictures))
        if common or other is self:
            asked = f"they have {counted(common, 'image')} in common" if common else "these are the same statistics"
            raise InputError(f"cannot merge: {asked}", "an image would count twice", "merge statistics of other images")
        for key, layer in other.layers.items():
            mine = self.layers.get(key, layer)
            same = mine.channels == layer.channels or not has_fixed_channels(layer.call)
            if not same or mine.call.type != layer.call.type:
                raise InputError(
                    f"{key} has {mine.channels} channels of {mine.call.type} and {layer.channels} of {layer.call.type}",
                    do="merge statistics of one model",
                )
        for name, norm in other.batch_norms.items():
            channels = self.batch_norms.get(name, norm).channels
            if channels != norm.channels:
                raise InputError(
                    f"{name} has {channels} channels and {norm.channels}", do="merge statistics of one model"
                )
        self.images += other.images
        self.pictures.extend(other.pictures)
        self.layers = _merged(self.layers, other.layers)
        self.batch_norms = _merged(self.batch_norms, other.batch_norms)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, arrays, lists and dictionaries of these, for `from_state`."""
        return {
            "images": self.images,
            "pictures": np.array(self.pictures, np.int64),
            "layers": [layer.state_dict() for layer in self.layers.values()],
            "batch_norms": [[name, norm.state_dict()] for name, norm in self.batch_norms.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned."""
        layers = [LayerAccumulator.from_state(layer) for layer in state["layers"]]
        norms = {name: BatchNormAccumulator.from_state(norm) for name, norm in state["batch_norms"]}
        pictures = array("q", np.asarray(state.get("pictures", ()), np.int64).tobytes())
        return cls(int(state["images"]), {layer.key: layer for layer in layers}, norms, pictures)


def _merged(mine: dict[str, _Part], theirs: Mapping[str, _Part]) -> dict[str, _Part]:
    """``mine`` with ``theirs`` added; a layer that only ran for ``theirs`` keeps its place in order of execution."""
    merged, order, at = dict(mine), list(mine), 0
    for key, part in theirs.items():
        if key in mine:
            at = order.index(key) + 1
            merged[key].merge(part)
        else:
            merged[key] = deepcopy(part)
            order.insert(at, key)
            at += 1
    return {key: merged[key] for key in order}
