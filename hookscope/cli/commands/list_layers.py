"""``hookscope list-layers``: every call of a model's layers in order of execution."""

from __future__ import annotations

import click

from hookscope import hooks, models, tracing
from hookscope.cli import process
from hookscope.cli.output.formats import note, write_report
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.options import (
    format_option,
    model_argument,
    ops_option,
    size_option,
    type_option,
)
from hookscope.findings import counted, operations_in_words


@click.command("list-layers", cls=GroupedCommand)
@model_argument(default="resnet34")
@type_option
@size_option
@ops_option
@click.option("--total", is_flag=True, help="Print one row with the totals of the types and of the model.")
@format_option
def command(
    model: str,
    types: tuple[str, ...],
    input_size: tuple[int, ...] | None,
    ops: bool | None,
    total: bool,
    format: str,
) -> None:
    """List the layers of a model, in order of execution.

    \b
    Examples:
      hookscope list-layers resnet18
      hookscope list-layers vgg16 --type Conv2d --type ReLU
      hookscope list-layers resnet18 --ops --type '*add*'
      hookscope list-layers vit_b_32 --total --format json | jq '.[0].macs'
      hookscope list-layers inception_v3 --input-size 299x299 --format json
      hookscope list-layers googlenet --format tsv | awk -F'\\t' '$3=="Conv2d"{print $2}'

    MODEL is resnet34 by default. The index is what --layer takes in other commands: the position among the calls of
    --type, which is Conv2d by default. order is the position among all calls: the index with --type all.

    MACs are multiply-accumulates: half of the FLOPs that torch counts, and the bias of convolutions. They include what
    a layer computes with functions. A row also counts the layers inside it that have no row, so the rows of --type all
    add up to the model. There a block that computes something itself has a row without an index.

    receptive_field is the part of the input that a unit of the output depends on: height x width in pixels. It may be
    larger than the input. stride is the distance between two units, in pixels of the input. Where a unit depends on
    the whole input, receptive_field is the size of the input. Both are empty where an operation is not known. Paths
    that reach all positions alike, such as squeeze-and-excitation, are left out.

    The column note says that a layer is called more than once, is shared, did not run, or has layers inside with rows
    of their own. It also says which later layer overwrites the output in place.

    --ops adds a row for each operation that is no module, such as torch.relu and +; its type is the name of the
    function. With --ops and without --type all calls are listed, and order counts operations too. Without --ops a line
    says how many operations there are.

    The lines under the table are the totals of the types and of the whole model, in which shared parameters count once.
    --total prints them as one row. Shapes come from a pass without arithmetic if the model allows it, else from a real
    pass.
    """
    size, trace = traced(model, input_size)
    for text in trace.notes:
        note(f"Note: {text}")
    whole = f"{model} at {'x'.join(map(str, size))}"
    usual = hooks.usual_types(layer.types for layer in trace.layers)
    has_usual = any(set(usual).intersection(layer.types) for layer in trace.layers)
    if total and not has_usual:
        types = types or ("all",)
    totals = tracing.totals_of_type(trace, types or None, bool(ops))
    shown = types or (("all",) if ops else usual)
    if total:
        row = tracing.LAYER_TOTALS.row(totals, model=model, input_size=size, type="/".join(shown))
        write_report(Report([Section([row], tracing.LAYER_TOTALS)]), format)
    else:
        rows = tracing.LAYER_CALLS.rows(tracing.rows_of_type(trace, types or None, bool(ops)))
        lines = _lines(totals, shown, whole)
        lines[-1] += " (by a real pass)" if trace.real else ""
        if not ops and (words := operations_in_words(trace.operations)):
            lines = [f"not listed: {words}; --ops lists them", *lines]
        write_report(Report([Section(rows, tracing.LAYER_CALLS)], totals=lines), format)


def traced(
    model: str, input_size: tuple[int, ...] | None, sources: bool = False
) -> tuple[tuple[int, ...], tracing.Trace]:
    """The size of the input and the calls of ``model``, from the cache or a pass; ``sources`` says what each reads."""
    if (cached := tracing.cached_listing(model, input_size, sources)) is not None:
        return cached
    models.find_source(model)  # an unknown name fails before torch is imported
    with process.prints_to_standard_error():
        return tracing.listing(model, input_size, sources)


def _lines(totals: tracing.LayerTotals, types: tuple[str, ...], size: str) -> list[str]:
    kind = "" if "all" in types else "/".join(types)
    idle = f", {counted(totals.did_not_run, 'layer')} did not run" if totals.did_not_run else ""
    return [
        counted(totals.type_calls, f"{kind} call".strip()) + idle,
        f"{kind or 'all layers'}: {totals.type_params:,} parameters, {totals.type_macs:,} MACs",
        f"{size}: {totals.params:,} parameters, {totals.macs:,} MACs",
    ]
