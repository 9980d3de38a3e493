"""The hooks that watch a training run: what each does, and when they are on."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookscope.errors import HookscopeError, LayerError, NonFiniteError
from hookscope.hooks import HookHandles
from hookscope.training.loss_tap import LossTap, hidden_from_compile, scalar_of
from hookscope.training.modules import Root
from hookscope.training.optimizers import Optimizers, closure_of, gradient_scale, is_stepping, makes_no_step
from hookscope.training.output import WatcherOutput
from hookscope.training.passes import ModelTracker
from hookscope.training.recorder import MetricsRecorder, OptimizerStep
from hookscope.training.step_record import expected_statistics
from hookscope.training.stop import StopRule
from hookscope.training.weights import StepWeights

_P = ParamSpec("_P")


def _guarded(
    body: Callable[Concatenate[TrainingWatcher, _P], None],
) -> Callable[Concatenate[TrainingWatcher, _P], None]:
    """What goes wrong in a hook of the watcher ends the watching, and never the training."""

    @functools.wraps(body)
    def hook(self: TrainingWatcher, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        # first of all and alone: what compiles a model reads this function, and is to find nothing in it
        if torch.compiler.is_compiling():
            return
        if self.is_off or os.getpid() != self._pid:  # a worker that was forked off is not watched
            return
        try:
            body(self, *args, **kwargs)
        except NonFiniteError:
            raise
        except Exception as error:
            self._fail(error)

    return hook


class TrainingWatcher:
    """Watches the models and optimizers of this process while it is on.

    Args:
        roots: The models.
        optimizers: The optimizers.
        output: Where lines go, and what there is to say.
        stops: Whether to stop at the first value that is not finite.

    Attributes:
        steps: How many steps were seen, of all optimizers.
        last_step: The number of the last, None before the first.
        is_off: Whether nothing is watched: before it began, after it has ended or failed.
    """

    def __init__(self, roots: ModelTracker, optimizers: Optimizers, output: WatcherOutput, stops: bool) -> None:
        self.steps = 0
        self.last_step: int | None = None
        self.is_off, self._pid = True, os.getpid()
        self._roots, self._optimizers, self._output = roots, optimizers, output
        self._stop = StopRule(output, optimizers) if stops else None
        self._recorder = MetricsRecorder()
        self._open: OptimizerStep | None = None
        self._samples = self._stays_on = self._hooks_are_on = False
        self._step_door, self._module_door = HookHandles(), HookHandles()
        self._loss_tap = LossTap(self._before_backward)
        # one object for the whole run: what compiles a model looks whether it is the same hook still
        self._hooks = (self._before, self._after)
        self._hidden = hidden_from_compile(self._hooks)

    @property
    def stopped(self) -> NonFiniteError | None:
        """What the training was told to stop by, None where it was not."""
        return None if self._stop is None else self._stop.raised

    def on(self) -> None:
        """Begin."""
        self._step_door.every_step_pre(self._before_step)
        self._step_door.every_step_post(self._after_step)
        self.is_off = False
        for root in self._roots.all:
            self.look_at(root)
        self._arrange()

    def off(self) -> None:
        """End, and take every hook off."""
        self.is_off, self._open = True, None
        self._step_door.__exit__(None, None, None)
        self._no_module_hooks()

    def look_at(self, root: Root) -> None:
        """Say what cannot be seen of a model that was just found."""
        # a layer compiled in place is compiled anew each time that hooks are put on or taken off
        self._stays_on |= root.compiled_in_place
        if root.silent:
            text = "no hook tells of the compiled, scripted or replicated layers of {}: of those only the figures of"
            text += " their parameters are logged"
            self._output.say("compiled", self.last_step, text.format(type(root.module).__name__))

    @_guarded
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_watched_pass():
            return
        layer, begins = self._roots.enter(module)
        now = self._roots.current
        if now is None or layer is None:
            return
        if begins:
            if self._stop is not None:
                self._stop.again()
            self._recorder.begin(now)
        if self._samples and now.measured and layer.may_want(module):
            expected = expected_statistics(module)
            if expected is not None:
                now.expected[id(module)] = expected
        if self._stop is not None:
            self._stop.before_call(now, module, args)

    @_guarded
    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._is_watched_pass():
            return
        found = self._roots.leave(module)
        with torch.no_grad():
            if isinstance(module, torch.nn.modules.loss._Loss) and (value := scalar_of(output)) is not None:
                self._recorder.add_loss_output(value)
            if found is None:
                return
            now, layer = found
            call = now.calls[id(module)]
            now.calls[id(module)] = call + 1
            if self._samples:
                self._recorder.add(now, layer, call, module, (args, kwargs), output)
            if self._stop is not None:
                is_top = now is not self._roots.current
                self._stop.after_call(now, layer, call, module, (args, kwargs), output, is_top)

    @_guarded
    def _before_backward(self, value: Tensor, roots: Sequence[Tensor]) -> None:
        if torch._C._current_graph_task_id() != -1:  # a backward pass within one
            return
        with torch.no_grad():
            if self._stop is not None:
                self._stop.before_backward(roots)
            self._recorder.add_loss(value)

    @_guarded
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open is not None and is_stepping(self._open.stepper.optimizer, optimizer):
            self._open.depth += 1
            return
        self._open = None
        stepper = self._optimizers.of(optimizer)
        if stepper is None:
            return
        step = OptimizerStep(stepper, closure_of(args, kwargs) is not None)
        with torch.no_grad():
            if self._stop is not None:
                self._stop.again()
                if not step.has_closure:
                    self._stop.before_step(stepper, optimizer, self._roots.all, self._recorder.order_of_layers())
            samples = stepper.steps % self._optimizers.every == 0
            if samples and makes_no_step(optimizer):  # the next one is sampled in its place
                return
            self._open = step
            if samples:
                self._prepare(step)

    @_guarded
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._open
        if step is None:
            return
        if step.depth:
            step.depth -= 1
            return
        self._open = None
        stepper = step.stepper
        self.steps, self.last_step = self.steps + 1, stepper.steps
        if step.weights is not None:
            with torch.no_grad():
                step.weights.step_is_done()
                rows = [self._output.line("layer", stepper.steps) | line for line in self._recorder.lines(step)]
            self._output.deliver(rows)
            if not rows:
                self._say_what_is_missing()
        self._recorder.segment += 1
        self._optimizers.has_stepped(stepper, self._recorder.segment)
        self._arrange()

    def _prepare(self, step: OptimizerStep) -> None:
        """Measure the weights before a sampled step."""
        parameters = {id(p) for p in step.stepper.parameters()}
        step.roots = self._roots.holding(parameters)
        if not step.roots and not step.stepper.was_searched:
            step.stepper.was_searched = True
            self._roots.find_owner(parameters)
            step.roots = self._roots.holding(parameters)
        found = [each for root in step.roots for each in root.with_parameters()]
        optimizer = step.stepper.optimizer
        scale = None if optimizer is None else gradient_scale(optimizer)
        wanted = [own for layer, module, own in found if layer.may_want(module)]
        step.weights = StepWeights(wanted, not step.has_closure, scale)
        if step.stepper.steps:
            step.elsewhere = frozenset(self._optimizers.held() - parameters)

    def _is_watched_pass(self) -> bool:
        """Whether a pass is one of training: with gradients, and none that is traced or computed again in backward."""
        return (
            (self._samples or self._stop is not None)
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.peek_interpreter_stack() is None
            and not torch._C._is_tracing()
        )

    def _arrange(self) -> None:
        """Have the hooks of modules on for a step that is to be sampled, and else off: they cost something."""
        self._samples = self._optimizers.is_any_due()
        needed = self._samples or self._stop is not None
        if not needed and not self._stays_on:
            self._no_module_hooks()
            return
        if not self._hooks_are_on:
            self._module_door.every_forward_pre(self._hooks[0])
            self._module_door.every_forward(self._hooks[1])
            self._hidden.on()
            self._hooks_are_on = True
        (self._loss_tap.on if needed else self._loss_tap.off)()

    def _no_module_hooks(self) -> None:
        self._module_door.__exit__(None, None, None)
        self._hooks_are_on = False
        self._hidden.off()
        self._loss_tap.off()

    def _say_what_is_missing(self) -> None:
        """Why a sampled step had no line."""
        try:
            for root in self._roots.all:
                if len(root.layers) > 1:
                    root.check()
        except LayerError as error:
            # how layers are listed is no help: no command lists those of a model that a script makes
            self._output.say("no-layer", self.last_step, f"nothing is logged: {error.asked}; {error.exists}")
        else:
            text = "no chosen layer ran that the optimizer has parameters of: nothing is logged of its steps"
            self._output.say("nothing-seen", self.last_step, text)

    def _fail(self, error: Exception) -> None:
        """Stop watching: the training goes on without."""
        self.is_off, self._open = True, None
        with contextlib.suppress(Exception):  # nothing of this may reach the script either
            self._no_module_hooks()  # those of optimizers stay to the end: torch is just walking through them
        with contextlib.suppress(Exception):
            why = str(error) if isinstance(error, HookscopeError) else f"{type(error).__name__}: {_one_line(error)}"
            self._output.say("watcher-failed", self.last_step, f"watching has ended, the training goes on: {why}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
