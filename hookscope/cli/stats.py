"""``hookscope stats``: statistics of every layer over many images, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.image_options import images_argument
from hookscope.cli.measuring import Job, Share, images_of, measure, measuring_options
from hookscope.cli.options import chosen_format, format_option, model_argument
from hookscope.cli.report import write_report
from hookscope.errors import UsageError

if TYPE_CHECKING:
    from hookscope.findings import Finding
    from hookscope.health import Thresholds
    from hookscope.saved_statistics import SavedTally
    from hookscope.statistics import LayerStatistics, Place

FIELDS = (
    "index", "name", "type", "call", "calls", "shape", "images", "mean", "std", "min", "max", "min_at", "max_at", "rms",
    "zeros", "p1", "p5", "p25", "p50", "p75", "p95", "p99", "nan", "inf", "channels", "dead", "saturated", "duplicate",
    "rank", "findings", "weights",
)  # fmt: skip
TABLE_FIELDS = (
    "index", "name", "type", "call", "shape", "mean", "std", "min", "max", "zeros", "dead", "saturated", "duplicate",
    "findings",
)  # fmt: skip
CHANNEL_FIELDS = (
    "index", "name", "call", "channel", "mean", "std", "min", "max", "zeros", "nan", "inf", "dead", "saturated",
    "duplicate_of", "weights",
)  # fmt: skip


@click.command("stats")
@model_argument()
@images_argument
@measuring_options
@click.option("--rank", is_flag=True, help="Measure the effective rank of each layer's channels too; takes longer.")
@click.option("--per-channel", is_flag=True, help="A row for each channel.")
@click.option("--save", metavar="FILE", type=click.Path(), help="Keep what was counted, to merge or to resume.")
@click.option("--resume", is_flag=True, help="Go on where the run that wrote the --save file was cut short.")
@click.option("--merge", is_flag=True, help="The arguments are --save files of one model: join them.")
@click.option(
    "--plot", metavar="FILE", type=click.Path(), help="Draw distributions, dead and saturated shares: png, svg or pdf."
)
@click.option(
    "--tensorboard", metavar="DIR", type=click.Path(), help="Write scalars and histograms for TensorBoard to DIR."
)
@click.option(
    "--dead-share", type=Share(), default=0.0, help="Dead channels are a finding above this share.  [default: 0%]"
)
@click.option(
    "--saturated-share", type=Share(), default=0.5, help="Saturation is a finding above this share.  [default: 50%]"
)
@click.option(
    "--vanishing",
    metavar="RMS",
    type=click.FloatRange(0),
    default=2.0**-14,
    show_default=True,
    help="Root mean square below which activations vanish; half precision's smallest normal number.",
)
@click.option(
    "--exploding",
    metavar="ABS",
    type=click.FloatRange(0),
    default=65504.0,
    show_default=True,
    help="Absolute value above which activations explode; half precision's largest number.",
)
@click.option(
    "--duplicate-correlation",
    metavar="R",
    type=click.FloatRange(0, 1),
    default=0.999,
    show_default=True,
    help="Pearson correlation from which channels are duplicates.",
)
@click.option(
    "--low-rank",
    type=Share(),
    default=0.01,
    help="With --rank: an effective rank below this share of the channels is a finding.  [default: 1%]",
)
@click.option(
    "--drift-shift",
    metavar="STD",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="How many running standard deviations a BatchNorm's inputs may be off.",
)
@click.option(
    "--drift-ratio",
    metavar="TIMES",
    type=click.FloatRange(1),
    default=4.0,
    show_default=True,
    help="How many times the running variance theirs may be, or the other way round.",
)
@click.option(
    "--few-images",
    metavar="N",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    help="With fewer images, a claim of death is marked as one on few.",
)
@format_option
def command(model: str, images: tuple[str, ...], limit: int | None, files0_from: str | None, **options: Any) -> None:
    """Measure every layer of MODEL on images, and say what is wrong.

    IMAGE is a file, a folder, or - for standard input. One forward pass a batch counts every convolution and every
    activation function: mean, spread, range and where it was reached, zeros, quantiles, NaN and Inf, dead, saturated
    and duplicate channels. Findings follow the table, each with its evidence and what people do about it; in tsv and
    csv their names stand in the column of that name. In ndjson every line says by "row" what it is.

    \b
    Examples:
      hookscope stats resnet34 cat.jpg
      hookscope stats vgg16 samples/ --type ReLU --plot vgg16.png
      find photos -name '*.jpg' -print0 | hookscope stats resnet50 --files0-from - --format ndjson
      hookscope stats resnet34 photos/ --limit 1000 --save a.json
      hookscope stats --merge a.json b.json
    """
    from hookscope.health import Thresholds, find_problems

    thresholds = Thresholds(
        dead=options["dead_share"],
        saturated=options["saturated_share"],
        smallest=options["vanishing"],
        largest=options["exploding"],
        correlation=options["duplicate_correlation"],
        rank=options["low_rank"],
        shift=options["drift_shift"],
        ratio=options["drift_ratio"],
        images=options["few_images"],
    )
    _check_targets(options["plot"], options["tensorboard"], options["save"])
    if options["resume"] and options["save"] is None:
        raise UsageError("--resume without --save", do="name the file of the run to go on with: --save FILE --resume")
    if options["merge"]:
        saved, lost = _merged([model, *images], files0_from, options["save"]), 0
    else:
        saved, lost = measure(_job(model, images_of(images, files0_from, limit), options))
    layers = saved.tally.statistics(thresholds.correlation)
    findings = find_problems(layers, saved.tally.drifts(), saved.tally.images, thresholds)
    _draw(options["plot"], saved, layers, findings, thresholds)
    _log(options["tensorboard"], saved, layers)
    _report(saved, layers, findings, chosen_format(options["format"]), options["per_channel"])
    if lost:
        raise click.exceptions.Exit(1)


def _job(model: str, paths: Sequence[str], options: Mapping[str, Any]) -> Job:
    names = [field.name for field in fields(Job) if field.name in options]
    return Job(model, paths, **{name: options[name] for name in names})


def _check_targets(plot: str | None, tensorboard: str | None, save: str | None) -> None:
    """Whatever can be known to fail after minutes of work is told before."""
    from hookscope.files import check_folder, check_writable

    if plot is not None:
        from hookscope.figures import plot_suffix

        plot_suffix(plot)
        check_writable(plot)
    if tensorboard is not None:
        from hookscope.tensorboard import check_installed

        check_installed()
        check_folder(tensorboard)
    if save is not None:
        check_writable(save)
    if plot is not None and plot == save:
        raise UsageError(f"--plot and --save name the same file '{plot}'")


def _merged(paths: Sequence[str], files0_from: str | None, save: str | None) -> SavedTally:
    from hookscope.saved_statistics import merge_tallies, save_tally

    if files0_from is not None:
        raise UsageError("--merge takes saved statistics, and --files0-from names images", do="leave one out")
    merged = merge_tallies(paths)
    if save is not None:
        save_tally(save, merged)
    return merged


def _report(
    saved: SavedTally, layers: Sequence[LayerStatistics], findings: Sequence[Finding], format: str, per_channel: bool
) -> None:
    stream = process.standard_output()
    rows = list(layer_rows(layers, findings, saved.source.weights))
    if per_channel:
        channels = channel_rows(layers, saved.source.weights)
        about = {"layers": rows}
        write_report(channels, CHANNEL_FIELDS, findings, format, stream, kind="channel", about=about)
        return
    fields = TABLE_FIELDS if format == "table" else FIELDS
    write_report(rows, fields, findings, format, stream, _totals(saved, layers))


def layer_rows(
    layers: Sequence[LayerStatistics], findings: Sequence[Finding], weights: str
) -> Iterator[dict[str, Any]]:
    """A row for each layer call; what is too long for a column has a field that only JSON shows."""
    named: dict[str, list[str]] = {}
    for found in findings:
        named.setdefault(found.layer, []).append(found.finding)
    for layer in layers:
        quantiles = {f"p{100 * share:g}": value for share, value in layer.quantiles.items()}
        yield {
            "index": layer.call.index,
            "name": f"{layer.call.name} {layer.part}" if layer.part else layer.call.name,
            "type": layer.call.type,
            "call": layer.call.call,
            "calls": layer.calls,
            "shape": list(layer.shape),
            "images": layer.items,
            "mean": layer.mean,
            "std": layer.std,
            "min": layer.min,
            "max": layer.max,
            "min_at": _place(layer.low_at),
            "max_at": _place(layer.high_at),
            "rms": layer.rms,
            "zeros": layer.zeros,
            **quantiles,
            "nan": layer.nan,
            "inf": layer.inf,
            "channels": layer.channels,
            "dead": len(layer.dead_channels),
            "saturated": layer.saturated,
            "duplicate": sum(len(group) - 1 for group in layer.duplicate_channels),
            "rank": layer.rank,
            "findings": ",".join(named.get(layer.key, ())) or None,
            "weights": weights,
            "dead_channels": list(layer.dead_channels),
            "duplicate_channels": [list(group) for group in layer.duplicate_channels],
            "nonfinite_at": _place(layer.nonfinite_at),
        }


def _place(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {"image": place.image, "channel": place.channel, "position": list(place.position)}


def channel_rows(layers: Sequence[LayerStatistics], weights: str) -> Iterator[dict[str, Any]]:
    """A row for each channel of each layer call."""
    for layer in layers:
        m, dead = layer.by_channel, set(layer.dead_channels)
        first = {at: group[0] for group in layer.duplicate_channels for at in group[1:]}
        for at in range(layer.channels):
            some = int(m.count[at]) > 0
            yield {
                "index": layer.call.index,
                "name": f"{layer.call.name} {layer.part}" if layer.part else layer.call.name,
                "call": layer.call.call,
                "channel": at,
                "mean": float(m.mean[at]) if some else None,
                "std": float(m.variance[at]) ** 0.5 if some else None,
                "min": float(m.low[at]) if some else None,
                "max": float(m.high[at]) if some else None,
                "zeros": float(m.zeros[at] / max(1, m.count[at] + m.nan[at] + m.inf[at])),
                "nan": int(m.nan[at]),
                "inf": int(m.inf[at]),
                "dead": at in dead,
                "saturated": None if layer.saturated_by_channel is None else float(layer.saturated_by_channel[at]),
                "duplicate_of": first.get(at),
                "weights": weights,
            }


def _totals(saved: SavedTally, layers: Sequence[LayerStatistics]) -> list[str]:
    images = saved.tally.images
    pictures = "1 image" if images == 1 else f"{images:,} images"
    values = sum(layer.values for layer in layers)
    return [
        f"{saved.source.model} on {pictures}, weights {saved.source.weights}",
        f"{len(layers)} calls, {values:,} values; zeros and saturated are shares, dead and duplicate count channels",
    ]


def _draw(
    path: str | None,
    saved: SavedTally,
    layers: Sequence[LayerStatistics],
    findings: Sequence[Finding],
    thresholds: Thresholds,
) -> None:
    if path is None:
        return
    from hookscope.figures import figure_bytes, plot_suffix
    from hookscope.files import write_atomically
    from hookscope.stats_figure import draw_statistics

    about = f"{saved.source.model}, {saved.tally.images} images, weights {saved.source.weights}"
    figure = draw_statistics(layers, findings, about)
    write_atomically(path, figure_bytes(figure, plot_suffix(path)))


def _log(folder: str | None, saved: SavedTally, layers: Sequence[LayerStatistics]) -> None:
    if folder is None:
        return
    from hookscope.tensorboard import write_events

    write_events(folder, layers, step=0, about={"model": saved.source.model, "weights": saved.source.weights})
