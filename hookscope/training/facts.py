"""What a step shows beside its layers: gradients, inputs, loss function, modes and settings, as one line of the log."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from hookscope import gradients  # loaded at the first NaN, as in `stop`
from hookscope.hooks import as_float, class_names
from hookscope.training.loss_graph import loss_facts
from hookscope.training.loss_tap import LossTap
from hookscope.training.optimizers import BackwardSteps, Optimizers, TrackedOptimizer, parameters_of
from hookscope.training.output import RunProgress
from hookscope.training.recorder import OptimizerStep
from hookscope.training.reductions import FetchedScalars, is_finite, local, norm
from hookscope.training.tracker import Layer, ModelTracker, Pass, TrackedModel, in_memory, own_parameters

_MOST_NAMES = 8  # of layers in one field
_SMALLEST = 16  # gradients that are measured after a backward pass: to see whether all become 0 before the step
_REPORTS = (10, 100, 1000, 10_000, 100_000)  # backward passes without a step after which a line is written
_MOST_SEARCHES = 3  # for the same parameters: a script may make their optimizer later
_RARE = 4  # steps around a validation; passes without gradients that come more often are part of the training
_FIRST, _EQUAL = 3, 1e-5  # steps; of the largest weight: filters that differ by less differ by rounding alone
_STOCHASTIC = ("StochasticDepth", "DropPath")
_EXTREMES = {"min": torch.minimum, "max": torch.maximum, "spread": torch.maximum}  # over the passes of a step


@dataclass(slots=True)
class SegmentFacts:
    """What was seen between two steps, see `MetricsRecorder` for the segments; dictionaries are by number of the model.

    The ``modes`` are of layers that behave differently in eval mode, the ``inputs`` of the first layer with weights.
    """

    segment: int
    backwards: int = 0
    modes: dict[int, dict[str, set[bool]]] = field(default_factory=dict)
    trains: dict[int, bool] = field(default_factory=dict)  # whether the model itself was in train mode
    batches: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)  # of BatchNorms: values, samples
    inputs: dict[int, tuple[list[int], dict[str, Tensor]]] = field(default_factory=dict)
    no_grad: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)  # that ran so, by ``id``
    ran: set[int] = field(default_factory=set)  # modules that ran with gradients, by ``id``
    loss: dict[str, Any] = field(default_factory=dict)  # see `loss_facts`
    # the parameters, by ``id``, with a gradient after the first backward pass, and the norms of the smallest gradients
    after: tuple[set[int], dict[int, Tensor]] | None = None


class StepFacts:
    """Collects the facts of sampled steps, see `Monitor`; other steps read no value back from its device."""

    def __init__(self, run: RunProgress, models: ModelTracker, optimizers: Optimizers, tap: LossTap) -> None:
        self._run, self._models, self._optimizers, self._tap = run, models, optimizers, tap
        self._segments: list[SegmentFacts] = []
        self._with_input: Pass | None = None
        self.trained: set[TrackedModel] = set()  # with layers that compute something else in eval mode
        self._has_loss_function, self._validation = False, dict[str, Any]()
        self._measured, self._measured_before, self._evaluated, self._measured_by = 0, 0, 0, ""
        self._measured_input: Callable[[], Tensor | None] = lambda: None
        self._stale: dict[int, set[int]] = {}
        self._equal: dict[int, list[str]] = {}  # by optimizer, layers with equal filters after its last sampled step
        self._reported = 0
        self._first_norms: dict[int, Tensor] = {}  # of the parameters, by ``id``, before the first backward pass
        self._searches: dict[frozenset[int], int] = {}
        self._waiting: dict[int, str] = {}
        self._first_scale: float | None = None

    def _now(self) -> SegmentFacts:
        segment = self._run.steps
        if not self._segments or self._segments[-1].segment != segment:
            self._segments = [*self._segments[-3:], SegmentFacts(segment)]
            self._with_input = None
        return self._segments[-1]

    # Passes

    def before_layer(self, now: Pass, layer: Layer, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A layer begins in a pass with gradients: keep the input of the first one with weights."""
        facts, number = self._now(), layer.model.number
        if module is now.top():
            facts.trains.setdefault(number, module.training)
        has_weights = any("weight" in name and p is not None for name, p in module._parameters.items())
        if self._with_input is now or not has_weights:
            return
        self._with_input = now
        is_norm = any("Norm" in name for name in class_names(module))
        value = args[0] if args else None
        if not is_norm and isinstance(value, torch.Tensor):
            known = facts.inputs.setdefault(number, (list(value.shape), {}))[1]
            for name, own in _input_scalars(value).items():
                before = known.setdefault(name, own)  # mean and std are of the first pass
                known[name] = _EXTREMES[name](before, own) if name in _EXTREMES else before

    def after_layer(self, layer: Layer, module: nn.Module, args: tuple[Any, ...]) -> None:
        facts, number = self._now(), layer.model.number
        facts.ran.add(id(module))
        if _differs_in_eval(module):
            self.trained.add(layer.model)
            facts.modes.setdefault(number, {}).setdefault(layer.name, set()).add(module.training)
        is_own = isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)  # of this process
        uses_batch = is_own and "InstanceNorm" not in type(module).__name__
        uses_batch = uses_batch and (module.training or module.running_mean is None)
        if uses_batch and args and isinstance(args[0], torch.Tensor) and args[0].dim() > 1:
            shape = args[0].shape
            batch = (args[0].numel() // max(shape[1], 1), shape[0])
            batches = facts.batches.setdefault(number, {})
            batches[layer.name] = min(batch, batches.get(layer.name, batch))

    def without_gradients(self, module: nn.Module, args: tuple[Any, ...], is_between: bool) -> None:
        """A module has returned under no_grad; ``is_between`` a step and the next training pass it may validate."""
        self._now().no_grad[id(module)] = weakref.ref(module)
        step, is_model = self._run.steps, any(model.module() is module for model in self.trained)
        if is_between and self._measured == step and isinstance(module, nn.modules.loss._Loss):
            self._measured_by = type(module).__name__
        if not is_between or not is_model:
            return
        in_train_mode = module.training and any(p.training and _differs_in_eval(p) for p in module.modules())
        value = args[0] if args else None
        repeats = self._measured == step and self._measured_input() is value is not None
        if in_train_mode and self._measured < step:
            self._validated()
            self._measured, self._measured_before, self._measured_by = step, self._measured, ""
        self._measured_input = weakref.ref(value) if isinstance(value, torch.Tensor) else lambda: None
        self._evaluated = self._evaluated if in_train_mode else step  # BatchNorm may have been calibrated before
        if repeats or self._measured == self._evaluated:  # as MC dropout repeats its input
            self._measured_before = self._measured

    def _validated(self) -> dict[str, Any]:
        """The latest passes of a model between two steps that look like a validation in train mode."""
        step, by = self._measured, self._measured_by
        is_rare = min(step - self._measured_before, self._run.steps - step) >= _RARE
        if is_rare and (by or (self._has_loss_function and len(self._optimizers.all) == 1)):
            self._validation = {"validation_in_train_mode": step, "validation_loss": by or None}
        return self._validation

    def after_loss(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A loss module has returned: whether what cross-entropy gets sums to 1 already, and the targets of L1."""
        if isinstance(module, nn.L1Loss) and len(args) > 1 and isinstance(args[1], torch.Tensor):
            self._now().loss["target_size"] = as_float(args[1].detach()).square().mean().sqrt()
        if isinstance(module, nn.CrossEntropyLoss) and args and isinstance(args[0], torch.Tensor):
            logits = args[0].detach()
            if logits.dim() > 1 and logits.shape[1] > 1 and logits.is_floating_point() and logits.numel():
                facts = self._now().loss
                facts["_sums"] = (as_float(logits).sum(1) - 1).abs().amax()
                facts["_least"] = as_float(logits).amin()

    # Backward passes

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        facts = self._now()
        facts.backwards += 1
        if facts.backwards == 1:
            facts.loss |= loss_facts(roots)
            if bad := [root for root in roots if not is_finite(root)]:
                facts.loss["made_by"] = gradients.made_by(bad[0])
            self._has_loss_function |= "loss_function" in facts.loss
        for tracked in self._optimizers.all:
            if tracked.steps and tracked.is_due(self._optimizers.every):
                self._find_stale(tracked)
            else:
                self._stale.pop(tracked.number, None)
        if not self._has_stepped:
            self._run.backwards += 1
            if self._run.backwards == 1:
                self._first_norms = self._norms()

    def after_backward(self) -> None:
        facts = self._now()
        if facts.backwards != 1:
            return
        gradients = {id(p): p.grad for p in self._known_parameters() if p.grad is not None}
        smallest = sorted(gradients, key=lambda key: gradients[key].numel())[:_SMALLEST]
        facts.after = {*gradients}, {key: norm(gradients[key]) for key in smallest}

    def _find_stale(self, tracked: TrackedOptimizer) -> None:
        """Keep the gradients from before the last step that were not set to 0 since."""
        known = self._stale.get(tracked.number)
        if known is not None and not known:
            return
        gradients = {id(p): p.grad for p in tracked.parameters() if p.grad is not None}
        sizes = {key: norm(gradient) for key, gradient in gradients.items() if known is None or key in known}
        scalars = FetchedScalars(sizes.values())
        self._stale[tracked.number] = {key for key, size in sizes.items() if scalars[size] != 0}

    def _known_parameters(self) -> Iterator[Tensor]:
        roots = [root for model in self._models.models if (root := model.module()) is not None]
        owners: list[nn.Module | TrackedOptimizer] = [*roots, *self._optimizers.all]
        every = (p for owner in owners for p in owner.parameters())
        yield from {id(p): p for p in every if p.requires_grad and not p.is_meta}.values()

    # Runs without a step

    @property
    def _has_stepped(self) -> bool:
        return any(tracked.steps for tracked in self._optimizers.all)

    def _norms(self) -> dict[int, Tensor]:
        return {id(p): norm(p) for p in self._known_parameters()}

    def row_without_step(self, at_end: bool = False) -> dict[str, Any] | None:
        """The facts of a run in which backward runs and nothing steps, after some passes or at the end; else None.

        At the end of a run with steps, the loss scale: with NaN in the weights, a ``GradScaler`` skips all later steps.
        """
        if self._has_stepped:
            last = {**self._scaling(), **self._validated()} if at_end else {}
            return {"optimizer": None, **last} if last else None
        if self._run.backwards == self._reported or not (at_end or self._run.backwards in _REPORTS):
            return None
        self._reported = self._run.backwards
        known = self._norms()
        changed = any(known[key] != size for key, size in self._first_norms.items() if key in known)
        holders = [o for o in in_memory(Optimizer) if any(id(p) in known for p in parameters_of(o))]
        facts = self._now()
        return {
            "optimizer": None,
            "optimizer_steps": 0,
            "backwards": self._run.backwards,
            "weights_changed": changed,
            "optimizers": sorted({type(holder).__name__ for holder in holders}),
            **self._scaling(),
            **self._of_passes([facts], [model.number for model in self._models.models], facts.loss),
        }

    # Steps

    def gradients(self, step: OptimizerStep) -> dict[str, Any]:
        """The facts of the gradients that a step is about to use, or has used if it has a closure."""
        parameters = list(step.optimizer.parameters())
        trainable = [p for p in parameters if p.requires_grad]
        known = {} if step.weights is None else step.weights.gradient_norms()
        gradients = {id(p): p.grad for p in trainable if p.grad is not None}
        others = {key: norm(gradient) for key, gradient in gradients.items() if key not in known}
        scalars = FetchedScalars(others.values())
        sizes = [scalars[others[key]] if key in others else known[key] for key in gradients]
        return {
            "parameters": len(parameters),
            "trainable": len(trainable),
            "with_gradient": len(gradients),
            "zero_gradients": sizes.count(0),
            "gradient_norm": math.hypot(*sizes),
            **self._without_gradient([p for p in trainable if p.grad is None], step.optimizer.since),
            **self._not_optimized(step),
            "step_scaled": self._tap.is_scaled(step.optimizer.optimizer()),
            **({} if step.optimizer.steps else {"equal_at_first": self._equal_filters(step)}),
        }

    def row(self, step: OptimizerStep, gradients: Mapping[str, Any], loss: float | None) -> dict[str, Any]:
        tracked = step.optimizer
        begun = [facts for facts in self._segments if facts.segment >= tracked.since]
        latest = next((facts for facts in reversed(begun) if facts.backwards), None)
        stale = self._stale.get(tracked.number)
        own = {id(p) for p in tracked.parameters()}
        after, sizes = (latest and latest.after) or (None, {})
        sizes = {key: size for key, size in sizes.items() if key in own}
        scalars = FetchedScalars(sizes.values())
        has_run = any(model.number in facts.trains for facts in begun for model in step.models)
        models = step.models if has_run else self._models.models  # the optimizer may hold another model by mistake
        return {
            "optimizer": tracked.number,
            "loss": loss,
            "backwards": sum(facts.backwards for facts in begun),
            **gradients,
            "gradients_after_backward": None if after is None else len(after & own),
            "zero_after_backward": None
            if after is None
            else bool(sizes) and not any(map(scalars.__getitem__, sizes.values())),
            "stale_gradients": None if stale is None else len(stale),
            **self._tap.clipping,
            **self._scaling(),
            **self._validated(),
            "equal_filters": self._equal_filters(step),
            "rate_swings": tracked.rate_swings,
            "models": [type(model.module()).__name__ for model in step.models],
            **({} if isinstance(tracked, BackwardSteps) else _settings(tracked.optimizer())),
            **self._of_passes(begun, [model.number for model in models], latest.loss if latest else {}),
        }

    def step_is_done(self, tracked: TrackedOptimizer) -> None:
        self._stale.pop(tracked.number, None)
        self._tap.clipping = {}

    def _of_passes(
        self, begun: Sequence[SegmentFacts], models: Sequence[int], loss: Mapping[str, Any]
    ) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for part in begun:  # the latest counts
            for number in models:
                if number in part.trains:
                    modes = part.modes.get(number, {})
                    in_eval = [name for name, in_train in modes.items() if in_train == {False}]
                    facts |= {"train_mode": part.trains[number], "modes": len(modes), "eval_modes": len(in_eval)}
                    facts["eval_layers"] = in_eval[:_MOST_NAMES]
                if batches := part.batches.get(number):
                    name, (values, samples) = min(batches.items(), key=lambda item: item[1])
                    facts |= {"batchnorm": name, "batchnorm_values": values, "batchnorm_samples": samples}
                if number in part.inputs:
                    shape, inputs = part.inputs[number]
                    fetched = FetchedScalars(inputs.values())
                    facts |= {f"input_{name}": fetched[value] for name, value in inputs.items()}
                    facts |= {"input_shape": shape} if inputs else {}
        scalars = FetchedScalars(value for value in loss.values() if isinstance(value, torch.Tensor))
        loss = {name: scalars[v] if isinstance(v, torch.Tensor) else v for name, v in loss.items()}
        if "_sums" in loss:
            loss["loss_input_sums_to_1"] = loss.pop("_sums") < 1e-3 and loss.pop("_least") >= 0
        return facts | {name: value for name, value in loss.items() if not name.startswith("_")}

    def _without_gradient(self, parameters: Sequence[Tensor], since: int) -> dict[str, Any]:
        """The layers of parameters without a gradient, and which of them ran only under no_grad in this step."""
        if not parameters:
            return {}
        wanted = {id(p) for p in parameters}
        begun = [facts for facts in self._segments if facts.segment >= since]
        ran = _only_under_no_grad(begun)
        every = [
            (layer.name, id(module) in ran, {id(p) for p in own.values()})
            for model in self._models.models
            for layer, module, own in model.with_parameters()
        ]
        layers = [name for name, _, own in every if own & wanted]
        no_grad = [name for name, under, own in every if under and own & wanted]
        return {
            "without_gradient": layers[:_MOST_NAMES],
            "of_no_model": len(wanted.difference(*(own for _, _, own in every))),
            "under_no_grad": no_grad[:_MOST_NAMES],
            "under_no_grad_layers": len(no_grad),
        }

    def _not_optimized(self, step: OptimizerStep) -> dict[str, Any]:
        """Parameters with a gradient that no optimizer holds, or one that has made no step yet."""
        if isinstance(step.optimizer, BackwardSteps):  # which parameters are optimized is unknown
            return {}
        held = self._optimizers.all_parameters()
        teachers = _only_under_no_grad(self._segments[-1:])  # with gradients from when they were trained
        owners: list[tuple[TrackedModel | None, str, dict[str, Tensor]]] = [
            (model, layer.name, own)
            for model in self._models.models
            for layer, module, own in model.with_parameters()
            if id(module) not in teachers
        ]
        owners += [(None, f"{type(s).__name__} outside the model", own_parameters(s)) for s in self._models.strangers()]
        free = [
            (model, name, id(p))
            for model, name, own in owners
            for p in own.values()
            if p.requires_grad and p.grad is not None and id(p) not in held
        ]
        if not free:
            return {}
        key = frozenset(key for _, _, key in free)
        self._searches[key] = self._searches.get(key, 0) + 1
        if self._searches[key] <= _MOST_SEARCHES:
            self._waiting = {id(p): type(o).__name__ for o in in_memory(Optimizer) for p in parameters_of(o)}
        waiting = self._waiting
        lost = [(model, name) for model, name, key in free if key not in waiting]
        held_by_waiting = sorted({waiting[key] for _, _, key in free if key in waiting})
        whole = {model for model, _ in lost} - {*step.models, None}
        names = list(dict.fromkeys(name for _, name in lost))
        others = {id(p) for each in self._optimizers.all if each is not step.optimizer for p in each.parameters()}
        return {
            "not_optimized": len(lost),
            "not_optimized_layers": names[:_MOST_NAMES],
            "not_optimized_outside": bool(lost) and all(model is None for model, _ in lost),
            "not_optimized_models": bool(lost) and all(model in whole for model, _ in lost),
            "held_twice": {*map(id, step.optimizer.parameters())} <= others,
            "waiting": len(free) - len(lost),
            "waiting_optimizers": held_by_waiting,
        }

    def _equal_filters(self, step: OptimizerStep) -> list[str]:
        """The layers whose filters are equal, and not 0, around the first steps, and as long as they stay so."""
        sizes, known = dict[str, tuple[Tensor, Tensor]](), self._equal.get(step.optimizer.number, [])
        for layer, module, own in (entry for model in step.models for entry in model.with_parameters()):
            weight, groups = own.get("weight"), getattr(module, "groups", 1)
            is_plain = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and groups == 1
            may_be = is_plain and (step.optimizer.steps < _FIRST or layer.name in known)
            if may_be and weight is not None and weight.requires_grad:
                values = local(weight.detach())
                if len(values) > 1 and values.numel() and not values.is_meta:
                    sizes[layer.name] = (values - values[:1]).abs().amax(), values.abs().amax()
        scalars = FetchedScalars(size for pair in sizes.values() for size in pair)
        equal = [name for name, (a, b) in sizes.items() if scalars[a] < _EQUAL * scalars[b]]
        self._equal[step.optimizer.number] = equal
        return equal

    def _scaling(self) -> dict[str, Any]:
        scale = self._tap.scale()
        if scale is None:
            return {}
        self._first_scale = scale if self._first_scale is None else self._first_scale
        return {"loss_scale": scale, "first_loss_scale": self._first_scale}


def _only_under_no_grad(begun: Sequence[SegmentFacts]) -> set[int]:
    """The modules, by ``id``, that ran only under no_grad; a validation runs all layers so."""
    ran = {key for facts in begun for key, module in facts.no_grad.items() if module() is not None}
    return ran.difference(*(facts.ran for facts in begun))


def _differs_in_eval(module: nn.Module) -> bool:
    """Whether it computes something else in eval mode: dropout, or a BatchNorm that is not frozen."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _BatchNorm):
        parameters = [p for p in module._parameters.values() if p is not None]
        return module.track_running_stats and (not parameters or any(p.requires_grad for p in parameters))
    if type(module).__name__ in _STOCHASTIC:
        return bool(getattr(module, "p", 0) or getattr(module, "drop_prob", 0))
    return False


def _input_scalars(value: Tensor) -> dict[str, Tensor]:
    values = local(value.detach())
    if not values.is_floating_point() or values.is_meta or values.dim() < 2 or not values.numel():
        return {}
    values = as_float(values)
    mean = values.mean()
    scalars = {"mean": mean, "std": (values - mean).square().mean().sqrt(), "min": values.amin(), "max": values.amax()}
    scalars["key"] = (values.flatten() * torch.arange(values.numel(), device=values.device)).mean()
    if values.dim() == 4 and values.shape[1] == 3 and min(values.shape[2:]) > 4:
        centred = values - mean  # whose columns 3 apart are alike only by mistake
        at = [(centred[..., lag:] * centred[..., :-lag]).mean() for lag in range(1, 5)]
        least = at[0] / 8  # of noise, whose neighbours are not alike, the rest says little
        scalars["period"] = torch.stack([least, at[2] - at[1], at[2] - at[3]]).amin() / scalars["std"].square()
    if len(values) > 1:
        scalars["spread"] = (values - values[:1]).abs().amax()
    return scalars


def _settings(optimizer: Optimizer | None) -> dict[str, Any]:
    """The settings of an optimizer, of several groups the largest."""
    groups: list[dict[str, Any]] = [] if optimizer is None else optimizer.param_groups
    facts: dict[str, Any] = {"optimizer_type": type(optimizer).__name__}
    for name, key in (("rate", "lr"), ("momentum", "momentum"), ("weight_decay", "weight_decay")):
        numbers = [float(group[key]) for group in groups if isinstance(group.get(key), (int, float, torch.Tensor))]
        if numbers:
            facts[name] = max(numbers)
    return facts | {"maximize": any(group.get("maximize") is True for group in groups)}
