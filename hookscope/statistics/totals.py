"""Running statistics of every layer of a model, which can be merged, saved and resumed."""

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
    """Accumulators of layer calls and BatchNorms, in order of execution, over ``images`` images.

    Raises:
        InputError: `merge` is given statistics of other layers.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> halves = []
        >>> for half in torch.rand(8, 3, 5, 5).split(4):
        ...     layer = LayerAccumulator(Call("conv1", "Conv2d", 0, 0), 3)
        ...     totals = RunningStatistics(images=4, layers={"conv1": layer})
        ...     _ = totals.layers["conv1"].update(half, list("abcd"))
        ...     halves.append(totals)
        >>> halves[0].merge(halves[1])
        >>> halves[0].images, halves[0].statistics()[0].items
        (8, 8)
    """

    images: int = 0
    layers: dict[str, LayerAccumulator] = field(default_factory=dict)
    batch_norms: dict[str, BatchNormAccumulator] = field(default_factory=dict)

    def statistics(self, duplicate_correlation: float = 0.9999) -> list[LayerStatistics]:
        """Statistics of each call so far, in order of execution.

        Args:
            duplicate_correlation: Pearson correlation from which two channels are duplicates.
        """
        calls: dict[str, int] = {}
        for found in self.layers.values():
            calls[found.call.name] = max(calls.get(found.call.name, 0), found.call.call + 1)
        return [found.statistics(calls[found.call.name], duplicate_correlation) for found in self.layers.values()]

    def drifts(self) -> list[BatchNormDrift]:
        """Distance of the inputs of each BatchNorm from its running statistics."""
        return [found.drift(name) for name, found in self.batch_norms.items()]

    def merge(self, other: RunningStatistics) -> None:
        """Add ``other``, which shares no state with this object afterwards."""
        for key, found in other.layers.items():
            mine = self.layers.get(key)
            if mine is not None and (mine.channels, mine.call.type) != (found.channels, found.call.type):
                raise InputError(
                    f"{key} has {mine.channels} channels of {mine.call.type} and {found.channels} of {found.call.type}",
                    do="merge statistics of one model",
                )
        for name, norm in other.batch_norms.items():
            if name in self.batch_norms and self.batch_norms[name].channels != norm.channels:
                raise InputError(
                    f"{name} has {self.batch_norms[name].channels} channels and {norm.channels}",
                    do="merge statistics of one model",
                )
        self.images += other.images
        self.layers = _with_places_for(self.layers, other.layers)
        for key, found in other.layers.items():
            self.layers[key].merge(found)
        self.batch_norms = _with_places_for(self.batch_norms, other.batch_norms)
        for name, norm in other.batch_norms.items():
            self.batch_norms[name].merge(norm)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, arrays, lists and dictionaries of these, for `from_state`."""
        return {
            "images": self.images,
            "layers": [found.state_dict() for found in self.layers.values()],
            "batch_norms": [[name, found.state_dict()] for name, found in self.batch_norms.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned."""
        layers = [LayerAccumulator.from_state(one) for one in state["layers"]]
        norms = {name: BatchNormAccumulator.from_state(one) for name, one in state["batch_norms"]}
        return cls(int(state["images"]), {found.key: found for found in layers}, norms)


class _CanBeEmpty(Protocol):
    def empty(self) -> Any: ...


_Found = TypeVar("_Found", bound=_CanBeEmpty)


def _with_places_for(mine: dict[str, _Found], theirs: Mapping[str, _Found]) -> dict[str, _Found]:
    """``mine`` with an empty accumulator, in order of execution, for each layer that only ran for ``theirs``."""
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
