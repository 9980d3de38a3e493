"""Statistics drawn: one page with distributions, shares and findings of every call, or an event file of TensorBoard."""

from __future__ import annotations

import math
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.drawing import Colour, Mark, Panel, RowPlot, row_plot, with_types
from hookscope.errors import printable
from hookscope.findings import Finding, default, nonfinite_words, single
from hookscope.statistics.facts import LayerStatistics
from hookscope.system import StrPath, import_extra, make_folder, write_atomically

_MOST_LINES = 10
_BAND = 5.5  # thickness in points
_COMPARABLE = 80.0  # largest ratio of values to the smallest root mean square on one linear scale
_MOST_SIZES = 10.0  # less than 1 % of values are beyond 10 root mean squares (Chebyshev)
_ARROW = "\N{BLACK LEFT-POINTING POINTER}"
_HALF_PRECISION = (default("vanishing-activations", "smallest"), default("exploding-activations", "largest"))
_SIZES_DIFFER = "sizes differ too much for one scale, so each row of values is divided by its root mean square (rms)"


@dataclass(frozen=True)
class StatisticsRow:
    """A layer call, and the ``unit`` in which its values are drawn."""

    layer: LayerStatistics
    unit: float = 1.0

    def values(self, *values: float | None) -> tuple[float, ...] | None:
        """``values`` in units of the row; None without finite values."""
        return tuple((value or 0.0) / self.unit for value in values) if self.layer.quantiles else None

    @property
    def largest(self) -> float:
        return max(-(self.layer.min or 0.0), self.layer.max or 0.0)

    @property
    def size(self) -> float | None:
        return self.layer.rms if self.layer.rms and math.isfinite(self.layer.rms) else None

    @property
    def dead(self) -> float:
        return len(self.layer.dead_channels) / max(self.layer.channels, 1)


def _band(low: float, high: float) -> Callable[[StatisticsRow], Any]:
    return lambda row: row.values(*map(row.layer.quantiles.get, (low, high)))


def _one(value: Callable[[LayerStatistics], float | None]) -> Callable[[StatisticsRow], Any]:
    return lambda row: (row.values(value(row.layer)) or [None])[0]


def _dead_words(row: StatisticsRow) -> tuple[float, str] | None:
    return (row.dead, f"{len(row.layer.dead_channels)} of {row.layer.channels}") if row.dead else None


VALUE_MARKS = [
    Mark(
        "line", lambda row: row.values(row.layer.min, row.layer.max), Colour.FAINT, "thin line lowest to highest", 0.8
    ),
    Mark("line", _band(0.01, 0.99), "#cfe3f2", "light to dark blue 98, 90 and 50 % of the values", _BAND),
    Mark("line", _band(0.05, 0.95), Colour.SKY, size=_BAND),
    Mark("line", _band(0.25, 0.75), Colour.BLUE, size=_BAND),
    Mark("tick", _one(lambda layer: layer.quantiles.get(0.5)), "white", "white tick median", _BAND),
    Mark("dot", _one(lambda layer: layer.mean), Colour.ORANGE, "orange dot mean", 2.4),
    Mark(
        "text",
        lambda row: "" if row.layer.quantiles else "no finite value" if row.layer.values else "no value",
        Colour.ALARM,
    ),
]
"""What the panel of values draws of a `StatisticsRow`."""

STATISTICS_PANELS = [
    Panel(
        "NaN, Inf",
        1.7,
        # as text, because a bar of 3 in a million is invisible
        [Mark("text", lambda row: nonfinite_words(row.layer.nan, row.layer.inf).replace(" and", ","), Colour.ALARM)],
    ),
    Panel("zeros", 1.0, [Mark("bar", lambda row: row.layer.zeros, Colour.FAINT)], "share"),
    Panel(
        "dead channels",
        1.6,
        [
            Mark("bar", lambda row: row.dead, Colour.ALARM, "channels with one constant value", 0.7),
            Mark("text", _dead_words, Colour.ALARM),  # because a bar of 1 in 512 channels is invisible
        ],
        "share",
    ),
    Panel(
        "saturated",
        1.0,
        [
            Mark("bar", lambda row: row.layer.saturated, Colour.ORANGE, "values within 1 % of a bound"),
            Mark("tick", lambda row: row.layer.saturated and 0.0, Colour.INK, "| the function has a bound", _BAND),
        ],
        "share",
    ),
]
"""The panels of `statistics_plot` after the values, from left to right."""


