"""The program ``hookscope``: its commands, and the exit status of each error."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import click

from hookscope.cli import process
from hookscope.cli.fields import Option, Options
from hookscope.cli.output.formats import Output, note
from hookscope.cli.shared.written import tell_what_was_written
from hookscope.errors import HookscopeError, WriteError, is_out_of_memory, near_misses, printable, spelling_for_shell
from hookscope.models import broken_pair, missing_package, package_versions, unreadable_settings

_GROUPS = {
    "Look": ("inspect", "visualize", "list-layers", "graph", "attention", "trace", "find-nan"),
    "Measure": ("stats", "merge", "check", "extract", "weights", "plan", "compare", "verify"),
    "Explain": ("predict", "cam", "compare-maps", "saliency", "gradients", "exemplars"),
    "Change": ("intervene", "ablate"),
    "Train": ("watch", "show-run"),
    "Models": ("list-models",),
    "Help": ("help", "completion"),
}
_FOLDER = os.path.join(os.path.dirname(__file__), "commands")


_files = {name.removesuffix(".py").replace("_", "-") for name in os.listdir(_FOLDER) if name[0].isalpha()}
GROUPS = _GROUPS | ({"More": tuple(sorted(more))} if (more := _files.difference(*_GROUPS.values())) else {})
"""Title in `hookscope --help` -> names of commands, one a file; those without a group come last."""
COMMANDS = {name: f"hookscope.cli.commands.{name.replace('-', '_')}" for names in GROUPS.values() for name in names}
"""Name -> module, which holds one `Command`; it is imported when the command is run or its help is shown."""

# Options that have become commands of their own, or other options.
MOVED = {
    "cam": {
        "compare": "hookscope compare-maps",
        "map": "hookscope compare-maps --map",
        "boxes": "hookscope compare-maps",
    },
    "exemplars": {"least": "--bottom", "measure": "--rank-by"},
    "compare": {"rank": "--sort"},
    "intervene": {"ablate-each": "hookscope ablate --layer", "plot": "hookscope ablate --plot"},
    "list-layers": {"tree": "hookscope graph", "graph": "hookscope graph -o", "depth": "hookscope graph --depth"},
    "plan": {"measure": "--time"},
    "saliency": {"smooth": "--blur"},
    "stats": {"merge": "hookscope merge"},
    "trace": {"non-finite": "hookscope find-nan", "most": "--max-values"},
    "visualize": {"attention": "hookscope attention", "query": "hookscope attention --query"},
    "watch": {"show": "hookscope show-run", "plot": "hookscope show-run --plot", "html": "hookscope show-run --html"},
}
_FIRST = {
    "inspect resnet18 photo.jpg": "Where should I look?",
    "list-layers resnet18": "Which layers are there?",
    "visualize resnet18 photo.jpg --layer 0": "What does layer 0 see?",
}
_PROGRAM = "hookscope"
_COMPLETION = "_HOOKSCOPE_COMPLETE"
_LONGEST_LINE = 300
# Errors of a write to standard output, which name no file.
_OUTPUT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.ENXIO, errno.EROFS}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run hookscope on ``argv`` (default: the command line) and exit.

    Statuses: 0 done, 1 could not do it, 2 wrong usage, 3 a check that found something, 130 interrupted,
    143 terminated.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    put_back = [process.streams_as_now()]
    if argv is None:
        put_back.append(process.start_quickly())
    backend = os.environ.pop("MPLBACKEND", None)  # from a Jupyter kernel it makes `import matplotlib` fail in a shell
    with Output(words) as output:
        status, then = process.with_large_stack(_run, output)
    if then is not None:
        for undo in put_back:
            undo()
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
        then()
        sys.exit(status)  # not process.leave(): the threads, exit handlers and objects of the script end as usual
    if argv is None and "torch" in sys.modules:
        process.leave(status)
    sys.exit(status)


def _run(output: Output) -> tuple[int, Callable[[], None] | None]:
    """The exit status, and what runs when all settings of the process are restored: the script of `watch`."""
    with process.signals_as_exits(), process.warnings_as_notes(), process.quiet_matplotlib(), spelling_for_shell():
        try:
            stdout = process.standard_output()
            result = _invoke(output)
            stdout.flush()  # a full disk may show only here
        except BaseException as error:
            result = _status(error, output)
        process.settle_output()
    return (0, result) if callable(result) else (result or 0, None)


def _invoke(output: Output) -> Any:
    """What the command returns: an exit status, None, or what is to run later."""
    instruction = os.environ.get(_COMPLETION)
    if instruction:
        return _complete(instruction)
    # Not cli.main(): it turns an interrupt into status 1, a broken pipe too, and prints a line on both.
    with cli.make_context(_PROGRAM, [*output.argv]) as context:
        try:
            return cli.invoke(context)
        finally:  # some pictures may be written before an error
            output.sum_up()
            tell_what_was_written(context)


def _complete(instruction: str) -> int:
    """Answer the shell; errors are silent, because the user is in the middle of a line."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(cli, {}, _PROGRAM, _COMPLETION, instruction)
    except Exception:
        return 1


