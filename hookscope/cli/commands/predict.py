"""``hookscope predict``: the classes that a model gives to pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import load_net
from hookscope.cli.shared.options import chosen_format, format_option, model_argument, net_options
from hookscope.errors import ImageError, InputError, UsageError

if TYPE_CHECKING:
    from hookscope.models import LoadedModel
    from hookscope.scores import Target

FIELDS = ("image", "index", "label", "score", "probability", "weights")


@click.command("predict")
@model_argument()
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path())
@click.option("--top", metavar="K", type=click.IntRange(1, 999_999), help="How many classes.  [default: 5]")
@target_option(default=None, help="Only these classes, in the place of --top")
@categories_option
@net_options
@format_option
def command(
    model: str,
    images: tuple[str, ...],
    top: int | None,
    target: Target | None,
    categories: tuple[str, ...] | None,
    weights: str,
    seed: int,
    device: str,
    preprocess: str,
    input_size: tuple[int, int] | None,
    format: str | None,
) -> None:
    """Print the classes that MODEL gives to each IMAGE (- reads one from standard input).

    A row for each class, the highest score first:

    \b
      image        the picture, as it was given
      index        number of the class
      label        its name, empty where none is known
      score        its logit, before softmax, to the bit what the model gives
      probability  its share of the softmax over all classes, 0 to 1
      weights      what the weights are; random ones answer nothing, and a note says so

    The score of a class in a segmentation model is the mean of its logits over all positions. Detection and optical
    flow have no scores of classes.

    \b
    Examples:
      hookscope predict resnet34 cat.jpg
      hookscope predict shapes samples/shapes/star.png --top 3
      hookscope predict resnet34 cat.jpg dog.jpg --target tabby
      hookscope predict resnet34 cat.jpg --format json | jq -r '.[0].label'
      hookscope predict nets.py:mine cat.jpg --weights mine.pth --categories names.txt
    """
    from hookscope.scores import Target

    if top is not None and target is not None:
        raise UsageError("--top and --target both choose the classes", do="give one of them")
    wanted = target or Target(f"top:{top or 5}")
    pictures = ImageFiles(images)
    pictures.read_first()
    net = load_net(model, weights, seed, device, preprocess, input_size)
    rows = _rows(net, pictures, wanted, categories_of(net, categories))
    output.write_rows(rows, FIELDS, chosen_format(format), process.standard_output())
    if pictures.failed:
        raise click.exceptions.Exit(1)


def _rows(
    net: LoadedModel, pictures: ImageFiles, wanted: Target, categories: tuple[str, ...] | None
) -> Iterator[dict[str, Any]]:
    """Look at every picture, and say a row for each of its classes."""
    from hookscope.scores import predict

    for path in pictures.paths:
        try:
            picture = pictures.read(path, net.preprocess.frames)
            for text in picture.notes:
                output.note(f"Note: {picture.name}: {text}")
            tensor = net.prepare(picture)
            with process.prints_to_standard_error():
                found = predict(net, [tensor], wanted, categories)
        except (ImageError, InputError) as error:
            pictures.lost(error)
        else:
            pictures.done += 1
            for one in found:
                yield {"image": path, **dataclasses.asdict(one), "weights": net.weights}
