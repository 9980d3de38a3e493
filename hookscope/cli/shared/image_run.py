"""What a long run over images shows: its bar, the images that it skips, and how many its file holds."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from hookscope.cli import process
from hookscope.cli.output import formats as output
from hookscope.cli.progress import image_progress
from hookscope.errors import HookscopeError, LayerError
from hookscope.findings import counted
from hookscope.images import Listener

_NOTES_SHOWN = 3
_KINDS_SHOWN = 3


class ImageRun:
    """What a run over ``count`` images shows, which it saves in ``file``; see `image_run`.

    Attributes:
        listener: What the run calls.
        skipped: Number of images that could not be used.
        total: Number of images in words.
    """

    def __init__(self, stack: contextlib.ExitStack, count: int, file: str | None, strict: bool) -> None:
        self._stack, self._count, self._file = stack, count, file
        self._strict = strict or count == 1  # the error of a single image ends the run
        self.total = counted(count, "image")
        self.skipped = 0
        self._noted = 0
        self._rest: Counter[str] = Counter()
        self._advance: Callable[[int], None] = lambda count: None

    @property
    def listener(self) -> Listener:
        return Listener(self._start, lambda count: self._advance(count), self._skip, self._note, self._interrupt)

    def _skip(self, position: int, name: str, error: HookscopeError) -> None:
        """Report an image; with ``strict`` its error ends the run."""
        if self._strict:
            raise error
        self.skipped += 1
        output.note(f"Error: {error}", always=True)

    def _note(self, name: str, text: str) -> None:
        """Print the first three notes; a folder may hold thousands of images with the same note."""
        self._noted += 1
        if self._noted <= _NOTES_SHOWN:
            output.note(f"Note: {name}: {text}")
        else:
            self._rest[text] += 1

    def finish(self) -> None:
        """Sum up in one line the notes that were not shown."""
        if not self._rest:
            return
        total, shown = self._rest.total(), self._rest.most_common(_KINDS_SHOWN)
        kinds = [f"{text} ({count})" for text, count in shown]
        others = total - sum(count for _, count in shown)
        kinds += [f"others ({others})"] if others else []
        output.note(f"Note: {counted(total, 'more note')}: {', '.join(kinds)}")

    def _start(self, done: int) -> None:
        """Show the bar of the images that an earlier run has not done."""
        if done:
            output.note(f"Note: {self._file} holds {done:,} of {self.total}")
        self._advance = self._stack.enter_context(image_progress(self._count - done))
        self._stack.enter_context(process.prints_to_standard_error())

    def _interrupt(self, done: int) -> None:
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
