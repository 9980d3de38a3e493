"""Feature maps as one byte a value, the channels that are drawn, and a forward pass that reduces its outputs so."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field as dataclass_field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from hookscope.drawing import colours
from hookscope.drawing.scale import TOP, ChannelScale, LayerScale, Scale
from hookscope.errors import HookscopeError, LayerError, NoMapError, SelectionError, UsageError
from hookscope.geometry import FieldTracker, ReceptiveField, computed_field
from hookscope.hooks import (
    Call,
    InputSize,
    Layers,
    Maps,
    Observer,
    Shape,
    as_float,
    finite_values,
    maps_or_vectors,
    one_thread,
    output_of,
    shape_of,
    tensors_in,
)
from hookscope.models import LoadedModel, model_errors_as_input_errors

# Without chosen channels at most so many maps, or bars of single values, are drawn: more are too small to look at.
USUAL_MAPS, USUAL_BARS = 64, 24
_MEASURES: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {  # words for maps and for single values
    "abs": ("mean |value|", "|value|", lambda flat: flat.abs().mean(1)),
    "max": ("highest value", "value", lambda flat: flat.amax(1)),
    "std": ("standard deviation", "standard deviation", lambda flat: flat.std(1, correction=0)),
    "mean": ("mean value", "value", lambda flat: flat.mean(1)),
}


def channel_numbers(given: Any) -> tuple[int, ...]:
    """One number or several, each once; SelectionError for no number, one below 0, or something else."""
    listed = list(given) if isinstance(given, Iterable) else [given]
    numbers = tuple(operator.index(number) if hasattr(number, "__index__") else -1 for number in listed)
    if not numbers or min(numbers) < 0:
        raise SelectionError(f"bad channels {given!r}", do="give numbers from 0 on")
    return tuple(dict.fromkeys(numbers))


@dataclass(frozen=True, slots=True)
class ChannelChoice:
    """Which channels to draw: ranges of numbers, or the strongest ``top`` by ``measure``; by default all.

    A ``usual`` choice has all maps of a layer of up to `USUAL_MAPS` channels, else as many of the strongest ones.
    """

    numbers: tuple[tuple[int, int], ...] = ()
    top: int = 0
    measure: str = "abs"
    usual: bool = False

    @classmethod
    def parse(cls, text: Any) -> ChannelChoice:
        """Read ``all``, ``0-63,100``, ``0:64`` (without 64), ``top:16:max|std|mean|abs`` or a list of numbers."""
        if not isinstance(text, str):
            return cls(numbers=tuple((channel, channel) for channel in channel_numbers(text)))
        if text.strip() == "all":
            return cls()
        top = re.fullmatch(r"top:(\d+)(?::(abs|max|std|mean))?", text.strip())
        if top is not None and int(top[1]):
            return cls(top=int(top[1]), measure=top[2] or "abs")
        pairs = []
        for part in text.split(","):
            span = re.fullmatch(r"\s*(\d+)\s*(?:([-:])\s*(\d+)\s*)?", part)
            last = int(span[3] or span[1]) - (span[2] == ":") if span else -1
            if span is None or last < int(span[1]):
                raise SelectionError(f"bad channels '{text}'", do="write all, 0-63,100, top:16 or top:16:max|std|mean")
            pairs.append((int(span[1]), last))
        return cls(numbers=tuple(pairs))

    def for_shape(self, count: int, single: bool, named: bool = False) -> ChannelChoice:
        """The choice for a layer of ``count`` channels; of ``named`` single values the highest are the strongest."""
        if not self.usual:
            return self
        most = USUAL_BARS if single else USUAL_MAPS
        if count <= most and not single:
            return ChannelChoice()
        return ChannelChoice(top=most, measure="mean" if named and single else "abs")

    def measured(self, single: bool) -> str:
        """What the channels are ordered by, in words; empty if by their numbers."""
        return _MEASURES[self.measure][:2][single] if self.top else ""

    def of(self, values: Tensor) -> list[int]:
        """The channels of ``values`` ``(C, H, W)``, chosen `for_shape`, in drawing order; LayerError if none exists."""
        count = len(values)
        if self.top:
            strength = _MEASURES[self.measure][2](values.flatten(1).nan_to_num(0.0, 0.0, 0.0))
            return [int(at) for at in strength.argsort(descending=True, stable=True)[: self.top]]
        if not self.numbers:
            return list(range(count))
        chosen = [at for first, last in self.numbers for at in range(first, min(last, count - 1) + 1)]
        if not chosen:
            raise LayerError(f"no channel {_text(self.numbers)}", f"there are {count}: 0 to {count - 1}")
        return list(dict.fromkeys(chosen))

    def beyond(self, channels: Collection[int]) -> str:
        """The ranges that end outside a layer with the chosen ``channels``, as text; empty if none does."""
        return _text((first, last) for first, last in self.numbers if last not in channels)


def _text(ranges: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{first}-{last}" if first != last else f"{first}" for first, last in ranges)


@dataclass(frozen=True)
class Tiles:
    """Feature maps as palette indices ``levels`` ``(C, H, W)``: values below ``LEVELS``, else NaN, Inf and constants.

    ``low`` and ``high`` are the values of the first and the last level of each channel. ``strength`` is the range of
    its finite values, or the absolute value of a 1 × 1 map, which is never ``constant``. ``nonfinite`` counts NaN and
    Inf. The layer has ``total`` channels; ``order`` is what the drawn ones are ordered by, empty for their numbers.
    ``values`` holds the value of each 1 × 1 map.
    """

    channels: list[int]
    levels: NDArray[np.uint8]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    strength: NDArray[np.float64]
    constant: NDArray[np.bool_]
    nonfinite: NDArray[np.int64]
    shared: bool
    scale: str
    total: int
    order: str = ""
    values: tuple[float, ...] = ()


def reduce_maps(
    values: Tensor, choice: ChannelChoice | None = None, scale: Scale | None = None, named: bool = False
) -> Tiles:
    """Choose channels of ``values`` ``(C, H, W)`` and convert every value to its palette index.

    A map of one position has no range, so 1 × 1 maps are drawn on the scale of the layer instead of ``channel``.
    """
    if not values.numel():
        raise NoMapError(f"an output of {'x'.join(map(str, values.shape))} has no values")
    total = values.shape[0]
    single = values.shape[1] * values.shape[2] == 1
    choice, scale = (choice or ChannelChoice()).for_shape(total, single, named), scale or ChannelScale()
    channels = choice.of(values)
    if single and not scale.shared:
        scale = LayerScale()
    lowest, highest, nonfinite = finite_extremes(values)
    low, high = (
        torch.as_tensor(limit, dtype=lowest.dtype, device=lowest.device).expand_as(lowest)
        for limit in scale.limits(values, lowest, highest)
    )
    if channels != list(range(values.shape[0])):
        values, lowest, highest, nonfinite, low, high = (
            tensor[channels] for tensor in (values, lowest, highest, nonfinite, low, high)
        )
    constant = (lowest == highest) & (nonfinite == 0) & (not single)
    levels = _palette_indices(values, scale.to_levels(values, low, high), bool(nonfinite.any()))
    if not scale.shared:
        levels[constant] = colours.CONSTANT
    strength = lowest.abs() if single else highest - lowest
    strength = torch.where(lowest <= highest, strength.nan_to_num(), 0.0)  # 0 if no value is finite
    tensors = {"levels": levels, "low": low, "high": high, "strength": strength}
    tensors |= {"constant": constant, "nonfinite": nonfinite}
    facts: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    facts |= {"shared": scale.shared, "scale": str(scale), "total": total, "order": choice.measured(single)}
    return Tiles(channels, **facts, values=tuple(values.flatten().tolist()) if single else ())


def _palette_indices(values: Tensor, levels: Tensor, nonfinite: bool) -> Tensor:
    """Round and clip ``levels`` in place, and return them as bytes; NaN and Inf in ``values`` have fixed indices."""
    levels = levels.round_().clamp_(0, TOP)
    if not nonfinite:
        return levels.to(torch.uint8)
    indices = levels.nan_to_num(0.0).to(torch.uint8)
    indices[torch.isnan(values)] = colours.NAN
    indices[values == math.inf] = colours.PLUS_INF
    indices[values == -math.inf] = colours.MINUS_INF
    return indices


def finite_extremes(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lowest and highest finite value and the count of NaN and Inf of each channel: three ``(C,)`` tensors.

    A channel without a finite value has lowest +inf and highest -inf.
    """
    flat = values.flatten(1)
    low, high = flat.amin(1), flat.amax(1)  # in a fifth of the time that aminmax takes
    # one pass in the usual case: any NaN or Inf shows in the extremes
    if bool(torch.isfinite(low).all()) and bool(torch.isfinite(high).all()):
        return low.double(), high.double(), torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    finite = torch.isfinite(flat)
    low = flat.masked_fill(~finite, math.inf).amin(1)
    high = flat.masked_fill(~finite, -math.inf).amax(1)
    return low.double(), high.double(), (~finite).sum(1)


