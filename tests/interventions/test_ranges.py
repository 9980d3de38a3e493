"""Channels and positions as a person writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hookscope.errors import UsageError
from hookscope.interventions.ranges import Ranges, parse_channels, parse_positions


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (None, None),
        ("0-3", (0, 1, 2, 3)),
        ("7", (7,)),
        (" 8 , 0 - 2 ", (0, 1, 2, 8)),
        ("3,3,1-3", (1, 2, 3)),
        (5, (5,)),
        ([5, 0], (0, 5)),
        (range(2, 8, 3), (2, 5)),
        (["0-1", 9], (0, 1, 9)),
        ((), ()),
        (np.int64(4), (4,)),
        (np.array([4, 2]), (2, 4)),
        (torch.tensor([6, 1]), (1, 6)),
        (torch.tensor(3), (3,)),
        (torch.tensor([3]), (3,)),
        (Ranges([2, 1]), (1, 2)),
    ],
)
def test_channels(value: Any, numbers: tuple[int, ...] | None) -> None:
    assert parse_channels(value) == numbers


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "bad channels ''; write 0-31 or 0-31,40"),
        ("3-1", "bad channels '3-1'"),
        ("-1", "bad channels '-1'"),
        ("1,,2", "bad channels '1,,2'"),
        ("a", "bad channels 'a'"),
        (-1, "bad channels -1; channels count from 0"),
        ([0, -2], "bad channels -2"),
        (1.5, "channels cannot be a float"),
        ([0.5], "channels cannot be a float"),
        (torch.tensor([0.5]), "channels cannot be a Tensor"),
        (object(), "channels cannot be an object"),
        ("0-999999999", "channels '0-999999999' are too many for a tensor"),
    ],
)
def test_bad_channels_are_refused(value: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_channels(value)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("numbers", [(), (0,), (0, 1, 2), (0, 2, 3, 9), tuple(range(1, 40, 2))])
def test_the_text_of_ranges_is_read_as_the_same(numbers: tuple[int, ...]) -> None:
    shown = str(Ranges(numbers))
    assert (parse_channels(shown) if shown else ()) == numbers


@pytest.mark.parametrize(
    ("value", "spans"),
    [
        (None, None),
        ("0-9x5-14", ((0, 9), (5, 14))),
        ("3", ((3, 3),)),
        ("1 x 2-3×4", ((1, 1), (2, 3), (4, 4))),
        ([(0, 9), [5, 5]], ((0, 9), (5, 5))),
        (((np.int64(1), 2),), ((1, 2),)),
    ],
)
def test_positions(value: Any, spans: tuple[tuple[int, int], ...] | None) -> None:
    assert parse_positions(value) == spans


@pytest.mark.parametrize(
    "value", ["", "0-9x", "9-0", "-1", 5, (0, 9), [(0,)], [(0, 1, 2)], [(3, 1)], [(-1, 2)], [("0", 1)]]
)
def test_bad_positions_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^(bad positions|positions cannot be an? )") as caught:
        parse_positions(value)
    assert "0-9x5-14" in str(caught.value) and "\n" not in str(caught.value)
