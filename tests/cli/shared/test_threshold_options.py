"""Shares, numbers and ranks as people type them."""

from fractions import Fraction
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hookscope.cli.command import Command
from hookscope.cli.shared.options import number_from, rank, share, threshold_option
from hookscope.errors import UsageError
from hookscope.statistics.findings import StatisticsThresholds


@pytest.mark.parametrize(
    ("text", "number"),
    [("5%", 0.05), (" 5 % ", 0.05), ("0.05", 0.05), ("0", 0.0), ("0%", 0.0), ("100%", 1.0), ("1%", 0.01), ("1.0", 1.0)],
)
def test_shares(text: str, number: float) -> None:
    assert share(text) == number


def test_a_share_is_the_nearest_number_to_what_is_written_and_a_bare_1_is_asked_back() -> None:
    for tenths in range(1001):
        assert share(f"{tenths / 10:.1f}%") == float(Fraction(tenths, 1000))
    with pytest.raises(click.BadParameter, match="write 1% or 100%"):
        share("1")


@pytest.mark.parametrize(
    "text", ["x", "nan", "inf", "-1", "-0.1%", "150%", "100.1%", "", "%", "5%%", "5", "1e400", "5,0%"]
)
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a share; write 5% or 0\.05"):
        share(text)


@pytest.mark.parametrize("text", ["x", "nan", "-1", "", "inf", "1e400", "-inf"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number of at least 0"):
        number_from()(text)


def test_numbers_and_ranks() -> None:
    assert number_from()("1e4") == 10000.0
    assert number_from(endless=True)("inf") == float("inf")
    assert number_from(1.0)("1") == 1.0
    with pytest.raises(click.BadParameter, match=r"'0\.9' is not a number of at least 1"):
        number_from(1.0)("0.9")
    with pytest.raises(click.BadParameter, match=r"'1\.1' is not a number of 0 to 1"):
        number_from(most=1.0)("1.1")
    assert rank("8") == (8.0, None)
    assert rank("5%") == (None, 0.05)
    for text in ("x", "nan", "-1", "inf", ""):
        with pytest.raises(click.BadParameter, match="is not a rank"):
            rank(text)
    with pytest.raises(click.BadParameter, match="is not a share"):
        rank("150%")


class Toy(Command):
    """Say what came."""

    thresholds: dict[str, Any] = threshold_option("activations")

    def run(self) -> None:
        click.echo(repr(StatisticsThresholds.of(self.thresholds)))


toy = Toy.made("toy")


def test_every_threshold_has_its_name_and_the_default_of_the_library() -> None:
    assert CliRunner().invoke(toy, []).output == f"{StatisticsThresholds()!r}\n"
    texts = (
        "dead-share=1% saturated-share=2% vanishing=3 exploding=4 duplicate-correlation=.5 low-rank=6% drift-shift=7"
    )
    words = [word for text in f"{texts} drift-ratio=8 few-images=9".split() for word in ("--threshold", text)]
    answer = CliRunner().invoke(toy, words)
    assert answer.output == f"{StatisticsThresholds(0.01, 0.02, 3.0, 4.0, 0.5, 0.06, 7.0, 8.0, 9)!r}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dead=1%", "no threshold 'dead'; nearest: dead-share"),
        ("dead-share", "--threshold dead-share: '' is not a share"),
        ("few-images=-1", "--threshold few-images: -1 is not in the range"),
        ("vanishing=x", "--threshold vanishing: 'x' is not a number of at least 0"),
    ],
)
def test_what_is_no_threshold_is_said(text: str, message: str) -> None:
    error = CliRunner().invoke(toy, ["--threshold", text]).exception
    assert isinstance(error, UsageError) and message in str(error), error