def statistics_plot(layers: Sequence[LayerStatistics], findings: Sequence[Finding] | None = None) -> RowPlot:
    """A row for each of ``layers``; rows with findings name them, and one row is marked to start with.

    Panels: distribution of the values, NaN and Inf, zeros, dead channels, saturation. If layers differ by orders of
    magnitude, each distribution is drawn in units of its own root mean square, which has a logarithmic panel of its
    own. A line above the rows summarises each kind of finding; findings that are None are not mentioned.
    """
    given, findings = findings is not None, list(single(findings or ()))
    said = with_types(findings, {layer.key: layer.call.type for layer in layers})
    colour = Colour.ALARM if any(finding.severity != "note" for finding in findings) else Colour.INK
    first = _first_row(layers, findings)
    rows, values, legend = _values(layers)
    shares = {
        "zeros": [layer.zeros for layer in layers],
        "dead channels": [row.dead for row in rows],
        "saturated values": [layer.saturated for layer in layers if layer.saturated is not None],
    }
    absent = [name for name, values in shares.items() if values and not any(values)]
    others = STATISTICS_PANELS[: 4 if any(shares["saturated values"]) else 3]
    return row_plot(
        rows,
        [*values, *others],
        [f"{layer.key}  {layer.call.type}" for layer in layers],
        _marks(layers, findings, first),
        [(line, colour) for line in (_summary(said) if given else [])],
        legend=legend,
        keys=[f"no {' or '.join(absent)}"] if absent else [],
        first=first,
    )


def _values(layers: Sequence[LayerStatistics]) -> tuple[list[StatisticsRow], list[Panel], list[str]]:
    """The rows, the panels of their values, and a line for the legend.

    If no linear scale suits all rows, each is drawn in units of its own root mean square, which has a panel of its own.
    """
    rows = [StatisticsRow(layer) for layer in layers]
    sizes = {at: row.size for at, row in enumerate(rows) if row.size}
    if not sizes or max(row.largest for row in rows) <= _COMPARABLE * min(sizes.values()):
        return rows, [Panel("values", 4.6, VALUE_MARKS)], []
    least, most = min(sizes.values()), max(rows[at].largest for at in sizes)
    limits = [limit for limit in _HALF_PRECISION if least < limit < most]
    rows = [replace(row, unit=row.size or 1.0) for row in rows]
    bands = [ends for row in rows if (ends := _band(0.01, 0.99)(row))]
    low = max(min((low for low, _ in bands), default=-1.0) * 1.25, -_MOST_SIZES)
    high = min(max((high for _, high in bands), default=1.0) * 1.25, _MOST_SIZES)
    size_marks = [
        Mark("line", lambda row: row.size and (row.size, row.largest), Colour.FAINT, "line to the largest value", 0.8),
        Mark("tick", lambda row: limits, Colour.ALARM, "red dashes the limits of half precision", 6.0),
        Mark("dot", lambda row: row.size, Colour.BLUE, "dot rms", 3.2),
    ]
    panels = [
        Panel("values / rms", 3.6, VALUE_MARKS, limits=(min(low, -1.0), max(high, 1.0))),
        Panel("root mean square (rms)", 2.4, size_marks, "log", decades=600),
    ]
    return rows, panels, [_SIZES_DIFFER]


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
    channels = finding.numbers.get("channels")
    if finding.channels and channels:
        return len(finding.channels) / float(channels)
    return float(finding.numbers.get("saturated") or 0.0)


def _marks(layers: Sequence[LayerStatistics], findings: Sequence[Finding], first: int | None) -> dict[int, str]:
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


_CUTS = 48  # buckets of equal width, and about as many of equal count
_SCALARS = ("mean", "std", "min", "max", "rms", "zeros", "saturated", "nan", "inf", "rank")
_NAMELESS = "(model)"  # the model itself as a layer; a tag that begins with a slash has no group


def check_installed() -> None:
    """Check that TensorBoard can be imported.

    Raises:
        InstallationError: TensorBoard is missing or does not fit the other installed packages.
    """
    for module in ("compat.proto.event_pb2", "summary.writer.event_file_writer"):
        import_extra(f"tensorboard.{module}", "tensorboard")


