"""What ``cam`` and ``saliency`` share: their options, the way through the pictures, and where results are written."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import load_net
from hookscope.cli.shared.options import chosen_format, complete_colour_maps, format_option, net_options
from hookscope.errors import ImageError, InputError, LayerError, NoMapError, UsageError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from hookscope.cli.shared.array_file import ArrayFile
    from hookscope.cli.shared.output_paths import OutputPath
    from hookscope.explain import OverlaySource
    from hookscope.models import LoadedModel
    from hookscope.scores import Prediction, Target

_LONGEST_WHAT = 80  # letters of a file name

Command = TypeVar("Command", bound=Callable[..., Any])
Row = dict[str, Any]


def explaining_options(keys: str) -> Callable[[Command], Command]:
    """The options that say which class, where to write, and how the model is loaded.

    Args:
        keys: What the arrays of a ``.npz`` file are called.
    """
    options = [
        target_option(help="Which class to explain"),
        categories_option,
        click.option(
            "-o",
            "--output",
            "destination",
            metavar="PATH",
            type=click.Path(),
            help="A file for one picture, a folder (made when missing), or - for standard output.",
        ),
        click.option(
            "--raw",
            metavar="FILE",
            type=click.Path(),
            help=f"Keep the numbers too: one map as .npy, any number as .npz, keyed {keys}.",
        ),
        click.option(
            "--cmap",
            metavar="NAME",
            default="inferno",
            show_default=True,
            shell_complete=complete_colour_maps,
            help="Any of matplotlib's colour maps.",
        ),
        net_options,
        format_option,
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@dataclass(frozen=True)
class ExplainOptions:
    """What both commands were asked for, judged before a model is loaded."""

    images: Sequence[str]
    target: Target
    destination: OutputPath
    cmap: str
    raw: ArrayFile

    @classmethod
    def parse(cls, images: Sequence[str], options: Mapping[str, Any]) -> ExplainOptions:
        """Judge what was asked for.

        Raises:
            UsageError: it makes no sense, such as several pictures into one file.
            WriteError: a file that cannot be written.
        """
        from hookscope.cli.shared.array_file import ArrayFile
        from hookscope.cli.shared.output_paths import OutputPath
        from hookscope.drawing import palette

        target: Target = options["target"]
        several = target.count > 1
        palette(options["cmap"])
        where = OutputPath.parse(options["destination"], images)
        where.check_count(len(images))
        if where.kind == "stdout" and process.standard_output().isatty():
            raise UsageError("-o - would write a picture to the terminal", do="send it to a file or a pipe")
        if where.kind in ("file", "stdout") and several:
            raise UsageError(f"--target {target} makes several pictures", do="give -o a folder, or choose one class")
        return cls(images, target, where, options["cmap"], ArrayFile.parse(options["raw"], images, several))


@dataclass(frozen=True)
class Explanation:
    """One picture on its way: what the network saw of it, and what its files are called.

    Attributes:
        plan: What was asked for.
        net: The model.
        tensor: The prepared picture.
        subject: The photograph and where it comes from.
        word: The name of the picture as part of file names.
        categories: The names of the classes.
    """

    plan: ExplainOptions
    net: LoadedModel
    tensor: Tensor
    subject: OverlaySource
    word: str
    categories: tuple[str, ...] | None

    def note(self, text: str) -> None:
        """Say something about this picture on standard error."""
        output.note(f"Note: {self.subject.origin.image}: {text}")

    def write(self, page: Image.Image, about: Mapping[str, Any], what: str, index: int, alone: bool) -> str:
        """Write the picture of class ``index`` where ``-o`` says; returns its path.

        Args:
            page: The picture.
            about: Its provenance.
            what: The method, and the layers where some were chosen: runs that differ in them leave other files.
            index: The class.
            alone: Whether it is the only one of this photograph.
        """
        from hookscope.cli.shared.output_paths import file_word, model_word, refuse_input
        from hookscope.drawing import encode_png, write_png
        from hookscope.system import make_folder

        what = file_word(what)
        if len(what) > _LONGEST_WHAT:  # still another name than that of other layers with the same beginning
            what = f"{what[: _LONGEST_WHAT - 9]}~{zlib.crc32(what.encode()):08x}"
        name = f"{self.word}-{model_word(self.net.name)}-{what}-{index}.png"
        plan = self.plan
        file = plan.destination.path_for(name, self.word, self.net.name, alone and len(plan.images) == 1)
        if plan.destination.kind == "stdout":
            stream = process.standard_output().buffer
            stream.write(encode_png(page, about))
            stream.flush()
            return file
        refuse_input(file, plan.images)
        if folder := os.path.dirname(file):
            make_folder(folder)
        write_png(page, file, about)
        return file


def explain_all(
    plan: ExplainOptions,
    model: str,
    options: Mapping[str, Any],
    fields: Sequence[str],
    explain: Callable[[Explanation], Iterator[Row]],
) -> None:
    """Load the model, ``explain`` every picture, print its rows as they come, and write the --raw file at the end.

    Raises:
        Exit: with status 1, some pictures could not be used.
    """
    photographs = ImageFiles(plan.images)
    photographs.read_first()
    names = ("weights", "seed", "device", "preprocess", "input_size")
    net = load_net(model, *(options[name] for name in names))
    categories = categories_of(net, options["categories"])
    rows = _rows(plan, net, photographs, categories, explain)
    _print(plan, rows, fields, chosen_format(options["format"]))
    plan.raw.write()
    if photographs.failed:
        raise click.exceptions.Exit(1)


def answer_fields(answer: Prediction) -> Row:
    """The fields of a row that say what was explained."""
    return {"class": answer.index, "label": answer.label, "score": answer.score, "probability": answer.probability}


def peak_fields(peak: tuple[float, float] | None) -> Row:
    """The fields of a row that say where the highest value is, in pixels of the photograph."""
    x, y = peak or (None, None)
    return {"peak_x": None if x is None else round(x, 1), "peak_y": None if y is None else round(y, 1)}


def _rows(
    plan: ExplainOptions,
    net: LoadedModel,
    photographs: ImageFiles,
    categories: tuple[str, ...] | None,
    explain: Callable[[Explanation], Iterator[Row]],
) -> Iterator[Row]:
    """Explain every picture, and say the rows of each; a picture that cannot be used keeps none of the others."""
    from hookscope.scores import check_family

    check_family(net.family, net.name)
    plan.target.check(categories)
    for path in photographs.paths:
        try:
            yield from explain(_prepared(plan, net, photographs, path, categories))
        except (ImageError, InputError, NoMapError, LayerError) as error:
            # a layer without a map has none for any picture
            if isinstance(error, NoMapError | LayerError) and not photographs.done:
                raise
            photographs.lost(error)
        else:
            photographs.done += 1


def _prepared(
    plan: ExplainOptions, net: LoadedModel, photographs: ImageFiles, path: str, categories: tuple[str, ...] | None
) -> Explanation:
    from hookscope.drawing import Origin
    from hookscope.explain import OverlaySource

    picture = photographs.read(path, net.preprocess.frames)
    for text in picture.notes:
        output.note(f"Note: {picture.name}: {text}")
    tensor = net.prepare(picture)
    box = net.preprocess.seen_box(picture.image.width, picture.image.height)
    origin = Origin(net.name, net.weights, picture.name, picture.sha256, net.preprocess.describe())
    return Explanation(
        plan, net, tensor, OverlaySource(picture.image, box, origin), photographs.words[path], categories
    )


def _print(plan: ExplainOptions, rows: Iterator[Row], fields: Sequence[str], format: str) -> None:
    """Print the rows as they come, or make them without a word where a picture goes to standard output."""
    with process.reader_may_leave():
        if plan.destination.kind == "stdout":
            deque(rows, maxlen=0)
            return
        try:
            output.write_rows(rows, fields, format, process.standard_output())
        except BrokenPipeError:
            deque(rows, maxlen=0)  # `| head` has seen enough rows; the pictures are still wanted
            raise
