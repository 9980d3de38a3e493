"""From where on something is a finding or beyond a limit: options and their types, as named values.

=====================  =============================================================
``Share``               ``5%`` or ``0.05``
``Number``              a number from a least one on; with ``endless`` also ``inf``
``Rank``                a number of directions, or a share of what there can be
``threshold_options``   the thresholds of findings
``thresholds_of``       what these options hold, as `Thresholds`
=====================  =============================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from hookscope.statistics import StatisticsThresholds

Command = TypeVar("Command", bound=Callable[..., Any])


class Share(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """``5%`` or ``0.05`` to a share from 0 to 1."""

    name = "SHARE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """``"5%"`` to 0.05."""
        if isinstance(value, float):
            return value
        text = value.strip()
        if text == "1":
            self.fail("'1' may be meant as 1% or as all; write 1% or 100%", param, ctx)
        try:
            # decimal, as it is written: 0.1% and 1 of 1000 are then the same number
            share = float(Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1))
        except InvalidOperation:
            share = -1.0
        if not 0 <= share <= 1:
            self.fail(f"'{value}' is no share; write 5% or 0.05", param, ctx)
        return share


class Number(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number from ``least`` on; ``inf`` where ``endless``."""

    name = "NUMBER"

    def __init__(self, least: float = 0.0, most: float = math.inf, endless: bool = False) -> None:
        self.least, self.most, self.endless = least, most, endless

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """``"1e4"`` to 10000.0."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not self.least <= number <= self.most or (math.isinf(number) and not self.endless):
            span = f"at least {self.least:g}" if math.isinf(self.most) else f"{self.least:g} to {self.most:g}"
            self.fail(f"'{value}' is no number of {span}", param, ctx)
        return number


class Rank(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of directions, or ``5%`` of those there can be, to ``(number, share)``, one of them None."""

    name = "RANK"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float | None, float | None]:
        """``"8"`` to ``(8.0, None)``, ``"5%"`` to ``(None, 0.05)``."""
        if isinstance(value, tuple):
            return value[0], value[1]
        if value.strip().endswith("%"):
            return None, Share().convert(value, param, ctx)
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < math.inf:
            self.fail(f"'{value}' is no rank; write a number of directions, or 5% of the channels", param, ctx)
        return number, None


_OPTIONS = [
    click.option(
        "--dead-share", type=Share(), default=0.0, help="Dead channels are a finding above this share.  [default: 0%]"
    ),
    click.option(
        "--saturated-share", type=Share(), default=0.5, help="Saturation is a finding above this share.  [default: 50%]"
    ),
    click.option(
        "--vanishing",
        metavar="RMS",
        type=Number(),
        default=2.0**-14,
        show_default=True,
        help="Root mean square below which activations vanish; half precision's smallest normal number.",
    ),
    click.option(
        "--exploding",
        metavar="ABS",
        type=Number(endless=True),
        default=65504.0,
        show_default=True,
        help="Absolute value above which activations explode; half precision's largest number.",
    ),
    click.option(
        "--duplicate-correlation",
        metavar="R",
        type=Number(most=1.0),
        default=0.9999,
        show_default=True,
        help="Pearson correlation from which channels are duplicates.",
    ),
    click.option(
        "--low-rank",
        type=Share(),
        default=0.01,
        help="With --rank: an effective rank below this share of what it can be is a finding.  [default: 1%]",
    ),
    click.option(
        "--drift-shift",
        metavar="STD",
        type=Number(endless=True),
        default=1.0,
        show_default=True,
        help="How many running standard deviations a BatchNorm's inputs may be off.",
    ),
    click.option(
        "--drift-ratio",
        metavar="TIMES",
        type=Number(1.0, endless=True),
        default=4.0,
        show_default=True,
        help="How many times the running variance theirs may be, or the other way round.",
    ),
    click.option(
        "--few-images",
        metavar="N",
        type=click.IntRange(0),
        default=16,
        show_default=True,
        help="With fewer images, a claim of death is marked as one on few.",
    ),
]
_FIELDS = {
    "dead": "dead_share",
    "saturated": "saturated_share",
    "smallest": "vanishing",
    "largest": "exploding",
    "correlation": "duplicate_correlation",
    "rank": "low_rank",
    "shift": "drift_shift",
    "ratio": "drift_ratio",
    "images": "few_images",
}


def threshold_options(command: Command) -> Command:
    """The options that say from where on something is a finding."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def thresholds_of(options: Mapping[str, Any]) -> StatisticsThresholds:
    """The thresholds among the ``options`` of a command."""
    from hookscope.statistics import StatisticsThresholds

    return StatisticsThresholds(**{field: options[option] for field, option in _FIELDS.items()})
