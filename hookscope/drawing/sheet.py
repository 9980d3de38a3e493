"""The sheet of a call: a header, the photograph, the channel grids or bars, and the provenance."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from hookscope.drawing.files import (
    LEAST_WIDTH,
    MARGIN,
    SheetPage,
    beside,
    colour_bar,
    finite_or_none,
    page_facts,
    placed,
    with_provenance,
)
from hookscope.drawing.grid import (
    MOST_PIXELS,
    Frames,
    Grid,
    Overlay,
    Shares,
    draw_bars,
    draw_grids,
    field_words,
    middle_box,
    photograph_cells,
    strongest,
    to_image,
)
from hookscope.drawing.scale import ALPHA, RangeScale, Scale
from hookscope.drawing.text import Pixels
from hookscope.drawing.tiles import ActivationSummary, ChannelChoice, SheetPart, reduce_output
from hookscope.errors import NoMapError, UsageError, check_whole, kind_of, spelled
from hookscope.hooks import Call, InputSize, Shape, module_of, tensors_in
from hookscope.images import AnyImage, InputImage, as_picture
from hookscope.models import LoadedModel, is_random, package_versions, short_name

_HEAD = 15
_BESIDE = 14

_CHANNELS_FIRST = nn.Conv2d(1, 1, 1, device="meta")  # says where the channels of a tensor are whose layer is not given
ALL_CHANNELS = "all: ‹channels='all'|--channels all›"
"""How to get all channels, where a sheet has some."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a picture comes from; ``second`` is the name and SHA-256 of the other image of optical flow."""

    model: str
    weights: str
    image: str
    sha256: str
    preprocess: str
    second: tuple[str, str] | None = None

    @classmethod
    def of(cls, net: LoadedModel | nn.Module | None, *pictures: InputImage | Image.Image | None) -> Origin:
        """The origin of a page on one picture, or on the two of optical flow; what is not known is empty."""
        named = [(picture.name, picture.sha256) for picture in pictures if isinstance(picture, InputImage)]
        first, *others = named or [("", "")]
        if isinstance(net, LoadedModel):
            about = short_name(net.name), net.weights, net.preprocess.describe()
        else:
            about = "" if net is None else type(module_of(net)).__name__, "", ""
        return cls(*about[:2], *first, about[2], others[0] if others else None)

    def facts(self) -> dict[str, Any]:
        """The first entries of every provenance: versions, model, weights, image and preprocessing."""
        second = self.second and {"image": os.path.basename(self.second[0]), "sha256": self.second[1]}
        return {
            **package_versions(),
            "model": self.model,
            "weights": self.weights,
            "image": os.path.basename(self.image),
            "sha256": self.sha256,
            "preprocess": self.preprocess,
            **({"second": second} if second else {}),
        }

    @property
    def images(self) -> str:
        """The names of the images without their folders."""
        return " and ".join(os.path.basename(name) or name for name in (self.image, *(self.second or ())[:1]))

    @property
    def is_random(self) -> bool:
        """Whether the weights are random."""
        return is_random(self.weights)

    @property
    def alarm(self) -> str:
        """A line in red for random weights, empty for others."""
        return f"weights: {self.weights}, the network is not trained" if self.is_random else ""

    @property
    def words(self) -> list[str]:
        """Weights that are not random, image and preprocessing, as far as they are known."""
        weights = "" if self.is_random or not self.weights else f"weights: {self.weights}"
        preprocess = f"preprocessing: {self.preprocess.removeprefix('preprocess ')}" if self.preprocess else ""
        return [word for word in (weights, self.images, preprocess) if word]


@dataclass(frozen=True, slots=True)
class Style:
    """Layout of a sheet: maps in a row, smallest side of a map in pixels, colour map, grid without text.

    With ``alpha`` each map lies over the photograph, and the strongest value has this opacity.
    """

    columns: int | None = None
    cell: int | None = None
    cmap: str = "viridis"
    plain: bool = False
    alpha: float | None = None


@dataclass(frozen=True)
class Sheet:
    """An image, which carries its provenance; ``left_out`` channels exceeded the limit on pixels."""

    image: Image.Image
    provenance: dict[str, Any]
    left_out: int


@dataclass(frozen=True)
class _Block:
    """The picture of a part: a grid of maps or bars, the photograph left of it, and the x of the maps or bars."""

    part: SheetPart
    pixels: Pixels
    grid: Grid | None
    left: int = 0

    @property
    def side(self) -> int:
        """The longest side of a map; 0 for bars."""
        return max(self.grid.layout.frame_width, self.grid.layout.map_height) if self.grid else 0


