"""``hookscope predict``: the classes that a model gives to images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from hookscope import images, scores
from hookscope.cli import process
from hookscope.cli.output.formats import write_report
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.image_options import image_inputs
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import ModelOptions, caption_of, model_options
from hookscope.columns import Column, Columns, Row
from hookscope.errors import UsageError

COLUMNS = Columns(
    Column("image", help="the image, as it was named"),
    Column("class", lambda prediction: prediction.index, "number of the class"),
    Column("label", help="name of the class, empty if unknown"),
    Column("score", help="logit of the class, before softmax, as the model returns it"),
    Column("probability", help="softmax over all classes, 0 to 1"),
    Column("weights", help="the weights; with random weights the classes mean nothing"),
)


@click.command("predict", cls=GroupedCommand)
@shared.tell_fields(COLUMNS)
@shared.model_argument()
@click.option(
    "--top",
    metavar="K",
    type=click.IntRange(1, 999_999),
    help="How many classes to print, the best first.  [default: 5]",
)
@target_option(default=None, help="Classes to print, instead of --top")
@categories_option
@image_inputs
@model_options
@shared.format_option
def command(
    model: ModelOptions,
    paths: list[str],
    top: int | None,
    target: scores.Target | None,
    categories: tuple[str, ...] | None,
    format: str,
) -> None:
    """Print the classes that MODEL gives to each IMAGE.

    \b
    Examples:
      hookscope predict resnet34 cat.jpg
      hookscope predict shapes samples/shapes/star.png --top 3
      hookscope predict resnet34 cat.jpg dog.jpg --target tabby
      hookscope predict resnet34 cat.jpg --format json | jq -r '.[0].label'
      hookscope predict nets.py:mine cat.jpg --weights mine.pth --categories names.txt

    IMAGE is a file, a folder, a glob, or - for standard input. There is a row for each class, the highest score first.

    In a segmentation model, the score of a class is the mean of its logits over all positions. Detection and optical
    flow models have no class scores.
    """
    if top is not None and target is not None:
        raise UsageError("--top and --target both choose the classes", do="give one of them")
    classes = target or scores.Target(f"top:{top or 5}")
    files = ImageFiles(paths)
    files.read_first()
    net = model.load()
    scores.check_family(net.family, net.name)
    names = categories_of(net, categories)

    def rows(pictures: Sequence[images.InputImage]) -> Iterator[Row]:
        tensors = [net.prepare(picture) for picture in pictures]
        with process.prints_to_standard_error():
            predictions = scores.predict(net, tensors, classes, names)
        for prediction in predictions:
            yield COLUMNS.row(prediction, image=pictures[0].name, weights=net.weights)

    write_report(Report([Section(files.rows(net, rows), COLUMNS)], caption=caption_of(net)), format)
    files.exit()
