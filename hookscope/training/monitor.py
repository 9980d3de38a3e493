"""Watch a training loop: the metrics of every layer every so many steps, without a change to the model."""

from __future__ import annotations

import datetime
import html
import os
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from hookscope._version import __version__
from hookscope.errors import LayerError, ModelError, UsageError, check_whole, first_line, nearest
from hookscope.findings import Findings
from hookscope.hooks import AnyModel, Layers, Selection, module_of, select_types
from hookscope.system import StrPath
from hookscope.training.log.file import Run, RunLog, read_runs
from hookscope.training.log.summary import TimedFinding
from hookscope.training.optimizers import Optimizers, parameters_of
from hookscope.training.output import RunProgress, WatcherOutput, has_failed
from hookscope.training.reference import LastInputs
from hookscope.training.sinks import Sink, SinkChoice
from hookscope.training.tracker import LayerChoice, ModelTracker
from hookscope.training.watcher import TrainingWatcher

_STOPS = ("non-finite",)


class Monitor(RunProgress):
    """Watches the training loop in its ``with`` block and writes a line for each layer call of each sampled step.

    Steps 0, 1, 2, 4, 8... before ``every`` of each optimizer are sampled, then ``every``, ``2 * every``... The model
    gets no hook of its own and can be copied and saved as usual. Weights, gradients, random numbers and the output of
    the loop do not change. Passes without gradients (validation) are ignored. All passes since the last step are
    accumulated, including passes of steps that a ``GradScaler`` skipped. If the watching itself fails, it ends with one
    warning, and training goes on.

    Where weights change without an optimizer of torch (fastai and Keras have their own), each backward pass counts as a
    step. In a sampled step, a script that lists the global hooks of torch sees hookscope's.

    A sampled step of a tiny model takes several times as long as another. Watching never compiles code of
    ``torch.compile`` again. A compiled part has a line for what it returns; lines of the layers in it have only the
    metrics of their parameters. Compiled steps of optimizers count too.

    The lines (and `rows`) have the fields: ``step``, ``time`` in seconds, ``loss`` (the mean over the backward passes
    of the step of the tensors that ``backward`` starts at, without the scale of a ``GradScaler``, and not divided by
    the number of these passes), ``passes`` (that number), ``learning_rate``, ``optimizer``, ``layer``, ``call``,
    ``called_as`` (the name under which a layer with several names was called, None for its first), ``index`` (see
    `Call`), ``order`` (position among all calls of the pass; both None for a layer that did not run), ``type``,
    ``model``; ``activation_mean``, ``activation_std``, ``activation_max`` (of layers with parameters), ``zero_share``
    (0 to 1), ``channels``, ``channel_values`` (images times positions), ``dead_channels`` (0 everywhere in the step),
    ``non_finite``, ``infinite`` (whether these are Inf of one sign alone, as of an attention mask); of its own
    parameters ``gradient_norm``, ``weight_gradient_norm`` (without biases), ``gradient_non_finite``, ``weight_norm``,
    ``weight_non_finite`` (without biases, before the step), ``update_to_weight``, ``frozen``; of a BatchNorm in train
    mode ``running_mean_shift`` and ``running_var_ratio``: the batch against the running statistics before the pass. A
    field without a value is None.
    A line with histograms has a further field, ``histograms``, by what they count: ``activation`` (finite values of the
    output), and once for each layer its own parameters before the step, such as ``weight``, and their gradients, such
    as ``weight_gradient``. Each has ``edges`` (B + 1) and ``counts`` (B), B up to 100. The counts are exact; 0 is in
    the bucket that ends there, if there are smaller values.

    After the lines of a sampled step, one line, ``facts``, holds what findings need to name a cause, without fields
    that have no value: ``backwards``; of the optimizer ``optimizer_type``, ``rate``, ``rate_swings`` (to almost 0 and
    back), ``momentum``, ``weight_decay``, ``maximize`` (of several groups the largest); of its parameters their number
    in ``parameters``, ``trainable``, ``with_gradient``, ``zero_gradients``, ``stale_gradients`` (from before the last
    step when backward began), ``gradients_after_backward``, ``zero_after_backward``, ``gradient_norm``,
    ``without_gradient`` (layers), ``under_no_grad``, ``equal_filters``, ``equal_at_first`` (layers), ``of_no_model``,
    ``models`` (classes); ``not_optimized`` parameters of the model that no optimizer holds, and those ``waiting`` for
    one that made no step; ``clip_function``, ``clip_limit``, ``clip_scaled``, ``step_scaled``; ``loss_scale``,
    ``first_loss_scale``; ``loss_function``, ``loss_input`` (the operation before it), ``classes``, ``targets``,
    ``target_min``, ``target_max``, ``soft_target_sum`` (over the classes, the largest), ``softmax_dim`` (if the classes
    are in another), ``loss_without_graph``, ``loss_negated``, ``loss_alone``, ``loss_is_mean``,
    ``loss_input_sums_to_1``, ``loss_input_max``, ``kl_div_input``, ``overlap_input`` (of Dice), ``log_input``,
    ``loss_shapes``, ``made_by`` (of NaN); of numbers as targets ``target_size``, ``target_lowest``, ``target_highest``;
    ``input_shape``, ``input_mean``, ``input_std``, ``input_min``, ``input_max``, ``input_key`` (the mean weighted by
    position, which tells inputs apart), ``input_spread`` (between samples), ``input_period`` (of 3 columns) of the
    first layer with weights; ``train_mode``, ``modes`` (layers with dropout or BatchNorm), ``eval_modes`` (those in
    eval mode), ``validation_in_train_mode`` (the step after it) and its ``validation_loss``; ``batchnorm`` with the
    smallest batch, ``batchnorm_values``, ``batchnorm_samples``. A run without steps has such a line after 10, 100,
    1,000... backward passes and at its end, with ``optimizer_steps``, ``weights_changed`` and ``optimizers``.

    Args:
        model: The only model to watch; None for every model that is called.
        optimizer: The only optimizer to follow; None for all.
        every: Sample each ``every``-th step, from 1, and before it steps 0, 1, 2, 4, 8...
        log: NDJSON file to append to, or a `RunLog` for one run; None keeps the lines in `rows`.
        layers: Which layers, see `Selection`.
        types: Class names that indices and ``all`` count. None for Conv2d (Conv3d in models of clips); ``all`` then
            means every layer without children or with own parameters.
        to: Where the same metrics go too: ``tensorboard:DIR``, ``wandb``, ``wandb:PROJECT``, ``mlflow`` or
            ``mlflow:EXPERIMENT``, or several. Each is a run of its own beside the script's runs.
        histograms: Add histograms to each ``histograms``-th sampled step; 0 for none. They take about as long as the
            other metrics, and nine times as much of the log.
        stop_on: ``non-finite`` checks every step, all layers, the loss and the gradients, and raises at the first NaN
            or Inf, before it reaches the weights. A layer that outputs Inf on purpose stops a run too.
        reference: File for what the model does at the end, on the latest sampled batches, in eval mode: a reference for
            `inspect`. A run that ends with an exception writes none.
        command: The command line of the run, for the log.
        rank: The rank of this process.
        world_size: The number of processes that train together.
        on_trouble: Called with each message to the user; None for a warning.

    Attributes:
        steps: Number of steps so far, of all optimizers.
        sampled: Number of sampled steps.
        backwards: Number of backward passes before the first step.
        rows: The lines, where there is no log.
        facts: The facts of the sampled steps, where there is no log.
        notes: The lines of notes, where there is no log.
        ends: The last line after the block, where there is no log.
        written_to: Where the sinks of ``to`` are, in words.
        trouble: The first message to the user, None without one.
        reference: What was written as the reference, after the block; None without a file.
        stopped: The error that ``stop_on`` raised, even if the loop caught it; else None.

    Raises:
        UsageError: an option has no valid value.
        ModelError: the model is scripted or no module.
        LayerError: on entry, the model has no such layer, or the optimizer no parameter of the model.
        WriteError: on entry, the log or a sink cannot be written.
        InstallationError: on entry, the package of a sink is not installed.
        NonFiniteError: in the training loop, with ``stop_on``.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sigmoid())
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with Monitor(net, optimizer, every=50) as monitor:
        ...     for _ in range(4):
        ...         net(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        >>> [(row["step"], row["type"]) for row in monitor.rows]
        [(0, 'Linear'), (0, 'Sigmoid'), (1, 'Linear'), (1, 'Sigmoid'), (2, 'Linear'), (2, 'Sigmoid')]
        >>> monitor.findings[0].finding  # there is no zero_grad
        'gradients-accumulate'
    """

    def __init__(
        self,
        model: AnyModel | None = None,
        optimizer: Optimizer | None = None,
        *,
        every: int = 50,
        log: StrPath | RunLog | None = None,
        layers: Layers = "all",
        types: Iterable[Any] | None = None,
        to: str | Iterable[str | Sink | SinkChoice] = (),
        histograms: int = 0,
        stop_on: str | None = None,
        reference: StrPath | None = None,
        command: Sequence[str] | None = None,
        rank: int = 0,
        world_size: int = 1,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        model = None if model is None else module_of(model)
        for name, number, least in (("every", every, 1), ("histograms", histograms, 0)):
            check_whole(name, number, least)
        if stop_on is not None and stop_on not in _STOPS:
            raise UsageError(f"cannot stop on '{stop_on}'", nearest(str(stop_on), _STOPS), "give non-finite")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if isinstance(model, torch.jit.ScriptModule):
            raise ModelError("the model is scripted or traced: hooks do not fire in it", do="pass the eager model")
        self._model, self._optimizer, self._every, self._stop_on = model, optimizer, every, stop_on
        self._choice = LayerChoice(Selection.of(layers), None if types is None else select_types(types))
        sinks = to if isinstance(to, Iterable) and not isinstance(to, str) else [to]
        chosen = [sink if isinstance(sink, Sink | SinkChoice) else SinkChoice.parse(sink) for sink in sinks]
        self._sinks = list(dict.fromkeys(chosen))
        self._log, self._reference, self._histograms, self._on_trouble = log, reference, histograms, on_trouble
        self._header = {
            "command": None if command is None else list(command),
            "every": every,
            "histograms": histograms,
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "layers": [str(term) for term in self._choice.selection.terms],
            "types": None if self._choice.types is None else list(self._choice.types),
        }

    @property
    def run(self) -> Run:
        """What was watched so far, for `diagnose` and `plot`; the last run of the ``log``, if there is one."""
        if self._log is not None:
            return read_runs(self._log.path if isinstance(self._log, RunLog) else self._log)[-1]
        return Run(self._header, self.rows, self.notes, next(iter(self.ends), None), self.facts)

    def __repr__(self) -> str:
        model = "every model" if self._model is None else type(self._model).__name__
        told = "see .findings" if hasattr(self, "_output") else "not started: `with monitor:` around the training"
        return f"Monitor({model}: {self.sampled} of {self.steps} steps sampled; {told})"

    @property
    def findings(self) -> Findings[TimedFinding]:
        """What somebody should look at in `run`, as ``show-run`` and `diagnose` find it, the most severe first."""
        from hookscope.training.log.findings import findings_over_time  # a watched script need not load it

        return findings_over_time(self.run)

    def _repr_html_(self) -> str:
        found = self.findings._repr_html_() if hasattr(self, "_output") else ""
        return f"<p>{html.escape(repr(self))}</p>{found}"

    def __enter__(self) -> Self:
        super().__init__()  # a second run starts from 0
        if self._model is not None:
            from hookscope.models import as_loaded  # a watched script need not load it

            as_loaded(self._model)  # refuses one on the meta device
        models = ModelTracker(self._model, self._choice)
        for model in models.models:
            model.check()
        if self._model is not None and self._optimizer is not None:
            parameters = {id(p) for p in self._model.parameters()}
            if parameters.isdisjoint(map(id, parameters_of(self._optimizer))):
                raise LayerError("the optimizer has no parameter of the model", do="pass the optimizer of the model")
        header = {
            "row": "run",
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "hookscope": __version__,
            "torch": str(torch.__version__),
            **self._header,
        }
        self._output = WatcherOutput(self, self._log, self._sinks, header, self._on_trouble)
        optimizers = Optimizers(self._optimizer, self._every, self._histograms)
        self._watcher = TrainingWatcher(self, models, optimizers, self._output, self._stop_on is not None)
        self._watcher.inputs = None if self._reference is None else LastInputs()
        self._watcher.on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.off()
        inputs = None if self._output.is_forked or has_failed(error) else self._watcher.inputs
        if self._reference is not None and inputs is not None:
            try:
                self.reference = inputs.measured()
                self.reference.save(self._reference)
            except Exception as trouble:  # the run itself has succeeded
                text = f"no reference was written: {first_line(trouble)}"
                self._output.announce("no-reference", self._watcher.last_step, text)
        self._output.end(self._watcher.last_step, error)
