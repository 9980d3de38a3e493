"""The `with` block that changes what flows through a model, and restores the model afterwards."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from hookscope.errors import LayerError, ModelError, SelectionError, UsageError, nearest
from hookscope.findings import listed
from hookscope.hooks import (
    AnyModel,
    Call,
    Observer,
    Selection,
    channel_axis,
    holder_of,
    is_recomputing,
    joined_inputs,
    map_tensors,
    module_of,
    split_inputs,
    tensors_in,
)
from hookscope.interventions.base import (
    Change,
    Intervention,
    ParameterIntervention,
    check_takes,
    checked,
    type_with_article,
)
from hookscope.interventions.regularisers import parameter_changed
from hookscope.interventions.spec import InterventionSpec

AnyChange = Change | ParameterIntervention
Changes = Mapping[Any, Any] | Iterable[tuple[Any, AnyChange]]  # mypy joins changes of two classes to object


def pairs_of(changes: Changes) -> Iterator[tuple[str | Selection, AnyChange]]:
    """Check ``changes`` and yield each selection with one change, in order."""
    if isinstance(changes, str) or not isinstance(changes, Iterable):
        do = "give a dictionary such as {'layer3': Zero()}, or pairs"
        raise UsageError(f"changes must be a mapping or pairs, not {type_with_article(changes)}", do=do)
    for pair in changes.items() if isinstance(changes, Mapping) else changes:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _not_an_intervention(pair)
        where, several = pair
        if not isinstance(where, str | Selection) and not hasattr(where, "__index__"):
            asked = f"a layer must be a name or an index, not {type_with_article(where)}"
            raise UsageError(asked, do="give a text such as 'layer3'; model.named_modules() lists names")
        for change in several if isinstance(several, Iterable) and not isinstance(several, str) else [several]:
            if isinstance(change, str):
                spec = InterventionSpec.parse(change)
                if spec.source is not None:
                    raise UsageError(f"'{change}' reads a file", do=f"give {spec.kind.__name__}(...) with its content")
                change = spec.build()
            # a class is callable too: somebody forgot its brackets
            if isinstance(change, type) or not (callable(change) or isinstance(change, ParameterIntervention)):
                raise _not_an_intervention(change)
            if callable(change) and not isinstance(change, Intervention):
                check_takes(change, f"the function for '{where}'", "call", "tensor")
            yield where if isinstance(where, Selection) else str(where), change


def _not_an_intervention(change: Any) -> UsageError:
    if isinstance(change, type):
        return UsageError(f"'{change.__name__}' is a class", do=f"give an instance, `{change.__name__}(...)`")
    asked = f"an intervention cannot be {type_with_article(change)}"
    return UsageError(asked, do="give Zero(), 'zero:channels=3', or a function (call, tensor) -> tensor")


class intervene:  # a `with` word, named as one reads it  # noqa: N801
    """Change what flows through ``model`` while the ``with`` block runs.

    Several interventions at one layer act in the given order. Around a training loop gradients flow through them as
    through layers. Only the values of changed parameters are written into the model; a state dict saved inside the
    block has no other difference. Leaving the block removes the hooks and restores the parameters, also after an
    exception. Run the backward pass inside the block.

    Args:
        model: Any eager module.
        changes: Maps a layer selection (``"layer3"``, ``"features.*"``, ``"head.conv#1"``, an index) or a parameter's
            name (``"conv1.weight"``, ``"layer4*.weight"``) to an intervention, also as a word of the command line
            (``"zero:channels=3"``), several, or a function
            ``(call, tensor) -> tensor`` (None for no change), which gets a tensor of its own; or pairs of these. For
            `Prune` and `Freeze` a layer's name selects all its parameters; numbers are names, not indices.
        types: Class names that indices count; None for Conv2d (Conv3d in models of clips).

    Attributes:
        step: The training step for rates on a schedule: passes in train mode so far. It may be set. Checkpointing
            recomputes with the rate of the first computation.
        changed: How often each call was changed, by its key, and each parameter, by its name.

    Raises:
        LayerError: on entry, for a name that is neither a layer nor a parameter; on leaving, for an index, a call or
            an exact layer name that no complete pass reached.
        SelectionError: for an index from the end, which is unknown while a pass runs.
        UsageError: for an object that is not an intervention, a function with other arguments, a block that is
            entered twice; inside a pass, naming the layer, for a result of another shape, type or device.

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

    def __init__(self, model: AnyModel, changes: Changes, types: Iterable[Any] | None = None) -> None:
        model = module_of(model)
        self._model, self._types = model, types
        self._changes = list(pairs_of(changes))
        self._stack: ExitStack | None = None
        self._observers: list[Observer] = []
        self._passes = 0
        self._step_of: dict[str, int] = {}
        self._idle = ""  # what did not act, because its layer was in eval mode
        self.step = 0
        self.changed: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise UsageError("this block of interventions is already entered", do="make another with `intervene(...)`")
        self.changed.clear()
        self._step_of.clear()
        self._observers, self._passes, self._idle = [], 0, ""
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
        if error is None and self._idle and not self.changed:
            text = "changed nothing: the layer was in eval mode; call model.train(), or give it when='always'"
            warnings.warn(f"{self._idle} {text}", RuntimeWarning, stacklevel=2)
        if error is None and observers:
            observers[0].warn_of_compiled_code()
        if error is None and self._passes:
            for observer in observers:  # a block without effect must not go unnoticed
                for name in observer.selection.plain_names:
                    if observer.first_names.get(name, name) not in self._step_of:
                        asked = f"'{name}' did not run: nothing was changed there"
                        raise LayerError(asked, do="see ‹list_layers(model, types='all')|list-layers --type all›")

    def __repr__(self) -> str:
        changes = ", ".join(f"{where!r}: {getattr(change, '__name__', change)}" for where, change in self._changes)
        return f"intervene({type(self._model).__name__}, {{{changes}}})"

    def _count_passes(self, stack: ExitStack) -> None:
        """Count passes until ``stack`` is closed, with hooks behind the hooks of all interventions."""

        def on_end() -> None:
            self._passes += 1
            self.step += self._model.training

        counter = Observer(self._model, Selection.of_names([""]), self._types, lambda *_: None, on_end=on_end)
        # parameters can be changed in a model that takes no hooks
        with nullcontext() if self._observers else suppress(ModelError):
            stack.push(counter.__enter__())

    def _put_on(self, stack: ExitStack, where: Selection, change: AnyChange) -> None:
        """Let ``change`` act on the layers or parameters at ``where`` until ``stack`` is closed."""
        layers = self._layers_named(where)
        parameters = self._parameters_named(where, change, layers)
        for name, parameter in parameters.items():
            stack.enter_context(parameter_changed(name, parameter, change))
            self.changed[name] += 1
        if parameters:
            return
        if isinstance(change, ParameterIntervention):
            asked = f"no parameter to {change.word} at '{where}'"
            if layers:
                raise LayerError(asked, self._some_with_parameters(change), "list them with weights")
            raise self._unknown(str(where), asked)
        stack.push(self._observer(where, change))

    def _layers_named(self, where: Selection) -> dict[str, nn.Module]:
        modules = dict(self._model.named_modules(remove_duplicate=False))
        if str(where) in modules:
            return {str(where): modules[str(where)]}
        return {name: module for name, module in modules.items() if where.calls_by_name([name])}

    def _parameters_named(
        self, where: Selection, change: AnyChange, layers: Mapping[str, nn.Module]
    ) -> dict[str, nn.Parameter]:
        """The parameters with these names, or, for a `ParameterIntervention`, those in the layers."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        chosen: list[str] = []
        if not layers:
            chosen = [name for name in parameters if name == str(where) or where.calls_by_name([name])]
            if chosen and str(where) not in chosen:  # another term may be misspelt
                self._check_names(where, chosen)
        elif isinstance(change, ParameterIntervention):
            if str(where) not in layers:
                self._check_names(where, layers)
            within = [name for layer, module in layers.items() for name, _ in module.named_parameters(layer)]
            chosen = [name for name in within if change.takes(parameters[name])]
        # a parameter under two names is changed once
        first = {id(parameters[name]): name for name in reversed(chosen)}
        return {name: parameters[name] for name in chosen if first[id(parameters[name])] == name}

    def _check_names(self, where: Selection, named: Iterable[str]) -> None:
        try:
            where.check_names(self._names())
        except LayerError as error:
            raise self._unknown(error.name, f"no layer or parameter '{error.name}' in the model") from None
        try:
            where.check_names([*named])
        except LayerError:
            asked = f"'{where}' names both layers and parameters"
            raise LayerError(asked, do="give layers and parameters separately") from None

    def _observer(self, where: Selection, change: Change) -> Observer:
        """The observer, entered, that lets ``change`` act on each selected call."""
        on_input = isinstance(change, Intervention) and change.on == "input"

        def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return None if on_input else self._changed(change, call, module, output)

        def on_before(call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            changed = self._changed(change, call, module, joined_inputs(args, kwargs), of_input=True)
            return None if changed is None else split_inputs(changed, len(args), bool(kwargs))

        if where.from_the_end:
            asked = f"index {where} counts from the end, which is unknown while a pass runs"
            raise SelectionError(asked, do="choose the layer by its name, or by its index from the start")
        before = on_before if on_input else None
        observer = Observer(self._model, where, self._types, on_call, on_before=before, again=True)
        try:
            observer.__enter__()
        except LayerError as error:
            if error.kind == "layer":
                raise self._unknown(str(where), f"no layer or parameter '{where}'") from None
            raise
        self._observers.append(observer)
        return observer

    def _some_with_parameters(self, change: ParameterIntervention) -> str:
        parameters = self._model.named_parameters(remove_duplicate=False)
        names = [holder_of(name) for name, parameter in parameters if change.takes(parameter)]
        layers = [*dict.fromkeys(filter(None, names))]
        return f"layers with such parameters: {listed(layers, 3)}" if layers else "no layer has such a parameter"

    def _unknown(self, where: str, asked: str) -> LayerError:
        do = "list layers with ‹list_layers(model, types='all')|list-layers --type all›, parameters with"
        return LayerError(asked, nearest(where, self._names()), f"{do} ‹parameter_statistics(model)|weights›")

    def _names(self) -> list[str]:
        layers = [name for name, _ in self._model.named_modules(remove_duplicate=False)]
        return layers + [name for name, _ in self._model.named_parameters(remove_duplicate=False)]

    def _changed(self, change: Change, call: Call, module: nn.Module, value: Any, of_input: bool = False) -> Any:
        again = is_recomputing()
        if not again:
            self._step_of[call.name] = self.step
        if isinstance(change, Intervention):
            if not change.is_active(module):
                self._idle = self._idle or f"{change} at '{call.key}'"
                return None
            # checkpointing recomputes after the pass has ended, and must get the same result
            change = change.at(self._step_of.get(call.name, self.step))
        parts = {id(tensor): part for part, tensor in tensors_in(value).items()}
        results: dict[int, Tensor] = {}  # a tensor that appears twice stays one tensor

        def change_tensor(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_quantized):
                return tensor
            if id(tensor) not in results:
                if isinstance(change, Intervention):
                    axis = channel_axis(tensor, module, of_input=of_input)
                    results[id(tensor)] = change(call, tensor, module, parts[id(tensor)], axis)
                else:
                    try:
                        changed = change(call, tensor.clone())
                    except Exception as error:
                        error.add_note(f"the function for '{call.key}': it gets (call, tensor) and returns a tensor")
                        raise
                    results[id(tensor)] = checked(changed, tensor, call.key)
            return results[id(tensor)]

        changed = map_tensors(value, change_tensor)
        if all(id(tensor) == before for before, tensor in results.items()):
            return None
        self.changed[call.key] += not again
        return changed
