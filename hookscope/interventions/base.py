"""The base of interventions: a rule that computes a new tensor from an activation, from all of it or from a part."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import index as as_index
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, UsageError
from hookscope.findings import chains, counted
from hookscope.hooks import Call, channel_axis

_MOST = 10_000_000
_EXAMPLE = {"positions": "write 0-9x5-14, a range for each axis", "channels": "write 0-31 or 0-31,40"}
_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")


class Ranges(tuple[int, ...]):
    """Sorted distinct integers; ``str`` shows them as ranges."""

    __slots__ = ()

    def __new__(cls, numbers: Iterable[int]) -> Ranges:
        return super().__new__(cls, sorted(set(numbers)))

    def __str__(self) -> str:
        runs = chains(self, lambda run, number: number == run[-1] + 1)
        return ",".join(_range_text(run[0], run[-1]) for run in runs)


def _range_text(first: int, last: int) -> str:
    return f"{first}-{last}" if first != last else f"{first}"


def parse_channels(value: Any) -> Ranges | None:
    """Parse ``"0-31,40"``, a number, or several of either."""
    if value is None:
        return None
    if isinstance(value, str):
        spans = [_span("channels", value, part) for part in value.split(",")]
        if sum(last - first for first, last in spans) > _MOST:
            raise UsageError(f"channels '{value}' are too many for a tensor")
        return Ranges(number for first, last in spans for number in range(first, last + 1))
    try:
        number = as_index(value)  # first: a tensor of one number cannot be iterated
    except TypeError:
        if isinstance(value, Iterable) and getattr(value, "ndim", None) != 0:
            return Ranges(number for item in value for number in parse_channels(item) or ())
        raise UsageError(f"channels cannot be {type_with_article(value)}", do=_EXAMPLE["channels"]) from None
    if number < 0:
        raise UsageError(f"bad channels {number}", do="channels count from 0")
    return Ranges([number])


def parse_positions(value: Any) -> tuple[tuple[int, int], ...] | None:
    """Parse ``"0-9x5-14"`` into first and last position of each axis; pairs of numbers are checked."""
    if value is None:
        return None
    if isinstance(value, str):
        return tuple(_span("positions", value, part) for part in re.split("[x×]", value))
    try:
        spans = [(as_index(first), as_index(last)) for first, last in value]
    except (TypeError, ValueError):
        asked = f"positions cannot be {type_with_article(value)}"
        raise UsageError(asked, do="give (first, last) for each axis, or a text such as 0-9x5-14") from None
    return tuple(_span("positions", str(value), f"{first}-{last}") for first, last in spans)


def type_with_article(value: Any) -> str:
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _span(what: str, whole: str, part: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(part)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"bad {what} '{whole}'", do=_EXAMPLE[what])
    return int(match[1]), int(match[2] or match[1])


_LARGEST = (2 - 2.0**-23) * 2.0**127  # of single precision, in which most models calculate

SIDES = ("output", "input")

WORDS: dict[str, type[Spelled]] = {}
"""Every class by its word. A class with a ``word`` enters when it is defined."""


class Spelled:
    """A dataclass that the command line can spell ``word:parameter=value,...``.

    The metadata of a field may hold an ``example`` for help and errors, where the default is not a value, and
    ``from_file`` for a value that ``from=`` reads from a file: ``tensor``, ``image``, or ``images`` of a folder. With
    ``choices``, or ``finite`` for a number, a value is checked.

    Attributes:
        word: Its name on the command line; a subclass without one of its own is not in `WORDS`.
        summary: What it does, in a line of the help.
        one_pass: Parameters that have another default where a model in eval mode runs once.
        changes_forward: Whether its effect shows in a forward pass.
        neutral: A parameter, and its value that changes no tensor.
    """

    word: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    one_pass: ClassVar[Mapping[str, Any]] = {}
    changes_forward: ClassVar[bool] = True
    neutral: ClassVar[tuple[str, float] | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "word" in vars(cls):
            WORDS[cls.word] = cls

    def check_one_image(self) -> None:
        """Refuse parameters that have no effect on a batch of one image."""


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a tensor in the pass.

    Attributes:
        call: The call of the layer.
        part: The tensor's place in a container, as `tensors_in` names it; empty for a bare tensor.
        shape: Shape of the whole tensor.
        axis: The channel axis; 0 means the tensor has no batch axis.
        where: Index of the changed part; None for the whole tensor.
    """

    call: Call
    part: str
    shape: tuple[int, ...]
    axis: int
    where: tuple[Any, ...] | None


