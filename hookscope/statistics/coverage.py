"""What a run did not measure, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from hookscope.findings import listed
from hookscope.hooks import Call


@dataclass
class Coverage:
    """What a `StatisticsCollector` did not measure.

    Attributes:
        left_out: How many layers of each class the default selection leaves out.
        operations: How often each function ran that is no module, by torch's internal names, in one pass.
        idle: The selected layers that no pass has reached.
        unused: Those of them whose parameters no operation took either.
        with_channels: Keys of calls that compute channels: of convolutions, Linear layers, activation functions, and
            the model.
        unmeasured: Why a call, or a part of its output, has no statistics.
        handed_on: Keys of calls that returned the very tensor of another measured call.
        is_empty: Whether no other was merged into it.
    """

    left_out: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    idle: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    with_channels: set[str] = field(default_factory=set)
    unmeasured: dict[tuple[Call, str], str] = field(default_factory=dict)
    handed_on: set[str] = field(default_factory=set)
    is_empty: bool = True

    def count(self, did_not_run: Collection[str], first: bool) -> None:
        """Add what a pass did not reach."""
        self.idle = tuple(name for name in (did_not_run if first else self.idle) if name in did_not_run)

    def merge(self, other: Coverage) -> None:
        """Add what another run of the same job did not measure; adding the same twice changes nothing."""
        first, self.is_empty = self.is_empty, False
        self.left_out |= other.left_out
        self.operations |= other.operations
        self.idle = tuple(name for name in other.idle if first or name in self.idle)
        self.unused = tuple(name for name in other.unused if first or name in self.unused)
        self.with_channels |= other.with_channels
        self.unmeasured |= other.unmeasured
        self.handed_on |= other.handed_on

    def words(self) -> str:
        """What was left out, in a line; empty where that is nothing."""
        parts = [f"{count:,} {name}" for name, count in self.left_out.most_common()]
        return f"not measured: {listed(parts, 6)}" if parts else ""