@dataclass(frozen=True, slots=True)
class SheetPart:
    """One part of an output: its axes, which item of the batch it is, its tiles; names of all channels or none."""

    name: str
    axes: str
    item: int
    items: int
    frames: int
    tiles: Tiles
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ActivationSummary:
    """Statistics of the finite values of an output, and the parts that are feature maps, as tiles.

    ``low``, ``mean`` and ``high`` are None without a finite value; ``dead`` counts the channels whose map is constant,
    ``nonfinite`` the values NaN and Inf. ``values`` holds a copy of the output's tensors, with ``keep``. ``field`` is
    what a unit sees of an input of ``input_size``, if the output is one tensor and that is known.
    """

    shape: Shape
    low: float | None
    mean: float | None
    high: float | None
    dead: int
    nonfinite: int
    parts: tuple[SheetPart, ...]
    values: Mapping[str, Tensor] = dataclass_field(default_factory=dict)
    field: ReceptiveField | None = None
    input_size: InputSize | None = None


def reduce_output(
    output: Any,
    module: nn.Module | None = None,
    input_size: InputSize | None = None,
    choice: ChannelChoice | None = None,
    scale: Scale | None = None,
    names: Sequence[str] = (),
    keep: bool = False,
) -> ActivationSummary:
    """Measure an output and reduce its feature maps to one byte a value.

    The type of ``module`` helps to find the channel axis, ``input_size`` the proportions of a token grid. ``names`` are
    for the channels of a part with as many. NoMapError if no part of the output is a feature map or a vector,
    LayerError if none of the chosen channels exists.
    """
    with one_thread():
        maps = maps_or_vectors(output, module, input_size)
        drawn = {m.part for m in maps}
        low, mean, high, nonfinite = measure([tensor for part, tensor in tensors_in(output).items() if part in drawn])
        parts = []
        for m in maps:
            own = tuple(names) if len(names) == len(m.values) else ()
            tiles = reduce_maps(m.values, choice, scale, bool(own))
            parts.append(SheetPart(m.label, m.axes, m.item, m.items, m.frames, tiles, own))
        kept = {part: tensor.detach().cpu().clone() for part, tensor in tensors_in(output).items()} if keep else {}
        return ActivationSummary(shape_of(output), low, mean, high, _dead(maps), nonfinite, tuple(parts), kept)


