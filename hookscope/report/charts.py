"""Plots as a page shows them, as SVG on the scales of matplotlib, and pictures as text: whole files in addresses."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from PIL import Image

from hookscope.drawing import CURVE_COLOURS, Chart, Colour, DrawnPanel, RowPlot, colours, image_bytes, palette
from hookscope.errors import printable

ROW, HEAD, FOOT, RAMP = 16, 34, 16, 28
"""Heights of a row, of what is above and below the rows, and of a colour bar, in pixels; the style sheet has two."""
CHART = (600, 160)
"""Width and height of a chart in its own units; the script has them too."""

_INCH, _POINT = 70, 1.35  # pixels for an inch and a point of the figure
_SHAPES = {
    "<": "m-4 0l6-3.5v7z",
    ">": "m4 0l-6-3.5v7z",
    "x": "m-2.5-2.5l5 5m-5 0l5-5",
    "s": "m-2-2h4v4h-4z",
    "D": "m0-3.5l3.5 3.5l-3.5 3.5l-3.5-3.5z",
}
_HOLLOW = "xs"
_LETTER = 5.5  # width of a letter of a tick, about
_THEME = {
    Colour.INK: "var(--ink)",
    Colour.FAINT: "var(--faint)",
    Colour.GRID: "var(--line)",
    Colour.ALARM: "var(--error)",
}


def panel_svg(panel: DrawnPanel, plot: RowPlot) -> Markup:
    """A panel with its title and ticks; the rows are ``ROW`` pixels high."""
    wide, high = round(panel.width * _INCH), len(plot.labels) * ROW
    inside = Markup("").join([*_stripes(plot, wide), *_axis(panel, wide, high)])
    clipped = _element("svg", Markup("").join(_marks(panel, wide)), width=wide, height=high)
    above = Markup("").join([*_edges(panel, wide), *_texts(panel, wide), *_readings(panel, plot, wide)])
    all_high = HEAD + high + FOOT
    if panel.ramp is not None:
        above += Markup("").join(_ramp(*panel.ramp, wide, high + FOOT))
        all_high += RAMP
    size = {"width": wide, "height": all_high, "viewBox": f"0 {-HEAD} {wide} {all_high}"}
    return _element("svg", inside + clipped + above, role="img", aria_label=printable(panel.title), **size)


def _element(name: str, content: str = "", **attributes: Any) -> Markup:
    """An element of SVG; ``class_`` and ``stroke_width`` stand for names that Python does not allow."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{escape(content)}</{name}>")


def _path(steps: Iterable[str], **attributes: Any) -> Markup:
    return _element("path", d="".join(steps), **attributes)


def _text(x: float, y: str | int, words: str, anchor: str, **attributes: Any) -> Markup:
    return _element("text", printable(words), x=f"{x:.4g}", y=y, text_anchor=anchor, **attributes)


def _x(panel: DrawnPanel, wide: int, value: float) -> float:
    return max(-1.0, min(2.0, panel.place(value))) * wide


def _y(at: float) -> str:
    return f"{(at + 0.5) * ROW:g}"


def _colour(colour: str) -> str:
    return _THEME.get(colour, colour)


def _box(at: int, wide: int) -> list[str]:
    return [f"M0 {at * ROW}h{wide}v{ROW}H0z"]


def _stripes(plot: RowPlot, wide: int) -> Iterator[Markup]:
    for at in range(len(plot.labels)):
        ground = "first" if at == plot.first else "marked" if at in plot.marked else "even" if at % 2 else ""
        if ground:
            yield _path(_box(at, wide), class_=ground)


def _axis(panel: DrawnPanel, wide: int, high: int) -> Iterator[Markup]:
    places = [_x(panel, wide, value) for value in panel.ticks]
    yield _path([f"M0 0h{wide}v{high}H0z", *(f"M{x:.4g} 0v{high}" for x in places)], class_="grid")
    yield _text(0, 12 - HEAD, panel.title, "start", class_="title")
    end = -math.inf
    for x, label in zip(places, panel.labels, strict=True):
        anchor, before = ("start", 0.0) if x < 0.1 * wide else ("end", 1.0) if x > 0.9 * wide else ("middle", 0.5)
        width = _LETTER * len(label)
        if x - before * width < end + 2:  # the label before it is in its place
            continue
        end = x + (1 - before) * width
        for y in (-5, high + 12):
            yield _text(x, y, label, anchor, class_="tick")


