"""List the models with size, cost and accuracy."""

from __future__ import annotations

from hookscope import models
from hookscope.cli.command import RowCommand
from hookscope.cli.fields import argument
from hookscope.cli.output.formats import Report, Section
from hookscope.columns import Column, Columns
from hookscope.findings import counted

COLUMNS = Columns(
    Column("name", help="what MODEL takes"),
    Column(
        "task", help="classification, detection, segmentation, video, optical_flow, or quantized (in 8 bits)", need=5
    ),
    Column("params", help="number of parameters with the default weights; quantized: of its float model"),
    Column("file_size", help="of the default weights, in MB", need=4),
    Column("gflops", help="billions of multiply-adds of one forward pass"),
    Column(
        "accuracy",
        help="first number that torchvision states for the default weights; for optical_flow an error: less is better",
    ),
    Column("metric", help="what accuracy measures: data set and metric", need=3),
    Column("weights", help="names of the weights, the default first", need=2),
    Column("float_weights", None, "of a quantized model: the float weights that it was quantized from", 1, hide="zero"),
)


class ListModels(RowCommand):
    """List the models that have names, with task, size, cost and accuracy.

    \b
    Examples:
      hookscope list-models
      hookscope list-models 'resnet*'
      hookscope list-models 're:^vit_[bl]' --format json
      hookscope list-models --format tsv | sort -t "$(printf '\\t')" -k 3 -n

    These are torchvision's models and `shapes`, a trained model that is part of hookscope. Nothing is downloaded.
    PATTERN is a part of the name, a glob for the whole name (in quotes), or re: and a regular expression.

    A number that torchvision does not state is "-" in a table, empty in tsv and csv, and null in JSON.
    """

    fields_told = COLUMNS

    pattern: str | None = argument("[PATTERN]", required=False, default=None)

    def run(self) -> None:
        matches = models.find_models(self.pattern)
        self.print(Report([Section(COLUMNS.rows(matches), COLUMNS)], totals=[counted(len(matches), "model")]))
