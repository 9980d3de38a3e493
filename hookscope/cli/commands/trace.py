"""``hookscope trace``: what every call takes and returns in one pass, and in which order the hooks' events happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.output.table_width import terminal_columns
from hookscope.cli.output.trace_rows import (
    EVENT_FIELDS,
    FIELDS,
    as_text,
    call_row,
    event_row,
    left_out,
    table,
    value_lines,
)
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import load_net
from hookscope.cli.shared.options import (
    chosen_format,
    complete_types,
    format_option,
    layer_option,
    model_argument,
    net_options,
    was_given,
)
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.models import LoadedModel
    from hookscope.scores import Loss
    from hookscope.tracing import PassRecord

_MOST = 64


@click.command("trace")
@model_argument()
@click.argument("images", metavar="IMAGE", nargs=-1, required=True, type=click.Path())
@layer_option(
    "Which calls: 30, -1, 0:10, conv1, 'layer4.*', 're:conv[12]$', name#1, all; repeatable, comma separated."
    "  [default: all]"
)
@click.option(
    "--type",
    "types",
    metavar="CLASS",
    multiple=True,
    shell_complete=complete_types,
    help="Class of layer that is shown and that indices count; repeatable; a glob.  [default: all, every leaf; with"
    " --events and no --layer '*', every module]",
)
@click.option("--events", is_flag=True, help="A row for each event, in the order in which they happened.")
@target_option(help="Of --events, the class whose score is differentiated")
@categories_option
@click.option("--values", is_flag=True, help="Show small tensors whole.")
@click.option(
    "--most",
    metavar="N",
    type=click.IntRange(1),
    default=_MOST,
    show_default=True,
    help="Of --values, how many values a tensor may have to be shown.",
)
@net_options
@format_option
def command(model: str, images: tuple[str, ...], **options: Any) -> None:
    """Show what hooks see of each call of MODEL on IMAGE: what goes in, what comes out, and in which order.

    IMAGE is one file, or - for standard input; optical flow takes two. One forward pass through real hooks, in eval
    mode. A row for each call of the chosen layers, in order of execution, has shape, type and range of its input as
    it was before the layer ran, and of its output as the layer returned it, whatever works in place later. Ranges
    are of the finite values, output_nonfinite counts the others; those of quantized tensors are of what they stand
    for. Where there are several tensors, a field holds one value for each part.

    With --events there is a row for each thing that happened, numbered from 0, and a backward pass follows:

    \b
      pre-hook  the call is about to run: its inputs
      forward   it has returned: its outputs
      backward  the gradient of what it returned is computed: that gradient

    depth says in how many of the chosen calls a call runs, which a table shows by indenting its name. What is
    differentiated is the score of the class --target, or in models without classes the mean square of all that they
    put out. Calls that no gradient reaches have no backward event; a note says how many.

    With --values small tensors are shown whole: below a table as arrays, in json and ndjson in the fields
    input_values and output_values (values of --events) as nested numbers, null for what is larger; in tsv and csv
    these fields hold JSON.

    A table leaves out columns that are empty, the same all along, or too many for the terminal; other formats have
    all of them.

    \b
    Examples:
      hookscope trace resnet18 cat.jpg
      hookscope trace vgg16 cat.jpg --layer 'features.*' --format ndjson
      hookscope trace resnet18 cat.jpg --events --type BasicBlock --type ReLU --target tabby
      hookscope trace nets.py:ones tiny.png --preprocess none --values --events
      hookscope trace raft_small first.png second.png --layer 'feature_encoder*'
    """
    _check(images, options)
    photographs = ImageFiles(images)
    photographs.read_first()
    names = ("weights", "seed", "device", "preprocess", "input_size")
    net = load_net(model, *(options[name] for name in names))
    loss = _loss(net, options)
    pictures = [net.prepare(picture) for picture in photographs.read_together(net)]
    record = _trace(net, pictures, loss, options)
    _report(net, record, loss, options)


def _check(images: Sequence[str], options: Mapping[str, Any]) -> None:
    """Whatever can be known to fail is told before a model is loaded."""
    from hookscope.hooks import Selection

    if options["layers"]:
        Selection(options["layers"])
    for name in ("target", "categories"):
        if was_given(name) and not options["events"]:
            raise UsageError(f"--{name} without --events: nothing is differentiated", do="add --events")
    if was_given("most") and not options["values"]:
        raise UsageError("--most without --values", do="add --values, which shows small tensors whole")
    if len(images) > 2:
        raise UsageError("trace takes one image, or two for optical flow", f"there are {len(images)}")


def _loss(net: LoadedModel, options: Mapping[str, Any]) -> Loss | None:
    """The score that was asked for; None where the model's output decides."""
    from hookscope.scores import Loss, check_family

    categories = categories_of(net, options["categories"])
    if not was_given("target"):
        return None
    check_family(net.family, net.name)
    options["target"].check(categories)
    return Loss("score", options["target"], categories)


