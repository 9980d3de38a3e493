"""PNG files: images and provenance are read back as written, and the values of a sheet within half a level."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import nn

import hookscope
from hookscope.drawing import colours
from hookscope.drawing.files import SheetPage, encode_png, read_provenance, with_provenance, write_png
from hookscope.drawing.scale import Scale
from hookscope.drawing.sheet import Origin, Style, draw_call
from hookscope.drawing.tiles import ChannelChoice, reduce_output
from hookscope.errors import ImageError, WriteError
from hookscope.hooks.calls import Call
from hookscope.hooks.maps import InputSize, maps_or_vectors


def test_blocks_stand_one_below_the_other_within_the_margin() -> None:
    page = SheetPage()
    assert page.add(np.full((2, 5), colours.BAR, np.uint8)) == 0
    assert page.add(np.full((3, 4), colours.NAN, np.uint8), space=4) == 6
    assert (page.width, page.height) == (5, 9)
    pixels = page.pixels(margin=1)
    assert pixels.shape == (11, 7)
    assert np.argwhere(pixels == colours.BAR).tolist() == [[y, x] for y in (1, 2) for x in range(1, 6)]
    assert np.argwhere(pixels == colours.NAN).tolist() == [[y, x] for y in (7, 8, 9) for x in range(1, 5)]
    assert set(np.unique(pixels)) == {colours.BAR, colours.NAN, colours.BACKGROUND}


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


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_pixels_and_provenance_come_back(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    write_png(image(mode), path, PROVENANCE)
    with Image.open(path) as opened:
        assert (opened.format, opened.mode) == ("PNG", mode)
        assert np.array_equal(np.asarray(opened), np.asarray(image(mode)))
    assert read_provenance(path) == read_provenance(path.read_bytes()) == PROVENANCE


def test_the_text_is_json_in_ascii_that_pillow_shows_too_also_if_it_is_large() -> None:
    with Image.open(io.BytesIO(encode_png(image(), PROVENANCE))) as opened:
        text = opened.info["hookscope"]
    assert text.isascii() and text.isprintable()
    assert json.loads(text) == PROVENANCE
    data = encode_png(image(), large(60_000))
    assert len(data) > 1 << 20
    assert read_provenance(data) == large(60_000)


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
    text = json.dumps(large(7_392))
    assert read_provenance(png_with("hookscope", text, compressed=True)) == large(7_392)


def test_text_that_another_tool_moved_behind_the_pixels_is_read() -> None:
    data = encode_png(image(), PROVENANCE)
    start = data.index(b"tEXt") - 4
    length = int.from_bytes(data[start : start + 4], "big") + 12
    end = data.index(b"IEND") - 4
    moved = data[:start] + data[start + length : end] + data[start : start + length] + data[end:]
    assert read_provenance(moved) == PROVENANCE


FOREIGN = "the picture has no provenance of hookscope; only PNG files written by hookscope have it"


def damaged() -> bytes:
    return encode_png(image(), {"model": "resnet18"}).replace(b"resnet18", b"resnet19")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "cannot read the picture: it is damaged, too large or not an image"),
        (encode_png(image(), PROVENANCE)[:60], "cannot read the picture: it is damaged, too large or not an image"),
        (damaged(), "cannot read the picture: it is damaged, too large or not an image"),
        (png_with("Comment", "hookscope"), FOREIGN),
        (png_with("hookscope", "no json"), "the provenance in the picture is not JSON"),
        (png_with("hookscope", "[" * 100_000), "the provenance in the picture is not JSON"),
        (png_with("hookscope", "[1]"), "the provenance in the picture is not a JSON object"),
    ],
    ids=["empty", "cut", "damaged", "foreign", "no-json", "deep", "list"],
)
def test_a_picture_without_provenance_is_one_line(data: bytes, text: str) -> None:
    with pytest.raises(ImageError) as caught:
        read_provenance(data)
    assert str(caught.value) == text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"^cannot read .*none\.png: No such file or directory$"):
        read_provenance(tmp_path / "none.png")
    with pytest.raises(ImageError, match="Is a directory"):
        read_provenance(tmp_path)


ORIGIN = Origin("net", "none", "cat.jpg", "", "none")


def random(*shape: int) -> torch.Tensor:
    return torch.manual_seed(0) and torch.randn(shape)


def written(
    path: Path,
    output: Any,
    scale: str = "channel",
    channels: str = "0-9999",
    module: nn.Module | None = None,
    shown: InputSize | None = None,
    frames: Any = None,
    **style: Any,
) -> Path:
    summary = reduce_output(output, module, shown, ChannelChoice.parse(channels), Scale.parse(scale))
    sheet = draw_call(summary, Call("a", "Conv2d", 0, 0), ORIGIN, Style(**style), frames)
    write_png(sheet.image, path, sheet.provenance)
    return path


def broken() -> torch.Tensor:
    values = random(1, 8, 5, 6)
    values[0, 0, 0, 0], values[0, 1, 1], values[0, 2, :, 2], values[0, 3] = math.nan, math.inf, -math.inf, math.nan
    values[0, 4], values[0, 5] = 0, 7
    return values


PHOTOGRAPH = Image.effect_noise((40, 30), 90).convert("RGB")
OUTPUTS = {
    "conv": (random(1, 70, 7, 7), {}),
    "plain": (random(1, 7, 9, 11), {"plain": True, "columns": 2}),
    "cell": (random(1, 70, 7, 7), {"cell": 1}),
    "one": (random(1, 40, 1, 1), {}),
    "broken": (broken(), {}),
    "broken layer": (broken(), {"scale": "layer"}),
    "symmetric": (random(1, 5, 6, 7), {"scale": "symmetric", "cmap": "RdBu_r"}),
    "tiny": (random(1, 3, 5, 5) * 1e-38, {}),
    "huge": (random(1, 3, 5, 5) * 1e37, {}),
    "double": (random(1, 3, 5, 5).double() * 1e307, {}),
    "widest": (torch.tensor([[[[-1.7e308, 1.7e308, 0.0]]]], dtype=torch.float64), {}),
    "offset": (random(1, 3, 5, 5) + 1000, {}),
    "far": (random(1, 3, 5, 5).double() + 1e9, {}),
    "parts": ({"out": random(1, 3, 5, 5), "aux": random(2, 4, 3, 9)}, {}),
    "clip": (random(1, 3, 4, 5, 6), {"module": nn.Conv3d(1, 1, 1)}),
    "clip plain": (random(1, 3, 4, 5, 6), {"module": nn.Conv3d(1, 1, 1), "plain": True, "cell": 12}),
    "tokens": (random(1, 197, 12), {"shown": InputSize(224, 224)}),
    "strip": (random(1, 3, 1, 5000), {}),
    "half": (random(1, 3, 5, 5).half(), {}),
    "photograph": (random(2, 3, 5, 5), {"frames": [[PHOTOGRAPH], [PHOTOGRAPH]]}),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_values_come_back_within_half_a_level(tmp_path: Path, name: str) -> None:
    output, more = OUTPUTS[name]
    read = hookscope.read_sheet(written(tmp_path / "a.png", output, **more))
    expected = maps_or_vectors(output, more.get("module"), more.get("shown"))
    assert list(read) == [maps.label for maps in expected]
    for maps in expected:
        channels, values = read[maps.label]
        true = maps.values.double().numpy()
        assert channels == list(range(len(true)))
        assert values.shape == true.shape
        finite = np.isfinite(true)
        assert np.array_equal(values[~finite], true[~finite], equal_nan=True)
        shared = "scale" in more or true[0].size == 1
        for at, channel in enumerate(true):
            drawn = true[finite] if shared else channel[finite[at]]
            if drawn.size:
                low, high = drawn.min(), drawn.max()
                low, high = (-max(-low, high), max(-low, high)) if more.get("scale") == "symmetric" else (low, high)
                half = (high / 2 - low / 2) / (colours.LEVELS - 1)
                assert (abs(values[at][finite[at]] - channel[finite[at]]) <= half * 1.005 + abs(low) * 1e-15).all(), at


@pytest.mark.parametrize(
    ("values", "options", "channels", "expected"),
    [
        (torch.tensor([0.0, 7.0, -1.1]).view(1, 3, 1, 1).expand(1, 3, 3, 3), {}, [0, 1, 2], None),
        (torch.tensor([-9.0, -1.0, 1.0, 9.0]).view(1, 1, 1, 4), {"scale": "-1:1"}, [0], [-1, -1, 1, 1]),
        (torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 2, 2), {"channels": "2,1"}, [2, 1], [2] * 4 + [1] * 4),
    ],
    ids=["constants", "clipped", "chosen"],
)
def test_constants_ends_of_the_scale_and_chosen_channels_come_back_exactly(
    tmp_path: Path, values: torch.Tensor, options: dict, channels: list[int], expected: list[float] | None
) -> None:
    path = written(tmp_path / "a.png", values, module=nn.Conv2d(1, 1, 1), **options)
    read_channels, read = hookscope.read_sheet(path)[""]
    assert read_channels == channels
    assert read.ravel().tolist() == (values[0].double().ravel().tolist() if expected is None else expected)


def test_the_values_of_bars_come_back_exactly(tmp_path: Path) -> None:
    scores = torch.tensor([[0.1, math.nan, math.inf, -math.inf, -2.0]]).double()
    channels, values = hookscope.read_sheet(written(tmp_path / "a.png", scores))[""]
    assert (channels, values.shape) == ([0, 1, 2, 3, 4], (5, 1, 1))
    assert np.array_equal(values.ravel(), scores[0].numpy(), equal_nan=True)


def refused(path: Path) -> str:
    with pytest.raises(ImageError) as caught:
        hookscope.read_sheet(path)
    return str(caught.value).replace(str(path), "FILE")


def test_pictures_that_hold_no_values(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    photograph = Image.new("RGB", (9, 9))
    assert refused(written(path, random(1, 3, 4, 4), frames=[[photograph]], alpha=0.5)).startswith("FILE is an overlay")
    write_png(photograph, path, {"model": "resnet18"})
    assert refused(path) == "FILE is not a sheet of feature maps; visualize draws sheets"
    photograph.save(path)
    assert "has no provenance" in refused(path)


def test_the_save_of_a_drawn_sheet_keeps_its_values(tmp_path: Path) -> None:
    maps = random(1, 3, 4, 4)
    hookscope.draw_sheet(maps, title="conv", channels=[2, 0]).save(tmp_path / "a.png")
    [(channels, values)] = hookscope.read_sheet(tmp_path / "a.png").values()
    assert channels == [2, 0] and values == pytest.approx(maps[0, [2, 0]].numpy(), abs=0.02)
    assert read_provenance(tmp_path / "a.png")["title"] == "conv"


def test_pictures_changed_since(tmp_path: Path) -> None:
    path = written(tmp_path / "a.png", random(1, 3, 4, 4))
    whole = path.read_bytes()
    with Image.open(path) as image:
        image.load()
        provenance = json.loads(image.info["hookscope"])
        changes = [
            image.resize((image.width // 2, image.height)),
            image.convert("RGB"),
            image.crop((5, 0, *image.size)),
        ]
        other = image.copy()
    other.putpalette(colours.palette("gray").tobytes())
    for changed in [*changes, other]:
        write_png(changed, path, provenance)
        assert refused(path) == "FILE was modified after it was drawn; draw it again"
    path.write_bytes(whole[:-300])
    assert refused(path).startswith("cannot read FILE: ")


def test_the_provenance_travels_with_the_image(tmp_path: Path) -> None:
    image = with_provenance(Image.new("RGB", (2, 2)), {"model": "net"})
    write_png(image, tmp_path / "a.png")
    assert read_provenance(tmp_path / "a.png") == {"model": "net"}
    with Image.open(tmp_path / "a.png") as read:
        assert read.info["hookscope"] == image.info["hookscope"] == '{"model":"net"}'
