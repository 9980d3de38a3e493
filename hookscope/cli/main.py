"""The program ``hookscope``: its commands, and the exit status of each error."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from hookscope.cli import process
from hookscope.cli.output import formats
from hookscope.cli.output.formats import note
from hookscope.cli.shared.threshold_options import threshold_rows
from hookscope.cli.shared.written import tell_what_was_written
from hookscope.errors import HookscopeError, WriteError, is_out_of_memory, near_misses, spelling_for_shell
from hookscope.findings import listed
from hookscope.models import broken_pair, missing_package, package_versions, unreadable_settings

# What `hookscope --help` says of each command, in at most 60 characters.
SUMMARIES = {
    "Look": {
        "inspect": "Make one page that says where to look. Start here.",
        "visualize": "Draw the feature maps of each layer.",
        "list-layers": "List the layers of a model in order of execution.",
        "graph": "Print the modules as a tree, draw the data flow.",
        "attention": "Draw what each head of attention looks at.",
        "trace": "Show what each layer call takes and returns.",
        "find-nan": "Find the calls that make NaN or Inf.",
    },
    "Measure": {
        "stats": "Measure every layer on images and report what is wrong.",
        "merge": "Merge the statistics of several runs.",
        "check": "Check every layer against limits, for CI.",
        "extract": "Write the features of many images to a file.",
        "weights": "Report on the weights of a model.",
        "plan": "Say what a model costs: memory, arithmetic, time.",
        "compare": "Say where two models, or two runs of one, begin to differ.",
        "verify": "Prove that hookscope reports the truth on this machine.",
    },
    "Explain": {
        "predict": "Print the classes that a model gives to images.",
        "cam": "Show where the model looked for a class.",
        "compare-maps": "Measure which map of the methods of cam suits best.",
        "saliency": "Show which pixels the score of a class depends on.",
        "gradients": "Follow the gradient of a loss through the model.",
        "exemplars": "Find the images that excite each channel most.",
    },
    "Change": {
        "intervene": "Change activations or weights and see the effect.",
        "ablate": "Rank the channels of a layer by the score they carry.",
    },
    "Train": {
        "watch": "Run a training script and log what its layers do.",
        "show-run": "Show the findings of a log of watch.",
    },
    "Models": {
        "list-models": "List the models with size, cost and accuracy.",
    },
    "Help": {
        "help": "Show the help of a command.",
        "completion": "Print a script for shell completion.",
    },
}
# Each module holds a click command named `command`; it is imported when it is run or its help is shown.
COMMANDS = {
    name: f"hookscope.cli.commands.{name.replace('-', '_')}" for commands in SUMMARIES.values() for name in commands
}

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


@dataclass
class _Run:
    """The state of one run."""

    traceback: bool = False
    argv: Sequence[str] = ()
    # That of the command, as soon as its options are read.
    context: click.Context | None = None
    # What a command returned: the script of `watch`, which runs after all settings of the process are restored.
    then: Callable[[], None] | None = None


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run hookscope on ``argv`` (default: the command line) and exit.

    Statuses: 0 done, 1 could not do it, 2 wrong usage, 3 a check that found something, 130 interrupted,
    143 terminated.
    """
    run, put_back = _Run(argv=list(sys.argv[1:] if argv is None else argv)), [process.streams_as_now()]
    formats.is_quiet = False
    if argv is None:
        put_back.append(process.start_quickly())
    backend = os.environ.pop("MPLBACKEND", None)  # that of a Jupyter kernel makes `import matplotlib` fail in a shell
    status = _run(run)
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


def _run(run: _Run) -> int:
    with process.signals_as_exits(), process.warnings_as_notes(), spelling_for_shell():
        try:
            stdout = process.standard_output()
            status = _invoke(run)
            stdout.flush()  # a full disk may show only here
        except BaseException as error:
            status = _status(error, run)
        process.settle_output()
    return status


def _invoke(run: _Run) -> int:
    instruction = os.environ.get(_COMPLETION)
    if instruction:
        return _complete(instruction)
    # Not cli.main(): it turns an interrupt into status 1, a broken pipe too, and prints a line on both.
    with cli.make_context(_PROGRAM, [*run.argv], obj=run) as context:
        try:
            then = cli.invoke(context)
        finally:  # some pictures may be written before an error
            tell_what_was_written(context)
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
        text, status = _in_one_line(error, run), error.exit_code
    else:
        reported = _as_hookscope_error(error, run)
        text, status = str(reported), reported.exit_code
    note(f"Error: {text}", always=True)
    return status


def _in_one_line(error: click.ClickException, run: _Run) -> str:
    """The error and the command for help, in one line; click takes four."""
    text = " ".join(error.format_message().split()).rstrip(".")
    text = re.sub(r"is not a valid integer( range)?$", "is not a whole number", text)
    text = re.sub(r"is not a valid float( range)?$", "is not a number", text)
    context = getattr(error, "ctx", None)
    if isinstance(error, click.BadOptionUsage):
        context = context or _context_of(run.argv)
    if context is None:
        return text
    if isinstance(error, click.NoSuchOption):
        text = _unknown_option(error.option_name, context, run.argv)
    elif isinstance(error, click.BadOptionUsage):
        text = _missing_values(error, context) or text
    elif isinstance(error, click.MissingParameter) and isinstance(error.param, click.Argument):
        text = _missing_arguments(error.param, context)
    return f"{text}; see `{context.command_path} --help`"


