"""Watch a training run from beside it: the figures of every layer each so many steps, without a change to it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from hookscope._version import __version__
from hookscope.errors import LayerError, NonFiniteError, UsageError, nearest
from hookscope.hooks import Layers
from hookscope.system import StrPath
from hookscope.training.log.file import RunLog
from hookscope.training.modules import Chosen
from hookscope.training.optimizers import Optimizers
from hookscope.training.output import WatcherOutput
from hookscope.training.passes import ModelTracker
from hookscope.training.watcher import TrainingWatcher

_STOPS = ("non-finite",)


class Monitor:
    """Watches the training loop in its ``with`` block and writes a line for each layer call of each sampled step.

    Steps ``0``, ``every``, ``2 * every``, ... of each optimizer are sampled. The model has no hook of its own and can
    be copied and saved as ever; weights, gradients, random numbers and what the loop prints are as without. Passes
    without gradients (validation) are passed over, several passes of one step are added up, with those of a step before
    that a ``GradScaler`` left out; a step that a fused optimizer leaves out so counts, but is not sampled. Where
    anything goes wrong in the watching itself it ends, says so once, and the training goes on.

    A sampled step of a tiny model takes several times as long as another; a model that ``torch.compile`` compiles is
    compiled twice, with hooks and without.

    The lines (and `rows`) have: ``step``, ``time`` in seconds, ``loss`` (what ``backward`` was called on, added up
    over the step, without the scale of a ``GradScaler``), ``learning_rate``, ``optimizer``, ``layer``, ``call``,
    ``index`` (order of execution), ``type``, ``model``; ``activation_mean``, ``activation_std``, ``zero_share`` (0
    to 1), ``channels``, ``channel_values`` (images times positions), ``dead_channels`` (0 everywhere in the step),
    ``non_finite``; of its own parameters ``gradient_norm``, ``gradient_non_finite``, ``weight_norm``,
    ``weight_non_finite`` (without biases, before the step), ``update_to_weight``, ``frozen``; of a BatchNorm in
    train mode ``running_mean_shift`` and ``running_var_ratio``: the batch against the running statistics from
    before the pass. What there is not is None.

    Args:
        model: The only model to watch; None for every model that is called.
        optimizer: The only optimizer to follow; None for every one.
        every: Each so many steps one is sampled, from 1.
        log: File to append to, NDJSON, or a `RunLog` for one run; without one the lines are kept in `rows`.
        layers: Which layers, see `Selection`.
        types: Class names that indices and ``all`` count, ``all`` for every leaf and what has parameters of its own.
        tensorboard: Folder for an event file with the same figures.
        stop_on: ``non-finite`` looks at every step, all layers, the loss and the gradients, and raises at the first
            NaN or Inf, before the optimizer spoils the weights. A layer that puts out Inf on purpose stops a run too.
        command: The words the run was started with, for the log.
        rank: Of this process.
        world_size: How many processes train together.
        on_trouble: Called with a line of text when there is something to say; else it is a warning.

    Attributes:
        steps: How many steps were seen, of all optimizers.
        sampled: How many of them were sampled.
        rows: The lines, where there is no log.
        trouble: What went wrong first, None where nothing did.
        stopped: What ``stop_on`` has raised, though the loop may have caught it; None where it has not.

    Raises:
        UsageError: for options that make no sense.
        ModelError: for a scripted model.
        LayerError: on entry, for layers that the model does not have, or an optimizer of another model.
        WriteError: on entry, for a log or a folder that cannot be written.
        InstallationError: on entry, where TensorBoard is not installed.
        NonFiniteError: out of the training loop, with ``stop_on``.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with Monitor(net, optimizer, every=2) as monitor:
        ...     for _ in range(3):
        ...         net(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        >>> [(row["step"], row["layer"], row["type"]) for row in monitor.rows]
        [(0, '0', 'Linear'), (0, '1', 'ReLU'), (2, '0', 'Linear'), (2, '1', 'ReLU')]
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        every: int = 50,
        log: StrPath | RunLog | None = None,
        layers: Layers = "all",
        types: Iterable[Any] = ("all",),
        tensorboard: StrPath | None = None,
        stop_on: str | None = None,
        command: Sequence[str] | None = None,
        rank: int = 0,
        world_size: int = 1,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"no step can be sampled every {every}", do="give 1 or more")
        if stop_on is not None and stop_on not in _STOPS:
            raise UsageError(f"no stop on '{stop_on}'", nearest(str(stop_on), _STOPS), "give non-finite")
        _check_optimizer(optimizer)
        self._model, self._optimizer, self._every, self._stop_on = model, optimizer, every, stop_on
        self._layers = (str(layers),) if isinstance(layers, (str, int)) else tuple(map(str, layers))
        self._chosen = Chosen.of(self._layers, types)
        self._log, self._events, self._on_trouble = log, tensorboard, on_trouble
        self._about = {
            "command": None if command is None else list(command),
            "every": every,
            "rank": rank,
            "world_size": world_size,
        }
        self._begin(WatcherOutput())

    @property
    def steps(self) -> int:
        """How many steps were seen, of all optimizers."""
        return self._watch.steps

    @property
    def sampled(self) -> int:
        """How many of them were sampled."""
        return self._output.sampled

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines, where there is no log."""
        return self._output.rows

    @property
    def trouble(self) -> str | None:
        """What there was to say first, None where there was nothing."""
        return self._output.trouble

    @property
    def stopped(self) -> NonFiniteError | None:
        """What ``stop_on`` has raised, though the loop may have caught it; None where it has not."""
        return self._watch.stopped

    def __enter__(self) -> Self:
        ModelTracker(self._model, self._chosen).check()
        self._check_optimizer_fits()
        self._begin(WatcherOutput(self._log, self._events, self._header(), self._on_trouble))
        self._watch.on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.off()
        self._output.end(self._watch.last_step, error)

    def _begin(self, output: WatcherOutput) -> None:
        """Nothing has been seen yet."""
        roots = ModelTracker(self._model, self._chosen)
        self._output = output
        self._watch = TrainingWatcher(
            roots, Optimizers(self._optimizer, self._every), output, self._stop_on is not None
        )
        roots.on_root = self._watch.look_at

    def _header(self) -> dict[str, Any]:
        return {
            "row": "run",
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "hookscope": __version__,
            "torch": str(torch.__version__),
            **self._about,
            "pid": os.getpid(),
            "layers": list(self._layers),
            "types": list(self._chosen.types),
        }

    def _check_optimizer_fits(self) -> None:
        if self._model is None or self._optimizer is None:
            return
        have = {id(p) for p in self._model.parameters()}
        if have.isdisjoint(id(p) for group in self._optimizer.param_groups for p in group["params"]):
            raise LayerError("the optimizer has no parameter of the model", do="pass the one that was made from it")


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"no optimizer: a {type(optimizer).__name__}", do="pass a torch.optim.Optimizer")
