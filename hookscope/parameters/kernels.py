"""A picture of the filters of convolutions: in colour, as maps, or as a matrix of output and input channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from hookscope.drawing import (
    ALL_CHANNELS,
    LEAST_WIDTH,
    MARGIN,
    MOST_PIXELS,
    ChannelChoice,
    Grid,
    Pixels,
    SheetPage,
    Style,
    SymmetricScale,
    Tiles,
    colour_bar,
    colours,
    draw_grids,
    placed,
    reduce_maps,
    stamp,
    text_pixels,
    to_image,
    with_provenance,
)
from hookscope.errors import LayerError, spelled
from hookscope.hooks import Layers, check_values, module_of, one_thread
from hookscope.models import LoadedModel, is_random, package_versions
from hookscope.parameters.statistics import filter_norms, filters_of, is_convolution, layer_tensor, layers_named

_MOST_LAYERS = 24  # with all convolutions
_ROWS, _COLUMNS = 16, 32  # of a matrix of kernels: more are too small to look at
_CELL, _CELL_OF_ONE = 24, 16  # side of a kernel in a matrix, and of a kernel of one position
_GREY = 127.5
_MEASURE = "mean |weight|"
_BAR = "orange bar: norm of a filter, relative to the largest"


@dataclass(frozen=True)
class KernelSheet:
    """A sheet, which carries its provenance; ``left_out`` describes in words what was not drawn."""

    image: Image.Image
    provenance: dict[str, Any]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _KernelSection:
    """The filters of one convolution: text, grid, facts of the provenance, and colours if they are drawn in colour.

    ``pixels`` are the grid with ``left`` and ``down`` pixels of labels beside and above it.
    """

    title: str
    words: str
    grid: Grid
    about: dict[str, Any]
    pixels: Pixels
    left: int = 0
    down: int = 0
    rgb: NDArray[np.uint8] | None = None


def draw_kernels(
    model: LoadedModel | nn.Module,
    layers: Layers | None = None,
    *,
    channels: str | Sequence[int] | None = None,
    columns: int | None = None,
    cell: int | None = None,
    cmap: str = "RdBu_r",
) -> Image.Image:
    """Draw the filters of convolutions, as ``weights`` does.

    Filters of three inputs of the first convolution are drawn in colour, and filters of one input as maps with their
    numbers. Other kernels form a matrix: a row is an output channel, a column is an input channel.

    The image holds the facts of its kernels as JSON in ``image.info["hookscope"]``.

    Args:
        model: Any module, or a model of `load_model`.
        layers: Names of convolutions, such as ``"features.3.*"``; ``"all"`` for all; None for the first.
        channels: Output channels: ``all``, ``0-63,100``, ``top:16`` (by mean |weight|) or numbers; None for the 64
            strongest, 32 in a matrix.
        columns: Filters in a row, or input channels in a matrix; None for up to 32 input channels.
        cell: Smallest side of a kernel in pixels.
        cmap: A colour map of matplotlib, for kernels that are not in colour.

    Raises:
        LayerError: no chosen layer is a convolution, or none has a chosen filter.
        UsageError: for a colour map or channels that cannot be parsed.

    Example:
        >>> import torch
        >>> draw_kernels(torch.nn.Conv2d(3, 16, 7)).mode
        'RGB'
    """
    choice = None if channels is None else ChannelChoice.parse(channels)
    style = Style(columns, cell, cmap)
    about = (model.name, model.weights) if isinstance(model, LoadedModel) else ()
    return kernel_sheet(module_of(model), layers, choice, style, *about).image


def kernel_sheet(
    model: nn.Module,
    layers: Layers | None = None,
    channels: ChannelChoice | None = None,
    style: Style | None = None,
    name: str = "",
    weights: str = "",
) -> KernelSheet:
    """Draw the filters of a model's convolutions: of the first, or of ``layers``; errors are as in `draw_kernels`."""
    style = style or Style(cmap="RdBu_r")
    filters_of = ((name, module, _filters(module)) for name, module in model.named_modules())
    convolutions = [(layer, module, filters) for layer, module, filters in filters_of if filters is not None]
    selected = layers_named(model, layers)
    chosen = [
        (number, *pair)
        for number, pair in enumerate(convolutions)
        if (pair[0] in selected if selected is not None else layers is not None or number == 0)
    ]
    if not chosen:
        what = "no convolution among the chosen layers" if convolutions else "the model has no convolution"
        raise LayerError(what, f"there are {', '.join(name for name, *_ in convolutions[:4])}" if convolutions else "")
    left_out = []
    if selected is None and len(chosen) > _MOST_LAYERS:
        left_out.append(spelled(f"{len(chosen) - _MOST_LAYERS} further convolutions: choose with ‹layers|--layer›"))
        chosen = chosen[:_MOST_LAYERS]
    sections = []
    for number, layer, module, filters in chosen:
        check_values(filters)
        with one_thread():
            section = _section(layer, module, filters, channels, style, first=number == 0)
        sections.append(section)
        if section.grid.left_out:
            left_out.append(spelled(f"{section.grid.left_out} kernels of {layer}: choose with ‹channels|--channels›"))
        if channels and (beyond := channels.beyond(section.about.get("filters", section.grid.tiles.channels))):
            left_out.append(f"filters {beyond} of {layer}: they do not exist")
    heading = f"{name or type(model).__name__}   filters of convolutions"
    image, kernels = _draw_page(heading, weights, sections, left_out, style)
    provenance: dict[str, Any] = {**package_versions(), "model": name, "weights": weights, "cmap": style.cmap}
    provenance |= {"levels": colours.LEVELS, "size": list(image.size), "kernels": kernels}
    return KernelSheet(with_provenance(image, provenance), provenance, tuple(left_out))


