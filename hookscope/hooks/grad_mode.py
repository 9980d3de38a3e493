"""A forward pass through which gradients flow back to the input, and after which nothing of the model has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.errors import ModelError
from hookscope.hooks.model_state import random_states_kept
from hookscope.hooks.registration import check_hookable
from hookscope.hooks.tensors import map_tensors, tensors_in


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Run the block with gradients on and ``model`` in eval mode, whatever surrounds it; all, buffers too, is put back.

    ``no_grad`` and ``inference_mode`` around the call do not count, nor whether parameters are frozen: gradients are
    asked of the input and of what layers put out, with `torch.autograd.grad`, so that no ``.grad`` is written.

    Raises:
        ModelError: for weights that were made inside ``inference_mode``, which no gradient can pass.

    Example:
        >>> import torch
        >>> net = torch.nn.Dropout()
        >>> with torch.inference_mode(), differentiable(net):
        ...     net.training, torch.is_grad_enabled()
        (False, True)
        >>> net.training
        True
    """
    check_hookable(model)
    held = next((name for name, tensor in _state(model) if not is_lazy(tensor) and tensor.is_inference()), None)
    if held is not None:
        asked = f"'{held}' was made inside torch.inference_mode: no gradient can pass it"
        raise ModelError(asked, do="build and load the model outside")
    modes = [(module, module.training) for module in model.modules()]
    with torch.inference_mode(False), torch.enable_grad(), random_states_kept(), buffers_kept(model):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put back the buffers that a forward pass counts or keeps something in."""
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    values = [
        (buffer, buffer.detach().clone())
        for _, buffers in kept
        for buffer in buffers.values()
        # what has no values to compare, sparse tensors among it, is put back as an object only
        if buffer is not None and not is_lazy(buffer) and buffer.layout == torch.strided and not buffer.is_meta
    ]
    try:
        yield
    finally:
        for module, buffers in kept:
            for name in module._buffers.keys() - buffers.keys():
                del module._buffers[name]
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if buffer.shape != value.shape:
                    buffer.data = value
                elif not torch.equal(buffer, value):  # a write that changes nothing still spoils a pending backward
                    buffer.copy_(value)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def leaves_of(inputs: Any) -> Any:
    """Copies of the tensors in ``inputs`` that gradients can be asked of; call it inside `differentiable`."""

    def leaf(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()
        return copied.requires_grad_() if copied.is_floating_point() or copied.is_complex() else copied

    return map_tensors(inputs, leaf)


def passed_on(leaves: Any) -> Any:
    """What to give to the model in the place of ``leaves``: copies in the graph, for a layer may work in place."""
    return map_tensors(leaves, lambda tensor: tensor.clone())


def leaf_tensors(leaves: Any) -> list[Tensor]:
    """The tensors of ``leaves`` that gradients can be asked of."""
    return [tensor for tensor in tensors_in(leaves).values() if tensor.requires_grad]
