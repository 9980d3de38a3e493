"""Photographs of every kind, made in memory and judged by numpy arithmetic."""

import errno
import hashlib
import io
import os
import random
import struct
import subprocess
import sys
import threading
import warnings
import zipfile
import zlib
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, features

from hookscope.errors import ImageError, UsageError
from hookscope.images import reader as images
from hookscope.images.reader import ImageWarning, open_image, read_mask, read_picture

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
ORIENTED = {  # EXIF orientation -> how a viewer turns the stored array, (H, W, C)
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
    9: lambda a: a,  # unknown
    65535: lambda a: a,
}
AVIF = "avif" in features.get_supported_modules()
needs_avif = pytest.mark.skipif(not AVIF, reason="this Pillow has no AVIF")
needs_pillow_11 = pytest.mark.skipif(
    int(PIL.__version__.split(".")[0]) < 11, reason="Pillow 10 refuses this kind of TIFF"
)


@pytest.fixture(autouse=True)
def pillow_unchanged():
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    yield
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before


def encoded(image, form, **options):
    stream = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(stream, form, **options)
    return stream.getvalue()


def oriented(array, form, orientation, **options):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return encoded(array, form, exif=exif, **options)


def pixels(source, **options):
    """The decoded array of a picture without notes."""
    picture = read_picture(source, **options)
    assert picture.notes == ()
    return np.asarray(picture.image)


def refusal(source, **options):
    """The one line with which a picture is refused."""
    with pytest.raises(ImageError) as caught:
        read_picture(source, **options)
    line = str(caught.value)
    assert line.isprintable()
    return line


