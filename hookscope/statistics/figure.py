"""The statistics of every layer call on one page: distributions, zero, dead and saturated shares, and findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.drawing import (
    SMALL,
    Colour,
    mark_ends,
    page_of_rows,
    plain_settings,
    plain_ticks,
    set_ticks,
    with_types,
    write,
)
from hookscope.findings import Finding, default, nonfinite_words, single
from hookscope.statistics.layer_statistics import LayerStatistics

_MOST_LINES = 10
_WIDEST, _THICKEST = 5.5, 0.55  # of a band: in points, as a share of a row
_COMPARABLE = 80.0  # largest ratio of values to the smallest root mean square on one linear scale
_MOST_SIZES = 10.0  # less than 1 % of values are beyond 10 root mean squares (Chebyshev)
_BANDS = ((0.01, 0.99, "#cfe3f2"), (0.05, 0.95, "#8cc5e8"), (0.25, 0.75, Colour.BLUE))
_FIRST_STRIPE = "#f9c4a4"
_ARROW = "\N{BLACK LEFT-POINTING POINTER}"
_HALF_PRECISION = (default("vanishing-activations", "smallest"), default("exploding-activations", "largest"))
_BAND_WORDS = (
    "thin line lowest to highest; light, middle, dark blue: 98, 90 and 50 % of the values; white tick median, orange"
    " dot mean"
)
_DEAD_WORDS = "dead: channels with one constant value"
_SATURATED_WORDS = "saturated: values within 1 % of a bound, if the function has one (|)"
_SIZE_WORDS = (
    "sizes differ too much for one scale, so each row of values is divided by its root mean square (rms); rms: dot,"
    " line to the largest value"
)

Draw = Callable[[Axes, Sequence[LayerStatistics], float], None]


def plot_statistics(
    layers: Sequence[LayerStatistics],
    findings: Sequence[Finding] | None = None,
    title: str = "",
    *,
    weights: str = "",
    lines: Sequence[str] = (),
) -> Figure:
    """A page with a row for each of ``layers``; rows with findings name them, and one row is marked to start with.

    Panels: distribution of the values, NaN and Inf, zeros, dead channels, saturation; one without values is left out.
    If layers differ by orders of magnitude, each distribution is drawn in units of its own root mean square, which has
    a logarithmic panel of its own. A line above the rows summarises each kind of finding. The figure is outside
    pyplot: nothing has to be closed, and no setting of matplotlib changes.

    Args:
        layers: The result of `RunningStatistics.statistics`.
        findings: The result of `diagnose`; None draws none.
        title: The first line, such as the name of the model.
        weights: Label of the weights, written beside the title; random weights are red.
        lines: Lines below the title, such as the preprocessing.

    Example:
        >>> import torch
        >>> from hookscope import StatisticsCollector, diagnose
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> with StatisticsCollector(net) as collector, torch.no_grad():
        ...     _ = net(torch.rand(8, 3, 16, 16))
        >>> totals = collector.totals
        >>> figure = plot_statistics(totals.statistics(), diagnose(totals), "a net, 8 images")
        >>> figure.axes[0].texts[0].get_text()
        'values'
    """
    given, findings = findings is not None, list(single(findings or ()))
    panels = _panels(layers)
    said = with_types(findings, {layer.key: layer.call.type for layer in layers})
    summary, first = _summary(said) if given else [], _first_row(layers, findings)
    with plain_settings():
        colour = Colour.ALARM if any(finding.severity != "note" for finding in findings) else Colour.INK
        figure = page_of_rows(
            [f"{layer.key}  {layer.call.type}" for layer in layers],
            {name: width for name, width, _ in panels},
            title,
            [*((line, Colour.INK) for line in lines), *((line, colour) for line in summary)],
            _marks(layers, findings, first),
            weights=weights,
            legend=_legend(layers, [name for name, *_ in panels]),
        )
        for (_, _, draw), axes in zip(panels, figure.axes, strict=True):
            row_points = axes.bbox.height / figure.dpi / max(len(layers), 1) * 72
            draw(axes, layers, min(_WIDEST, _THICKEST * row_points))
            if first is not None:
                axes.axhspan(first - 0.5, first + 0.5, facecolor=_FIRST_STRIPE, edgecolor="none", zorder=0.5)
    return figure


def _panels(layers: Sequence[LayerStatistics]) -> list[tuple[str, float, Draw]]:
    """Title, width in inches and drawing function of each panel."""
    panels: list[tuple[str, float, Draw]] = [("values", 4.6, _draw_values)]
    if not _comparable(layers):
        panels = [("values / rms", 3.6, _draw_relative), ("root mean square (rms)", 2.4, _draw_sizes)]
    if any(layer.nan or layer.inf for layer in layers):
        panels.append(("NaN, Inf", 1.7, _draw_nonfinite))
    if any(layer.zeros for layer in layers):
        panels.append(("zeros (%)", 1.0, _draw_zeros))
    if any(layer.dead_channels for layer in layers):
        panels.append(("dead channels (%)", 1.6, _draw_dead))
    if any(layer.saturated for layer in layers):
        panels.append(("saturated (%)", 1.0, _draw_saturated))
    return panels


def _legend(layers: Sequence[LayerStatistics], panels: Sequence[str]) -> list[str]:
    """What is drawn, and which panels would be empty."""
    lines = []
    if "values / rms" in panels:
        low, high = _size_limits(layers)
        dashed = ", dashed the limits of half precision" if any(low < at < high for at in _HALF_PRECISION) else ""
        lines.append(_SIZE_WORDS + dashed)
    if any(layer.quantiles for layer in layers):
        low, high = _relative_limits(layers) if "values / rms" in panels else (-math.inf, math.inf)
        units = _units(layers)
        clipped = any(
            (layer.min or 0) / unit < low or (layer.max or 0) / unit > high for layer, unit in _finite(layers, units)
        )
        lines.append(_BAND_WORDS + ("; arrowhead at the edge: the thin line goes on" if clipped else ""))
    words = [_DEAD_WORDS] if "dead channels (%)" in panels else []
    words += [_SATURATED_WORDS] if "saturated (%)" in panels else []
    absent = [name for name in ("zeros", "dead channels") if f"{name} (%)" not in panels]
    bounded = any(layer.saturated is not None for layer in layers)
    absent += ["saturated values"] if bounded and "saturated (%)" not in panels else []
    words += [f"no {' or '.join(absent)}"] if absent and layers else []
    return [*lines, "; ".join(words)] if words else lines


def _comparable(layers: Sequence[LayerStatistics]) -> bool:
    """Whether all layers fit on one linear scale."""
    sizes = _sizes(layers).values()
    return not sizes or max(_largest(layer) for layer in layers) <= _COMPARABLE * min(sizes)


def _sizes(layers: Sequence[LayerStatistics]) -> dict[int, float]:
    """Root mean squares by row, without zeros and overflows."""
    return {at: layer.rms for at, layer in enumerate(layers) if layer.rms and math.isfinite(layer.rms)}


def _largest(layer: LayerStatistics) -> float:
    return max(-(layer.min or 0.0), layer.max or 0.0)


def _first_row(layers: Sequence[LayerStatistics], findings: Sequence[Finding]) -> int | None:
    """The row to look at first: with the most severe finding; None if only one row has findings, or all are notes."""
    rows = {layer.key: at for at, layer in enumerate(layers) if layer.key}
    of_rows = [finding for finding in findings if finding.layer in rows]
    if len({finding.layer for finding in of_rows}) < 2 or of_rows[0].severity == "note":
        return None
    return rows[_worst([finding for finding in of_rows if finding.finding == of_rows[0].finding]).layer]


def _worst(findings: Sequence[Finding]) -> Finding:
    """The finding with the largest share, else the first, because later layers inherit it."""
    return max(findings, key=_share)


def _share(finding: Finding) -> float:
    """The share of channels or values that a finding is about, 0 without a share."""
    channels = finding.numbers.get("channels")
    if finding.channels and channels:
        return len(finding.channels) / float(channels)
    return float(finding.numbers.get("saturated") or 0.0)


def _marks(layers: Sequence[LayerStatistics], findings: Sequence[Finding], first: int | None) -> dict[int, str]:
    """The names of the findings by row."""
    named: dict[str, list[str]] = {}
    for finding in findings:
        names = named.setdefault(finding.layer, [])
        names += [finding.finding] if finding.finding not in names else []
    named.pop("", None)  # findings on the whole model
    marks = {at: ", ".join(named[layer.key]) for at, layer in enumerate(layers) if layer.key in named}
    if first is not None:
        marks[first] = f"{_ARROW} look here first: {marks[first]}"
    return marks


def _summary(findings: Sequence[Finding]) -> list[str]:
    """A line for each kind of finding: its count, and the evidence of the worst or the first."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.finding, []).append(finding)
    lines = []
    for kind, members in kinds.items():
        worst = _worst(members)
        among = f"{len(members)} times, the {'worst' if _share(worst) else 'first'} " if len(members) > 1 else ""
        lines.append(f"{kind}:  {among}{worst.layer and worst.layer + ': '}{worst.evidence}")
    more = len(lines) - _MOST_LINES
    if more > 0:
        lines[_MOST_LINES:] = [f"... and {more} more kind{'' if more == 1 else 's'} of findings, beside the rows"]
    return lines or ["no findings"]


