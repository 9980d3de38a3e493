"""``hookscope help``: the help of the program or of a command."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def _complete_commands(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    program = ctx.find_root().command
    assert isinstance(program, click.Group)
    return [CompletionItem(name) for name in program.list_commands(ctx) if name.startswith(incomplete)]


@click.command("help")
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=_complete_commands)
@click.pass_context
def command(context: click.Context, name: str | None) -> None:
    """Show the help of COMMAND, or of hookscope.

    \b
    Examples:
      hookscope help
      hookscope help cam
    """
    shown = context.find_root()
    program = shown.command
    assert isinstance(program, click.Group)
    if name is not None:
        _, asked, _ = program.resolve_command(shown, [name])
        assert asked is not None  # an unknown name is an error
        shown = click.Context(asked, parent=shown, info_name=name, **asked.context_settings)
    click.echo(shown.command.get_help(shown))
