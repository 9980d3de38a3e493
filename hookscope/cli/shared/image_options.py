"""Options of commands that take many images, and the list of these images."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import cached_property

import click

from hookscope import images
from hookscope.cli.fields import Options, argument, option
from hookscope.cli.output.formats import note
from hookscope.cli.shared.images import with_one_stdin
from hookscope.cli.shared.options import in_file
from hookscope.errors import ImageError, UsageError


class ImageList(Options):
    """The IMAGE arguments, ``--files0-from`` and ``--limit``."""

    topic = "images"

    paths: tuple[str, ...] = argument("[IMAGE]...", type=click.Path())
    files0_from: str | None = in_file(
        "Read names of images and folders from FILE (- for standard input), separated by NUL as by `find -print0`."
    )
    limit: int | None = option("Use only the first N images.")

    @cached_property
    def images(self) -> list[str]:
        """The names of the images: folders are walked, globs expanded."""
        return image_list(self.paths, self.files0_from, self.limit)

    @property
    def folders(self) -> list[str]:
        """The folders that were named."""
        return [path for path in self.paths if os.path.isdir(path)]


class BatchOptions(Options):
    """How many images go through the model at a time, and what happens to one that cannot be used."""

    topic = "images"

    batch_size: int = option("Images in one forward pass.", default=16)
    workers: int = option("Extra processes that read and prepare images.", default=0, least=0)
    strict: bool = option("Stop at the first image that cannot be used; do not skip it.")


def image_list(paths: Sequence[str], files0_from: str | None, limit: int | None = None) -> list[str]:
    """The first ``limit`` images of the command line or of a list of names; folders are walked, globs expanded."""
    if files0_from is None:
        if not paths:
            raise UsageError("no image was given", do="name files or folders, - for standard input, or --files0-from")
        return _found(with_one_stdin(paths), limit)
    if paths:
        asked = "images are named on the command line and in --files0-from"
        raise UsageError(asked, f"{paths[0]} and {files0_from}", "use one of the two")
    names = with_one_stdin(images.read_names(_list_content(files0_from), files0_from))
    if files0_from == "-" and "-" in names:
        asked = "standard input is the list of --files0-from and an image in it"
        raise UsageError(asked, do="write ./- for a file of that name")
    return _found(names, limit)


def _found(names: Sequence[str], limit: int | None) -> list[str]:
    with warnings.catch_warnings(record=True) as skipped:
        warnings.simplefilter("always", images.ImageWarning)
        pictures = images.find_pictures(names, limit)
    for warning in skipped:
        note(f"Note: {warning.message}")
    return pictures


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
