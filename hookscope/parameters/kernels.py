"""A picture of the filters of convolutions: those of the first in colour, those of others by their strongest slices."""

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
    FRAME_GAP,
    LEAST_CELL,
    MARGIN,
    MOST_PIXELS,
    ChannelChoice,
    Grid,
    Page,
    Style,
    SymmetricScale,
    Tiles,
    colour_bar,
    colours,
    draw_grid,
    lay_out,
    placed,
    reduce_maps,
    to_image,
)
from hookscope.errors import LayerError
from hookscope.hooks import Layers, one_thread
from hookscope.models import package_versions
from hookscope.parameters.filters import filter_norms, filters_of, is_convolution, layer_tensor
from hookscope.parameters.statistics import layers_named

SLICES = 4  # drawn of a filter with many inputs: those with the largest norms
_MOST_LAYERS, _FIRST_FEW = 24, ChannelChoice(top=16)  # unless layers are chosen
_WIDTH = 1160
_GREY = 127.5


@dataclass(frozen=True)
class KernelSheet:
    """A sheet and its provenance; ``left_out`` describes in words what was not drawn."""

    image: Image.Image
    provenance: dict[str, Any]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Section:
    """The filters of one convolution: text, grid, facts of the provenance, and colours if they are drawn in colour."""

    title: str
    words: str
    grid: Grid
    about: dict[str, Any]
    rgb: NDArray[np.uint8] | None = None


def draw_kernels(
    model: nn.Module,
    layers: Layers | None = None,
    channels: ChannelChoice | None = None,
    style: Style | None = None,
    name: str = "",
    weights: str = "",
) -> KernelSheet:
    """Draw the filters of a model's convolutions, in order of registration.

    If the first convolution has three inputs, its filters are drawn in colour: grey is 0, and each filter has its own
    scale. Filters of other convolutions are drawn as their `SLICES` input slices with the largest norms, on one scale
    for the layer, symmetric about 0. Kernels of one position are drawn as one map, filters × inputs. Without ``layers``
    the first convolution is drawn with all filters, and the next 23 with their 16 strongest filters.

    Raises:
        LayerError: no chosen layer is a convolution, or none has a chosen filter.
    """
    style = style or Style(cmap="RdBu_r")
    convolutions = _convolutions(model)
    selected = layers_named(model, layers)
    chosen = [(number, *each) for number, each in enumerate(convolutions) if selected is None or each[0] in selected]
    if not chosen:
        what = "no convolution among the chosen layers" if convolutions else "the model has no convolution"
        raise LayerError(what, f"there are {', '.join(name for name, *_ in convolutions[:4])}" if convolutions else "")
    left_out = []
    if selected is None and len(chosen) > _MOST_LAYERS:
        left_out.append(f"{len(chosen) - _MOST_LAYERS} further convolutions: choose with --layer")
        chosen = chosen[:_MOST_LAYERS]
    sections = []
    for number, layer, module, filters in chosen:
        choice = channels or (_FIRST_FEW if selected is None and number else ChannelChoice())
        with one_thread():
            section = _section(layer, module, filters, choice, style, first=number == 0)
        sections.append(section)
        if section.grid.left_out:
            left_out.append(f"{section.grid.left_out} filters of {layer}: choose with --channels")
        if beyond := choice.beyond(section.grid.tiles.channels):
            left_out.append(f"filters {beyond} of {layer}: they do not exist")
    heading = f"{name or type(model).__name__}   filters of convolutions   weights: {weights or 'as given'}"
    image, kernels = _draw_page(heading, sections, left_out, style)
    provenance: dict[str, Any] = {**package_versions(), "model": name, "weights": weights, "cmap": style.cmap}
    provenance |= {"levels": colours.LEVELS, "size": list(image.size), "kernels": kernels}
    return KernelSheet(image, provenance, tuple(left_out))


def _convolutions(model: nn.Module) -> list[tuple[str, nn.Module, Tensor]]:
    convolutions = []
    for name, module in model.named_modules():
        weight = layer_tensor(module) if is_convolution(module) else None
        filters = filters_of(module, weight) if weight is not None else None
        if filters is not None:
            convolutions.append((name, module, filters))
    return convolutions