@dataclass(frozen=True, kw_only=True)
class Intervention(Spelled):
    """Changes an activation, or the part of it that ``channels`` and ``positions`` choose.

    A subclass computes the new values in `change`. The tensor itself is never written to. Tensors that are not
    floating point pass unchanged.

    Args:
        channels: Channels, such as ``"0-31,40"`` (both ends included), ``3`` or ``[0, 5]``; None for all. For a
            parameter they count its first axis.
        positions: Positions in the map, one range per axis: ``"0-9x5-14"`` means rows 0 to 9 and columns 5 to 14,
            ``"1-196"`` tokens 1 to 196; None for all.
        on: ``output`` or ``input`` of the layer.

    Raises:
        UsageError: for a value that cannot be read.
    """

    channels: Any = dataclasses.field(default=None, metadata={"example": "0-31"})
    positions: Any = dataclasses.field(default=None, metadata={"example": "0-9x5-14"})
    on: str = "output"

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", parse_channels(self.channels))
        object.__setattr__(self, "positions", parse_positions(self.positions))
        if self.on not in SIDES:
            raise UsageError(f"no side '{self.on}' of a layer", f"there are {' and '.join(SIDES)}")
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata.get("choices")
            if choices and value not in choices:
                raise UsageError(f"no value '{value}' of {field.name}", f"choices: {', '.join(choices)}")
            if field.metadata.get("finite"):
                check_number(field.name, value, finite=True)

    def __call__(
        self, call: Call, tensor: Tensor, module: nn.Module | None = None, part: str = "", axis: int | None = None
    ) -> Tensor:
        """Compute the changed tensor; ``tensor`` itself where nothing changes.

        Args:
            call: The call that it belongs to.
            tensor: An output or input of the layer.
            module: The layer, whose class tells the channel axis.
            part: The tensor's place in a container.
            axis: The channel axis, where it is known; 0 means the tensor has no batch axis.

        Raises:
            LayerError: for channels or positions that the tensor does not have.
            UsageError: for a tensor that cannot be changed so.
        """
        if self.changes_nothing:
            return tensor
        if tensor.is_quantized:  # activations have one scale
            changed = self(call, tensor.dequantize(), module, part, axis)
            return torch.quantize_per_tensor(changed, tensor.q_scale(), tensor.q_zero_point(), tensor.dtype)
        where, values = self._values(call, tensor, part, channel_axis(tensor, module) if axis is None else axis)
        if where is None:
            return values
        changed = tensor.clone()
        changed[where] = values
        return changed

    def write_to(self, call: Call, tensor: Tensor, part: str, axis: int) -> None:
        """Change ``tensor``, which belongs to the caller, in place; arguments and errors are as in a call."""
        where, values = self._values(call, tensor, part, axis)
        tensor[... if where is None else where] = values

    def _values(self, call: Call, tensor: Tensor, part: str, axis: int) -> tuple[tuple[Any, ...] | None, Tensor]:
        """The index of the changed part, None for the whole tensor, and its new values."""
        site = Site(call, part, tuple(tensor.shape), axis, self._where(call, tensor, axis))
        chosen = tensor if site.where is None else tensor[site.where]
        values = self.change(site, chosen)
        _check_like(values, chosen, call.key)
        return site.where, values

    @property
    def changes_nothing(self) -> bool:
        """Whether every tensor stays the same, to the bit."""
        return self.neutral is not None and bool(getattr(self, self.neutral[0]) == self.neutral[1])

    def change(self, site: Site, part: Tensor) -> Tensor:
        """Compute new values for ``part``, of its shape; its axes are the axes of the whole tensor."""
        raise NotImplementedError

    def is_active(self, module: nn.Module) -> bool:
        """Whether it changes the output of ``module`` now."""
        return True

    def at(self, step: int) -> Self:
        """The intervention in the training step ``step``, for rates on a schedule."""
        return self

    def _where(self, call: Call, tensor: Tensor, axis: int) -> tuple[Any, ...] | None:
        if self.channels is None and self.positions is None:
            return None
        where: list[Any] = [slice(None)] * tensor.dim()
        if self.positions is not None:
            axes = position_axes(tensor.dim(), axis)
            if len(axes) != len(self.positions):
                raise _wrong_positions(call, tensor, len(self.positions), len(axes))
            for at, (first, last) in zip(axes, self.positions, strict=True):
                if last >= (count := tensor.shape[at]):
                    raise LayerError(f"no position {last} at '{call.key}'", f"there are {count}: 0 to {count - 1}")
                where[at] = slice(first, last + 1)
        if self.channels is not None:
            where[axis] = list(self.channels)
            if self.channels and self.channels[-1] >= (count := tensor.shape[axis]):
                asked = f"no channel {self.channels[-1]} at '{call.key}'"
                raise LayerError(asked, f"there are {count}: 0 to {count - 1}")
        return tuple(where)

    def __str__(self) -> str:
        """The class, and the fields that differ from their default as the command line spells them."""
        shown = [
            f"{field.name}={_spelled(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.repr and repr(getattr(self, field.name)) != repr(field.default)
        ]
        return type(self).__name__ + (f"({', '.join(shown)})" if shown else "")


