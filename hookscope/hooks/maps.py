"""Feature maps ``(C, H, W)`` from any output of a layer: axes recognised, tokens folded, clips laid out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from hookscope.errors import NoMapError
from hookscope.hooks.endings import has_channels_first
from hookscope.hooks.tensors import as_float, tensors_in

# Detection heads work on hundreds of proposals at once: a sheet draws so many items of a batch, and prints the total.
MOST_ITEMS = 2


@dataclass(frozen=True, slots=True)
class InputSize:
    """The size of the network's input in pixels; an input that is not ``batched`` has maps ``(C, H, W)``."""

    height: int
    width: int
    frames: int = 1
    batched: bool = True

    @classmethod
    def of(cls, inputs: Tensor) -> Self:
        """The layout of pictures ``(N, C, H, W)`` or clips ``(N, C, T, H, W)``."""
        height, width = inputs.shape[-2:]
        return cls(int(height), int(width), int(inputs.shape[2]) if inputs.dim() == 5 else 1)


@dataclass(frozen=True, slots=True)
class Maps:
    """Feature maps of one part of an output.

    Attributes:
        part: Name of the part, such as ``out`` or ``class token``; ``""`` for an only part.
        values: ``(C, H, W)``, floating point; frames of a clip are side by side, ``(C, H, T * W)``.
        axes: The recognised axes of the tensor, such as ``N C H W`` or ``N H W C``.
        item: Position in the batch of ``items``.
        frames: Number of frames side by side.
    """

    part: str
    values: Tensor
    axes: str
    item: int = 0
    items: int = 1
    frames: int = 1

    @property
    def label(self) -> str:
        """The part, and the item of a batch of several: ``out, item 0 of 4``."""
        words = [self.part] * bool(self.part) + [f"item {self.item} of {self.items}"] * (self.items > 1)
        return ", ".join(words)


def feature_maps(output: Any, module: nn.Module | None = None, shown: InputSize | None = None) -> list[Maps]:
    """The feature maps in an output, part by part.

    Recognised are ``(N, C, H, W)``, channels-last ``(N, H, W, C)``, ``(C, H, W)``, tokens ``(N, L, C)`` (folded to
    their grid, a class token apart), clips ``(N, C, T, H, W)`` and ``(N, T, H, W, C)``, and containers of these. The
    class of the layer often says where the channels are; a grid has the proportions of the network's input.

    Raises:
        NoMapError: no part is a map, such as the vector of a classifier.
    """
    tensors = tensors_in(output)
    maps = [
        part_map
        for part, tensor in tensors.items()
        if tensor.numel()
        for part_map in _maps_of(part, as_float(tensor), module, shown, has_channels_first(tensor))
    ]
    if not maps:
        shapes = ["x".join(map(str, tensor.shape)) or "a single number" for tensor in tensors.values()]
        raise NoMapError(f"the output is {' and '.join(shapes[:3]) or 'no tensor'}, not a feature map")
    return maps


def maps_or_vectors(output: Any, module: nn.Module | None = None, shown: InputSize | None = None) -> list[Maps]:
    """`feature_maps`; where there are none, vectors ``(N, C)`` as maps of one position."""
    try:
        return feature_maps(output, module, shown)
    except NoMapError:
        vectors = [
            Maps(part, vector[:, None, None], "N C", at, len(tensor))
            for part, tensor in tensors_in(output).items()
            if tensor.dim() == 2 and tensor.numel()
            for at, vector in enumerate(as_float(tensor[:MOST_ITEMS]))
        ]
        if not vectors:
            raise
        return vectors


def by_channel(tensor: Tensor, module: nn.Module | None = None, shown: InputSize | None = None) -> Tensor:
    """``tensor`` as ``(N, C, *positions)``, for any order of its axes.

    Tokens ``(N, L, C)`` have one position each, vectors ``(N, C)`` none; ``(C, H, W)`` of a layer of maps is a batch
    of one. The layer's class says where the channels are, else the proportions of the network's input.
    """
    if tensor.dim() < 2:
        return tensor.reshape(1, -1)
    axis = channel_axis(tensor, module, shown)
    if axis == 1:
        return tensor
    return tensor.movedim(axis, 1) if axis else tensor[None]


def channel_axis(
    tensor: Tensor, module: nn.Module | None = None, shown: InputSize | None = None, *, of_input: bool = False
) -> int:
    """The axis of ``tensor`` with the channels; 0 for ``(C, H, W)``, which has no batch axis.

    The input of a layer that permutes, or of a sequence of layers, has another order than its output.
    """
    if tensor.dim() < 2:
        return 0
    kind, name = _channel_order(module, of_input)
    if kind == "first" and any(word in name for word in _BATCHED):
        return 1
    if kind == "first" and (axes := re.search(r"[123](?=d$)", name)):
        axis = tensor.dim() - int(axes[0]) - 1
        if axis in (0, 1):
            return axis
    if tensor.dim() in (4, 5):
        return tensor.dim() - 1 if channels_last(module, tensor, shown, of_input=of_input) else 1
    if tensor.dim() == 3 and (kind == "first" or (kind is None and shown is not None and not shown.batched)):
        return 0
    return tensor.dim() - 1


def _maps_of(part: str, tensor: Tensor, module: nn.Module | None, shown: InputSize | None, first: bool) -> list[Maps]:
    if tensor.dim() in (4, 5):
        last = not first and channels_last(module, tensor, shown)
        positions = "T H W" if tensor.dim() == 5 else "H W"
        axes = f"N {positions} C" if last else f"N C {positions}"
        return _items(part, tensor.movedim(-1, 1) if last else tensor, axes)
    if tensor.dim() == 3:
        return _of_three_axes(part, tensor, module, shown)
    return []


