"""What one pass tells while it runs: shapes, MACs, and which layer overwrites whose output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hookscope.hooks import Shape, is_leaf, shape_of, tensors_in
from hookscope.tracing.facts import TracedCall


@dataclass(slots=True)
class _OpenCall:
    """A call that has begun: of which layer, what came in, and the MACs of the children that ran in it."""

    layer: int
    input_shape: Shape
    macs: int = 0


@dataclass(slots=True)
class _Written:
    """An output watched for writes: its alias (same version counter) and the version when it was returned."""

    call: int
    alias: Tensor
    version: int


@dataclass(slots=True)
class Recorder:
    """Two hooks for every module of a model, `before` and `after`; the calls in the order in which they returned."""

    positions: dict[int, int]
    names: list[str]
    calls: list[TracedCall] = field(default_factory=list)
    overwritten: dict[int, str] = field(default_factory=dict)
    _open: list[_OpenCall] = field(default_factory=list)
    _watched: list[_Written] = field(default_factory=list)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what comes in; a forward pre-hook."""
        self._look_for_writes()
        self._open.append(_OpenCall(self.positions[id(module)], _input_shape(args, kwargs)))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note what goes out and what it cost; a forward hook."""
        self._look_for_writes()
        opened = self._open.pop()
        while opened.layer != self.positions[id(module)]:  # a call that failed, and whose failure the model caught
            opened = self._open.pop()
        shape = shape_of(output)
        macs = count_macs(module, shape) if is_leaf(module) else opened.macs
        if self._open:
            self._open[-1].macs += macs
        for tensor in tensors_in(output).values():
            alias = tensor.detach()
            self._watched.append(_Written(len(self.calls), alias, alias._version))
        self.calls.append(TracedCall(opened.layer, opened.input_shape, shape, macs, None))

    def _look_for_writes(self) -> None:
        """Blame the layer that is running now for every output written to since the last look."""
        changed = [written for written in self._watched if written.alias._version != written.version]
        if not changed:
            return
        running = self.names[self._open[-1].layer] if self._open else ""
        for written in changed:
            self.overwritten[written.call] = running or "the model"
        gone = {id(written) for written in changed}
        self._watched = [written for written in self._watched if id(written) not in gone]


def _input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape:
    """The shapes of what a call was given; of one tensor, however it was given, just its own."""
    given: dict[str, Any] = {str(place): value for place, value in enumerate(args)} | kwargs
    given = {name: value for name, value in given.items() if tensors_in(value)}
    return shape_of(next(iter(given.values())) if len(given) == 1 else given)


def count_macs(module: nn.Module, output_shape: Shape) -> int:
    """Multiply-accumulates of one call of a leaf, by torchinfo's rule and equal to its integers.

    A convolution costs its parameters times the batch and the positions of its output, any other layer its
    ``weight`` and ``bias`` times the batch, a recurrent one its weights times batch and steps.

    Args:
        module: A layer without children.
        output_shape: ``(N, C, H, W)`` or what the layer returned; the first part of several counts.

    Example:
        >>> import torch
        >>> count_macs(torch.nn.Conv2d(3, 64, 7, bias=False), (1, 64, 112, 112))
        118013952
    """
    shape = next(iter(output_shape.values()), ()) if isinstance(output_shape, dict) else output_shape or ()
    macs = 0
    for name, parameter in module.named_parameters():
        name, count = _unpruned(module, name, parameter)
        if name in ("weight", "bias"):
            spread = math.prod(shape[:1] + shape[2:]) if "Conv" in type(module).__name__ else shape[0] if shape else 0
            macs += count * int(spread)
        elif "weight" in name or "bias" in name:
            macs += count * math.prod(shape[:2])
    return macs


def _unpruned(module: nn.Module, name: str, parameter: nn.Parameter) -> tuple[str, int]:
    """A pruned parameter under the name it had, with the elements its mask leaves."""
    mask = getattr(module, f"{name[:-5]}_mask", None) if name.endswith("_orig") else None
    return (name, parameter.numel()) if mask is None else (name[:-5], int(mask.sum()))
