"""Statistics as an event file of TensorBoard: scalars and a histogram for each layer call."""

from __future__ import annotations

import os
import socket
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.errors import InstallationError, printable
from hookscope.statistics.layer_statistics import LayerStatistics
from hookscope.statistics.quantiles import ValueHistogram
from hookscope.system import StrPath, make_folder, write_atomically

_CUTS = 48  # so many buckets as wide as each other, and about as many that hold as much as each other
_CURE = "pip install 'hookscope[tensorboard]'"
_NAMELESS = "(model)"  # the model itself measured as a layer; a tag that begins with a slash has no group


def check_installed() -> None:
    """Find out before any work whether event files can be made.

    Raises:
        InstallationError: TensorBoard is missing or does not fit what is installed beside it.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ModuleNotFoundError as error:
        missing = (error.name or "tensorboard").partition(".")[0]
        raise InstallationError(f"the package {missing} is not installed", do=_CURE) from error
    except Exception as error:  # one too old for its protobuf or numpy: TypeError, AttributeError, in many lines
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InstallationError(f"cannot import tensorboard: {reason}", do=_CURE) from error


def write_events(
    folder: StrPath, layers: Sequence[LayerStatistics], step: int = 0, about: Mapping[str, str] | None = None
) -> None:
    """Write one new event file to ``folder``, which is made where it is missing; what is there stays.

    A layer has the scalars ``KEY/mean``, ``std``, ``min``, ``max``, ``rms`` (of the finite values), ``zeros`` and
    ``saturated`` (shares from 0 to 1), ``dead``, ``nan`` and ``inf`` (counts), ``rank`` where it was measured, and the
    histogram ``KEY/values``. What a layer does not have is left out. KEY is `LayerStatistics.key`, control characters
    as escapes.

    Args:
        folder: What ``tensorboard --logdir`` takes, or a folder in it.
        layers: In order of execution.
        step: Position on TensorBoard's axis, such as the step of a training run.
        about: Where the numbers come from, by name; a text of TensorBoard.

    Raises:
        InstallationError: TensorBoard is not installed.
        WriteError: the folder or the file cannot be written; no part of a file is left.

    Example:
        >>> import tempfile, torch
        >>> from hookscope.statistics.collector import StatisticsCollector
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU())
        >>> with StatisticsCollector(net) as collector, torch.no_grad():
        ...     _ = net(torch.rand(2, 3, 8, 8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_events(folder, collector.totals.statistics(), step=0, about={"model": "a net"})
        ...     len(os.listdir(folder))
        1
    """
    check_installed()
    make_folder(folder)
    write_atomically(os.path.join(folder, _file_name()), _events(layers, step, about or {}))


def _file_name() -> str:
    """As TensorBoard expects it; it reads the files of a folder in the order of their names."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    return f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"


def _events(layers: Sequence[LayerStatistics], step: int, about: Mapping[str, str]) -> bytes:
    """The content of an event file, by torch's own writer.

    It writes in a thread, which leaves a part of a file when the disk is full: hence to a folder of its own first.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TensorFlow, which it imports where there is one
        from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory(prefix="hookscope-") as folder:
        with SummaryWriter(folder) as writer:
            if about:
                # indented it is verbatim: in Markdown `__init__` would be a bold "init"
                lines = [f"    {printable(f'{name}: {text}')}" for name, text in about.items()]
                writer.add_text("about", "\n".join(lines), step)
            for layer in layers:
                _add(writer, layer, step)
        (entry,) = os.scandir(folder)
        with open(entry.path, "rb") as stream:
            return stream.read()


def _add(writer: Any, layer: LayerStatistics, step: int) -> None:
    tag = printable(layer.key) or _NAMELESS
    for name, value in _scalars(layer).items():
        if value is not None:
            writer.add_scalar(f"{tag}/{name}", value, step)
    if layer.min is not None:
        writer.add_histogram_raw(f"{tag}/values", **_histogram(layer), global_step=step)


def _scalars(layer: LayerStatistics) -> dict[str, float | None]:
    return {
        "mean": layer.mean,
        "std": layer.std,
        "min": layer.min,
        "max": layer.max,
        "rms": layer.rms,
        "zeros": layer.zeros,
        "dead": len(layer.dead_channels),
        "saturated": layer.saturated,
        "nan": layer.nan,
        "inf": layer.inf,
        "rank": layer.rank,
    }


def _histogram(layer: LayerStatistics) -> dict[str, Any]:
    """What TensorBoard keeps of a distribution: its finite values in buckets, and exact sums."""
    count = layer.values - layer.nan - layer.inf
    low, high = layer.min or 0.0, layer.max or 0.0
    limits, counts = buckets(layer.histogram, low, high)
    return {
        "min": low,
        "max": high,
        "num": count,
        "sum": (layer.mean or 0.0) * count,
        "sum_squares": (layer.rms or 0.0) ** 2 * count,
        "bucket_limits": limits.tolist(),
        "bucket_counts": counts.tolist(),
    }


def buckets(histogram: ValueHistogram, low: float, high: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Upper ends and counts ``(B,)`` of at most 100 buckets from ``low`` to ``high``, each beginning where one ended.

    They end where bins of the histogram do, so no count is guessed. Half of them are about as wide as each other, which
    is how TensorBoard draws a histogram; half hold about as much as each other, or one outlier would leave a single
    bucket to all other values and TensorBoard's percentiles nothing to be found from.

    Example:
        >>> import torch
        >>> from hookscope.statistics.quantiles import ValueHistogram
        >>> histogram = ValueHistogram()
        >>> histogram.update(torch.tensor([0.0, 0.0, 1.0, 4.0]))
        >>> limits, counts = buckets(histogram, 0.0, 4.0)
        >>> [(limit, count) for limit, count in zip(limits.tolist(), counts.tolist()) if count]
        [(0.08333333333333333, 2), (1.0078125, 1), (4.0, 1)]
    """
    lower, upper, counts = histogram.bins()
    lower, upper = lower.clip(low, high), upper.clip(low, high)
    ends = np.cumsum(counts)
    shares = np.linspace(0, 1, _CUTS + 1)[1:-1]
    parts = np.linspace(low, high, _CUTS + 1)[1:-1]
    halves = upper[np.searchsorted(ends, shares * ends[-1])]
    cuts = np.concatenate([parts, halves])
    at = np.searchsorted(upper, cuts).clip(max=len(upper) - 1)
    cuts = np.where(cuts > lower[at], upper[at], cuts)  # one within a bin moves to its end, one in a gap stays
    # none at the low end: a bucket without width cannot be drawn
    limits = np.unique(np.append(cuts[(low < cuts) & (cuts < high)], high))
    below = np.append(0, ends)[np.searchsorted(upper, limits, side="right")]
    return limits, np.diff(below, prepend=0)
