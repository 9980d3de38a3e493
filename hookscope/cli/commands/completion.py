"""``hookscope completion``: the script with which a shell completes commands, options and their values."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

from hookscope.cli.shared.help import GroupedCommand

SHELLS = ("bash", "zsh", "fish")


def _login_shell(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The default of SHELL: the shell that the environment variable SHELL names."""
    if value is not None or context.resilient_parsing:
        return value
    name = os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise click.UsageError(f"no shell given; name one of {', '.join(SHELLS)}", context)
    return name


@click.command("completion", cls=GroupedCommand)
@click.argument("shell", required=False, type=click.Choice(SHELLS), callback=_login_shell)
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes hookscope's commands and options.

    \b
    Examples:
      eval "$(hookscope completion bash)"                    # in ~/.bashrc
      eval "$(hookscope completion zsh)"                     # in ~/.zshrc, after compinit
      hookscope completion fish > ~/.config/fish/completions/hookscope.fish

    The default shell is that of the environment variable SHELL.
    """
    completion = get_completion_class(shell)
    assert completion is not None  # click knows all of SHELLS
    program = context.find_root().command
    click.echo(completion(program, {}, "hookscope", "_HOOKSCOPE_COMPLETE").source(), nl=False)
