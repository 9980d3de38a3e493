"""The calls that make NaN or Inf in one forward pass, and why; those that only pass it on are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.display import Cells, Shown
from hookscope.errors import InputError
from hookscope.findings import counted, nonfinite_words
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
from hookscope.models import takes_inputs
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
class NonFiniteReport(Shown, rows="made"):
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
        cause = {"first": "all finite"}
        if first is not None:
            cause = {"first": first.call.key or "(model)", "kind": first.kind, "cause": first.cause}
        return {**cause, "operations": self.operations, "values": self.values, "layers": self.layers}

    @property
    def first(self) -> NonFinite | None:
        """The first of ``made`` that is not deliberate, else the first; None if all values were finite."""
        return next((call for call in self.made if not call.deliberate), next(iter(self.made), None))


@takes_inputs
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
    inputs = map_tensors(inputs, lambda tensor: tensor.detach().clone())
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
        count, holds = len(self.found), super()._test(results, *where)
        self._results += 1
        self._values += sum(tensor.numel() for tensor in results if tensor.is_floating_point() or tensor.is_complex())
        self._passed_on += holds and count == len(self.found)
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
            cause = _cause_of(function, args, kwargs, results)
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
        nonfinite = {part: facts_of(tensor)[""].nonfinite for part, tensor in bad.items()}
        seen = self._results, self._values, sum(self._times.values()), self._did_not_run()
        return NonFiniteReport(tuple(made), tuple(contained), self._passed_on, nonfinite, *seen, error)


Given = Sequence[Any]
_CASTS = ("to", "type", "half", "bfloat16", "float")
_GROWING = ("exp", "exp2", "expm1", "sinh", "cosh", "pow", "square", "prod", "cumprod", "mul", "matmul", "linear")
_WITH_INF = {
    **dict.fromkeys(("add", "sub", "sum", "mean", "cumsum", "rsub"), "Inf - Inf"),
    **dict.fromkeys(("mul", "matmul", "linear", "bmm", "conv1d", "conv2d", "conv3d"), "0 × Inf or Inf - Inf"),
    "div": "Inf / Inf",
}


def _cause_of(function: Callable[..., Any], args: Given, kwargs: dict[str, Any], output: Any) -> str:
    """One line on why ``function`` makes ``output`` NaN or Inf of these arguments."""
    name = str(getattr(function, "__name__", ""))
    kind = name.strip("_")
    if name.startswith(("__r", "__i")) and kind[1:] in _RULES | _WITH_INF:
        kind = kind[1:]
    if name.startswith("__r"):  # 1 / x calls __rdiv__(x, 1)
        args = tuple(reversed(args))
    values = [_plain(value) for value in (*args, *kwargs.values())]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    infinite = sum(finite_values(tensor.double()).inf for tensor in tensors)
    rule = _RULES.get(kind)
    with torch.no_grad():
        with suppress(IndexError, TypeError, RuntimeError):  # arguments by another name, or of another kind
            if rule is not None and (known := rule(args, kwargs)):
                return known
        numbers = [value for value in values if isinstance(value, float) and not math.isfinite(value)]
        if numbers:
            return f"the code gives it the number {numbers[0]}"
        if infinite:
            return f"{_WITH_INF.get(kind, 'Inf becomes NaN')}: its inputs hold {infinite:,} Inf"
        return _overflow(kind, args, output)


def _plain(value: Any) -> Any:
    return as_plain(value) if isinstance(value, torch.Tensor) else value


def _overflow(kind: str, args: Given, output: Any) -> str:
    """The largest number of the type."""
    types = [tensor.dtype for tensor in tensors_in(output).values() if tensor.is_floating_point()]
    if not types:
        return ""
    limit = f"the largest {str(types[0]).removeprefix('torch.')} is {torch.finfo(types[0]).max:,.6g}"
    if kind in _CASTS:
        given = [finite_values(_plain(tensor).double()) for tensor in tensors_in(args[:1]).values()]
        return f"overflow: its input has values up to {max(part.largest for part in given):,.6g}, and {limit}"
    if any(bool(torch.isnan(tensor).any()) for tensor in tensors_in(output).values()):
        return "its inputs are finite"
    hidden = "" if kind in _GROWING or kind.startswith("conv") else " or a division by 0 inside"
    return f"overflow{hidden}: {limit}"


def _share(condition: Tensor, noun: str = "value") -> str:
    return f"{int(condition.sum()):,} of {counted(condition.numel(), noun)}"


def _division(args: Given, kwargs: dict[str, Any]) -> str:
    above, below = (torch.as_tensor(_plain(value)) for value in (*args, *kwargs.values())[:2])
    zeros = below == 0
    if not bool(zeros.any()):
        return ""
    both = bool((zeros & (above == 0)).any())
    are = "is" if int(zeros.sum()) == 1 else "are"
    return f"{'0 / 0' if both else 'division by 0'}: {_share(zeros, 'divisor')} {are} 0"


def _domain(what: str, pole: float | None, low: float, high: float = math.inf) -> _Rule:
    """The rule of a function that is defined from ``low`` to ``high``, and infinite at ``pole``."""

    def rule(args: Given, kwargs: dict[str, Any]) -> str:
        values = _plain((*args, *kwargs.values())[0])
        outside, at_pole = (values < low) | (values > high), values == pole
        if not bool(outside.any()):
            return f"{what} of {pole:g} in {_share(at_pole)}" if bool(at_pole.any()) else ""
        worst, is_low = values[outside].double(), bool((values < low).any())
        end = f"the lowest is {worst.min():.4g}" if is_low else f"the highest is {worst.max():.4g}"
        limits = f"a number outside {low:g} to {high:g}" if high < math.inf else f"a number below {low:g}"
        return f"{what} of {limits if low else 'a negative number'} in {_share(outside)}; {end}"

    return rule


def _power(args: Given, kwargs: dict[str, Any]) -> str:
    base, exponent = (torch.as_tensor(_plain(value)) for value in (*args, *kwargs.values())[:2])
    base, exponent = torch.broadcast_tensors(base, exponent)
    negative, pole = (base < 0) & (exponent != exponent.round()), (base == 0) & (exponent < 0)
    if bool(negative.any()):
        return f"a fractional power of a negative number in {_share(negative)}"
    return f"division by 0: a negative power of 0 in {_share(pole)}" if bool(pole.any()) else ""


def _softmax(args: Given, kwargs: dict[str, Any]) -> str:
    values = _plain(args[0])
    axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    axis = -1 if axis is None else axis
    empty, full = (values == -math.inf).all(axis), (values == math.inf).any(axis)
    if bool(empty.any()):
        return f"all values are -Inf in {_share(empty, 'row')}"
    return f"Inf in {_share(full, 'row')}" if bool(full.any()) else ""


def _batch_norm(args: Given, kwargs: dict[str, Any]) -> str:
    variance, epsilon = args[2], kwargs.get("eps", args[7] if len(args) > 7 else 1e-5)
    if variance is None:
        return ""
    below = _plain(variance).double() + epsilon
    if bool((below < 0).any()):
        return f"the square root of a negative number: running_var + eps is negative in {_share(below < 0, 'channel')}"
    zero = below == 0
    return f"division by 0: running_var + eps is 0 in {_share(zero, 'channel')}" if bool(zero.any()) else ""


def _normalization(groups: Callable[..., Tensor], epsilon_at: int, centred: bool = True) -> _Rule:
    """The rule of a function that divides ``groups``, the last axis, by their deviation, or by their norm."""

    def rule(args: Given, kwargs: dict[str, Any]) -> str:
        values = groups(_plain(args[0]), *args[1:], **kwargs)
        epsilon = kwargs.get("eps", args[epsilon_at] if len(args) > epsilon_at else None)
        same = values.amax(-1) == values.amin(-1) if centred else (values == 0).all(-1)
        if epsilon != 0 or not bool(same.any()):
            return ""
        return f"0 / 0: eps is 0, and all values are {'the same' if centred else '0'} in {_share(same, 'group')}"

    return rule


def _deviation(args: Given, kwargs: dict[str, Any]) -> str:
    values, axes = args[0], kwargs.get("dim", args[1] if len(args) > 1 and not isinstance(args[1], bool) else None)
    axes = range(values.dim()) if axes is None else (axes,) if isinstance(axes, int) else axes
    count = math.prod(values.shape[axis] for axis in axes)
    return f"a deviation needs two values or more, and this one has {count}" if count < 2 else ""


_Rule = Callable[[Given, dict[str, Any]], str]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("div", "truediv", "true_divide", "divide", "floordiv", "floor_divide"), _division),
    **dict.fromkeys(("fmod", "remainder", "mod"), _division),
    "addcdiv": lambda args, kwargs: _division(args[1:], kwargs),
    "reciprocal": lambda args, kwargs: _division((1, args[0]), {}),
    **dict.fromkeys(("log", "log2", "log10"), _domain("the logarithm", 0, 0)),
    "log1p": _domain("log1p", -1, -1),
    "sqrt": _domain("the square root", None, 0),
    "rsqrt": _domain("1 / square root", 0, 0),
    **dict.fromkeys(("acos", "arccos", "asin", "arcsin"), _domain("the arc sine or cosine", None, -1, 1)),
    **dict.fromkeys(("atanh", "arctanh"), _domain("atanh", 1, -1, 1)),
    **dict.fromkeys(("acosh", "arccosh"), _domain("acosh", None, 1)),
    "pow": _power,
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), _softmax),
    "batch_norm": _batch_norm,
    "layer_norm": _normalization(lambda x, shape, *_, **__: x.flatten(-len(shape)), 4),
    "rms_norm": _normalization(lambda x, shape, *_, **__: x.flatten(-len(shape)), 3, centred=False),
    "group_norm": _normalization(lambda x, groups, *_, **__: x.reshape(len(x), groups, -1), 4),
    "normalize": _normalization(lambda x, p=2, dim=1, *_, **__: x.movedim(dim, -1), 3, centred=False),
    **dict.fromkeys(("std", "var"), _deviation),
    "mean": lambda args, kwargs: "" if args[0].numel() else "the mean of no values",
}
