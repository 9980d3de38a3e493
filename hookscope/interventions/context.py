"""The `with` block that changes what flows through a model, and puts everything back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from hookscope.errors import LayerError, ModelError, SelectionError, UsageError, nearest
from hookscope.findings import listed
from hookscope.hooks import (
    Call,
    Observer,
    Selection,
    channel_axis,
    is_recomputing,
    joined_inputs,
    map_tensors,
    split_inputs,
    tensors_in,
)
from hookscope.interventions.base import Change, Intervention, checked
from hookscope.interventions.changes import AnyChange, Changes, pairs_of
from hookscope.interventions.parameters import Freeze, Prune, parameter_changed

Values = tuple[tuple[Any, ...], dict[str, Any]]


class intervene:  # a `with` word, named as one reads it  # noqa: N801
    """Change what flows through ``model`` while the ``with`` block runs.

    Several interventions act in the order given, each on what the one before left. Around a training loop gradients
    flow through them as through layers. Nothing is written into the model but the values of changed parameters: what
    is saved inside the block is as without. Hooks are gone and parameters as before when the block is left, whatever
    is raised; so run the backward pass inside the block, too.

    Args:
        model: Any eager module.
        changes: From a layer selection (``"layer3"``, ``"features.*"``, ``"head.conv#1"``, an index) or a parameter's
            name (``"conv1.weight"``, ``"layer4*.weight"``) to an intervention, several, or a function
            ``(call, tensor) -> tensor`` (None for no change); or pairs of these, for several in a certain order. The
            tensor a function is given is its own. To prune and to freeze, a layer has its parameters in it, and a
            number is the name of one.
        types: Class names that indices count.

    Attributes:
        step: The training step, which rates on a schedule go by: passes in train mode so far. It may be set. What
            checkpointing computes again has the rate it had.
        changed: How often each call was changed, by its key; and parameters, by their name.

    Raises:
        LayerError: on entry, for a name that is neither a layer nor a parameter; on leaving, for an index, a call or
            a layer named outright that no pass reached, where one came to its end.
        SelectionError: for an index from the end, which is not known while a pass runs.
        UsageError: for what is no intervention, for a function that takes other arguments, for a block that is entered
            twice; inside a pass for an intervention that gives another shape, type or device; it names the layer.

    Example:
        >>> import torch
        >>> from collections import OrderedDict
        >>> from hookscope.interventions import Clamp
        >>> net = torch.nn.Sequential(OrderedDict(first=torch.nn.Identity(), last=torch.nn.Identity()))
        >>> x = torch.tensor([[-1.0, 1.0, 5.0]])
        >>> with intervene(net, {"first": Clamp(0, 2), "last": lambda call, tensor: tensor + 10}) as block:
        ...     net(x).tolist()
        [[10.0, 11.0, 12.0]]
        >>> net(x).tolist(), dict(block.changed)
        ([[-1.0, 1.0, 5.0]], {'first': 1, 'last': 1})
    """

    def __init__(self, model: nn.Module, changes: Changes, types: Iterable[Any] = ("Conv2d",)) -> None:
        self._model, self._types = model, types
        self._changes = list(pairs_of(changes))
        self._stack: ExitStack | None = None
        self._observers: list[Observer] = []
        self._passes = 0
        self._step_of: dict[str, int] = {}
        self.step = 0
        self.changed: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise UsageError("this block of interventions is entered already", do="make another with `intervene(...)`")
        self.changed.clear()
        self._step_of.clear()
        self._observers, self._passes = [], 0
        with ExitStack() as stack:
            for where, change in self._changes:
                self._put_on(stack, Selection.of(where), change)
            self._count_passes(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        stack.__exit__(kind, error, trace)
        observers, self._observers = self._observers, []
        if error is None and self._passes:
            _check_reached(observers, self._step_of)

    def __repr__(self) -> str:
        changes = ", ".join(f"{where!r}: {getattr(change, '__name__', change)}" for where, change in self._changes)
        return f"intervene({type(self._model).__name__}, {{{changes}}})"

    def _count_passes(self, stack: ExitStack) -> None:
        """Count until ``stack`` is closed; what came last to a model has its hooks behind those of all others."""

        def on_end() -> None:
            self._passes += 1
            self.step += self._model.training

        counter = Observer(self._model, Selection.of_names([""]), self._types, lambda *_: None, on_end=on_end)
        # parameters can be changed in a model that takes no hooks
        with nullcontext() if self._observers else suppress(ModelError):
            stack.push(counter.__enter__())

    def _put_on(self, stack: ExitStack, where: Selection, change: AnyChange) -> None:
        """Let ``change`` act on what ``where`` names until ``stack`` is closed."""
        layers = self._layers_named(where)
        parameters = self._parameters_named(where, change, layers)
        for name, parameter in parameters.items():
            stack.enter_context(parameter_changed(name, parameter, change))
            self.changed[name] += 1
        if parameters:
            return
        if isinstance(change, Prune | Freeze):
            asked = f"no parameter to {type(change).__name__.lower()} at '{where}'"
            if layers:
                raise LayerError(asked, self._some_with_parameters(change), "list them with weights")
            self._refuse(str(where), asked)
        else:
            stack.push(self._observer(where, change))

    def _layers_named(self, where: Selection) -> dict[str, nn.Module]:
        """The layers called so; where a number stands it may be a name too."""
        walked = dict(self._model.named_modules(remove_duplicate=False))
        if str(where) in walked:
            return {str(where): walked[str(where)]}
        return {name: module for name, module in walked.items() if where.calls_by_name([name])}

    def _parameters_named(
        self, where: Selection, change: AnyChange, layers: Mapping[str, nn.Module]
    ) -> dict[str, nn.Parameter]:
        """The parameters that are meant: named so, or, to prune and to freeze, those in the layers named so."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        wanted: list[str] = []
        if not layers:
            wanted = [name for name in parameters if name == str(where) or where.calls_by_name([name])]
            if wanted and str(where) not in wanted:  # of several terms one may be misspelt
                self._check_names(where, wanted)
        elif isinstance(change, Prune | Freeze):
            if str(where) not in layers:
                self._check_names(where, layers)
            within = [name for layer, module in layers.items() for name, _ in module.named_parameters(layer)]
            wanted = [name for name in within if isinstance(change, Freeze) or parameters[name].dim() > 1]
        # a parameter under two names is changed once
        once = {id(parameters[name]): name for name in reversed(wanted)}
        return {name: parameters[name] for name in wanted if once[id(parameters[name])] == name}

    def _check_names(self, where: Selection, named: Iterable[str]) -> None:
        """Refuse ``where`` if not each of its terms is one of those ``named``."""
        try:
            where.check_names(self._names())
        except LayerError as error:
            self._refuse(error.name, f"no layer or parameter '{error.name}' in the model")
        try:
            where.check_names([*named])
        except LayerError:
            asked = f"'{where}' names layers and parameters at once"
            raise LayerError(asked, do="give layers and parameters each by themselves") from None

    def _observer(self, where: Selection, change: Change) -> Observer:
        """The observer, entered, that lets ``change`` act on each selected call."""
        on_input = isinstance(change, Intervention) and change.on == "input"

        def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return None if on_input else self._changed(change, call, module, output)

        def on_before(call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values | None:
            changed = self._changed(change, call, module, joined_inputs(args, kwargs), of_input=True)
            return None if changed is None else split_inputs(changed, len(args), bool(kwargs))

        if where.from_the_end:
            asked = f"index {where} counts from the end, which is not known while a pass runs"
            raise SelectionError(asked, do="choose the layer by its name, or by its index from the start")
        observer = Observer(
            self._model,
            where,
            self._types,
            on_call,
            on_before=on_before if on_input else None,
            again=True,
        )
        try:
            observer.__enter__()
        except LayerError as error:
            if error.kind == "layer":
                self._refuse(str(where), f"no layer or parameter '{where}'")
            raise
        self._observers.append(observer)
        return observer

    def _some_with_parameters(self, change: Prune | Freeze) -> str:
        """Some layers with parameters that can be pruned or frozen, in words."""
        parameters = self._model.named_parameters(remove_duplicate=False)
        wanted = [name for name, parameter in parameters if isinstance(change, Freeze) or parameter.dim() > 1]
        layers = [*dict.fromkeys(layer for name in wanted if (layer := name.rpartition(".")[0]))]
        return f"layers with some are {listed(layers, 3)}" if layers else "none of its layers has any"

    def _refuse(self, where: str, asked: str) -> None:
        do = "list layers with list-layers --type all, parameters with weights"
        raise LayerError(asked, nearest(where, self._names()), do)

    def _names(self) -> list[str]:
        """What layers and parameters are called."""
        layers = [name for name, _ in self._model.named_modules(remove_duplicate=False)]
        return layers + [name for name, _ in self._model.named_parameters(remove_duplicate=False)]

    def _changed(self, change: Change, call: Call, module: nn.Module, value: Any, of_input: bool = False) -> Any:
        """What ``value`` becomes; None where nothing of it changes."""
        again = is_recomputing()
        if not again:
            self._step_of[call.name] = self.step
        if isinstance(change, Intervention):
            if not change.is_active(module):
                return None
            # what is computed again must be what was computed, and a pass has ended since
            change = change.at(self._step_of.get(call.name, self.step))
        parts = {id(tensor): part for part, tensor in tensors_in(value).items()}
        made: dict[int, Tensor] = {}  # a tensor that is there twice is one tensor afterwards too

        def one(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_quantized):
                return tensor
            if id(tensor) not in made:
                if isinstance(change, Intervention):
                    axis = channel_axis(tensor, module, of_input=of_input)
                    made[id(tensor)] = change(call, tensor, module, parts[id(tensor)], axis)
                else:
                    made[id(tensor)] = checked(change(call, tensor.clone()), tensor, call.key)
            return made[id(tensor)]

        changed = map_tensors(value, one)
        if all(id(tensor) == at for at, tensor in made.items()):
            return None
        self.changed[call.key] += not again
        return changed


def _check_reached(observers: Iterable[Observer], reached: Container[str]) -> None:
    """Refuse a layer that was named outright and did not run: a block without effect would pass for one."""
    for observer in observers:
        for name in observer.selection.plain_names:
            if observer.first_names.get(name, name) not in reached:
                raise LayerError(f"'{name}' did not run: nothing was changed there", do="see list-layers --type all")
