"""Forward passes with one channel of one call at 0, many side by side wherever the model lets copies stand so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, NoMapError
from hookscope.hooks import Call, Layers, Observer, Selection, channel_axis, random_states, shape_of, tensors_in
from hookscope.interventions.ablation_copies import BatchIndependenceProbe, ChannelZeroer, Place, Site, alike, scores_of


@dataclass(frozen=True, slots=True)
class Baseline:
    """A pass with all channels.

    Attributes:
        scores: ``(N, K)`` of the classes.
        sites: The chosen calls that have channels, in order of execution.
        skipped: The keys of those that have none.
        apart: Whether each copy must have a pass of its own, for copies in one batch would not be alike.
        seed: Seed of the random numbers in each pass; None goes on from where the random state is.
    """

    scores: Tensor
    sites: tuple[Site, ...]
    skipped: tuple[str, ...]
    apart: bool
    seed: int | None = None


def baseline(
    model: nn.Module, inputs: tuple[Any, ...], layers: Layers, types: Iterable[Any], seed: int | None = None
) -> Baseline:
    """Run the model once, and see which chosen calls have channels.

    Raises:
        LayerError: no such layer, or none that runs.
        NoMapError: a layer named outright that puts out no channels.
        ModelError: a model without scores of classes.
    """
    selection = Selection.of(layers)
    look = _Look(model, selection)
    observer = Observer(
        model, [selection, "*"], types, look.on_call, on_input=_bytes_given, on_start=look.on_start, on_end=look.on_end
    )
    look.observer = observer
    scores = scores_of(model, inputs, observer, seed)
    sites, skipped = [], []
    for call, site in look.chosen():
        if site is None and selection.is_explicit(call):
            raise NoMapError(
                f"{call.key} puts out no channels", look.shapes[call.key], "choose a layer with (N, C, ...)"
            )
        if site is None:
            skipped.append(call.key)
        else:
            sites.append(site)
    idle = [name for name in observer.did_not_run if name in selection.plain_names]
    if idle or not (sites or skipped):
        raise LayerError(f"{', '.join(idle[:3]) or 'no layer'} did not run", do="choose a layer that runs: list-layers")
    return Baseline(scores, tuple(sites), tuple(skipped), look.draws or _mixes(model), seed)


def _mixes(model: nn.Module) -> bool:
    """Whether a BatchNorm goes by the mean of the batch: each copy would change what the others see."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    return any(norm.training or norm.running_mean is None for norm in norms)


class _Look:
    """What the first pass shows: calls with and without channels, and the layers around them that ran once."""

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self._selection = selection
        self._names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
        self._seen: list[tuple[Call, list[str], tuple[Any, ...] | None]] = []
        self._given: dict[str, int] = {}
        self._runs: Counter[str] = Counter()
        self.shapes: dict[str, str] = {}
        self.draws = False
        self._random: dict[str, Any] = {}
        self.observer: Observer

    def on_start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._random = random_states()

    def on_end(self) -> None:
        self.draws = random_states() != self._random

    def on_call(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._runs[call.name] += 1
        self._given[call.name] = self.observer.input
        names = self._names[id(module)]
        certain = any(self._selection.wants(name, call.call, call.index) for name in names)
        if certain or self._selection.may_want(call.index, self.observer.total):
            self._seen.append((call, names, _channels_in(output, module)))
            self.shapes[call.key] = str(shape_of(output) or "no tensor")

    def chosen(self) -> Iterator[tuple[Call, Site | None]]:
        """The chosen calls, now that their number is known; None for those without channels."""
        for call, names, found in self._seen:
            if any(self._selection.wants_of(name, call.call, call.index, self.observer.total) for name in names):
                yield call, self._site(call, *found) if found else None

    def _site(self, call: Call, part: str, shape: tuple[int, ...], axis: int, live: tuple[int, ...], size: int) -> Site:
        parts = call.name.split(".") if call.name else []
        around = [".".join(parts[:length]) for length in reversed(range(len(parts)))]
        places = [Place(name, max(size, self._given[name])) for name in around if self._runs[name] == 1]
        # without an axis of images nothing can stand side by side
        return Site(call, part, shape, axis, live, (Place(call.name, size), *places) if axis else ())


def _channels_in(output: Any, module: nn.Module) -> tuple[Any, ...] | None:
    """The first tensor with channels: part, shape, axis, channels that are not 0, and bytes."""
    for part, tensor in tensors_in(output).items():
        floating = tensor.is_floating_point() or tensor.is_quantized
        if not floating or tensor.layout != torch.strided or tensor.dim() < 2 or not tensor.numel():
            continue
        axis = channel_axis(tensor, module)
        values = tensor.dequantize() if tensor.is_quantized else tensor
        live = (values != 0).movedim(axis, 0).flatten(1).any(1).nonzero()[:, 0].tolist()
        return part, tuple(tensor.shape), axis, tuple(live), _bytes(output)
    return None


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value).values())