def _section(
    layer: str, module: nn.Module, filters: Tensor, choice: ChannelChoice, style: Style, first: bool
) -> _Section:
    flat = filters.flatten(0, 1)  # (filters, inputs, *kernel)
    count, inputs = flat.shape[:2]
    title = f"{layer or type(module).__name__}   {type(module).__name__}   {count} filters of"
    title += f" {inputs}x{'x'.join(map(str, flat.shape[2:]))}"
    numbers = choice.of(flat.flatten(1)[:, None])
    norms, _ = filter_norms(filters)
    if first and inputs == 3 and filters.shape[0] == 1:
        return _in_colour(layer, title, flat[numbers], numbers, norms[numbers], style)
    if flat[0, 0].numel() == 1 and inputs > 1:
        return _as_matrix(layer, title, flat.flatten(1), numbers, style)
    return _as_slices(layer, title, flat, numbers, norms, style)


def _laid_flat(kernels: Tensor) -> tuple[Tensor, int]:
    """Kernels ``(filters, inputs, [[T,] H,] W)`` as ``(filters, inputs, H, T * W)``, moments side by side; and T."""
    if kernels.dim() == 3:
        return kernels[:, :, None], 1
    if kernels.dim() == 4:
        return kernels, 1
    moments = kernels.shape[2]
    return kernels.transpose(2, 3).flatten(3), moments


def _in_colour(layer: str, title: str, kernels: Tensor, numbers: list[int], norms: Tensor, style: Style) -> _Section:
    """Three inputs as red, green and blue: 0 is grey, and the largest |weight| of each filter ends its scale."""
    maps, moments = _laid_flat(kernels)
    values = maps.double().cpu().numpy().transpose(0, 2, 3, 1)  # (filters, H, T * W, 3)
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    ends = np.abs(known).max(axis=(1, 2, 3))
    unit = np.where(ends > 0, ends, 1.0)[:, None, None, None]
    rgb = np.rint(_GREY + _GREY * (known / unit)).astype(np.uint8)
    nonfinite = ~finite.all(axis=3)
    rgb[nonfinite] = colours.palette(style.cmap)[colours.NAN]
    blank = reduce_maps(torch.zeros(len(numbers), *maps.shape[2:]), None, SymmetricScale(1.0))
    tiles = replace(
        blank,
        channels=numbers,
        low=-ends,
        high=ends,
        strength=norms.cpu().numpy(),
        constant=np.zeros(len(numbers), bool),
        nonfinite=(~finite).sum(axis=(1, 2, 3)),
        scale="filter",
    )
    words = "inputs as red, green, blue; each filter on its own scale: grey is 0, its largest |weight| the brightest or"
    words += " darkest   bar: norm of the filter against the largest (bold)"
    words += f"   {moments} moments of a filter, left to right" if moments > 1 else ""
    words += "   NaN or Inf magenta (!)" if nonfinite.any() else ""
    about = {"layer": layer, "drawn": "rgb", "moments": moments}
    return _Section(title, words, _grid(tiles, style, moments, large=True), about, rgb)


def _as_slices(layer: str, title: str, flat: Tensor, numbers: list[int], norms: Tensor, style: Style) -> _Section:
    """The input slices of each filter with the largest norms, side by side, the largest first."""
    maps, moments = _laid_flat(flat[numbers])
    sizes = torch.where(torch.isfinite(maps), maps, 0.0).flatten(2).norm(dim=2)
    order = sizes.argsort(dim=1, descending=True, stable=True)[:, :SLICES]
    slices = maps[torch.arange(len(maps), device=maps.device)[:, None], order]  # (filters, slices, H, W)
    shown = slices.transpose(1, 2).flatten(2)
    frames = moments * slices.shape[1]
    tiles = reduce_maps(shown, None, _symmetric(flat))
    tiles = replace(tiles, channels=numbers, strength=norms[numbers].cpu().numpy())
    most = f"of {flat.shape[1]} inputs each filter's {slices.shape[1]} with the largest norms, the largest first"
    words = most if flat.shape[1] > SLICES else f"all {flat.shape[1]} inputs, the one with the largest norm first"
    words = "its one input" if flat.shape[1] == 1 else words
    words += f", {moments} moments each" if moments > 1 else ""
    words += "   bar: norm of the whole filter against the largest (bold)"
    about = {"layer": layer, "drawn": "slices", "moments": moments, "inputs": order.tolist()}
    return _Section(title, words, _grid(tiles, style, frames), about)