def _missing_arguments(first: click.Argument, context: click.Context) -> str:
    """What a command line lacks, from its argument ``first`` on, and the first example of the command."""
    arguments = [parameter for parameter in context.command.params if isinstance(parameter, click.Argument)]
    lacking = [argument for argument in arguments[arguments.index(first) :] if argument.required]
    names = [(argument.metavar or str(argument.name).upper()).removesuffix("...") for argument in lacking]
    example = re.search(rf"^ +({context.command_path} .*)$", context.command.help or "", re.MULTILINE)
    such_as = f", such as `{example[1]}`" if example else ""
    return f"{context.command_path} needs {' and '.join(names)}{such_as}"


def _missing_values(error: click.BadOptionUsage, context: click.Context) -> str:
    """What an option needs that lacks values, and an example of the command; empty for another wrong use."""
    option = next((parameter for parameter in context.command.params if error.option_name in parameter.opts), None)
    if "require" not in error.message or not isinstance(option, click.Option):
        return ""
    example = re.search(rf" ({error.option_name}(?: \S+){{{option.nargs}}})", context.command.help or "")
    return f"{error.option_name} needs {option.metavar or 'a value'}" + (f", such as {example[1]}" if example else "")


def _context_of(argv: Sequence[str]) -> click.Context | None:
    """The context of the command in ``argv``; click gives none with errors of its parser."""
    name = next((word for word in argv if word in COMMANDS), None)
    command = name and cli.get_command(click.Context(cli), name)
    return click.Context(command, click.Context(cli, info_name=_PROGRAM), name) if command else None


def _unknown_option(option: str, context: click.Context, argv: Sequence[str]) -> str:
    """The options with names nearest to ``option``: those of the command, else those of other commands."""
    if not option.startswith("--"):  # click names only the first letter of `-layer`
        option = next((word for word in argv if word.startswith(option) and len(word) > len(option)), option)
    text, word = f"{context.command_path} has no option {option}", option.lstrip("-")
    if new := MOVED.get(context.command.name or "", {}).get(word):
        return f"{context.command_path} {option} is now `{new}`"
    if word in {name for name, _ in threshold_rows()} and "thresholds" in {p.name for p in context.command.params}:
        return f"{context.command_path} {option} VALUE is now `--threshold {word}=VALUE`"
    owners: dict[str, list[str]] = {}
    for name in COMMANDS:
        for owned in _options_of(name):
            owners.setdefault(owned, []).append(name)
    near = near_misses(word, [*options_by_name(context.command), "help"], 1)
    if near and (word == near[0] or word not in owners):
        return f"{text}; nearest: --{near[0]}"
    near = near_misses(word, owners, 1)
    return f"{text}; --{near[0]} is an option of {listed(owners[near[0]], 5)}" if near else text


def _options_of(name: str) -> dict[str, click.Option]:
    command = cli.get_command(click.Context(cli), name)
    return options_by_name(command) if command else {}


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
        note(str(error.code), always=True)
    return 0 if error.code is None else 1


def _show_traceback(error: BaseException) -> None:
    import traceback

    with contextlib.suppress(OSError):
        traceback.print_exception(error)


def options_by_name(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long names without dashes."""
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name.removeprefix("--"): option for option in options for name in option.opts if name.startswith("--")}


def name_variables(command: click.Command, *prefixes: str) -> None:
    """Let each option of ``command`` read the environment variables that begin with one of ``prefixes``."""
    for name, option in options_by_name(command).items():
        option.envvar = [f"{prefix}_{name}".upper().replace("-", "_") for prefix in prefixes]


def _remember_traceback(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    run = context.find_object(_Run)
    if run is not None:
        run.traceback |= value
        run.context = context


def _be_quiet(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    formats.is_quiet |= value


def _common_options() -> list[click.Option]:
    """The options of the program and of every command; they are parsed before an option with an error."""
    common: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    silent = "Print no notes and no progress: results and errors only."
    return [
        click.Option(["-q", "--quiet"], **common, callback=_be_quiet, help=silent),
        click.Option(
            ["--traceback"], **common, callback=_remember_traceback, help="Show the Python traceback of an error."
        ),
    ]


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    versions = package_versions()
    click.echo(f"hookscope {versions['hookscope']} (torch {versions['torch']}, torchvision {versions['torchvision']})")
    context.exit()


class CommandGroup(click.Group):
    """A group that imports a command only to run it or to show its help, and adds the common options to each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one screen: the first commands to try, all names, the options of the program."""
        formatter.write(_first_help() + "\n")

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
        names = vars(importlib.import_module(COMMANDS[cmd_name])).values()
        command = next(made for made in names if isinstance(made, click.Command) and made.name == cmd_name)
        if not any(parameter.name == "traceback" for parameter in command.params):
            command.params += _common_options()
            name_variables(command, f"{_PROGRAM}_{cmd_name}", _PROGRAM)
        return command

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
    examples, titles = max(map(len, _FIRST)), max(map(len, SUMMARIES))
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
            *(f"  {title:<{titles}}  {', '.join(commands)}" for title, commands in SUMMARIES.items()),
            "",
            "Options: -q, --quiet (no notes, no progress), --traceback, --version, -h, --help",
            "",
            f"`{_PROGRAM} help commands` says what each does, `{_PROGRAM} COMMAND --help` how.",
            "A variable sets an option: HOOKSCOPE_WEIGHTS, or HOOKSCOPE_CAM_METHOD for one.",
        ]
    )
