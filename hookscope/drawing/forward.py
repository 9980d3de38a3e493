"""One forward pass of a loaded model, each wanted output reduced inside its hook to what a sheet needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from hookscope.drawing.reduce import ActivationSummary, reduce_output
from hookscope.drawing.scale import Scale
from hookscope.drawing.tiles import ChannelChoice
from hookscope.errors import HookscopeError, NoMapError, UsageError
from hookscope.hooks import Call, InputSize, Layers, Observer
from hookscope.models import LoadedModel, model_errors_as_input_errors


@dataclass(frozen=True, slots=True)
class PassResult:
    """What one pass showed.

    Attributes:
        activities: The wanted calls with a map, in order of execution.
        without_map: The wanted calls without one, and why.
        did_not_run: Wanted layers that the pass did not reach.
    """

    activities: tuple[tuple[Call, ActivationSummary], ...]
    without_map: tuple[tuple[Call, HookscopeError], ...]
    did_not_run: tuple[str, ...]


def run_and_reduce(
    net: LoadedModel,
    pictures: Iterable[Tensor],
    layers: Layers = "all",
    types: Iterable[Any] = ("Conv2d",),
    choice: ChannelChoice | None = None,
    scale: Scale | None = None,
) -> PassResult:
    """Run ``net`` once on prepared ``pictures`` and reduce the output of every wanted call.

    Nothing of an output is kept but one byte a value and its statistics. The pass ends after the last wanted call
    where the selection tells which that is: indices from the start and ``name#call`` do.

    Args:
        net: What `load_model` returned.
        pictures: What its ``preprocess`` made, ``(3, H, W)``: one, or two for optical flow.
        layers: A selection, see `Selection`.
        types: Class names that indices count.
        choice: Which channels.
        scale: How values become colours.

    Raises:
        LayerError: nothing was selected, or no chosen channel exists in any layer.
        NoMapError: no selected call has a feature map.
        InputError: the model refuses the picture.
    """
    prepared = list(pictures)
    shown = seen_by(prepared[0])
    found: list[tuple[Call, ActivationSummary]] = []
    without: list[tuple[Call, HookscopeError]] = []

    def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        try:
            found.append((call, reduce_output(output, module, shown, choice, scale)))
        except UsageError:
            raise
        except HookscopeError as error:  # a vector, or none of the channels: the other layers still count
            without.append((call, error))
        if observer.selection.from_the_end:  # what is too far from the end by now is not held until it comes
            found[:] = [pair for pair in found if observer.wants(pair[0]) or observer.may_want(pair[0])]

    def forget(*inputs: Any) -> None:
        found.clear()
        without.clear()

    observer = Observer(net.model, layers, types, on_call, on_start=forget)
    if observer.selection.end_is_known:
        observer.stop_early()
    _run(net, prepared, observer)
    found = [(call, activity) for call, activity in found if observer.wanted(call)]
    without = [(call, error) for call, error in without if observer.wanted(call)]
    if not found:
        raise _nothing_to_draw(net, without, observer)
    return PassResult(tuple(found), tuple(without), tuple(observer.did_not_run) if observer.complete else ())


def seen_by(picture: Tensor) -> InputSize:
    """The size of a prepared picture ``(3, H, W)`` or clip ``(3, T, H, W)``."""
    height, width = picture.shape[-2:]
    return InputSize(int(height), int(width), int(picture.shape[1]) if picture.dim() == 4 else 1)


def _run(net: LoadedModel, pictures: list[Tensor], observer: Observer) -> None:
    inputs = net.inputs(*pictures)
    with model_errors_as_input_errors(net.name, pictures), torch.no_grad(), observer:
        net.model(*inputs)


def _nothing_to_draw(
    net: LoadedModel, without: list[tuple[Call, HookscopeError]], observer: Observer
) -> HookscopeError:
    if not without:
        idle = ", ".join(observer.did_not_run[:3]) or "nothing"
        return NoMapError(f"nothing to draw: {idle} did not run", do="choose another layer")
    call, error = without[0]
    if not isinstance(error, NoMapError):
        return type(error)(f"{error.asked} in {call.key or call.type}", error.exists, error.do)
    convolutions = [
        name for name, module in net.model.named_modules() if type(module).__name__[:6] in ("Conv2d", "Conv3d")
    ]
    what = f"layers with one are convolutions, such as {convolutions[-1]}" if convolutions else ""
    return NoMapError(f"{call.key or 'the model'} ({call.type}) has no map: {error.asked}", what)


def seen_pictures(net: LoadedModel, pictures: Iterable[Tensor]) -> list[list[Image.Image]]:
    """The RGB frames that the network saw of each of ``pictures``; a detector's own resizing included."""
    prepared = list(pictures)
    if net.family != "detection":
        stills = [picture.unbind(1) if picture.dim() == 4 else [picture] for picture in prepared]
        return [[net.preprocess.seen(frame) for frame in frames] for frames in stills]
    transform: Any = net.model.transform
    with torch.no_grad():
        batch = transform([prepared[0]])[0].tensors[0].cpu()
    mean, std = torch.tensor(transform.image_mean), torch.tensor(transform.image_std)
    return [[to_pil_image((batch * std[:, None, None] + mean[:, None, None]).clamp(0, 1))]]
