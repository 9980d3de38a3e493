"""Show all of the help of a command."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from hookscope.cli.command import TOPICS, Command, GroupedCommand, shared_options
from hookscope.cli.fields import argument
from hookscope.cli.shared.options import threshold_rows

_TOPICS = (*TOPICS, "findings", "commands")


def _complete_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    program = ctx.find_root().command
    assert isinstance(program, click.Group)
    names = [*program.list_commands(ctx), *_TOPICS]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class Help(Command):
    """Show the help of hookscope, all of the help of COMMAND, or the help of TOPIC.

    \b
    Examples:
      hookscope help
      hookscope help cam
      hookscope help model

    \b
    Topics:
      commands  all commands, one line each
      images    options that say which images are read
      model     options that say how a model is loaded and what it gets
      run       options that say where the work runs and how rows are printed
      findings  the thresholds of findings
    """

    name: str | None = argument("[COMMAND|TOPIC]", required=False, default=None, shell_complete=_complete_names)

    def run(self) -> None:
        shown = click.get_current_context().find_root()
        program = shown.command
        assert isinstance(program, click.Group)
        if self.name in _TOPICS:
            click.echo(_topic(shown, program, self.name))
            return
        if self.name is not None:
            _, asked, _ = program.resolve_command(shown, [self.name])
            assert asked is not None  # an unknown name is an error
            shown = click.Context(asked, parent=shown, info_name=self.name, **asked.context_settings)
        command = shown.command
        click.echo(command.whole_help(shown) if isinstance(command, GroupedCommand) else command.get_help(shown))


def _topic(context: click.Context, program: click.Group, topic: str) -> str:
    formatter = context.make_formatter()
    if topic == "commands":
        program.format_commands(context, formatter)
    elif topic == "findings":
        formatter.write_text("A finding names what is wrong with a layer; docs/concepts/findings.md explains each.")
        formatter.write_paragraph()
        formatter.write_text("--threshold NAME=VALUE of stats, merge, weights and gradients changes a limit:")
        with formatter.section("Names"):
            formatter.write_dl(threshold_rows())
    else:
        title, about = TOPICS[topic]
        formatter.write_text(about)
        with formatter.section(title):
            formatter.write_dl(_records(context, program, topic))
    return formatter.getvalue().strip("\n")


def _records(context: click.Context, program: click.Group, topic: str) -> Iterable[tuple[str, str]]:
    """Each option of a topic once, as ``compare`` explains it, else the first command that has it."""
    records: dict[str | None, tuple[str, str]] = {}
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        own = click.Context(command, parent=context, info_name=name)
        for option in shared_options(command.get_params(own)).get(topic, ()):
            record = option.get_help_record(own)
            if record and (name == "compare" or option.name not in records):
                records[option.name] = record
    return records.values()
