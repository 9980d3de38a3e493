"""What commands look at: the images of a run, MODEL and how it is loaded, and the bases of commands about them.

An image that cannot be used does not stop the others. `list-layers` starts sooner without this file.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

import click

from hookscope import hooks, images as image_reader, models
from hookscope.cli import process, progress
from hookscope.cli.command import RowCommand
from hookscope.cli.fields import GIVEN, Options, argument, group, option
from hookscope.cli.output.formats import Output, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import image_words
from hookscope.columns import Row
from hookscope.errors import (
    AbsentTargetError,
    HookscopeError,
    ImageError,
    InputError,
    LayerError,
    NoMapError,
    UsageError,
    printable,
)


def with_notes(image: image_reader.InputImage) -> image_reader.InputImage:
    for text in image.notes:
        note(f"Note: {image.name}: {text}")
    return image


def with_one_stdin(names: Sequence[str]) -> Sequence[str]:
    """Return ``names``; refuse standard input as two of them."""
    if names.count("-") > 1:
        raise UsageError("standard input is named more than once", do="it can be read once: leave one -")
    return names


class ImageFiles:
    """The images of a run.

    Attributes:
        paths: The files, ``-`` for standard input.
        words: The name of each file as part of file names.
        done: How many images, or pairs of them, have been used.
        failed: How many could not be used.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = with_one_stdin(paths)
        distinct = list(dict.fromkeys(paths))
        self.words = dict(zip(distinct, image_words(distinct), strict=True))
        self.failed = self.done = 0
        self._first: image_reader.InputImage | None = None
        self._content: bytes | None = None

    def read_first(self) -> None:
        """Read a single image before the model is loaded, so that a wrong name is reported at once."""
        if len(self.paths) == 1:
            self._content = image_reader.read_pipe(self.paths[0])
            self._first = self._read(self.paths[0], 1)

    def read(self, path: str, frames: int) -> image_reader.InputImage:
        """The image at ``path`` with so many frames; notes on it go to standard error."""
        return with_notes(self._first if self._first is not None and frames == 1 else self._read(path, frames))

    def _read(self, path: str, frames: int) -> image_reader.InputImage:
        source = path if self._content is None else io.BytesIO(self._content)
        return image_reader.read_picture(source, frames=frames, name=path)

    def usable(self, frames: int) -> list[image_reader.InputImage]:
        """All images that can be read; another is reported, or ends the run if it is the only one."""
        read = []
        for path in self.paths:
            try:
                read.append(self.read(path, frames))
            except ImageError as error:
                self._failed(error)
        self.done += len(read)
        if not read:
            raise click.exceptions.Exit(1)
        return read

    def groups(self, net: models.LoadedModel) -> list[Sequence[str]]:
        """The paths of each forward pass: one, or for optical flow one or two."""
        if net.family != "optical_flow":
            return [[path] for path in self.paths]
        if len(self.paths) > 2:
            raise UsageError("optical flow takes one or two images", f"{len(self.paths)} were given")
        return [self.paths]

    def rows(
        self, net: models.LoadedModel, rows_of_pass: Callable[[Sequence[image_reader.InputImage]], Iterator[Row]]
    ) -> Iterator[Row]:
        """The rows of all passes; an image that cannot be used is reported, or ends the run if it is the only one."""
        groups = self.groups(net)
        for number, paths in enumerate(groups, 1):
            if len(groups) > 1:
                Output.now.begin(f"image {number:,} of {len(groups):,}")
            try:
                yield from rows_of_pass([self.read(path, net.preprocess.frames) for path in paths])
            except (AbsentTargetError, ImageError, InputError, NoMapError, LayerError) as error:
                # a layer that has no map for the first image has none for any image
                if isinstance(error, NoMapError | LayerError) and not self.done:
                    raise
                named = isinstance(error, ImageError)
                self._failed(error, "" if named else f"{printable(', '.join(paths))}: ")
            else:
                self.done += 1

    def _failed(self, error: HookscopeError, image: str = "") -> None:
        if len(self.paths) == 1:
            raise error
        self.failed += 1
        Output.now.image_error(f"{image}{error}")

    @property
    def status(self) -> int:
        """The exit status: 1 if an image could not be used."""
        return 1 if self.failed else 0


