"""``hookscope check``: a gate for CI, which ends with 3 when a layer breaks a limit."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import click

from hookscope import hooks, statistics, system
from hookscope.cli import process
from hookscope.cli.output import formats as output
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.image_options import images_argument
from hookscope.cli.shared.measure import MeasureOptions, measure, measuring_options
from hookscope.cli.shared.output_paths import refuse_input
from hookscope.cli.shared.threshold_options import Number, Rank, Share
from hookscope.columns import Column, Columns
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

COLUMNS = Columns(
    Column("limit"),
    Column("index", need=1),
    Column("layer", lambda limit: limit.layer.removesuffix(f" {limit.part}") if limit.part else limit.layer),
    Column("order"),
    Column("part", hide="zero"),
    Column("value"),
    Column("allowed", need=2),
    Column("evidence"),
    Column("weights"),
    Column("channels", where="nested"),
)


@click.command("check", cls=GroupedCommand)
@shared.model_argument()
@images_argument
@click.option("--max-dead", type=Share(), help="Largest allowed share of dead channels in a layer: 5% or 0.05.")
@click.option("--max-saturated", type=Share(), help="Largest allowed share of values within 1 % of a bound.")
@click.option("--no-nan", is_flag=True, help="Allow no NaN and no Inf.")
@click.option("--max-abs", type=Number(), help="Largest allowed absolute value, such as 1e4.")
@click.option(
    "--min-rank",
    type=Rank(),
    help="Smallest allowed effective rank of a layer: a number, or 5% of the maximum.",
)
@shared.selection_option("--allow", "allow", "Layers without limits, as in --layer; repeatable.", metavar="LAYER")
@click.option("--allow-unmeasured", is_flag=True, help="Allow what cannot be checked against a limit.")
@shared.file_option("--junit", "Also write the result as JUnit XML.")
@measuring_options("every call, operations that are not modules, and (model)")
@shared.format_option
def command(
    job: MeasureOptions,
    max_dead: float | None,
    max_saturated: float | None,
    no_nan: bool,
    max_abs: float | None,
    min_rank: tuple[float | None, float | None] | None,
    allow: hooks.Selection | None,
    allow_unmeasured: bool,
    junit: str | None,
    format: str,
) -> None:
    """Check every layer of MODEL against limits, on images; exit with 3 when a limit is broken.

    \b
    Examples:
      hookscope check mobilenet_v3_small samples/ --max-dead 5% --no-nan --max-abs 1e4
      hookscope check my.py:model photos/ --weights my.pth --no-nan --junit report.xml
      hookscope check vgg16 photos/ --max-dead 0 --allow 'classifier.*' --format json

    This command is made for CI. It prints a row for each broken limit, and only the header if no limit is broken. IMAGE
    is a file, a folder, a glob, or - for standard input.

    Without --layer and --type the command checks every call of every module, operations that are not modules, and what
    the model returns, which is called (model). Each is checked only against limits that have a meaning for it:
    --max-saturated for functions with a bound; --max-dead and --min-rank for convolutions, Linear layers, activation
    functions and the model. The summary says how many calls were checked against which limit.

    A value that cannot be measured also breaks a limit, and the row gives the reason: NaN, a chosen layer that did not
    run or returned nothing, too many channels for a rank, or no call with such a value. --allow-unmeasured allows this.
    Without --layer and --type, a layer that did not run breaks a limit only if nothing used its weights.
    """
    limits = statistics.Limits(max_dead, max_saturated, no_nan, max_abs, *(min_rank or (None, None)))
    if not limits.names:
        raise UsageError("no limit was given", do="give --max-dead, --max-saturated, --no-nan, --max-abs or --min-rank")
    images = job.images()
    if junit is not None:
        system.check_writable(junit)
        refuse_input(junit, images)
    every = job.layers is None and not job.types
    if job.ops is None:
        job = replace(job, ops=every)
    saved, lost = measure(job, images, rank="min-rank" in limits.names, every=every, allow=allow)
    layers = saved.totals.statistics()
    result = statistics.check_limits(
        layers, limits, saved.coverage, allow or (), every=every, allow_unmeasured=allow_unmeasured
    )
    nonfinite = [layer.key for layer in statistics.checked_layers(layers, allow or ()) if layer.nan or layer.inf]
    if nonfinite and not limits.no_nan:  # NaN in a few values need not break another limit
        output.note(f"Note: NaN or Inf in {listed(nonfinite, 3)}; --no-nan forbids them")
    with ExitStack() as stack:  # a full disk is no reason to lose the rows
        stack.callback(_report, saved, result, format)
        if junit is not None:
            suite = f"hookscope check {job.model.model}"
            system.write_atomically(junit, statistics.junit_xml(suite, result, lost))
    if result.broken:
        raise click.exceptions.Exit(3)
    if lost:
        raise click.exceptions.Exit(1)


def _report(saved: statistics.SavedStatistics, result: statistics.LimitsResult, format: str) -> None:
    rows = COLUMNS.rows(result.broken, weights=saved.source.weights)
    verdict = f"{saved.source.model} on {counted(saved.totals.images, 'image')}: {result.verdict()}"
    totals = [verdict, *(f"  {line}" for line in result.words())]
    note = f"Note: {verdict}: {'; '.join(result.words())}"
    with process.reader_may_leave():  # the exit status is the result, even when nobody reads the rows
        section = Section(rows, COLUMNS, totals=totals)
        caption = {name: getattr(saved.source, name) for name in ("model", "weights", "preprocess")}
        output.write_report(Report([section], flat_note=note, caption=caption), format)
