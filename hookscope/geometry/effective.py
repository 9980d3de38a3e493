"""The effective receptive field: the part of the input that a unit reacts to, measured by gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks import (
    InputSize,
    Layers,
    buffers_kept,
    by_channel,
    capture,
    key_of,
    map_tensors,
    random_states_kept,
    token_grid,
)
from hookscope.models import LoadedModel, model_errors_as_input_errors

_FAINT = 1 - 0.9545  # of the largest gradient; what is fainter is two standard deviations away in a Gaussian


def effective_fields(
    net: LoadedModel,
    inputs: Sequence[Any],
    layers: Layers = "all",
    types: Iterable[Any] | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """How large the part of the input is that the middle unit of each wanted call reacts to.

    The effective receptive field (arXiv:1701.04128) is usually much smaller than the one that the geometry allows: the
    gradient fades towards its edge. One backward pass for each call, from its middle unit with random weights of the
    channels; absolute gradients are added up over channels and images.

    Args:
        net: The model.
        inputs: The positional inputs of one forward pass; several images give a steadier number than one.
        layers: A selection, see `Selection`.
        types: Class names that indices and ``all`` count.
        on_progress: Called with the calls done and their number.

    Returns:
        The side in pixels of a square with as many pixels as have a gradient above 4.55 % of the largest, by
        ``name`` or ``name#call``, rounded to 0.01; 0 where no gradient arrives. Calls without positions are left out.
    """
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3 or not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1] * 1  # an in-place layer may not write to a leaf

    generator = torch.Generator().manual_seed(0)
    found: dict[str, float] = {}
    modules = dict(net.model.named_modules(remove_duplicate=False))
    with (
        model_errors_as_input_errors(net.name, inputs),
        random_states_kept(),
        buffers_kept(net.model),
        torch.enable_grad(),
    ):
        with capture(net.model, layers, types) as activations:
            net.model(*(map_tensors(value, leaf) for value in inputs))
        shown = InputSize.of(leaves[0]) if leaves else InputSize(0, 0)
        for done, call in enumerate(activations.calls):
            output = activations[call.key]
            counts = {len(leaves[0]), len(leaves)} if leaves else ()  # of images in one tensor, or one by one
            if isinstance(output, Tensor) and output.requires_grad and len(output) in counts:
                values = by_channel(output, modules.get(call.name), shown)
                if values.dim() == 3 and (grid := token_grid(values.shape[2], shown)) is not None:
                    extra, frames, *sides = grid
                    values = values[:, :, extra:].unflatten(2, (-1, *sides))[:, :, frames // 2]
                if values.dim() == 4 and values.shape[-1] * values.shape[-2] > 1:
                    found[key_of(call, "")] = _side(values, leaves[0], generator)
            if on_progress is not None:
                on_progress(done + 1, len(activations.calls))
    return found


def _side(values: Tensor, image: Tensor, generator: torch.Generator) -> float:
    weights = torch.randn(values.shape[:2], generator=generator).to(values)
    middle = values[:, :, values.shape[2] // 2, values.shape[3] // 2]
    (gradient,) = torch.autograd.grad((middle * weights).sum(), image, retain_graph=True, allow_unused=True)
    if gradient is None:
        return 0.0
    strength = gradient.abs().flatten(0, -3).sum(0)
    highest = float(strength.max())
    return round(math.sqrt(int((strength > _FAINT * highest).sum())), 2) if highest > 0 else 0.0
