"""Further forward passes for class activation maps that ask the model channel by channel, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.explain.cam_layers import MapLayer
from hookscope.hooks import HookHandles, map_tensors, tensors_in
from hookscope.scores import class_scores

Progress = Callable[[int, int], None]


@dataclass
class Rerun:
    """Further forward passes, without gradients, for the methods that ask the model channel by channel."""

    model: nn.Module
    inputs: tuple[Any, ...]
    batch_size: int
    on_progress: Progress | None
    total: int
    done: int = 0
    known: dict[int, Tensor] = field(default_factory=dict)

    def masked(self, layer: MapLayer, channels: Tensor) -> Tensor:
        """The scores ``(C, K)`` with the picture under each of ``channels`` ``(C, h, w)`` as a mask."""
        if id(layer) not in self.known:  # one round tells the scores of all classes
            self.known[id(layer)] = self._masked(channels)
        return self.known[id(layer)]

    def ablated(self, layer: MapLayer) -> Tensor:
        """The scores ``(C, K)`` with one channel of the map of ``layer`` after the other set to 0."""
        if id(layer) not in self.known:
            self.known[id(layer)] = self._ablated(layer)
        return self.known[id(layer)]

    def _masked(self, channels: Tensor) -> Tensor:
        if len(self.inputs) != 1 or not isinstance(self.inputs[0], torch.Tensor) or self.inputs[0].dim() != 4:
            raise UsageError("masks need one picture (1, C, H, W)", do="use a method that masks no picture")
        picture = self.inputs[0].detach()
        found = []
        for part in channels.split(self.batch_size):
            whole = resized(part[:, None], (picture.shape[-2], picture.shape[-1]))
            low, high = whole.amin((2, 3), keepdim=True), whole.amax((2, 3), keepdim=True)
            masks = torch.where(high > low, (whole - low) / (high - low), 0).to(picture.dtype)
            with torch.no_grad():
                found.append(class_scores(self.model(picture * masks)).float())
            self._advance(len(part))
        return torch.cat(found)

    def _ablated(self, layer: MapLayer) -> Tensor:
        count = layer.maps.values.shape[0]
        found = []
        for begin in range(0, count, self.batch_size):
            channels = range(begin, min(count, begin + self.batch_size))
            repeated = map_tensors(self.inputs, partial(_repeated, count=len(channels)))
            with torch.no_grad(), HookHandles() as door:
                door.forward(layer.module, _Silencer(layer, channels))
                found.append(class_scores(self.model(*repeated)).float())
            self._advance(len(channels))
        return torch.cat(found)

    def _advance(self, passes: int) -> None:
        self.done += passes
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def _repeated(tensor: Tensor, count: int) -> Tensor:
    return tensor.detach().expand(count, *tensor.shape[1:]).clone()


class _Silencer:
    """The hook that sets channel ``channels[i]`` to 0 in item ``i`` of the batch, at the layer's own call.

    Only the places of the map: a class token, which is none, stays as it is.
    """

    def __init__(self, layer: MapLayer, channels: Sequence[int]) -> None:
        self._layer, self._channels, self._calls = layer, channels, 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self._calls += 1
        if self._calls - 1 != self._layer.call.call:
            return None
        wanted = tensors_in(output)[self._layer.part]
        return map_tensors(output, lambda tensor: self._silenced(tensor) if tensor is wanted else tensor)

    def _silenced(self, tensor: Tensor) -> Tensor:
        silenced = tensor.dequantize() if tensor.is_quantized else tensor.clone()
        maps = self._layer.maps
        apart = tensor.shape[1] - maps.values[0].numel() if maps.axes == "N L C" else 0
        for item, channel in enumerate(self._channels):
            places = silenced[item].select(-1 if maps.axes.endswith("C") else 0, channel)
            places[apart:].zero_()
        if tensor.is_quantized:  # activations have one scale
            silenced = torch.quantize_per_tensor(silenced, tensor.q_scale(), tensor.q_zero_point(), tensor.dtype)
        return silenced


def resized(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps ``(N, C, h, w)`` brought to ``(H, W)``, bilinear between the middles of the cells."""
    found: Tensor = torch.nn.functional.interpolate(values.float(), size, mode="bilinear", align_corners=False)
    return found
