"""``hookscope check``: a gate for CI, which ends with 3 when a layer breaks a limit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click

from hookscope import hooks, statistics, system
from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.output.report import Report
from hookscope.cli.shared.image_options import image_list, images_argument
from hookscope.cli.shared.measure import MeasureOptions, measure, measuring_options
from hookscope.cli.shared.model import ModelOptions
from hookscope.cli.shared.options import complete_layers, format_option, model_argument
from hookscope.cli.shared.output_paths import refuse_input
from hookscope.cli.shared.threshold_options import Number, Rank, Share
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

FIELDS = ("limit", "index", "layer", "value", "allowed", "evidence", "weights")


@dataclass(frozen=True)
class Options:
    """The options of this command beside those of the measurement."""

    max_dead: float | None
    max_saturated: float | None
    no_nan: bool
    max_abs: float | None
    min_rank: tuple[float | None, float | None] | None
    junit: str | None
    limit: int | None
    files0_from: str | None
    format: str

    def limits(self) -> statistics.Limits:
        """The limits.

        Raises:
            UsageError: there is no limit.
        """
        directions, share = self.min_rank or (None, None)
        limits = statistics.Limits(self.max_dead, self.max_saturated, self.no_nan, self.max_abs, directions, share)
        if not limits.names:
            raise UsageError(
                "no limit was given", do="give --max-dead, --max-saturated, --no-nan, --max-abs or --min-rank"
            )
        return limits


@click.command("check")
@model_argument()
@images_argument
@click.option("--max-dead", type=Share(), help="Largest share of dead channels in a layer: 5% or 0.05.")
@click.option("--max-saturated", type=Share(), help="Largest share of values within 1 % of a bound.")
@click.option("--no-nan", is_flag=True, help="Allow no NaN and no Inf.")
@click.option("--max-abs", type=Number(), help="Largest absolute value: 1e4.")
@click.option(
    "--min-rank", type=Rank(), help="Smallest effective rank of a layer: a number of directions, or 5% of the maximum."
)
@click.option(
    "--allow",
    metavar="LAYER",
    multiple=True,
    shell_complete=complete_layers,
    help="Layers without limits: a selection as in --layer; repeatable.",
)
@click.option("--junit", metavar="FILE", type=click.Path(), help="Write the result as JUnit XML too.")
@measuring_options
@format_option
def command(model: ModelOptions, paths: tuple[str, ...], **values: Any) -> None:
    """Check every layer of MODEL against limits, on images; exit with 3 when a limit is broken.

    This command is made for CI. It prints a row for each broken limit, and only the header when all is well. It
    measures what `stats` measures: without `--layer`, every convolution and every activation function.

    \b
    Examples:
      hookscope check mobilenet_v3_small samples/ --max-dead 5% --no-nan --max-abs 1e4
      hookscope check my.py:model photos/ --weights my.pth --no-nan --junit report.xml
      hookscope check vgg16 photos/ --max-dead 0 --allow 'classifier.*' --format json
    """
    options = Options(**{name: values.pop(name) for name in Options.__dataclass_fields__})
    limits, allow = options.limits(), values["allow"]
    if allow:
        hooks.Selection(allow)
    images = image_list(paths, options.files0_from, options.limit)
    if options.junit is not None:
        system.check_writable(options.junit)
        refuse_input(options.junit, images)
    saved, lost = measure(MeasureOptions(model, images, rank="min-rank" in limits.names, **values))
    layers = statistics.held_layers(saved.totals.statistics(), allow)
    broken = statistics.broken_limits(layers, limits)
    nonfinite = [layer.key for layer in layers if layer.nan or layer.inf]
    if nonfinite and not limits.no_nan:  # a model that gives nothing but NaN breaks no other limit
        output.note(f"Note: NaN or Inf in {listed(nonfinite, 3)}; --no-nan forbids them")
    with ExitStack() as stack:  # a full disk is no reason to lose the rows
        stack.callback(_report, saved, layers, limits, broken, options.format)
        if options.junit is not None:
            keys = [layer.key for layer in layers]
            suite = f"hookscope check {model.model}"
            system.write_atomically(options.junit, statistics.junit_xml(suite, limits.names, keys, broken, lost))
    if broken:
        raise click.exceptions.Exit(3)
    if lost:
        raise click.exceptions.Exit(1)


def _report(
    saved: statistics.SavedStatistics,
    layers: Sequence[statistics.LayerStatistics],
    limits: statistics.Limits,
    broken: Sequence[statistics.BrokenLimit],
    format: str,
) -> None:
    own = [name for name in (*FIELDS, "channels") if name != "weights"]
    rows = [{**{name: getattr(each, name) for name in own}, "weights": saved.source.weights} for each in broken]
    count = len({each.layer for each in broken})
    verdict = f"{count} of {len(layers)} calls break a limit" if count else f"all {len(layers)} calls are within"
    verdict = verdict if layers else "there is no call to check"
    total = f"{saved.source.model} on {counted(saved.totals.images, 'image')}: {verdict} ({', '.join(limits.names)})"
    with process.reader_may_leave():  # the exit status is the result, even when nobody reads the rows
        output.write_report(Report.of_rows(rows, FIELDS, [total], more_fields=["channels"]), format)