def _draw_values(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    _bands(axes, layers, [1.0] * len(layers), thickness)
    axes.set_xticks(*plain_ticks(axes.get_xlim(), 7))


def _draw_relative(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """Bands in units of each layer's root mean square; an arrowhead marks extremes that lie outside the panel."""
    units = _units(layers)
    _bands(axes, layers, units, thickness)
    low, high = _relative_limits(layers)
    axes.set_xlim(low, high)
    axes.set_xticks(*plain_ticks((low, high), 6))
    rows = [(at, layer, unit) for at, (layer, unit) in enumerate(zip(layers, units, strict=True)) if layer.quantiles]
    left = [at for at, layer, unit in rows if (layer.min or 0.0) / unit < low]
    mark_ends(axes, left, [at for at, layer, unit in rows if (layer.max or 0.0) / unit > high])


def _units(layers: Sequence[LayerStatistics]) -> list[float]:
    sizes = _sizes(layers)
    return [sizes.get(at, 1.0) for at in range(len(layers))]


def _relative_limits(layers: Sequence[LayerStatistics]) -> tuple[float, float]:
    ends = [
        (layer.quantiles[0.01] / unit, layer.quantiles[0.99] / unit) for layer, unit in _finite(layers, _units(layers))
    ]
    low = max(min((low for low, _ in ends), default=-1.0) * 1.25, -_MOST_SIZES)
    high = min(max((high for _, high in ends), default=1.0) * 1.25, _MOST_SIZES)
    return min(low, -1.0), max(high, 1.0)


def _size_limits(layers: Sequence[LayerStatistics]) -> tuple[float, float]:
    sizes = _sizes(layers)
    return max(min(sizes.values()) / 2, 1e-300), min(max(_largest(layers[at]) for at in sizes) * 2, 1e300)


def _finite(layers: Sequence[LayerStatistics], units: Sequence[float]) -> list[tuple[LayerStatistics, float]]:
    return [(layer, unit) for layer, unit in zip(layers, units, strict=True) if layer.quantiles]


def _bands(axes: Axes, layers: Sequence[LayerStatistics], units: Sequence[float], thickness: float) -> None:
    finite, rows = _finite(layers, units), [at for at, layer in enumerate(layers) if layer.quantiles]
    ends = [(layer.min or 0.0) / unit for layer, unit in finite], [(layer.max or 0.0) / unit for layer, unit in finite]
    axes.hlines(rows, *ends, colors=Colour.FAINT, linewidth=0.8, zorder=2)
    for height, (low, high, colour) in enumerate(_BANDS):
        left, right = ([layer.quantiles[share] / unit for layer, unit in finite] for share in (low, high))
        axes.hlines(rows, left, right, colors=colour, linewidth=thickness, zorder=3 + height)
    medians = [layer.quantiles[0.5] / unit for layer, unit in finite]
    means = [(layer.mean or 0.0) / unit for layer, unit in finite]
    axes.plot(medians, rows, "|", color="white", ms=thickness, markeredgewidth=1.1, zorder=7)
    axes.plot(means, rows, "o", color=Colour.ORANGE, ms=min(2.4, thickness), zorder=8)
    axes.axvline(0, color=Colour.FAINT, linewidth=0.6, zorder=1)
    beside = {"transform": axes.get_yaxis_transform(), "fontsize": SMALL, "color": Colour.ALARM}
    for at, layer in enumerate(layers):
        if not layer.quantiles:
            write(axes, 0.02, at, "no finite value" if layer.values else "no value", **beside)


def _draw_sizes(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """A dot at the root mean square and a line to the largest value, except for layers of zeros."""
    sizes = _sizes(layers)
    axes.set_xscale("log")
    axes.hlines(list(sizes), list(sizes.values()), [_largest(layers[at]) for at in sizes], colors=Colour.FAINT, lw=0.8)
    axes.plot(list(sizes.values()), list(sizes), "o", color=Colour.BLUE, ms=min(3.2, thickness), zorder=4)
    low, high = _size_limits(layers)
    axes.set_xlim(low, high)
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    powers = powers[:: -max(1, -(-len(powers) // 5))]  # at most 5, from the highest: their labels need room
    set_ticks(axes, [10.0**power for power in powers])
    for limit in _HALF_PRECISION:
        if low < limit < high:
            axes.axvline(limit, color=Colour.ALARM, linewidth=0.7, linestyle=(0, (3, 3)), zorder=1)


def _draw_nonfinite(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """Counts as text, because a bar of 3 in a million is invisible."""
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    for at, layer in enumerate(layers):
        if counts := nonfinite_words(layer.nan, layer.inf):
            write(axes, 0.03, at, counts.replace(" and", ","), fontsize=SMALL, color=Colour.ALARM)


def _draw_zeros(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    _bars(axes, {at: layer.zeros for at, layer in enumerate(layers)}, Colour.FAINT, thickness)


def _draw_dead(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """Bars and counts, because a bar of 1 in 512 channels is invisible."""
    shares = {at: len(layer.dead_channels) / max(layer.channels, 1) for at, layer in enumerate(layers)}
    _bars(axes, shares, Colour.ALARM, 1.25 * thickness)
    for at, share in shares.items():
        if share:
            text = f"{len(layers[at].dead_channels)} of {layers[at].channels}"
            inside = {"ha": "right", "color": "white"} if share > 0.55 else {"ha": "left", "color": Colour.ALARM}
            write(axes, 100 * share + (-3 if share > 0.55 else 3), at, text, fontsize=SMALL - 0.5, zorder=5, **inside)


def _draw_saturated(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """Bars of bounded functions; a tick at 0 marks their rows."""
    shares = {at: layer.saturated for at, layer in enumerate(layers) if layer.saturated is not None}
    _bars(axes, shares, Colour.ORANGE, thickness)
    axes.plot([0] * len(shares), list(shares), "|", color=Colour.INK, ms=thickness, clip_on=False, zorder=4)


def _bars(axes: Axes, shares: dict[int, float], colour: str, thickness: float) -> None:
    # one collection of lines: 400 rectangles take half a second
    axes.hlines(
        list(shares), 0, [100 * share for share in shares.values()], colors=colour, linewidth=thickness, zorder=3
    )
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 50, 100])