def _items(part: str, batch: Tensor, axes: str) -> list[Maps]:
    """The maps of pictures ``(N, C, H, W)``, or of clips ``(N, C, T, H, W)`` with their frames side by side."""
    frames = batch.shape[2] if batch.dim() == 5 else 1
    items = enumerate(batch[:MOST_ITEMS].transpose(-3, -2).flatten(-2) if batch.dim() == 5 else batch[:MOST_ITEMS])
    return [Maps(part, values, axes, at, len(batch), frames) for at, values in items]


def _of_three_axes(part: str, tensor: Tensor, module: nn.Module | None, shown: InputSize | None) -> list[Maps]:
    """``(C, H, W)`` or ``(N, L, C)``: the layer's class decides, then a batch of one, then the shape."""
    if type(module).__name__ in _SEQUENCES:  # (N, L, C) in time, or rows of the image: no positions of a map
        return []
    kind = _channel_order(module)[0]
    items, high, wide = tensor.shape
    if type(module).__name__.endswith("1d"):  # (N, C, L): a signal
        return []
    grid = token_grid(high, shown) if kind != "first" else None
    if grid is not None and (items == 1 or kind == "last" or not _like(high, wide, shown)):
        return _folded(part, tensor, grid)
    return [Maps(part, tensor, "C H W")] if min(high, wide) > 1 and kind != "last" else []


def _folded(part: str, tokens: Tensor, grid: tuple[int, int, int, int]) -> list[Maps]:
    extra, frames, high, wide = grid
    channels, places = tokens.mT, (frames, high, wide) if frames > 1 else (high, wide)  # (N, C, L)
    maps = _items(part, channels[..., extra:].unflatten(2, places), "N L C")
    name = "class token" if extra == 1 else f"{extra} class tokens"
    apart = _items(f"{part}, {name}" if part else name, channels[..., None, :extra], "N L C")
    return maps + (apart if extra else [])


def token_grid(length: int, shown: InputSize | None = None) -> tuple[int, int, int, int] | None:
    """How ``length`` tokens fold: ``(class tokens, frames, H, W)``, None where they do not.

    The grid has the proportions of the input. A clip has the most frames, up to its own number, that leave such a grid.
    """
    shown = shown or InputSize(1, 1)
    for extra in (0, 1, 2, 5):
        for frames in range(shown.frames, 0, -1):
            count, rest = divmod(length - extra, frames)
            side = _grid_like(count, shown) if count >= 4 and not rest else None
            if side is not None:
                return extra, frames, *side
    return None


def _grid_like(count: int, shown: InputSize) -> tuple[int, int] | None:
    high = round(math.sqrt(count * shown.height / shown.width))
    for height in (high, high - 1, high + 1):
        if height > 0 and count % height == 0:
            width = count // height
            # patches have one size; the last one of a row or column may be cut off
            too_high = height - width * shown.height / shown.width
            too_wide = width - height * shown.width / shown.height
            if abs(too_high) < 1 and abs(too_wide) < 1:
                return height, width
    return None


def channels_last(
    module: nn.Module | None, tensor: Tensor, shown: InputSize | None = None, *, of_input: bool = False
) -> bool:
    """Whether the last axis of a batch of maps has the channels: the layer's class decides, else the proportions."""
    kind = _channel_order(module, of_input)[0]
    if kind is not None:
        return kind == "last"
    *_, a, b, c = tensor.shape
    # a detector may make its pictures square
    return _like(a, b, shown) and not _like(b, c, shown) and b != c


def _like(height: int, width: int, shown: InputSize | None) -> bool:
    shown = shown or InputSize(1, 1)
    return abs(height * shown.width / max(width * shown.height, 1) - 1) < 0.15


_PERMUTED = {(0, 2, 3, 1): "last", (0, 2, 3, 4, 1): "last", (0, 3, 1, 2): "first", (0, 4, 1, 2, 3): "first"}
_FIRST = ("Conv", "BatchNorm", "GroupNorm", "InstanceNorm", "Pool", "Upsample", "LayerNorm2d")
_BATCHED = ("BatchNorm", "GroupNorm", "Upsample")  # they need a batch axis
_SEQUENCES = ("RNN", "LSTM", "GRU")
_LAST = ("Linear", "LayerNorm", "Embedding", "MultiheadAttention")


def _channel_order(module: nn.Module | None, of_input: bool = False) -> tuple[str | None, str]:
    """``first`` or ``last`` (None where unknown), and the class that says so: the layer's, or one in a sequence."""
    if module is None:
        return None, ""
    name = type(module).__name__
    if dims := getattr(module, "dims", None):  # torchvision's Permute
        kind = _PERMUTED.get(tuple(dims))
        return {"first": "last", "last": "first"}.get(kind or "") if of_input else kind, name
    if any(word in name for word in _FIRST):
        return "first", name
    if any(word in name for word in _LAST):
        return "last", name
    children = list(module.children())
    if children and "swin_transformer" in type(module).__module__:
        return None if of_input else "last", name  # the network itself takes an image
    if "Sequential" in [cls.__name__ for cls in type(module).__mro__]:
        for child in children if of_input else reversed(children):
            order = _channel_order(child, of_input)
            if order[0] is not None:
                return order
            if of_input and type(child).__name__ == "Flatten":
                break
    return None, name
