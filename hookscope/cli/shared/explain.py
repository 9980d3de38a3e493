"""What ``cam`` and ``saliency`` share: their options, and what they do with each image."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hookscope import drawing, explain, images, models, scores
from hookscope.cli.output import rows as output
from hookscope.cli.shared.array_file import ArrayFile
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.model import ModelOptions, model_options
from hookscope.cli.shared.options import apply_options, colour_map_option, format_option
from hookscope.cli.shared.output_paths import OutputPath, file_word, model_word
from hookscope.cli.shared.picture_run import PictureRun, Row, output_option, parse_output
from hookscope.errors import UsageError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

_LONGEST_WHAT = 80  # letters of a file name


@dataclass(frozen=True)
class ExplainOptions:
    """The options of both commands; ``output`` and ``raw`` are checked before a model is loaded."""

    target: scores.Target
    categories: tuple[str, ...] | None
    output: str | None
    raw: str | None
    cmap: str
    format: str

    def check(self, paths: Sequence[str]) -> tuple[OutputPath, ArrayFile]:
        """Where the pictures and the arrays go.

        Raises:
            UsageError: the options make no sense, such as several pictures in one file.
            WriteError: a file cannot be written.
        """
        several = self.target.count > 1
        drawing.palette(self.cmap)
        output = parse_output(self.output, paths)
        output.check_count(len(paths))
        if output.kind in ("file", "stdout") and several:
            raise UsageError(f"--target {self.target} makes several pictures", do="give -o a folder, or one class")
        return output, ArrayFile.parse(self.raw, paths, several)


def explain_options(keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of `ExplainOptions` and of the model; ``keys`` names the arrays of a ``.npz`` file."""
    options: list[Callable[[Any], Any]] = [
        target_option(help="Which class to explain"),
        categories_option,
        output_option("picture"),
        click.option(
            "--raw",
            metavar="FILE",
            type=click.Path(),
            help=f"Keep the numbers too: one map as .npy, any number of maps as .npz with the keys {keys}.",
        ),
        colour_map_option("Any matplotlib colour map.", "inferno"),
        model_options,
        format_option,
    ]
    return lambda command: apply_options(options, command)


@dataclass(frozen=True)
class Explanation:
    """One image on its way.

    Attributes:
        run: The run that the image belongs to.
        raw: Collects the arrays.
        tensor: The prepared image.
        source: The image and where it comes from.
        word: The name of the image as part of file names.
        categories: The names of the classes.
    """

    run: PictureRun
    raw: ArrayFile
    tensor: Tensor
    source: explain.OverlaySource
    word: str
    categories: tuple[str, ...] | None

    @property
    def net(self) -> models.LoadedModel:
        """The model."""
        return self.run.net

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What the model takes."""
        return self.net.inputs(self.tensor)

    def note(self, text: str) -> None:
        """Print a note on this image on standard error."""
        output.note(f"Note: {self.source.origin.image}: {text}")

    def write(self, page: Image.Image, provenance: Mapping[str, Any], what: str, index: int, alone: bool) -> str:
        """Write the picture of class ``index`` and return its path.

        Args:
            page: The picture.
            provenance: Where it comes from.
            what: The method, and the chosen layers: runs that differ in them write different files.
            index: The class.
            alone: Whether it is the only picture of this image.
        """
        what = file_word(what)
        if len(what) > _LONGEST_WHAT:  # the checksum tells long names with the same beginning apart
            what = f"{what[: _LONGEST_WHAT - 9]}~{zlib.crc32(what.encode()):08x}"
        name = f"{self.word}-{model_word(self.net.name)}-{what}-{index}.png"
        path = self.run.path(name, self.source.origin.image, alone and len(self.run.files.paths) == 1)
        self.run.write(page, provenance, path)
        return path

    def row(self, prediction: scores.Prediction, peak: tuple[float, float] | None, more: Row, path: str) -> Row:
        """A row: the class, where the highest value is in pixels of the image, and ``more``."""
        x, y = peak or (None, None)
        return {
            "image": self.source.origin.image,
            "class": prediction.index,
            "label": prediction.label,
            "score": prediction.score,
            "probability": prediction.probability,
            "peak_x": None if x is None else round(x, 1),
            "peak_y": None if y is None else round(y, 1),
            "weights": self.net.weights,
            "file": path,
            **more,
        }


def explain_images(
    model: ModelOptions,
    paths: Sequence[str],
    options: ExplainOptions,
    places: tuple[OutputPath, ArrayFile],
    fields: Sequence[str],
    draw: Callable[[Explanation], Iterator[Row]],
) -> None:
    """Load the model, ``draw`` each image, print the rows as they come, and write the ``--raw`` file at the end.

    Raises:
        Exit: with status 1, an image could not be used.
    """
    place, raw = places
    run = PictureRun.load(model, paths, place)
    net, categories = run.net, categories_of(run.net, options.categories)
    scores.check_family(net.family, net.name)
    options.target.check(categories)

    def rows(read: Sequence[images.InputImage]) -> Iterator[Row]:
        [image] = read
        box = net.preprocess.seen_box(image.image.width, image.image.height)
        source = explain.OverlaySource(image.image, box, run.origin(read))
        yield from draw(Explanation(run, raw, net.prepare(image), source, run.files.words[image.name], categories))

    run.print_rows(rows, fields, options.format)
    raw.write()
    run.exit()
