"""The line that says where pictures were written; ``--open``, which opens them; ``--show``, which draws them here."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import shlex
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TextIO

import click
from click.core import ParameterSource

from hookscope.cli.fields import Option
from hookscope.cli.output.formats import note
from hookscope.errors import InstallationError, UsageError
from hookscope.findings import counted, listed

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


_WRITTEN, _OPENS, _ASKED = "hookscope.written", "hookscope.opens", "hookscope.asked"  # what a run shares
_SCREEN, _ARRAYS = "hookscope.screen", "hookscope.arrays"
_OPENERS = {"darwin": "open", "win32": "start"}
_MOST_SHOWN = 4
_OPENER_SECONDS = 1.0  # until it has failed, or will not


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta[_OPENS] = value
    context.meta[_ASKED] = value and context.get_parameter_source("open") is ParameterSource.COMMANDLINE


def open_option() -> Option:
    help = "Open the written picture or page, or the folder of several, in the system's viewer."
    return Option(["--open"], topic="run", is_flag=True, expose_value=False, callback=_remember, help=help)


def _ask(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Ask what the terminal draws before anything is computed: while a model runs, the user may type."""
    is_asked = context.get_parameter_source("show") is ParameterSource.COMMANDLINE
    if value and not context.resilient_parsing and (is_asked or sys.stdout.isatty()):
        check_terminal()
        context.meta[_SCREEN] = ask_terminal()


def show_option() -> Option:
    help = "Draw the written pictures, or an overview of the page, in the terminal too; needs hookscope[terminal]."
    return Option(["--show"], topic="run", is_flag=True, expose_value=False, callback=_ask, help=help)


def wrote(path: str, overview: Callable[[], Image] | None = None) -> None:
    """Remember a picture that was written to ``path``; of another file ``overview`` makes what --show draws."""
    context = click.get_current_context(silent=True)
    if context is not None and os.path.isfile(path):  # a device cannot be opened
        context.meta.setdefault(_WRITTEN, {})[path] = overview


def wrote_arrays(path: str) -> None:
    """Remember a file or folder of numbers, which no viewer opens."""
    context = click.get_current_context(silent=True)
    if context is not None and (os.path.isfile(path) or os.path.isdir(path)):
        context.meta.setdefault(_ARRAYS, []).append(path)


def tell_what_was_written(context: click.Context) -> None:
    """Say in one line where the pictures of a run are, and how to open them; with ``--open``, open them."""
    written = context.meta.get(_WRITTEN, {})
    paths, arrays = [*written], context.meta.get(_ARRAYS, [])
    if not paths:
        if arrays:
            note(f"wrote {listed(arrays, 3)}")
        if sys.exception() is None:
            if context.meta.get(_ASKED):
                note("Note: --open opens nothing, because nothing was written to a file")
            if _SCREEN in context.meta:
                note("Note: --show shows nothing, because no picture was written to a file")
        return
    if _SCREEN in context.meta and not isinstance(sys.exception(), KeyboardInterrupt):
        _show(written, context.meta[_SCREEN])
    what, target, which = _in_words(paths)
    what = " and ".join([what, *arrays])
    target = os.path.join(".", target) if target.startswith("-") else target
    opener = _OPENERS.get(sys.platform, "xdg-open")
    if context.meta.get(_OPENS):
        failed = _open(opener, target)
        note(f"wrote {what}; cannot open {which}: {failed}" if failed else f"wrote {what}")
    else:
        note(f"wrote {what}; open {which}: {opener} {shlex.quote(target)}")


def _show(written: Mapping[str, Callable[[], Image] | None], screen: Screen) -> None:
    """Draw the first pictures, each below a line with its name and scale, or the overviews of other files."""
    from PIL import Image

    for path, overview in islice(written.items(), _MOST_SHOWN):
        try:
            picture = Image.open(path) if overview is None else overview()
            drawing = draw(picture, screen)
        except (OSError, Image.DecompressionBombError):
            note(f"Note: {path} is not shown: it is not a PNG file, or too large")
            continue
        if overview is None:
            scale = fit(picture, screen)[2]
            note(f"{path}: {picture.width}x{picture.height} pixels" + (f", drawn at {scale:.0%}" if scale < 1 else ""))
        print(drawing, end="", flush=True)
    if (more := len(written) - _MOST_SHOWN) > 0:
        note(f"{counted(more, 'more picture')} not shown")


def _in_words(paths: Sequence[str]) -> tuple[str, str, str]:
    """What was written, the file or folder to open, and a word for it."""
    folders = list(dict.fromkeys(map(os.path.dirname, paths)))
    if len(paths) == 1 or "" in folders:
        return listed(paths, 3), paths[0], "it" if len(paths) == 1 else "the first"
    where = listed([os.path.join(folder, "") for folder in folders], 3)
    return f"{counted(len(paths), 'picture')} to {where}", folders[0], "it" if len(folders) == 1 else "the first"


def _open(opener: str, path: str) -> str:
    """Open a file or folder; returns why that failed, or an empty text."""
    if opener == "start":
        os.startfile(path)  # type: ignore[attr-defined,unused-ignore]  # of Windows
        return ""
    if opener == "xdg-open" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "there is no display"
    import subprocess  # `hookscope --help` needs none of it

    nowhere = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            [opener, path], stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
        status = process.wait(_OPENER_SECONDS)
    except subprocess.TimeoutExpired:  # it waits for the viewer, and is left alone
        process.returncode = status = 0
    except OSError as error:
        return f"{opener}: {error.strerror}"
    return f"{opener} ended with status {status}" if status else ""