def _bytes_given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return _bytes((args, kwargs))


def rounds(
    model: nn.Module, inputs: tuple[Any, ...], site: Site, with_all: Baseline, batch_size: int | None
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Channels, and the scores ``(len(channels), K)`` without each, until all channels of ``site`` have been.

    The picture becomes many as late as the model allows: at the call itself, else before the nearest layer around it,
    else one channel has one pass.
    """
    if site.silent:
        yield site.silent, with_all.scores.expand(len(site.silent), -1)
    left, places, kept_apart = list(site.live), [] if with_all.apart else list(site.places), False
    while left:
        some = left[: (batch_size or places[0].fitting) if places else 1]
        # one copy beside the whole one would have to be run alone as well
        place = places[0] if places and len(some) > 1 else None
        silencer = ChannelZeroer(site, place, some)
        if place is None:
            yield some, scores_of(model, inputs, silencer.observer(model), with_all.seed)
        elif (scores := _together(model, inputs, silencer, with_all)) is not None and (
            kept_apart or _keeps_apart(model, inputs, site, place, with_all)
        ):
            kept_apart = True
            yield some, scores
        else:
            del places[0]
            kept_apart = False
            continue
        del left[: len(some)]


def _together(
    model: nn.Module,
    inputs: tuple[Any, ...],
    copies: ChannelZeroer | BatchIndependenceProbe,
    with_all: Baseline,
    tell: int | None = None,
) -> Tensor | None:
    """The scores of each changed copy, None where the model does not take that many as it takes one.

    It shows in the whole copy, which must have the scores of the pass before, and in the changed copy ``tell``, which
    must have those that it has alone: by default the one that moved most. What is calculated of the whole batch, such
    as the range of a quantisation, may be as it was for the whole copy, and be wrong for all others.
    """
    try:
        scores = scores_of(model, inputs, copies.observer(model), with_all.seed)
        if not copies.fits or scores.shape != (copies.copies, with_all.scores.shape[1]):
            return None
        if not alike(scores[-1], with_all.scores[0]):
            return None
        if tell is None:
            tell = int((scores[:-1] - scores[-1]).float().nan_to_num().abs().amax(1).argmax())
        alone = scores_of(model, inputs, copies.alone(tell).observer(model), with_all.seed)
    except Exception:  # whatever a model says when it meets another batch than it has begun with
        return None
    return scores[:-1] if alike(scores[tell], alone[0]) else None


def _keeps_apart(model: nn.Module, inputs: tuple[Any, ...], site: Site, place: Place, with_all: Baseline) -> bool:
    """Whether copies at ``place`` know nothing of each other, even beside some that are far out of any range."""
    return (
        _together(model, inputs, BatchIndependenceProbe(site, place, [2.0**-4, 2.0**10, -(2.0**10)]), with_all, 0)
        is not None
    )