def quarters(height=16, width=24):
    """A picture that no turn or mirror maps to itself, flat enough for JPEG: (H, W, 3)."""
    array = np.zeros((height, width, 3), np.uint8)
    array[: height // 2, : width // 2] = RED
    array[height // 2 :, : width // 2] = GREEN
    array[: height // 2, width // 2 :] = BLUE
    return array


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, bits, colour, rows, *chunks):
    """A PNG that Pillow itself would not write."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff(width, height, samples, entries):
    """A little-endian TIFF of one strip with the given short or long tags."""
    table = {256: width, 257: height, 259: 1, 273: 0, 277: 1, 278: height, 279: len(samples), **entries}
    table[273] = 8 + 2 + 12 * len(table) + 4
    body = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(table.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(table)) + body + struct.pack("<I", 0) + samples


def test_every_kind_of_source_gives_the_same_picture(tmp_path, monkeypatch):
    content = encoded(quarters(), "PNG")
    path = tmp_path / "a.jpg"  # the suffix is not trusted
    path.write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    with open(path, "rb") as stream:
        pictures = [read_picture(source) for source in (str(path), path, content, stream, "-", io.BytesIO(content))]
    assert [p.name for p in pictures] == [str(path), str(path), "<bytes>", str(path), "-", "<stream>"]
    for picture in pictures:
        assert np.array_equal(np.asarray(picture.image), quarters())
        assert picture.sha256 == hashlib.sha256(content).hexdigest()
        assert picture.frames == (picture.image,)
        assert picture.image.mode == "RGB"


def test_a_given_name_is_kept_and_used_in_errors():
    content = encoded(Image.new("RGB", (2, 2)), "PNG")
    assert read_picture(content, name="a\nb").name == "a\nb"
    assert refusal(b"", name="a\nb").startswith("'a\\nb' is empty")


@pytest.mark.parametrize("form", ["PNG", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "SGI", "PCX", "DDS", "ICO"])
def test_lossless_formats(form):
    options = {"lossless": True} if form == "WEBP" else {"sizes": [(24, 24)]} if form == "ICO" else {}
    array = quarters(24, 24)
    assert np.array_equal(pixels(encoded(array, form, **options)), array)


MASK = np.array([[0, 1, 255], [0, 0, 7]])


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(MASK.astype(np.uint8)),
        Image.fromarray(MASK.astype(np.uint16)),
        Image.fromarray(MASK > 0),
        Image.fromarray(np.dstack([MASK * 0, MASK * 0, MASK]).astype(np.uint8)),
        Image.fromarray(np.dstack([MASK * 0 + 9] * 3 + [MASK]).astype(np.uint8)),
        Image.fromarray(MASK.astype(np.uint8)).convert("P"),
    ],
    ids=["L", "I;16", "1", "RGB", "RGBA", "P"],
)
def test_a_mask_is_where_a_picture_is_neither_black_nor_transparent(image):
    mask = read_mask(encoded(image, "PNG"))
    assert mask.mode == "L" and np.asarray(mask).tolist() == [[0, 255, 255], [0, 0, 255]]


def test_a_mask_is_upright_and_without_losses():
    assert np.asarray(read_mask(oriented(MASK.astype(np.uint8), "PNG", 6))).tolist() == [[0, 0], [0, 255], [255, 255]]
    with pytest.raises(ImageError, match="'<bytes>' is a JPEG, which does not keep zeros; save the mask as PNG"):
        read_mask(encoded(Image.new("L", (4, 4)), "JPEG"))


def test_the_result_outlives_its_stream_and_carries_no_metadata():
    image = read_picture(oriented(quarters(), "PNG", 6)).image
    assert image.info == {}
    assert image.getexif().get(274) is None
    assert type(image) is Image.Image


def test_a_named_pipe_is_read(tmp_path):
    path, content = tmp_path / "pipe", encoded(quarters(), "PNG")
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    array = pixels(path)
    writer.join()
    assert np.array_equal(array, quarters())


@pytest.mark.parametrize(
    "name", ["new\nline.png", "\x1b]0;title\x07.png", "a\u202eb.png", "$x^2$ %s {0}.png", "-", os.fsdecode(b"\xff")]
)
def test_awkward_names_are_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(encoded(quarters(), "PNG"))
    picture = read_picture(path)
    assert picture.name == str(path)
    assert np.array_equal(np.asarray(picture.image), quarters())


@pytest.mark.parametrize("orientation", ORIENTED)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", pytest.param("AVIF", marks=needs_avif)])
def test_orientation(form, orientation):
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}
    options["AVIF"] = {"quality": 100, "subsampling": "4:4:4"}
    array = pixels(oriented(quarters(), form, orientation, **options.get(form, {})))
    expected = ORIENTED[orientation](quarters())
    assert array.shape == expected.shape
    assert np.abs(array.astype(int) - expected).mean() < 4


@pytest.mark.parametrize("orientation", ORIENTED)
def test_orientation_of_deep_grey_and_of_transparency(orientation):
    grey = np.arange(6, dtype=np.uint16).reshape(2, 3) * 13107
    for form in ("PNG", "TIFF"):
        array = np.asarray(read_picture(oriented(grey, form, orientation)).image)
        assert np.array_equal(array, ORIENTED[orientation](scaled(grey, 0, 65535)))
    clear = np.dstack([quarters(), np.full((16, 24), 255, np.uint8)])
    clear[0, 0, 3] = 0
    shown = quarters()
    shown[0, 0] = WHITE
    array = np.asarray(read_picture(oriented(clear, "PNG", orientation)).image)
    assert np.array_equal(array, ORIENTED[orientation](shown))


@pytest.mark.parametrize("orientation", [2, 6])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_tiff_with_xmp_is_not_turned_twice(compression, orientation):
    xmp = f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
    content = encoded(
        Image.fromarray(quarters()), "TIFF", tiffinfo={274: orientation, 700: xmp}, compression=compression
    )
    assert np.array_equal(pixels(content), ORIENTED[orientation](quarters()))


@pytest.mark.parametrize("exif", [b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0garbage, not a TIFF", b"Exif\0\0"])
def test_a_picture_with_damaged_exif_is_read_without_a_warning(exif):
    picture = read_picture(encoded(quarters(), "JPEG", quality=95, subsampling=0, exif=exif))
    assert picture.image.size == (24, 16)
    assert all(note.isprintable() for note in picture.notes)


def test_exif_that_cannot_be_parsed_is_a_note():
    text = chunk(b"tEXt", b"Raw profile type exif\0\nexif\n4\nno hexadecimal")
    assert read_picture(png(1, 1, 8, 0, b"\0\7", text)).notes == ("EXIF data cannot be read: the image is not rotated",)


def scaled(values, low, high):
    """Grey from black at ``low`` to white at ``high``, not rounded: (H, W, 3)."""
    share = (values.astype(np.float64) - low) / (high - low) if high > low else np.zeros(values.shape)
    return np.repeat(255 * share[..., None], 3, axis=2)


def ramp(low, high, dtype):
    return np.linspace(low, high, 12).astype(dtype).reshape(3, 4)


def tiff_of_12_bits(levels):
    packed = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in levels.reshape(-1, 2).tolist())
    return tiff(64, 64, packed, {258: 12, 262: 1})


LEVELS = np.arange(65536, dtype=np.uint16).reshape(256, 256)
LEVELS_12 = np.arange(4096, dtype=np.uint16).reshape(64, 64)
BIG_ENDIAN = LEVELS.astype(">u2").tobytes()
UNSIGNED = np.array([[0, 2**31, 2**32 - 1]], np.uint32)
WHITE_IS_ZERO = tiff(256, 256, (65535 - LEVELS).astype("<u2").tobytes(), {258: 16, 262: 0})


def deep_greys():
    """Content, stored values, the values of black and white, and the note."""
    note = "16-bit grey scaled from 0..65535"
    for form in ("PNG", "TIFF", "JPEG2000"):
        yield pytest.param(encoded(LEVELS, form), LEVELS, 0, 65535, note, id=form)
    big_endian = encoded(Image.frombytes("I;16B", (256, 256), BIG_ENDIAN), "TIFF")
    yield pytest.param(big_endian, LEVELS, 0, 65535, note, id="big-endian TIFF")
    yield pytest.param(WHITE_IS_ZERO, LEVELS, 0, 65535, note, id="TIFF where white is zero")
    note = "32-bit grey scaled from 0..65535"
    yield pytest.param(b"P5 256 256 65535\n" + BIG_ENDIAN, LEVELS, 0, 65535, note, id="PGM")
    integers = encoded(LEVELS.astype(np.int32), "TIFF")
    yield pytest.param(integers, LEVELS, 0, 65535, note, id="32-bit TIFF")
    note = "12-bit grey scaled from 0..4095"
    yield pytest.param(tiff_of_12_bits(LEVELS_12), LEVELS_12, 0, 4095, note, id="12-bit TIFF")
    for low, high in [(-5, 100_000), (-(2**31), 2**31 - 1), (2**30, 2**30 + 200), (-7, -3), (70_000, 70_000)]:
        values, note = ramp(low, high, np.int32), f"32-bit grey scaled by its own range, {low}..{high}"
        yield pytest.param(encoded(values, "TIFF"), values, low, high, note, id=f"{low}..{high}")
    unsigned, note = tiff(3, 1, UNSIGNED.tobytes(), {258: 32, 262: 1, 339: 1}), "32-bit grey scaled by its own range"
    yield pytest.param(unsigned, UNSIGNED, 0, 2**32 - 1, f"{note}, 0..4294967295", id="unsigned")
    values, note = ramp(0.2, 1, np.float32), "floating-point grey scaled from 0..1"
    for form in ("TIFF", "PPM"):
        yield pytest.param(encoded(values, form), values, 0, 1, note, id=f"floating-point {form}")
    for low, high in [(-1.0, 1.0), (0.0, 255.0), (0.0, 1.5), (-3e38, 3e38)]:
        values, note = ramp(low, high, np.float32), f"floating-point grey scaled by its own range, {low:g}..{high:g}"
        yield pytest.param(encoded(values, "TIFF"), values, low, high, note, id=note[-12:])


@pytest.mark.parametrize(("content", "values", "low", "high", "note"), list(deep_greys()))
def test_deep_grey_is_scaled_by_its_type_or_its_own_range(content, values, low, high, note):
    picture = read_picture(content)
    assert np.abs(np.asarray(picture.image) - scaled(values, low, high)).max() <= 0.51
    assert picture.notes == (note,)


@pytest.mark.parametrize(("top", "bits"), [(4095, 12), (256, 12), (255, 8), (1, 8), (4096, None), (0, None)])
def test_shallow_data_in_a_16_bit_file_is_dark_and_noted(top, bits):
    values = np.zeros((4, 4), np.uint16)
    values[0, 0] = top
    picture = read_picture(encoded(values, "PNG"))
    dark = (f"dark: the values end near {top} of 65535, like {bits}-bit data in a 16-bit file",) if bits else ()
    assert picture.notes == ("16-bit grey scaled from 0..65535", *dark)
    assert np.abs(np.asarray(picture.image) - scaled(values, 0, 65535)).max() <= 0.51


def test_16_bit_colour_and_lab():
    values = np.array([[[0, 32768, 65535], [65535, 300, 12800]]], ">u2")
    picture = read_picture(png(2, 1, 16, 2, b"\0" + values.tobytes()))
    assert np.array_equal(np.asarray(picture.image), values >> 8)
    assert picture.notes == ()
    dark = read_picture(png(2, 1, 16, 2, b"\0" + (values >> 4).astype(">u2").tobytes()))
    assert dark.notes == ("dark: the values end near 3855 of 65535, like 12-bit data in a 16-bit file",)
    array = pixels(encoded(Image.frombytes("LAB", (2, 1), bytes([255, 0, 0, 0, 0, 0])), "TIFF"))
    assert np.abs(array.astype(int) - [[WHITE, (0, 0, 0)]]).max() <= 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(wrong):
    values = np.zeros((2, 3), np.float32)
    values[0, 1] = wrong
    line = refusal(encoded(values, "TIFF"), name="f.tif")
    assert line == "'f.tif' has values that are not numbers; 1 of 6 values are NaN or infinite; replace them first"


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF", "JPEG2000", "GIF"])
def test_hidden_colours_stay_hidden(form):
    array = np.dstack([quarters(), np.full((16, 24), 255, np.uint8)])
    array[4:8, 4:8, 3] = 0
    shown = quarters()
    shown[4:8, 4:8] = WHITE
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    picture = read_picture(encoded(array, form, **options))
    assert np.array_equal(np.asarray(picture.image), shown)
    assert picture.notes == ("transparency composited on white",)


def test_half_transparency_is_blended():
    alpha = np.arange(256, dtype=np.uint8).reshape(16, 16)
    array = np.dstack([np.full_like(alpha, 200), np.zeros_like(alpha), np.full_like(alpha, 255), alpha])
    shown = np.asarray(read_picture(encoded(array, "PNG")).image).astype(float)
    weight = alpha[..., None] / 255
    assert np.abs(shown - (array[..., :3] * weight + 255 * (1 - weight))).max() <= 0.51


def la(array):
    return Image.frombytes("LA", array.shape[1::-1], array.tobytes())


def palette():
    """A row of red (0) and green (1)."""
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *GREEN])
    image.putpixel((1, 0), 1)
    return image


def palette_with_alpha():
    image = Image.new("PA", (2, 1))
    image.putpalette([*RED, *GREEN])
    image.putpixel((0, 0), (0, 255))
    image.putpixel((1, 0), (1, 0))
    return encoded(image, "TIFF")


def grey_png(bits, samples, key):
    return png(4, 1, bits, 0, b"\0" + samples, chunk(b"tRNS", struct.pack(">H", key)))


def rgb_png(bits, factor, rest):
    samples = np.array([10, 20, 30, 30, 20, 10]) * factor + rest
    rows = b"\0" + samples.astype(">u2" if bits == 16 else "u1").tobytes()
    return png(2, 1, bits, 2, rows, chunk(b"tRNS", struct.pack(">3H", *samples[:3].tolist())))


LA = la(np.array([[[0, 0], [0, 255], [100, 255]]], np.uint8))
PREMULTIPLIED = tiff(2, 1, bytes([0, 0, 50, 100]), {258: 8, 262: 1, 277: 2, 338: 1}).replace(
    struct.pack("<HHII", 258, 4, 1, 8), struct.pack("<HHIHH", 258, 3, 2, 8, 8)
)
GREY_16 = struct.pack(">4H", 1000, 1001, 40000, 65535)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        pytest.param(encoded(LA, "PNG"), [255, 0, 100], id="PNG, grey with alpha"),
        pytest.param(encoded(LA, "TIFF"), [255, 0, 100], id="TIFF, grey with alpha"),
        pytest.param(PREMULTIPLIED, [255, 205], id="TIFF, premultiplied", marks=needs_pillow_11),
        pytest.param(palette_with_alpha, [RED, WHITE], id="TIFF, PA", marks=needs_pillow_11),
        pytest.param(encoded(palette(), "PNG", transparency=1), [RED, WHITE], id="palette, index"),
        pytest.param(encoded(palette(), "PNG", transparency=b"\xff\0"), [RED, WHITE], id="palette, alphas"),
        pytest.param(grey_png(1, b"\x50", 0), [255, 255, 255, 255], id="1 bit, 0"),
        pytest.param(grey_png(1, b"\x50", 1), [0, 255, 0, 255], id="1 bit, 1"),
        pytest.param(grey_png(2, b"\x1b", 0), [255, 85, 170, 255], id="2 bits, 0"),
        pytest.param(grey_png(2, b"\x1b", 2), [0, 85, 255, 255], id="2 bits, 2"),
        pytest.param(grey_png(4, b"\x3a\x5f", 10), [51, 255, 85, 255], id="4 bits"),
        pytest.param(grey_png(8, b"\x03\x0a\x05\xff", 10), [3, 255, 5, 255], id="8 bits"),
        pytest.param(grey_png(16, GREY_16, 1000), [255, 4, 156, 255], id="16 bits"),
        pytest.param(rgb_png(8, 1, 0), [WHITE, (30, 20, 10)], id="RGB of 8 bits"),
        pytest.param(rgb_png(16, 256, 77), [WHITE, (30, 20, 10)], id="RGB of 16 bits"),
    ],
)
def test_transparent_pixels_are_white(content, shown):
    picture = read_picture(content() if callable(content) else content)  # Pillow 10 cannot write all
    array = np.asarray(picture.image)[0]
    assert np.array_equal(array, np.broadcast_to(np.reshape(shown, (len(shown), -1)), array.shape))
    assert "transparency composited on white" in picture.notes


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        ("RGBA", "PNG"),  # opaque
        ("L", "PNG"),
        ("1", "TIFF"),
        ("P", "GIF"),
        pytest.param("YCbCr", "TIFF", marks=needs_pillow_11),
    ],
)
def test_plain_modes(mode, form):
    image = Image.fromarray(quarters()).convert(mode)
    assert np.array_equal(pixels(encoded(image, form)), np.asarray(image.convert("RGB")))


def test_cmyk_with_and_without_adobe_s_mark():
    image, note = Image.fromarray(quarters()).convert("CMYK"), "CMYK converted to RGB without its colour profile"
    picture = read_picture(encoded(image, "TIFF"))
    assert np.array_equal(np.asarray(picture.image), quarters())
    assert picture.notes == (note,)
    content = encoded(image, "JPEG", quality=95, subsampling=0)
    adobe = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0"
    if adobe[:9] not in content:
        content = content[:2] + adobe + content[2:]
    picture = read_picture(content)
    assert np.abs(np.asarray(picture.image).astype(int) - quarters()).mean() < 4
    assert picture.notes == (note,)
    start = content.index(b"\xff\xee")
    plain = content[:start] + content[start + 16 :]
    assert read_picture(plain).notes == (f"{note}; a JPEG without an Adobe marker may be inverted",)


COLOURS = [RED, GREEN, BLUE, (9, 9, 9), (200, 100, 0)]


def animation(form, colours=COLOURS):
    first, *others = (Image.new("RGB", (6, 4), colour) for colour in colours)
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}.get(form, {})
    return encoded(first, form, save_all=True, append_images=others, **options)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF", pytest.param("AVIF", marks=needs_avif)])
@pytest.mark.parametrize(
    ("count", "taken"),
    [(1, [0]), (2, [0, 4]), (3, [0, 2, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 1, 2, 2, 3, 3, 4, 4])],
)
def test_frames_are_spread_from_first_to_last(form, count, taken):
    picture = read_picture(animation(form), frames=count)
    assert len(picture.frames) == count
    assert picture.image is picture.frames[0]
    for frame, position in zip(picture.frames, taken, strict=True):
        assert (frame.mode, frame.size) == ("RGB", (6, 4))
        assert np.abs(np.asarray(frame).astype(int) - COLOURS[position]).max() <= (4 if form == "AVIF" else 0)
    word = "frame" if count == 1 else "frames"
    assert picture.notes == (f"{word} {', '.join(str(p + 1) for p in taken)} of 5",)


def test_a_still_is_repeated_and_an_mpo_has_a_second_picture():
    picture = read_picture(encoded(quarters(), "PNG"), frames=3)
    assert [np.array_equal(np.asarray(frame), quarters()) for frame in picture.frames] == [True] * 3
    assert picture.notes == ("a still image, repeated 3 times",)
    content = encoded(
        Image.new("RGB", (6, 4), RED), "MPO", save_all=True, append_images=[Image.new("RGB", (6, 4), BLUE)]
    )
    assert [frame.getpixel((0, 0))[2] > 200 for frame in read_picture(content, frames=2).frames] == [False, True]
    assert read_picture(content).notes == ("frame 1 of 2",)


def test_pages_of_different_sizes_and_no_frames_are_refused():
    content = encoded(Image.new("RGB", (6, 4)), "TIFF", save_all=True, append_images=[Image.new("RGB", (5, 5))])
    assert read_picture(content).notes == ("frame 1 of 2",)
    line = refusal(content, frames=2, name="a.tif")
    assert line == "'a.tif' has frames of different sizes; 6x4, 5x5; ask for one frame"
    with pytest.raises(UsageError, match="frames must be an integer of at least 1, not 0"):
        read_picture(b"", frames=0)


@pytest.mark.parametrize("orientation", [1, 6])
def test_each_tiff_page_is_turned_once(orientation):
    pages = [Image.fromarray(quarters()), Image.fromarray(quarters()[::-1].copy())]
    content = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:], tiffinfo={274: orientation})
    frames = read_picture(content, frames=2).frames
    for frame, page in zip(frames, pages, strict=True):
        assert np.array_equal(np.asarray(frame), ORIENTED[orientation](np.asarray(page)))


@pytest.mark.parametrize("size", [(1, 5000), (65000, 1), (2, 201), (101, 1), (1, 1), (1, 100), (200, 2)])
def test_extreme_shapes_are_refused(size):
    content = encoded(Image.new("L", size), "PNG")
    if max(size) <= 100 * min(size):
        assert read_picture(content).image.size == size
        return
    line = refusal(content, name="a.png")
    assert line.startswith("'a.png' is too narrow")
    assert f"it is {size[0]}x{size[1]}; one side may be 100 times the other" in line


def bomb(width, height):
    """A PNG that claims its size but holds no pixel: decoding it would fail otherwise than by its size."""
    return png(width, height, 8, 2, b"")


@pytest.mark.parametrize("side", [10_001, 13_000, 14_000, 60_000])
def test_too_many_pixels_are_refused_undecoded(side):
    line = refusal(bomb(side, side), name="a.png")
    assert line.startswith("'a.png' is too large; it ")
    assert f"{side * side:,} pixels; the limit is 100,000,000; make it smaller" in line
    assert "cannot be decoded" in refusal(bomb(9_900, 9_900))  # Pillow's own warning comes earlier


def test_frames_count_together(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 60)
    assert len(read_picture(animation("GIF"), frames=2).frames) == 2
    line = refusal(animation("GIF"), frames=3, name="a.gif")
    assert "it is 6x4, 3 frames are 72 pixels; the limit is 60" in line


def test_the_pictures_in_pages_and_icons_are_checked():
    pages = encoded(Image.new("RGB", (6, 4)), "TIFF", save_all=True, append_images=[Image.new("RGB", (1, 300))])
    assert "1x300" in refusal(pages, frames=2)
    inner = encoded(Image.new("L", (300, 1)), "PNG")
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 22)
    assert "it is 300x1; one side" in refusal(b"\0\0\1\0\1\0" + entry + inner)


def test_a_file_that_is_too_long_is_not_read_and_an_endless_stream_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_read_all", None)
    with open(tmp_path / "a.png", "wb") as stream:
        stream.truncate(images.MAX_BYTES + 1)  # sparse: takes no room
    assert "the limit is 1,073,741,824 bytes" in refusal(tmp_path / "a.png")
    monkeypatch.undo()

    class Endless(io.RawIOBase):
        def read(self, size=-1):
            return bytes(size)

    monkeypatch.setattr(images, "MAX_BYTES", 5 << 20)
    assert "is too long for an image; the limit is 5,242,880 bytes" in refusal(Endless())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=Endless()))
    assert "is too long" in refusal("-")


UNREADABLE = {
    "hollyday.jpg": "no image '{path}'; nearest: holiday.jpg; check the path",
    "none/a.jpg": "no image '{path}'; there is no folder '{folder}/none'; check the path",
    "folder": "'{path}' is a folder, not an image; name an image in it",
    "loop": f"'{{path}}' cannot be read: {os.strerror(errno.ELOOP)}",
    "broken": "no image '{path}'; it is a symbolic link to 'gone.png', which is missing; repair the link",
    "a" * 5000: f"'{{path}}' cannot be read: {os.strerror(errno.ENAMETOOLONG)}",
    "a\0b.png": "'{folder}/a\\x00b.png' cannot be read: embedded null byte",
    "\x1b[31m\n": "no image '{folder}/\\x1b[31m\\n'; check the path",
    "empty.png": "'{path}' is empty; save or download the image again",
}


@pytest.mark.parametrize("name", UNREADABLE, ids=lambda name: repr(name[:20]))
def test_a_file_that_cannot_be_read_says_why(tmp_path, name):
    (tmp_path / "holiday.jpg").write_bytes(b"holiday")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("gone.png")
    (tmp_path / "empty.png").touch()
    assert refusal(f"{tmp_path}/{name}") == UNREADABLE[name].format(path=f"{tmp_path}/{name}", folder=tmp_path)


def test_empty_paths_addresses_and_files_that_the_system_refuses_to_open(monkeypatch):
    assert refusal("").startswith("no image ''")
    assert "curl -L" in refusal("https://example.org/a.jpg")

    def refuse(path, mode):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refuse)
    assert refusal("a.png") == "'a.png' cannot be read: Permission denied; change its permissions"


def test_standard_input_that_cannot_be_read(monkeypatch):
    closed, terminal = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    closed.close()
    terminal.isatty = lambda: True
    for stream, line in [
        (None, "no image on standard input: it is closed; give a file, or pipe one in"),
        (closed, "'-' cannot be read: I/O operation on closed file."),
        (terminal, "no image on standard input: it is the terminal; give a file, or pipe one in"),
    ]:
        monkeypatch.setattr(sys, "stdin", stream)
        assert refusal("-") == line
    stream = io.BytesIO()
    stream.close()
    assert refusal(stream).startswith("'<stream>' cannot be read: I/O operation on closed file")


def archive(name):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr(name, b"0")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"Dear diary,\nno picture today.\n", "text"),
        ("Grüße, eine Notiz\n".encode() * 500, "text"),
        ("Notiz".encode("utf-16"), "text (UTF-16)"),
        (b'<?xml version="1.0"?>\n<!-- a -->\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"<svg/>", "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC (HEIF)"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIC (HEIF)"),
        (b"\0\0\0\x18ftypcrx \0\0\0\1crx isom", "raw data of a camera"),
        (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2", "a video"),
        (b"RIFF\0\1\0\0AVI LIST", "a video"),
        (b"\x1a\x45\xdf\xa3\x01\0\0\0", "a video"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "a PDF document"),
        (b"\x1f\x8b\x08\0\0\0\0\0", "an archive"),
        (archive("readme.txt"), "an archive (zip, tar, gzip)"),
    ],
)
def test_a_file_of_another_kind_is_named(content, words):
    line = refusal(content, name="a.jpg")
    assert line.startswith(f"'a.jpg' is not an image that can be read; it holds {words}")
    assert line.endswith("; give a JPEG, PNG or similar file")


def test_unknown_data_and_pictures_damaged_at_the_start():
    assert "it begins with the bytes 05 06 07 fe 00 00 00 00" in refusal(b"\5\6\7\xfe" + bytes(20))
    assert "it begins like PNG, but is damaged" in refusal(b"\x89PNG\r\n\x1a\n" + b"\xfe" * 40)
    assert "it begins like TIFF, but is damaged" in refusal(b"II*\0\x08\0\0\0\xff\xff\xff")


def test_an_eps_starts_no_interpreter(monkeypatch):
    def forbidden(*arguments, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    line = refusal(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert "not an image that can be read" in line


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_cut_short(form):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    content = encoded(noise, form)
    for part in (0.3, 0.6, 0.9):
        line = refusal(content[: int(len(content) * part)], name="a")
        assert line.startswith(("'a' cannot be decoded: ", "'a' is not an image that can be read; it begins like "))


@pytest.mark.parametrize(
    ("kind", "begin"), [(b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")], ids=["z", "i", "profile"]
)
@pytest.mark.parametrize("before", [True, False])
def test_a_huge_text_leaves_the_pixels_as_they_are(kind, begin, before):
    text = chunk(kind, begin + zlib.compress(bytes(9 << 20)))
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    plain = png(2, 1, 8, 0, b"\0\7\11", chunk(b"eXIf", turned.tobytes().removeprefix(b"Exif\0\0")))
    at = 33 if before else len(plain) - 12
    picture = read_picture(plain[:at] + text + plain[at:], name="a")
    assert picture.notes == ("its text or colour profile is damaged or too large, and was left out",)
    assert (picture.image.size, picture.image.tobytes()) == ((1, 2), bytes([7, 7, 7, 9, 9, 9]))
    assert picture.sha256 == hashlib.sha256(plain[:at] + text + plain[at:]).hexdigest()
    damaged = plain[:-20] + text
    assert refusal(damaged, name="a").startswith("'a' cannot be decoded: ")


@pytest.mark.parametrize("error", [MemoryError(), Image.DecompressionBombError("Image size (7 pixels) is a bomb")])
def test_errors_with_little_text(monkeypatch, error):
    def fail(self):
        raise error

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    memory = isinstance(error, MemoryError)
    expected = "'a' does not fit into memory" if memory else "'a' is too large; it has 7 pixels"
    assert refusal(encoded(Image.new("L", (1, 1)), "BMP"), name="a").startswith(expected)


def test_damage_never_escapes_as_another_exception():
    chance = random.Random(0)
    sources = [oriented(quarters(), form, 6) for form in ("JPEG", "PNG", "WEBP", "TIFF")]
    for content in [*sources, animation("GIF"), animation("PNG"), animation("TIFF")]:
        for _ in range(60):
            damaged = bytearray(content)
            for _ in range(chance.randint(1, 6)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            try:
                picture = read_picture(bytes(damaged), frames=chance.choice([1, 2]))
            except ImageError:
                continue
            assert picture.image.mode == "RGB"


def test_open_image_warns_of_each_note_at_the_caller():
    with pytest.warns(ImageWarning) as caught:
        image = open_image(encoded(la(np.zeros((4, 4, 2), np.uint8)), "PNG"))
    assert [str(w.message) for w in caught] == ["transparency composited on white"]
    assert caught[0].filename == __file__
    assert image.getpixel((0, 0)) == WHITE


def test_a_warning_of_pillow_becomes_a_note(monkeypatch):
    real = TiffImagePlugin.TiffImageFile.load

    def load(self):
        warnings.warn("odd\x1b tag", UserWarning, stacklevel=2)
        warnings.warn("old", DeprecationWarning, stacklevel=2)
        return real(self)

    monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "load", load)
    assert read_picture(encoded(Image.new("L", (2, 2)), "TIFF")).notes == ("Pillow: odd\\x1b tag",)