def _trace(net: LoadedModel, pictures: list[Tensor], loss: Loss | None, options: Mapping[str, Any]) -> PassRecord:
    from hookscope.models import model_errors_as_input_errors
    from hookscope.tracing import trace_events

    layers, events = options["layers"], options["events"]
    types = options["types"] or (("*",) if events and not layers else ("all",))
    values = options["most"] if options["values"] else 0
    with process.prints_to_standard_error(), model_errors_as_input_errors(net.name, pictures):
        return trace_events(
            net.model, net.inputs(*pictures), layers or "all", types, backward=events, loss=loss, values=values
        )


def _report(net: LoadedModel, record: PassRecord, loss: Loss | None, options: Mapping[str, Any]) -> None:
    format, stream = chosen_format(options["format"]), process.standard_output()
    events, values = options["events"], options["values"]
    fields = [name for name in (EVENT_FIELDS if events else FIELDS) if values or not name.endswith("values")]
    if events:
        rows = [event_row(event, net.weights, values) for event in record.events]
    else:
        rows = [call_row(seen, net.weights, values) for seen in record.calls]
    totals: list[str] = []
    if format == "table":
        columns = terminal_columns(stream)
        totals = _totals(net, record, options)
        if values:
            totals = [*value_lines(record, events, columns), "", *totals]
        rows, fields = table(rows, fields, columns)
    elif format in ("tsv", "csv"):
        rows = [as_text(row) for row in rows]
    output.write_rows(rows, fields, format, stream, totals)
    _tell(record, options)


def _totals(net: LoadedModel, record: PassRecord, options: Mapping[str, Any]) -> list[str]:
    from hookscope.scores import class_label

    lines = [f"{net.name}, weights {net.weights}: {counted(len(record.calls), 'call')}"]
    if options["events"]:
        lines[0] += f", {counted(len(record.events), 'event')}"
    if record.value is not None:
        categories = categories_of(net, options["categories"])
        of = [f"{one.index} {class_label(one.index, categories) or ''}".strip() for one in record.targets]
        named = f" of class {', '.join(of)}" if of else " of the output"
        lines.append(f"backward from {'score' if of else 'mean square'}{named}: {record.value:.4g}")
    return lines


def _tell(record: PassRecord, options: Mapping[str, Any]) -> None:
    """What the rows do not say, on standard error."""
    if record.did_not_run:
        idle = record.did_not_run
        output.note(f"Note: {counted(len(idle), 'chosen layer')} did not run: {listed(idle, 3)}")
    if options["events"] and record.without_backward:
        output.note(f"Note: no backward pass: {record.without_backward}")
    elif options["events"] and record.unreached:
        keys = [call.key or "(model)" for call in record.unreached]
        what = f"{counted(len(keys), 'call')} without a backward event, which no gradient reaches"
        output.note(f"Note: {what}: {listed(keys, 3)}")
    if options["values"] and (larger := left_out(record, options["events"])):
        what = f"{counted(larger, 'tensor')} of more than {options['most']} values left out"
        output.note(f"Note: {what}; --most shows larger ones")
