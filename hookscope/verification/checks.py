"""What a check of hookscope against a judge comes to: how much was compared, how far apart it is, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookscope.hooks import largest_difference, largest_value


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found.

    Attributes:
        name: ``feature-extractor``, ``re-computation``, ``model-output``, ``inputs``, ``untouched`` or ``shapes``.
        holds: Whether all is as it must be; None where the check is not possible for this model.
        compared: How many things were compared.
        largest_difference: The largest absolute difference among them, None where nothing was compared.
        layer: Where it is, as ``name`` or ``name#call``: the first offence where the check fails, else the largest
            difference; empty where there is none.
        note: What else is to be known, such as why the check is not possible.
    """

    name: str
    holds: bool | None
    compared: int
    largest_difference: float | None
    layer: str = ""
    note: str = ""


class Comparison:
    """Counts comparisons, and remembers the largest difference and the first that is too large.

    Args:
        name: Of the check.
        tolerance: How far two values may be apart, relative to the largest absolute value of the judge's.

    Example:
        >>> import torch
        >>> comparison = Comparison("re-computation")
        >>> ones, zeros = torch.ones(2), torch.zeros(2)
        >>> comparison.compare("conv1", ones, ones), comparison.compare("fc", ones, zeros)
        (True, False)
        >>> found = comparison.check("nothing to compare")
        >>> found.holds, found.largest_difference, found.layer, found.note
        (False, 1.0, 'fc', '1 of 2 differ')
    """

    def __init__(self, name: str, tolerance: float = 0.0) -> None:
        self.name, self.tolerance = name, tolerance
        self.compared = 0
        self.offences: list[str] = []
        self.largest: float | None = None
        self.layer = ""
        self.notes: list[str] = []

    def compare(self, layer: str, recorded: Any, truth: Any) -> bool:
        """Count one comparison; whether the two are equal, or near enough."""
        difference = largest_difference(recorded, truth)
        near = difference == 0 or difference <= self.tolerance * largest_value(truth)
        self.add(layer, difference, near)
        return near

    def add(self, layer: str, difference: float | None, near: bool) -> None:
        """Count one comparison that was made elsewhere."""
        self.compared += 1
        if difference is not None and (self.largest is None or difference > self.largest):
            self.largest = difference
            self.layer = layer if difference else ""
        if not near:
            self.offences.append(layer)

    def check(self, nothing: str) -> Check:
        """What was found; ``nothing`` says why there was nothing to compare."""
        if not self.compared:
            return Check(self.name, None, 0, None, note="; ".join([nothing, *self.notes]))
        if not self.offences:
            return Check(self.name, True, self.compared, self.largest, self.layer, "; ".join(self.notes))
        note = f"{len(self.offences)} of {self.compared} differ"
        return Check(self.name, False, self.compared, self.largest, self.offences[0], "; ".join([note, *self.notes]))
