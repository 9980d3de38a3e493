"""What -o means, and names that sort, differ and fit."""

import os
from pathlib import Path

import pytest

from hookscope.cli.shared.output_paths import (
    OutputPath,
    call_names,
    file_word,
    image_words,
    model_word,
    page_name,
    refuse_input,
)
from hookscope.errors import HookscopeError, UsageError, WriteError
from hookscope.hooks.calls import Call


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "old.png").write_bytes(b"old")
    (tmp_path / "plain").write_bytes(b"file without a suffix")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.png").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (None, "default"),
        ("-", "stdout"),
        ("new.png", "file"),
        ("NEW.PNG", "file"),
        ("folder/new.png", "file"),
        ("old.png", "file"),
        ("/dev/null", "file"),
        ("folder", "folder"),
        ("folder.png", "folder"),
        ("out", "folder"),
        ("out/", "folder"),
        ("a/b/c", "folder"),
        ("out.v2/", "folder"),
        (".hidden", "folder"),
    ],
)
def test_what_output_means(output: str | None, kind: str, here: Path) -> None:
    before = sorted(os.listdir(here))
    assert OutputPath.parse(output, ["cat.jpg"]).kind == kind
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize(
    ("output", "images", "error", "words"),
    [
        ("", ["cat.jpg"], UsageError, "-o has no value"),
        ("a.jpg", ["cat.jpg"], UsageError, "cannot write a.jpg; sheets are PNG files; name it .png, or give a folder"),
        ("out.v2", ["cat.jpg"], UsageError, "sheets are PNG files"),
        ("plain", ["cat.jpg"], UsageError, "sheets are PNG files"),
        ("missing/a.png", ["cat.jpg"], WriteError, "its folder does not exist"),
        ("plain/a.png", ["cat.jpg"], WriteError, "Not a directory"),
        ("plain/", ["cat.jpg"], WriteError, "Not a directory"),
        (
            "old.png",
            ["old.png"],
            WriteError,
            "cannot write old.png: it is the image old.png itself; choose",
        ),
        ("./old.png", ["old.png"], WriteError, "it is the image old.png itself"),
        (
            "-",
            ["a", "b", "c"],
            UsageError,
            "-o - takes one picture; there are several images; give one image, or",
        ),
        ("x.png", ["a", "b", "c"], UsageError, "-o x.png takes one picture"),
        ("/dev/null", ["a", "b", "c"], UsageError, "takes one picture"),
    ],
)
def test_what_is_refused(output: str, images: list[str], error: type[HookscopeError], words: str) -> None:
    with pytest.raises(error) as caught:
        OutputPath.parse(output, images)
    assert words in str(caught.value)


def test_a_page_takes_all_images_and_a_picture_one_pass() -> None:
    for output in ("-", "x.png"):
        destination = OutputPath.parse(output, ["a", "b"])
        destination.check_count(1)
        with pytest.raises(UsageError, match="takes one picture"):
            destination.check_count(2)
    OutputPath.parse("out", ["a", "b", "c"]).check_count(3)
    assert OutputPath.parse("x.html", ["a", "b", "c"], ".html") == OutputPath("file", "x.html")
    with pytest.raises(UsageError, match=r"the page is an HTML file; name it \.html, or give a folder"):
        OutputPath.parse("x.png", ["a"], ".html")
    assert page_name(["cat"], "nets/small.py:make(3)") == "cat-small.py-make-3.html"
    assert page_name(["cat", "dog", "cow"], "resnet34") == "cat-dog-cow-resnet34.html"
    assert page_name(["cat", "dog", "cow", "ant"], "resnet34") == "4-images-resnet34.html"
    assert page_name(["c" * 80, "d" * 80], "resnet34") == "2-images-resnet34.html"


def test_a_link_to_the_image_is_the_image(here: Path) -> None:
    (here / "link.png").symlink_to("cat.jpg")
    with pytest.raises(WriteError, match="is the image"):
        OutputPath.parse("link.png", ["cat.jpg"])
    refuse_input("link.png", ["old.png", "-", "missing"])


