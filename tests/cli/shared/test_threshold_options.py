"""Shares, numbers and ranks as people type them."""

from fractions import Fraction
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hookscope.cli.command import Command
from hookscope.cli.shared.threshold_options import Number, Rank, Share, threshold_option
from hookscope.errors import UsageError
from hookscope.statistics.findings import StatisticsThresholds


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), (" 5 % ", 0.05), ("0.05", 0.05), ("0", 0.0), ("0%", 0.0), ("100%", 1.0), ("1%", 0.01), ("1.0", 1.0)],
)
def test_shares(text: str, share: float) -> None:
    assert Share().convert(text, None, None) == share


def test_a_share_is_the_nearest_number_to_what_is_written_and_a_bare_1_is_asked_back() -> None:
    for tenths in range(1001):
        assert Share().convert(f"{tenths / 10:.1f}%", None, None) == float(Fraction(tenths, 1000))
    with pytest.raises(click.BadParameter, match="write 1% or 100%"):
        Share().convert("1", None, None)


@pytest.mark.parametrize(
    "text", ["x", "nan", "inf", "-1", "-0.1%", "150%", "100.1%", "", "%", "5%%", "5", "1e400", "5,0%"]
)
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a share; write 5% or 0\.05"):
        Share().convert(text, None, None)


@pytest.mark.parametrize("text", ["x", "nan", "-1", "", "inf", "1e400", "-inf"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number of at least 0"):
        Number().convert(text, None, None)


def test_numbers_and_ranks() -> None:
    assert Number().convert("1e4", None, None) == 10000.0
    assert Number(endless=True).convert("inf", None, None) == float("inf")
    assert Number(1.0).convert("1", None, None) == 1.0
    with pytest.raises(click.BadParameter, match=r"'0\.9' is not a number of at least 1"):
        Number(1.0).convert("0.9", None, None)
    with pytest.raises(click.BadParameter, match=r"'1\.1' is not a number of 0 to 1"):
        Number(most=1.0).convert("1.1", None, None)
    assert Rank().convert("8", None, None) == (8.0, None)
    assert Rank().convert("5%", None, None) == (None, 0.05)
    for text in ("x", "nan", "-1", "inf", ""):
        with pytest.raises(click.BadParameter, match="is not a rank"):
            Rank().convert(text, None, None)
    with pytest.raises(click.BadParameter, match="is not a share"):
        Rank().convert("150%", None, None)


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
