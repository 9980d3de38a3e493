"""``hookscope list-layers``: every call of a model's layers in order of execution."""

from __future__ import annotations

from collections.abc import Iterable

import click

from hookscope import hooks, models, tracing
from hookscope.cli import process
from hookscope.cli.output.formats import write_report
from hookscope.cli.output.report import Report, row_of
from hookscope.cli.shared.options import format_option, model_argument, size_option, type_option
from hookscope.findings import counted

FIELDS = ("index", "name", "type", "call", "input_shape", "output_shape", "params", "macs", "note")


@click.command("list-layers")
@model_argument(default="resnet34")
@type_option
@size_option
@format_option
def command(model: str, types: tuple[str, ...], input_size: tuple[int, int] | None, format: str) -> None:
    """List the layers of a model, in order of execution.

    MODEL is resnet34 by default. The index is what `--layer` takes in other commands. Shapes come from a pass without
    arithmetic where the model allows one. MACs are counted by torchinfo's rule. The note says that a later layer
    overwrites this output in place, that a layer is called more than once, that a layer is shared, or that a layer did
    not run.

    \b
    Examples:
      hookscope list-layers
      hookscope list-layers vgg16 --type Conv2d --type ReLU
      hookscope list-layers googlenet --format tsv | awk -F'\\t' '$3=="Conv2d"{print $2}'
      hookscope list-layers inception_v3 --input-size 299x299 --format json
    """
    size, trace = _trace(model, input_size)
    types = types or hooks.usual_types(layer.types for layer in trace.layers)
    calls = tracing.rows_of_type(trace, types)
    rows = [row_of(FIELDS, call) for call in calls]
    write_report(Report.of_rows(rows, FIELDS, _totals(model, size, trace, calls, types)), format)


def _trace(model: str, input_size: tuple[int, int] | None) -> tuple[tuple[int, int], tracing.Trace]:
    if (cached := tracing.cached_listing(model, input_size)) is not None:
        return cached
    models.find_source(model)  # an unknown name fails before torch is imported
    with process.prints_to_standard_error():
        return tracing.listing(model, input_size)


def _totals(
    model: str,
    size: tuple[int, int],
    trace: tracing.Trace,
    calls: Iterable[hooks.LayerCall],
    types: tuple[str, ...],
) -> list[str]:
    ran = [call for call in calls if call.index is not None]
    idle = sum(call.index is None for call in calls)
    params = sum({call.name: call.params for call in calls}.values())
    names = "" if "all" in types else f"{'/'.join(types)} "
    return [
        counted(len(ran), f"{names}call") + (f", {counted(idle, 'layer')} did not run" if idle else ""),
        f"{names.strip() or 'all layers'}: {params:,} parameters, {sum(call.macs for call in ran):,} MACs",
        f"{model} at {size[0]}x{size[1]}: {trace.params:,} parameters, {trace.macs:,} MACs"
        + (" (by a real pass)" if trace.real else ""),
    ]
