"""Options for the thresholds of findings and for limits, and their types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from hookscope import parameters, statistics
from hookscope.cli.fields import option
from hookscope.cli.shared.options import complete_words
from hookscope.errors import UsageError, nearest
from hookscope.findings import Threshold, thresholds_for


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
            # the exponent keeps 0.1% equal to 1 of 1000, which a division by 100 does not
            share = float(f"{text[:-1].strip()}e-2" if text.endswith("%") else text)
        except ValueError:
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


def threshold_option(question: str) -> Any:
    """``--threshold NAME=VALUE`` for all findings on ``question``; the command gets the value of each by its name."""

    def parse(texts: Sequence[str]) -> dict[str, Any]:
        known = {threshold.option: threshold for threshold in _with_options(question)}
        values = {threshold.name: threshold.default for threshold in known.values()}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                raise UsageError(f"no threshold '{name}'", nearest(name, [*known]), "see `hookscope help findings`")
            try:
                values[known[name].name] = _type_of(known[name]).convert(value, None, None)
            except click.BadParameter as error:
                example = f"--threshold {name}={known[name].default:g}"
                raise UsageError(f"--threshold {name}: {error.message}", do=f"write {example}") from None
        return values

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_words(*(f"{t.option}=" for t in _with_options(question)))(ctx, param, incomplete)

    return option(
        "From where on something is a finding; repeatable. `hookscope help findings` lists the names.",
        "--threshold",
        metavar="NAME=VALUE",
        multiple=True,
        parse=parse,
        shell_complete=complete,
    )


def threshold_rows() -> list[tuple[str, str]]:
    """The name of each threshold, and what it is with its default, for `hookscope help findings`."""
    rows = []
    for question in ("activations", "weights", "gradients"):
        for threshold in _with_options(question):
            default = f"{100 * threshold.default:g}%" if threshold.share else f"{threshold.default:g}"
            rows.append((threshold.option, f"{threshold.help}  [default: {default}; {question}]"))
    return rows


def _with_options(question: str) -> list[Threshold]:
    _ = statistics.find_problems, parameters.parameter_findings  # their files add kinds of findings
    return [threshold for threshold in thresholds_for(question) if threshold.option]


def _type_of(threshold: Threshold) -> click.ParamType:  # type: ignore[type-arg,unused-ignore]
    if threshold.share:
        return Share()
    if isinstance(threshold.default, int):
        return click.IntRange(int(threshold.least))
    return Number(threshold.least, threshold.most, threshold.endless)
