"""The images of a run: their names, and how they are read. An image that cannot be used does not stop the others."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import click

from hookscope import images as image_reader, models
from hookscope.cli.fields import Options, argument, option
from hookscope.cli.output.formats import note
from hookscope.cli.shared.options import in_file
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
        for paths in self.groups(net):
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
        note(f"Error: {image}{error}", always=True)

    @property
    def status(self) -> int:
        """The exit status: 1 if an image could not be used."""
        return 1 if self.failed else 0


class ImageList(Options):
    """The IMAGE arguments, ``--files0-from`` and ``--limit``."""

    topic = "images"

    paths: tuple[str, ...] = argument("[IMAGE]...", type=click.Path())
    files0_from: str | None = in_file(
        "Read names of images and folders from FILE (- for standard input), separated by NUL as by `find -print0`."
    )
    limit: int | None = option("Use only the first N image_reader.")

    @cached_property
    def images(self) -> list[str]:
        """The names of the images: folders are walked, globs expanded."""
        return image_list(self.paths, self.files0_from, self.limit)

    @property
    def folders(self) -> list[str]:
        return [path for path in self.paths if os.path.isdir(path)]


def image_list(paths: Sequence[str], files0_from: str | None, limit: int | None = None) -> list[str]:
    """The first ``limit`` images of the command line or of a list of names; folders are walked, globs expanded."""
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
