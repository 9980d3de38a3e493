"""Options for the thresholds of findings and for limits, and their types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

import click

from hookscope.findings import Threshold, thresholds_for

Command = TypeVar("Command", bound=Callable[..., Any])


class Share(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """``5%`` or ``0.05`` to a share from 0 to 1."""

    name = "SHARE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = value.strip()
        if text == "1":
            self.fail("'1' may be meant as 1% or as all; write 1% or 100%", param, ctx)
        try:
            # Decimal keeps 0.1% equal to 1 of 1000
            share = float(Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1))
        except InvalidOperation:
            share = -1.0
        if not 0 <= share <= 1:
            self.fail(f"'{value}' is not a share; write 5% or 0.05", param, ctx)
        return share


class Number(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number from ``least`` on; ``inf`` where ``endless``."""

    name = "NUMBER"

    def __init__(self, least: float = 0.0, most: float = math.inf, endless: bool = False) -> None:
        self.least, self.most, self.endless = least, most, endless

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not self.least <= number <= self.most or (math.isinf(number) and not self.endless):
            span = f"at least {self.least:g}" if math.isinf(self.most) else f"{self.least:g} to {self.most:g}"
            self.fail(f"'{value}' is not a number of {span}", param, ctx)
        return number


class Rank(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of directions, or ``5%`` of the maximum, to ``(number, share)``, one of them None."""

    name = "RANK"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float | None, float | None]:
        if isinstance(value, tuple):
            return value[0], value[1]
        if value.strip().endswith("%"):
            return None, Share().convert(value, param, ctx)
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < math.inf:
            self.fail(f"'{value}' is not a rank; write a number of directions, or 5% of the channels", param, ctx)
        return number, None


def threshold_options(question: str) -> Callable[[Command], Command]:
    """The options of the thresholds of all findings on ``question``, as the catalogue describes them."""

    def add(command: Command) -> Command:
        for threshold in reversed(_with_options(question)):
            shown = f"  [default: {100 * threshold.default:g}%]" if threshold.share else ""
            option = click.option(
                threshold.option,
                metavar=None if threshold.share else threshold.unit,
                type=_type_of(threshold),
                default=threshold.default,
                show_default=not threshold.share,
                help=threshold.help + shown,
            )
            command = option(command)
        return command

    return add


def _with_options(question: str) -> list[Threshold]:
    return [threshold for threshold in thresholds_for(question) if threshold.option]


def _type_of(threshold: Threshold) -> click.ParamType:  # type: ignore[type-arg,unused-ignore]
    if threshold.share:
        return Share()
    if threshold.whole:
        return click.IntRange(int(threshold.least))
    return Number(threshold.least, threshold.most, threshold.endless)


def chosen_thresholds(question: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the `threshold_options` of ``question``, by the names of the thresholds."""
    names = {threshold.name: threshold.option.strip("-").replace("-", "_") for threshold in _with_options(question)}
    return {name: options[option] for name, option in names.items()}