def measure(output: Any) -> tuple[float | None, float | None, float | None, int]:
    """Lowest, mean and highest finite value of all tensors in ``output``, and the count of NaN and Inf."""
    parts = [finite_values(as_float(tensor)) for tensor in tensors_in(output).values()]
    bad, count = sum(part.nan + part.inf for part in parts), sum(part.values.numel() for part in parts)
    if not count:
        return None, None, None, bad
    low = min(part.min for part in parts if part.min is not None)
    high = max(part.max for part in parts if part.max is not None)
    return low, sum(float(part.values.sum(dtype=torch.float64)) for part in parts) / count, high, bad


def _dead(maps: Sequence[Maps]) -> int:
    """Count the channels of each part that are constant in every drawn item of the batch."""
    constant: dict[str, Any] = {}
    for m in maps:
        if m.values.shape[1] * m.values.shape[2] > 1:
            low, high, nonfinite = finite_extremes(m.values)
            constant[m.part] = constant.get(m.part, True) & (low == high) & (nonfinite == 0)
    return sum(int(channels.sum()) for channels in constant.values())


@dataclass(frozen=True, slots=True)
class PassResult:
    """The selected calls of one pass, reduced; those without feature maps, and why; layers that did not run."""

    summaries: tuple[tuple[Call, ActivationSummary], ...]
    without_map: tuple[tuple[Call, HookscopeError], ...]
    did_not_run: tuple[str, ...]


