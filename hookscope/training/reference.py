"""The reference that a run leaves behind: what the trained model does on the inputs that it saw last."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hookscope import models, statistics  # loaded at the end: they import torchvision, which a script may not want
from hookscope.errors import UsageError
from hookscope.hooks import Selection, buffers_kept, differentiable, map_tensors, tensors_in

_IMAGES = 64  # that are kept at least, if so many were seen


class LastInputs:
    """The inputs of the latest sampled passes of each model that learns."""

    def __init__(self) -> None:
        self._passes: dict[nn.Module, deque[tuple[int, tuple[tuple[Any, ...], dict[str, Any]]]]] = {}

    def keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep copies: the loop may write to its batch."""
        tensors = list(tensors_in((args, kwargs)).values())
        if not tensors or not tensors[0].dim() or not _learning(model):
            return
        kept = self._passes.setdefault(model, deque())
        images = len(tensors[0]) if tensors[0].dim() != 3 else 1
        kept.append((images, map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())))
        while sum(count for count, _ in kept) - kept[0][0] >= _IMAGES:
            kept.popleft()

    def measured(self) -> statistics.SavedStatistics:
        """Measure the model with most parameters that learn, in eval mode on its inputs; its state stays as it is."""
        if not self._passes:
            raise UsageError("no pass of a model that learns was sampled", do="call the model itself, not its layers")
        model = max(self._passes, key=_learning)
        collector = statistics.StatisticsCollector(model, Selection.of_names([""]), ranges=True)
        with differentiable(model, parameters=False), buffers_kept(model), torch.no_grad(), collector:
            for _, (args, kwargs) in self._passes[model]:
                model(*args, **kwargs)
        saved = statistics.SavedStatistics.of(models.as_loaded(model), collector.totals)
        return replace(saved, source=replace(saved.source, preprocess=statistics.AS_IN_TRAINING))


def _learning(model: nn.Module) -> int:
    """Number of values that learn: 0 in the frozen network of a perceptual loss."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
