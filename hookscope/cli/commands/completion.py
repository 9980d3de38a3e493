"""Print a script for shell completion."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

from hookscope.cli.command import Command
from hookscope.cli.fields import argument
from hookscope.errors import UsageError

SHELLS = ("bash", "zsh", "fish")


class Completion(Command):
    """Print the script with which a shell completes hookscope's commands and options.

    \b
    Examples:
      eval "$(hookscope completion bash)"                    # in ~/.bashrc
      eval "$(hookscope completion zsh)"                     # in ~/.zshrc, after compinit
      hookscope completion fish > ~/.config/fish/completions/hookscope.fish

    The environment variable SHELL names the default shell.
    """

    shell: str | None = argument("[bash|zsh|fish]", required=False, type=click.Choice(SHELLS), default=None)

    def run(self) -> None:
        name = self.shell or os.path.basename(os.environ.get("SHELL", ""))
        if name not in SHELLS:
            raise UsageError("no shell given", do=f"name one of {', '.join(SHELLS)}")
        completion = get_completion_class(name)
        assert completion is not None  # click knows all of SHELLS
        program = click.get_current_context().find_root().command
        click.echo(completion(program, {}, "hookscope", "_HOOKSCOPE_COMPLETE").source(), nl=False)
