"""The graph of a network as PNG: the shapes of its SVG, drawn by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import BoxStyle, Circle, FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from hookscope.drawing import DPI, figure_bytes, plain_settings, write
from hookscope.errors import UsageError

_PIXELS = 96  # of an SVG, in an inch
_MOST = 2**16  # pixels along a side that matplotlib draws
_CODES = {"M": [Path.MOVETO], "L": [Path.LINETO], "V": [Path.LINETO], "C": [Path.CURVE4] * 3, "Z": [Path.CLOSEPOLY]}


def png_bytes(svg: str) -> bytes:
    """The PNG file of what `draw_graph` returns."""
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    if max(width, height) * DPI / _PIXELS >= _MOST:
        do = "name it .svg, or draw fewer levels with ‹depth|--depth›"
        raise UsageError("the graph is too large for a PNG file", do=do)
    with plain_settings():
        figure = Figure(figsize=(width / _PIXELS, height / _PIXELS))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        for group in root.findall("{*}g"):
            x, y = map(float, re.findall(r"[\d.]+", group.attrib["transform"]))
            axes.set(xlim=(-x, width - x), ylim=(height - y, -y))
            for element in group.iter():
                _draw(axes, element.tag.rpartition("}")[2], element.attrib, element.text or "")
    return figure_bytes(figure, ".png")


def _draw(axes: Axes, tag: str, given: Mapping[str, str], text: str) -> None:
    paint: dict[str, Any] = {"facecolor": given.get("fill", "none"), "edgecolor": given.get("stroke", "none")}
    paint["linewidth"] = float(given.get("stroke-width", 1)) * 72 / _PIXELS
    x, y, width, height, rx = (float(given.get(name, 0)) for name in ("x", "y", "width", "height", "rx"))
    if tag == "rect":
        style = BoxStyle.Round(pad=0, rounding_size=rx)
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **paint))
    elif tag == "polygon":
        axes.add_patch(Polygon([tuple(map(float, pair.split(","))) for pair in given["points"].split()], **paint))
    elif tag == "circle":
        axes.add_patch(Circle((float(given["cx"]), float(given["cy"])), float(given["r"]), **paint))
    elif tag == "path":
        axes.add_patch(PathPatch(_path(given["d"]), **paint))
    elif tag == "text":
        more: dict[str, Any] = {"color": given["fill"], "fontsize": float(given.get("font-size", 12)) * 72 / _PIXELS}
        more |= {"ha": {"middle": "center"}.get(given.get("text-anchor", ""), "left"), "va": "baseline"}
        halo = [withStroke(linewidth=paint["linewidth"], foreground=given["stroke"])] if "stroke" in given else []
        write(axes, x, y, text, fontweight="bold" if "font-weight" in given else "normal", path_effects=halo, **more)


def _path(text: str) -> Path:
    points: list[tuple[float, float]] = []
    codes = []
    for command, numbers in re.findall(r"([MLVCZ])([^MLVCZ]*)", text):
        values = [float(value) for value in numbers.split()]
        values = [points[-1][0], *values] if command == "V" else values or [0.0, 0.0]
        points += zip(values[::2], values[1::2], strict=True)
        codes += _CODES[command]
    return Path(points, codes)
