"""Pictures in the terminal: what it can draw, and a picture in its language, which textual-image writes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from hookscope.errors import InstallationError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

_SECONDS = 0.4  # for the answers of a terminal
_KITTY, _CELL, _ATTRIBUTES = "\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\", "\x1b[16t", "\x1b[c"  # questions
_ERASE = "\r\x1b[K"  # what an old terminal prints of them
_ROWS_BELOW = 3  # for the lines around a picture
_MOST_COLUMNS = 297  # textual-image has no more numbers for the columns of a kitty picture


@dataclass(frozen=True)
class Screen:
    """What a terminal draws: ``kitty``, ``sixel`` or ``blocks``; ``cell`` is (width, height) in pixels."""

    protocol: str = "blocks"
    cell: tuple[int, int] = (10, 20)


def check_terminal() -> None:
    """Refuse pictures where standard output cannot show them, or where textual-image is missing."""
    cure = "leave --show out, or use --open"
    if not sys.stdout.isatty():
        raise UsageError("--show needs a terminal", "standard output is a file or a pipe", cure)
    if (term := os.environ.get("TERM")) in ("dumb", "unknown"):
        raise UsageError("--show needs a terminal with colours", f"TERM is {term}", cure)
    try:
        import textual_image  # noqa: F401
    except ModuleNotFoundError as error:
        cure = "pip install 'hookscope[terminal]'"
        raise InstallationError("--show needs textual-image, which is not installed", do=cure) from error


def ask_terminal() -> Screen:
    """What the terminal of standard output draws; half blocks if it does not answer in time."""
    if sys.platform == "win32":
        return Screen()
    try:
        file = os.open(os.ttyname(sys.stdout.fileno()), os.O_RDWR | os.O_NOCTTY)
    except (OSError, ValueError):
        return Screen()
    try:
        # the answer would go to another program if this one runs in the background or writes to a foreign terminal
        return _screen(file) if os.tcgetpgrp(file) == os.getpgrp() else Screen()
    except OSError:
        return Screen()
    finally:
        os.close(file)


def _screen(file: int) -> Screen:
    """Ask all at once: each terminal answers the last question, so that only a silent one costs time."""
    term = os.environ.get("TERM", "")
    # tmux and screen cannot draw kitty's pictures and may take the question for a title; Linux's console prints it
    may_be_kitty = "TMUX" not in os.environ and not term.startswith(("tmux", "screen", "linux"))
    answer = _answer(file, (_KITTY if may_be_kitty else "") + _CELL + _ATTRIBUTES + _ERASE)
    attributes = re.search(r"\x1b\[\?([\d;]*)c", answer)
    if attributes and "4" in attributes[1].split(";")[1:]:
        protocol = "sixel"  # before kitty's: some know both, but not the part of kitty's that textual-image uses
    else:
        protocol = "kitty" if ";OK\x1b\\" in answer else "blocks"
    return Screen(protocol, _cell_size(file, answer))


def _answer(file: int, question: str) -> str:
    import termios
    import tty

    mode, text = termios.tcgetattr(file), ""
    try:
        tty.setcbreak(file, termios.TCSANOW)  # else the terminal shows the answer, and waits for the end of a line
        os.write(file, question.encode())
        end = time.monotonic() + _SECONDS
        while not re.search(r"\x1b\[\?[\d;]*c", text) and (left := end - time.monotonic()) > 0:
            if select.select([file], [], [], left)[0]:
                text += os.read(file, 1024).decode("latin-1")
    except termios.error as error:
        raise OSError(*error.args) from error
    finally:
        termios.tcsetattr(file, termios.TCSANOW, mode)
    return text


def _cell_size(file: int, answer: str) -> tuple[int, int]:
    import fcntl
    import termios

    rows, columns, wide, high = struct.unpack("4H", fcntl.ioctl(file, termios.TIOCGWINSZ, bytes(8)))
    if rows and columns and wide >= columns and high >= rows:
        return wide // columns, high // rows
    said = re.search(r"\x1b\[6;([1-9]\d{0,2});([1-9]\d{0,2})t", answer)
    return (int(said[2]), int(said[1])) if said else Screen.cell


def fit(picture: Image, screen: Screen) -> tuple[int, int, float]:
    """The columns and rows that a picture takes, and its scale: as large as the terminal shows it whole, at most 1."""
    most_columns, most_rows = shutil.get_terminal_size()
    most_columns, most_rows = min(most_columns, _MOST_COLUMNS), max(1, most_rows - _ROWS_BELOW)
    wide, high = _pixels(screen)
    scale = min(1.0, most_columns * wide / picture.width, most_rows * high / picture.height)
    if scale == 1:  # its pixels stay, and the rest of the last cells is filled
        return -(-picture.width // wide), -(-picture.height // high), scale
    rows = max(1, round(scale * picture.height / high))
    columns = round(rows * high / picture.height * picture.width / wide)
    return min(max(1, columns), most_columns), min(rows, most_rows), scale


def _pixels(screen: Screen) -> tuple[int, int]:
    return (1, 2) if screen.protocol == "blocks" else screen.cell


def draw(picture: Image, screen: Screen) -> str:
    """What to write so that the terminal draws ``picture``; it ends at the start of a line."""
    import PIL.Image
    from rich.console import Console

    columns, rows, scale = fit(picture, screen)
    wide, high = _pixels(screen)
    size, shown = (columns * wide, rows * high), picture.convert("RGB")
    if scale == 1:
        small = PIL.Image.new("RGB", size, shown.getpixel((picture.width - 1, picture.height - 1)))
        small.paste(shown)
    else:
        small = shown.resize(size, PIL.Image.Resampling.BOX)
    stream = io.StringIO()
    with _as_terminal(stream, screen):
        from textual_image import renderable

        kinds = {"kitty": renderable.TGPImage, "sixel": renderable.SixelImage, "blocks": renderable.HalfcellImage}
        console = Console(
            file=stream,
            force_terminal=True,
            # kitty reads the number of the picture from the colour of its cells; it takes all colours
            color_system="truecolor" if screen.protocol == "kitty" else "auto",
            no_color=False,
            width=columns,
            height=rows,
        )
        console.print(kinds[screen.protocol](small, columns, rows), end="")
    return stream.getvalue()


@contextlib.contextmanager
def _as_terminal(stream: TextIO, screen: Screen) -> Iterator[None]:
    """Let textual-image write to ``stream``, which is not a terminal: it asks a terminal when it is imported.

    Versions wait 0.1 s, too short for SSH, or 2 s, fail if standard input is a pipe, and change the title in tmux.
    """
    stdout, environment = sys.__stdout__, dict(os.environ)
    os.environ |= dict(zip(("TEXTUAL_CELL_WIDTH", "TEXTUAL_CELL_HEIGHT"), map(str, screen.cell), strict=True))
    sys.__stdout__ = stream  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        sys.__stdout__ = stdout  # type: ignore[misc]
        os.environ.clear()
        os.environ |= environment
