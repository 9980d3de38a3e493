"""What a long run over images shows: its bar, the images that it loses, and how many its file holds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from hookscope.cli import process
from hookscope.cli.output import formats as output
from hookscope.cli.progress import image_progress
from hookscope.cli.shared.lost_images import LostImages
from hookscope.errors import LayerError
from hookscope.findings import counted


class ImageRun(LostImages):
    """The callbacks of a run over ``count`` images that saves them in ``file``; see `image_run`."""

    def __init__(self, stack: contextlib.ExitStack, count: int, file: str | None, strict: bool) -> None:
        super().__init__(strict or count == 1)  # the error of a single image ends the run
        self._stack, self._count, self._file = stack, count, file
        self.total = counted(count, "image")
        self._advance: Callable[[int], None] = lambda count: None

    def started(self, done: int) -> None:
        """Show the bar of the images that an earlier run has not done."""
        if done:
            output.note(f"Note: {self._file} holds {done:,} of {self.total}")
        self._advance = self._stack.enter_context(image_progress(self._count - done))
        self._stack.enter_context(process.prints_to_standard_error())

    def advance(self, count: int) -> None:
        """Move the bar on."""
        self._advance(count)

    def interrupted(self, done: int) -> None:
        """Say how many images the file holds, and what to do."""
        error = sys.exception()
        if done:
            fails_again = isinstance(error, LayerError)
            do = "change the options and start again with --overwrite" if fails_again else "add --resume to continue"
            output.note(f"Note: {self._file} holds {done:,} of {self.total}; {do}")
        elif isinstance(error, KeyboardInterrupt | SystemExit):  # an error says itself what happened
            output.note(f"Note: interrupted before an image was saved in {self._file}")


@contextlib.contextmanager
def image_run(count: int, file: str | None, strict: bool) -> Iterator[ImageRun]:
    """A ``with`` block around a run; its bar appears when the run has started."""
    with contextlib.ExitStack() as stack:
        run = ImageRun(stack, count, file, strict)
        yield run
        run.finish()