class ImageList(Options):
    """The IMAGE arguments, ``--files0-from`` and ``--limit``."""

    topic = "images"

    paths: tuple[str, ...] = argument("[IMAGE]...", type=click.Path())
    files0_from: str | None = shared.in_file(
        "Read names of images and folders from FILE (- for standard input), separated by NUL as by `find -print0`."
    )
    limit: int | None = option("Use only N images, at equal distances in the list.")

    @cached_property
    def images(self) -> list[str]:
        """The names of the images: folders are walked, globs expanded."""
        return image_list(self.paths, self.files0_from, self.limit)

    @property
    def folders(self) -> list[str]:
        return [path for path in self.paths if os.path.isdir(path)]


def image_list(paths: Sequence[str], files0_from: str | None, limit: int | None = None) -> list[str]:
    """The images of the command line or of a list of names, at most ``limit``; folders are walked, globs expanded."""
    if files0_from is None:
        if not paths:
            raise UsageError("no image was given", do="name files or folders, - for standard input, or --files0-from")
        return _found(with_one_stdin(paths), limit)
    if paths:
        asked = "images are named on the command line and in --files0-from"
        raise UsageError(asked, f"{paths[0]} and {files0_from}", "use one of the two")
    names = with_one_stdin(image_reader.read_names(_list_content(files0_from), files0_from))
    if files0_from == "-" and "-" in names:
        asked = "standard input is the list of --files0-from and an image in it"
        raise UsageError(asked, do="write ./- for a file of that name")
    return _found(names, limit)


def _found(names: Sequence[str], limit: int | None) -> list[str]:
    with warnings.catch_warnings(record=True) as skipped:
        warnings.simplefilter("always", image_reader.ImageWarning)
        pictures = image_reader.find_pictures(names, limit)
    for warning in skipped:
        note(f"Note: {warning.message}")
    return pictures


def _list_content(source: str) -> bytes:
    if source == "-" and (sys.stdin is None or sys.stdin.isatty()):
        where = "closed" if sys.stdin is None else "the terminal"
        raise ImageError(f"no names on standard input: it is {where}", do="pipe them in: find ... -print0 | ...")
    try:
        if source == "-":
            content = sys.stdin.buffer.read(image_reader.MAX_BYTES + 1)
        else:
            with open(source, "rb") as stream:
                content = stream.read(image_reader.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"the names in '{source}' cannot be read: {reason}", do="check the path") from error
    if len(content) > image_reader.MAX_BYTES:
        raise ImageError(
            f"'{source}' is too long for a list of names", f"the limit is {image_reader.MAX_BYTES:,} bytes"
        )
    return content


