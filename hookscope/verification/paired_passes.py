"""One pass of a model without hooks and one under `capture`, with the outputs and state changes of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import (
    Activations,
    Call,
    ModelSnapshot,
    Observer,
    Selection,
    StateChange,
    capture,
    map_tensors,
    random_states_kept,
    split_inputs,
    tensors_in,
)
from hookscope.models import LoadedModel, model_errors_as_input_errors

Shapes = tuple[tuple[int, ...], ...]


def noise_pictures(net: LoadedModel, seed: int = 0) -> list[Tensor]:
    """Prepared pictures of seeded noise in the input size of ``net``; the global random state is not touched.

    One tensor ``(3, H, W)``, or ``(3, T, H, W)`` for clips, two for optical flow; uniform in 0..1 for detection and in
    -1..1 for optical flow, standard normal for the others.
    """
    preprocess = net.preprocess
    shape = preprocess.input_shape
    generator = torch.Generator().manual_seed(seed)
    if net.family == "detection":
        noise = [torch.rand(shape, generator=generator)]
    elif net.family == "optical_flow":
        noise = [torch.rand(shape, generator=generator) * 2 - 1 for _ in range(2)]
    else:
        noise = [torch.randn(shape, generator=generator)]
    return [picture.to(preprocess.device, preprocess.dtype) for picture in noise]


@dataclass(frozen=True, slots=True)
class CallSignature:
    """How a call was given its tensors, which recorded inputs alone do not say.

    ``args`` counts the positional inputs. ``same`` has for each tensor the position of the first one that is the same
    object, on which attention depends. ``strides`` has the memory layout of each, on which rounding depends.
    """

    args: int
    keywords: bool
    same: tuple[int, ...]
    shapes: Shapes
    strides: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSignature:
        tensors = list(tensors_in((args, kwargs)).values())
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(tensor), position) for position, tensor in enumerate(tensors))
        return cls(len(args), bool(kwargs), same, shapes_in(tensors), tuple(map(_strides_of, tensors)))

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` from what `Activations.inputs` holds of the call."""
        return split_inputs(inputs, self.args, self.keywords)

    def copied_arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` in memory of their own: a layer may work in place."""
        copies: list[Tensor] = []

        def copied(tensor: Tensor) -> Tensor:
            at = len(copies)
            first = self.same[at]
            copies.append(copies[first] if first < at else _laid_out(tensor, self.strides[at]))
            return copies[-1]

        args, kwargs = map_tensors(self.arguments(inputs), copied)
        return args, kwargs


def _strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides, None for a tensor that is not dense and for one that repeats itself (``expand``)."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return tensor.stride() if plain and 0 not in tensor.stride() else None


def _laid_out(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """A copy with these strides: a vectorised kernel may round the last bit otherwise in another layout."""
    if strides is None or strides == tensor.stride():
        return tensor.clone()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def shapes_in(value: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value).values())


class _HalfWay(BaseException):
    """Raised in the middle of a pass; no Exception, so that the model does not catch it."""


@dataclass(frozen=True, eq=False)
class PairedPasses:
    """One pass without hooks and one under `capture`, from the same random state.

    Attributes:
        plain: The model's output without hooks.
        hooked: The model's output under `capture`.
        calls: The wanted calls in order of execution, as an observer beside the capture sees them.
        total: How many calls of the types there were.
        signatures: By the key of a call.
        parts: How many parts of the model's state were compared.
        own_changes: The parts that the pass without hooks changed.
        changes: The parts that the pass under `capture` changed.
    """

    net: LoadedModel
    pictures: Sequence[Tensor]
    selection: Selection
    types: tuple[Any, ...] | None
    plain: Any
    hooked: Any
    activations: Activations
    calls: tuple[Call, ...]
    total: int
    signatures: dict[str, CallSignature]
    parts: int
    own_changes: list[StateChange]
    changes: list[StateChange]

    @classmethod
    def run(
        cls, net: LoadedModel, pictures: Sequence[Tensor], selection: Selection, types: tuple[Any, ...] | None
    ) -> PairedPasses:
        signatures: dict[Call, CallSignature] = {}

        def note_signature(call: Call, *rest: Any) -> None:
            signatures[call] = observer.input

        before = ModelSnapshot(net.model)
        with random_states_kept():
            plain = run_model(net, pictures)
            own_changes = before.changes()
        before = ModelSnapshot(net.model)
        # an observer beside the capture: a call that the capture loses must be missed; `ordered` counts all calls
        observer = Observer(net.model, selection, types, note_signature, on_input=CallSignature.of, ordered=True)
        with random_states_kept():
            with capture(net.model, selection, types, inputs=True) as activations, observer:
                hooked = run_model(net, pictures)
            changes = before.changes()
        calls = tuple(call for call in signatures if observer.wanted(call))
        by_key = {call.key: signatures[call] for call in calls}
        total = observer.progress.total
        return cls(
            net, pictures, selection, types, plain, hooked, activations, calls, total, by_key, len(before),
            own_changes, changes,
        )  # fmt: skip

    @property
    def model(self) -> nn.Module:
        return self.net.model

    def changes_after_exception(self) -> list[StateChange]:
        """The parts of the state that a capture changes when an exception ends its pass half-way."""
        before = ModelSnapshot(self.model)
        left, until = 0, len(self.calls) // 2

        def raise_half_way(output: Any) -> None:
            nonlocal left
            left += 1
            if left > until:
                raise _HalfWay

        with random_states_kept():
            try:
                with capture(self.model, self.selection, self.types, inputs=True, transform=raise_half_way):
                    self.model(*inputs_of(self.net, self.pictures))
            except _HalfWay:
                pass
            return before.changes()


def inputs_of(net: LoadedModel, pictures: Sequence[Tensor]) -> tuple[Any, ...]:
    """The inputs of one pass, in memory of their own: the first layer may work in place."""
    inputs: tuple[Any, ...] = map_tensors(net.inputs(*pictures), lambda tensor: tensor.clone())
    return inputs


def run_model(net: LoadedModel, pictures: Sequence[Tensor]) -> Any:
    """The output of one pass; an InputError when the model refuses the pictures."""
    with model_errors_as_input_errors(net.name, pictures):
        return net.model(*inputs_of(net, pictures))
