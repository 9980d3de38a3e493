"""``hookscope trace``: what every call takes and returns in one pass, and in which order the hooks' events happen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from hookscope import hooks, scores, tracing
from hookscope.cli.output import formats as output
from hookscope.cli.output.report import Report
from hookscope.cli.output.trace_rows import section, tensors_left_out, value_lines
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.model import ModelAndImages, ModelOptions, check_choice, model_options
from hookscope.errors import UsageError
from hookscope.findings import counted, listed, operations_in_words


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    layers: hooks.Selection | None
    types: tuple[str, ...]
    ops: bool | None
    events: bool
    target: scores.Target
    categories: tuple[str, ...] | None
    values: bool
    max_values: int
    format: str


@click.command("trace", cls=GroupedCommand)
@shared.model_argument()
@shared.image_argument()
@shared.layer_option(f"Calls to show: {shared.SELECTION}  [default: all; with --events '*', every module]")
@shared.type_option
@shared.ops_option
@click.option("--events", is_flag=True, help="Print a row for each event: each hook as it runs.")
@target_option(help="With --events, the class whose score is differentiated")
@categories_option
@click.option("--values", is_flag=True, help="Show small tensors whole.")
@shared.count_option("--max-values", "With --values, show tensors of at most N values.", 64)
@model_options
@shared.format_option
def command(model: ModelOptions, paths: tuple[str, ...], **values: Any) -> None:
    """Show what each layer call of MODEL takes and returns on IMAGE.

    \b
    Examples:
      hookscope trace resnet18 cat.jpg
      hookscope trace vgg16 cat.jpg --layer 'features.*' --format ndjson
      hookscope trace resnet18 cat.jpg --ops --layer 'layer1.0*'
      hookscope trace resnet18 cat.jpg --events --type BasicBlock --type ReLU --target tabby
      hookscope trace nets.py:ones tiny.png --preprocess none --values --events
      hookscope trace raft_small first.png second.png --layer 'feature_encoder*'

    IMAGE is one file, or - for standard input; optical flow takes two. The command runs one forward pass in eval mode.
    It prints a row for each call of the chosen layers, in order of execution, with the shape, type and range of its
    input and output. These are the values before a later layer overwrites them in place.

    Ranges are those of the finite values; output_nonfinite counts NaN and Inf. A quantized tensor has the range of the
    numbers that it represents. A field about several tensors has one value for each.

    \b
    With --events a backward pass follows. A row for each event, from 0:
      pre-hook  the call is about to run: its inputs
      forward   the call has returned: its outputs
      backward  the gradient of the output is computed: that gradient

    depth is the number of chosen calls around a call; a table indents the name instead. The backward pass starts at the
    score of the class --target, or in models without classes at the mean square of all outputs. Calls without a
    gradient have no backward event; a note says how many.

    With --values, a table is followed by the small tensors as arrays. json and ndjson have the fields input_values and
    output_values, or values with --events: nested numbers, and null for larger tensors. In tsv and csv these fields
    hold JSON.

    A table leaves out columns that are empty, are constant or do not fit the terminal. Other formats have all columns.
    """
    options = Options(**values)
    _check(paths, options)
    subject = ModelAndImages.load(model, paths)
    net, categories = subject.net, categories_of(subject.net, options.categories)
    check_choice(net, options.types, options.layers)
    loss = None  # the model's output decides
    if shared.was_given("target"):
        scores.check_family(net.family, net.name)
        options.target.check(categories)
        loss = scores.Loss("score", options.target, categories)
    usual = "*" if options.events and not options.types else "all"
    with subject.run():
        record = tracing.trace_events(
            net.model,
            subject.inputs,
            options.layers or usual,
            options.types or None,
            backward=options.events,
            loss=loss,
            values=options.max_values if options.values else 0,
            ops=bool(options.ops),
        )
    totals = _totals(record, categories, options)
    _note_the_rest(record, options)
    rows = section(record, net.weights, options.events, options.values, totals)
    output.write_report(Report([rows], caption=subject.caption), options.format)


def _check(paths: Sequence[str], options: Options) -> None:
    """Refuse what cannot work before a model is loaded."""
    for name in ("target", "categories"):
        if shared.was_given(name) and not options.events:
            raise UsageError(f"--{name} needs --events", "there is no backward pass", "add --events")
    if shared.was_given("max_values") and not options.values:
        raise UsageError("--max-values needs --values", do="add --values, which shows small tensors whole")
    ModelAndImages.check_count(paths)


def _totals(record: tracing.PassRecord, categories: Sequence[str] | None, options: Options) -> Iterator[str]:
    """The lines under a table: the small tensors, then the passes."""
    if options.values:
        yield from value_lines(record, options.events)
        yield ""
    calls = counted(len(record.calls), "call")
    yield calls + (f", {counted(len(record.events), 'event')}" if options.events else "")
    if record.value is not None:
        labels = [scores.class_label(target.index, categories) or "" for target in record.targets]
        names = [f"{target.index} {label}".strip() for target, label in zip(record.targets, labels, strict=True)]
        what = f"score of class {', '.join(names)}" if names else "mean square of the output"
        yield f"backward from {what}: {record.value:.4g}"


def _note_the_rest(record: tracing.PassRecord, options: Options) -> None:
    """Report layers, gradients and tensors that have no row."""
    if options.layers is None and (words := operations_in_words(record.operations)):
        output.note(f"Note: not shown: {words}; --ops shows them")
    if idle := record.did_not_run:
        output.note(f"Note: {counted(len(idle), 'chosen layer')} did not run: {listed(idle, 3)}")
    if options.events and record.without_backward:
        output.note(f"Note: no backward pass: {record.without_backward}")
    elif options.events and record.unreached:
        keys = [call.key or hooks.MODEL for call in record.unreached]
        have = "has" if len(keys) == 1 else "have"
        output.note(f"Note: {counted(len(keys), 'call')} {have} no gradient and no backward event: {listed(keys, 3)}")
    if options.values and (larger := tensors_left_out(record, options.events)):
        what = f"{counted(larger, 'tensor')} of more than {options.max_values} values left out"
        output.note(f"Note: {what}; --max-values shows larger tensors")