def _status(error: BaseException, output: Output) -> int:
    """Report ``error`` in one line, if it needs a message, and return the exit status."""
    if isinstance(error, click.exceptions.Exit):
        try:
            sys.stdout.flush()  # the output of --help and other early ends
        except OSError as failed:
            return _status(failed, output)
        return error.exit_code
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) or error.code is None:
            for number in process.ENDING_SIGNALS:
                if error.code == 128 + number:
                    note(f"Error: ended by {number.name}", always=True)
            return error.code or 0
        note(str(error.code), always=True)
        return 1
    if isinstance(error, KeyboardInterrupt | click.Abort):
        if sys.stderr.isatty():  # ends the line in which the terminal showed ^C
            click.echo(err=True)
        return 130
    if isinstance(error, BrokenPipeError) and process.reader_is_gone():
        process.drop_output()
        return 0
    if output.traceback:
        import traceback

        lines = "".join(traceback.format_exception(error)).split("\n")  # a message may hold escape sequences
        with contextlib.suppress(OSError, ValueError):
            print(*map(printable, lines), sep="\n", end="", file=sys.stderr)
    if isinstance(error, click.ClickException):
        text, status = _in_one_line(error, output.argv), error.exit_code
    else:
        reported = _as_hookscope_error(error, output)
        text, status = str(reported), reported.exit_code
    note(f"Error: {text}", always=True)
    return status


def _in_one_line(error: click.ClickException, argv: Sequence[str]) -> str:
    """The error and the command for help, in one line; click takes four."""
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    if isinstance(error, click.NoSuchOption):
        text = _unknown_option(error.option_name, context)
        if file := next((word for word in argv if word.startswith(error.option_name) and os.path.exists(word)), ""):
            return f"{file} is read as options; for the file of that name, write ./{file}"
    return f"{text}; see `{context.command_path} --help`"


def _unknown_option(option: str, context: click.Context) -> str:
    """What has become of ``option``, or the option of the command with the nearest name."""
    from hookscope.cli.shared.options import threshold_rows  # imports all that commands share

    word, asked = option.lstrip("-"), f"{context.command_path} {option}"
    if new := MOVED.get(context.command.name or "", {}).get(word):
        return f"{asked} is now `{new}`"
    options = options_by_name(context.command)
    if "threshold" in options and word in dict(threshold_rows()):
        return f"{asked} VALUE is now `--threshold {word}=VALUE`"
    other = {"class": "target", "label": "target", "k": "top", "n": "top"}.get(word)  # as other programs call it
    near = [other] if other in options else near_misses(word, [*options, "help"], 1)
    return f"{context.command_path} has no option {option}" + (f"; nearest: --{near[0]}" if near else "")


def _as_hookscope_error(error: BaseException, output: Output) -> HookscopeError:
    """``error`` itself if hookscope raised it, else the hookscope error for its cause."""
    if isinstance(error, HookscopeError):
        return error
    known = broken_pair(error) or missing_package(error) or unreadable_settings(error)
    if known is not None:
        return known
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRNOS:
        process.drop_output()
        return WriteError(f"cannot write standard output: {error.strerror}")
    if isinstance(error, RecursionError):
        return HookscopeError("something here is nested too deeply for Python, or holds itself", do="make it flatter")
    if is_out_of_memory(error):
        return HookscopeError("out of memory", do="try a smaller image, a smaller model or fewer layers")
    text = (str(error).strip().splitlines() or [""])[0]
    if len(text) > _LONGEST_LINE:
        text = text[:_LONGEST_LINE] + "..."
    what = f"unexpected {type(error).__name__}" + (f": {text}" if text else "")
    return HookscopeError(what, do="report it" if output.traceback else "run again with --traceback and report it")


