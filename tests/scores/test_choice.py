"""What the options of cam and saliency say is explained."""

from pathlib import Path

import pytest
from PIL import Image

from hookscope.errors import HookscopeError, UsageError
from hookscope.scores import Boxes, Region, Target, TargetChoice, parse_target
from tests.helpers import refused


@pytest.mark.parametrize("text", ["a.py:margin", "folder.d/a.py:margin", "package.module:margin", "module:_own"])
def test_functions_are_told_from_classes(text: str) -> None:
    choice = TargetChoice(parse_target(text))
    assert (choice.target, choice.classes, choice.count) == (text, None, 1)


@pytest.mark.parametrize("text", ["top:3", "281", "tabby", "tabby, top:2", "n01: tench", "a:1"])
def test_classes_stay_classes(text: str) -> None:
    assert TargetChoice(parse_target(text)).classes == Target(text)


def test_the_default_is_the_best_class() -> None:
    assert TargetChoice().classes == Target("top:1")


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
        ("none.png", "no picture"),
        ("1,2,3", "bad point '1,2,3'; write X,Y: column and row of a pixel, from 0"),
        ("-1, 2.5", "bad point '-1, 2.5'"),
    ],
)
def test_regions_that_the_image_does_not_have_are_one_line(tmp_path: Path, text: str, says: str) -> None:
    Image.new("L", (2, 2), 255).save(tmp_path / "small.png")
    Image.new("L", (5, 4)).save(tmp_path / "empty.png")
    with refused(HookscopeError, says, begins=False):
        Region.parse(str(tmp_path / text) if "png" in text else text).drawn((5, 4))


@pytest.mark.parametrize("text", ["a.py", "a.py:", "a.py:f,cat", "cat,a.py:f", "a.py:1", "a.py:f,b.py:g"])
def test_a_file_without_one_function_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no function; write file"):
        parse_target(text)


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("box:", "bad target 'box:' for a box; write box:K with K from 0, or box:K:class"),
        ("box:-1", "bad target 'box:-1' for a box"),
        ("box:0,cat", "bad target 'cat' for a box"),
        ("box:0,box:1:class", "the target box:0,box:1:class mixes box:K and box:K:class; write one of them"),
    ],
)
def test_boxes_that_cannot_be_read_are_one_line(text: str, says: str) -> None:
    with refused(UsageError, says, begins=False):
        parse_target(text)
