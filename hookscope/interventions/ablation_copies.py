"""One pass with changed copies of the picture side by side: how they are made, and what the model makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookscope.hooks import Call, Observer, Selection, buffers_kept, map_tensors, random_states_kept, tensors_in
from hookscope.scores import class_scores

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
        part: Which tensor of its output has them, as `tensors_in` names it.
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


def scores_of(model: nn.Module, inputs: tuple[Any, ...], observer: Observer, seed: int | None = None) -> Tensor:
    """The scores ``(N, K)`` of a pass that leaves nothing behind; it may write to its inputs, which are copies.

    Args:
        model: In the mode in which it shall run.
        inputs: Its positional inputs.
        observer: What acts in the pass.
        seed: Seed of its random numbers; None goes on from where the random state is.
    """
    with torch.no_grad(), random_states_kept(), buffers_kept(model), observer:
        if seed is not None:
            torch.manual_seed(seed)
        output = model(*map_tensors(inputs, torch.clone))
    return class_scores(output, type(model).__name__)


class _Copies:
    """One pass: copies of the picture from a place on, copy ``i`` with ``changes[i]`` at the site, the last one whole.

    Without a place there is one picture, and one change.

    Attributes:
        copies: How many there are.
        fits: Whether the site met all of them, in their order.
    """

    def __init__(self, site: Site, place: Place | None, changes: Sequence[Any]) -> None:
        self._site, self._place, self._changes = site, place, changes
        self.copies = len(changes) + 1 if place else 1
        self.fits = False

    def alone(self, copy: int) -> Self:
        """The pass of one copy by itself."""
        return type(self)(self._site, None, [self._changes[copy]])

    def _write(self, picture: Tensor, change: Any) -> None:
        """Change what the site put out for one copy."""
        raise NotImplementedError

    def observer(self, model: nn.Module) -> Observer:
        """What puts it on ``model``."""
        names = {self._site.call.name} | ({self._place.name} if self._place else set())
        before = self._before if self._place and self._place.name != self._site.call.name else None
        return Observer(model, Selection.of_names(names), ("all",), self._after, on_before=before)

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
        return map_tensors(output, lambda tensor: self._written(tensor) if tensor is wanted else tensor)

    def _written(self, tensor: Tensor) -> Tensor:
        rows, *rest = self._site.shape
        values = tensor.dequantize() if tensor.is_quantized else tensor.clone()
        if tuple(values.shape) != (rows * self.copies, *rest):
            return tensor
        # a layer that works on parts of the picture has them on the first axis, too, in the order of the pictures?
        pictures = values.tensor_split(self.copies)
        self.fits = alike(pictures[0], pictures[-1])
        for picture, change in zip(pictures, self._changes, strict=False):
            self._write(picture, change)
        if tensor.is_quantized:  # activations have one scale
            values = torch.quantize_per_tensor(values, tensor.q_scale(), tensor.q_zero_point(), tensor.dtype)
        return values


class ChannelZeroer(_Copies):
    """Channel ``changes[i]`` at 0 in copy ``i``."""

    def _write(self, picture: Tensor, change: int) -> None:
        picture.select(self._site.axis, change).zero_()


class BatchIndependenceProbe(_Copies):
    """All channels of copy ``i`` times about ``changes[i]``: far out of range, or well within.

    Each by another factor, for a normalisation would take out one that they have in common.
    """

    def _write(self, picture: Tensor, change: float) -> None:
        factors = torch.tensor([1.0, 0.25, -0.5])[torch.arange(self._site.channels) % 3] * change
        sizes = [1] * picture.dim()
        sizes[self._site.axis] = -1
        picture.mul_(factors.reshape(sizes).to(picture))


def _repeated(tensor: Tensor, count: int) -> Tensor:
    if not tensor.dim():
        return tensor
    if tensor.is_quantized:
        return torch.cat([tensor] * count)
    return tensor.repeat(count, *[1] * (tensor.dim() - 1))


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ by no more than what another batch size changes in rounding."""
    kind = one.dtype
    one, other = (part if kind == torch.float64 else part.float() for part in (one, other))
    # 32 bits may be multiplied with 10 of precision there
    rounding = 2.0**-10 if one.is_cuda and kind == torch.float32 else torch.finfo(kind).eps
    largest = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=largest * rounding**0.65, equal_nan=True)
