"""Why an operation makes NaN or Inf of its inputs: 0 / 0, the logarithm of a negative number, an overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hookscope.findings import counted
from hookscope.hooks import as_plain, finite_values, map_tensors, random_states_kept, tensors_in

Given = Sequence[Any]
_CASTS = ("to", "type", "half", "bfloat16", "float")
_GROWING = ("exp", "exp2", "expm1", "sinh", "cosh", "pow", "square", "prod", "cumprod", "mul", "matmul", "linear")
_RANDOM = ("rand", "normal", "dropout", "bernoulli", "multinomial", "uniform", "exponential")
_WITH_INF = {
    **dict.fromkeys(("add", "sub", "sum", "mean", "cumsum", "rsub"), "Inf - Inf"),
    **dict.fromkeys(("mul", "matmul", "linear", "bmm", "conv1d", "conv2d", "conv3d"), "0 × Inf or Inf - Inf"),
    "div": "Inf / Inf",
}


def cause_of(function: Callable[..., Any], args: Given, kwargs: dict[str, Any], output: Any) -> str:
    """One line on why ``function`` makes ``output`` NaN or Inf of these arguments."""
    name = str(getattr(function, "__name__", ""))
    kind = name.strip("_")
    if name.startswith(("__r", "__i")) and kind[1:] in _RULES | _WITH_INF:
        kind = kind[1:]
    if name.startswith("__r"):  # 1 / x calls __rdiv__(x, 1)
        args, swapped = tuple(reversed(args)), function
        function = lambda left, right: swapped(right, left)  # noqa: E731
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
        return _overflow(kind, function, args, kwargs, output)


def _plain(value: Any) -> Any:
    return as_plain(value) if isinstance(value, torch.Tensor) else value


def _overflow(kind: str, function: Callable[..., Any], args: Given, kwargs: dict[str, Any], output: Any) -> str:
    """The largest number of the type, and the result in double precision where that is finite."""
    types = [tensor.dtype for tensor in tensors_in(output).values() if tensor.is_floating_point()]
    if not types:
        return ""
    limit = f"the largest {str(types[0]).removeprefix('torch.')} is {torch.finfo(types[0]).max:,.6g}"
    if kind in _CASTS:
        given = [finite_values(_plain(tensor).double()) for tensor in tensors_in(args[:1]).values()]
        return f"overflow: its input has values up to {max(part.largest for part in given):,.6g}, and {limit}"
    exact = _in_double_precision(kind, function, args, kwargs)
    if exact is not None and types[0] != torch.float64:
        parts = [finite_values(tensor) for tensor in tensors_in(exact).values() if tensor.is_floating_point()]
        if parts and not any(part.nonfinite for part in parts):
            largest = max(part.largest for part in parts)
            where = "a step inside it is too large" if largest <= torch.finfo(types[0]).max else f"up to {largest:,.6g}"
            return f"overflow: in double precision the result is finite, {where}; {limit}"
    if any(bool(torch.isnan(tensor).any()) for tensor in tensors_in(output).values()):
        return "its inputs are finite"
    hidden = "" if kind in _GROWING else " or a division by 0 inside"
    return f"overflow{hidden}: {limit}"


def _in_double_precision(kind: str, function: Callable[..., Any], args: Given, kwargs: dict[str, Any]) -> Any:
    if any(word in kind for word in _RANDOM):
        return None

    def widened(tensor: Tensor) -> Tensor:
        plain = as_plain(tensor).clone()
        return plain.double() if plain.is_floating_point() else plain

    try:
        with random_states_kept():
            return function(*map_tensors(tuple(args), widened), **map_tensors(kwargs, widened))
    except Exception:  # an operation of a third party, or without double precision
        return None


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
    return (
        f"division by 0: running_var + eps is 0 in {_share(below == 0, 'channel')}" if bool((below == 0).any()) else ""
    )


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
