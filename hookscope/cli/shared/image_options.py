"""Options of commands that take many images, and the list of these images."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import click

from hookscope import images
from hookscope.cli.output.formats import note
from hookscope.cli.shared.engine_options import engine_options
from hookscope.cli.shared.images import with_one_stdin
from hookscope.cli.shared.model import model_options
from hookscope.cli.shared.options import apply_options, count_option, file_option
from hookscope.errors import ImageError, UsageError

images_argument = click.argument("paths", metavar="[IMAGE]...", nargs=-1, type=click.Path())
files0_option = file_option(
    "--files0-from",
    "Read names of images and folders from FILE (- for standard input), separated by NUL as by `find -print0`.",
)
batch_size_option = count_option("--batch-size", "Images in one forward pass.", 16)
workers_option = count_option("--workers", "Extra processes that read and prepare images.", 0, least=0)
limit_option = count_option("--limit", "Use only the first N images.")
strict_option = click.option(
    "--strict", is_flag=True, help="Stop at the first image that cannot be used; do not skip it."
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a run over many images: the list of them, batches, workers, the engine and the model."""
    options = [files0_option, limit_option, batch_size_option, workers_option, strict_option]
    return apply_options([*options, engine_options, model_options], command)


def image_inputs(command: Callable[..., Any]) -> Callable[..., Any]:
    """The IMAGE arguments, ``--files0-from`` and ``--limit``; the command gets the names of the images as ``paths``."""

    @functools.wraps(command)
    def with_images(paths: Sequence[str], files0_from: str | None, limit: int | None, **values: Any) -> Any:
        return command(paths=image_list(paths, files0_from, limit), **values)

    return apply_options([images_argument, files0_option, limit_option], with_images)


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
