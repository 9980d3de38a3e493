"""The command ``hookscope``: its commands, and the one place where errors become exit statuses."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import click

from hookscope.cli.output.rows import note
from hookscope.cli.process import (
    drop_output,
    leave,
    reader_is_gone,
    settle_output,
    signals_as_exits,
    standard_output,
    streams_as_now,
    warnings_as_notes,
)
from hookscope.errors import HookscopeError, WriteError, is_out_of_memory, near_misses
from hookscope.models import broken_pair, missing_package, package_versions

# Each module holds a click command named `command`; it is imported when it is run or its help is shown.
COMMANDS = {
    "visualize": "hookscope.cli.commands.visualize",
    "predict": "hookscope.cli.commands.predict",
    "cam": "hookscope.cli.commands.cam",
    "saliency": "hookscope.cli.commands.saliency",
    "gradients": "hookscope.cli.commands.gradients",
    "intervene": "hookscope.cli.commands.intervene",
    "stats": "hookscope.cli.commands.stats",
    "check": "hookscope.cli.commands.check",
    "weights": "hookscope.cli.commands.weights",
    "verify": "hookscope.cli.commands.verify",
    "trace": "hookscope.cli.commands.trace",
    "watch": "hookscope.cli.commands.watch",
    "list-layers": "hookscope.cli.commands.list_layers",
    "list-models": "hookscope.cli.commands.list_models",
    "completion": "hookscope.cli.commands.completion",
}

_PROGRAM = "hookscope"
_COMPLETION = "_HOOKSCOPE_COMPLETE"
_LONGEST_LINE = 300
# What a write to standard output ends with. Such an error names no file: one that does has another cause.
_OUTPUT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO, errno.EROFS}


@dataclass
class _Run:
    """What one run learns on its way and needs at its end.

    Attributes:
        traceback: Whether to show the traceback of an error.
        then: What a command returned: to be run when hookscope has put back all that it sets up around a command.
            From there on the process is that of a person's script, as Python makes it.
    """

    traceback: bool = False
    then: Callable[[], None] | None = None


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run hookscope on ``argv`` (default: the command line) and exit.

    Statuses: 0 done, 1 could not do it, 2 wrong usage, 3 a check that found something, 130 interrupted,
    143 terminated.

    Example:
        >>> main(["--no-such-option"])
        Traceback (most recent call last):
        SystemExit: 2
    """
    run, put_back = _Run(), streams_as_now()
    backend = os.environ.pop("MPLBACKEND", None)  # that of a Jupyter kernel makes `import matplotlib` fail in a shell
    status = _run(list(sys.argv[1:] if argv is None else argv), run)
    if run.then is not None and not status:
        put_back()
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
        run.then()
        sys.exit(status)  # not by leave(): the script's threads, exit handlers and objects have their end
    if argv is None and "torch" in sys.modules:
        leave(status)
    sys.exit(status)


def _run(argv: list[str], run: _Run) -> int:
    with signals_as_exits(), warnings_as_notes():
        try:
            stdout = standard_output()
            status = _invoke(argv, run)
            stdout.flush()  # a full disk may show only here
        except BaseException as error:
            status = _status(error, run)
        settle_output()
    return status


def _invoke(argv: list[str], run: _Run) -> int:
    instruction = os.environ.get(_COMPLETION)
    if instruction:
        return _complete(instruction)
    # Not cli.main(): it turns an interrupt into status 1, a broken pipe too, and prints a line on both.
    with cli.make_context(_PROGRAM, argv, obj=run) as context:
        then = cli.invoke(context)
    run.then = then if callable(then) else None
    return 0


def _complete(instruction: str) -> int:
    """Answer the shell. Whatever goes wrong goes wrong in silence: the user is in the middle of a line."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(cli, {}, _PROGRAM, _COMPLETION, instruction)
    except Exception:
        return 1


def _status(error: BaseException, run: _Run) -> int:
    """The exit status for ``error``, after saying in one line what it was, or nothing where nothing need be said."""
    if isinstance(error, click.exceptions.Exit):
        return _flushed(error.exit_code, run)
    if isinstance(error, SystemExit):
        return _system_exit(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        if sys.stderr.isatty():  # ends the line in which the terminal showed ^C
            click.echo(err=True)
        return 130
    if isinstance(error, BrokenPipeError) and reader_is_gone():
        drop_output()
        return 0
    if run.traceback:
        _show_traceback(error)
    if isinstance(error, click.ClickException):
        note(f"Error: {_in_one_line(error)}")
        return error.exit_code
    told = _told(error, run)
    note(f"Error: {told}")
    return told.exit_code


def _in_one_line(error: click.ClickException) -> str:
    """What click says in four lines: what is wrong, and where the help is."""
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text}; see `{context.command_path} --help`"


def _flushed(status: int, run: _Run) -> int:
    """``status``, once what ``--help`` and other early ends have printed is out."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _status(error, run)
    return status


def _told(error: BaseException, run: _Run) -> HookscopeError:
    """``error`` in one line: as it is when hookscope raised it, else with what is known of its kind."""
    if isinstance(error, HookscopeError):
        return error
    known = broken_pair(error) or missing_package(error)
    if known is not None:
        return known
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRNOS:
        drop_output()
        return WriteError(f"cannot write standard output: {error.strerror}")
    if is_out_of_memory(error):
        return HookscopeError("out of memory", do="try a smaller picture, model or number of layers")
    return _unexpected(error, run)


def _unexpected(error: BaseException, run: _Run) -> HookscopeError:
    text = (str(error).strip().splitlines() or [""])[0]
    if len(text) > _LONGEST_LINE:
        text = text[:_LONGEST_LINE] + "..."
    kind = type(error).__name__
    what = f"unexpected {kind}: {text}" if text else f"unexpected {kind}"
    return HookscopeError(what, do="report it" if run.traceback else "run again with --traceback and report it")


def _system_exit(error: SystemExit) -> int:
    if isinstance(error.code, int):
        return error.code
    if error.code is not None:
        note(str(error.code))
    return 0 if error.code is None else 1


def _show_traceback(error: BaseException) -> None:
    import traceback

    with contextlib.suppress(OSError):
        traceback.print_exception(error)


def _remember_traceback(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    run = context.find_object(_Run)
    if run is not None and value:
        run.traceback = True


def _traceback_option() -> click.Option:
    return click.Option(
        ["--traceback"],
        is_flag=True,
        is_eager=True,  # before an option whose value is the error
        expose_value=False,
        callback=_remember_traceback,
        help="Show the Python traceback of an error.",
    )


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    found = package_versions()
    click.echo(f"hookscope {found['hookscope']} (torch {found['torch']}, torchvision {found['torchvision']})")
    context.exit()


class CommandGroup(click.Group):
    """A group that imports a command of `COMMANDS` when it is wanted, and gives each the option ``--traceback``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order in which somebody new needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        if not any(parameter.name == "traceback" for parameter in command.params):
            command.params.append(_traceback_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command to run; click knows no near misses of commands that it has not loaded."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = near_misses(name, COMMANDS)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {' or '.join(near)}?" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(
    name=_PROGRAM,
    cls=CommandGroup,
    params=[_traceback_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the versions."
)
def cli() -> None:
    """See inside a vision model: what every layer makes of a picture.

    \b
    Examples:
      hookscope list-layers resnet18
      hookscope visualize resnet18 photo.jpg --layer conv1 -o conv1.png
    """
