"""``hookscope check``: a gate for CI, which ends with 3 when a layer breaks a limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.shared.image_options import image_list, images_argument
from hookscope.cli.shared.measure import MeasureOptions, measure, measuring_options
from hookscope.cli.shared.options import chosen_format, complete_layers, format_option, model_argument
from hookscope.cli.shared.threshold_options import Number, Rank, Share
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

if TYPE_CHECKING:
    from hookscope.statistics import BrokenLimit, LayerStatistics, Limits, SavedStatistics

FIELDS = ("limit", "index", "layer", "value", "allowed", "evidence", "weights")


@click.command("check")
@model_argument()
@images_argument
@click.option("--max-dead", type=Share(), help="Largest share of dead channels in a layer: 5% or 0.05.")
@click.option("--max-saturated", type=Share(), help="Largest share of values within 1 % of a bound.")
@click.option("--no-nan", is_flag=True, help="No NaN and no Inf anywhere.")
@click.option("--max-abs", type=Number(), help="Largest absolute value: 1e4.")
@click.option("--min-rank", type=Rank(), help="Least effective rank of a layer: directions, or 5% of what it can be.")
@click.option(
    "--allow",
    metavar="LAYER",
    multiple=True,
    shell_complete=complete_layers,
    help="No limit for these layers: a selection as in --layer; repeatable.",
)
@click.option("--junit", metavar="FILE", type=click.Path(), help="Write the result as JUnit XML too.")
@measuring_options
@format_option
def command(
    model: str,
    images: tuple[str, ...],
    max_dead: float | None,
    max_saturated: float | None,
    no_nan: bool,
    max_abs: float | None,
    min_rank: tuple[float | None, float | None] | None,
    allow: tuple[str, ...],
    junit: str | None,
    limit: int | None,
    files0_from: str | None,
    format: str | None,
    **options: Any,
) -> None:
    """Hold every layer of MODEL against limits, on images; exit with 3 when one is broken.

    Made for CI: a row for each broken limit, nothing but the header when all is well. What is measured is what `stats`
    measures, without `--layer` every convolution and every activation function.

    \b
    Examples:
      hookscope check mobilenet_v3_small samples/ --max-dead 5% --no-nan --max-abs 1e4
      hookscope check my.py:model photos/ --weights my.pth --no-nan --junit report.xml
      hookscope check vgg16 photos/ --max-dead 0 --allow 'classifier.*' --format json
    """
    from hookscope.cli.shared.output_paths import refuse_input
    from hookscope.hooks import Selection
    from hookscope.statistics import Limits, broken_limits, held_layers
    from hookscope.system import check_writable

    directions, share = min_rank or (None, None)
    limits = Limits(max_dead, max_saturated, no_nan, max_abs, directions, share)
    if not limits.names:
        raise UsageError("no limit was given", do="give --max-dead, --max-saturated, --no-nan, --max-abs or --min-rank")
    if allow:
        Selection(allow)
    paths = image_list(images, files0_from, limit)
    if junit is not None:
        check_writable(junit)
        refuse_input(junit, paths)
    saved, lost = measure(MeasureOptions(model, paths, rank="min-rank" in limits.names, allow=allow, **options))
    layers = held_layers(saved.totals.statistics(), allow)
    offences = broken_limits(layers, limits)
    if not limits.no_nan:
        _tell_of_nan(layers)
    with ExitStack() as stack:  # a full disk is no reason to lose the rows
        stack.callback(_report, saved, layers, limits, offences, chosen_format(format))
        if junit is not None:
            _write_junit(junit, model, limits, layers, offences, lost)
    if offences:
        raise click.exceptions.Exit(3)
    if lost:
        raise click.exceptions.Exit(1)


def _tell_of_nan(layers: Sequence[LayerStatistics]) -> None:
    """No limit but --no-nan sees a NaN, and a model of nothing else would pass for healthy."""
    bad = [layer.key for layer in layers if layer.nan or layer.inf]
    if bad:
        output.note(f"Note: NaN or Inf in {listed(bad, 3)}; --no-nan forbids them")


def _write_junit(
    path: str, model: str, limits: Limits, layers: Sequence[LayerStatistics], offences: Sequence[BrokenLimit], lost: int
) -> None:
    from hookscope.statistics import junit_xml
    from hookscope.system import write_atomically

    suite = f"hookscope check {model}"
    write_atomically(path, junit_xml(suite, limits.names, [layer.key for layer in layers], offences, lost))


def _report(
    saved: SavedStatistics,
    layers: Sequence[LayerStatistics],
    limits: Limits,
    offences: Sequence[BrokenLimit],
    format: str,
) -> None:
    rows = [
        {
            "limit": offence.limit,
            "index": offence.index,
            "layer": offence.layer,
            "value": offence.value,
            "allowed": offence.allowed,
            "evidence": offence.evidence,
            "weights": saved.source.weights,
            **({"channels": offence.channels} if format in ("json", "ndjson") else {}),
        }
        for offence in offences
    ]
    broken = len({offence.layer for offence in offences})
    verdict = f"{broken} of {len(layers)} calls break a limit" if broken else f"all {len(layers)} calls are within"
    verdict = verdict if layers else "no call is left to hold against a limit"
    totals = [f"{saved.source.model} on {counted(saved.totals.images, 'image')}: {verdict} ({', '.join(limits.names)})"]
    fields = (*FIELDS, "channels") if format in ("json", "ndjson") else FIELDS
    with process.reader_may_leave():  # the status is the result, whoever reads the rows
        output.write_rows(rows, fields, format, process.standard_output(), totals)
