"""The pictures of a run, in real folders that hold other files too."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from matplotlib.figure import Figure
from PIL import Image, features

from hookscope.drawing import figure_bytes, write_png
from hookscope.errors import ImageError, UsageError
from hookscope.images import ImageWarning, find, is_remote, read_picture
from hookscope.images.find import find_pictures, read_names
from tests.helpers import refused


def picture(path: Path, form: str = "PNG") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), "red").save(path, form)
    return str(path)


def within(folder: Path, **more: int) -> list[str]:
    return [os.path.relpath(path, folder) for path in find_pictures([str(folder)], **more)]


def test_named_files_are_kept_in_order(tmp_path: Path) -> None:
    one = picture(tmp_path / "z.png")
    text = tmp_path / "notes.txt"
    text.write_text("no picture, but named")
    named = [str(text), one, f"{tmp_path}/../{tmp_path.name}/z.png", "missing.jpg", one, "-", "http://a.b/c.jpg", "\0"]
    assert find_pictures(named) == named


def test_a_folder_is_walked_by_name_and_its_folders_in_their_place(tmp_path: Path) -> None:
    expected = ["-", "C.png", "a.png", "b/10.png", "b/2.png", "b/b/z.png", "b.png", "c.png", "new\nline.png"]
    expected += ["é.png", os.fsdecode(b"\xff.png")]
    for name in reversed(expected):
        picture(tmp_path / name)
    assert within(tmp_path) == expected
    assert within(tmp_path, limit=4) == [expected[at] for at in (0, 2, 5, 8)]  # 11 names, every 2.75th
    both = find_pictures([str(tmp_path / "c.png"), str(tmp_path / "b"), "-"])
    assert [os.path.basename(path) for path in both] == ["c.png", "10.png", "2.png", "z.png", "-"]


def test_a_glob_is_expanded_unless_a_file_has_its_name(tmp_path: Path) -> None:
    first, second, deep = (picture(tmp_path / name) for name in ("a.png", "b.png", "c/d/e.png"))
    assert find_pictures([f"{tmp_path}/*.png"]) == [first, second]
    assert find_pictures([f"{tmp_path}/**/*.png"], limit=3) == [first, second, deep]
    assert find_pictures([f"{tmp_path}/c*", f"{tmp_path}/[b].png"]) == [deep, second]  # a folder is walked
    assert find_pictures([f"{tmp_path}/c/**"]) == [deep]  # once, though each folder of it matches too
    literal = picture(tmp_path / "[b].png")
    assert find_pictures([literal]) == [literal]
    with pytest.raises(ImageError, match=r"x\*\.png"):
        find_pictures([f"{tmp_path}/x*.png"])


def test_pictures_that_hookscope_drew_are_skipped_in_folders(tmp_path: Path) -> None:
    photo, sheet, plot = picture(tmp_path / "a.png"), tmp_path / "b.png", tmp_path / "c" / "plot.png"
    write_png(Image.new("P", (4, 4)), sheet, {"model": "x" * 100_000})
    plot.parent.mkdir()
    other = picture(tmp_path / "d" / "e.png")
    write_png(Image.new("P", (4, 4)), tmp_path / "d" / "b.png", {})
    plot.write_bytes(figure_bytes(Figure(), ".png", {"model": "x"}))
    with pytest.warns(ImageWarning, match="3 pictures are skipped: drawn by hookscope"):
        assert find_pictures([str(tmp_path)]) == [photo, other]
    with pytest.warns(ImageWarning, match=r"b\.png is skipped"):
        assert find_pictures([f"{tmp_path}/a.png", str(tmp_path / "d")]) == [photo, other]
    assert find_pictures([str(sheet), f"{tmp_path}/b*"]) == [str(sheet)] * 2  # named
    with pytest.raises(ImageError, match=r"it holds 1 hookscope picture;"):
        find_pictures([str(plot.parent)])


def test_a_picture_is_known_by_its_suffix_or_its_first_bytes(tmp_path: Path) -> None:
    picture(tmp_path / "jpeg.txt", "JPEG")
    picture(tmp_path / "without_suffix", "PNG")
    (tmp_path / "garbage.JPG").write_bytes(b"garbage")
    (tmp_path / "empty.png").touch()
    for name in ("README.txt", "table.csv", "Thumbs.db", "BMW", "P1 is bold"):
        (tmp_path / name).write_text(name)
    (tmp_path / "heic").write_bytes(b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(40))  # a brand that AVIF shares
    (tmp_path / "ascii").write_text("P1\n2 1\n0 1\n")
    (tmp_path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    picture(tmp_path / ".hidden.png")
    picture(tmp_path / ".cache" / "a.png")
    (tmp_path / "zero").touch()
    assert within(tmp_path) == ["ascii", "empty.png", "garbage.JPG", "jpeg.txt", "without_suffix"]


@pytest.mark.parametrize("form", [form for form in find.FORMATS if form != "AVIF" or features.check("avif")])
def test_the_first_bytes_of_every_format_are_known(form: str, tmp_path: Path) -> None:
    if form == "QOI":  # this Pillow may not write it
        (tmp_path / "a").write_bytes(b"qoif" + bytes(60))
    else:
        picture(tmp_path / "a", form)
    assert within(tmp_path) == ["a"]


def test_suffixes_are_those_of_the_formats() -> None:
    Image.init()
    read = {*find.FORMATS, "MPO"}
    for suffix, form in Image.EXTENSION.items():
        assert bool(find.is_picture_suffix(suffix)) == (form in read), suffix


def test_links(tmp_path: Path) -> None:
    real = picture(tmp_path / "elsewhere" / "real.png")
    inside = tmp_path / "photos"
    inside.mkdir()
    (inside / "linked.png").symlink_to(real)
    (inside / "linked without suffix").symlink_to(real)
    (inside / "broken.png").symlink_to("nothing")
    (inside / "broken").symlink_to("nothing")
    (inside / "loop.png").symlink_to("loop.png")
    (inside / "folder").symlink_to(tmp_path / "elsewhere")
    (inside / "up").symlink_to(tmp_path)
    assert within(inside) == ["broken.png", "linked without suffix", "linked.png", "loop.png"]
    named = inside / "folder"
    assert find_pictures([str(named)]) == [str(named / "real.png")]  # a link that is named is followed


def test_pipes_sockets_and_devices_are_skipped_unless_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(tmp_path / "s.png"))
        (tmp_path / "device.png").symlink_to(os.devnull)
        picture(tmp_path / "z.png")
        assert within(tmp_path) == ["z.png"]
        assert find_pictures([f"{tmp_path}/*.png"], limit=10**20) == [f"{tmp_path}/device.png", f"{tmp_path}/z.png"]
    assert find_pictures([str(tmp_path / "pipe.png")]) == [str(tmp_path / "pipe.png")]


def test_folders_nested_deeper_than_the_stack(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath(*["d"] * 400)
    deepest.mkdir(parents=True)
    (deepest / "a.png").touch()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        assert find_pictures([str(tmp_path)]) == [str(deepest / "a.png")]
    finally:
        sys.setrecursionlimit(limit)


def refusal(*paths: object) -> str:
    with pytest.raises(ImageError) as caught:
        find_pictures([str(path) for path in paths])
    line = str(caught.value)
    assert line.isprintable()
    return line


def test_no_path_an_empty_folder_and_one_that_cannot_be_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no image was given; name files or folders, or - for standard input"):
        find_pictures([])
    (tmp_path / "nested").mkdir()
    assert refusal(tmp_path) == f"no images in '{tmp_path}': the folder is empty; name a folder with images"

    def fail(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", fail)
    expected = f"folder '{tmp_path}' cannot be read: Permission denied; change its permissions"
    assert refusal(tmp_path).startswith(expected)


def test_a_folder_without_pictures_lists_its_content(tmp_path: Path) -> None:
    (tmp_path / "IMG_1.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(20))
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / ".hidden").touch()
    line = refusal(tmp_path)
    assert line.startswith(f"no images in '{tmp_path}'; it holds ")
    assert "2 files" in line and "1 hidden name" in line and "such as HEIC (HEIF) in 'IMG_1.heic'" in line
    assert line.endswith("; name a folder with JPEG, PNG or similar files")


def test_missing_files_are_an_error_if_all_are_missing(tmp_path: Path) -> None:
    near = picture(tmp_path / "photo.png")
    wrong = str(tmp_path / "foto.png")
    assert refusal(wrong) == f"no image '{wrong}'; nearest: photo.png; check the path"
    expected = f"none of the 2 images can be found; the first: no image '{wrong}'; nearest: photo.png"
    assert refusal(wrong, "b.png").startswith(expected)
    assert find_pictures([wrong, near]) == [wrong, near]
    assert find_pictures([wrong, "-"]) == [wrong, "-"]


def test_names_in_a_list_are_read_byte_by_byte() -> None:
    data = b"a.png\0new\nline\0\xff\xe9.png\0-"
    for end in (b"", b"\0"):
        assert [os.fsencode(name) for name in read_names(data + end, "list")] == data.split(b"\0")
    assert read_names(b"a.png", "list") == ["a.png"]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "no names in 'list': the list is empty; check what writes it"),
        (b"a.png\nb.png\n", "'list' holds lines; names must end in NUL; write it with `find -print0`"),
        (b"\0", "name 1 of 1 in 'list' is empty; names end in one NUL each; write it with `find -print0`"),
        (b"a\0b\0\0c\0", "name 3 of 4 in 'list' is empty; names end in one NUL each; write it with `find -print0`"),
    ],
)
def test_other_lists_are_refused(data: bytes, line: str) -> None:
    with refused(ImageError, line):
        read_names(data, "list")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[bytes]:
    """A folder ``memory://photos`` with pictures; the bytes of one."""
    Image.new("RGB", (7, 5), "red").save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    system = fsspec.filesystem("memory")
    for name in ("b.png", "a/2.JPG", "a/10.png", "a/notes.txt", ".hidden.png", "c.png"):
        system.pipe(f"/photos/{name}", content)
    system.pipe("/texts/a.txt", b"text")
    yield content
    system.rm("/photos", recursive=True)
    system.rm("/texts", recursive=True)


