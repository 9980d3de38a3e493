"""The line that says where pictures were written; ``--open``, which opens them; ``--show``, which draws them here."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from hookscope.cli.fields import Option
from hookscope.cli.output.formats import note
from hookscope.cli.shared import terminal
from hookscope.findings import counted, listed

if TYPE_CHECKING:
    from PIL.Image import Image


_WRITTEN, _OPENS, _ASKED = "hookscope.written", "hookscope.opens", "hookscope.asked"  # what a run shares
_SCREEN, _ARRAYS = "hookscope.screen", "hookscope.arrays"
_OPENERS = {"darwin": "open", "win32": "explorer"}
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
        terminal.check_terminal()
        context.meta[_SCREEN] = terminal.ask_terminal()


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
        quoted = f'"{target}"' if opener == "explorer" else shlex.quote(target)  # for cmd and PowerShell
        note(f"wrote {what}; open {which}: {opener} {quoted}")


def _show(written: Mapping[str, Callable[[], Image] | None], screen: terminal.Screen) -> None:
    """Draw the first pictures, each below a line with its name and scale, or the overviews of other files."""
    from PIL import Image

    for path, overview in islice(written.items(), _MOST_SHOWN):
        try:
            picture = Image.open(path) if overview is None else overview()
            drawing = terminal.draw(picture, screen)
        except (OSError, Image.DecompressionBombError):
            note(f"Note: {path} is not shown: it is not a PNG file, or too large")
            continue
        if overview is None:
            scale = terminal.fit(picture, screen)[2]
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
    if opener == "explorer":
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
