"""A picture and its provenance come back as they were written."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import hookscope
from hookscope.drawing.png import encode_png, read_provenance, write_png
from hookscope.errors import ImageError, WriteError

PROVENANCE: dict[str, Any] = {
    "hookscope": "0.1.0",
    "image": {"name": "caf\udce9 \x1b[0m 猫.jpg", "sha256": "0" * 64},
    "shape": [1, 64, 112, 112],
    "ranges": [[0.1, 1 / 3], None],
}


def image(mode: str = "RGB") -> Image.Image:
    pixels = np.arange(8 * 5 * len(mode), dtype=np.uint8).reshape(8, 5, len(mode))
    return Image.fromarray(pixels.squeeze(-1) if mode == "L" else pixels, mode)


def large(count: int) -> dict[str, Any]:
    """The provenance of a sheet of ``count`` channels; the numbers do not compress."""
    numbers = np.random.default_rng(0).normal(size=(count, 2)).tolist()
    return {"ranges": numbers}


class Pipe(io.RawIOBase):
    """A stream that can neither be sought nor read more than a little at a time."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._inner = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._inner.read(size)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_pixels_and_provenance_come_back(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    write_png(image(mode), path, PROVENANCE)
    with Image.open(path) as opened:
        assert (opened.format, opened.mode) == ("PNG", mode)
        assert np.array_equal(np.asarray(opened), np.asarray(image(mode)))
    for source in (path, str(path), path.read_bytes(), io.BytesIO(path.read_bytes()), Pipe(path.read_bytes())):
        assert read_provenance(source) == PROVENANCE  # type: ignore[arg-type]


def test_the_text_is_json_in_ascii_that_pillow_shows_too() -> None:
    with Image.open(io.BytesIO(encode_png(image(), PROVENANCE))) as opened:
        text = opened.info["hookscope"]
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == PROVENANCE


@pytest.mark.parametrize("count", [7_392, 60_000])
def test_large_provenance_is_read_by_us_and_by_pillow(count: int) -> None:
    data = encode_png(image(), large(count))
    assert count < 60_000 or len(data) > 1 << 20
    assert read_provenance(data) == large(count)
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()
        assert json.loads(opened.info["hookscope"]) == large(count)


def test_the_compression_level_is_one_unless_asked() -> None:
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 4, (64, 64), dtype=np.uint8))
    assert encode_png(noisy, {}) == encode_png(noisy, {}, compress_level=1)
    assert len(encode_png(noisy, {}, compress_level=0)) > len(encode_png(noisy, {}))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        write_png(image(), tmp_path / "a.png", {"range": [value]})
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="its folder does not exist"):
        write_png(image(), tmp_path / "none" / "a.png", {})


def png_with(keyword: str, text: str, compressed: bool = False) -> bytes:
    info, buffer = PngInfo(), io.BytesIO()
    info.add_text(keyword, text, zip=compressed)
    image().save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def test_text_that_another_tool_compressed_is_read() -> None:
    text = json.dumps(large(60_000))
    assert read_provenance(png_with("hookscope", text, compressed=True)) == large(60_000)


def test_text_that_another_tool_moved_behind_the_pixels_is_read() -> None:
    data = encode_png(image(), PROVENANCE)
    start = data.index(b"tEXt") - 4
    length = int.from_bytes(data[start : start + 4], "big") + 12
    end = data.index(b"IEND") - 4
    moved = data[:start] + data[start + length : end] + data[start : start + length] + data[end:]
    assert read_provenance(moved) == PROVENANCE


def bomb() -> bytes:
    body = b"hookscope\0\0" + zlib.compress(b"[" * (80 << 20), 9)
    chunk = len(body).to_bytes(4, "big") + b"zTXt" + body + zlib.crc32(b"zTXt" + body).to_bytes(4, "big")
    data = png_with("a", "b")
    return data[:33] + chunk + data[33:]


def damaged() -> bytes:
    return encode_png(image(), {"model": "resnet18"}).replace(b"resnet18", b"resnet19")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the picture is no PNG; hookscope writes its provenance into PNG files"),
        (b"\xff\xd8\xff\xe0", "the picture is no PNG; hookscope writes its provenance into PNG files"),
        (encode_png(image(), PROVENANCE)[:60], "the picture ends in the middle; write or copy the picture anew"),
        (encode_png(image(), PROVENANCE)[:8], "the picture ends in the middle; write or copy the picture anew"),
        (
            png_with("Comment", "hookscope"),
            "the picture holds no provenance of hookscope; only PNG files written by hookscope do",
        ),
        (png_with("hookscope", "no json"), "the provenance in the picture is no JSON"),
        (png_with("hookscope", "[" * 100_000), "the provenance in the picture is no JSON"),
        (png_with("hookscope", "[1]"), "the provenance in the picture is no JSON object"),
        (damaged(), "the provenance in the picture is damaged; write the picture anew"),
        (bomb(), "the provenance in the picture is larger than 64 MiB"),
        (
            png_with("a", "b")[:33] + b"\x7f\xff\xff\xfftEXt",
            "the picture ends in the middle; write or copy the picture anew",
        ),
    ],
    ids=["empty", "jpeg", "cut", "signature", "foreign", "no-json", "deep", "list", "damaged", "bomb", "length"],
)
def test_what_holds_no_provenance_is_one_line(data: bytes, text: str) -> None:
    with pytest.raises(ImageError) as caught:
        read_provenance(data)
    assert str(caught.value) == text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"^cannot read .*none\.png: No such file or directory$"):
        read_provenance(tmp_path / "none.png")
    with pytest.raises(ImageError, match="Is a directory"):
        read_provenance(tmp_path)


def test_pictures_never_import_torch() -> None:
    script = "import sys, hookscope.drawing.png; sys.exit(bool({'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(hookscope.__file__).parents[1]).returncode == 0
