"""Where channels can be ablated: calls with channels, and where one image may become a batch of copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
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
    class_names,
    enclosing,
    feature_maps,
    is_single,
    map_tensors,
    matches_type,
    random_states,
    random_states_kept,
    shape_of,
    tensors_in,
    types_of,
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

    def scores(self, observer: Observer) -> Tensor:
        with torch.no_grad(), random_states_kept(), buffers_kept(self.model), observer:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            output = self.model(*map_tensors(self.inputs, torch.clone))
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
    recorder = _SiteRecorder(model, selection, types)
    observer = recorder.observer = Observer(
        model,
        [selection, "*"],
        types,
        recorder.on_call,
        on_input=lambda module, args, kwargs: _bytes((args, kwargs)),
        on_start=recorder.on_start,
        on_end=recorder.on_end,
        ordered=True,
    )
    scores = passes.scores(observer)
    sites, skipped = [], []
    for call, site in recorder.chosen():
        if site is not None:
            sites.append(site)
        elif selection.is_explicit(call):
            do = "choose a layer with (N, C, ...)"
            raise NoMapError(f"the output of {call.key} has no channels", recorder.shapes[call.key], do)
        else:
            skipped.append(call.key)
    selection.check_named_ran(observer.progress.did_not_run, bool(sites or skipped))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    uses_batch = any(norm.training or norm.running_mean is None for norm in norms)
    return Baseline(passes, scores, tuple(sites), tuple(skipped), recorder.draws or uses_batch)


class _SiteRecorder:
    """Records in the first pass the calls with and without channels, and the layers around them that ran once."""

    def __init__(self, model: nn.Module, selection: Selection, types: Iterable[Any] | None) -> None:
        self._selection, self._all_types = selection, types_of(model, types)[1]
        self._names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
        self._calls: list[tuple[Call, list[str], bool, tuple[Any, ...] | None]] = []
        self._input_bytes: dict[str, int] = {}
        self._runs: Counter[str] = Counter()
        self._random: dict[str, Any] = {}
        self.shapes: dict[str, str] = {}
        self.draws = False
        self.observer: Observer

    def on_start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._random = random_states()

    def on_end(self) -> None:
        self.draws = random_states() != self._random

    def on_call(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._runs[call.name] += 1
        self._input_bytes[call.name] = self.observer.input
        names = self._names[id(module)]
        in_all = matches_type(class_names(module), self._all_types, is_single(call.name, module))
        certain = any(self._selection.wants(name, call.call, call.index, None, in_all) for name in names)
        if certain or self._selection.may_want(call.index, self.observer.progress.total):
            self._calls.append((call, names, in_all, _channels_in(output, module)))
            self.shapes[call.key] = str(shape_of(output) or "no tensor")

    def chosen(self) -> Iterator[tuple[Call, AblationSite | None]]:
        """The chosen calls, now that their number is known; None for those without channels."""
        total = self.observer.progress.total
        for call, names, in_all, facts in self._calls:
            if any(self._selection.wants(name, call.call, call.index, total, in_all) for name in names):
                yield call, self._site(call, *facts) if facts else None

    def _site(
        self, call: Call, part: str, shape: tuple[int, ...], axis: int, live: tuple[int, ...], size: int
    ) -> AblationSite:
        _, *around = enclosing(call.name)
        forks = [Fork(call.name, size)]
        for name in (name for name in around if self._runs[name] == 1):
            forks += [Fork(name, size, shared=True), Fork(name, max(size, self._input_bytes[name]))]
        # without a batch axis there can be no copies
        return AblationSite(call, part, shape, axis, live, tuple(forks) if axis else ())


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
    parts, found = {site.call.key: site.part for site in sites}, dict[str, Maps]()
    picture = next((tensor for tensor in tensors_in(passes.inputs).values() if tensor.dim() >= 4), None)
    shown = None if picture is None else InputSize.of(picture)

    def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if call.key in parts:
            with suppress(NoMapError):
                for maps in feature_maps(map_tensors(output, torch.clone), module, shown):
                    if maps.part == parts[call.key]:
                        found.setdefault(call.key, maps)

    names = Selection.of_names(sorted({site.call.name for site in sites}))
    passes.scores(Observer(passes.model, names, ("all",), on_call))
    return found
