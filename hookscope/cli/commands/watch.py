"""Run a training script and log what its layers do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import click

from hookscope.cli.command import Command, GroupedCommand
from hookscope.cli.fields import argument, option
from hookscope.cli.shared.options import calls_option, complete_words, out_file, type_option
from hookscope.errors import UsageError
from hookscope.system import find_script
from hookscope.training import SinkChoice


class _ScriptCommand(GroupedCommand):
    """A command whose options end at ``-m`` or the name of a script; all later words belong to the script."""

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [option for option in self.params if isinstance(option, click.Option) and not option.is_flag]
        with_value = {name for option in options for name in option.opts}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                return super().parse_args(ctx, [*args[:at], "--", *args[at:]])
            at += 2 if args[at] in with_value else 1
        return super().parse_args(ctx, args)


class Watch(Command):
    """Run the training script SCRIPT as Python would, and log what its layers do while it trains.

    \b
    Examples:
      hookscope watch -- train.py --epochs 3
      hookscope watch --layer 'layer*' --every 50 --log run.ndjson -- train.py --epochs 3
      hookscope watch --to wandb --histograms 10 -- train.py --epochs 3
      hookscope watch --stop-on non-finite -- -m package.train
      torchrun --nproc_per_node 2 -m hookscope watch -o run.ndjson -- train.py

    SCRIPT is a file, a folder or zip file with a __main__.py, or -m MODULE. All words after SCRIPT are the script's own
    arguments. The script runs unedited in this process: its output, exit status, exceptions and random numbers do not
    change. Notes of hookscope go to standard error and begin with Note.

    `hookscope show-run` shows the findings of a run, also while it goes on.

    \b
    The log has a line of JSON for each sampled step and layer call:
      step, time         step of the layer's optimizer, from 0; seconds since
                         the start
      loss, passes, learning_rate
                         if known; the loss is the mean over the backward passes
                         of the step, without the scale of a GradScaler
      layer, call, type, index, order
                         as in list-layers
      called_as          the name of the place that calls a shared layer
      activation_mean, activation_std, activation_max, zero_share,
      dead_channels, non_finite, infinite
                         of the output; the largest value of layers with
                         parameters only
      gradient_norm, weight_norm, update_to_weight
                         of the layer's own parameters
      running_mean_shift, running_var_ratio
                         BatchNorm: the batch against the running statistics

    Another line of each sampled step, facts, helps to explain why a run does not learn: backward passes, clipping,
    gradients of the step before, inputs, targets, the loss function, modes, settings of the optimizer, loss scale.

    --to also writes the metrics and the histograms to another program, as a separate run. MLflow has no
    histograms: they are JSON files of the run. If the program fails, a note says so, and the log goes on.

    --histograms adds to the line of a layer, in every N-th sampled step, the histograms of its output, its own
    parameters and their gradients: edges and counts. They take about as long as the other metrics, and nine times
    as much space in the log.

    Steps are counted for each optimizer. The log is complete up to the last sampled step, however the run ends. If
    watching fails, a note says so and the training goes on.

    Each rank of torchrun writes its own log, and so does each process that the script starts with multiprocessing and
    that trains: its log has .process1, .process2... in the name. Other processes that the script starts are not
    watched.
    """

    made_of = _ScriptCommand

    words: tuple[str, ...] = argument(
        "SCRIPT [ARG]...", type=click.UNPROCESSED, shell_complete=complete_words(or_file=True)
    )
    layers: Any = calls_option("Calls to log", "all", default="all")
    types: tuple[str, ...] = type_option()
    every: int = option(
        "Sample every N-th step of each optimizer: 0, 1, 2, 4, 8... before N, then N, 2N... A sampled step takes longer"
        " than others.",
        default=50,
    )
    log: str = option(
        "Log file; lines are appended. Each rank of torchrun writes its own, with .rank0, .rank1... in the name. With"
        " torchrun write -o: torchrun has its own --log.",
        "-o",
        metavar="FILE",
        type=click.Path(),
        default="hookscope.ndjson",
    )
    to: tuple[str, ...] = option(
        "Also write to tensorboard:DIR, wandb[:PROJECT] or mlflow[:EXPERIMENT]. Can be repeated. With torchrun each"
        " rank has its own run; TensorBoard's are in DIR/rank0, DIR/rank1...",
        metavar="SINK",
    )
    tensorboard: str | None = option(
        "Short for --to tensorboard:DIR.", metavar="DIR", type=click.Path(), section="Output"
    )
    histograms: int | None = option(
        "Write histograms of activations, weights and gradients in every N-th sampled step."
    )
    stop_on: str | None = option(
        "Stop the script at the first NaN or Inf, report its origin, and exit with status 3.",
        type=click.Choice(["non-finite"]),
    )

    reference: str | None = out_file(
        "At the end, rank 0 writes what the model does in eval mode on its latest sampled batches, for --reference of"
        " inspect and check."
    )

    def run(self) -> Callable[[], None]:
        if not self.words:
            do = "write hookscope watch -- train.py; `show-run` shows a log"
            raise UsageError("there is no script to watch", do=do)
        from hookscope.cli.shared.watch_run import WatchRun

        script = find_script(self.words)
        rank, world_size = _rank(os.environ)
        log, to = self.log, list(self.to)
        if self.tensorboard is not None:
            to.append(f"tensorboard:{self.tensorboard}")
        sinks = list(dict.fromkeys(map(SinkChoice.parse, to)))
        if world_size > 1:
            begin, suffix = os.path.splitext(log)
            log = f"{begin}.rank{rank}{suffix}"
            sinks = [sink.of_rank(rank) for sink in sinks]
        return WatchRun(script, log, sinks, vars(self), rank, world_size).run


def _rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """The rank of this process and the number of processes, from the variables that torchrun sets."""
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        return int(rank), int(size)
    return 0, 1
