"""What an intervention is: a rule that makes another tensor of an activation, on all of it or on a part."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, UsageError
from hookscope.findings import counted
from hookscope.hooks import Call, channel_axis
from hookscope.interventions.ranges import Ranges, a_type, parse_positions, parse_ranges

_LARGEST = (2 - 2.0**-23) * 2.0**127  # of single precision, in which most models calculate

SIDES = ("output", "input")

Change = Callable[[Call, "Tensor"], "Tensor | None"]
"""An intervention, or a person's own function; None returned is no change."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor stands in the pass.

    Attributes:
        call: The call that it belongs to.
        part: Its place in a container, as `tensors_in` names it; empty for a bare tensor.
        shape: That of the whole tensor.
        axis: Which of its axes has the channels; 0 where there is no axis of images.
        where: What of it is changed, an index into it; None for all.
    """

    call: Call
    part: str
    shape: tuple[int, ...]
    axis: int
    where: tuple[Any, ...] | None


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """What all interventions have in common: which part of which tensor they change.

    A subclass says in `change` what becomes of that part. The tensor it gets is never written to; what has no floating
    point is passed over.

    Args:
        channels: Which channels, such as ``"0-31,40"`` (both ends are meant), ``3``, ``[0, 5]``; None for all. Of a
            parameter they are those of its first axis.
        positions: Where in the map, one range for each of its axes: ``"0-9x5-14"`` are rows 0 to 9 and columns 5 to
            14, ``"1-196"`` tokens; None for everywhere.
        on: ``output``, or ``input`` for what goes into the layer.

    Raises:
        UsageError: for what cannot be read.
    """

    channels: Any = None
    positions: Any = None
    on: str = "output"

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", parse_ranges("channels", self.channels))
        object.__setattr__(self, "positions", parse_positions(self.positions))
        if self.on not in SIDES:
            raise UsageError(f"no side '{self.on}' of a layer", f"there are {' and '.join(SIDES)}")

    def __call__(
        self, call: Call, tensor: Tensor, module: nn.Module | None = None, part: str = "", axis: int | None = None
    ) -> Tensor:
        """``tensor``, or what it becomes at ``call``.

        Args:
            call: The call that it belongs to.
            tensor: What the layer put out, or was given.
            module: The layer, which tells where the channels are.
            part: Its place in a container.
            axis: Which axis has the channels, where that is known; 0 says that there is none of images.

        Raises:
            LayerError: for channels or positions it does not have.
            UsageError: for a tensor that this cannot be done to.
        """
        if self.changes_nothing:
            return tensor
        if tensor.is_quantized:  # activations have one scale
            changed = self(call, tensor.dequantize(), module, part, axis)
            return torch.quantize_per_tensor(changed, tensor.q_scale(), tensor.q_zero_point(), tensor.dtype)
        axis = channel_axis(tensor, module) if axis is None else axis
        site = Site(call, part, tuple(tensor.shape), axis, self._where(call, tensor, axis))
        part_meant = tensor if site.where is None else tensor[site.where]
        made = self.change(site, part_meant)
        _check_like(made, part_meant, call.key)
        if site.where is None:
            return made
        changed = tensor.clone()
        changed[site.where] = made
        return changed

    @property
    def changes_nothing(self) -> bool:
        """Whether every tensor stays as it is, to the bit."""
        return False

    def change(self, site: Site, part: Tensor) -> Tensor:
        """What becomes of ``part``, a tensor of the same shape; its axes are those of the whole."""
        raise NotImplementedError

    def is_active(self, module: nn.Module) -> bool:
        """Whether it acts on ``module`` now."""
        return True

    def at(self, step: int) -> Self:
        """Itself as it is in the training step ``step``, for rates on a schedule."""
        return self

    def _where(self, call: Call, tensor: Tensor, axis: int) -> tuple[Any, ...] | None:
        """The index of what is meant, None for all of it."""
        if self.channels is None and self.positions is None:
            return None
        where: list[Any] = [slice(None)] * tensor.dim()
        if self.positions is not None:
            places = [at for at in range(0 if axis == 0 else 1, tensor.dim()) if at != axis]
            if len(places) != len(self.positions):
                raise _no_such_axes(call, tensor, len(self.positions), len(places))
            for at, span in zip(places, self.positions, strict=True):
                where[at] = _span(call, span, tensor.shape[at])
        if self.channels is not None:
            where[axis] = _within(call, self.channels, tensor.shape[axis])
        return tuple(where)

    def __str__(self) -> str:
        """As the command line spells it, in short: the class and the fields that are not at their default."""
        shown = [
            f"{field.name}={_spelt(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.repr and not _is_default(getattr(self, field.name), field.default)
        ]
        return type(self).__name__ + (f"({', '.join(shown)})" if shown else "")


def replaced(part: Tensor, source: Tensor) -> Tensor:
    """``source`` in the place of ``part``, in its graph: the gradient that comes back to ``part`` is 0."""
    source = source.to(part)
    if source.stride() != part.stride():
        source = laid_out_like(part, source)
    return torch.where(torch.ones((), dtype=torch.bool, device=part.device), source, part)


def checked(changed: Any, tensor: Tensor, key: str) -> Tensor:
    """What a person's function returned, in memory of its own; None is no change.

    Raises:
        UsageError: for anything but a tensor of the same shape, type and device; it names the layer.
    """
    if changed is None:
        return tensor
    _check_like(changed, tensor, key)
    # the next layer may work in place, and the function may keep what it returned
    own: Tensor = changed.clone()
    return own


def _check_like(changed: Any, tensor: Tensor, key: str) -> None:
    asked = f"the intervention at '{key}' returns"
    if not isinstance(changed, torch.Tensor):
        raise UsageError(f"{asked} {a_type(changed)}", "a tensor was given", "return one like it")
    for what in ("shape", "dtype", "device"):
        made, given = getattr(changed, what), getattr(tensor, what)
        if made != given:
            raise UsageError(f"{asked} {what} {_told(made)}", f"{_told(given)} was given", "return a tensor like it")


def _told(value: Any) -> str:
    return ("x".join(map(str, value)) or "()") if isinstance(value, tuple) else str(value).removeprefix("torch.")


def check_number(name: str, value: Any) -> None:
    """Refuse what is no number, and a finite one that single precision does not reach, as the parameter ``name``."""
    try:
        number = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise UsageError(f"{name}={value!r} is no number", do="give a finite number")
    if math.isnan(number):
        raise UsageError(f"{name}=nan", do="give a finite number")
    if math.isfinite(number) and abs(number) > _LARGEST:
        raise UsageError(f"{name}={number:g} is out of single precision's range", do="give up to 3.4e38")


def check_finite(name: str, value: Any) -> None:
    """Refuse all but finite numbers that single precision reaches, as the parameter ``name``."""
    check_number(name, value)
    if not math.isfinite(value):
        raise UsageError(f"{name}={value:g}", do="give a finite number")


def check_takes(function: Any, what: str, *names: str) -> None:
    """Refuse a function, called ``what`` in the error, that cannot be called with arguments such as ``names``."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of what is written in C nothing is known
        return
    try:
        signature.bind(*names)
    except TypeError:
        called = f"it is called with ({', '.join(names)})"
        raise UsageError(f"{what} takes {signature}", called, "write one that takes these") from None


