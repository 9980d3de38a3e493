"""The images of a run, read one by one: what is wrong with one keeps none of the others from being done."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hookscope.cli.output import rows as output
from hookscope.errors import HookscopeError, UsageError

if TYPE_CHECKING:
    from hookscope.images import InputImage
    from hookscope.models import LoadedModel


class ImageFiles:
    """The images of a run: one that cannot be used is named on standard error, and the others are still done."""

    def __init__(self, paths: Sequence[str]) -> None:
        from hookscope.cli.shared.output_paths import image_words

        if paths.count("-") > 1:
            raise UsageError("standard input is named more than once", do="it can be read once: leave one -")
        self.paths = paths
        once = list(dict.fromkeys(paths))
        self.words = dict(zip(once, image_words(once), strict=True))
        self.failed = self.done = 0
        self._first: InputImage | None = None
        self._kept: bytes | None = None

    def read_first(self) -> None:
        """Read an only image before the model is loaded: a wrong name is told at once."""
        if len(self.paths) == 1:
            self._kept = _bytes_of_pipe(self.paths[0])
            self._first = self._read(self.paths[0], 1)

    def read(self, path: str, frames: int) -> InputImage:
        """The picture at ``path`` with so many frames."""
        return self._first if self._first is not None and frames == 1 else self._read(path, frames)

    def _read(self, path: str, frames: int) -> InputImage:
        from hookscope.images import read_picture

        source = path if self._kept is None else io.BytesIO(self._kept)
        return read_picture(source, frames=frames, name=path)

    def read_together(self, net: LoadedModel) -> list[InputImage]:
        """All of them, which one pass takes: one picture, or two for optical flow; their notes are told.

        Raises:
            UsageError: for two pictures and another model.
        """
        if len(self.paths) > 1 and net.family != "optical_flow":
            raise UsageError(f"{net.name} takes one image", f"there are {len(self.paths)}")
        read = [self.read(path, net.preprocess.frames) for path in self.paths]
        for picture in read:
            for text in picture.notes:
                output.note(f"Note: {picture.name}: {text}")
        return read

    def groups(self, size: int) -> list[Sequence[str]]:
        """The paths that go into one pass together: one, or for optical flow two."""
        if size == 2:
            if len(self.paths) > 2:
                raise UsageError("optical flow takes one or two pictures", f"there are {len(self.paths)}")
            return [self.paths]
        return [[path] for path in self.paths]

    def lost(self, error: HookscopeError) -> None:
        """Say what is wrong with one of several images and go on; an only one is the error of the run."""
        if len(self.paths) == 1:
            raise error
        self.failed += 1
        output.note(f"Error: {error}")


def _bytes_of_pipe(path: str) -> bytes | None:
    """What standard input or a FIFO holds, which can be read but once; None for all else and for what fails."""
    from hookscope.images import MAX_BYTES

    try:
        if path == "-":
            alone = sys.stdin is None or sys.stdin.isatty()
            return None if alone else sys.stdin.buffer.read(MAX_BYTES + 1)
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return None
        with open(path, "rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except (OSError, ValueError):
        return None
