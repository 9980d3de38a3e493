"""The line that says where pictures were written and how to open them, and ``--open``, which opens them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import click
from click.core import ParameterSource

from hookscope.cli.output.formats import note
from hookscope.findings import counted, listed

_WRITTEN, _OPENS, _ASKED = "hookscope.written", "hookscope.opens", "hookscope.asked"  # what a run shares
_OPENERS = {"darwin": "open", "win32": "start"}
_SECONDS = 1.0  # until the opener has failed, or will not


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta[_OPENS] = value
    context.meta[_ASKED] = value and context.get_parameter_source("open") is ParameterSource.COMMANDLINE


open_option = click.option(
    "--open",
    is_flag=True,
    expose_value=False,
    callback=_remember,
    help="Open the written picture, or the folder of several, in the system's viewer.",
)


def wrote(path: str) -> None:
    """Remember a picture that was written to ``path``."""
    context = click.get_current_context(silent=True)
    if context is not None and os.path.isfile(path):  # a device cannot be opened
        context.meta.setdefault(_WRITTEN, {})[path] = None


def tell_what_was_written(context: click.Context) -> None:
    """Say in one line where the pictures of a run are, and how to open them; with ``--open``, open them."""
    paths = [*context.meta.get(_WRITTEN, ())]
    if not paths:
        if context.meta.get(_ASKED) and sys.exception() is None:
            note("Note: --open opens nothing, because no picture was written to a file")
        return
    what, target, which = _in_words(paths)
    target = os.path.join(".", target) if target.startswith("-") else target
    opener = _OPENERS.get(sys.platform, "xdg-open")
    if context.meta.get(_OPENS):
        failed = _open(opener, target)
        note(f"wrote {what}; cannot open {which}: {failed}" if failed else f"wrote {what}")
    else:
        note(f"wrote {what}; open {which}: {opener} {shlex.quote(target)}")


def _in_words(paths: Sequence[str]) -> tuple[str, str, str]:
    """What was written, the file or folder to open, and a word for it."""
    folders = list(dict.fromkeys(map(os.path.dirname, paths)))
    if len(paths) == 1 or "" in folders:
        return listed(paths, 3), paths[0], "it" if len(paths) == 1 else "the first"
    where = listed([os.path.join(each, "") for each in folders], 3)
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
        status = process.wait(_SECONDS)
    except subprocess.TimeoutExpired:  # it waits for the viewer, and is left alone
        process.returncode = status = 0
    except OSError as error:
        return f"{opener}: {error.strerror}"
    return f"{opener} ended with status {status}" if status else ""
