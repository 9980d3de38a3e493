"""Targets: indices, names and parts of them, the highest scores, and the errors."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from hookscope.errors import HookscopeError, TargetError, UsageError
from hookscope.scores.target import Target, class_label

NAMES = ("tabby", "tiger cat", "crane", "Cardigan", "red fox", "crane", "cardigan", "7", "tiger shark", "Arctic fox")
SCORES = [0.5, 3.0, -1.0, 2.0, 3.0, 0.0, 9.0, 1.0, -5.0, 0.25]


def error_of(target: str, names: tuple[str, ...] | None = NAMES, scores: list[float] = SCORES) -> str:
    with pytest.raises(HookscopeError) as caught:
        Target(target).indices(scores, names)
    return str(caught.value)


INDICES = {
    "0": (0,),
    "007": (7,),
    "7": (7,),  # a number is an index, although a class is called 7
    "tabby": (0,),
    "cat": (1,),  # a part
    "Cardigan": (3,),  # the same case first
    "cardigan": (6,),
    "arctic FOX": (9,),
    "red fox,tabby": (4, 0),
    " 9 , 3,tabby ": (9, 3, 0),
    "0,tabby,0,1": (0, 1),  # each once
    "top:2,6,1,top:3": (6, 1, 4),
    "5,top:2": (5, 6, 1),
    "top:1": (6,),
    "top:3": (6, 1, 4),  # of equal scores the first
    "top:99": (6, 1, 4, 3, 7, 0, 9, 5, 2, 8),
}


@pytest.mark.parametrize("text", INDICES)
def test_indices_in_the_order_of_the_terms(text: str) -> None:
    assert Target(text).indices(SCORES, NAMES) == INDICES[text]
    Target(text).check(NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Smith, John", (1,)),
        (" smith, JOHN ", (1,)),
        ("John", (2,)),
        ("Smith, John,John", (1, 2)),
        ("0,Smith, John,a,b,c", (0, 1, 4)),  # the longest run
        ("a,b", (3,)),
        ("a,b,0", (3, 0)),
        ("John,Smith", (2, 0)),
    ],
)
def test_a_name_that_holds_a_comma_written_whole_wins(text: str, expected: tuple[int, ...]) -> None:
    names = ["Smith", "Smith, John", "John", "a,b", "a,b,c"]
    assert Target(text).indices([0.0] * 5, names) == expected
    Target(text).check(names)


@pytest.mark.parametrize(
    ("text", "count"), [("7", 1), ("top:1", 1), ("top:12", 12), ("a,b", 2), ("top:3, 7,x,top:2", 7), ("topaz", 1)]
)
def test_the_largest_number_of_classes(text: str, count: int) -> None:
    assert Target(text).count == count


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("tabby", "tabby"),
        (7, "7"),
        (torch.tensor(7), "7"),
        (torch.tensor([7]), "7"),
        (np.int64(7), "7"),
        (np.uint8(7), "7"),
        (np.array(7), "7"),
        (Target("top:2"), "top:2"),
    ],
)
def test_an_index_or_a_text_is_a_target(value: Any, text: str) -> None:
    assert Target.of(value) == Target(text)


@pytest.mark.parametrize("value", [None, 7.0, torch.tensor(7.0), torch.tensor([7, 8]), np.float32(7), [7], b"7"])
def test_other_types_are_no_target(value: Any) -> None:
    with pytest.raises(UsageError, match=f"target must be an index, a name or top:K, not {type(value).__name__}"):
        Target.of(value)


def test_a_whole_name_goes_before_a_part_and_the_highest_score_is_the_default() -> None:
    assert Target("fox").indices([0, 0, 0], ["red fox", "Fox", "fox terrier"]) == (1,)
    assert Target().indices(SCORES, None) == (6,)
    Target().check(None)
    assert Target("top:4").indices([math.nan, 1.0, math.inf, -math.inf], None) == (2, 1, 0, 3)


def test_a_name_that_fits_several_classes_lists_them() -> None:
    do = "give one of the numbers"
    for text in ("crane", "CRANE"):
        assert error_of(text) == f"'{text}' is the name of 2 classes; 2 crane, 5 crane; {do}"
    assert error_of("CARDIGAN") == f"'CARDIGAN' is the name of 2 classes; 3 Cardigan, 6 cardigan; {do}"
    assert error_of("tiger") == f"'tiger' is in the names of 2 classes; 1 tiger cat, 8 tiger shark; {do}"
    many = tuple(f"fox {number}" for number in range(30))
    assert "30 classes; 0 fox 0, 1 fox 1, 2 fox 2, 3 fox 3, 4 fox 4, ...; give" in error_of("fox", many)
    assert "3 classes; 1 tiger cat, 2 cat flap, 0 oystercatcher; " in error_of(
        "cat", ("oystercatcher", "tiger cat", "cat flap")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tabi", "no class 'tabi'; nearest: tabby; give a name, a number or top:K"),
        ("zebra crossing", "no class 'zebra crossing'; there are 10: tabby, ...; give a name, a number or top:K"),
        ("-1", "no class '-1'; there are 10: tabby, ...; give a name, a number or top:K"),
        ("10", "no class 10; the model has 10 classes: 0 to 9"),
        ("1,fox,12", "'fox' is in the names of 2 classes; 4 red fox, 9 Arctic fox; give one of the numbers"),
        ("1,10", "no class 10; the model has 10 classes: 0 to 9"),
        ("9" * 5000, f"no class {'9' * 20}...; the model has 10 classes: 0 to 9"),
    ],
)
def test_no_such_class(text: str, expected: str) -> None:
    assert error_of(text) == expected
    with pytest.raises(TargetError):
        Target(text).check(NAMES)


def test_names_and_indices_where_names_are_unknown_or_hold_control_characters() -> None:
    assert (
        error_of("cat", None)
        == "no class 'cat'; the class names are unknown; give a number, or the names of the classes (categories)"
    )
    with pytest.raises(TargetError, match="the class names are unknown"):
        Target("cat").check(None)
    Target("10").check(None)
    assert error_of("10", None) == "no class 10; the model has 10 classes: 0 to 9"
    assert Target("9").indices(SCORES, None) == (9,)
    assert "\x1b" not in error_of("nope", ("no\x1be",) * 3)
    assert class_label(0, NAMES) == "tabby"
    assert class_label(10, NAMES) is None
    assert class_label(0, None) is None
    assert class_label(0, ()) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "top:0",
        "top:",
        "top:-1",
        "top:two",
        "top:1.5",
        "top:1000000",
        ",",
        "1,",
        "1,,2",
        ",1",
        "1,top:0",
        "top:٣",
    ],
)
def test_empty_terms_and_wrong_counts_are_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Target(text)
    assert caught.value.exit_code == 2
    assert "top:K" in str(caught.value)
