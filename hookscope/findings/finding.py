"""What a finding is: a named observation with its layer, its evidence and what people do about it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        finding: Its name, such as ``dead-channels``.
        layer: The call it was found in (``name`` or ``name#call``), or the parameter; empty for the whole model.
        evidence: The numbers in words, such as ``3 of 64 channels never leave 0``.
        meaning: One sentence: what it means and what people do about it.
        channels: Which channels or filters, None where it is not about channels.
        groups: Channels that belong together, such as duplicates of each other; None where it is not about groups.
        numbers: The evidence by name, for programs.

    Example:
        >>> found = Finding("dead-channels", "features.0", "1 of 64 channels never leaves 0", "...", channels=(3,))
        >>> found.as_row()["channels"]
        [3]
    """

    finding: str
    layer: str
    evidence: str
    meaning: str
    channels: tuple[int, ...] | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    numbers: Mapping[str, float | int | str | None] = field(default_factory=dict)

    def as_row(self) -> dict[str, Any]:
        """The finding as JSON holds it; ``channels`` and ``groups`` are left out where there are none."""
        row: dict[str, Any] = {"finding": self.finding, "layer": self.layer}
        if self.channels is not None:
            row["channels"] = list(self.channels)
        if self.groups is not None:
            row["groups"] = [list(group) for group in self.groups]
        return row | {"evidence": self.evidence, "meaning": self.meaning, "numbers": dict(self.numbers)}

    def __str__(self) -> str:
        where = f" {self.layer}" if self.layer else ""
        return f"{self.finding}{where}: {self.evidence}. {self.meaning}"


def listed(items: Sequence[Any], most: int = 8) -> str:
    """``3, 17, 40 and 12 more``: the first of many, in words.

    Example:
        >>> listed(range(12), most=3)
        '0, 1, 2 and 9 more'
    """
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def counted(number: int, what: str) -> str:
    """So many of something.

    Example:
        >>> counted(1, "image"), counted(20_000, "image")
        ('1 image', '20,000 images')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def percent(share: float) -> str:
    """A share from 0 to 1 as people write it.

    Example:
        >>> percent(0.5), percent(0.00012)
        ('50 %', '0.012 %')
    """
    return f"{100 * share:.3g} %"
