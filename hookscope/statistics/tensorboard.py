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
from hookscope.system import StrPath, make_folder, write_atomically

_CUTS = 48  # buckets of equal width, and about as many of equal count
_SCALARS = ("mean", "std", "min", "max", "rms", "zeros", "saturated", "nan", "inf", "rank")
_CURE = "pip install 'hookscope[tensorboard]'"
_NAMELESS = "(model)"  # the model itself as a layer; a tag that begins with a slash has no group


def check_installed() -> None:
    """Check that TensorBoard can be imported.

    Raises:
        InstallationError: TensorBoard is missing or does not fit the other installed packages.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ModuleNotFoundError as error:
        missing = (error.name or "tensorboard").partition(".")[0]
        raise InstallationError(f"the package {missing} is not installed", do=_CURE) from error
    except Exception as error:  # TypeError or AttributeError of many lines if it is too old for protobuf or numpy
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InstallationError(f"cannot import tensorboard: {reason}", do=_CURE) from error


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
    """TensorBoard's form of a distribution: buckets of the finite values, and exact sums."""
    count = layer.values - layer.nan - layer.inf
    low, high = layer.min or 0.0, layer.max or 0.0
    limits, counts = buckets(layer.histogram.bins(), low, high)
    return {
        "min": low,
        "max": high,
        "num": count,
        "sum": (layer.mean or 0.0) * count,
        "sum_squares": (layer.rms or 0.0) ** 2 * count,
        "bucket_limits": limits.tolist(),
        "bucket_counts": counts.tolist(),
    }


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
