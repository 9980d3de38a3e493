"""Where channels can be ablated: calls with channels, and where one image may become a batch of copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import NoMapError
from hookscope.hooks import (
    Call,
    InputSize,
    Layers,
    Maps,
    Observer,
    Selection,
    buffers_kept,
    channel_axis,
    enclosing,
    feature_maps,
    map_tensors,
    output_of,
    random_states,
    random_states_kept,
    shape_of,
    tensors_in,
)
from hookscope.scores import class_scores

# copies of a late layer's maps are small, and more copies mean fewer passes of the layers before it
_BYTES = 2**26
_FEWEST, _MOST = 8, 1024


@dataclass(frozen=True, slots=True)
class Fork:
    """A place where one image becomes a batch of copies: the output of a call, or the inputs of a layer around it.

    ``bytes`` is the size of the tensors that are copied. If ``shared``, the layers before the site run on one copy.
    """

    name: str
    bytes: int
    shared: bool = False

    @property
    def batch_size(self) -> int:
        return min(max(_BYTES // max(self.bytes, 1), _FEWEST), _MOST)


@dataclass(frozen=True, slots=True)
class AblationSite:
    """A call and its channels.

    Attributes:
        part: The tensor of the output with the channels, as `tensors_in` names it; then its shape and channel axis.
        live: The channels that are not 0 everywhere.
        forks: Where one image may become many, the innermost first; the first is the call itself.
    """

    call: Call
    part: str
    shape: tuple[int, ...]
    axis: int
    live: tuple[int, ...]
    forks: tuple[Fork, ...]

    @property
    def channels(self) -> int:
        return self.shape[self.axis]

    @property
    def silent(self) -> list[int]:
        """The channels that are 0 everywhere: setting them to 0 changes nothing."""
        return sorted(set(range(self.channels)) - set(self.live))


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes of a model on one image, which leave it unchanged; without a seed they continue from the random state.

    ``read`` takes the scores ``(N, K)`` from the model's output: by default the scores of its classes.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    seed: int | None = None
    read: Callable[[Any], Tensor] | None = None

    def scores(self, *observers: Observer) -> Tensor:
        with torch.no_grad(), random_states_kept(), buffers_kept(self.model), ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer)
            if self.seed is not None:
                torch.manual_seed(self.seed)
            output = output_of(self.model, *map_tensors(self.inputs, torch.clone))
        with torch.no_grad():
            return class_scores(output, type(self.model).__name__) if self.read is None else self.read(output)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A pass with all channels.

    Attributes:
        scores: ``(N, K)`` of the classes.
        sites: The chosen calls with channels, in order of execution.
        skipped: The keys of the chosen calls without channels.
        separate: Whether each channel needs a pass of its own, because images of a batch affect each other.
    """

    passes: Passes
    scores: Tensor
    sites: tuple[AblationSite, ...]
    skipped: tuple[str, ...]
    separate: bool


def baseline(passes: Passes, layers: Layers, types: Iterable[Any] | None) -> Baseline:
    model, selection = passes.model, Selection.of(layers)
    calls, states = list[tuple[Call, tuple[Any, ...] | None, str]](), list[dict[str, Any]]()
    runs, input_bytes = Counter[str](), dict[str, int]()

    def on_chosen(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((call, _channels_in(output, module), str(shape_of(output) or "no tensor")))

    def on_any(call: Call, *_: Any) -> None:
        runs[call.name] += 1
        input_bytes[call.name] = every.input

    chosen = Observer(model, selection, types, on_chosen, ordered=True)
    at_ends: dict[str, Any] = dict.fromkeys(("on_start", "on_end"), lambda *_: states.append(random_states()))
    every = Observer(model, "*", ("all",), on_any, on_input=lambda module, *given: _bytes(given), **at_ends)
    scores = passes.scores(chosen, every)
    sites, skipped = [], []
    for call, facts, shape in calls:
        if not chosen.wanted(call):  # an index from the end is known only now
            continue
        if facts is not None:
            part, sizes, axis, live, size = facts
            forks = [Fork(call.name, size)]
            for name in (name for name in [*enclosing(call.name)][1:] if runs[name] == 1):
                forks += [Fork(name, size, shared=True), Fork(name, max(size, input_bytes[name]))]
            # without a batch axis there can be no copies
            sites.append(AblationSite(call, part, sizes, axis, live, tuple(forks) if axis else ()))
        elif selection.is_explicit(call):
            raise NoMapError(f"the output of {call.key} has no channels", shape, "choose a layer with (N, C, ...)")
        else:
            skipped.append(call.key)
    selection.check_named_ran(chosen.progress.did_not_run, bool(sites or skipped))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    uses_batch = any(norm.training or norm.running_mean is None for norm in norms)
    return Baseline(passes, scores, tuple(sites), tuple(skipped), states[0] != states[-1] or uses_batch)


def _channels_in(output: Any, module: nn.Module) -> tuple[Any, ...] | None:
    """The first tensor with channels: part, shape, axis, channels that are not 0, and bytes of the output."""
    for part, tensor in tensors_in(output).items():
        floating = tensor.is_floating_point() or tensor.is_quantized
        if not floating or tensor.layout != torch.strided or tensor.dim() < 2 or not tensor.numel():
            continue
        axis = channel_axis(tensor, module)
        return part, tuple(tensor.shape), axis, live_channels(tensor, axis), _bytes(output)
    return None


def live_channels(tensor: Tensor, axis: int) -> tuple[int, ...]:
    values = tensor.dequantize() if tensor.is_quantized else tensor
    return tuple((values != 0).movedim(axis, 0).flatten(1).any(1).nonzero()[:, 0].tolist())


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value).values())


def channel_maps(passes: Passes, sites: Sequence[AblationSite]) -> dict[str, Maps]:
    """The maps of the channels of each site in a pass with all channels; vectors are left out."""
    parts, maps_of = {site.call.key: site.part for site in sites}, dict[str, Maps]()
    picture = next((tensor for tensor in tensors_in(passes.inputs).values() if tensor.dim() >= 4), None)
    shown = None if picture is None else InputSize.of(picture)

    def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if call.key in parts:
            with suppress(NoMapError):
                for maps in feature_maps(map_tensors(output, torch.clone), module, shown):
                    if maps.part == parts[call.key]:
                        maps_of.setdefault(call.key, maps)

    names = Selection.of_names(sorted({site.call.name for site in sites}))
    passes.scores(Observer(passes.model, names, ("all",), on_call))
    return maps_of