def options_by_name(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long names without dashes."""
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name.removeprefix("--"): option for option in options for name in option.opts if name.startswith("--")}


def name_variables(command: click.Command, *prefixes: str) -> None:
    """Let each option of ``command`` read the environment variables that begin with one of ``prefixes``."""
    for name, option in options_by_name(command).items():
        option.envvar = [f"{prefix}_{name}".upper().replace("-", "_") for prefix in prefixes]


def _asked_for(what: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    """A callback that notes in the `Output` of the run what a flag asks for."""
    return lambda context, parameter, value: setattr(Output.now, what, value or getattr(Output.now, what))


def _common_options() -> list[click.Parameter]:
    common: dict[str, Any] = {"topic": "run", "is_flag": True, "is_eager": True, "expose_value": False}
    silent = "Print no notes and no progress: results and errors only."
    return [
        Option(["-q", "--quiet"], **common, callback=_asked_for("quiet"), help=silent),
        Option(
            ["--traceback"], **common, callback=_asked_for("traceback"), help="Show the Python traceback of an error."
        ),
    ]


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    versions = package_versions()
    click.echo(f"hookscope {versions['hookscope']} (torch {versions['torch']}, torchvision {versions['torchvision']})")
    context.exit()


@functools.cache
def _made(module: ModuleType, name: str) -> click.Command:
    """The click command of the last `Command` in ``module``, with the common options."""
    own = (kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__)
    *_, kind = [kind for kind in own if issubclass(kind, Options)]
    command: click.Command = kind.made(name)  # type: ignore[attr-defined]
    command.params += _common_options()
    name_variables(command, f"{_PROGRAM}_{name}", _PROGRAM)
    return command


class CommandGroup(click.Group):
    """A group that imports a command only to run it or to show its help, and adds the common options to each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one screen: the first commands to try, all names, the options of the program."""
        formatter.write(_first_help() + "\n")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first line of its file, grouped by the question it answers."""
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                for name in names:
                    with open(os.path.join(_FOLDER, f"{name.replace('-', '_')}.py"), encoding="utf-8") as file:
                        summary = file.readline().strip('"\n')
                    formatter.write(f"  {name:<{width + 2}}{summary}\n")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return _made(importlib.import_module(COMMANDS[cmd_name]), cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command to run, and suggest similar names without importing each command."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = near_misses(name, COMMANDS)
            ctx.fail(f"no command {name!r}" + (f"; nearest: {', '.join(near)}" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(
    name=_PROGRAM,
    cls=CommandGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    params=_common_options(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the versions."
)
@click.pass_context
def cli(context: click.Context) -> None:
    """See inside a vision model: what every layer does with an image."""
    if context.invoked_subcommand is None:
        click.echo(_first_help())


name_variables(cli, _PROGRAM)


def _first_help() -> str:
    """What `hookscope` and `hookscope --help` print: 24 lines of 80 columns at most."""
    examples, titles = max(map(len, _FIRST)), max(map(len, GROUPS))
    return "\n".join(
        [
            "Usage: hookscope [OPTIONS] COMMAND [ARGS]...",
            "",
            "  See inside a vision model: what every layer does with an image.",
            "",
            "Start with:",
            *(f"  {_PROGRAM} {words:<{examples}}  {question}" for words, question in _FIRST.items()),
            "",
            "Commands:",
            *(f"  {title:<{titles}}  {', '.join(commands)}" for title, commands in GROUPS.items()),
            "",
            "Options: -q, --quiet (no notes, no progress), --traceback, --version, -h, --help",
            "",
            f"`{_PROGRAM} help commands` says what each command does.",
            f"`{_PROGRAM} COMMAND --help` shows its options, `{_PROGRAM} help COMMAND` says all.",
            "In a pipe, such as `| head`, rows are tsv; --format table keeps the table.",
            "Environment variables set options: HOOKSCOPE_WEIGHTS, HOOKSCOPE_CAM_METHOD.",
        ]
    )
