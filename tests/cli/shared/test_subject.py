"""The images of a run by name, and the note about weights that are missing."""

import io
import sys
from pathlib import Path

import pytest
from PIL import Image

from hookscope import load_model
from hookscope.cli import process
from hookscope.cli.shared.subject import ModelOptions, image_list
from hookscope.errors import HookscopeError, ImageError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.png", "a.png", "c.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    return tmp_path


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def in_folder(folder: Path, *names: str) -> list[str]:
    return [str(folder / name) for name in names]


def refusal(kind: type[HookscopeError], *arguments: object) -> str:
    with pytest.raises(kind) as caught:
        image_list(*arguments)  # type: ignore[arg-type]
    return str(caught.value)


def test_names_come_from_words_folders_a_file_and_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = in_folder(folder, "a.png", "b.png", "c.png")
    assert image_list([str(folder)], None) == every
    assert image_list([str(folder)], None, 2) == every[:2]
    assert image_list([every[2], "-", every[0]], None) == [every[2], "-", every[0]]
    names = folder / "names"
    names.write_bytes(b"\0".join(str(folder / name).encode() for name in ("c.png", "a.png")))
    assert image_list([], str(names)) == in_folder(folder, "c.png", "a.png")
    names.write_bytes(str(folder).encode() + b"\0-\0")
    assert image_list((), str(names), 4) == [*in_folder(folder, "a.png", "b.png", "c.png"), "-"]
    piped(monkeypatch, str(folder / "b.png").encode() + b"\0" + b"\xff.png\0")
    assert image_list([], "-") == [str(folder / "b.png"), "\udcff.png"]


def test_wrong_usage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "no image was given; name files or folders, - for standard input, or --files0-from"
    assert refusal(UsageError, [], None) == line
    line = "images are named on the command line and in --files0-from; a.png and names; use one of the two"
    assert refusal(UsageError, ["a.png"], "names") == line
    line = "images are named on the command line and in --files0-from; - and -; use one of the two"
    assert refusal(UsageError, ["-"], "-") == line
    line = "standard input is named more than once; it can be read once: leave one -"
    assert refusal(UsageError, ["-", str(folder), "-"], None) == line
    piped(monkeypatch, b"-\0")
    assert refusal(UsageError, [], "-").startswith("standard input is the list of --files0-from and an image in it")
    assert UsageError("").exit_code == 2


def test_lists_that_cannot_be_read_or_have_no_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "the names in 'nowhere' cannot be read: No such file or directory; check the path"
    assert refusal(ImageError, [], "nowhere") == line
    assert "cannot be read: Is a directory" in refusal(ImageError, [], str(folder))
    assert "cannot be read: embedded null" in refusal(ImageError, [], "a\0b")
    piped(monkeypatch, b"")
    assert refusal(ImageError, [], "-") == "no names in '-': the list is empty; check what writes it"
    monkeypatch.setattr(sys, "stdin", None)
    assert refusal(ImageError, [], "-").startswith("no names on standard input: it is closed")
    monkeypatch.setattr("hookscope.images.MAX_BYTES", 10)
    piped(monkeypatch, b"a\0" * 100)
    assert refusal(ImageError, [], "-") == "'-' is too long for a list of names; the limit is 10 bytes"


NOTE = "Note: weights of squeezenet1_1 are random (seed 0): cannot download https://"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def notes_of_a_run(capsys: pytest.CaptureFixture[str], model: str = "squeezenet1_1") -> str:
    with process.warnings_as_notes():
        net = ModelOptions(model=model).load()
    assert net.weights == "random (seed 0)"
    return capsys.readouterr().err


def test_every_run_says_why_the_weights_are_random(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (notes_of_a_run(capsys) for _ in range(2))
    assert first == again and first.startswith(NOTE) and first.endswith("; its answers mean nothing\n")


def test_the_reason_is_in_the_notes_of_the_library() -> None:
    net = load_model("squeezenet1_1")
    assert net.notes == (net.missing_weights,)
    assert net.missing_weights.startswith("weights of squeezenet1_1 are random (seed 0): cannot download https://")
    assert load_model("squeezenet1_1", weights="none").missing_weights == ""
