"""``hookscope list-models``: the models that have names, and which to take."""

from __future__ import annotations

import dataclasses

import click

from hookscope import models
from hookscope.cli.output.formats import write_report
from hookscope.cli.output.report import Columns, Report
from hookscope.cli.shared.options import format_option
from hookscope.findings import counted

FIELDS = [field.name for field in dataclasses.fields(models.ModelInfo)]
_COLUMNS = Columns(
    FIELDS, ("float_weights",), least_needed=({"float_weights"}, {"weights"}, {"metric"}, {"file_size"}, {"task"})
)


@click.command("list-models")
@click.argument("pattern", required=False)
@format_option
def command(pattern: str | None, format: str) -> None:
    """List the models that have names, with task, size, cost and accuracy.

    \b
    Examples:
      hookscope list-models
      hookscope list-models 'resnet*'
      hookscope list-models 're:^vit_[bl]' --format json
      hookscope list-models --format tsv | sort -t "$(printf '\\t')" -k 3 -n

    These are torchvision's models and `shapes`, a trained model that is part of hookscope. Nothing is downloaded.
    PATTERN is a part of the name, a glob for the whole name (in quotes), or re: and a regular expression.

    \b
    Fields:
      name           what MODEL takes
      task           classification, detection, segmentation, video,
                     optical_flow, or quantized (8-bit classification)
      params         number of parameters with the default weights; of a
                     quantized model, those of its float model
      file_size      of the default weights, in MB
      gflops         billions of multiply-adds of one forward pass
      accuracy       the first number that torchvision states for the
                     default weights; for optical_flow an error: less is better
      metric         what accuracy measures: data set and metric
      weights        names of the weights, the default first
      float_weights  of a quantized model: the float weights that it was
                     quantized from

    A number that torchvision does not state is "-" in a table, empty in tsv and csv, and null in JSON.
    """
    matches = models.find_models(pattern)
    rows, totals = map(dataclasses.asdict, matches), [counted(len(matches), "model")]
    write_report(Report.of_rows(rows, FIELDS, totals, columns=_COLUMNS), format)
