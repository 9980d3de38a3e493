"""Check every layer against limits, for CI."""

from __future__ import annotations

from hookscope import comparison, hooks, statistics, system
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.long_run import Measuring
from hookscope.columns import Column, Columns
from hookscope.errors import UsageError
from hookscope.findings import CATALOGUE, counted, listed

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


class Check(Measuring):
    """Check every layer of MODEL against limits, on images; exit with 3 when a limit is broken.

    \b
    Examples:
      hookscope check mobilenet_v3_small samples/ --max-dead 5% --no-nan --max-abs 1e4
      hookscope check my.py:model photos/ --weights my.pth --no-nan --junit report.xml
      hookscope check resnet50 photos/ --reference healthy.json --max-shift 0.2
      hookscope check vgg16 photos/ --max-dead 0 --allow 'classifier.*' --format json

    This command is made for CI. It prints a row for each broken limit, and only the header if no limit is broken. IMAGE
    is a file, a folder, a glob, or - for standard input.

    Without --layer and --type the command checks every call of every module, operations that are not modules, and what
    the model returns, which is called (model). Each is checked only against limits that have a meaning for it:
    --max-saturated for functions with a bound; --max-dead and --min-rank for convolutions, Linear layers, activation
    functions and the model. The summary says how many calls were checked against which limit.

    --reference compares every module with what it did when the reference was saved, and the images with the images of
    the reference. The first call that left its range breaks the limit; with --max-shift or --max-dead-more, every call
    beyond the limit breaks it.

    A value that cannot be measured also breaks a limit, and the row gives the reason: NaN, a chosen layer that did not
    run or returned nothing, too many channels for a rank, or no call with such a value. --allow-unmeasured allows this.
    Without --layer and --type, a layer that did not run breaks a limit only if nothing used its weights.
    """

    layers: hooks.Selection | None = shared.calls_option(
        "Calls to measure", "every call, operations that are not modules, and (model)"
    )
    max_dead: float | None = option("Largest allowed share of dead channels in a layer: 5% or 0.05.", type=shared.share)
    max_saturated: float | None = option("Largest allowed share of values within 1 % of a bound.", type=shared.share)
    no_nan: bool = option("Allow no NaN and no Inf.")
    reference: str | None = shared.reference_option()
    max_shift: float | None = option(
        "Largest allowed shift of the means of a layer, in standard deviations.",
        type=shared.number_from(),
        needs="reference",
    )
    max_dead_more: float | None = option(
        "Largest allowed share of channels that are dead now and were alive in the reference.",
        type=shared.share,
        needs="reference",
    )
    max_abs: float | None = option("Largest allowed absolute value, such as 1e4.", type=shared.number_from())
    min_rank: tuple[float | None, float | None] | None = option(
        "Smallest allowed effective rank of a layer: a number, or 5% of the maximum.", type=shared.rank
    )
    allow: hooks.Selection | None = shared.layer_option(
        "Layers without limits, as in --layer; repeatable.", "--allow", metavar="LAYER", section="Options"
    )
    allow_unmeasured: bool = option("Allow what cannot be checked against a limit.")
    junit: str | None = shared.out_file("Also write the result as JUnit XML.")

    def run(self) -> int:
        rank = self.min_rank or (None, None)
        limits = statistics.Limits(self.max_dead, self.max_saturated, self.no_nan, self.max_abs, *rank)
        reference = None if self.reference is None else statistics.load_statistics(self.reference)
        if not limits.names and reference is None:
            do = "give --max-dead, --max-saturated, --no-nan, --max-abs, --min-rank or --reference"
            raise UsageError("no limit was given", do=do)
        every, allow = self.layers is None and not self.types, self.allow
        saved, skipped = self.measured(
            "min-rank" in limits.names, every=every, allow=allow, ranges=reference is not None
        )
        layers = saved.totals.statistics()
        result = statistics.check_limits(
            layers, limits, saved.coverage, allow or (), every=every, allow_unmeasured=self.allow_unmeasured
        )
        found = None if reference is None else comparison.against_reference(saved, reference)
        if found is not None:
            result.add(comparison.check_shifts(found, self.max_shift, self.max_dead_more, allow or ()))
        nonfinite = [layer.key for layer in statistics.checked_layers(layers, allow or ()) if layer.nan or layer.inf]
        if nonfinite and not limits.no_nan:  # NaN in a few values need not break another limit
            note(f"Note: NaN or Inf in {listed(nonfinite, 3)}; --no-nan forbids them")
        images = saved.totals.images
        is_dead = any(breach.limit == "max-dead" and not breach.unmeasured for breach in result.broken)
        if is_dead and images < statistics.StatisticsThresholds.images:
            note(f"Note: dead means constant on {counted(images, 'image')}. {CATALOGUE['few-images'].text()}")
        with self.printed_after(_report(saved, result, found)):
            if self.junit is not None:
                suite = f"hookscope check {self.model.model}"
                system.write_atomically(self.junit, statistics.junit_xml(suite, result, skipped))
        return 3 if result.broken else min(skipped, 1)


def _report(
    saved: statistics.SavedStatistics,
    result: statistics.LimitsResult,
    found: comparison.AgainstReference | None,
) -> Report:
    rows = COLUMNS.rows(result.broken, weights=saved.source.weights)
    verdict = f"{saved.source.model} on {counted(saved.totals.images, 'image')}: {result.verdict()}"
    totals = [verdict, *(f"  {line}" for line in result.words())]
    if found is not None:
        totals.append(found.sentence if result.broken or not found.finding else f"allowed: {found.sentence}")
    note = f"Note: {verdict}: {'; '.join(result.words())}"
    section = Section(rows, COLUMNS, totals=totals)
    caption = {name: getattr(saved.source, name) for name in ("model", "weights", "preprocess")}
    return Report([section], flat_note=note, caption=caption)
