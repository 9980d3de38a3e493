"""The hooks that watch a training run, and when they are on."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookscope.errors import HookscopeError, LayerError, NonFiniteError
from hookscope.hooks import HookHandles
from hookscope.training.facts import StepFacts
from hookscope.training.loss_graph import divisor_of
from hookscope.training.loss_tap import (
    CompiledCalls,
    LossTap,
    are_tensors_fake,
    hidden_from_compile,
    outside_modes,
    scalar_of,
)
from hookscope.training.optimizers import (
    BackwardSteps,
    Optimizers,
    TrackedOptimizer,
    gradient_scale,
    is_sampled,
    skips_step,
)
from hookscope.training.output import RunProgress, WatcherOutput
from hookscope.training.recorder import MetricsRecorder, OptimizerStep, running_statistics
from hookscope.training.reductions import StepWeights
from hookscope.training.reference import LastInputs
from hookscope.training.stop import StopRule
from hookscope.training.tracker import ModelTracker, TrackedModel, is_compiled_wrapper


def _guarded(body: Callable[..., None]) -> Callable[..., None]:
    """An exception in a hook of the watcher ends the watching, never the training."""

    @functools.wraps(body)
    def hook(self: TrainingWatcher, /, *args: Any, **kwargs: Any) -> None:
        # where calls of compiled code are not seen, the compiler reads this function, and must find nothing to compile
        if torch.compiler.is_compiling():
            return
        if self.is_off or os.getpid() != self._pid or are_tensors_fake():  # forked workers are not watched
            return
        try:
            with outside_modes():
                body(self, *args, **kwargs)
        except NonFiniteError:
            raise
        except Exception as error:
            self._fail(error)

    return hook


class TrainingWatcher:
    """Watches the models and optimizers of this process while it is on."""

    def __init__(
        self, run: RunProgress, models: ModelTracker, optimizers: Optimizers, output: WatcherOutput, stops: bool
    ) -> None:
        self.last_step: int | None = None  # its number
        self.inputs: LastInputs | None = None  # kept for a reference
        self.is_off, self._pid = True, os.getpid()  # it is off after a failure too
        self._tracers = sys.gettrace(), sys.getprofile()
        self._run, self._models, self._optimizers, self._output = run, models, optimizers, output
        self._stop = StopRule(run, output, optimizers) if stops else None
        self._recorder = MetricsRecorder(run)
        self._open: OptimizerStep | None = None
        self._own_steps: TrackedOptimizer | None = None  # counted from when weights have changed without a step
        self._own_open: OptimizerStep | None = None
        self._may_own_steps_follow = optimizers.are_all
        self._samples = self._counts_values = self._hooks_are_on = False
        self._awaits_training = False  # whether no training pass has begun since the last step
        self._step_hooks, self._module_hooks = HookHandles(), HookHandles()
        # the same bound methods throughout: compiled models compare hooks by identity
        self._before_module, self._after_module = self._before, self._after
        self._loss_tap = LossTap(self._before_backward, self._after_backward)
        self._facts = StepFacts(run, models, optimizers, self._loss_tap)
        self._hidden = hidden_from_compile((self._before_module, self._after_module))
        self._compiled = CompiledCalls(self._hide, self._before_compiled, self._after_compiled)

    def on(self) -> None:
        self._step_hooks.every_step_pre(self._before_step)
        self._step_hooks.every_step_post(self._after_step)
        self._module_hooks.every_forward_pre(self._before_module)
        self._module_hooks.every_forward(self._after_module)
        self._module_hooks.hide()
        self.is_off = False
        self._models.on_model = self._on_model
        for model in self._models.models:
            self._on_model(model)
        self._switch_hooks()
        self._compiled.on()

    def off(self) -> None:
        self._finish_own_step()
        self._write_facts(at_end=True)
        self.is_off, self._open = True, None
        self._compiled.off()
        self._step_hooks.close()
        self._remove_module_hooks()
        self._module_hooks.close()
        if self._stop is not None:
            self._stop.close()

    def _on_model(self, model: TrackedModel) -> None:
        if model.is_opaque:
            name = type(model.module()).__name__
            text = f"hooks do not fire in the compiled, scripted or replicated layers of {name}: the log has only the"
            text += " metrics of their parameters and of what a compiled part returns"
            self._output.announce("compiled", self.last_step, text)

    def _hide(self, compiled_code_runs: bool) -> None:
        """Take all that watches out of torch while compiled code runs: it would be compiled into that code."""
        try:
            (self._step_hooks.hide if compiled_code_runs else self._step_hooks.show)()
            if self._hooks_are_on:
                (self._module_hooks.hide if compiled_code_runs else self._module_hooks.show)()
            if self._hooks_are_on or self._own_steps is not None:
                (self._loss_tap.off if compiled_code_runs else self._loss_tap.on)()
        except Exception:
            return

    def _before_compiled(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compiled code is called; what is returned goes to `_after_compiled`, unless it is None."""
        owner = getattr(function, "__self__", function)
        if isinstance(owner, nn.Module):
            if not self._hooks_are_on:
                return None
            self._before(owner, args)
            model = self._models.mark_compiled(owner)
            if model is not None:
                self._on_model(model)
        elif isinstance(owner, Optimizer) and getattr(function, "__name__", "") == "step":
            self._before_step(owner, (owner, *args), kwargs)
        else:
            steps: list[tuple[OptimizerStep, int]] = []
            self._before_function(function, steps)
            return steps, args, kwargs
        return owner, args, kwargs

    def _after_compiled(self, called: Any, result: Any) -> None:
        owner, args, kwargs = called
        if isinstance(owner, nn.Module):
            self._after(owner, args, kwargs, result)
        elif isinstance(owner, Optimizer):
            self._after_step(owner, (owner, *args), kwargs)
        else:
            self._after_function(owner)

    @_guarded
    def _before_function(self, function: Any, steps: list[tuple[OptimizerStep, int]]) -> None:
        """A compiled function is called, which may step optimizers."""
        with torch.no_grad():
            optimizers = list(self._optimizers.in_function(function))
            of_models = [owner for owner in optimizers if self._models.holding({id(p) for p in owner.parameters()})]
            for tracked in of_models or optimizers:
                step = OptimizerStep(tracked, True, gradients={})  # unseen: the function may also clear them
                if is_sampled(tracked.steps, self._optimizers.every):
                    self._measure_weights(step)
                steps.append((step, tracked.versions()))

    @_guarded
    def _after_function(self, steps: list[tuple[OptimizerStep, int]]) -> None:
        for step, versions in steps:
            if step.optimizer.optimizer() is not None and step.optimizer.versions() != versions:
                self._finish(step)

    @_guarded
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._awaits_training and torch.is_grad_enabled() and next(module.parameters(), None) is not None:
            self._awaits_training = False
            if not self._samples and self._stop is None:
                self._remove_module_hooks()
        if not self._is_watched_pass() or is_compiled_wrapper(module):
            return
        layer, begins = self._models.enter(module)
        now = self._models.current
        if now is None or layer is None:
            return
        if begins:
            self._finish_own_step()
            if self._stop is not None:
                self._stop.raise_again()
            self._recorder.begin(now)
        if self._samples and now.recorded and layer.may_want(module):
            statistics = running_statistics(module)
            if statistics is not None:
                now.running_statistics[id(module)] = statistics
        if self._samples:
            self._facts.before_layer(now, layer, module, args)
        if self._stop is not None:
            self._stop.before_call(now, module, args)

    @_guarded
    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._is_watched_pass() or is_compiled_wrapper(module):
            if not torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                self._facts.without_gradients(module, args, self._awaits_training)
            return
        left = self._models.leave(module)
        with torch.no_grad():
            if isinstance(module, torch.nn.modules.loss._Loss) and (value := scalar_of(output)) is not None:
                self._recorder.add_loss_output(value)
                if self._samples:
                    self._facts.after_loss(module, args)
            if left is None:
                return
            now, layer = left
            call = now.calls[id(module)]
            now.calls[id(module)] = call + 1
            is_top = now is not self._models.current
            if self._samples:
                if is_top and self.inputs is not None:
                    self.inputs.keep(module, args, kwargs)
                self._recorder.add(now, layer, call, module, (args, kwargs), output, self._counts_values)
                self._facts.after_layer(layer, module, args)
            if self._stop is not None:
                self._stop.after_call(now, layer, call, module, (args, kwargs), output, is_top)

    @_guarded
    def _before_backward(self, value: Tensor, roots: Sequence[Tensor]) -> None:
        if torch._C._current_graph_task_id() != -1:  # a backward pass inside another
            return
        self._finish_own_step()
        with torch.no_grad():
            if self._stop is not None:
                self._stop.before_backward(roots)
            self._recorder.add_loss(value, divisor_of(roots))
            if self._samples:
                self._facts.before_backward(roots)

    @_guarded
    def _after_backward(self) -> None:
        if self._samples:
            with torch.no_grad():
                self._facts.after_backward()
                self._write_facts()
        if self._own_steps is not None or (self._may_own_steps_follow and not self._run.steps and self._open is None):
            self._begin_own_step()

    def _begin_own_step(self) -> None:
        """A backward pass has ended, and no optimizer of torch has made a step so far."""
        tracked = self._own_steps or BackwardSteps(lambda: [model.module() for model in self._models.models])
        step = OptimizerStep(tracked, False, self._recorder.losses_since(tracked))
        if not tracked.is_due(self._optimizers.every):
            self._finish(step)
            return
        with torch.no_grad():
            self._measure_weights(step)
            step.gradients = self._facts.gradients(step)
        self._own_open = step

    @_guarded
    def _finish_own_step(self) -> None:
        """Before a pass, or at the end of the run: whether weights have changed since the last backward pass."""
        step, self._own_open = self._own_open, None
        if step is None or step.weights is None:
            return
        if self._own_steps is None:
            if self._run.steps or not step.weights.have_changed():
                return
            self._own_steps = step.optimizer
            text = "the weights change without an optimizer of torch: each backward pass counts as a step"
            self._output.announce("backward-steps", self.last_step, text)
        self._finish(step)

    @_guarded
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open is not None and self._open.optimizer.is_stepping(optimizer):
            self._open.depth += 1
            return
        self._open = self._own_open = None
        self._may_own_steps_follow = False
        tracked = self._optimizers.of(optimizer)
        if tracked is None:
            return
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        step = OptimizerStep(tracked, closure is not None, self._recorder.losses_since(tracked))
        samples = is_sampled(tracked.steps, self._optimizers.every)
        if not samples and self._stop is None:
            self._open = step
            return
        with torch.no_grad():
            if self._stop is not None:
                self._stop.raise_again()
                if not step.has_closure:
                    self._stop.before_step(tracked, optimizer, self._models.models, self._recorder.order_of_layers())
            if samples and skips_step(optimizer):  # the next step is sampled in its place
                return
            self._open = step
            if samples:
                self._measure_weights(step)
                step.gradients = None if step.has_closure else self._facts.gradients(step)

    @_guarded
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._open
        if step is None:
            return
        if step.depth:
            step.depth -= 1
            return
        self._open = None
        step.optimizer.steps_eagerly = True
        self._finish(step)

    def _finish(self, step: OptimizerStep) -> None:
        tracked = step.optimizer
        self._run.steps, self.last_step = self._run.steps + 1, tracked.steps
        if step.weights is not None:
            with torch.no_grad():
                step.weights.step_is_done()
                lines = list(self._recorder.lines(step))
                gradients = self._facts.gradients(step) if step.gradients is None else step.gradients
                facts = self._facts.row(step, gradients, self._recorder.loss_of(step))
            self._output.write_step(tracked.steps, lines)
            self._output.write_facts(tracked.steps, facts)
            tracers = zip((sys.gettrace(), sys.getprofile()), self._tracers, ("settrace", "setprofile"), strict=True)
            for tracer, before, name in tracers:
                if tracer is not None and tracer is not before:
                    text = f"the script traces its calls with sys.{name}, and sees hookscope's in sampled steps"
                    self._output.announce("traced", self.last_step, text)
            if not lines:
                self._announce_empty_step()
        self._facts.step_is_done(tracked)
        self._optimizers.count_step(tracked, self._run.steps)
        self._switch_hooks()

    def _measure_weights(self, step: OptimizerStep) -> None:
        """Before a sampled step, measure the weights that it changes."""
        tracked = step.optimizer
        parameters = {id(p) for p in tracked.parameters()}
        step.models = self._models.holding(parameters)
        if not step.models and not tracked.was_searched:
            tracked.was_searched = True
            self._models.find_owner(parameters)
            step.models = self._models.holding(parameters)
        layers = [layer for model in step.models for layer in model.with_parameters()]
        chosen = [own for layer, module, own in layers if layer.may_want(module)]
        with_histograms = self._optimizers.is_histogram_due(tracked)
        step.weights = StepWeights(chosen, not step.has_closure, gradient_scale(tracked.optimizer()), with_histograms)
        if tracked.steps:
            step.others = frozenset(self._optimizers.all_parameters() - parameters)

    def _is_watched_pass(self) -> bool:
        """Whether a pass has gradients, and is neither traced, transformed nor recomputed in a backward pass."""
        return (
            (self._samples or self._stop is not None)
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1
            and torch._C._functorch.peek_interpreter_stack() is None
            and not torch._C._is_tracing()
        )

    @_guarded
    def _write_facts(self, at_end: bool = False) -> None:
        """Write the facts of a run without steps, where it is time to."""
        facts = self._facts.row_without_step(at_end)
        if facts is not None:
            self._output.write_facts(self.last_step or 0, facts)

    def _switch_hooks(self) -> None:
        """Hooks of modules slow a step down: before a step that is not sampled, they are off from its first pass on."""
        self._samples = self._optimizers.is_any_due()
        self._counts_values = self._samples and self._optimizers.is_any_histogram_due()
        self._awaits_training = any(not model.is_opaque for model in self._facts.trained)
        needed = self._samples or self._stop is not None
        if not needed and self._hooks_are_on:
            self._remove_module_hooks()
        if (needed or self._awaits_training) and not self._hooks_are_on:
            self._module_hooks.show()
            self._hidden.on()
            self._hooks_are_on = self._compiled.shows_inside = True
        if needed:
            self._loss_tap.on()
            self._loss_tap.notes_clipping = True

    def _remove_module_hooks(self) -> None:
        self._module_hooks.hide()
        self._hooks_are_on = self._compiled.shows_inside = self._loss_tap.notes_clipping = False
        self._hidden.off()
        if self._own_steps is None or self.is_off:
            self._loss_tap.off()

    def _announce_empty_step(self) -> None:
        note, why = "nothing-seen", "no chosen layer with parameters of the optimizer ran"
        try:
            for model in self._models.models:
                if len(model.layers) > 1:
                    model.check()
        except LayerError as error:  # without its advice: no command lists the layers of a model that a script builds
            note, why = "no-layer", f"{error.asked}; {error.exists}"
        self._output.announce(note, self.last_step, f"nothing is logged: {why}")

    def _fail(self, error: Exception) -> None:
        self.is_off, self._open = True, None
        with contextlib.suppress(Exception):
            self._remove_module_hooks()  # hooks of optimizers stay to the end: torch is iterating over them
        with contextlib.suppress(Exception):
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            why = str(error) if isinstance(error, HookscopeError) else why
            why = "the model is on the meta device: it has shapes and no values" if "meta tensor" in why else why
            self._output.announce("watcher-failed", self.last_step, f"watching has ended, the training goes on: {why}")