def _as_matrix(layer: str, title: str, flat: Tensor, numbers: list[int], style: Style) -> _Section:
    """Kernels of one position as one map: a row for each filter, a column for each input."""
    tiles = reduce_maps(flat[numbers][None], None, _symmetric(flat))
    shown = ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")
    rows = f"filters 0 to {len(flat) - 1}" if numbers == list(range(len(flat))) else f"filters {shown}"
    words = f"one map: a row for each filter ({rows}, from the top), a column for each of {flat.shape[1]} inputs"
    zoom = max(1, min(6, _WIDTH // flat.shape[1]))
    cell = style.cell or zoom * min(len(numbers), flat.shape[1])
    grid = draw_grid(tiles, 1, cell, plain=True, most=MOST_PIXELS // _MOST_LAYERS)
    return _Section(title, words, grid, {"layer": layer, "drawn": "matrix", "filters": numbers})


def _symmetric(flat: Tensor) -> SymmetricScale:
    """The scale of all filters of the layer, whichever of them are drawn."""
    return SymmetricScale(float(torch.where(torch.isfinite(flat), flat, 0.0).abs().max()))


def _grid(tiles: Tiles, style: Style, frames: int, large: bool = False) -> Grid:
    """Draw the maps in rows as wide as the page; ``large`` maps by the layout of `draw_grid`."""
    count, height, width = tiles.levels.shape
    cell, columns = style.cell, style.columns
    if not large or frames > 1:
        cell = cell or (LEAST_CELL if frames == 1 else 33)
        columns = columns or max(1, _WIDTH // lay_out(count, height, width, 1, cell, frames=frames).step_x)
    grid = draw_grid(tiles, columns, cell, style.plain, frames, MOST_PIXELS // _MOST_LAYERS)
    _rule(grid)
    return grid


def _rule(grid: Grid) -> None:
    """Draw a line between the slices of a filter, as 0 has nearly the colour of the background."""
    layout = grid.layout
    for at in range(len(grid.tiles.channels) - grid.left_out):
        row, column = divmod(at, layout.columns)
        top, left = row * layout.step_y + layout.label, column * layout.step_x
        for place in layout.frame_places[:-1]:
            gap = slice(left + place.stop, left + place.stop + FRAME_GAP)
            grid.pixels[top : top + layout.map_height, gap] = colours.TEXT_HALF


def _draw_page(
    heading: str, sections: Sequence[_Section], left_out: Sequence[str], style: Style
) -> tuple[Image.Image, list[dict[str, Any]]]:
    """Draw the sections below each other; returns the image, and where the maps of each section lie."""
    width = max([_WIDTH, *(section.grid.layout.width for section in sections)])
    page, places = Page(), []
    page.add_text(heading, width, size=15, bold=True)
    if left_out:
        page.add_text(f"left out: {'; '.join(left_out)}", width)
    for section in sections:
        page.add_text(section.title, width, 12, 13, bold=True)
        page.add_text(section.words, width)
        if section.rgb is None:
            tiles = section.grid.tiles
            page.add(colour_bar("scale: symmetric about 0, one for the layer", tiles.low[0], tiles.high[0]))
        places.append(_place(section, MARGIN, MARGIN + page.add(section.grid.pixels, 6)))
    image = to_image(page.pixels(MARGIN), style.cmap)
    if any(section.rgb is not None for section in sections):
        image = image.convert("RGB")
        for section, place in zip(sections, places, strict=True):
            _paint(image, section, place)
    return image, places


def _paint(image: Image.Image, section: _Section, place: dict[str, Any]) -> None:
    """Draw the colours of each filter in the place of its map."""
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


def _place(section: _Section, x: int, y: int) -> dict[str, Any]:
    """Where the maps lie and which values their colours mean."""
    place = placed("", "", section.grid, x, y)
    keys = ["x", "y", "columns", "step_x", "step_y", "zoom", "height", "width", "frames"]
    keys += ["scale", "channels", "low", "high"]
    return section.about | {key: place[key] for key in keys}
