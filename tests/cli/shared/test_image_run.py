"""Errors of lost images, and notes on others."""

from __future__ import annotations

import pytest

from hookscope.cli.shared.image_run import LostImages
from hookscope.errors import ImageError


def test_lost_images_are_named_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lost_images = LostImages()
    lost_images.lost(0, "a\n", ImageError("no picture 'a\n'"))
    lost_images.lost(4, "b", ImageError("'b' is empty", "0 bytes"))
    lost_images.finish()
    assert capsys.readouterr() == ("", "Error: no picture 'a\\n'\nError: 'b' is empty; 0 bytes\n")


def test_strict_raises_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = ImageError("no picture 'a'")
    with pytest.raises(ImageError) as caught:
        LostImages(strict=True).lost(0, "a", error)
    assert caught.value is error
    assert capsys.readouterr() == ("", "")


def test_three_notes_are_shown_and_the_rest_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    lost_images = LostImages()
    for number in range(3):
        lost_images.note(f"{number}.gif", "frame 1 of 3")
    lost_images.finish()
    shown = "".join(f"Note: {number}.gif: frame 1 of 3\n" for number in range(3))
    assert capsys.readouterr().err == shown
    for text, count in {"frame 1 of 3": 4, "dark": 2, "white": 3, "x": 1, "y": 1}.items():
        for _ in range(count):
            lost_images.note("more", text)
    assert capsys.readouterr().err == ""
    lost_images.finish()
    assert capsys.readouterr().err == "Note: 11 more notes: frame 1 of 3 (4), white (3), dark (2), others (2)\n"


def test_a_single_further_note_is_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    lost_images = LostImages()
    for _ in range(4):
        lost_images.note("a.gif", "frame 1 of 3")
    lost_images.finish()
    assert capsys.readouterr().err.splitlines()[-1] == "Note: 1 more note: frame 1 of 3 (1)"
