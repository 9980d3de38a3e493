"""The program ``hookscope``: its commands, and the exit status of each error."""

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

from hookscope.cli import process
from hookscope.cli.output.formats import note
from hookscope.errors import HookscopeError, WriteError, is_out_of_memory, near_misses
from hookscope.models import broken_pair, missing_package, package_versions, unreadable_settings

# What `hookscope --help` says of each command, in at most 60 characters.
SUMMARIES = {
    "Look": {
        "visualize": "Draw the feature maps of each layer.",
        "list-layers": "List the layers of a model in order of execution.",
        "trace": "Show what each layer call takes and returns.",
    },
    "Measure": {
        "stats": "Measure every layer on images and report what is wrong.",
        "check": "Check every layer against limits, for CI.",
        "weights": "Report on the weights of a model.",
        "verify": "Prove that hookscope reports the truth on this machine.",
    },
    "Explain": {
        "predict": "Print the classes that a model gives to images.",
        "cam": "Show where the model looked for a class.",
        "saliency": "Show which pixels the score of a class depends on.",
        "gradients": "Follow the gradient of a loss through the model.",
    },
    "Change": {
        "intervene": "Change activations or weights and see the effect.",
    },
    "Train": {
        "watch": "Run a training script and log what its layers do.",
    },
    "Models": {
        "list-models": "List the models with size, cost and accuracy.",
        "completion": "Print a script for shell completion.",
    },
}
# Each module holds a click command named `command`; it is imported when it is run or its help is shown.
COMMANDS = {
    name: f"hookscope.cli.commands.{name.replace('-', '_')}" for commands in SUMMARIES.values() for name in commands
}

_PROGRAM = "hookscope"
_COMPLETION = "_HOOKSCOPE_COMPLETE"
_LONGEST_LINE = 300
# Errors of a write to standard output, which name no file.
_OUTPUT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO, errno.EROFS}


@dataclass
class _Run:
    """The state of one run."""

    traceback: bool = False
    # What a command returned: the script of `watch`, which runs after all settings of the process are restored.
    then: Callable[[], None] | None = None


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run hookscope on ``argv`` (default: the command line) and exit.

    Statuses: 0 done, 1 could not do it, 2 wrong usage, 3 a check that found something, 130 interrupted,
    143 terminated.
    """
    run, put_back = _Run(), [process.streams_as_now()]
    if argv is None:
        put_back.append(process.start_quickly())
    backend = os.environ.pop("MPLBACKEND", None)  # that of a Jupyter kernel makes `import matplotlib` fail in a shell
    status = _run(list(sys.argv[1:] if argv is None else argv), run)
    if run.then is not None and not status:
        for undo in put_back:
            undo()
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
        run.then()
        sys.exit(status)  # not process.leave(): the threads, exit handlers and objects of the script end as usual
    if argv is None and "torch" in sys.modules:
        process.leave(status)
    sys.exit(status)


def _run(argv: list[str], run: _Run) -> int:
    with process.signals_as_exits(), process.warnings_as_notes():
        try:
            stdout = process.standard_output()
            status = _invoke(argv, run)
            stdout.flush()  # a full disk may show only here
        except BaseException as error:
            status = _status(error, run)
        process.settle_output()
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
    """Answer the shell; errors are silent, because the user is in the middle of a line."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(cli, {}, _PROGRAM, _COMPLETION, instruction)
    except Exception:
        return 1


def _status(error: BaseException, run: _Run) -> int:
    """Report ``error`` in one line, if it needs a message, and return the exit status."""
    if isinstance(error, click.exceptions.Exit):
        return _flushed(error.exit_code, run)
    if isinstance(error, SystemExit):
        return _system_exit(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        if sys.stderr.isatty():  # ends the line in which the terminal showed ^C
            click.echo(err=True)
        return 130
    if isinstance(error, BrokenPipeError) and process.reader_is_gone():
        process.drop_output()
        return 0
    if run.traceback:
        _show_traceback(error)
    if isinstance(error, click.ClickException):
        note(f"Error: {_in_one_line(error)}")
        return error.exit_code
    reported = _as_hookscope_error(error, run)
    note(f"Error: {reported}")
    return reported.exit_code


def _in_one_line(error: click.ClickException) -> str:
    """The error and the command for help, in one line; click takes four."""
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return text if context is None else f"{text}; see `{context.command_path} --help`"


def _flushed(status: int, run: _Run) -> int:
    """Flush the output of ``--help`` and other early ends, and return ``status``."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _status(error, run)
    return status


def _as_hookscope_error(error: BaseException, run: _Run) -> HookscopeError:
    """``error`` itself if hookscope raised it, else the hookscope error for its cause."""
    if isinstance(error, HookscopeError):
        return error
    known = broken_pair(error) or missing_package(error) or unreadable_settings(error)
    if known is not None:
        return known
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRNOS:
        process.drop_output()
        return WriteError(f"cannot write standard output: {error.strerror}")
    if is_out_of_memory(error):
        return HookscopeError("out of memory", do="try a smaller picture, model or number of layers")
    text = (str(error).strip().splitlines() or [""])[0]
    if len(text) > _LONGEST_LINE:
        text = text[:_LONGEST_LINE] + "..."
    what = f"unexpected {type(error).__name__}" + (f": {text}" if text else "")
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
        is_eager=True,  # parsed before an option with an error
        expose_value=False,
        callback=_remember_traceback,
        help="Show the Python traceback of an error.",
    )


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    versions = package_versions()
    click.echo(f"hookscope {versions['hookscope']} (torch {versions['torch']}, torchvision {versions['torchvision']})")
    context.exit()


class CommandGroup(click.Group):
    """A group that imports a command only to run it or to show its help, and adds ``--traceback`` to each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command in one line, grouped by the question it answers; no command is imported."""
        width = max(len(name) for names in SUMMARIES.values() for name in names)
        for title, commands in SUMMARIES.items():
            with formatter.section(title):
                for name, text in commands.items():
                    formatter.write(f"  {name:<{width + 2}}{text}\n")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
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
        """Find the command to run, and suggest similar names; click would import each command for this."""
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
    """See inside a vision model: what every layer does with an image.

    \b
    Examples:
      hookscope list-layers resnet18
      hookscope visualize resnet18 photo.jpg --layer conv1 -o conv1.png
    """
