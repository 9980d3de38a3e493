"""The images of a run, read one by one: an image that cannot be used does not stop the others."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence

import click

from hookscope import images as image_reader, models
from hookscope.cli.output import formats as output
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
    """Print the notes on ``image`` on standard error, and return it."""
    for text in image.notes:
        output.note(f"Note: {image.name}: {text}")
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
        output.note(f"Error: {image}{error}", always=True)

    @property
    def status(self) -> int:
        """The exit status: 1 if an image could not be used."""
        return 1 if self.failed else 0
