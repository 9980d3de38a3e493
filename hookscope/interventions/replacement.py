"""Interventions that bring in other values: another picture's activation, a mean, a direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookscope.errors import LayerError, UsageError
from hookscope.hooks import tensors_in
from hookscope.interventions.base import Intervention, Site, check_finite, laid_out_like, replaced


@dataclass(frozen=True)
class Patch(Intervention):
    """The activation of another picture at the same call: activation patching.

    It tells which layer carries what makes the difference between two pictures (Vig et al. 2020, arXiv:2004.12265;
    Zhang and Nanda 2023, arXiv:2309.16042).

    Args:
        source: Activations by call, such as `capture` yields, or one tensor for every call. Of one image it is given
            to each of the batch.

    Raises:
        LayerError: for a call without an activation in ``source``.
        UsageError: for one of another shape.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> patch = Patch({"fc": torch.tensor([[5.0, 6.0]])}, channels=0)
        >>> patch(Call("fc", "Linear", 0, None), torch.zeros(1, 2)).tolist()
        [[5.0, 0.0]]
    """

    source: Any = dataclasses.field(repr=False)

    def change(self, site: Site, part: Tensor) -> Tensor:
        """The other activation, the same part of it."""
        found = _of_call(self.source, site, "patch with")
        return replaced(part, _fitted(found, site, "the patch"))


@dataclass(frozen=True)
class Mean(Intervention):
    """The mean over images in the place of each: mean ablation, which leaves what is usual and takes what is special.

    Args:
        source: Activations ``(N, ...)`` of other images by call, or one tensor; None for the batch itself.
        over: ``images``, or ``positions`` for the mean of each map of each image itself, which needs no source.

    Raises:
        LayerError: for a call without an activation in ``source``.
        UsageError: for one of another shape.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> Mean()(Call("fc", "Linear", 0, None), torch.tensor([[1.0], [3.0]])).tolist()
        [[2.0], [2.0]]
    """

    source: Any = dataclasses.field(default=None, repr=False)
    over: str = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over not in ("images", "positions"):
            raise UsageError(f"no mean over '{self.over}'", "there are images and positions")
        if self.over == "positions" and self.source is not None:
            raise UsageError("a mean over positions is of the image itself", do="leave the source out")

    def change(self, site: Site, part: Tensor) -> Tensor:
        """The mean, as often as there are values."""
        if self.over == "positions":
            places = [at for at in range(0 if site.axis == 0 else 1, part.dim()) if at != site.axis]
            return laid_out_like(part, part.mean(places, keepdim=True)) if places else part
        if self.source is None:
            if site.axis == 0:
                raise UsageError(f"no images to average at '{site.call.key}'", "its tensor has no batch")
            return laid_out_like(part, part.mean(0, keepdim=True))
        found = _of_call(self.source, site, "take the mean of")
        if site.axis != 0:
            found = found.mean(0, keepdim=True)
        return replaced(part, _fitted(found, site, "the mean"))


@dataclass(frozen=True)
class Steer(Intervention):
    """A direction added to every position: steering.

    Adding the difference of two means of activations moves what the network answers along it (Turner et al. 2023,
    arXiv:2308.10248).

    Args:
        direction: One value a channel ``(C,)``, or a tensor of the activation's shape without the axis of images.
        scale: What it is multiplied by.

    Raises:
        UsageError: for a direction of another shape.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> Steer(torch.tensor([1.0, 0.0]), scale=3)(Call("fc", "Linear", 0, None), torch.ones(1, 2)).tolist()
        [[4.0, 1.0]]
    """

    direction: Any = dataclasses.field(repr=False)
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("scale", self.scale)

    @property
    def changes_nothing(self) -> bool:
        """Whether it is scaled by 0."""
        return self.scale == 0

    def change(self, site: Site, part: Tensor) -> Tensor:
        """The activation and the direction."""
        direction: Tensor = self.direction.detach().to(part)
        if direction.shape == (site.shape[site.axis],):
            one_each = [1] * len(site.shape)
            one_each[site.axis] = -1
            whole = direction.reshape(one_each).expand(site.shape)
            return part + self.scale * (whole if site.where is None else whole[site.where])
        return part + self.scale * _fitted(direction if site.axis == 0 else direction[None], site, "the direction")


def _of_call(source: Any, site: Site, purpose: str) -> Tensor:
    """The activation of the site's call, the same part of it."""
    key = site.call.key
    if isinstance(source, Mapping):
        if key not in source:
            names = ", ".join(map(str, list(source)[:5])) or "nothing"
            raise LayerError(f"no activation of '{key}' to {purpose}", f"there is {names}")
        source = source[key]
    found = tensors_in(source)
    if site.part not in found and "" not in found:
        parts = ", ".join(found) or "no tensor"
        raise LayerError(f"no part '{site.part}' of '{key}' to {purpose}", f"there is {parts}")
    tensor = found[site.part if site.part in found else ""].detach()
    return tensor.dequantize() if tensor.is_quantized else tensor


def _fitted(tensor: Tensor, site: Site, what: str) -> Tensor:
    """What of ``tensor`` stands for the chosen part of the activation; that of one image for each image.

    Raises:
        UsageError: for another shape.
    """
    if tensor.shape != site.shape:
        if site.axis == 0 or tensor.shape[1:] != site.shape[1:] or len(tensor) != 1:
            shapes = ["x".join(map(str, shape)) or "a single number" for shape in (tensor.shape, site.shape)]
            asked, exists = f"{what} for '{site.call.key}' is {shapes[0]}", f"its activation is {shapes[1]}"
            raise UsageError(asked, exists, "take one of the same layer and input size")
        tensor = tensor.expand(site.shape)
    return tensor if site.where is None else tensor[site.where]