def test_paths() -> None:
    assert OutputPath("default").path_for("n.png", "cat", "resnet18", True) == "n.png"
    assert OutputPath("default").path_for("n.png", "cat", "resnet18", False) == os.path.join("cat-resnet18", "n.png")
    assert OutputPath("folder", "out").path_for("n.png", "cat", "resnet18", True) == os.path.join("out", "n.png")
    assert OutputPath("file", "x.png").path_for("n.png", "cat", "resnet18", True) == "x.png"
    for destination, word in ((OutputPath("file", "x.png"), "-o x.png"), (OutputPath("stdout", "-"), "-o -")):
        with pytest.raises(UsageError, match=f"{word} takes one picture; the selection has several"):
            destination.path_for("n.png", "cat", "resnet18", False)
    with pytest.raises(UsageError, match="; head runs 2 times; choose one call, such as --layer head#1, or a folder"):
        OutputPath("file", "x.png").path_for("n.png", "cat", "shared", False, [conv(1, "head"), conv(2, "head", 1)])


def conv(index: int, name: str = "conv", call: int = 0) -> Call:
    return Call(name, "Conv2d", call, index)


def other(name: str) -> Call:
    return Call(name, "ReLU", 0, None)


def test_names_say_what_they_show_and_sort_in_order_of_execution() -> None:
    assert call_names([conv(30, "layer4.0.conv2"), conv(31, "head", 2)], "cat", "resnet34") == [
        "cat-resnet34-030-layer4.0.conv2.png",
        "cat-resnet34-031-head#2.png",
    ]
    assert call_names([Call("", "Net", 0, None)], "cat", "m") == ["cat-m-00-a-Net.png"]
    first = [other(f"early{n}") for n in range(30)]
    calls = [*first]
    for index in range(0, 1200, 97):
        calls += [conv(index, "zebra" if index % 2 else "apple"), *(other(f"{n:03d}-relu") for n in range(60))]
    names = call_names(calls, "cat", "net")
    assert names == sorted(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name", ["a/b\\c", "x" * 400, "猫" * 200, "\x1b]0;x\n", "..", "", "CON:|<>*?\"'", "\udcff\u202e"]
)
def test_any_name_makes_a_file(here: Path, name: str) -> None:
    (word,) = image_words([f"folder/{name.replace('/', '')}.jpg"])
    calls = [conv(0, name), conv(1, name), other(name)]
    names = call_names(calls, word, f"some/{name}:make")
    assert len(set(names)) == 3
    for one in names:
        assert one.isprintable()
        assert os.path.basename(one) == one
        assert len(os.fsencode(one)) <= 190
        assert not one.startswith(".")
        assert not set(one) & set('/\\:*?"<>|\n\x1b\u202e')
        (here / one).write_bytes(b"")
    assert [place for place, one in zip(("-000-", "-001-", "-001a-"), names, strict=True) if place in one][2:]
    assert names == sorted(names)


def test_letters_stay_readable_and_names_distinct() -> None:
    assert file_word("猫 café_1.x") == "猫 café_1.x"
    assert file_word("a/b:c%") == "a%2Fb%3Ac%25"
    assert file_word("..") == "_"
    assert model_word("timm:vit base") == "timm-vit-base"
    assert model_word("::") == "model"
    assert model_word("a/net.py:make(width=2, path='b/c')") == "net.py-make-width-2-path-b-c"
    assert model_word("a(b)/c:d/net.py:make") == "net.py-make"
    assert model_word("net.py:make(1)") != model_word("net.py:make(-1)")
    images = ["a/cat.jpg", "b/cat.jpg", "cat.png", "CAT.webp", "cat~2.jpg", "-", "stdin.jpg", "dog.tar.gz"]
    words = image_words(images)
    assert words == ["cat", "cat~2", "cat~3", "CAT~4", "cat~2~2", "stdin", "stdin~2", "dog.tar"]
    assert len({word.casefold() for word in words}) == len(images)
    long = image_words([f"{'x' * 200}{n}.jpg" for n in range(3)])
    assert len(set(long)) == 3