class ModelOptions(Options):
    """MODEL, ``--weights``, ``--seed``, ``--device`` and how pictures become inputs."""

    topic = "model"

    model: str = shared.model_argument()
    weights: str = option(
        "auto (trained weights if available, else random), default or a name such as IMAGENET1K_V2 (trained, or an"
        " error), none (random), or a checkpoint: a file or folder.",
        metavar="WEIGHTS",
        default="auto",
        shell_complete=shared.complete_weights,
    )
    seed: int = option("Seed of random weights.", metavar="N", type=shared.seed, default=0)
    device: str = shared.device_option()
    preprocess: Any = option(
        "How images become inputs: weights (as the weights or the model say), imagenet, half (mean and std 0.5),"
        " stretch, none (no resizing), or file.py:function. More in docs/concepts/weights-and-models.md.",
        metavar="HOW",
        default="weights",
        parse=lambda text: models.parse_preprocess(text),
        shell_complete=shared.complete_preprocess,
    )
    resize: tuple[Any, ...] | None = option(
        "How images get the input size. shorter: resize the shorter side, then crop the centre; shorter:256: resize"
        " it to 256, then crop; stretch: resize both sides; pad: resize the longer side and add a black border.",
        metavar="HOW",
        parse=lambda text: models.parse_resize(text),
        shell_complete=shared.complete_words(*models.RESIZE_WORDS),
    )
    mean: tuple[float, ...] | None = option(
        "Mean to subtract from the colours: one number, or one for each channel, such as 0.485,0.456,0.406.",
        metavar="NUMBERS",
        parse=lambda text: models.parse_numbers(text, "mean"),
    )
    std: tuple[float, ...] | None = option(
        "With --mean: standard deviation that divides the colours, one number or one for each channel.",
        metavar="NUMBERS",
        parse=lambda text: models.parse_numbers(text, "std"),
    )
    range: tuple[float, float] | None = option(
        "Range of the colours before --mean and --std: 0..1, -1..1 or 0..255. Without --mean: no mean and std.",
        metavar="LOW..HIGH",
        parse=lambda text: models.parse_range(text),
    )
    input_size: tuple[int, ...] | None = shared.size_option()
    model_output: str | None = option(
        "Which tensor to use if the model returns several: its name, or its position from 0.", metavar="NAME"
    )

    def load(self, pictures: bool = True) -> models.LoadedModel:
        """Load the model, for ``pictures`` or other work; notes and the progress go to standard error."""
        source = models.find_source(self.model)  # an unknown name fails before torch is imported
        name = models.short_name(self.model)
        Output.now.begin(f"loading {name}")
        options = {field.name: getattr(self, field.name) for field in fields(ModelOptions)}
        options |= {"model": source, "weights": models.WeightsChoice.parse(self.weights)}
        with process.prints_to_standard_error(), progress.download_progress() as show:
            net = models.load_model(**options, progress=show)
        for text in net.notes:
            if text != net.missing_weights:  # of which a warning told
                note(f"Note: {text}")
        if pictures:
            note_assumption(net)
        Output.now.begin(f"running {name}")
        return net


def with_subject(text: str, model: str, image: str, images: Sequence[str]) -> str:
    """``text`` with complete commands: MODEL, IMAGE and IMAGES, and the options of the model and of images as given.

    An option that a command lacks is left out.
    """
    context = click.get_current_context()

    def complete(match: re.Match[str]) -> str:
        group = context.parent.command if context.parent else None
        command = group.get_command(context, match[1]) if isinstance(group, click.Group) else None
        names = {param.name for param in command.params} if command else set()
        topics = ("model", "images") if match[2] == "IMAGES" else ("model",)
        options = [
            word
            for option, given in context.meta.get(GIVEN, {}).items()
            if option.topic in topics and option.name in names
            for value in (given if isinstance(given, list | tuple) else [given])
            for word in (max(option.opts, key=len), value)
        ]
        named = images if match[2] == "IMAGES" else [image]
        return shlex.join(["hookscope", match[1], model, *named, *options])

    return re.sub(r"hookscope ([a-z-]+) MODEL (IMAGES?)\b", complete, text)


def note_assumption(net: models.LoadedModel) -> None:
    """Say what is assumed of how images become inputs, if the model leaves it open."""
    if net.preprocess.assumed:
        what, options = _TO_SAY[net.preprocess.assumed]
        assumed = f"does not state {what}: assumed {net.preprocess.assumption}"
        note(f"Note: {net.name} {assumed}; change it with {options}")


_TO_SAY = {
    ("size", "values"): ("its preprocessing", "--preprocess, --mean, --std, --size"),
    ("size",): ("its input size", "--size, --resize"),
    ("values",): ("its mean and std", "--mean, --std, --range"),
}


@contextmanager
def running(net: models.LoadedModel, inputs: Any) -> Iterator[None]:
    """Run the model inside: what it prints goes to standard error, what it raises is an InputError."""
    with process.prints_to_standard_error(), models.model_errors_as_input_errors(net.name, inputs):
        yield


