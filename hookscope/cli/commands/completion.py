"""``hookscope completion``: the script that teaches a shell to complete hookscope's words."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


def script(program: click.Command, shell: str) -> str:
    """The completion script of ``program`` for one of `SHELLS`.

    Example:
        >>> "complete --no-files --command hookscope" in script(click.Command("hookscope"), "fish")
        True
    """
    completion = get_completion_class(shell)
    if completion is None:
        raise ValueError(f"no shell {shell!r}; there are {', '.join(SHELLS)}")
    return completion(program, {}, "hookscope", "_HOOKSCOPE_COMPLETE").source()


def _shell_in_use(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Without an argument the shell is the one the user logs in with."""
    if value is not None or context.resilient_parsing:
        return value
    name = os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise click.UsageError(f"which shell? Name one of {', '.join(SHELLS)}.", context)
    return name


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(SHELLS), callback=_shell_in_use)
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes hookscope's words in a shell.

    Without SHELL it is the one named by the environment variable of that name.

    \b
    Examples:
      eval "$(hookscope completion bash)"                    # in ~/.bashrc
      eval "$(hookscope completion zsh)"                     # in ~/.zshrc, after compinit
      hookscope completion fish > ~/.config/fish/completions/hookscope.fish
    """
    click.echo(script(context.find_root().command, shell), nl=False)