def draw_sheet(
    activation: Any,
    image: AnyImage | None = None,
    net: LoadedModel | nn.Module | None = None,
    *,
    title: str = "",
    channels: str | Sequence[int] | None = None,
    columns: int | None = None,
    cell: int | None = None,
    cmap: str | None = None,
    scale: str | tuple[float, float] = "channel",
    names: Sequence[str] | None = None,
    layer: nn.Module | None = None,
    plain: bool = False,
    alpha: float | None = None,
) -> Image.Image:
    """Draw the feature maps of an activation as a palette image, as ``visualize`` does.

    Each map is magnified by nearest neighbour and has its channel number. NaN is magenta, +Inf red, -Inf light blue. If
    each channel has its own scale, constant maps are grey, and their value is written above them. Single values are
    drawn as bars. `read_sheet` gives the values of a PNG file that its ``save`` wrote.

    Args:
        activation: Feature maps ``(C, H, W)``, one map ``(H, W)``, any output of a layer that `capture` keeps, such as
            ``(N, C, H, W)`` or, with ``layer``, tokens ``(N, L, C)``; or single values ``(C,)`` or ``(1, C)``. Frames
            and slices ``(N, C, D, H, W)`` stand side by side.
        image: The first cell of the sheet: with a `LoadedModel` as its preprocessing shows it, else as it is.
        net: What the header says of model, weights and preprocessing.
        title: A bold first line.
        channels: ``all``, ``0-63,100``, ``top:16`` or numbers; None for all, of more than 64 the 64 with the largest
            mean absolute value. Of single values the 24 largest.
        columns: Maps in a row; None for a grid with full rows.
        cell: Smallest side of a map in pixels; the magnification is a whole number.
        cmap: A colour map of matplotlib; None for the default of the scale.
        scale: ``channel``, ``layer``, ``symmetric``, ``percentile:LO,HI``, ``LO:HI`` or ``(low, high)``.
        names: Names of all channels, such as classes; None for none.
        layer: The module that returned ``activation``; says on which axis the channels are.
        plain: Maps only, without text, bars and image.
        alpha: Opacity, 0 to 1, of the largest absolute value of maps that lie over the image, see `draw_overlay`.

    Raises:
        NoMapError: for another shape.
        UsageError: for a scale, colour map or channels that cannot be parsed, or a wrong number of names.
        LayerError: the activation has none of the channels.

    Example:
        >>> import torch
        >>> draw_sheet(torch.rand(16, 7, 7), title="conv1", columns=4).mode
        'P'
    """
    if alpha is not None and not (isinstance(alpha, float | int) and 0 <= alpha <= 1):
        raise UsageError(f"alpha must be from 0 to 1, not {alpha}")
    check_whole("columns", columns, optional=True)
    is_range = isinstance(scale, tuple | list) and len(scale) == 2
    names, parsed = names or (), RangeScale(*scale) if is_range else Scale.parse(str(scale))
    choice = ChannelChoice(usual=True) if channels is None else ChannelChoice.parse(channels)
    if image is not None:
        picture = as_picture(image).image
        image = net.preprocess.denormalise(net.preprocess(picture)) if isinstance(net, LoadedModel) else picture
    size = InputSize(image.height, image.width) if image else None
    if not tensors_in(activation) and not isinstance(activation, np.ndarray):
        do = "give an activation: activations['conv1'] of a capture"
        raise NoMapError(f"expected a tensor, got {kind_of(activation)}", do=do)
    if isinstance(activation, (torch.Tensor, np.ndarray)):
        activation = torch.as_tensor(activation)
        if activation.dim() == 0 or not activation.numel():
            raise NoMapError(f"an activation of {tuple(activation.shape)} has no maps")
        if layer is None:  # one map (H, W), or maps (C, H, W), or values (C,) of one image
            single = activation.dim() in (1, 3) or (activation.dim() == 2 and len(activation) > 1 and not names)
            activation, layer = activation[None] if single else activation, _CHANNELS_FIRST
            activation = activation[None] if single and activation.dim() == 3 else activation
    summary = reduce_output(activation, layer, size, choice, parsed, names)
    if names and not any(part.names for part in summary.parts):
        raise UsageError(f"there are {len(names)} names for {summary.parts[0].tiles.total} channels")
    style = Style(columns, cell, cmap or parsed.cmap, plain, alpha)
    origin = Origin.of(net)
    drawn, facts, _ = _composed(summary, title, origin, style, [[image]] if image else None)
    return with_provenance(drawn, {**origin.facts(), "title": title, **facts})


