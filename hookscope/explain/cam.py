"""Class activation maps: the places of a layer's feature maps that support a class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.display import Rows
from hookscope.errors import InputError, LayerError, NoMapError, UsageError, check_whole
from hookscope.explain.cam_maps import (
    ClassActivationMap,
    MapLayer,
    before_head,
    connected_layers,
    default_layer,
    in_place_of,
    layers_with_maps,
    picture_of,
    resized,
    with_gradient,
)
from hookscope.explain.cam_methods import (
    ATTENTION_METHODS,
    CAM_METHODS,
    AttentionMethod,
    CamInputs,
    CamMethod,
    follow_relevance,
    gradient_free,
    gradients_of,
    method_named,
    name_methods,
)
from hookscope.hooks import (
    AnyModel,
    Call,
    InputSize,
    Layers,
    Selection,
    capture,
    differentiable,
    leaves_of,
    map_tensors,
    module_of,
    names_of,
    output_of,
    passed_on,
    repeated,
    tensors_in,
)
from hookscope.interventions import channel_scores
from hookscope.models import takes_inputs
from hookscope.scores import FIND_NON_FINITE, Score, ScoreTarget, check_finite_score, gives_boxes, objectives

_FACTORS = (1.0, 0.9, 1.1)  # of the smoothing, as in grad-cam
Progress = Callable[[int, int], None]
_FIRST = {"cpu": 4}  # images in the first pass; on a CPU each larger batch takes its memory anew from the system


@takes_inputs
def class_activation_maps(
    model: AnyModel,
    inputs: Any,
    layers: Layers | None = None,
    target: Any = "top:1",
    method: str = "gradcam",
    *,
    types: Iterable[Any] | None = None,
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    ordered: bool = False,
    smooth: bool = False,
    on_progress: Progress | None = None,
    on_skip: Callable[[Call, NoMapError], None] | None = None,
) -> Rows[ClassActivationMap]:
    """Compute the class activation maps of one image: class by class, the layers in order of execution.

    The model runs in eval mode, with gradients even under ``no_grad``. Its modes, flags, ``.grad``, hooks and the
    random state stay as they are. The activation is what the layer returned, also where the next layer works in place.

    Args:
        model: Any eager module with a score for each class.
        inputs: The image ``(1, 3, H, W)``, or the tuple of positional inputs; for detectors of torchvision a list of
            the image ``(3, H, W)``.
        layers: A selection, see `Selection`. By default the last layer with a map that the score depends on, without
            pooling layers and maps of one position; for segmentation and detection, the last before the head.
            For the methods of attention the calls of attention up to which it is followed, by default the last.
        target: A class index, a class name or ``top:K``; or a `ScoreTarget`, or a function from the model's output for
            ``N`` images to ``N`` numbers.
        method: One of `CAM_METHODS`, or of `ATTENTION_METHODS` for transformers; the docstrings of their functions give
            paper and formula.
        types: Class names that indices in ``layers`` count; None for Conv2d (Conv3d in models of clips).
        categories: Names of the classes.
        batch_size: Channels in one pass of the methods that run the model once per channel; None for as many as fit
            well: ablationcam as `ablate_each`, scorecam 4 on a CPU, else 16, on a GPU doubled while its memory is free.
        ordered: Also count `Call.order`, which takes a hook on every layer, as for `capture`.
        smooth: Average the maps of six variants: the image, its mirror image, and both times 0.9 and 1.1. The scores
            are in the image. Takes classes only: a mirror image has its boxes and regions elsewhere.
        on_progress: Called by these methods with channels done and in all.
        on_skip: Called with calls without a map that a pattern, a range or ``all`` selects; without it they are errors.

    Use a model in one thread at a time: meanwhile it has hooks and is in eval mode.

    Raises:
        TargetError: for an unknown class.
        LayerError: for an unknown layer, or one that the score does not depend on.
        NoMapError: for a layer without a map, such as a vector or a single position.
        ModelError: for a model without scores of classes.
        InputError: for a map that is not finite.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> [cam] = class_activation_maps(net, torch.ones(1, 3, 8, 8), target=2)
        >>> cam.call.name, cam.values.shape, cam.prediction.index
        ('0', (6, 6), 2)
    """
    model, categories = module_of(model), names_of(model, categories)
    both: dict[str, CamMethod | AttentionMethod] = {**CAM_METHODS, **ATTENTION_METHODS}
    method, how = method_named(method, both)
    check_whole("batch size", batch_size, optional=True)
    size = _input_size(inputs)
    if smooth:
        maps_of = partial(
            class_activation_maps, model, method=method, types=types, categories=categories, batch_size=batch_size,
            ordered=ordered, on_skip=on_skip,
        )  # fmt: skip
        return _smoothed(maps_of, inputs, layers, target, on_progress)
    if isinstance(how, AttentionMethod):
        return Rows(_maps_of_attention(model, inputs, layers, target, method, categories, size))
    with differentiable(model, parameters=False):
        with capture(model, "*" if layers is None else layers, types, ordered=ordered, leaves=True) as activations:
            output = output_of(model, *map_tensors(inputs, lambda tensor: tensor.detach().clone()))
        goals = objectives(target, output, categories, type(model).__name__, (size.height, size.width))
        for goal in goals:
            check_finite_score(goal.score)
        scores = [goal.of(output)[0] for goal in goals]
        pick: Callable[[list[MapLayer], Tensor], MapLayer] = with_gradient
        if layers is None:
            groups = [before_head(model, activations, output, size)]
            pick = partial(default_layer, model, size, how.gradient)
        else:
            groups = layers_with_maps(model, activations, layers, size, on_skip)
        several = gives_boxes(output)  # boxes of one image depend on different levels of a pyramid
        chosen = [[pick(parts, score) for parts in groups] for score in (scores if several else scores[:1])]
        chosen *= 1 if several else len(scores)
        unique_layers = {id(layer): layer for own in chosen for layer in own}
        total = sum(len(layer.maps.values) for layer in unique_layers.values())
        read = lambda output: torch.stack([goal.of(output) for goal in goals], 1)  # noqa: E731
        rerun = Rerun(model, inputs, read, batch_size, progress_counter(on_progress, total))
        maps = Rows[ClassActivationMap]()
        for at, (goal, score, own) in enumerate(zip(goals, scores, chosen, strict=True)):
            gradients = gradients_of(score, [layer.tensor for layer in own]) if how.gradient else [None] * len(own)
            for layer, gradient in zip(own, gradients, strict=True):
                maps.append(_map_of(layer, gradient, goal.score, at, method, size, rerun))
    return maps


def _smoothed(
    maps_of: Callable[..., list[ClassActivationMap]],
    inputs: tuple[Any, ...],
    layers: Layers | None,
    target: Any,
    on_progress: Progress | None,
) -> Rows[ClassActivationMap]:
    """The maps of the image, with the mean values of the maps of its variants."""
    picture = picture_of(inputs)
    if picture is None:
        raise UsageError("smoothing takes one image (1, C, H, W)", do="leave smoothing out")
    if isinstance(target, ScoreTarget) or callable(target):
        raise UsageError("smoothing takes classes only", do="leave smoothing out, or give a class")
    count = 2 * len(_FACTORS)
    variants = [(factor, mirrored) for factor in _FACTORS for mirrored in (False, True)]
    first: list[ClassActivationMap] = []
    total: list[NDArray[np.float32]] = []
    for at, (factor, mirrored) in enumerate(variants):
        changed = factor * (picture.flip(-1) if mirrored else picture)
        advance = on_progress and partial(_of_variant, on_progress, at, count)
        maps = maps_of(in_place_of(inputs, changed), layers, target, on_progress=advance)
        values = [cam.values[..., ::-1] if mirrored else cam.values for cam in maps]
        if not first:
            first, total = maps, values
            target = ",".join(dict.fromkeys(str(cam.prediction.index) for cam in maps))
            if layers is None and maps[0].method in CAM_METHODS:
                layers = Selection.of_names([maps[0].call.name], maps[0].call.call)
        else:
            total = [before + now for before, now in zip(total, values, strict=True)]
    means = zip(first, total, strict=True)
    return Rows(replace(cam, values=values / np.float32(count), variants=count) for cam, values in means)


def _of_variant(on_progress: Progress, at: int, count: int, done: int, total: int) -> None:
    on_progress(at * total + done, count * total)


name_methods(class_activation_maps, CAM_METHODS=CAM_METHODS, ATTENTION_METHODS=ATTENTION_METHODS)


@takes_inputs
def landmark_layers(
    model: AnyModel,
    inputs: Any,
    target: Any = "top:1",
    most: int = 3,
    *,
    categories: Sequence[str] | None = None,
) -> list[str]:
    """One call for each of the last ``most`` resolutions of maps that the score depends on, in order of execution.

    The last is the default of `class_activation_maps`. For other resolutions it is the last of the outermost blocks.

    Example:
        >>> import torch
        >>> blocks = torch.nn.Conv2d(3, 4, 3), torch.nn.MaxPool2d(2), torch.nn.Conv2d(4, 4, 3)
        >>> net = torch.nn.Sequential(*blocks, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> landmark_layers(net, torch.ones(1, 3, 16, 16))
        ['0', '2']
    """
    model, categories = module_of(model), names_of(model, categories)
    check_whole("most", most)
    shown = _input_size(inputs)
    with differentiable(model, parameters=False):
        with capture(model, "*", leaves=True) as activations:
            output = output_of(model, *map_tensors(inputs, lambda tensor: tensor.detach().clone()))
        first = objectives(target, output, categories, type(model).__name__, (shown.height, shown.width))[0]
        layers = before_head(model, activations, output, shown)
        connected = list(connected_layers(model, layers, first.of(output)[0], shown, needs_gradient=False))
        # as `default_layer` does
        reached = [layer for layer, is_reached in connected if is_reached] or [layer for layer, _ in connected]
    reached = list({layer.call.key: layer for layer in reversed(reached)}.values())[::-1]  # the first part of each call
    last = reached[0].resolution
    chosen = {last: reached[0]}  # the default of `class_activation_maps`
    for layer in reached:  # the last call first
        best = chosen.setdefault(layer.resolution, layer)
        if layer.resolution != last and layer.call.name.count(".") < best.call.name.count("."):
            chosen[layer.resolution] = layer
    return [layer.call.key for layer in reversed(list(chosen.values())[:most])]


def _input_size(inputs: tuple[Any, ...]) -> InputSize:
    picture = next(iter(tensors_in(inputs).values()), torch.empty(0))
    if picture.dim() < 3 or (picture.dim() not in (4, 5) and any(picture is value for value in inputs)):
        shape = "x".join(map(str, picture.shape)) or "one number"
        raise UsageError(
            f"expected an image (1, C, H, W) or a clip (1, C, T, H, W), got {shape}", do="x[None] adds a batch axis"
        )
    return InputSize.of(picture)


def _map_of(
    layer: MapLayer,
    gradient: Tensor | None,
    prediction: Score,
    at: int,
    method: str,
    size: InputSize,
    rerun: Rerun,
) -> ClassActivationMap:
    how = CAM_METHODS[method]
    if how.gradient and gradient is None:
        exists = "no gradient reaches its output: it is unused, detached or computed under no_grad"
        do = f"choose another layer, or a method without gradient: {gradient_free(CAM_METHODS)}"
        raise LayerError(f"the score does not depend on {layer.call.key}", exists, do)
    activation = layer.maps.values
    _check_finite(layer.call, "activation", bool(activation.isfinite().all()))
    slopes = torch.zeros_like(activation) if gradient is None else layer.read(gradient, size)
    _check_finite(layer.call, "gradient", bool(slopes.isfinite().all()))
    evidence = CamInputs(
        activation,
        slopes,
        prediction.score,
        lambda masks: rerun.masked(layer, masks)[:, at],
        lambda: rerun.ablated(layer)[:, at],
    )
    with torch.no_grad():
        weights = how.weigh(evidence)
        values = activation - activation.mean((1, 2), keepdim=True) if how.centred else activation
        summed = (weights[:, None, None] * values if weights.dim() == 1 else weights * values).sum(0)
        summed = summed.relu() if how.relu else summed
    _check_finite(layer.call, "weighted sum", bool(summed.isfinite().all()))
    if layer.maps.frames > 1:  # side by side
        summed = summed.reshape(len(summed), layer.maps.frames, -1).permute(1, 0, 2)
    unreached = how.gradient and not bool((slopes != 0).any())
    array = summed.float().cpu().numpy()
    return ClassActivationMap(
        layer.call, prediction, method, array, len(activation), (size.height, size.width), unreached, frames=size.frames
    )


def _maps_of_attention(
    model: nn.Module,
    inputs: tuple[Any, ...],
    layers: Layers | None,
    target: Any,
    method: str,
    categories: Sequence[str] | None,
    size: InputSize,
) -> Iterator[ClassActivationMap]:
    how = ATTENTION_METHODS[method]
    with differentiable(model, parameters=False), torch.set_grad_enabled(how.gradient):
        output, follow = output_of(follow_relevance, model, passed_on(leaves_of(inputs)), layers, how, size)
        goals = objectives(target, output, categories, type(model).__name__, (size.height, size.width))
        for goal in goals:
            check_finite_score(goal.score)
        for goal in goals:
            for attention, heads in follow(goal.of(output)[0]):
                values = attention.values[0]
                _check_finite(attention.call, "attention", bool(np.isfinite(values).all()))
                unreached = how.gradient and not values.any()
                yield ClassActivationMap(attention.call, goal.score, method, values, heads, attention.seen, unreached)


def _check_finite(call: Call, what: str, is_finite: bool) -> None:
    if not is_finite:
        raise InputError(f"the map of {call.key} is not finite", f"its {what} holds NaN or Inf", FIND_NON_FINITE)


def progress_counter(on_progress: Progress | None, total: int) -> Callable[..., None]:
    """A function that adds a number to those done, and calls ``on_progress`` with done and in all.

    ``more`` is what is to be done beyond the total.
    """
    done = 0

    def advance(count: int, more: int = 0) -> None:
        nonlocal done, total
        done, total = done + count, total + more
        if on_progress is not None:
            on_progress(done, total)

    return advance


@dataclass
class Rerun:
    """The scores ``(N, K)`` of all objectives with one channel as a mask, or without it; each computed once per layer.

    ``read`` takes them from a model's output.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    read: Callable[[Any], Tensor]
    batch_size: int | None
    advance: Callable[[int], None]
    _scores: dict[int, Tensor] = field(default_factory=dict)

    def masked(self, layer: MapLayer, channels: Tensor) -> Tensor:
        """The scores ``(C, K)`` of the image under each of ``channels`` ``(C, h, w)`` as a mask."""
        if id(layer) not in self._scores:
            self._scores[id(layer)] = self._masked(channels)
        return self._scores[id(layer)]

    def ablated(self, layer: MapLayer) -> Tensor:
        """The scores ``(C, K)`` with each channel of the map of ``layer`` at 0 in turn; class tokens stay."""
        if id(layer) not in self._scores:
            tensor, maps = layer.tensor.detach(), layer.maps
            tokens = tensor.shape[1] - maps.values[0].numel() if maps.axes == "N L C" else 0
            axis = tensor.dim() - 1 if maps.axes.endswith("C") else 1
            changed = layer.call, layer.part, tensor, axis, ((tokens, tensor.shape[1] - 1),) if tokens else None
            scores = channel_scores(self.model, self.inputs, *changed, self.batch_size, self.advance, self.read)
            self._scores[id(layer)] = scores.float()
        return self._scores[id(layer)]

    def _masked(self, channels: Tensor) -> Tensor:
        picture = picture_of(self.inputs)
        if picture is None or picture.dim() != 4:
            raise UsageError("masks need one image (1, C, H, W)", do="use a method without masks")
        picture = picture.detach()
        # the masks of all constant channels are 0: one pass is enough
        varies = channels.amax((1, 2)) > channels.amin((1, 2))
        total, zero = len(channels), torch.zeros_like(channels[~varies][:1])  # resized, another constant may vary
        channels = torch.cat([channels[varies], zero])
        places = torch.where(varies, varies.cumsum(0) - 1, len(channels) - 1)
        scores, begin, size = list[Tensor](), 0, self.batch_size or first_batch(picture.device)
        run = repeated(self.model)
        while begin < len(channels):
            part = channels[begin : begin + size]
            whole = resized(part[:, None], (picture.shape[-2], picture.shape[-1]))
            low, high = whole.amin((2, 3), keepdim=True), whole.amax((2, 3), keepdim=True)
            masks = torch.where(high > low, (whole - low) / (high - low), 0).to(picture.dtype)
            with torch.no_grad():
                scores.append(self.read(run(*in_place_of(self.inputs, picture * masks))).float())
            self.advance(len(part))
            begin += size
            if self.batch_size is None and has_room(picture.device):
                size *= 2
        if total > len(channels):
            self.advance(total - len(channels))
        return torch.cat(scores)[places]


def first_batch(device: torch.device) -> int:
    """How many images fit well in a pass before it is known how much memory that takes."""
    return _FIRST.get(device.type, 16)


def has_room(device: torch.device) -> bool:
    """Whether a batch of twice the images fits: a GPU's free memory is twice what torch took so far; never on a CPU.

    On a CPU larger batches are not faster.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.mem_get_info(device)[0] >= 2 * torch.cuda.memory_reserved(device)
