"""Pictures of interventions: bars of an ablation with maps, and the maps of an effect before and after."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from hookscope.drawing import (
    BOLD,
    LIGHT,
    MOST_PIXELS,
    PALE,
    SMALL,
    Colour,
    DifferencePage,
    DrawnDifference,
    Heat,
    MapDifference,
    Mark,
    Origin,
    Panel,
    RowPlot,
    add_panel,
    compare_maps,
    draw_difference,
    draw_heat,
    draw_rows,
    fitting,
    inches,
    input_frames,
    input_size_of,
    plain_settings,
    row_plot,
    seen_part,
    shape_text,
    short_label,
    write_at,
)
from hookscope.errors import HookscopeError, NoMapError, check_whole, one_of
from hookscope.findings import counted
from hookscope.hooks import InputSize, maps_or_vectors, module_of, shape_of
from hookscope.images import AnyImage, InputImage, as_picture
from hookscope.interventions.ablation import Ablation, ChannelWorth
from hookscope.interventions.effect import Effect, MovedLayer
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
    photograph: AnyImage | None = None,
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
    check_whole("top", top)
    photograph = None if photograph is None else as_picture(photograph)
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
    shown: Sequence[ChannelWorth], photograph: InputImage, net: LoadedModel | nn.Module | None, cmap: str | None
) -> list[tuple[Image.Image, tuple[str, str]]]:
    picture, box = seen_part(photograph, net)
    kept = [(_label(channel, _LONGEST_CAPTION), channel.values) for channel in shown]
    maps = [(label, np.nan_to_num(values, posinf=0, neginf=0)) for label, values in kept if values is not None]
    signed = any(bool(values.min() < 0) for _, values in maps)
    cmap, ground = cmap or (_TWO_COLOURS if signed else "inferno"), LIGHT if signed else PALE
    ends = (" (blue)", " (red)") if cmap == _TWO_COLOURS else ("", "")
    name = os.path.basename(photograph.name) or "photograph"
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
    if math.isnan(channel.score_drop):
        return "NaN"
    words = f"{channel.score_drop:.3g}"
    if channel.top_after != ablation.prediction.index and channel.score_after < channel.score:
        words += f"   {_WINS}{channel.top_label or f'class {channel.top_after}'}"
    return words


NAMES = ("before", "after", "difference")


def moved_maps(
    layer: MovedLayer, module: nn.Module | None = None, shown: InputSize | None = None, most_channels: int = 16
) -> list[MapDifference]:
    """The maps of a kept call before, after and their difference, part by part; vectors are maps of one position."""
    outputs = layer.before, layer.after
    old, new = map(shape_of, outputs)
    if old != new:
        raise NoMapError(f"the shapes differ: {shape_text(old)} before, {shape_text(new)} after")
    pairs = zip(*(maps_or_vectors(output, module, shown) for output in outputs), strict=True)
    return [compare_maps(before, after, NAMES, most_channels) for before, after in pairs]


@dataclass(frozen=True)
class _EffectBand:
    """A call: its parts, or the error that explains why it cannot be drawn."""

    layer: MovedLayer
    parts: Sequence[DrawnDifference]
    why: HookscopeError | None


def draw_effect(
    effect: Effect,
    photograph: AnyImage | None = None,
    net: LoadedModel | nn.Module | None = None,
    *,
    interventions: Sequence[str] = (),
    seed: int | None = None,
    most_channels: int = 16,
    cmap: str = "RdBu_r",
) -> Image.Image:
    """Draw each kept call before and after the interventions, and the difference.

    The channels that moved most come first; channels that did not move are not drawn. The scales are symmetric about 0:
    one for before and after, and one for the difference. `read_sheet` gives the values of a file of such a picture. The
    image holds the facts of its maps as JSON in ``image.info["hookscope"]``.

    Args:
        effect: What `intervention_effect` returns, with the calls that it kept.
        photograph: The photograph that the input was made of.
        net: The model, which says where the channels of its layers are; a `LoadedModel` also names weights and
            preprocessing.
        interventions: What the heading says of them, such as ``layer3 zero:channels=0-31``; by default its ``changes``.
        seed: Seed of the random numbers, for the heading.
        most_channels: Largest number of channels of a call that are drawn.
        cmap: A colour map of matplotlib.

    Raises:
        NoMapError: if no call was kept, or none has a map or a vector that can be compared.
        UsageError: for an unknown colour map, or a page of more than 160 million pixels.

    Example:
        >>> import hookscope, torch
        >>> from hookscope.interventions import Zero
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3))
        >>> changes = {0: Zero(channels=1)}
        >>> effect = hookscope.intervention_effect(net, (torch.ones(1, 3, 8, 8),), changes, keep="all")
        >>> draw_effect(effect, net=net).mode
        'P'
    """
    effect = one_of(Effect, effect, "intervention_effect")
    photograph = None if photograph is None else as_picture(photograph)
    drawable = [layer for layer in effect.layers if layer.before is not None or layer.after is not None]
    modules = {} if net is None else dict(module_of(net).named_modules(remove_duplicate=False))
    origin, shown = Origin.of(net, photograph), None
    if photograph is not None and isinstance(net, LoadedModel):
        shown = input_size_of(net.prepare(photograph))
    most = MOST_PIXELS // max(1, len(drawable))
    bands = []
    for layer in drawable:
        try:
            parts = moved_maps(layer, modules.get(layer.call.name), shown, most_channels)
        except NoMapError as error:
            bands.append(_EffectBand(layer, (), error))
        else:
            bands.append(_EffectBand(layer, [draw_difference(maps, most // len(parts)) for maps in parts], None))
    if effect.layers and not drawable:
        do = "intervention_effect keeps the activations of keep= and keep_changed="
        raise NoMapError("the effect holds no activations", do=do)
    if not bands:
        raise NoMapError("no activation to draw", "no chosen call ran after the first that was changed", "choose it")
    call, why = bands[0].layer.call, bands[0].why
    if why is not None and all(band.why for band in bands):
        raise NoMapError(f"{call.key or 'the model'} ({call.type}) cannot be drawn: {why.asked}", why.exists, why.do)
    page = DifferencePage([part for band in bands for part in band.parts])
    interventions = interventions or effect.changes or list(effect.changed)
    _add_heading(page, origin, interventions, seed)
    if photograph is not None and isinstance(net, LoadedModel):
        page.add_input(input_frames(net, [net.prepare(photograph)])[0])
    for band in bands:
        _add_band(page, band)
    facts = {**origin.facts(), "interventions": list(interventions), "seed": seed}
    return page.image(len(bands), cmap, facts, [_band_facts(band) for band in bands])


def _add_heading(page: DifferencePage, origin: Origin, interventions: Sequence[str], seed: int | None) -> None:
    words = "   then   ".join(interventions) or "interventions that changed nothing"
    page.add_text(f"{origin.model} without and with {words}".strip(), size=15, bold=True)
    page.add_text(", ".join([*origin.words, *([] if seed is None else [f"seed {seed}"])]), 2)
    page.add_text(origin.alarm, 2, alarm=True)
    hint = "The channels that moved most come first. Bar: root mean square of the map, one measure for all three."
    page.add_text(hint, 2)


def _add_band(page: DifferencePage, band: _EffectBand) -> None:
    layer = band.layer
    title = f"{layer.call.key or layer.call.type}   {layer.call.type}   {shape_text(layer.shape)}"
    page.add_text(title + ("   changed here" if layer.changed else ""), 18, 13, bold=True)
    measures = {"relative L2": layer.relative_l2, "cosine": layer.cosine}
    words = [f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in measures.items()]
    words += [f"NaN or Inf after: {layer.nonfinite:,}"] if layer.nonfinite else []
    page.add_text("   ".join(words), 2)
    if band.why is not None:
        page.add_text(f"not drawn: {band.why}", 2)
    for part in band.parts:
        if len(band.parts) > 1:
            page.add_text(part.maps.part or "maps", 8, bold=True)
        page.add_text(_moved_words(part.maps, part.drawn), 2)
        page.add_difference(part, ", ".join(filter(None, [layer.call.key, part.maps.part])))


def _moved_words(maps: MapDifference, drawn: int) -> str:
    if not maps.moved:
        return f"nothing moved: each of {counted(maps.total, 'channel')} is as before"
    first = ", ".join(
        f"{channel} ({'NaN or Inf' if math.isinf(distance) else f'{distance:.3g}'})"
        for channel, distance in zip(maps.channels[:BOLD], maps.distances, strict=False)
    )
    words = f"{maps.moved:,} of {counted(maps.total, 'channel')} moved"
    words += f", {drawn} drawn" if drawn < maps.moved else ""
    return f"{words}; most (root mean square of the difference): {first}"


def _band_facts(band: _EffectBand) -> dict[str, Any]:
    layer = band.layer
    return {
        "layer": layer.call.name,
        **{name: getattr(layer.call, name) for name in ("call", "index", "order", "type")},
        "shape": layer.shape,
        "changed": layer.changed,
        "relative_l2": layer.relative_l2 if math.isfinite(layer.relative_l2 or 0) else None,
        "cosine": layer.cosine,
        "nonfinite": layer.nonfinite,
        "why_not": str(band.why) if band.why else "",
        "parts": [part.maps.facts(part.drawn) for part in band.parts],
    }
