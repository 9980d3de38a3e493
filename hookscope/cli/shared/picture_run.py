"""One run from images to pages: what ``visualize``, ``cam`` and ``saliency`` share."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

from hookscope import drawing, hooks, images, models, system
from hookscope.cli import process
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared.array_file import ArrayFile
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import caption_of, check_choice
from hookscope.cli.shared.output_paths import OutputPath, refuse_input, write_picture
from hookscope.cli.shared.subject import OfImages
from hookscope.columns import Columns, Row
from hookscope.errors import UsageError


class PictureCommand(OfImages):
    """A command that writes a picture or page for each image to the place of ``-o``."""

    suffixes: ClassVar[tuple[str, ...]] = (".png",)
    printed: ClassVar[Columns]
    """The columns of a row."""
    totals: ClassVar[Sequence[str]] = ()
    """Lines under a table."""

    output: str | None = None
    raw: str | None = None
    layers: hooks.Selection | None = None
    types: tuple[str, ...] = ()

    @cached_property
    def place(self) -> OutputPath:
        """Where the pictures go; not to a terminal."""
        place = OutputPath.parse(self.output, self.images, *self.suffixes)
        if place.kind == "stdout" and process.standard_output().isatty():
            what = "page" if self.suffixes == (".html",) else "picture"
            raise UsageError(f"-o - would write a {what} to the terminal", do="send it to a file or a pipe")
        return place

    @cached_property
    def arrays(self) -> ArrayFile:
        """The file of ``--raw``."""
        file = ArrayFile(self.raw)
        file.expect(2 if len(self.images) > 1 else 1)
        return file

    @cached_property
    def files(self) -> ImageFiles:
        """The images of the run."""
        return ImageFiles(self.images)

    @cached_property
    def net(self) -> models.LoadedModel:
        """The model, which must have layers of the ``types``; a single image is read first."""
        self.files.read_first()
        net = self.model.load()
        check_choice(net, self.types, self.layers)
        return net

    def check(self) -> None:
        _ = self.place, self.arrays
        super().check()

    def draw(self, read: Sequence[images.InputImage]) -> Iterator[Any]:
        """Write the pages of one forward pass, and yield a row for each."""
        raise NotImplementedError

    def shown(self, rows: Iterable[Row]) -> Iterable[Row]:
        """The rows of a table."""
        return rows

    def run(self) -> int:
        """Draw the images of each forward pass, and print the rows as they come.

        No rows are printed if a page goes to standard output. All pages are drawn, even when the reader of the rows
        leaves.
        """
        with self.arrays:
            self.place.check_count(len(self.files.groups(self.net)))
            drawn = self.files.rows(self.net, self.draw)
            if self.place.kind != "stdout":
                rows = Section(drawn, self.printed, totals=self.totals, shown=self.shown(drawn))
                self.print(Report([rows], caption=caption_of(self.net)))
            deque(drawn, maxlen=0)
        return self.files.status

    @property
    def is_single(self) -> bool:
        """Whether there is only one forward pass."""
        return len(self.files.groups(self.net)) == 1

    def path(self, name: str, image: str, is_only: bool) -> str:
        """The path of the page ``name`` of ``image``; ``is_only`` if the run makes no other page."""
        path = self.place.path_for(name, self.files.words[image], self.net.name, is_only)
        refuse_input(path, self.images)
        return path

    def write(self, page: Any, path: str) -> None:
        """Write a page with its provenance to ``path``, or to standard output with ``-o -``."""
        if self.place.kind == "stdout":
            write_bytes(drawing.encode_png(page))
            return
        if folder := os.path.dirname(path):
            system.make_folder(folder)
        write_picture(path, page)


def write_bytes(data: bytes) -> None:
    """Write a picture or a page to standard output."""
    stream = process.standard_output().buffer
    stream.write(data)
    stream.flush()