def _marks(panel: DrawnPanel, wide: int) -> Iterator[Markup]:
    """The cells, and a path for each mark that is not at an edge."""
    if panel.cells:
        yield _image(np.stack(panel.cells), 0, wide, len(panel.cells) * ROW)
    elif panel.scale != "log" and panel.limits[0] < 0:
        yield _path([f"M{_x(panel, wide, 0.0):.4g} 0v99999"], fill="none", stroke="var(--faint)")
    for mark, spans in panel.marks:
        size = mark.drawn_size * (ROW if mark.kind == "bar" else _POINT)
        paint = {"fill": "none", "stroke": _colour(mark.colour), "stroke_width": f"{size:g}"}
        places = [(_x(panel, wide, low), _x(panel, wide, high), _y(at)) for at, low, high in spans]
        ends = [(x, y) for _, x, y in places]
        match mark.kind if places else "":
            case "line" | "bar":
                yield _path((f"M{low:.4g} {y}H{high:.4g}" for low, high, y in places), **paint)
            case "tick":
                yield _path((f"M{x:.4g} {y}m0{-size / 2:g}v{size:g}" for x, y in ends), **paint | {"stroke_width": 1.2})
            case "dot" | "path":  # matplotlib draws an edge around a dot
                paint["stroke_width"] = f"{size + _POINT:g}"
                if mark.kind == "path":
                    joined = zip(spans, spans[1:], ends, ends[1:], strict=False)
                    lines = (f"M{x:.4g} {y}L{u:.4g} {v}" for a, b, (x, y), (u, v) in joined if b[0] - a[0] == 1)
                    yield _path(lines, **paint | {"stroke_width": 1})
                if mark.marker:
                    yield _shapes(mark.marker, mark.colour, ends)
                else:
                    yield _path((f"M{x:.4g} {y}h0" for x, y in ends), stroke_linecap="round", **paint)


def _image(pixels: np.ndarray[Any, Any], y: int, wide: int, high: int) -> Markup:
    address = png_address(Image.fromarray(np.ascontiguousarray(pixels, np.uint8), "RGB"))
    fit = {"preserveAspectRatio": "none", "image_rendering": "pixelated"}
    return _element("image", href=address, y=y, width=wide, height=high, **fit)


def _ramp(cmap: str, labels: Iterable[str], wide: int, y: int) -> Iterator[Markup]:
    yield _image(palette(cmap)[None, : colours.LEVELS], y, wide, 8)
    for share, label, anchor in zip((0, 0.5, 1), labels, ("start", "middle", "end"), strict=True):
        yield _text(share * wide, y + 20, label, anchor, class_="tick")


def _shapes(marker: str, colour: str, places: Iterable[tuple[float, str]]) -> Markup:
    fill = "none" if marker in _HOLLOW else _colour(colour)
    return _path((f"M{x:.4g} {y}{_SHAPES[marker]}" for x, y in places), fill=fill, stroke=_colour(colour))


def _edges(panel: DrawnPanel, wide: int) -> Iterator[Markup]:
    """Marks at the edges, and arrowheads at lines that go on."""
    for mark, spans in panel.marks:
        if mark.kind in ("left", "right"):
            yield _shapes(mark.marker, mark.colour, ((wide if mark.kind == "right" else 0, _y(at)) for at, *_ in spans))
    for x, rows, marker in zip((0, wide), panel.beyond, "<>", strict=True):
        yield _shapes(marker, panel.arrow[0], ((x, _y(at)) for at in rows))


def _texts(panel: DrawnPanel, wide: int) -> Iterator[Markup]:
    for at, share, is_inside, words, colour in panel.placed_texts:
        anchor, by, paint = ("end", -3, "var(--paper)") if is_inside else ("start", 3, _colour(colour))
        yield _text(share * wide + by, _y(at), words, anchor, class_="in-row", fill=paint)


def _readings(panel: DrawnPanel, plot: RowPlot, wide: int) -> Iterator[Markup]:
    """The values of each row, which the pointer reads."""
    values: dict[int, dict[str, None]] = {}
    for mark, spans in panel.marks:
        for at, *ends in spans if mark.kind not in ("left", "right") else ():
            values.setdefault(round(at), {}).update((f"{end:.4g}", None) for end in ends)
    for at, own in values.items():
        said = _element("title", printable(f"{plot.labels[at]}: {panel.title} {', '.join(own)}"))
        yield _element("path", said, class_="row", d=_box(at, wide)[0])