def _filters(module: nn.Module) -> Tensor | None:
    weight = layer_tensor(module) if is_convolution(module) else None
    return None if weight is None else filters_of(module, weight)


def drawable_filters(module: nn.Module, first: bool) -> NDArray[np.float32] | None:
    """The filters of a convolution that are pictures: ``(C, h, w)`` of one input, ``(C, h, w, 3)`` of three colours.

    Only the ``first`` convolution takes colours. The moments of a filter of clips are side by side.
    """
    if (filters := _filters(module)) is None:
        return None
    maps, _ = _laid_flat(filters.flatten(0, 1))
    if first and maps.shape[1] == 3 and filters.shape[0] == 1:
        maps = maps.permute(0, 2, 3, 1)
    elif maps.shape[1] == 1 and maps.shape[2] * maps.shape[3] > 1:
        maps = maps[:, 0]
    else:
        return None
    drawable: NDArray[np.float32] = maps.float().cpu().numpy()
    return drawable


def _section(
    layer: str, module: nn.Module, filters: Tensor, choice: ChannelChoice | None, style: Style, first: bool
) -> _KernelSection:
    flat = filters.flatten(0, 1)  # (filters, inputs, *kernel)
    count, inputs = flat.shape[:2]
    in_colour = first and inputs == 3 and filters.shape[0] == 1
    is_matrix = inputs > 1 and not in_colour
    if choice is None:
        choice = ChannelChoice(top=_ROWS) if is_matrix and count > _ROWS else ChannelChoice(usual=not is_matrix)
    choice = choice.for_shape(count, single=False)
    numbers = choice.of(flat.flatten(1)[:, None])
    size = "×".join(map(str, flat.shape[2:]))
    title = f"{layer or type(module).__name__}   {type(module).__name__}   kernels of {size}"
    words = _count_words(len(numbers), count, "output channels (rows)" if is_matrix else "filters")
    words += f", by {_MEASURE}" if choice.top else ""
    hint = spelled(f"   {ALL_CHANNELS}") if len(numbers) < count else ""
    if is_matrix:
        return _matrix(layer, title, words, hint, flat, numbers, style, grouped=filters.shape[0] > 1)
    maps, moments = _laid_flat(flat[numbers])
    if in_colour:
        tiles, rgb = _in_colour(maps, style)
        words += "; the three input channels are red, green and blue"
        words += f", {moments} moments of a filter from left to right" if moments > 1 else ""
    else:
        tiles, rgb = reduce_maps(maps[:, 0], None, _symmetric(flat)), None
        words += "; each sees one input channel" + (f", {moments} moments from left to right" if moments > 1 else "")
    words += f"{hint}   {_BAR}" + "   NaN or Inf magenta (!)" * (in_colour and bool(tiles.nonfinite.any()))
    norms = filter_norms(filters)[0][numbers].cpu().numpy()
    tiles = replace(tiles, channels=numbers, strength=norms, order=_MEASURE if choice.top else "")
    [grid] = draw_grids([tiles], style.columns, style.cell, style.plain, moments, MOST_PIXELS // _MOST_LAYERS)
    about = {"layer": layer, "drawn": "rgb" if in_colour else "maps", "moments": moments}
    return _KernelSection(title, words, grid, about, grid.pixels, rgb=rgb)


def _count_words(count: int, total: int, what: str) -> str:
    return f"{count:,} of {total:,} {what}" if count < total else f"{count:,} {what}"


def _laid_flat(kernels: Tensor) -> tuple[Tensor, int]:
    """Kernels ``(filters, inputs, [[T,] H,] W)`` as ``(filters, inputs, H, T * W)``, moments side by side; and T."""
    if kernels.dim() == 3:
        return kernels[:, :, None], 1
    if kernels.dim() == 4:
        return kernels, 1
    moments = kernels.shape[2]
    return kernels.transpose(2, 3).flatten(3), moments


def _in_colour(maps: Tensor, style: Style) -> tuple[Tiles, NDArray[np.uint8]]:
    """Three inputs as red, green and blue: 0 is grey, and the largest |weight| of each filter ends its scale."""
    values = maps.double().cpu().numpy().transpose(0, 2, 3, 1)  # (filters, H, T * W, 3)
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    ends = np.abs(known).max(axis=(1, 2, 3))
    unit = np.where(ends > 0, ends, 1.0)[:, None, None, None]
    rgb = np.rint(_GREY + _GREY * (known / unit)).astype(np.uint8)
    rgb[~finite.all(axis=3)] = colours.palette(style.cmap)[colours.NAN]
    tiles = replace(
        reduce_maps(torch.zeros(len(maps), *maps.shape[2:]), None, SymmetricScale(1.0)),
        low=-ends,
        high=ends,
        constant=np.zeros(len(maps), bool),
        nonfinite=(~finite).sum(axis=(1, 2, 3)),
        scale="filter",
    )
    return tiles, rgb


def _matrix(
    layer: str, title: str, words: str, hint: str, flat: Tensor, numbers: list[int], style: Style, grouped: bool
) -> _KernelSection:
    """A row for each filter and a column for each input, of many inputs the strongest of these filters."""
    most, count = ChannelChoice(top=style.columns or _COLUMNS), flat.shape[1]
    inputs = list(range(count))
    if count > most.top:
        inputs = most.of(flat[numbers].transpose(0, 1).flatten(1)[:, None])
    maps, moments = _laid_flat(flat[numbers][:, inputs])
    tiles = reduce_maps(maps.flatten(0, 1), None, _symmetric(flat))
    tiles = replace(tiles, channels=[number * count + at for number in numbers for at in inputs], values=())
    cell = style.cell or (_CELL_OF_ONE if maps[0, 0].numel() == 1 else _CELL)
    [grid] = draw_grids([tiles], len(inputs), cell, True, moments, MOST_PIXELS // _MOST_LAYERS)
    words += f"; {_count_words(len(inputs), count, 'input channels (columns)')}"
    words += f", by {_MEASURE} in these rows" if len(inputs) < count else ""
    words += "; a filter sees the input channels of its group" if grouped else ""
    words += f", {moments} moments from left to right" if moments > 1 else ""
    pixels, left, down = _with_numbers(grid, numbers, inputs)
    about = {"layer": layer, "drawn": "matrix", "moments": moments, "filters": numbers, "inputs": inputs}
    return _KernelSection(title, words + hint, grid, about, pixels, left, down)


def _with_numbers(grid: Grid, rows: Sequence[int], columns: Sequence[int]) -> tuple[Pixels, int, int]:
    """The grid with the number of each row left of it and of each column above it, if there is room; its place."""
    layout = grid.layout
    beside, above = ([text_pixels(str(number)) for number in numbers] for numbers in (rows, columns))
    left, down = max(text.shape[1] for text in beside) + 6, above[0].shape[0]
    high, wide = grid.pixels.shape
    pixels = np.full((down + high, left + wide), colours.BACKGROUND, np.uint8)
    pixels[down:, left:] = np.where(grid.pixels == colours.BACKGROUND, colours.TRACK, grid.pixels)
    every = [-(-(max(text.shape[side] for text in texts) + 2) // step) for side, texts, step in (
        (0, beside, layout.step_y + 3), (1, above, layout.step_x))]  # fmt: skip
    for at in range(0, layout.rows, every[0]):
        y = down + at * layout.step_y + max(0, (layout.map_height - beside[at].shape[0]) // 2)
        stamp(pixels, beside[at], left - 6 - beside[at].shape[1], y)
    for at in range(0, len(above), every[1]):
        stamp(pixels, above[at], left + at * layout.step_x, 0)
    return pixels, left, down


def _symmetric(flat: Tensor) -> SymmetricScale:
    return SymmetricScale(float(torch.where(torch.isfinite(flat), flat, 0.0).abs().max()))


def _draw_page(
    heading: str, weights: str, sections: Sequence[_KernelSection], left_out: Sequence[str], style: Style
) -> tuple[Image.Image, list[dict[str, Any]]]:
    """Draw the sections below each other; returns the image, and where the maps of each section lie."""
    page = SheetPage(max([LEAST_WIDTH, *(section.pixels.shape[1] for section in sections)]))
    places, ramps = [], []
    page.add_text(heading, size=15, bold=True)
    untrained = is_random(weights)
    page.add_text(f"weights: {weights or 'as given'}" + ", the network is not trained" * untrained, alarm=untrained)
    if any("inputs" in section.about for section in sections):
        page.add_text("A row is an output channel, a column is an input channel.")
    if left_out:
        page.add_text(f"left out: {'; '.join(left_out)}")
    for section in sections:
        page.add_text(section.title, 12, 13, bold=True)
        page.add_text(section.words)
        if section.rgb is None:
            tiles = section.grid.tiles
            page.add(colour_bar("one scale for the layer, symmetric about 0:", tiles.low[0], tiles.high[0]), 4)
        else:
            bar = colour_bar("each filter has its own scale:", "- its largest |weight|", "+ its largest |weight|")
            ramps.append((MARGIN + page.add(bar, 4), bar.shape[0]))
        top = page.add(section.pixels, 6)
        places.append(_place(section, MARGIN + section.left, MARGIN + top + section.down))
    pixels = page.pixels(MARGIN)
    image = to_image(pixels, style.cmap)
    if ramps:
        image = image.convert("RGB")
        for top, height in ramps:
            _paint_ramp(image, pixels[top : top + height], top)
        for section, place in zip(sections, places, strict=True):
            _paint(image, section, place)
    return image, places


def _paint_ramp(image: Image.Image, pixels: Pixels, top: int) -> None:
    """Draw the colour bar in ``pixels`` as three: of red, of green and of blue."""
    rows, columns = np.nonzero(pixels < colours.LEVELS)
    colour = np.full((len(rows), 3), round(_GREY), np.uint8)
    height = rows.max() + 1
    values = np.rint(255 * (pixels[rows, columns] / (colours.LEVELS - 1))).astype(np.uint8)
    colour[np.arange(len(rows)), rows * 3 // height] = values
    whole = np.asarray(image.crop((0, top, image.width, top + len(pixels)))).copy()
    whole[rows, columns] = colour
    image.paste(Image.fromarray(whole), (0, top))


def _paint(image: Image.Image, section: _KernelSection, place: dict[str, Any]) -> None:
    if section.rgb is None:
        return
    layout = section.grid.layout
    for at, kernel in enumerate(section.rgb[: len(place["channels"])]):
        row, column = divmod(at, layout.columns)
        x, y = place["x"] + column * layout.step_x, place["y"] + row * layout.step_y
        large = np.repeat(np.repeat(kernel, layout.zoom, axis=0), layout.zoom, axis=1)
        wide = kernel.shape[1] // layout.frames * layout.zoom
        for moment, across in enumerate(layout.frame_places):
            part = np.ascontiguousarray(large[:, moment * wide : (moment + 1) * wide])
            image.paste(Image.fromarray(part), (x + across.start, y))


def _place(section: _KernelSection, x: int, y: int) -> dict[str, Any]:
    place = placed("", "", section.grid, x, y)
    keys = ["x", "y", "columns", "step_x", "step_y", "zoom", "height", "width", "frames"]
    keys += ["scale", "channels", "low", "high"]
    return section.about | {key: place[key] for key in keys}
