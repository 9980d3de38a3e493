"""What was counted of every layer of a model: the part of a survey that can be merged, saved and taken up again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from hookscope.errors import InputError
from hookscope.statistics.accumulator import LayerAccumulator
from hookscope.statistics.batchnorm import BatchNormAccumulator, BatchNormDrift
from hookscope.statistics.layer_statistics import LayerStatistics


@dataclass
class RunningStatistics:
    """Accumulators of layer calls and BatchNorms, in order of execution, over so many ``images``.

    Raises:
        InputError: on `merge` with a tally of other layers.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> halves = []
        >>> for half in torch.rand(8, 3, 5, 5).split(4):
        ...     layer = LayerAccumulator(Call("conv1", "Conv2d", 0, 0), 3)
        ...     tally = RunningStatistics(images=4, layers={"conv1": layer})
        ...     _ = tally.layers["conv1"].update(half, list("abcd"))
        ...     halves.append(tally)
        >>> halves[0].merge(halves[1])
        >>> halves[0].images, halves[0].statistics()[0].items
        (8, 8)
    """

    images: int = 0
    layers: dict[str, LayerAccumulator] = field(default_factory=dict)
    batch_norms: dict[str, BatchNormAccumulator] = field(default_factory=dict)

    def statistics(self, duplicate_correlation: float = 0.9999) -> list[LayerStatistics]:
        """What is known of each call so far, in order of execution.

        Args:
            duplicate_correlation: From this Pearson correlation on two channels are duplicates.
        """
        calls: dict[str, int] = {}
        for found in self.layers.values():
            calls[found.call.name] = max(calls.get(found.call.name, 0), found.call.call + 1)
        return [found.statistics(calls[found.call.name], duplicate_correlation) for found in self.layers.values()]

    def drifts(self) -> list[BatchNormDrift]:
        """How far the inputs of each BatchNorm are from its running statistics."""
        return [found.drift(name) for name, found in self.batch_norms.items()]

    def merge(self, other: RunningStatistics) -> None:
        """Add what ``other`` has counted, which may go on to be used: nothing is shared with it that changes."""
        for key, found in other.layers.items():
            mine = self.layers.get(key)
            if mine is not None and (mine.channels, mine.call.type) != (found.channels, found.call.type):
                raise InputError(
                    f"{key} has {mine.channels} channels of {mine.call.type} and {found.channels} of {found.call.type}",
                    do="merge what was counted of one model",
                )
        for name, norm in other.batch_norms.items():
            if name in self.batch_norms and self.batch_norms[name].channels != norm.channels:
                raise InputError(
                    f"{name} has {self.batch_norms[name].channels} channels and {norm.channels}",
                    do="merge what was counted of one model",
                )
        self.images += other.images
        self.layers = _with_places_for(self.layers, other.layers)
        for key, found in other.layers.items():
            self.layers[key].merge(found)
        self.batch_norms = _with_places_for(self.batch_norms, other.batch_norms)
        for name, norm in other.batch_norms.items():
            self.batch_norms[name].merge(norm)

    def state_dict(self) -> dict[str, Any]:
        """Everything counted: numbers, texts, arrays, lists and dictionaries of these; `from_state` takes it back."""
        return {
            "images": self.images,
            "layers": [found.state_dict() for found in self.layers.values()],
            "batch_norms": [[name, found.state_dict()] for name, found in self.batch_norms.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The tally that `state_dict` told of."""
        layers = [LayerAccumulator.from_state(one) for one in state["layers"]]
        norms = {name: BatchNormAccumulator.from_state(one) for name, one in state["batch_norms"]}
        return cls(int(state["images"]), {found.key: found for found in layers}, norms)


class _CanBeEmpty(Protocol):
    def empty(self) -> Any: ...


_Found = TypeVar("_Found", bound=_CanBeEmpty)


def _with_places_for(mine: dict[str, _Found], theirs: Mapping[str, _Found]) -> dict[str, _Found]:
    """``mine`` and, empty, what only ``theirs`` has: a head that ran for no picture of mine keeps its place."""
    if theirs.keys() <= mine.keys():
        return mine
    order, at = list(mine), 0
    for key in theirs:
        if key in mine:
            at = order.index(key) + 1
        else:
            order.insert(at, key)
            at += 1
    return {key: mine[key] if key in mine else theirs[key].empty() for key in order}
