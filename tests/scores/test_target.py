"""Targets: indices, names and parts of them, the highest scores, and the errors; class names from files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import ResNet18_Weights

from hookscope.errors import CategoriesError, HookscopeError, TargetError, UsageError
from hookscope.scores import Boxes, Region, TargetChoice, parse_target, target as target_module
from hookscope.scores.target import Target, class_label, read_categories
from tests.helpers import refused

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


def test_a_list_names_several_classes() -> None:
    assert Target.of(["star", 3]) == Target("star,3")


@pytest.mark.parametrize("value", [None, 7.0, torch.tensor(7.0), torch.tensor([7, 8]), np.float32(7), [], {}, b"7"])
def test_other_types_are_no_target(value: Any) -> None:
    with pytest.raises(UsageError, match=r"a target cannot be \w+; give a class number, a class name or top:K"):
        Target.of(value)


def test_a_whole_name_goes_before_a_part_and_the_highest_score_is_the_default() -> None:
    assert Target("fox").indices([0, 0, 0], ["red fox", "Fox", "fox terrier"]) == (1,)
    assert Target().indices(SCORES, None) == (6,) and TargetChoice().classes == Target() == Target("top:1")
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


WRONG_COUNTS = [f"top:{count}" for count in ("0", "", "-1", "two", "1.5", "1000000", "٣")]


@pytest.mark.parametrize("text", ["", "  ", ",", "1,", "1,,2", ",1", "1,top:0", *WRONG_COUNTS])
def test_empty_terms_and_wrong_counts_are_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Target(text)
    assert caught.value.exit_code == 2
    assert "top:K" in str(caught.value)


def written(folder: Path, content: str | bytes | Any, name: str = "names.txt") -> Path:
    path = folder / name
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal_of(path: Any) -> str:
    with pytest.raises(CategoriesError) as caught:
        read_categories(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cat\nred fox\n", ("cat", "red fox")),
        ("cat\r\n dog \r\n\r\n\n  \n", ("cat", "dog")),
        ("\ufeffcafé\nтигр\n猫\n", ("café", "тигр", "猫")),
        ("a line\u2028with a separator\nb", ("a line\u2028with a separator", "b")),  # splitlines() makes three of it
        ("n01440764 tench, Tinca tinca\n0: gold\n", ("n01440764 tench, Tinca tinca", "0: gold")),
        ("cat\n[dog]\n", ("cat", "[dog]")),
    ],
)
def test_lines(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    assert read_categories(written(tmp_path, text)) == names
    assert read_categories(str(tmp_path / "names.txt")) == names


@pytest.mark.parametrize(
    ("held", "names"),
    [
        (["cat", "red fox"], ("cat", "red fox")),
        ({"0": "tench", "1": "goldfish"}, ("tench", "goldfish")),
        ({"1": ["n01443537", "goldfish"], "0": ["n01440764", "tench"]}, ("tench", "goldfish")),
        ({str(index): f"class {index}" for index in reversed(range(12))}, tuple(f"class {n}" for n in range(12))),
        (["é \u2028"], ("é \u2028",)),
    ],
)
@pytest.mark.parametrize("name", ["names.json", "names.txt"])
def test_json(tmp_path: Path, held: Any, names: tuple[str, ...], name: str) -> None:
    assert read_categories(written(tmp_path, held, name)) == names
    assert read_categories(written(tmp_path, "\n  " + json.dumps(held, indent=2) + "\n", name)) == names


@pytest.mark.parametrize(
    "held",
    [
        {"tench": 0, "goldfish": 1},
        {"0": "tench", "2": "goldfish"},
        {"0": "tench", "00": "goldfish"},
        {"0": ["n01440764", "tench", "fish"]},
        {"categories": ["tench"]},
        ["tench", 1],
        [None],
    ],
)
def test_json_of_another_form(tmp_path: Path, held: Any) -> None:
    error = refusal_of(written(tmp_path, held))
    assert "is JSON of another form; class names are a list of names, " in error


ERRORS = {
    "holds no class names: it is empty": ["", "\n\n  \n", "\ufeff", "[]", "{}"],
    # a class without a name would shift the others
    "has no name for class 1; there are 3 classes": [
        "cat\n\ndog\n",
        ["cat", "", "dog"],
        {"0": "a", "1": " ", "2": "b"},
    ],
    "is not valid JSON: ": ['["cat", ', "{cat}"],
    "nested too deep": ["[" * 200_000],
    "is not UTF-8 text": [b"caf\xe9\n", "cat\ndog".encode("utf-16"), b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"],
    "is not text": [b"cat\0dog"],
}


@pytest.mark.parametrize("reason", ERRORS)
def test_a_wrong_content_is_refused(tmp_path: Path, reason: str) -> None:
    for content in ERRORS[reason]:
        assert reason in refusal_of(written(tmp_path, content))


def test_missing_unreadable_and_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal_of(tmp_path / "nope.txt") == (
        f"no file '{tmp_path / 'nope.txt'}' with class names; give a file, or imagenet for the classes of ImageNet"
    )
    assert refusal_of(tmp_path).endswith(": Is a directory")
    assert "cannot read the class names in" in refusal_of("a\0b")
    assert "cannot read the class names in" in refusal_of("x" * 5000)
    assert refusal_of(written(tmp_path, "x") / "y").endswith(": Not a directory")
    monkeypatch.setattr(target_module, "MAX_BYTES", 5)
    assert read_categories(written(tmp_path, "a\nb\nc")) == ("a", "b", "c")
    assert "is too large for class names" in refusal_of(written(tmp_path, "a\nb\ncd"))


def test_the_names_of_imagenet_are_those_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = read_categories("imagenet")
    assert names == tuple(ResNet18_Weights.DEFAULT.meta["categories"]) and len(names) == 1000
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagenet").write_text("mine\n")
    assert read_categories("imagenet") == ("mine",)


@pytest.mark.parametrize("text", ["a.py:margin", "folder.d/a.py:margin", "package.module:margin", "module:_own"])
def test_functions_are_told_from_classes(text: str) -> None:
    choice = TargetChoice(parse_target(text))
    assert (choice.target, choice.classes, choice.count) == (text, None, 1)


@pytest.mark.parametrize("text", ["top:3", "281", "tabby", "tabby, top:2", "n01: tench", "a:1"])
def test_classes_stay_classes(text: str) -> None:
    assert TargetChoice(parse_target(text)).classes == Target(text)


def test_a_point_is_one_pixel_and_a_mask_is_as_it_is(tmp_path: Path) -> None:
    point = Region.parse(" 3, 2 ")
    assert point.drawn((5, 4)).getbbox() == (3, 2, 4, 3)
    path = tmp_path / "m.png"
    Image.linear_gradient("L").save(path)
    mask = Region.parse(str(path))
    assert (mask.where, mask.drawn((256, 256)).getbbox()) == ("in m.png", (0, 1, 256, 256))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("5,0", "the point 5,0 is outside the image; x is 0 to 4, y 0 to 3"),
        ("0,4", "the point 0,4 is outside the image; x is 0 to 4, y 0 to 3"),
        ("small.png", "small.png is 2x2, and the image 5x4; give a mask of the image's size"),
        ("empty.png", "empty.png is empty; all its pixels are 0; make the pixels of the region white"),
        ("none.png", "no image"),
        ("1,2,3", "bad point '1,2,3'; write X,Y: column and row of a pixel, from 0"),
        ("-1, 2.5", "bad point '-1, 2.5'"),
    ],
)
def test_regions_that_the_image_does_not_have_are_one_line(tmp_path: Path, text: str, says: str) -> None:
    Image.new("L", (2, 2), 255).save(tmp_path / "small.png")
    Image.new("L", (5, 4)).save(tmp_path / "empty.png")
    with refused(HookscopeError, says, part="holds"):
        Region.parse(str(tmp_path / text) if "png" in text else text).drawn((5, 4))


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=r"target=a.py:f takes no against; leave one of them out"):
        TargetChoice("a.py:f", against=Target("cat"))
    with pytest.raises(UsageError, match=r"target=a.py:f takes no region"):
        TargetChoice("a.py:f", region=Region.parse("1,1"))
    with pytest.raises(UsageError, match="against=top:1 is not one class"):
        TargetChoice(against=Target("top:1"))
    with pytest.raises(UsageError, match="target=box:0 takes no region; leave one of them out"):
        TargetChoice(parse_target("box:0"), region=Region.parse("1,1"))


@pytest.mark.parametrize(
    ("text", "indices", "fit"),
    [("box:0", (0,), True), ("box:2, box:0,box:2", (2, 0), True), ("box:11:class,box:3:class", (11, 3), False)],
)
def test_boxes_are_named_by_number(text: str, indices: tuple[int, ...], fit: bool) -> None:
    choice = TargetChoice(parse_target(text))
    assert (choice.target, choice.classes, choice.count) == (Boxes(indices, fit), None, len(indices))
    assert parse_target(str(choice.target)) == choice.target


NO_FUNCTION = ["a.py", "a.py:", "a.py:f,cat", "cat,a.py:f", "a.py:1", "a.py:f,b.py:g"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, f"the target {text} names no function; write file") for text in NO_FUNCTION),
        ("box:", "bad target 'box:' for a box; write box:K with K from 0, or box:K:class"),
        ("box:-1", "bad target 'box:-1' for a box"),
        ("box:0,cat", "bad target 'cat' for a box"),
        ("box:0,box:1:class", "the target box:0,box:1:class mixes box:K and box:K:class; write one of them"),
    ],
)
def test_functions_and_boxes_that_cannot_be_read_are_one_line(text: str, says: str) -> None:
    with refused(UsageError, says, part="holds"):
        parse_target(text)
