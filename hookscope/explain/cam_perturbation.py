"""Further forward passes, without gradients, for the CAM methods that run the model once per channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.explain.cam_layers import MapLayer
from hookscope.interventions import channel_scores


def picture_of(inputs: tuple[Any, ...]) -> Tensor | None:
    """The picture ``(1, C, H, W)``, or the clip, if it is the only input.

    Detectors of torchvision take a list of pictures ``(C, H, W)``.
    """
    only = inputs[0] if len(inputs) == 1 else None
    if isinstance(only, list) and len(only) == 1 and isinstance(only[0], Tensor) and only[0].dim() == 3:
        return only[0][None]
    return only if isinstance(only, Tensor) else None


def in_place_of(inputs: tuple[Any, ...], pictures: Tensor) -> tuple[Any, ...]:
    """The inputs for ``pictures`` ``(N, C, H, W)``, in the form of ``inputs``."""
    return (list(pictures),) if isinstance(inputs[0], list) else (pictures,)


Progress = Callable[[int, int], None]
_FIRST = {"cpu": 4}  # images in the first pass; on a CPU each larger batch takes its memory anew from the system


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
            self._scores[id(layer)] = channel_scores(
                self.model,
                self.inputs,
                layer.call,
                layer.part,
                tensor,
                tensor.dim() - 1 if maps.axes.endswith("C") else 1,
                ((tokens, tensor.shape[1] - 1),) if tokens else None,
                self.batch_size,
                self.advance,
                self.read,
            ).float()
        return self._scores[id(layer)]

    def _masked(self, channels: Tensor) -> Tensor:
        picture = picture_of(self.inputs)
        if picture is None or picture.dim() != 4:
            raise UsageError("masks need one picture (1, C, H, W)", do="use a method without masks")
        picture = picture.detach()
        # the masks of all constant channels are 0: one pass is enough
        varies = channels.amax((1, 2)) > channels.amin((1, 2))
        total, zero = len(channels), torch.zeros_like(channels[~varies][:1])  # resized, another constant may vary
        channels = torch.cat([channels[varies], zero])
        places = torch.where(varies, varies.cumsum(0) - 1, len(channels) - 1)
        scores, begin, size = list[Tensor](), 0, self.batch_size or first_batch(picture.device)
        while begin < len(channels):
            part = channels[begin : begin + size]
            whole = resized(part[:, None], (picture.shape[-2], picture.shape[-1]))
            low, high = whole.amin((2, 3), keepdim=True), whole.amax((2, 3), keepdim=True)
            masks = torch.where(high > low, (whole - low) / (high - low), 0).to(picture.dtype)
            with torch.no_grad():
                scores.append(self.read(self.model(*in_place_of(self.inputs, picture * masks))).float())
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


def resized(values: Tensor, size: Sequence[int]) -> Tensor:
    """Maps ``(N, C, h, w)`` or ``(N, C, t, h, w)`` resized to ``size``, linear between the centres of the cells."""
    mode = "trilinear" if len(size) == 3 else "bilinear"
    maps: Tensor = torch.nn.functional.interpolate(values.float(), tuple(size), mode=mode, align_corners=False)
    return maps


def over_picture(values: Tensor, size: Sequence[int]) -> Tensor:
    """One map ``(h, w)``, or ``(t, h, w)`` of a clip, resized to the picture ``(H, W)`` or the clip ``(T, H, W)``."""
    cells = values[None] if values.dim() < len(size) else values
    return resized(cells[None, None], size)[0, 0]