def check_choice(net: models.LoadedModel, types: Sequence[str], *selections: hooks.Selection | None) -> None:
    """Refuse a ``--type`` that no layer has.

    A note names each index of ``selections``, which are of no pass, that is the name of a layer too.
    """
    layers = net.model.named_modules()
    fits = (hooks.matches_type(hooks.class_names(layer), types, hooks.is_single(name, layer)) for name, layer in layers)
    if types and not any(fits):
        raise hooks.no_such_type(types, hooks.types_in(net.model))
    indices = {text: None for selection in selections if selection is not None for text in selection.single_indices}
    if names := [text for text in indices if text in dict(net.model.named_modules())]:
        are = "is an index" if len(names) == 1 else "are indices"
        note(f"Note: {', '.join(names)} {are}; the layer named {names[0]} is name:{names[0]}")


def caption_of(net: models.LoadedModel, images: Sequence[Any] = ()) -> dict[str, Any]:
    """What the caption of a table says of the model, and of the images if all rows are about them."""
    caption = {"model": net.name, "weights": net.weights, "preprocess": net.preprocess.describe()}
    return caption | ({"image": ", ".join(image.name for image in images)} if images else {})


class OfModel(RowCommand):
    """A command about a model."""

    model: ModelOptions = group(ModelOptions)

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model.model.partition(":")[0]
        yield "weights", self.model.weights


class OfPictures(OfModel):
    """A command about what a model does with images."""

    paths: tuple[str, ...] = shared.image_argument()
    layers: hooks.Selection | None = None
    types: tuple[str, ...] = ()

    @property
    def images(self) -> Sequence[str]:
        return self.paths

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield from super().inputs()
        yield from (("image", path) for path in self.images)

    @cached_property
    def files(self) -> ImageFiles:
        return ImageFiles(self.images)

    @cached_property
    def net(self) -> models.LoadedModel:
        """The model, which must have layers of the ``types``; a single image is read first."""
        self.files.read_first()
        net = self.model.load(pictures=bool(self.images))
        self.check_net(net)
        return net

    def check_net(self, net: models.LoadedModel) -> None:
        check_choice(net, self.types)


class OfImage(OfPictures):
    """A command about one forward pass: of one image, or of two for optical flow."""

    def check(self) -> None:
        if len(self.paths) > 2:
            raise UsageError(f"expected one image, or two for optical flow, got {len(self.paths)}")
        super().check()

    def check_net(self, net: models.LoadedModel) -> None:
        if len(self.paths) > 1 and net.family != "optical_flow":
            raise UsageError(f"{net.name} takes one image", f"{len(self.paths)} were given", "give one")
        super().check_net(net)

    @cached_property
    def read_images(self) -> Sequence[image_reader.InputImage]:
        return [self.files.read(path, self.net.preprocess.frames) for path in self.paths]

    @cached_property
    def tensors(self) -> Sequence[Any]:
        return [self.net.prepare(image) for image in self.read_images]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the model is called with."""
        return self.net.inputs(*self.tensors)

    @property
    def caption(self) -> dict[str, Any]:
        caption = caption_of(self.net, self.read_images)
        return caption if self.paths else {name: caption[name] for name in ("model", "weights")}

    def running(self) -> AbstractContextManager[None]:
        """The context in which the model runs on these images."""
        return running(self.net, self.tensors)


class OfImages(ImageList, OfPictures):
    """A command about images, one after another."""

    tells_classes: ClassVar[bool] = False
    """Whether it says first that the answers of random weights mean nothing."""

    def check_net(self, net: models.LoadedModel) -> None:
        super().check_net(net)
        is_chosen = net.missing_weights or self.model.weights == "none"
        if self.tells_classes and models.is_random(net.weights) and not is_chosen:
            note(f"Note: {net.name} loads no trained weights ({net.weights}); its answers mean nothing")
