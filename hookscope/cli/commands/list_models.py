"""``hookscope list-models``: the models that have names, and which to take."""

from __future__ import annotations

import dataclasses
import sys

import click

from hookscope.cli.output.rows import write_rows
from hookscope.cli.shared.options import chosen_format, format_option
from hookscope.models import ModelInfo, find_models

FIELDS = [field.name for field in dataclasses.fields(ModelInfo)]


@click.command("list-models")
@click.argument("pattern", required=False)
@format_option
def command(pattern: str | None, format: str | None) -> None:
    """List torchvision's models, and the one that ships, with task, size, cost and accuracy.

    PATTERN is a glob that fits the whole name (quote it), a part of the name, or re: and a regular expression. Without
    it every model is listed. Nothing is downloaded. `shapes` ships with hookscope, trained; its numbers are those in
    the file of its weights.

    \b
      hookscope list-models
      hookscope list-models 'resnet*'
      hookscope list-models 're:^vit_[bl]' --format json
      hookscope list-models --format tsv | sort -t "$(printf '\\t')" -k 3 -n

    \b
    name           what MODEL takes
    task           classification, detection, segmentation, video,
                   optical_flow, or quantized (8-bit classification)
    params         parameters with the default weights; of a quantized
                   model, those of the float model it was made from
    file_size      of the default weights, in MB
    gflops         billions of multiply-adds of one pass
    accuracy       the first number torchvision states for the default
                   weights; for optical_flow an error: less is better
    metric         what accuracy measures: data set and metric
    weights        names of the weights, the default first
    float_weights  of a quantized model: the float weights it was made from

    A number that is not stated is "-" in a table, empty in tsv and csv, and null in JSON.
    """
    models = find_models(pattern)
    total = f"{len(models)} model{'' if len(models) == 1 else 's'}"
    write_rows(map(dataclasses.asdict, models), FIELDS, chosen_format(format), sys.stdout, [total])
