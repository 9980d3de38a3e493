"""One pass of a model without hooks and one under `capture`, and everything both left: what verification judges."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import (
    Activations,
    Call,
    Layers,
    ModelSnapshot,
    Observer,
    StateChange,
    capture,
    map_tensors,
    random_states_kept,
    split_inputs,
    tensors_in,
)
from hookscope.models import LoadedModel, model_errors_as_input_errors
from hookscope.verification.fx_reference import Edges


def noise_pictures(net: LoadedModel, seed: int = 0) -> list[Tensor]:
    """Prepared pictures of seeded noise in the size ``net`` is made for; the global random state is not touched.

    Returns:
        One tensor ``(3, H, W)``, or ``(3, T, H, W)`` for clips, two for optical flow; uniform in 0..1 for detection
        and in -1..1 for optical flow, standard normal for the others.
    """
    wanted = net.preprocess
    frames = [wanted.frames] if net.family == "video" else []
    shape = [wanted.channels, *frames, *(wanted.size or wanted.default_size)]
    generator = torch.Generator().manual_seed(seed)
    count = 2 if net.family == "optical_flow" else 1
    if net.family == "detection":
        noise = [torch.rand(shape, generator=generator)]
    elif net.family == "optical_flow":
        noise = [torch.rand(shape, generator=generator) * 2 - 1 for _ in range(count)]
    else:
        noise = [torch.randn(shape, generator=generator)]
    return [picture.to(wanted.device, wanted.dtype) for picture in noise]


@dataclass(frozen=True, slots=True)
class CallSignature:
    """How a call was given its tensors, which its record alone does not tell.

    Attributes:
        args: How many positional inputs there were.
        keywords: Whether there were others.
        same: For each tensor the place of the first one that is the same object: attention looks whether its are.
        shapes: Of each tensor.
    """

    args: int
    keywords: bool
    same: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSignature:
        """The form of a call, as a pre-hook sees it."""
        tensors = list(tensors_in((args, kwargs)).values())
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))
        return cls(len(args), bool(kwargs), same, _shapes(tensors))

    def given(self, recorded: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` of what `Activations.inputs` holds of the call."""
        return split_inputs(recorded, self.args, self.keywords)

    def copied(self, recorded: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same in memory of its own: a layer may work in place."""
        copies: list[Tensor] = []

        def twin(tensor: Tensor) -> Tensor:
            first = self.same[len(copies)]
            copies.append(copies[first] if first < len(copies) else tensor.clone())
            return copies[-1]

        args, kwargs = map_tensors(self.given(recorded), twin)
        return args, kwargs


class _Left(BaseException):
    """Raised in the middle of a pass; no Exception, so that the model does not catch it."""


@dataclass(eq=False)
class PairedPasses:
    """One pass without hooks and one under `capture`, and what both left; the checks draw on it.

    Attributes:
        net: The loaded model.
        pictures: Prepared.
        layers: The selection.
        types: Class names that indices count.
        plain: What the model put out without hooks.
        hooked: What it put out under `capture`.
        kept: What `capture` recorded.
        calls: The wanted calls, in order of execution.
        total: How many calls of the types there were.
        forms: How each call was given its tensors.
        shapes: Of each call the shapes of what really went in and came out.
        edges: What feeds what, once the graph has been run.
        facts: How many things were looked at for changes.
        by_itself: What changed in the pass without hooks.
        changes: What changed in the pass under `capture`.
    """

    net: LoadedModel
    pictures: list[Tensor]
    layers: Layers
    types: tuple[Any, ...]
    plain: Any = None
    hooked: Any = None
    kept: Activations = field(default=None)  # type: ignore[assignment]
    calls: tuple[Call, ...] = ()
    total: int = 0
    forms: dict[str, CallSignature] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    edges: Edges | None = None
    facts: int = 0
    by_itself: list[StateChange] = field(default_factory=list)
    changes: list[StateChange] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """The module that is looked into."""
        return self.net.model

    def inputs(self) -> tuple[Any, ...]:
        """The inputs of one pass, in memory of their own: the first layer may work in place."""
        inputs: tuple[Any, ...] = map_tensors(self.net.inputs(*self.pictures), lambda tensor: tensor.clone())
        return inputs

    def take(self) -> None:
        """Run the model without hooks and with them, from the same random state."""
        state = ModelSnapshot(self.model)
        with random_states_kept():
            self.plain = self.run()
            self.by_itself = state.changes()
        state = ModelSnapshot(self.model)
        self.facts = len(state)
        with random_states_kept():
            self._capture()
            self.changes = state.changes()

    def run(self) -> Any:
        """One pass; an InputError when the model refuses the pictures."""
        with model_errors_as_input_errors(self.net.name, self.pictures):
            return self.model(*self.inputs())

    def _capture(self) -> None:
        calls: dict[Call, CallSignature] = {}

        def note_form(call: Call, *rest: Any) -> None:
            calls[call] = observer.input

        # beside the capture, not from it: a call that it loses must be missed
        observer = Observer(self.model, self.layers, self.types, note_form, on_input=CallSignature.of)
        with capture(self.model, self.layers, self.types, inputs=True) as self.kept, observer:
            self.hooked = self.run()
        self.calls = tuple(call for call in calls if observer.wanted(call))
        self.forms = {call.key: calls[call] for call in self.calls}
        self.shapes = {key: (*form.shapes, *_shapes(self.kept.get(key))) for key, form in self.forms.items()}
        self.total = observer.total

    def recorded(self, key: str) -> Any:
        """What went in, as `capture` recorded it."""
        return self.kept.inputs[key]

    def leave_early(self) -> None:
        """A capture that an exception ends half-way."""
        left = _Left()
        until = len(self.calls) // 2
        seen = 0

        def raise_half_way(output: Any) -> None:
            nonlocal seen
            seen += 1
            if seen > until:
                raise left

        with (
            contextlib.suppress(_Left),
            capture(self.model, self.layers, self.types, inputs=True, transform=raise_half_way),
        ):
            self.model(*self.inputs())


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value).values())
