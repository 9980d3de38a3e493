"""Print the classes that a model gives to images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from hookscope import images, scores
from hookscope.cli import process
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section
from hookscope.cli.shared.options import categories_of, categories_option, target_option
from hookscope.cli.shared.subject import OfImages, caption_of
from hookscope.columns import Column, Columns, Row

COLUMNS = Columns(
    Column("image", help="the image, as it was named"),
    Column("class", lambda prediction: prediction.index, "number of the class"),
    Column(
        "label", lambda row: row.label or row.target or None, "name of the class, or of the output; empty if unknown"
    ),
    Column("score", help="logit of the class, before softmax or sigmoid; or its share of the pixels; or the number"),
    Column(
        "probability",
        help="of the class, 0 to 1; tables leave it out for random weights",
        hide="random",
    ),
    Column("weights", help="the weights; with random weights the classes mean nothing"),
)


class Predict(OfImages):
    """Print the classes that MODEL gives to each IMAGE.

    \b
    Examples:
      hookscope predict resnet34 cat.jpg
      hookscope predict shapes samples/shapes/star.png --top 3
      hookscope predict resnet34 cat.jpg dog.jpg --target tabby
      hookscope predict resnet34 cat.jpg --format json | jq -r '.[0].label'
      hookscope predict nets.py:mine cat.jpg --weights mine.pth --categories names.txt

    IMAGE is a file, a folder, a glob, or - for standard input. There is a row for each class, the highest score first.

    In a segmentation model, the score of a class is its share of the pixels, without a probability. An output
    without classes, such as one number, has a row for each number. Detection and optical flow models have no class
    scores.
    """

    fields_told = COLUMNS
    tells_classes = True

    top: int | None = option(
        "How many classes to print, the best first.  [default: 5]", metavar="K", type=click.IntRange(1, 999_999)
    )
    target: scores.Target | None = target_option(
        "Classes to print, instead of --top",
        default=None,
        not_with=("top",),
        why="both choose the classes: give one of them",
    )
    categories: tuple[str, ...] | None = categories_option()

    def run(self) -> int:
        classes = self.target or scores.Target(f"top:{self.top or 5}")
        net = self.net
        scores.check_family(net.family, net.name)
        names = categories_of(net, self.categories)

        def rows(pictures: Sequence[images.InputImage]) -> Iterator[Row]:
            tensors = [net.prepare(picture) for picture in pictures]
            with process.prints_to_standard_error():
                predictions = scores.predict(net, tensors, classes, names)
            for prediction in predictions:
                yield COLUMNS.row(prediction, image=pictures[0].name, weights=net.weights)

        self.print(Report([Section(self.files.rows(net, rows), COLUMNS)], caption=caption_of(net)))
        return self.files.status