def laid_out_like(part: Tensor, values: Tensor) -> Tensor:
    """``values`` in memory of their own, in the order of ``part``: what follows calculates as it does with that."""
    return torch.empty_like(part).copy_(values)


def _no_such_axes(call: Call, tensor: Tensor, given: int, there: int) -> LayerError:
    ranges, shape = counted(given, "range"), "x".join(map(str, tensor.shape))
    axes = ("1 axis" if there == 1 else f"{there} axes") if there else "no axis"
    do = "give one range for each, such as 0-9x5-14" if there else "leave positions out"
    return LayerError(f"{ranges} of positions for '{call.key}', whose {shape} has {axes} of positions", do=do)


def _within(call: Call, channels: Ranges, count: int) -> list[int]:
    found = list(channels)
    if found and found[-1] >= count:
        raise LayerError(f"no channel {found[-1]} at '{call.key}'", f"there are {count}: 0 to {count - 1}")
    return found


def _span(call: Call, span: tuple[int, int], count: int) -> slice:
    if span[1] >= count:
        raise LayerError(f"no position {span[1]} at '{call.key}'", f"there are {count}: 0 to {count - 1}")
    return slice(span[0], span[1] + 1)


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _spelt(value: Any) -> str:
    if isinstance(value, Ranges):
        return str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "x".join(f"{first}-{last}" if first != last else f"{first}" for first, last in value)
    if isinstance(value, str | int | bool) or dataclasses.is_dataclass(value):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)
