"""The calls that make NaN or Inf in one forward pass, apart from those that pass it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.display import Cells, Shown
from hookscope.errors import InputError
from hookscope.findings import nonfinite_words
from hookscope.hooks import (
    UNKNOWN,
    Anomaly,
    AnyModel,
    Call,
    NonFiniteSearch,
    as_plain,
    check_hookable,
    differentiable,
    enclosing,
    finite_values,
    is_single,
    kinds_of,
    map_tensors,
    may_write,
    module_of,
    operation_name,
    tensors_in,
    word_of,
)
from hookscope.tracing.causes import cause_of
from hookscope.tracing.events import Facts, facts_of


@dataclass(frozen=True, slots=True, repr=False)
class NonFinite(Shown):
    """A call that makes NaN or Inf of inputs without it, or the first call that uses NaN or Inf from elsewhere.

    Attributes:
        call: The layer of torch, else the operation, with the keys of `trace_events` with ``ops``.
        kind: What is new in its output: ``NaN``, ``Inf`` or ``NaN and Inf``.
        operation: The function of torch, such as ``batch_norm`` of a BatchNorm2d; empty where torch does not see it.
        place: The line of code that called it, ``net.py:17``; empty for code of torch alone.
        cause: Why, with numbers: ``0 / 0: 4 of 256 divisors are 0``.
        source: The parameter, buffer, attribute or input that already held it; empty if the call makes it.
        deliberate: Whether it is an Inf that the code writes as a number or holds as a constant, such as a mask.
        inputs: The arguments of the operation before it ran, by name of the parameter or buffer, else by position.
        output: What it returned.
    """

    call: Call
    kind: str
    operation: str
    place: str
    cause: str
    source: str
    deliberate: bool
    inputs: Facts
    output: Facts

    def _cells(self) -> Cells:
        return {"call": self.call.key, "kind": self.kind, "operation": self.operation, "cause": self.cause}

    @property
    def nonfinite(self) -> int:
        """How many values of its output are NaN or Inf."""
        return sum(tensor.nonfinite for tensor in self.output.values())


@dataclass(frozen=True, slots=True, repr=False)
class NonFiniteReport(Shown):
    """Where NaN and Inf come from in one forward pass, and what was looked at.

    Attributes:
        made: The calls that make NaN or Inf, in order of execution: every Inf, every NaN that is made of values without
            NaN, and what brings the first. A deliberate Inf is here only if it becomes NaN or reaches the output.
        contained: Deliberate Inf, such as masks, that neither become NaN nor reach the output.
        passed_on: Number of results of operations that hold NaN or Inf because an input does.
        output: NaN and Inf by part of the model's output; empty if it has none.
        operations: Number of calls of functions of torch whose results were looked at.
        values: Number of floating-point values in these results.
        layers: Number of calls of modules.
        did_not_run: Layers that the pass did not reach, which says nothing of them.
        error: What the model raised after the first NaN or Inf; empty if the pass came to its end.
    """

    made: tuple[NonFinite, ...]
    contained: tuple[NonFinite, ...]
    passed_on: int
    output: dict[str, int]
    operations: int
    values: int
    layers: int
    did_not_run: tuple[str, ...]
    error: str

    def _cells(self) -> Cells:
        first = self.first
        cause = (
            {} if first is None else {"first": first.call.key or "(model)", "kind": first.kind, "cause": first.cause}
        )
        return {**cause, "operations": self.operations, "values": self.values, "layers": self.layers}

    def _rows(self) -> Sequence[NonFinite]:
        return self.made

    @property
    def first(self) -> NonFinite | None:
        """The first of ``made`` that is not deliberate, else the first; None if all values were finite."""
        return next((call for call in self.made if not call.deliberate), next(iter(self.made), None))


def find_non_finite(model: AnyModel, inputs: Any) -> NonFiniteReport:
    """Run ``model`` once, and find the calls that make NaN or Inf, apart from those that pass it on.

    The result of every function of torch is tested, inside torch's layers and between them, in containers and in
    place, and so is what every module returns. The model runs in eval mode without gradients, and is as before
    afterwards. `examine_gradients` with ``detect_anomaly`` also follows the backward pass.

    Args:
        model: Any eager module.
        inputs: The positional inputs as a tuple, or the only one, such as a tensor ``(N, C, H, W)``.

    Raises:
        ModelError: for scripted and compiled models, and weights made inside ``inference_mode``.
        InputError: for a model that returns no floating-point tensor, so that nothing could be looked at.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> net[1].running_var[0] = -1.0
        >>> find_non_finite(net, torch.ones(1, 2)).first.cause
        'the square root of a negative number: running_var + eps is negative in 1 of 2 channels'
    """
    model = module_of(model)
    check_hookable(model)
    inputs = map_tensors(inputs if isinstance(inputs, tuple) else (inputs,), lambda tensor: tensor.detach().clone())
    search, output, error = _PassSearch(model, inputs), None, ""
    with differentiable(model), torch.no_grad():
        try:
            with search:
                output = model(*inputs)
        except Exception as raised:
            if not search.found:
                raise
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    results = tensors_in(output)
    if not error and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in results.values()):
        asked = f"the output of {type(model).__name__} holds no floating-point tensor"
        raise InputError(asked, f"it is of type {type(output).__name__}", "trace a part of the model that returns one")
    return search.report(results, error)


class _PassSearch(NonFiniteSearch):
    """Keeps the facts of each call that makes NaN or Inf while its arguments are at hand."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__(model, inputs)
        self.found: list[tuple[Anomaly, NonFinite]] = []
        self._given: tuple[Any, Any, Any, Any] | None = None
        self._passed_on = self._results = self._values = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = (args, kwargs)
        if may_write(operation_name(func), args, kwargs):
            with torch.no_grad():
                before = map_tensors(before, Tensor.clone)
        self._given = func, (args, kwargs), *before
        result = super().__torch_function__(func, types, args, kwargs)
        self._given = None
        return result

    def _test(self, results: Sequence[Tensor], *where: Any) -> bool:
        found, holds = len(self.found), super()._test(results, *where)
        self._results += 1
        self._values += sum(tensor.numel() for tensor in results if tensor.is_floating_point() or tensor.is_complex())
        self._passed_on += holds and found == len(self.found)
        return holds

    def _add(self, anomaly: Anomaly, results: Sequence[Tensor], carrier: Tensor | None = None) -> None:
        super()._add(anomaly, results, carrier)
        self.found.append((anomaly, self._facts(anomaly, results, carrier)))

    def _facts(self, anomaly: Anomaly, results: Sequence[Tensor], carrier: Tensor | None) -> NonFinite:
        call = anomaly.call or Call("", "", 0, None)
        inputs: Facts = {}
        function, given, args, kwargs = self._given or (None, ((), {}), (), {})
        if function is not None and anomaly.operation == word_of(function):
            inputs = dict(zip(self._names_of(*given), facts_of((args, kwargs)).values(), strict=True))
        if anomaly.source and carrier is not None:
            values = finite_values(as_plain(carrier).double())
            words = nonfinite_words(values.nan, values.inf)
            hidden = f"an operation that torch does not report made {words}"
            cause = hidden if anomaly.source == UNKNOWN else f"{anomaly.source} holds {words}"
        elif inputs and function is not None:
            cause = cause_of(function, args, kwargs, results)
        else:
            cause = f"the code writes {anomaly.kind} as a constant"
        output = facts_of(results[0] if len(results) == 1 else results)
        about = anomaly.operation, anomaly.place, cause, anomaly.source, anomaly.deliberate
        return NonFinite(call, anomaly.kind, *about, inputs, output)

    def _names_of(self, args: Any, kwargs: Any) -> Iterator[str]:
        for part, tensor in tensors_in({**{str(at): value for at, value in enumerate(args)}, **kwargs}).items():
            _, name = self._owners.get(id(tensor), ("", ""))
            yield name or part

    def _did_not_run(self) -> tuple[str, ...]:
        """Layers that were not called, nor any in them, nor what they hold used by the layer around them."""
        reached = {outer for module in self._times for outer in enclosing(self._names[module])}
        calling = {name.rpartition(".")[0] for name in reached if name}
        single = {name for module in self._times if is_single(name := self._names[module], module)} - calling
        return tuple(
            name
            for module, name in self._names.items()
            if not (name in reached or name.rpartition(".")[0] in single)
            and type(module).forward is not nn.Module.forward
        )

    def report(self, output: dict[str, Tensor], error: str) -> NonFiniteReport:
        """What the pass showed, now that it is over."""
        bad = {part: tensor for part, tensor in output.items() if any(kinds_of([tensor]).values())}
        spread = [anomaly.infinite for anomaly, _ in self.found]
        spread += [self.origin_of_inf([tensor]) for tensor in bad.values()]
        counts = any(not anomaly.deliberate for anomaly, _ in self.found)
        matters = [
            not anomaly.deliberate or any(anomaly is origin for origin in spread) or (bool(bad) and not counts)
            for anomaly, _ in self.found
        ]
        made, contained = list[NonFinite](), list[NonFinite]()
        for (_, facts), does in zip(self.found, matters, strict=True):
            chosen = made if does else contained
            if chosen and chosen[-1].call is facts.call:  # one operation made both
                chosen[-1] = replace(chosen[-1], kind="NaN and Inf")
            else:
                chosen.append(facts)
        return NonFiniteReport(
            tuple(made),
            tuple(contained),
            self._passed_on,
            {part: facts_of(tensor)[""].nonfinite for part, tensor in bad.items()},
            self._results,
            self._values,
            sum(self._times.values()),
            self._did_not_run(),
            error,
        )