def test_a_picture_with_a_scheme_is_that_of_its_bytes(memory: bytes, tmp_path: Path) -> None:
    expected = read_picture(memory)
    for name in ("memory://photos/b.png", f"file://{tmp_path}/a.png"):
        picture = read_picture(name)
        assert (picture.name, picture.sha256, picture.image.size) == (name, expected.sha256, (7, 5))


@pytest.mark.parametrize("folder", ["memory://photos", "memory://photos/"])
def test_a_remote_folder_is_walked_by_name(memory: bytes, folder: str) -> None:
    names = ["a/10.png", "a/2.JPG", "b.png", "c.png"]
    assert find_pictures([folder]) == [f"memory://photos/{name}" for name in names]
    assert find_pictures([folder], limit=2) == [f"memory://photos/{name}" for name in names[::2]]
    with pytest.raises(ImageError, match="no images in 'memory://texts'"):
        find_pictures(["memory://texts"])


def test_folders_of_this_machine_have_a_scheme_and_pyarrow_reads_where_fsspec_lacks_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    names = [f"file://{picture(tmp_path / name)}" for name in ("below/y.png", "z.png")]
    assert find_pictures([f"file://{tmp_path}"]) == names

    def lacking(path: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacking)
    assert find_pictures([f"file://{tmp_path}"]) == names
    assert read_picture(names[0]).image.size == (16, 16)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImageError, match=r"cannot be read: Install s3fs to access S3; pip install pyarrow, or"):
        read_picture(names[0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory://photos/none.png", "no image 'memory://photos/none.png'; check the path"),
        ("nosuch://a/b.png", "'nosuch://a/b.png' cannot be read: Protocol not known: nosuch; check the address"),
    ],
)
def test_what_cannot_be_read_is_one_line(memory: bytes, name: str, words: str) -> None:
    with refused(ImageError, words, part="begins"):
        read_picture(name)


def test_a_named_picture_costs_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_located", lambda path: pytest.fail(path))
    assert find_pictures(["s3://bucket/a.jpg", "gs://bucket/b.PNG"]) == ["s3://bucket/a.jpg", "gs://bucket/b.PNG"]


@pytest.mark.parametrize("path", ["https://a.b/c.jpg", "a.png", "C:/a.png", "a/b://c.png", "-"])
def test_other_names_are_not_remote(path: str) -> None:
    assert not is_remote(path)