def run_and_reduce(
    net: LoadedModel,
    inputs: Iterable[Tensor],
    layers: Layers = "0:",
    types: Iterable[Any] | None = None,
    choice: ChannelChoice | None = None,
    scale: Scale | None = None,
    keep: bool = False,
) -> PassResult:
    """Run ``net`` once on prepared images ``(3, H, W)`` and reduce the output of every selected call.

    The pass stops after the last selected call if the selection determines it: indices from the start and
    ``name#call`` do. With ``keep`` each summary holds the exact values too.

    Raises:
        LayerError: nothing was selected, or no layer has a chosen channel.
        NoMapError: no selected call has a feature map.
        InputError: the model refuses the image.
    """
    images = list(inputs)
    input_size = input_size_of(images[0])
    class_layers = layers_of_classes(net.model, net.categories or ())
    tracker = FieldTracker()
    summaries: list[tuple[Call, ActivationSummary]] = []
    without_map: list[tuple[Call, HookscopeError]] = []

    def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        try:
            names = names_of_channels(net, call, module) if module in class_layers else ()
            chosen = choice or ChannelChoice(usual=True)
            with torch._C._DisableTorchDispatch():  # operations that are not part of the pass
                summary = reduce_output(output, module, input_size, chosen, scale, names, keep)
            field, is_known = computed_field(tracker, output, module) if isinstance(output, Tensor) else (None, False)
            with_field = replace(summary, field=field, input_size=tracker.shown) if is_known else summary
            summaries.append((call, with_field))
        except UsageError:
            raise
        except HookscopeError as error:  # no map, or no chosen channel: other layers can still be drawn
            without_map.append((call, error))
        if observer.selection.from_the_end:  # drop what can no longer be selected
            summaries[:] = [item for item in summaries if observer.wants(item[0]) or observer.may_want(item[0])]

    def on_start(*args: Any) -> None:
        summaries.clear()
        without_map.clear()

    observer = Observer(net.model, layers, types, on_call, on_start=on_start, ordered=True)
    if observer.selection.end_is_known:
        observer.stop_early()
    arguments = net.inputs(*images)
    tracker.follow(arguments)
    with model_errors_as_input_errors(net.name, images), torch.no_grad(), observer, tracker:
        output_of(net.model, *arguments)
    summaries = [item for item in summaries if observer.wanted(item[0])]
    without_map = [item for item in without_map if observer.wanted(item[0])]
    if not summaries:
        raise _nothing_to_draw(net, without_map, observer)
    did_not_run = observer.progress.did_not_run if observer.progress.complete else ()
    return PassResult(tuple(summaries), tuple(without_map), tuple(did_not_run))


def input_size_of(image: Tensor) -> InputSize:
    """The size of a prepared image ``(3, H, W)`` or clip ``(3, T, H, W)``."""
    return InputSize.of(image[None])


def _nothing_to_draw(
    net: LoadedModel, without_map: list[tuple[Call, HookscopeError]], observer: Observer
) -> HookscopeError:
    if not without_map:
        idle = ", ".join(observer.progress.did_not_run[:3]) or "nothing"
        return NoMapError(f"nothing to draw: {idle} did not run", do="choose another layer")
    call, error = without_map[0]
    if not isinstance(error, NoMapError):
        return type(error)(f"{error.asked} in {call.key or call.type}", error.exists, error.do)
    convolutions = [
        name for name, module in net.model.named_modules() if type(module).__name__[:6] in ("Conv2d", "Conv3d")
    ]
    what = f"layers with feature maps are convolutions, such as {convolutions[-1]}" if convolutions else ""
    return NoMapError(f"nothing to draw in {call.key or 'the model'} ({call.type}): {error.asked}", what)


def layers_of_classes(model: nn.Module, categories: Sequence[str]) -> set[nn.Module]:
    """The layers whose channels may be the classes: the last that take as many channels, and those after them.

    A hidden layer with as many channels as there are classes is followed by a layer that takes them.
    """
    modules, sizes = list(model.modules()), (len(categories), (len(categories),))
    widths = ("in_channels", "in_features", "num_features", "normalized_shape")
    taken = [at for at, module in enumerate(modules) for width in widths if getattr(module, width, None) in sizes]
    return set(modules[max(taken, default=0) :])


def names_of_channels(net: LoadedModel, call: Call, module: nn.Module) -> Sequence[str]:
    """The names of the classes, for a layer of `layers_of_classes`; a head of a detector has them for each anchor."""
    classes = net.categories or ()
    anchors, rest = divmod(getattr(module, "out_channels", 0), max(1, len(classes)))
    if net.family == "detection" and anchors > 1 and not rest and ("cls" in call.name or "classif" in call.name):
        return [f"{name}, anchor {anchor}" for anchor in range(anchors) for name in classes]
    return classes


def input_frames(net: LoadedModel, inputs: Iterable[Tensor]) -> list[list[Image.Image]]:
    """The RGB frames of each prepared image as the network receives them; a detector resizes the image itself."""
    images = list(inputs)
    if net.family != "detection":
        clips = [image.unbind(1) if image.dim() == 4 else [image] for image in images]
        return [[net.preprocess.denormalise(frame) for frame in frames] for frames in clips]
    transform: Any = net.model.transform
    with torch.no_grad():
        batch = transform([images[0]])[0].tensors[0].cpu()
    mean, std = torch.tensor(transform.image_mean), torch.tensor(transform.image_std)
    return [[to_pil_image((batch * std[:, None, None] + mean[:, None, None]).clamp(0, 1))]]
