"""``hookscope watch``: a training script, run unedited and looked into while it trains; and what its log tells."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from hookscope.cli.commands.watch_show import show
from hookscope.cli.shared.options import format_option, layer_option, was_given
from hookscope.errors import UsageError
from hookscope.system import find_script

_OF_A_RUN = ("layers", "types", "every", "log", "tensorboard", "stop_on")
_OF_A_LOG = ("plot", "format")


class _ScriptCommand(click.Command):
    """A command whose options end where a script begins: what follows its name is its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = self._module_at(args)
        return super().parse_args(ctx, args if at is None else [*args[:at], "--", *args[at:]])

    def _module_at(self, args: Sequence[str]) -> int | None:
        """Where ``-m`` begins a script without ``--`` before it."""
        with_value = {
            name
            for option in self.params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                return at
            at += 2 if args[at] in with_value else 1
        return None


def _complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.command("watch", cls=_ScriptCommand, context_settings={"allow_interspersed_args": False})
@click.argument("words", metavar="[SCRIPT [ARG]...]", nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_files)
@layer_option(
    "Which layers: conv1, 'layer4.*', 're:conv[12]$', name#1, 0:10, all; repeatable, comma separated.  [default: all]",
    ("all",),
)
@click.option(
    "--type",
    "types",
    metavar="CLASS",
    multiple=True,
    default=("all",),
    help="Class of layer that indices and all count; repeatable; a glob.  [default: all, every leaf]",
)
@click.option(
    "--every",
    metavar="N",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Sample each N-th step of each optimizer: 0, N, 2N... A sampled step of a tiny model takes several times as"
    " long as another; a compiled model is compiled twice.",
)
@click.option(
    "-o",
    "--log",
    metavar="FILE",
    type=click.Path(),
    default="hookscope.ndjson",
    show_default=True,
    help="Where the lines are appended. Of several processes each has its own: FILE with .rank0, .rank1... in it."
    " (torchrun takes --log for one of its own options, wherever it stands; -o it leaves alone.)",
)
@click.option(
    "--tensorboard", metavar="DIR", type=click.Path(), help="Write the same there too, for TensorBoard; DIR/rank0..."
)
@click.option(
    "--stop-on",
    type=click.Choice(["non-finite"]),
    help="End the script at the first NaN or Inf, tell where it came from, and exit with 3.",
)
@click.option("--show", metavar="LOG", type=click.Path(), help="Run nothing: tell what the last run in LOG shows.")
@click.option("--plot", metavar="FILE", type=click.Path(), help="With --show, draw its curves: a PNG, SVG or PDF file.")
@format_option
def command(words: tuple[str, ...], **options: Any) -> Callable[[], None] | None:
    """Run the training script SCRIPT as Python would, and log what its layers do while it trains.

    SCRIPT is a file, a folder or zip file with a __main__.py, or -m MODULE. It runs unedited, in this process: its
    output, exit status, exceptions and random numbers are as without; of the lines of torch itself in a traceback a
    sampled step has some more. Whatever stands after its name is its own. Standard output is the script's; hookscope
    says on standard error, in a line that begins with Note, what it wrote.

    The log has a line for each chosen layer call of each sampled step, in JSON:

    \b
      step, time            of its optimizer, from 0; seconds since the run began
      loss, learning_rate   where they can be seen; the loss without the scale of a GradScaler
      layer, call, type     and index, in order of execution
      activation_mean, activation_std, zero_share, dead_channels, non_finite
                            of the output
      gradient_norm, weight_norm, update_to_weight
                            of the layer's own parameters
      running_mean_shift, running_var_ratio
                            BatchNorm: the batch against the running statistics

    Steps are those of an optimizer, counted for each optimizer by itself. The log is whole up to the last sampled
    step, whatever ends the run. Should the watcher fail, it says so once and the training goes on.

    --show prints the findings of a run in order of time, of one that goes on still too. json has with them the run
    and the last figures of each layer; other formats the findings alone. Its status is 0, findings or none.

    Under torchrun, hookscope goes inside, and there is one log for each rank. Processes that the script itself starts
    run unwatched.

    \b
    Examples:
      hookscope watch -- train.py --epochs 3
      hookscope watch --layer 'layer*' --every 50 --log run.ndjson -- train.py --epochs 3
      hookscope watch --stop-on non-finite -- -m package.train
      torchrun --nproc_per_node 2 -m hookscope watch -o run.ndjson -- train.py
      hookscope watch --show run.ndjson --plot run.png
    """
    _check_together(words, options)
    if options["show"] is not None:
        show(options["show"], options["plot"], options["format"])
        return None
    from hookscope.cli.commands.watch_run import WatchRun

    script = find_script(words)
    rank, world_size = _place(os.environ)
    names = _per_rank(options["log"], options["tensorboard"], rank, world_size)
    return WatchRun(script, *names, options, rank, world_size).run


def _check_together(words: Sequence[str], options: Mapping[str, Any]) -> None:
    spelled = {"layers": "--layer", "types": "--type", "stop_on": "--stop-on"}
    given = [name for name in (*_OF_A_RUN, *_OF_A_LOG) if was_given(name)]
    of_a_run = [spelled.get(name, f"--{name}") for name in given if name in _OF_A_RUN]
    of_a_log = [f"--{name}" for name in given if name in _OF_A_LOG]
    if options["show"] is None and not words:
        exists = f"{of_a_log[0]} goes with --show LOG" if of_a_log else ""
        raise UsageError(
            "there is no script to watch", exists, "hookscope watch -- train.py, or hookscope watch --show run.ndjson"
        )
    if options["show"] is None and of_a_log:
        raise UsageError(f"{of_a_log[0]} goes with --show, not with a script", do="run the script, then show its log")
    if options["show"] is not None and words:
        raise UsageError(f"--show runs nothing, and there is the script {words[0]}", do="leave one of them out")
    if options["show"] is not None and of_a_run:
        raise UsageError(f"{of_a_run[0]} goes with a script, not with --show", do="leave one of them out")


def _place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Which of how many processes this is, as torchrun tells its children."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        return int(rank), int(size)
    return 0, 1


def _per_rank(log: str, tensorboard: str | None, rank: int, world_size: int) -> tuple[str, str | None]:
    """The names of what one of several processes writes."""
    if world_size == 1:
        return log, tensorboard
    begin, suffix = os.path.splitext(log)
    return f"{begin}.rank{rank}{suffix}", None if tensorboard is None else os.path.join(tensorboard, f"rank{rank}")
