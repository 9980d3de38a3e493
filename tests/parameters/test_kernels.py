"""The filters of convolutions as a picture: its pixels are the weights again."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.drawing import ChannelChoice, Style, colours, encode_png
from hookscope.drawing.files import read_provenance
from hookscope.errors import LayerError
from hookscope.models.loaded import LoadedModel
from hookscope.models.metadata import WeightsMetadata
from hookscope.parameters import draw_kernels, kernels
from hookscope.parameters.kernels import KernelSheet, kernel_sheet


def net() -> nn.Sequential:
    torch.manual_seed(0)
    first, depthwise = nn.Conv2d(3, 8, 5), nn.Conv2d(6, 6, 3, groups=6)
    layers = first, nn.Conv2d(8, 6, 3), depthwise, nn.Conv2d(6, 10, 1), nn.ConvTranspose2d(10, 4, 2)
    return nn.Sequential(*layers).requires_grad_(False)


def draw(model: nn.Module, layers: Any = None, channels: str | None = None, **style: Any) -> KernelSheet:
    choice = ChannelChoice.parse(channels) if channels else None
    style.setdefault("cmap", "RdBu_r")
    return kernel_sheet(model, layers, choice, Style(**style), "a net", "random (seed 0)")


def maps(sheet: KernelSheet, part: dict[str, Any]) -> np.ndarray:
    """The pixels ``(filters, height, width, 3)`` of the maps of one layer, one for each weight."""
    pixels = np.asarray(sheet.image.convert("RGB"))
    pictures = []
    for at in range(len(part["channels"])):
        row, column = divmod(at, part["columns"])
        x, y, zoom = part["x"] + column * part["step_x"], part["y"] + row * part["step_y"], part["zoom"]
        wide = part["width"] // part["frames"]
        frames = []
        for frame in range(part["frames"]):
            left = x + frame * (wide * zoom + 2)
            block = pixels[y : y + part["height"] * zoom, left : left + wide * zoom]
            assert (block == np.repeat(np.repeat(block[::zoom, ::zoom], zoom, 0), zoom, 1)).all()
            frames.append(block[::zoom, ::zoom])
        pictures.append(np.concatenate(frames, axis=1))
    return np.stack(pictures)


def coloured(values: np.ndarray, largest: float) -> np.ndarray:
    levels = np.rint((values + largest) / (2 * largest) * (colours.LEVELS - 1)).astype(int)
    return colours.palette("RdBu_r")[levels]


def close(pixels: np.ndarray, expected: np.ndarray) -> bool:
    """Equal but for a level where a value lies between two."""
    return pixels.shape == expected.shape and int(np.abs(pixels.astype(int) - expected.astype(int)).max()) <= 4


def part_of(sheet: KernelSheet, layer: str) -> dict[str, Any]:
    return next(part for part in sheet.provenance["kernels"] if part["layer"] == layer)


def drawn(model: nn.Module, layer: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """The provenance, the pixels and the weights of one layer."""
    sheet = draw(model, "all", "all")
    part = part_of(sheet, layer)
    return part, maps(sheet, part), model.get_submodule(layer).weight.numpy().astype(np.float64)


def in_colour(weight: np.ndarray) -> np.ndarray:
    largest = np.abs(weight).max(axis=(1, 2, 3), keepdims=True)
    return np.rint(127.5 + 127.5 * (weight / largest)).transpose(0, 2, 3, 1)


def matrix(weight: np.ndarray, part: dict[str, Any]) -> np.ndarray:
    """The kernels of the rows and columns that the provenance names, row by row."""
    rows = weight[part["filters"]][:, part["inputs"]]
    return coloured(rows.reshape(-1, *rows.shape[2:]), np.abs(weight).max())


def test_the_first_layer_is_in_colour_and_others_are_a_matrix_of_outputs_and_inputs() -> None:
    part, shown, weight = drawn(net(), "1")
    assert (part["filters"], part["inputs"], part["columns"]) == ([*range(6)], [*range(8)], 8)
    assert close(shown, matrix(weight, part))
    assert (part["drawn"], part["scale"]) == ("matrix", "symmetric")
    part, shown, weight = drawn(net(), "3")
    assert close(shown, matrix(weight, part))
    assert part["filters"] == list(range(10))
    part, shown, weight = drawn(net(), "0")
    assert (shown == in_colour(weight)).all()
    assert part["high"] == pytest.approx(np.abs(weight).max(axis=(1, 2, 3)))
    assert part["drawn"] == "rgb"


def test_of_a_large_matrix_the_strongest_rows_and_columns_are_drawn(words: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Conv2d(40, 50, 3)).requires_grad_(False)
    sheet = draw(model, "re:^1$")
    part, weight = part_of(sheet, "1"), model[1].weight.numpy()
    sizes = np.abs(weight).mean(axis=(2, 3))
    assert part["filters"] == np.argsort(-sizes.mean(1))[:16].tolist()
    assert part["inputs"] == np.argsort(-sizes[part["filters"]].mean(0))[:32].tolist()
    assert close(maps(sheet, part), matrix(weight, part))
    chosen = "16 of 50 output channels (rows), by mean |weight|; 32 of 40 input channels (columns), by mean |weight| in"
    assert f"{chosen} these rows   all: channels='all'" in " ".join(words)
    assert words.count("A row is an output channel, a column is an input channel.") == 1
    assert len(part_of(draw(model, "re:^1$", "all", columns=40), "1")["channels"]) == 40 * 50


def test_depthwise_filters_are_maps_and_transposed_ones_have_their_own_axis() -> None:
    part, shown, weight = drawn(net(), "2")
    assert part["drawn"] == "maps"
    assert close(shown, coloured(weight[part["channels"], 0], np.abs(weight).max()))
    part, shown, weight = drawn(net(), "4")
    assert close(shown, matrix(weight.transpose(1, 0, 2, 3), part))


def test_moments_of_a_clip_stand_side_by_side() -> None:
    _, shown, weight = drawn(nn.Sequential(nn.Conv3d(3, 4, (2, 3, 3))).requires_grad_(False), "0")
    assert (shown == in_colour(np.concatenate([weight[:, :, 0], weight[:, :, 1]], axis=3))).all()


def test_the_first_convolution_is_drawn_and_others_on_request() -> None:
    model = net()
    assert [part["layer"] for part in draw(model).provenance["kernels"]] == ["0"]
    assert [part["layer"] for part in draw(model, "re:^[13]$").provenance["kernels"]] == ["1", "3"]
    assert [part["layer"] for part in draw(model, "all").provenance["kernels"]] == ["0", "1", "2", "3", "4"]


def test_the_chosen_filters_are_drawn() -> None:
    model = net()
    assert part_of(draw(model, "re:^1$", channels="1,3-4"), "1")["filters"] == [1, 3, 4]
    norms = np.abs(model[1].weight.numpy()).mean(axis=(1, 2, 3))
    assert part_of(draw(model, "re:^1$", channels="top:2"), "1")["filters"] == np.argsort(-norms)[:2].tolist()
    part = part_of(draw(model, columns=3, cell=50, cmap="gray"), "0")
    assert (part["columns"], part["zoom"]) == (3, 10)
    many = nn.Conv2d(3, 100, 3)
    assert len(draw(many).provenance["kernels"][0]["channels"]) == 64
    assert len(draw(many, channels="all").provenance["kernels"][0]["channels"]) == 100


def test_nan_is_magenta_and_inf_red() -> None:
    model = net()
    model[0].weight[2, 1, 3, 4] = model[1].weight[5, 7] = torch.nan
    model[3].weight[1, 2] = torch.inf
    sheet = draw(model, ["re:^[013]$"])
    magenta, red = (colours.palette("RdBu_r")[at] for at in (colours.NAN, colours.PLUS_INF))
    shown = maps(sheet, part_of(sheet, "0"))
    assert np.argwhere((shown == magenta).all(axis=3)).tolist() == [[2, 3, 4]]
    shown = maps(sheet, part_of(sheet, "3"))
    assert np.argwhere((shown == red).all(axis=3)).tolist() == [[1 * 6 + 2, 0, 0]]
    assert encode_png(sheet.image, sheet.provenance)


def test_zero_and_all_nan_filters() -> None:
    model = net()
    for layer in model:
        layer.weight.zero_()
    sheet = draw(model, "all")
    assert set(maps(sheet, part_of(sheet, "0")).ravel()) == {128}
    for layer in model:
        layer.weight.fill_(torch.nan)
    sheet = draw(model, "all")
    assert read_provenance(encode_png(sheet.image, sheet.provenance))["kernels"]


def test_words_and_provenance(words: list[str]) -> None:
    sheet = draw(net(), "all")
    assert words[:2] == ["a net   filters of convolutions", "weights: random (seed 0), the network is not trained"]
    assert "0   Conv2d   kernels of 5×5" in words
    assert any(line.startswith("8 filters; the three input channels are red, green and blue") for line in words)
    assert "6 output channels (rows); 8 input channels (columns)" in words
    assert any(line.startswith("6 filters; each sees one input channel") for line in words)
    assert words.count("one scale for the layer, symmetric about 0:") == 4
    assert words.count("each filter has its own scale:") == 1
    provenance = read_provenance(encode_png(sheet.image, sheet.provenance))
    expected = {"model": "a net", "weights": "random (seed 0)", "size": list(sheet.image.size)}
    assert expected.items() <= provenance.items() and {"torch", "hookscope"} <= set(provenance)


def test_the_bar_of_filters_in_colour_goes_from_dark_to_bright_in_each_colour() -> None:
    sheet = draw(net())
    pixels = np.asarray(sheet.image)[: part_of(sheet, "0")["y"]].astype(int)
    for channel in range(3):
        others = [at for at in range(3) if at != channel]
        row = next(row for row in pixels if ((row[:, others] == 128).all(1) & (row[:, channel] == 0)).any())
        ramp = row[(row[:, others] == 128).all(1), channel]
        assert (ramp[0], ramp[-1]) == (0, 255) and (np.diff(ramp) > 0).all()


def test_the_public_function_draws_the_same_picture() -> None:
    model = net()
    loaded = LoadedModel.of(model, "a net", "random (seed 0)", WeightsMetadata(), "classification")
    image = draw_kernels(loaded, "re:^1$", channels="top:3", columns=4)
    style = Style(4, None, "RdBu_r")
    judge = kernel_sheet(model, "re:^1$", ChannelChoice.parse("top:3"), style, "a net", "random (seed 0)")
    assert image.tobytes() == judge.image.tobytes()
    assert json.loads(image.info["hookscope"])["model"] == "a net"
    assert draw_kernels(model[0], channels=[1, 2]).size[0] > 0


def test_convolutions_above_24_are_left_out() -> None:
    model = nn.Sequential(*[nn.Conv2d(3, 3, 3) for _ in range(30)])
    sheet = draw(model, "all")
    assert len(sheet.provenance["kernels"]) == 24
    assert sheet.left_out == ("6 further convolutions: choose with layers",)
    assert len(draw(model, "*").provenance["kernels"]) == 30


def test_what_is_left_out_is_listed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_PIXELS", 24 * 40_000)
    wide = [nn.Conv2d(4, 300, 3) for _ in range(2)]
    first, second = draw(nn.Sequential(*wide), "*", "all").left_out
    assert f"left out: {first}; {second}" in words and " kernels of 0: choose with channels" in first


def test_a_palette_picture_where_nothing_is_in_colour() -> None:
    assert draw(nn.Conv2d(1, 4, 3)).image.mode == "P"
    assert draw(nn.Conv1d(2, 4, 3)).image.mode == "P"
    assert isinstance(draw(net()).image, Image.Image)


@pytest.mark.parametrize(
    ("model", "layers", "words"),
    [
        (nn.Linear(2, 2), None, "the model has no convolution"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(2, 2)), "re:^1$", "no convolution among the chosen layers; .* 0"),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "conv", "no layer 'conv'"),
    ],
)
def test_models_without_a_chosen_convolution_are_refused(model: nn.Module, layers: str | None, words: str) -> None:
    with pytest.raises(LayerError, match=words):
        draw(model, layers)


def test_filters_beyond_the_last_are_listed_as_left_out() -> None:
    assert draw(nn.Sequential(nn.Conv2d(3, 4, 3)), channels="2-9").left_out == ("filters 2-9 of 0: they do not exist",)
