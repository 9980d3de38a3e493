"""Errors of skipped images, and notes on others."""

from contextlib import ExitStack

import pytest

from hookscope.cli.shared.image_run import ImageRun
from hookscope.errors import ImageError


def image_run(strict: bool = False) -> ImageRun:
    return ImageRun(ExitStack(), 9, None, strict)


def test_skipped_images_are_named_and_counted_unless_strict(capsys: pytest.CaptureFixture[str]) -> None:
    run = image_run()
    run.listener.skipped(0, "a\n", ImageError("no picture 'a\n'"))
    run.listener.skipped(4, "b", ImageError("'b' is empty", "0 bytes"))
    run.finish()
    assert run.skipped == 2
    assert capsys.readouterr() == ("", "Error: no picture 'a\\n'\nError: 'b' is empty; 0 bytes\n")
    error = ImageError("no picture 'a'")
    with pytest.raises(ImageError) as caught:
        image_run(strict=True).listener.skipped(0, "a", error)
    assert caught.value is error
    assert capsys.readouterr() == ("", "")
    run = image_run()
    for _ in range(4):
        run.listener.note("a.gif", "frame 1 of 3")
    run.finish()
    assert capsys.readouterr().err.splitlines()[-1] == "Note: 1 more note: frame 1 of 3 (1)"


def test_three_notes_are_shown_and_the_rest_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    run = image_run()
    for number in range(3):
        run.listener.note(f"{number}.gif", "frame 1 of 3")
    run.finish()
    shown = "".join(f"Note: {number}.gif: frame 1 of 3\n" for number in range(3))
    assert capsys.readouterr().err == shown
    for text, count in {"frame 1 of 3": 4, "dark": 2, "white": 3, "x": 1, "y": 1}.items():
        for _ in range(count):
            run.listener.note("more", text)
    assert capsys.readouterr().err == ""
    run.finish()
    assert capsys.readouterr().err == "Note: 11 more notes: frame 1 of 3 (4), white (3), dark (2), others (2)\n"
