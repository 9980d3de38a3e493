"""What is measured of a parameter, and the thresholds of the findings on it; this file needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hookscope.columns import Column, Columns
from hookscope.display import Cells, Shown
from hookscope.errors import UsageError
from hookscope.findings import Thresholds, default


def _count(groups: Sequence[object] | None) -> int | None:
    return None if groups is None else len(groups)


def _duplicates(row: ParameterStatistics) -> int | None:
    groups = row.duplicate_filters
    return None if groups is None else sum(len(group) - 1 for group in groups)


WEIGHTS = Columns(
    Column("name"),
    Column("type", need=5),
    Column("shape", need=7),
    Column("mean", need=10),
    Column("std"),
    Column("min", need=8),
    Column("max", need=8),
    Column("norm", need=6),
    Column("zeros", need=9),
    Column("nan", hide="zero"),
    Column("inf", hide="zero"),
    Column("filters", need=3, hide="unknown"),
    Column("filter_norm_min", need=2, hide="unknown"),
    Column("filter_norm_mean", need=1, hide="unknown"),
    Column("filter_norm_max", need=2, hide="unknown"),
    Column("dead", lambda row: _count(row.dead_filters), hide="zero"),
    Column("duplicate", _duplicates, hide="zero"),
    Column("collapsed", lambda row: _count(row.collapsed), hide="zero"),
    Column("updated", need=4, hide="unknown"),
    Column("findings", hide="zero"),
    Column("weights", where="rows"),
    Column("layer", where="nested"),
    Column("buffer", where="nested"),
    Column("dead_filters", where="nested"),
    Column("duplicate_filters", where="nested"),
    Column("collapsed_channels", lambda row: row.collapsed, where="nested"),
    Column("first_nonfinite", where="nested"),
)
"""What ``weights`` says of a parameter, a `ParameterStatistics`."""


@dataclass(frozen=True)
class ParameterThresholds(Thresholds):
    """Thresholds of the findings on weights; the catalogue says where the defaults come from.

    Attributes:
        dead_norm: A filter is dead if its norm is 0 or below this share of the layer's median norm.
        duplicate_cosine: Least cosine of two filters on the same inputs that are duplicates.
        collapsed: A channel has collapsed if its running variance is below this share of the layer's eps.

    Raises:
        UsageError: for a share outside [0, 1), or a cosine outside (0, 1].
    """

    question = "weights"

    dead_norm: float = default("dead-filters", "dead_norm")
    duplicate_cosine: float = default("duplicate-filters", "duplicate_cosine")
    collapsed: float = default("collapsed-variance", "collapsed")

    def __post_init__(self) -> None:
        for what, share in (("dead norm", self.dead_norm), ("share of eps", self.collapsed)):
            if not 0 <= share < 1:
                raise UsageError(f"{what} {share:g} is not a share", do="give at least 0, and less than 1")
        if not 0 < self.duplicate_cosine <= 1:
            raise UsageError(f"duplicate cosine {self.duplicate_cosine:g}", do="give more than 0, at most 1")


@dataclass(frozen=True, slots=True, repr=False)
class ParameterStatistics(Shown):
    """Statistics of one parameter, or of one buffer of a BatchNorm, computed in float64 from its finite values.

    Attributes:
        name: As in ``named_parameters()``, or the name of the buffer or the computed weight. A parameter that
            layers share has the first of its names.
        layer: Dotted path of the layer that has the parameter.
        type: Class name of that layer.
        shape: Of the tensor. Quantised values are decoded; of complex values the magnitude counts.
        buffer: Whether it is not a parameter: running statistics, the weights of frozen BatchNorms, and weights that
            pruning and parametrizations compute from parameters.
        mean: Mean. If no value is finite, it is None, like all others up to ``norm``.
        std: Population standard deviation.
        min: Lowest value.
        max: Highest value.
        norm: L2 norm.
        zeros: Share of values that are 0, in 0..1; None without values.
        nan: Count of NaN.
        inf: Count of +Inf and -Inf.
        first_nonfinite: Position of the first NaN or Inf.
        filters: Count of filters in the weight of a convolution, one for each output channel. For other parameters
            it is None, like all others up to ``duplicate_filters``.
        filter_norm_min: Least norm of the filters without NaN and Inf.
        filter_norm_mean: Mean norm of the same filters.
        filter_norm_max: Largest norm of the same filters.
        dead_filters: Numbers of dead filters, see `ParameterThresholds`.
        duplicate_filters: Groups of duplicate filters, see `duplicate_filters`; None for more than 16,384 filters.
        collapsed: Collapsed channels of a running variance.
        eps: The layer's eps, for running statistics.
        updated: Whether running statistics were ever updated: batches were counted, a mean is not 0, or a variance is
            not 1 (old checkpoints have no count of batches).
        histogram: Numbers of finite values in equal intervals from ``min`` to ``max``; empty if none were asked for.
    """

    name: str
    layer: str
    type: str
    shape: tuple[int, ...]
    buffer: bool
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    norm: float | None
    zeros: float | None
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None = None
    filters: int | None = None
    filter_norm_min: float | None = None
    filter_norm_mean: float | None = None
    filter_norm_max: float | None = None
    dead_filters: tuple[int, ...] | None = None
    duplicate_filters: tuple[tuple[int, ...], ...] | None = None
    collapsed: tuple[int, ...] | None = None
    eps: float | None = None
    updated: bool | None = None
    histogram: tuple[int, ...] = ()

    def _cells(self) -> Cells:
        names = ("name", "shape", "mean", "std", "min", "max", "norm", "zeros")
        cells = {name: getattr(self, name) for name in names}
        dead = None if self.dead_filters is None else len(self.dead_filters)
        return cells | {"dead filters": dead, "nonfinite": self.nan + self.inf}

    @property
    def count(self) -> int:
        """Count of all values."""
        return math.prod(self.shape)