def write_events(
    folder: StrPath, layers: Sequence[LayerStatistics], step: int = 0, about: Mapping[str, str] | None = None
) -> None:
    """Write one new event file to ``folder``, which is created if it is missing.

    A layer has the scalars ``KEY/mean``, ``std``, ``min``, ``max``, ``rms`` (of the finite values), ``zeros`` and
    ``saturated`` (shares from 0 to 1), ``dead``, ``nan`` and ``inf`` (counts), ``rank`` if it was measured, and the
    histogram ``KEY/values``. KEY is `LayerStatistics.key` with control characters escaped.

    ``step`` is the position on TensorBoard's axis, such as the step of a training run. ``about`` is the source of the
    numbers by name; TensorBoard shows it as a text.

    Raises:
        InstallationError: TensorBoard is not installed.
        WriteError: The folder or the file cannot be written; no partial file remains.
    """
    check_installed()
    make_folder(folder)
    seconds, rest = divmod(time.time_ns(), 10**9)
    # TensorBoard's form of a name: it reads the files of a folder in the order of their names
    name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
    write_atomically(os.path.join(folder, name), _events(layers, step, about or {}))


def _events(layers: Sequence[LayerStatistics], step: int, about: Mapping[str, str]) -> bytes:
    """The content of an event file.

    The writer of torch leaves a partial file when the disk is full, so it writes to a temporary folder.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from TensorFlow, which is imported if it is installed
        from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory(prefix="hookscope-") as folder:
        with SummaryWriter(folder) as writer:
            if about:
                # indented text is verbatim: Markdown would make `__init__` a bold "init"
                lines = [f"    {printable(f'{name}: {text}')}" for name, text in about.items()]
                writer.add_text("about", "\n".join(lines), step)
            for layer in layers:
                _add(writer, layer, step)
        (entry,) = os.scandir(folder)
        with open(entry.path, "rb") as stream:
            return stream.read()


def _add(writer: Any, layer: LayerStatistics, step: int) -> None:
    tag = printable(layer.key) or _NAMELESS
    scalars = {name: getattr(layer, name) for name in _SCALARS} | {"dead": len(layer.dead_channels)}
    for name, value in scalars.items():
        if value is not None:
            writer.add_scalar(f"{tag}/{name}", value, step)
    if layer.min is not None:
        writer.add_histogram_raw(f"{tag}/values", **_histogram(layer), global_step=step)


def _histogram(layer: LayerStatistics) -> dict[str, Any]:
    count = layer.values - layer.nan - layer.inf
    low, high = layer.min or 0.0, layer.max or 0.0
    limits, counts = buckets(layer.histogram.bins(), low, high)
    sums = {"num": count, "sum": (layer.mean or 0.0) * count, "sum_squares": (layer.rms or 0.0) ** 2 * count}
    return {"min": low, "max": high, **sums, "bucket_limits": limits.tolist(), "bucket_counts": counts.tolist()}


def buckets(
    bins: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]], low: float, high: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Upper ends and counts ``(B,)`` of at most 100 adjacent buckets from ``low`` to ``high``.

    They end at ``bins`` of a `ValueHistogram`, so counts are exact. Half of the buckets have about equal width, which
    suits TensorBoard's drawing. The other half have about equal counts: otherwise one outlier would push all other
    values into one bucket, and TensorBoard's percentiles would be useless.
    """
    lower, upper, counts = bins
    lower, upper = lower.clip(low, high), upper.clip(low, high)
    ends = np.cumsum(counts)
    shares = np.linspace(0, 1, _CUTS + 1)[1:-1]
    parts = np.linspace(low, high, _CUTS + 1)[1:-1]
    halves = upper[np.searchsorted(ends, shares * ends[-1])]
    cuts = np.concatenate([parts, halves])
    at = np.searchsorted(upper, cuts).clip(max=len(upper) - 1)
    cuts = np.where(cuts > lower[at], upper[at], cuts)  # a cut within a bin moves to its end, a cut in a gap stays
    # no cut at the low end: a bucket without width cannot be drawn
    limits = np.unique(np.append(cuts[(low < cuts) & (cuts < high)], high))
    below = np.append(0, ends)[np.searchsorted(upper, limits, side="right")]
    return limits, np.diff(below, prepend=0)
