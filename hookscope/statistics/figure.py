"""The statistics of every layer call on one page: distributions, zero, dead and saturated shares, and findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.drawing import SMALL, Colour, page_of_rows, plain_settings, write
from hookscope.findings import Finding
from hookscope.statistics.layer_statistics import LayerStatistics

_MOST_LINES = 10
_WIDEST, _THICKEST = 5.5, 0.55  # of a band: points, share of a row
_COMPARABLE = 80.0  # times the smallest layer's size the widest value may be for one linear scale
_MOST_SIZES = 10.0  # beyond so many root mean squares less than 1 % of values can be (Chebyshev)
_BANDS = ((0.01, 0.99, "#cfe3f2"), (0.05, 0.95, "#8cc5e8"), (0.25, 0.75, Colour.BLUE))
_FIRST_STRIPE, _LEGEND_INK = "#f9c4a4", "#606060"
_ARROW = "\N{BLACK LEFT-POINTING POINTER}"
_HALF_PRECISION = (2.0**-14, 65504.0)
_BAND_WORDS = (
    "thin line lowest to highest; light, middle, dark blue: 98, 90 and 50 % of the values; white tick median, orange"
    " dot mean"
)
_DEAD_WORDS = "dead: channels that never leave one value"
_SATURATED_WORDS = "; saturated: values within 1 % of a bound, where there is one (|)"
_SIZE_WORDS = (
    "sizes differ too much for one scale, so each row of values is divided by its root mean square (rms); rms: dot,"
    " line to the largest value, dashed the limits of half precision"
)

Draw = Callable[["Axes", Sequence["LayerStatistics"], float], None]


def draw_statistics(layers: Sequence[LayerStatistics], findings: Sequence[Finding], about: str) -> Figure:
    """A page with a row for each of ``layers``; rows with findings are marked and name them, the first says so.

    Panels: distribution of the values, NaN and Inf where there are any, zeros, dead channels, saturation where a
    function is bounded. Where layers differ by orders of magnitude there is no scale on which all distributions can be
    seen: each is then drawn in units of its own root mean square, which has a logarithmic panel beside it. Findings
    stand in words above, a line for each kind in the order given, with the layer that has most of it, or had it first.

    Args:
        layers: In order of execution.
        findings: The gravest first, as `diagnose` gives them.
        about: The heading: what was measured on what.

    Example:
        >>> import torch
        >>> from hookscope.statistics import diagnose
        >>> from hookscope.statistics.collector import StatisticsCollector
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Sigmoid())
        >>> with StatisticsCollector(net) as collector, torch.no_grad():
        ...     _ = net(torch.rand(20, 3, 8, 8))
        >>> figure = draw_statistics(collector.totals.statistics(), diagnose(collector.totals), "a net, 20 images")
        >>> [axes.texts[0].get_text() for axes in figure.axes]
        ['values', 'zeros (%)', 'dead channels (%)', 'saturated (%)']
    """
    panels, legend = _panels(layers), _legend(layers)
    told, first = _told(findings), _first_row(layers, findings)
    with plain_settings():
        page = page_of_rows(
            [f"{layer.key}  {layer.call.type}" for layer in layers],
            [title for title, _, _ in panels],
            about,
            [*told, *legend],
            [width for _, width, _ in panels],
            _marks(layers, findings, first),
            range(len(told)) if findings else (),
        )
        for text in page.figure.texts[-len(legend) :]:
            text.set_color(_LEGEND_INK)
        thickness = min(_WIDEST, _THICKEST * page.row_height * 72)
        for (_, _, draw), axes in zip(panels, page.panels, strict=True):
            draw(axes, layers, thickness)
            if first is not None:
                axes.axhspan(first - 0.5, first + 0.5, facecolor=_FIRST_STRIPE, edgecolor="none", zorder=0.5)
    return page.figure


def _panels(layers: Sequence[LayerStatistics]) -> list[tuple[str, float, Draw]]:
    """Titles, widths in inches and what draws them."""
    panels: list[tuple[str, float, Draw]] = [("values", 4.6, _draw_values)]
    if not _comparable(layers):
        panels = [("values / rms", 3.6, _draw_relative), ("rms", 2.4, _draw_sizes)]
    if any(layer.nan or layer.inf for layer in layers):
        panels.append(("NaN, Inf", 1.7, _draw_nonfinite))
    panels += [("zeros (%)", 1.0, _draw_zeros), ("dead channels (%)", 1.6, _draw_dead)]
    if any(layer.saturated is not None for layer in layers):
        panels.append(("saturated (%)", 1.0, _draw_saturated))
    return panels


def _legend(layers: Sequence[LayerStatistics]) -> list[str]:
    """Above the rows, where it is seen: 400 of them end metres below."""
    bounded = any(layer.saturated is not None for layer in layers)
    lines = [_BAND_WORDS, _DEAD_WORDS + (_SATURATED_WORDS if bounded else "")]
    return lines if _comparable(layers) else [_SIZE_WORDS, *lines]


def _comparable(layers: Sequence[LayerStatistics]) -> bool:
    """Whether every layer can be seen on one linear scale."""
    sizes = _sizes(layers).values()
    return not sizes or max(_largest(layer) for layer in layers) <= _COMPARABLE * min(sizes)


def _sizes(layers: Sequence[LayerStatistics]) -> dict[int, float]:
    """Root mean square by row, of those that have one other than 0; squares of large float64 have none."""
    return {at: layer.rms for at, layer in enumerate(layers) if layer.rms and math.isfinite(layer.rms)}


def _largest(layer: LayerStatistics) -> float:
    return max(-(layer.min or 0.0), layer.max or 0.0)


def _first_row(layers: Sequence[LayerStatistics], findings: Sequence[Finding]) -> int | None:
    """Where to look first: a row of the gravest kind of finding that has one; None where there is no choice."""
    rows = {layer.key: at for at, layer in enumerate(layers) if layer.key}
    found = [one for one in findings if one.layer in rows]
    if len({one.layer for one in found}) < 2:
        return None
    return rows[_worst([one for one in found if one.finding == found[0].finding]).layer]


def _worst(findings: Sequence[Finding]) -> Finding:
    """Of findings of one kind the one with the largest share, else the first: what goes wrong there goes on."""
    return max(findings, key=_share)


def _share(found: Finding) -> float:
    """The share of channels or values a finding is about, 0 where it is not about a share."""
    channels = found.numbers.get("channels")
    if found.channels and channels:
        return len(found.channels) / float(channels)
    return float(found.numbers.get("saturated") or 0.0)


def _marks(layers: Sequence[LayerStatistics], findings: Sequence[Finding], first: int | None) -> dict[int, str]:
    """Which rows have findings, and their names."""
    named: dict[str, list[str]] = {}
    for found in findings:
        names = named.setdefault(found.layer, [])
        names += [found.finding] if found.finding not in names else []
    named.pop("", None)  # of the whole model, and no layer's
    marks = {at: ", ".join(named[layer.key]) for at, layer in enumerate(layers) if layer.key in named}
    if first is not None:
        marks[first] = f"{_ARROW} look here first: {marks[first]}"
    return marks


def _told(findings: Sequence[Finding]) -> list[str]:
    """A line for each kind of finding: how often it was found, and the evidence of the worst or first of them."""
    kinds: dict[str, list[Finding]] = {}
    for found in findings:
        kinds.setdefault(found.finding, []).append(found)
    lines = []
    for kind, some in kinds.items():
        one = _worst(some)
        among = f"{len(some)} times, the {'worst' if _share(one) else 'first'} " if len(some) > 1 else ""
        lines.append(f"{kind}:  {among}{one.layer and one.layer + ': '}{one.evidence}")
    more = len(lines) - _MOST_LINES
    if more > 0:
        lines[_MOST_LINES:] = [f"... and {more} more kind{'' if more == 1 else 's'} of findings, beside the rows"]
    return lines or ["no findings"]


def _draw_values(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    _bands(axes, layers, [1.0] * len(layers), thickness)


def _draw_relative(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """Bands in units of each layer's root mean square; lowest and highest may go on beyond the panel."""
    sizes = _sizes(layers)
    units = [sizes.get(at, 1.0) for at in range(len(layers))]
    _bands(axes, layers, units, thickness)
    ends = [(layer.quantiles[0.01] / unit, layer.quantiles[0.99] / unit) for layer, unit in _finite(layers, units)]
    low = max(min((low for low, _ in ends), default=-1.0) * 1.25, -_MOST_SIZES)
    high = min(max((high for _, high in ends), default=1.0) * 1.25, _MOST_SIZES)
    axes.set_xlim(min(low, -1.0), max(high, 1.0))


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
    """Root mean square a dot, a line from it to the largest value; a layer that is 0 throughout has none."""
    sizes = _sizes(layers)
    axes.set_xscale("log")
    axes.hlines(list(sizes), list(sizes.values()), [_largest(layers[at]) for at in sizes], colors=Colour.FAINT, lw=0.8)
    axes.plot(list(sizes.values()), list(sizes), "o", color=Colour.BLUE, ms=min(3.2, thickness), zorder=4)
    low = max(min(sizes.values()) / 2, 1e-300)
    high = min(max(_largest(layers[at]) for at in sizes) * 2, 1e300)
    axes.set_xlim(low, high)
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    powers = powers[:: -max(1, -(-len(powers) // 5))]  # from the highest, 5 at most: their labels need room
    axes.set_xticks([10.0**power for power in powers], [f"1e{power}" if power else "1" for power in powers])
    axes.set_xticks([], minor=True)
    for limit in _HALF_PRECISION:
        if low < limit < high:
            axes.axvline(limit, color=Colour.ALARM, linewidth=0.7, linestyle=(0, (3, 3)), zorder=1)


def _draw_nonfinite(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """Counts as words: a bar for 3 of a million would not be seen."""
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    for at, layer in enumerate(layers):
        counts = [f"{count:,} {name}" for count, name in ((layer.nan, "NaN"), (layer.inf, "Inf")) if count]
        if counts:
            write(axes, 0.03, at, ", ".join(counts), fontsize=SMALL, color=Colour.ALARM)


def _draw_zeros(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    _bars(axes, {at: layer.zeros for at, layer in enumerate(layers)}, Colour.FAINT, thickness)


def _draw_dead(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """Bars, and the numbers in figures: 1 channel of 512 would not be seen."""
    shares = {at: len(layer.dead_channels) / max(layer.channels, 1) for at, layer in enumerate(layers)}
    _bars(axes, shares, Colour.ALARM, 1.25 * thickness)
    for at, share in shares.items():
        if share:
            text = f"{len(layers[at].dead_channels)} of {layers[at].channels}"
            inside = {"ha": "right", "color": "white"} if share > 0.55 else {"ha": "left", "color": Colour.ALARM}
            write(axes, 100 * share + (-3 if share > 0.55 else 3), at, text, fontsize=SMALL - 0.5, zorder=5, **inside)


def _draw_saturated(axes: Axes, layers: Sequence[LayerStatistics], thickness: float) -> None:
    """Bars where a function is bounded; a tick at 0 tells such a row from one without bounds."""
    shares = {at: layer.saturated for at, layer in enumerate(layers) if layer.saturated is not None}
    _bars(axes, shares, Colour.ORANGE, thickness)
    axes.plot([0] * len(shares), list(shares), "|", color=Colour.INK, ms=thickness, clip_on=False, zorder=4)


def _bars(axes: Axes, shares: dict[int, float], colour: str, thickness: float) -> None:
    # one collection of lines: a rectangle for each of 400 rows takes half a second
    axes.hlines(
        list(shares), 0, [100 * share for share in shares.values()], colors=colour, linewidth=thickness, zorder=3
    )
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 50, 100])
