"""What a finding in a training run is: a finding with the step at which it begins and that at which it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookscope.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFinding(Finding):
    """One thing that is not as it should be, and from when to when.

    Attributes:
        step: The first sampled step that shows it.
        last_step: The last that does.
        time: Seconds from the start of the run to ``step``; None where the log does not tell.
        lasts: Whether the last sampled step shows it still.
        layers: Every call that has it, in order of execution, `layer` among them; empty for the whole run.
        model: The number of the root model it is in; None for the whole run.
        optimizer: Whose steps these are.

    Example:
        >>> found = TimedFinding("loss-spike", "", "...", "...", step=50, last_step=50, time=1.5, lasts=False)
        >>> found.as_row()["step"], found.as_row()["time"]
        (50, 1.5)
    """

    step: int
    last_step: int
    time: float | None
    lasts: bool
    layers: tuple[str, ...] = ()
    model: int | None = None
    optimizer: int = 0

    def as_row(self) -> dict[str, Any]:
        """The finding as JSON holds it, its steps first."""
        timed = {"step": self.step, "last_step": self.last_step, "time": self.time, "lasts": self.lasts}
        # not super(): the class that it looks for is the one before slots were added
        return timed | Finding.as_row(self) | {"layers": list(self.layers)}


def when_words(step: int, last_step: int, time: float | None, lasts: bool, samples: int = 2) -> str:
    """From when to when, as a person tells it.

    Args:
        step: The first.
        last_step: The last.
        time: Seconds to the first; None where not known.
        lasts: Whether the last is the last there is.
        samples: How many sampled steps there are.

    Example:
        >>> when_words(400, 900, 75.0, True), when_words(0, 50, None, False)
        ('from step 400 (1 min 15 s) to the end', 'steps 0 to 50')
    """
    begin = step_words(step, time)
    if samples == 1:
        return f"at step {begin}, the only one sampled"
    if lasts:
        return f"at step {begin}, the last one sampled" if step == last_step else f"from step {begin} to the end"
    return f"at step {begin}" if step == last_step else f"steps {begin} to {last_step:,}"


def step_words(step: int, time: float | None) -> str:
    """A step and when it was.

    Example:
        >>> step_words(1200, 3.21), step_words(0, None)
        ('1,200 (3.2 s)', '0')
    """
    return f"{step:,}" if time is None or time != time else f"{step:,} ({duration_words(time)})"


def duration_words(seconds: float) -> str:
    """A time as people say it, in its two largest units.

    Example:
        >>> duration_words(3.21), duration_words(75), duration_words(7500)
        ('3.2 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"
