"""Options of commands that take many images, and reports on images that cannot be used."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import click

from hookscope import images
from hookscope.cli.output import formats as output
from hookscope.cli.shared.images import with_one_stdin
from hookscope.cli.shared.options import count_option, file_option
from hookscope.errors import HookscopeError, ImageError, UsageError
from hookscope.findings import counted

_NOTES_SHOWN = 3
_KINDS_SHOWN = 3

images_argument = click.argument("paths", metavar="[IMAGE]...", nargs=-1, type=click.Path())
files0_option = file_option(
    "--files0-from",
    "Read the names of images and folders from FILE (- for standard input), each followed by NUL as `find -print0`"
    " writes them.",
)
batch_size_option = count_option("--batch-size", "Images in one forward pass.", 16)
workers_option = count_option(
    "--workers", "Number of processes that read and prepare images; 0: no extra process.", 0, least=0
)
limit_option = count_option("--limit", "Use only the first N images.")
strict_option = click.option(
    "--strict", is_flag=True, help="Stop at the first image that cannot be used instead of skipping it."
)


def image_list(paths: Sequence[str], files0_from: str | None, limit: int | None = None) -> list[str]:
    """The first ``limit`` images of the command line or of a list of names; folders are walked."""
    if files0_from is None:
        if not paths:
            raise UsageError("no image was given", do="name files or folders, - for standard input, or --files0-from")
        return images.find_pictures(with_one_stdin(paths), limit)
    if paths:
        asked = "images are named on the command line and in --files0-from"
        raise UsageError(asked, f"{paths[0]} and {files0_from}", "use one of the two")
    names = with_one_stdin(images.read_names(_list_content(files0_from), files0_from))
    if files0_from == "-" and "-" in names:
        asked = "standard input is the list of --files0-from and an image in it"
        raise UsageError(asked, do="write ./- for a file of that name")
    return images.find_pictures(names, limit)


def _list_content(source: str) -> bytes:
    if source == "-" and (sys.stdin is None or sys.stdin.isatty()):
        where = "closed" if sys.stdin is None else "the terminal"
        raise ImageError(f"no names on standard input: it is {where}", do="pipe them in: find ... -print0 | ...")
    try:
        if source == "-":
            content = sys.stdin.buffer.read(images.MAX_BYTES + 1)
        else:
            with open(source, "rb") as stream:
                content = stream.read(images.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"the names in '{source}' cannot be read: {reason}", do="check the path") from error
    if len(content) > images.MAX_BYTES:
        raise ImageError(f"'{source}' is too long for a list of names", f"the limit is {images.MAX_BYTES:,} bytes")
    return content


class Losses:
    """Reports lost images and the notes on others."""

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._noted = 0
        self._rest: Counter[str] = Counter()

    def lost(self, position: int, name: str, error: HookscopeError) -> None:
        """Report a lost image; with ``strict`` its error ends the run."""
        if self._strict:
            raise error
        output.note(f"Error: {error}")

    def note(self, name: str, text: str) -> None:
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
