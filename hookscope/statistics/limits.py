"""Limits on statistics, as a gate holds them: which layers break which limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hookscope.findings import listed, nonfinite_words, percent
from hookscope.hooks import Layers, Selection
from hookscope.statistics.layer_statistics import LayerStatistics


@dataclass(frozen=True, slots=True)
class Limits:
    """What a layer may not go beyond; None where there is no limit.

    Attributes:
        max_dead: Share of dead channels, 0 to 1.
        max_saturated: Share of values near a bound, 0 to 1.
        no_nan: Whether NaN and Inf are forbidden.
        max_abs: Largest absolute value.
        min_rank: Effective rank, in directions.
        min_rank_share: Effective rank, as a share of what it can be, see `LayerStatistics.highest_rank`, 0 to 1.
    """

    max_dead: float | None = None
    max_saturated: float | None = None
    no_nan: bool = False
    max_abs: float | None = None
    min_rank: float | None = None
    min_rank_share: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The limits there are, as the options are called."""
        given = {
            "max-dead": self.max_dead,
            "max-saturated": self.max_saturated,
            "no-nan": self.no_nan or None,
            "max-abs": self.max_abs,
            "min-rank": self.min_rank if self.min_rank is not None else self.min_rank_share,
        }
        return tuple(name for name, value in given.items() if value is not None)


@dataclass(frozen=True, slots=True)
class BrokenLimit:
    """A layer beyond a limit.

    Attributes:
        limit: As the option is called, such as ``max-dead``.
        layer: The call.
        index: Its index.
        value: What was measured.
        allowed: What the limit is.
        evidence: In words.
        channels: Which channels, None where it is not about channels.
    """

    limit: str
    layer: str
    index: int | None
    value: float
    allowed: float
    evidence: str
    channels: tuple[int, ...] | None = None


def held_layers(layers: Sequence[LayerStatistics], allow: Layers = ()) -> list[LayerStatistics]:
    """Those of ``layers`` to which limits apply: all but those that ``allow`` selects.

    Args:
        layers: Statistics of a collector.
        allow: Selections, see `Selection`; what was not measured is allowed in vain.

    Raises:
        SelectionError: a term of ``allow`` cannot be read.
    """
    if not allow:
        return list(layers)
    allowed, total = Selection.of(allow), sum(layer.call.index is not None for layer in layers)
    return [one for one in layers if not allowed.wants_of(one.call.name, one.call.call, one.call.index, total)]


def broken_limits(layers: Sequence[LayerStatistics], limits: Limits) -> list[BrokenLimit]:
    """Every limit that a layer breaks, in order of execution.

    Example:
        >>> import torch
        >>> from hookscope.statistics.collector import StatisticsCollector
        >>> _ = torch.manual_seed(1)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU())
        >>> net[0].bias.data[2] = -9.0
        >>> with StatisticsCollector(net) as collector, torch.no_grad():
        ...     _ = net(torch.rand(20, 3, 8, 8))
        >>> [(o.limit, o.layer, o.value) for o in broken_limits(collector.totals.statistics(), Limits(max_dead=0.05))]
        [('max-dead', '1', 0.25)]
    """
    return [offence for layer in layers for offence in _offences(layer, limits)]


def _offences(layer: LayerStatistics, limits: Limits) -> Iterator[BrokenLimit]:
    key, index = layer.key, layer.call.index
    dead = len(layer.dead_channels) / max(layer.channels, 1)
    if limits.max_dead is not None and dead > limits.max_dead:
        text = f"{len(layer.dead_channels)} of {layer.channels} channels are dead: {listed(layer.dead_channels)}"
        yield BrokenLimit("max-dead", key, index, dead, limits.max_dead, text, layer.dead_channels)
    if limits.max_saturated is not None and layer.saturated is not None and layer.saturated > limits.max_saturated:
        text = f"{percent(layer.saturated)} of values are within 1 % of a bound"
        yield BrokenLimit("max-saturated", key, index, layer.saturated, limits.max_saturated, text)
    if limits.no_nan and (bad := layer.nan + layer.inf):
        text = f"{nonfinite_words(layer.nan, layer.inf)} of {layer.values:,} values"
        yield BrokenLimit("no-nan", key, index, bad, 0, text)
    if limits.max_abs is not None:
        yield from _of_size(layer, limits.max_abs)
    yield from _of_rank(layer, limits)


def _of_size(layer: LayerStatistics, most: float) -> Iterator[BrokenLimit]:
    largest = max(-(layer.min or 0.0), layer.max or 0.0)
    text = "no finite value" if layer.min is None else f"from {layer.min:.6g} to {layer.max:.6g}"
    if layer.inf:  # beyond any limit; the extremes are of the finite values
        largest, text = math.inf, f"{layer.inf:,} Inf, else {text}"
    if largest > most:
        yield BrokenLimit("max-abs", layer.key, layer.call.index, largest, most, text)


def _of_rank(layer: LayerStatistics, limits: Limits) -> Iterator[BrokenLimit]:
    least = limits.min_rank
    if limits.min_rank_share is not None:
        least = limits.min_rank_share * layer.highest_rank
    if least is not None and layer.rank is not None and layer.rank < least:
        text = f"effective rank {layer.rank:.4g} of at most {layer.highest_rank} in {layer.channels} channels"
        yield BrokenLimit("min-rank", layer.key, layer.call.index, layer.rank, least, text)