class ParameterIntervention(Spelled):
    """Changes a parameter in another way than by new values."""

    def takes(self, parameter: Tensor) -> bool:
        return True

    def applied(self, name: str, parameter: nn.Parameter) -> AbstractContextManager[None]:
        """A context in which ``parameter``, called ``name`` in the model, is changed."""
        raise NotImplementedError


Change = Callable[[Call, "Tensor"], "Tensor | None"]
"""An intervention or a function of the user; None means no change."""


def position_axes(dimensions: int, channel: int) -> list[int]:
    """The axes of positions of a tensor with the channel axis ``channel``, 0 meaning no batch axis."""
    return [axis for axis in range(0 if channel == 0 else 1, dimensions) if axis != channel]


def replaced(part: Tensor, source: Tensor) -> Tensor:
    """``source`` in the place of ``part`` and in its graph, so that the gradient of ``part`` is 0."""
    source = source.to(part)
    if source.stride() != part.stride():
        source = laid_out_like(part, source)
    return torch.where(torch.ones((), dtype=torch.bool, device=part.device), source, part)


def checked(changed: Tensor | None, tensor: Tensor, key: str) -> Tensor:
    """The result of a user's function, in memory of its own; None means no change."""
    if changed is None:
        return tensor
    _check_like(changed, tensor, key)
    return changed.clone()  # the next layer may work in place, and the function may keep its result


def _check_like(changed: Any, tensor: Tensor, key: str) -> None:
    asked = f"the intervention at '{key}' returns"
    if not isinstance(changed, torch.Tensor):
        raise UsageError(f"{asked} {type_with_article(changed)}", "it got a tensor", "return one like it")
    for what, old, new in zip(("shape", "dtype", "device"), _facts(tensor), _facts(changed), strict=True):
        if new != old:
            raise UsageError(f"{asked} {what} {new}", f"it got {old}", "return a tensor like it")


def _facts(tensor: Tensor) -> tuple[str, str, str]:
    return "x".join(map(str, tensor.shape)) or "()", str(tensor.dtype).removeprefix("torch."), str(tensor.device)


def check_number(name: str, value: Any, finite: bool = False) -> None:
    """Refuse values of the parameter ``name`` that are not numbers or exceed single precision, or are not finite."""
    try:
        number = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise UsageError(f"{name}={value!r} is not a number", do="give a finite number")
    if math.isnan(number) or (finite and math.isinf(number)):
        raise UsageError(f"{name}={number:g}", do="give a finite number")
    if math.isfinite(number) and abs(number) > _LARGEST:
        raise UsageError(f"{name}={number:g} exceeds single precision", do="give at most 3.4e38")


def check_takes(function: Any, what: str, *names: str) -> None:
    """Refuse a function, called ``what`` in the error, that cannot be called with arguments such as ``names``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind(*names)
    except TypeError:
        called = f"it is called with ({', '.join(names)})"
        raise UsageError(f"{what} takes {signature}", called, "write one that takes these") from None


def laid_out_like(part: Tensor, values: Tensor) -> Tensor:
    """``values`` in memory of their own with the strides of ``part``, so that later layers calculate to the bit."""
    return torch.empty_like(part).copy_(values)


def _wrong_positions(call: Call, tensor: Tensor, ranges: int, axes: int) -> LayerError:
    shape = "x".join(map(str, tensor.shape))
    asked = f"{counted(ranges, 'range')} of positions for '{call.key}', whose shape {shape} has"
    if not axes:
        return LayerError(f"{asked} no position axis", do="leave positions out")
    asked += f" {axes} position {'axis' if axes == 1 else 'axes'}"
    return LayerError(asked, do="give one range for each, such as 0-9x5-14")


def _spelled(value: Any) -> str:
    if isinstance(value, Ranges):
        return str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "x".join(_range_text(*ends) for ends in value)
    if isinstance(value, str | int | bool) or dataclasses.is_dataclass(value):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)
