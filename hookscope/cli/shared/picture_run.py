"""One run from images to pages: what ``visualize``, ``cam`` and ``saliency`` share."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hookscope import drawing, hooks, images, models, system
from hookscope.cli import process
from hookscope.cli.command import OfImages
from hookscope.cli.output import formats
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared.array_file import ArrayFile
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import caption_of, check_choice
from hookscope.cli.shared.output_paths import OutputPath, refuse_input, write_picture
from hookscope.columns import Columns, Row
from hookscope.errors import UsageError


class PictureCommand(OfImages):
    """A command that writes a picture or page for each image to the place of ``-o``."""

    suffixes: ClassVar[tuple[str, ...]] = (".png",)
    output: str | None = None
    raw: str | None = None

    @cached_property
    def place(self) -> OutputPath:
        """Where the pictures go; not to a terminal."""
        place = OutputPath.parse(self.output, self.images, *self.suffixes)
        if place.kind == "stdout" and process.standard_output().isatty():
            what = "page" if self.suffixes == (".html",) else "picture"
            raise UsageError(f"-o - would write a {what} to the terminal", do="send it to a file or a pipe")
        return place

    def check(self) -> None:
        _ = self.place
        super().check()

    def array_file(self, several: bool = False) -> ArrayFile:
        """The file of ``--raw``; ``several`` says that an image makes several arrays."""
        file = ArrayFile(self.raw)
        file.expect(2 if several or len(self.images) > 1 else 1)
        return file


def write_bytes(data: bytes) -> None:
    """Write a picture or a page to standard output."""
    stream = process.standard_output().buffer
    stream.write(data)
    stream.flush()


@dataclass(frozen=True)
class PictureRun:
    """A model, the images of a run and the place of its pages."""

    net: models.LoadedModel
    files: ImageFiles
    output: OutputPath

    @classmethod
    def load(
        cls, command: PictureCommand, types: Sequence[str] = (), layers: hooks.Selection | None = None
    ) -> PictureRun:
        """Load the model, which must have layers of the ``types``; a single image is read first."""
        files = ImageFiles(command.images)
        files.read_first()
        net = command.model.load()
        check_choice(net, types, layers)
        return cls(net, files, command.place)

    def print_rows(
        self,
        draw: Callable[[Sequence[images.InputImage]], Iterator[Row]],
        columns: Columns,
        format: str,
        shown: Callable[[Iterable[Row]], Iterable[Row]] = iter,
        totals: Sequence[str] = (),
    ) -> None:
        """Call ``draw`` with the images of each forward pass, and print its rows as they come.

        A table has the rows that ``shown`` takes of them, and ``totals`` under them.
        No rows are printed if a page goes to standard output. All pages are drawn, even when the reader of the rows
        leaves.
        """
        self.output.check_count(len(self.files.groups(self.net)))
        drawn = self.files.rows(self.net, draw)
        with process.reader_may_leave():
            if self.output.kind == "stdout":
                deque(drawn, maxlen=0)
                return
            rows = Section(drawn, columns, totals=totals, shown=shown(drawn))
            try:
                formats.write_report(Report([rows], caption=caption_of(self.net)), format)
            except BrokenPipeError:
                deque(drawn, maxlen=0)
                raise

    def print_report(self, report: Report, format: str) -> None:
        """Print ``report``, unless a page goes to standard output."""
        if self.output.kind != "stdout":
            with process.reader_may_leave():
                formats.write_report(report, format)

    @property
    def is_single(self) -> bool:
        """Whether there is only one forward pass."""
        return len(self.files.groups(self.net)) == 1

    def origin(self, inputs: Sequence[images.InputImage]) -> drawing.Origin:
        """Where a page comes from."""
        return drawing.Origin.of(self.net, *inputs)

    def path(self, name: str, image: str, is_only: bool) -> str:
        """The path of the page ``name`` of ``image``; ``is_only`` if the run makes no other page."""
        path = self.output.path_for(name, self.files.words[image], self.net.name, is_only)
        refuse_input(path, self.files.paths)
        return path

    def write(self, page: Any, path: str) -> None:
        """Write a page with its provenance to ``path``, or to standard output with ``-o -``."""
        if self.output.kind == "stdout":
            write_bytes(drawing.encode_png(page))
            return
        if folder := os.path.dirname(path):
            system.make_folder(folder)
        write_picture(path, page)