def draw_overlay(
    activation: Any,
    image: AnyImage,
    net: LoadedModel | nn.Module | None = None,
    *,
    alpha: float = ALPHA,
    scale: str | tuple[float, float] = "symmetric",
    **options: Any,
) -> Image.Image:
    """Draw feature maps over the greyed image: the larger the absolute value, the more opaque the colour.

    Args:
        activation: As for `draw_sheet`.
        image: The image under the maps, as for `draw_sheet`.
        net: As for `draw_sheet`.
        alpha: Opacity of the largest absolute value, 0 to 1.
        scale: By default all maps have one scale, which is symmetric about 0.
        **options: ``title``, ``channels``, ``columns``, ``cell``, ``cmap``, ``names`` and ``layer`` of `draw_sheet`.

    Raises:
        NoMapError: for another shape.
        UsageError: for an opacity outside 0 to 1, or as `draw_sheet`.
        LayerError: the activation has none of the channels.

    Example:
        >>> import torch
        >>> from PIL import Image
        >>> draw_overlay(torch.rand(4, 7, 7), Image.new("RGB", (224, 224)), columns=2).mode
        'RGB'
    """
    return draw_sheet(activation, image, net, alpha=alpha, scale=scale, **options)


def draw_call(
    summary: ActivationSummary, call: Call, origin: Origin, style: Style | None = None, frames: Frames | None = None
) -> Sheet:
    """Draw the sheet of one call of a model; ``frames`` are what the network saw of each item of the batch.

    Maps of other items (a head's proposals) and of a single position are not laid over the photograph.
    """
    style = style or Style()
    index = "" if call.index is None else f"   index {call.index}"
    title = f"{call.key or call.type}   {call.type}{index}"
    image, facts, left_out = _composed(summary, title, origin, style, frames)
    provenance = {
        **origin.facts(),
        "layer": call.name,
        **{name: getattr(call, name) for name in ("call", "index", "order", "type")},
        **facts,
    }
    return Sheet(with_provenance(image, provenance), provenance, left_out)


def _composed(
    summary: ActivationSummary, title: str, origin: Origin, style: Style, frames: Frames | None
) -> tuple[Image.Image, dict[str, Any], int]:
    """The image, what `read_sheet` asks of it, and how many channels were left out."""
    margin = 0 if style.plain else MARGIN
    most = MOST_PIXELS // len(summary.parts)
    blocks = [_block(part, style, most) for part in summary.parts]
    photographs: Pixels | None = None
    if frames is not None and not style.plain:
        photographs = _add_photographs(blocks, frames, middle_box(summary))
    page = SheetPage(max([LEAST_WIDTH, *(block.pixels.shape[1] for block in blocks)]))
    if not style.plain:
        _add_header(page, summary, title, origin, field_words(summary, photographs is not None))
    tops, bars = [], []
    for block in blocks:
        bars.append(None if style.plain else _add_part_header(page, block, len(blocks) > 1))
        tops.append(page.add(block.pixels, 8 if page.height else 0))
    image = to_image(page.pixels(margin), style.cmap, photographs)
    places = [_placed(block, margin + block.left, margin + top) for block, top in zip(blocks, tops, strict=True)]
    if style.alpha is not None and frames is not None:
        overlay = Overlay(image, image.convert("RGB"), style.cmap, style.alpha)
        for block, top, bar in zip(blocks, tops, bars, strict=True):
            part = block.part
            if block.grid is None or part.items > len(frames):
                continue
            overlay.add_maps(block.grid, (margin + block.left, margin + top), frames[part.item])
            if bar is not None and part.tiles.shared:
                overlay.add_bar(part.tiles, margin + bar, colour_bar("", "", "").shape[0])
        image = overlay.whole
    facts = page_facts(image, summary.parts[0].tiles.scale, style.cmap, style.alpha is not None)
    left_out = sum(block.grid.left_out for block in blocks if block.grid)
    return image, {"shape": summary.shape, **facts, "parts": places}, left_out


def _block(part: SheetPart, style: Style, most: int) -> _Block:
    if part.tiles.values:
        return _Block(part, draw_bars(part.tiles, part.names), None)
    [grid] = draw_grids([part.tiles], style.columns, style.cell, style.plain, part.frames, most, part.names)
    return _Block(part, grid.pixels, grid)


def _add_photographs(blocks: list[_Block], frames: Frames, box: Shares | None) -> Pixels:
    """Put what the network saw left of the first maps of each item; the colours of the photographs."""
    items = [block.part.item for block in blocks]
    first = {at: item for at, item in enumerate(items) if item not in items[:at] and item < len(frames)}
    cells, table = photograph_cells({at: (item, blocks[at].side) for at, item in first.items()}, frames, box)
    for at, cell in cells.items():
        pixels = beside([cell, blocks[at].pixels], _BESIDE)
        blocks[at] = replace(blocks[at], pixels=pixels, left=cell.shape[1] + _BESIDE)
    return table


