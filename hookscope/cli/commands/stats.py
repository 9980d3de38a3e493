"""Measure every layer on images and report what is wrong."""

from __future__ import annotations

from hookscope import hooks
from hookscope.cli.fields import option
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.measure import Measuring
from hookscope.cli.shared.statistics_report import StatisticsCommand


class Stats(StatisticsCommand, Measuring):
    """Measure every layer of MODEL on images, and report what is wrong.

    \b
    Examples:
      hookscope stats resnet34 cat.jpg
      hookscope stats vgg16 samples/ --type ReLU --plot vgg16.png
      find photos -name '*.jpg' -print0 | hookscope stats resnet50 --files0-from - --format ndjson
      hookscope stats resnet34 photos/ --limit 1000 --save a.json
      hookscope merge a.json b.json

    The command measures every convolution, Linear layer and activation function, and what the model returns, which is
    called (model). A line under the table says which other layers were not measured. IMAGE is a file, a folder, a glob,
    or - for standard input.

    A row for each layer call has the mean, spread, range and its positions, zeros, quantiles, NaN and Inf, and the
    numbers of dead, saturated and duplicate channels. Findings follow the table, each with its evidence and advice. In
    tsv and csv, the column findings has their names. In ndjson, the field "row" names the kind of a line.

    --save and --resume know each image by the content of its file, not by its name. --resume refuses other images than
    those of the saved run. `hookscope merge` merges files of --save.
    """

    resume: bool = option(
        "Continue the interrupted run that wrote the --save file.",
        section="Output",
        needs="save",
        why="name the file of the run to continue: --save FILE --resume",
    )
    rank: bool = option("Also measure the effective rank of layers with up to 2048 channels; slower.")
    layers: hooks.Selection | None = shared.layer_option(
        f"Calls to measure: {shared.SELECTION}  [default: every convolution, Linear layer and activation function,"
        " and (model)]"
    )

    def run(self) -> int:
        saved, skipped = self.measured(self.rank, self.save, self.resume)
        self.report(saved)
        return min(skipped, 1)
