"""Forward passes with one channel of one call at 0, many side by side wherever the model lets copies stand so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hookscope.differentiable import buffers_kept
from hookscope.errors import LayerError, NoMapError
from hookscope.layers import Call, Layers, Selection
from hookscope.maps import channel_axis
from hookscope.observe import Observer
from hookscope.scores import class_scores
from hookscope.tensors import map_tensors, shape_of, tensors_in
from hookscope.untouched import random_states, random_states_kept

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Baseline", "Place", "Site", "baseline", "rounds"]

# copies of a late layer's maps cost little, and the more there are, the rarer the layers before it run
_BYTES = 2**24
_FEWEST, _MOST = 8, 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where one picture may become many: what a call put out, or what a layer around it was given.

    Attributes:
        name: The layer.
        bytes: Of what becomes many.
    """

    name: str
    bytes: int

    @property
    def fitting(self) -> int:
        """How many channels one pass takes well."""
        return min(max(_BYTES // max(self.bytes, 1), _FEWEST), _MOST)


@dataclass(frozen=True, slots=True)
class Site:
    """A call and its channels.

    Attributes:
        call: The call.
        part: Which tensor of its output has them, as `hookscope.tensors.tensors_in` names it.
        shape: Of that tensor.
        axis: Which axis the channels are on.
        live: The channels that are not 0 everywhere.
        places: Where one picture may become many, the innermost first; the first is the call itself.
    """

    call: Call
    part: str
    shape: tuple[int, ...]
    axis: int
    live: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def channels(self) -> int:
        """How many there are."""
        return self.shape[self.axis]

    @property
    def silent(self) -> list[int]:
        """The channels that are 0 everywhere: without them everything is as it is with them."""
        live = set(self.live)
        return [channel for channel in range(self.channels) if channel not in live]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A pass with all channels.

    Attributes:
        scores: ``(N, K)`` of the classes.
        sites: The chosen calls that have channels, in order of execution.
        skipped: The keys of those that have none.
        apart: Whether each copy must have a pass of its own, for copies in one batch would not be alike.
    """

    scores: Tensor
    sites: tuple[Site, ...]
    skipped: tuple[str, ...]
    apart: bool


def baseline(model: nn.Module, inputs: tuple[Any, ...], layers: Layers, types: Iterable[Any]) -> Baseline:
    """Run the model once, and see which chosen calls have channels.

    Raises:
        LayerError: no such layer, or none that runs.
        NoMapError: a layer named outright that puts out no channels.
        ModelError: a model without scores of classes.
    """
    texts = [str(layers)] if isinstance(layers, str | int) else [str(text) for text in layers]
    asked = {term.strip().removesuffix("#0").lstrip("+") for text in texts for term in text.split(",")}
    look = _Look(model, Selection(texts))
    observer = Observer(
        model, [*texts, "*"], types, look.on_call, on_input=_bytes_given, on_start=look.on_start, on_end=look.on_end
    )
    look.observer = observer
    scores = _scores(model, inputs, observer)
    sites, skipped = [], []
    for call, site in look.chosen():
        if site is None and asked & {call.name, call.key, str(call.index)}:
            raise NoMapError(
                f"{call.key} puts out no channels", look.shapes[call.key], "choose a layer with (N, C, ...)"
            )
        if site is None:
            skipped.append(call.key)
        else:
            sites.append(site)
    idle = [name for name in observer.did_not_run if name in asked]
    if idle or not (sites or skipped):
        raise LayerError(f"{', '.join(idle[:3]) or 'no layer'} did not run", do="choose a layer that runs: list-layers")
    return Baseline(scores, tuple(sites), tuple(skipped), look.draws or _mixes(model))


def _mixes(model: nn.Module) -> bool:
    """Whether a BatchNorm goes by the mean of the batch: each copy would change what the others see."""
    import torch

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
    import torch

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
    left, places = list(site.live), [] if with_all.apart else list(site.places)
    while left:
        some = left[: (batch_size or places[0].fitting) if places else 1]
        silencer = _Silencer(site, places[0] if places else None, some)
        if not places:
            yield some, _scores(model, inputs, silencer.observer(model))
        elif (scores := _together(model, inputs, silencer, with_all.scores)) is not None:
            yield some, scores
        else:
            del places[0]
            continue
        del left[: len(some)]


def _together(model: nn.Module, inputs: tuple[Any, ...], silencer: _Silencer, with_all: Tensor) -> Tensor | None:
    """The scores without each channel, None where the model does not take that many copies as it takes one."""
    try:
        scores = _scores(model, inputs, silencer.observer(model))
    except Exception:  # whatever a model says when it meets another batch than it has begun with
        return None
    if not silencer.fits or scores.shape != (silencer.copies, with_all.shape[1]):
        return None
    return scores[:-1] if _alike(scores[-1], with_all[0]) else None


def _scores(model: nn.Module, inputs: tuple[Any, ...], observer: Observer) -> Tensor:
    """The scores of a pass that leaves nothing behind; it may write to its inputs, which are copies."""
    import torch

    with torch.no_grad(), random_states_kept(), buffers_kept(model), observer:
        output = model(*map_tensors(inputs, torch.clone))
    return class_scores(output, type(model).__name__)


class _Silencer:
    """One pass: copies of the picture from a place on, channel ``channels[i]`` at 0 in copy ``i``, the last one whole.

    Without a place there is one picture, and one channel.
    """

    def __init__(self, site: Site, place: Place | None, channels: Sequence[int]) -> None:
        self._site, self._place, self._channels = site, place, channels
        self.copies = len(channels) + 1 if place else 1
        self.fits = False

    def observer(self, model: nn.Module) -> Observer:
        """What puts it on ``model``."""
        names = {self._site.call.name} | ({self._place.name} if self._place else set())
        text = rf"re:\A(?:{'|'.join(map(re.escape, sorted(names)))})\Z"
        before = self._before if self._place and self._place.name != self._site.call.name else None
        return Observer(model, text, ("all",), self._after, on_before=before)

    def _before(self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._place is None or call.name != self._place.name:
            return None
        return map_tensors((args, kwargs), partial(_repeated, count=self.copies))

    def _after(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if (call.name, call.call) != (self._site.call.name, self._site.call.call):
            return None
        if self._place is not None and self._place.name == call.name:
            output = map_tensors(output, partial(_repeated, count=self.copies))
        wanted = tensors_in(output)[self._site.part]
        return map_tensors(output, lambda tensor: self._silenced(tensor) if tensor is wanted else tensor)

    def _silenced(self, tensor: Tensor) -> Tensor:
        import torch

        rows, *rest = self._site.shape
        values = tensor.dequantize() if tensor.is_quantized else tensor.clone()
        if tuple(values.shape) != (rows * self.copies, *rest):
            return tensor
        # a layer that works on parts of the picture has them on the first axis, too, in the order of the pictures?
        pictures = values.tensor_split(self.copies)
        self.fits = _alike(pictures[0], pictures[-1])
        for picture, channel in zip(pictures, self._channels, strict=False):
            picture.select(self._site.axis, channel).zero_()
        if tensor.is_quantized:  # activations have one scale
            values = torch.quantize_per_tensor(values, tensor.q_scale(), tensor.q_zero_point(), tensor.dtype)
        return values


def _repeated(tensor: Tensor, count: int) -> Tensor:
    import torch

    if not tensor.dim():
        return tensor
    if tensor.is_quantized:
        return torch.cat([tensor] * count)
    return tensor.repeat(count, *[1] * (tensor.dim() - 1))


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by no more than what another batch size changes in rounding."""
    import torch

    kind = one.dtype
    one, other = (part if kind == torch.float64 else part.float() for part in (one, other))
    # 32 bits may be multiplied with 10 of precision there
    rounding = 2.0**-10 if one.is_cuda and kind == torch.float32 else torch.finfo(kind).eps
    largest = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=largest * rounding**0.65, equal_nan=True)
