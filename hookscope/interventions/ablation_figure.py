"""The figure of an ablation: a bar for each channel, and the maps of the channels that matter over the photograph."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from hookscope.drawing import (
    LIGHT,
    PALE,
    SMALL,
    Colour,
    Heat,
    Mark,
    Origin,
    Panel,
    RowPlot,
    add_panel,
    draw_heat,
    draw_rows,
    fitting,
    inches,
    plain_settings,
    row_plot,
    seen_part,
    short_label,
    write_at,
)
from hookscope.errors import UsageError
from hookscope.findings import counted
from hookscope.images import InputImage
from hookscope.interventions.ablation import Ablation, ChannelWorth
from hookscope.models import LoadedModel

# in inches
_BARS = 3.2
_CELL, _ACROSS, _UNDER = 1.7, 1.85, 0.34
_COLUMNS, _PIXELS = 4, 320  # maps in a row; width of a map in pixels
_LONGEST_LABEL, _LONGEST_CAPTION, _MOST_BARS = 40, 26, 100
_TWO_COLOURS = "RdBu_r"
_WINS = "then best: "


def draw_ablation(
    ablation: Ablation,
    photograph: Image.Image | InputImage | None = None,
    net: LoadedModel | nn.Module | None = None,
    *,
    top: int = 20,
    cmap: str | None = None,
) -> Figure:
    """Draw the score that each channel is worth as bars, and beside them the kept maps over the photograph.

    At most ``top`` channels are drawn, the one that is worth most first; 100 is the most. Where another class wins
    without the channel, its name stands beside the bar. Each map has a scale of its own, from a transparent 0, or
    about it if one of the maps has negative values. Without a photograph there are bars alone.
    """
    if top < 1:
        raise UsageError(f"{top} bars", do="give a number from 1")
    shown = ablation.channels[: min(top, _MOST_BARS)]
    prediction = ablation.prediction
    name = f"{prediction.label} ({prediction.index})" if prediction.label else f"class {prediction.index}"
    title = f"Score of {name} that is lost when a channel is set to 0"
    plot = _ablation_plot(ablation, shown, Origin.of(net, photograph))
    pictures = [] if photograph is None else _pictures(shown, photograph, net, cmap)
    cell = max((_CELL * image.height / image.width for image, _ in pictures), default=0.0)
    width, height = min(_COLUMNS, len(pictures)) * _ACROSS, -(-len(pictures) // _COLUMNS) * (cell + _UNDER)
    figure = draw_rows(plot, title, beside=(width, height))
    page_width, page_height = figure.get_size_inches()
    head = (1 - figure.axes[0].get_position().y1) * page_height
    for at, (image, words) in enumerate(pictures):
        row, column = divmod(at, _COLUMNS)
        _draw_picture(figure, page_width - width + column * _ACROSS, head + row * (cell + _UNDER), cell, image, words)
    return figure


@plain_settings()
def _draw_picture(figure: Figure, x: float, y: float, high: float, image: Image.Image, words: Sequence[str]) -> None:
    axes = add_panel(figure, x, y, _CELL, high)
    axes.imshow(np.asarray(image))
    axes.set_axis_off()
    for line, text in enumerate(words):
        write_at(figure, x, y + high + 0.08 + 0.13 * line, fitting(text, _CELL, SMALL), fontsize=SMALL)


def _pictures(
    shown: Sequence[ChannelWorth],
    photograph: Image.Image | InputImage,
    net: LoadedModel | nn.Module | None,
    cmap: str | None,
) -> list[tuple[Image.Image, tuple[str, str]]]:
    """The photograph and the kept maps of ``shown`` with their words, in two colours if one has values below 0."""
    picture, box = seen_part(photograph, net)
    kept = [(_label(channel, _LONGEST_CAPTION), channel.values) for channel in shown]
    maps = [(label, np.nan_to_num(values, posinf=0, neginf=0)) for label, values in kept if values is not None]
    signed = any(bool(values.min() < 0) for _, values in maps)
    cmap, ground = cmap or (_TWO_COLOURS if signed else "inferno"), LIGHT if signed else PALE
    ends = (" (blue)", " (red)") if cmap == _TWO_COLOURS else ("", "")
    name = os.path.basename(photograph.name) if isinstance(photograph, InputImage) else "photograph"
    cells = [(draw_heat(picture, None, _PIXELS, cmap), (name, ""))]
    for label, values in maps:
        top = float(np.abs(values).max())
        scale = f"{-top:.3g}{ends[0]} to {top:.3g}{ends[1]}" if signed else f"0 to {top:.3g}"
        image = draw_heat(picture, Heat(values, box, top, None, signed), _PIXELS, cmap, ground)
        cells.append((image, (label, scale)))
    return cells


def _label(channel: ChannelWorth, most: int = _LONGEST_LABEL) -> str:
    return short_label(f"{channel.call.key} {channel.channel}", most)


def _ablation_plot(ablation: Ablation, shown: Sequence[ChannelWorth], origin: Origin) -> RowPlot:
    notes = {id(channel): _note(ablation, channel) for channel in shown}

    def worth(negative: bool) -> Callable[[ChannelWorth], float | None]:
        return lambda channel: channel.score_drop if (channel.score_drop < 0) == negative else None

    def note(other_wins: bool) -> Callable[[ChannelWorth], str | None]:
        return lambda channel: notes[id(channel)] if (_WINS in notes[id(channel)]) == other_wins else None

    bars = [Mark("bar", worth(False), Colour.BLUE, size=0.7), Mark("bar", worth(True), Colour.ORANGE, size=0.7)]
    words = [Mark("text", note(False), Colour.INK), Mark("text", note(True), Colour.ALARM)]
    width = max(inches(note, SMALL) for note in notes.values()) + 0.15
    prediction, count = ablation.prediction, counted(len(ablation.channels), "channel")
    score = f"score with all channels {prediction.score:.4g}, probability {100 * prediction.probability:.3g} %"
    lines = [
        (", ".join(filter(None, [origin.model, *origin.words])), Colour.FAINT),
        (origin.alarm, Colour.ALARM),
        (f"{score}; {len(shown)} of {count}, those worth most first", Colour.INK),
    ]
    panels = [Panel("score lost", _BARS, bars), Panel("", width, words)]
    return row_plot(shown, panels, list(map(_label, shown)), lines=[line for line in lines if line[0]])


def _note(ablation: Ablation, channel: ChannelWorth) -> str:
    """What stands beside the bar of a channel."""
    if math.isnan(channel.score_drop):
        return "NaN"
    words = f"{channel.score_drop:.3g}"
    if channel.top_after != ablation.prediction.index and channel.score_after < channel.score:
        words += f"   {_WINS}{channel.top_label or f'class {channel.top_after}'}"
    return words