def _add_header(page: SheetPage, summary: ActivationSummary, title: str, origin: Origin, field: str) -> None:
    page.add_text(title, size=_HEAD, bold=True)
    weights = "" if origin.is_random or not origin.weights else f"weights: {origin.weights}"
    page.add_text("   ".join(filter(None, [origin.model, origin.images, origin.preprocess, weights])), 2)
    page.add_text(origin.alarm, 2, alarm=True)
    if summary.low is None or summary.mean is None or summary.high is None:
        words = "no finite value"
    else:
        words = f"values {summary.low:.4g} to {summary.high:.4g}, mean {summary.mean:.4g}"
    words += f"   constant channels: {summary.dead}" if summary.dead else ""
    words += f"   NaN or Inf: {summary.nonfinite:,} values" if summary.nonfinite else ""
    page.add_text("   ".join(filter(None, (f"output {shape_text(summary.shape)}", words, field))), 2)


def _add_part_header(page: SheetPage, block: _Block, several: bool) -> int | None:
    """Add what the part shows and its scale; returns the y of the colour bar, None for bars of values."""
    part, tiles = block.part, block.part.tiles
    words = _channel_words(block)
    words += spelled(f"   {ALL_CHANNELS}") if len(tiles.channels) < tiles.total else ""
    if several:
        page.add_text(f"{part.name or 'maps'}   {words}", 10, bold=True)
    else:
        page.add_text(words, 2)
    bar = None
    if block.grid is not None:
        caption = f"{Scale.parse(tiles.scale).caption}:"
        ends: tuple[Any, Any] = (tiles.low[0], tiles.high[0]) if tiles.shared else ("its lowest", "its highest value")
        after = "orange bar: range of a map, relative to the widest"
        after += " (bold)" if strongest(tiles) else ""
        pixels = colour_bar(caption, *ends, after)
        if pixels.shape[1] <= page.text_width:
            bar = page.add(pixels, 6)
        else:
            bar = page.add(colour_bar(caption, *ends), 6)
            page.add_text(after, 2)
    page.add_text("   ".join(_notes(block)), 2)
    return bar


def _channel_words(block: _Block) -> str:
    """``64 of 512 channels, 7×7, by mean |value|``."""
    part, tiles, count = block.part, block.part.tiles, len(block.part.tiles.channels)
    kind = "classes" if part.names else "channel" if tiles.total == 1 else "channels"
    words = [f"{count:,} of {tiles.total:,} {kind}" if count < tiles.total else f"{count:,} {kind}"]
    if block.grid is not None:
        _, height, width = tiles.levels.shape
        words.append(f"{width // part.frames}×{height}" + (" tokens" if part.axes == "N L C" else ""))
    if part.frames > 1:
        words.append(f"{part.frames} frames from left to right")
    return ", ".join([*words, *([f"by {tiles.order}"] if tiles.order else [])])


def _notes(block: _Block) -> list[str]:
    """What the colours of NaN, Inf and constant maps mean, and what was left out."""
    tiles, notes = block.part.tiles, []

    def first_of(marked: Any) -> str:
        channels = [str(tiles.channels[at]) for at in marked.nonzero()[0]]
        return ", ".join(channels if len(channels) <= 8 else [*channels[:8], "..."])

    if bool(tiles.nonfinite.any()):
        colour = "NaN magenta, +Inf red, -Inf light blue (!): " if block.grid else "NaN or Inf: "
        notes.append(colour + first_of(tiles.nonfinite))
    if bool(tiles.constant.any()):
        notes.append(f"constant: {first_of(tiles.constant)}")
    if block.grid is not None and block.grid.left_out:
        words = "channels left out: too many pixels, choose with ‹channels=|--channels›"
        notes.append(spelled(f"{block.grid.left_out} {words}"))
    return notes


def _placed(block: _Block, x: int, y: int) -> dict[str, Any]:
    """What a part shows, and where, for `read_sheet`."""
    part, tiles = block.part, block.part.tiles
    if block.grid is not None:
        return placed(part.name, part.axes, block.grid, x, y)
    about = {"part": part.name, "axes": part.axes, "scale": tiles.scale, "channels": tiles.channels}
    values = [value if math.isfinite(value) else str(value) for value in tiles.values]
    return {**about, "low": finite_or_none(tiles.low), "high": finite_or_none(tiles.high), "values": values}


def shape_text(shape: Shape) -> str:
    """``1x64x112x112``, or the shape of each part with its name."""
    if isinstance(shape, dict):
        return "  ".join(f"{part}: {shape_text(part_shape)}" for part, part_shape in shape.items())
    return "x".join(map(str, shape)) if shape else "-"
