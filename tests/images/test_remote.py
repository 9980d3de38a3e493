"""Pictures behind a scheme: the same bytes, and folders by name; file systems of this machine only."""

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from PIL import Image

from hookscope.errors import ImageError
from hookscope.images import find_pictures, is_remote, read_picture, remote
from tests.helpers import refused


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
    assert find_pictures([folder], limit=2) == [f"memory://photos/{name}" for name in names[:2]]


def test_a_folder_with_the_scheme_file_is_that_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("z.png", "below/y.png"):
        Image.new("RGB", (2, 2)).save(tmp_path / name)
    assert find_pictures([f"file://{tmp_path}"]) == [f"file://{tmp_path}/below/y.png", f"file://{tmp_path}/z.png"]


def test_pyarrow_reads_where_fsspec_lacks_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    Image.new("RGB", (2, 2)).save(tmp_path / "y.png")

    def lacking(path: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacking)
    name = f"file://{tmp_path}/y.png"
    assert find_pictures([f"file://{tmp_path}"]) == [name]
    assert read_picture(name).image.size == (2, 2)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImageError, match=r"cannot be read: Install s3fs to access S3; pip install pyarrow, or"):
        read_picture(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory://photos/none.png", "no picture 'memory://photos/none.png'; check the path"),
        ("nosuch://a/b.png", "'nosuch://a/b.png' cannot be read: Protocol not known: nosuch; check the address"),
    ],
)
def test_what_cannot_be_read_is_one_line(memory: bytes, name: str, words: str) -> None:
    with refused(ImageError, words):
        read_picture(name)


def test_a_remote_folder_without_pictures_is_an_error(memory: bytes) -> None:
    with pytest.raises(ImageError, match="no pictures in 'memory://texts'"):
        find_pictures(["memory://texts"])


def test_a_named_picture_costs_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_located", lambda path: pytest.fail(path))
    assert find_pictures(["s3://bucket/a.jpg", "gs://bucket/b.PNG"]) == ["s3://bucket/a.jpg", "gs://bucket/b.PNG"]


@pytest.mark.parametrize("path", ["https://a.b/c.jpg", "a.png", "C:/a.png", "a/b://c.png", "-"])
def test_other_names_are_not_remote(path: str) -> None:
    assert not is_remote(path)