def chart_svg(chart: Chart) -> Markup:
    """The curves of a chart, its band, limits and flags, in a box of the size `CHART`."""
    wide, high = CHART

    def at(x: float, y: float) -> tuple[float, float]:
        along, up = chart.place(x, y)
        return max(0.0, min(1.0, along)) * wide, (1 - max(-1.0, min(2.0, up))) * high

    def points(run: Iterable[tuple[float, float]]) -> str:
        return "L".join(f"{x:.4g} {y:.4g}" for x, y in (at(*point) for point in run))

    def across(y: float, begin: float) -> str:
        x, place = at(max(begin, chart.span[0]), y)
        return f"M{x:.4g} {place:.4g}H{wide}"

    parts = [_path((across(value, chart.span[0]) for value, _ in chart.ticks()), class_="grid")]
    known = [(x, low, high) for x, low, high in chart.band if low == low]
    there, back = [(x, high) for x, _, high in known], [(x, low) for x, low, _ in reversed(known)]
    parts += [_path([f"M{points([*there, *back])}z"], class_="band")] if known else []
    rules = [(across(value, chart.begin), colour) for value, colour, _ in chart.lines_of_rules]
    rules += [(f"M{at(x, 1)[0]:.4g} 0V{high}", Colour.ALARM) for x, _ in chart.flags]
    parts += [_path([line], class_="rule", stroke=_colour(colour)) for line, colour in rules]
    for curve in chart.curves:
        name = "line" if curve.colour is None else f"line colour-{curve.colour % len(CURVE_COLOURS)}"
        runs = chart.runs(curve)
        pale = " faint" if curve.width < 1 else ""
        parts.append(_path((f"M{points(run)}" for run in runs if len(run) > 1), class_=name + pale))
        parts.append(
            _path((f"M{points(run)}h0" for run in runs if len(run) == 1), class_=name.replace("line", "dot", 1))
        )
    for x, colour in chart.below:
        triangle = f"M{at(x, 1)[0] - 4:.4g} {high - 10}h8l-4 9z"
        parts.append(
            _path([triangle], fill="var(--faint)" if colour is None else f"var(--line-{colour % len(CURVE_COLOURS)})")
        )
    crosses = (f"M{at(x, 1)[0] - 4:.4g} {high - 9}l8 8m-8 0l8-8" for x in chart.unknown)
    parts.append(_path(crosses, class_="unknown"))
    return Markup("").join(part for part in parts if 'd=""' not in part)


def chart_labels(chart: Chart) -> dict[str, list[tuple[str, str]]]:
    """Places in percent, and the words there, of the ticks from the top, and of the flags and the rules."""
    ticks = [(f"{100 * (1 - chart.place(chart.span[0], value)[1]):.4g}", label) for value, label in chart.ticks()]
    flags = [(f"{max(0, min(100, 100 * chart.place(x, 1)[0])):.4g}", words) for x, words in chart.flags]
    return {"ticks": ticks, "flags": flags}


def chart_data(chart: Chart) -> dict[str, object]:
    read = [curve for curve in chart.curves if curve.is_read]
    lines = [
        {"name": printable(curve.name), "xs": list(curve.xs), "ys": list(map(_number, curve.ys))} for curve in read
    ]
    return {"x_name": chart.x, "span": chart.span, "limits": chart.limits, "log": chart.is_log, "lines": lines}


def _number(y: float | None) -> float | str | None:
    """A number as JSON has it: NaN and Inf as text."""
    return y if y is None or math.isfinite(y) else {math.inf: "Inf", -math.inf: "-Inf"}.get(y, "NaN")


_HEIGHT = 20  # of a distribution, in units of its drawing


def outline(histogram: Sequence[int]) -> str:
    """The path of a histogram in a drawing of its length × 20; heights are square roots, so that few are seen too."""
    highest = max(histogram, default=0) or 1
    heights = (_HEIGHT * (1 - (count / highest) ** 0.5) for count in histogram)
    return f"M0 {_HEIGHT}" + "".join(f"V{height:.3g}h1" for height in heights) + f"V{_HEIGHT}Z"


def png_address(image: Image.Image, **options: Any) -> str:
    """``data:image/png;base64,...`` of an image; ``options`` go to Pillow."""
    return _address("png", image_bytes(image, **{"compress_level": 6, **options}))


def jpeg_address(image: Image.Image, quality: int = 88) -> str:
    """``data:image/jpeg;base64,...`` of an RGB image."""
    return _address("jpeg", image_bytes(image, "JPEG", quality=quality, subsampling=0))


def _address(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
