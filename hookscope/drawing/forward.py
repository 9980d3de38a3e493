"""One forward pass of a loaded model; each output is reduced inside its hook to what a sheet needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from hookscope.drawing.scale import Scale
from hookscope.drawing.tiles import ActivationSummary, ChannelChoice, reduce_output
from hookscope.errors import HookscopeError, NoMapError, UsageError
from hookscope.geometry import FieldTracker, computed_field
from hookscope.hooks import Call, InputSize, Layers, Observer
from hookscope.models import LoadedModel, model_errors_as_input_errors


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
            with tracker.paused():
                summary = reduce_output(output, module, input_size, chosen, scale, names, keep)
            field, is_known = computed_field(tracker, output, module) if isinstance(output, Tensor) else (None, False)
            seen = replace(summary, field=field, input_size=tracker.shown) if is_known else summary
            summaries.append((call, seen))
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
        net.model(*arguments)
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
    modules = list(model.modules())
    widths = ("in_channels", "in_features", "num_features", "normalized_shape")
    taken = [
        at
        for at, module in enumerate(modules)
        if any(getattr(module, width, None) in (len(categories), (len(categories),)) for width in widths)
    ]
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
