"""The reference that a run leaves behind: what the trained model does on the inputs that it saw last."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from hookscope import models, statistics  # loaded at the end: they import torchvision, which a script may not want
from hookscope.errors import UsageError
from hookscope.hooks import buffers_kept, differentiable, map_tensors, tensors_in

_IMAGES = 64  # that are kept at least, if so many were seen


class LastInputs:
    """The inputs of the latest sampled passes of the model that ran last."""

    def __init__(self) -> None:
        self._model: ref[nn.Module] | None = None
        self._passes: deque[tuple[int, tuple[Any, ...]]] = deque()

    def keep(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep copies: the loop may write to its batch."""
        tensors = list(tensors_in(args).values())
        if not tensors or not tensors[0].dim():
            return
        if self._model is None or self._model() is not model:
            self._model = ref(model)
            self._passes.clear()
        images = len(tensors[0]) if tensors[0].dim() != 3 else 1
        self._passes.append((images, map_tensors(args, lambda tensor: tensor.detach().clone())))
        while sum(count for count, _ in self._passes) - self._passes[0][0] >= _IMAGES:
            self._passes.popleft()

    def measured(self) -> statistics.SavedStatistics:
        """Measure the model in eval mode on the kept inputs; its state stays as it is."""
        model = None if self._model is None else self._model()
        if model is None:
            raise UsageError("no pass of a model was sampled", do="sample more often: ‹every|--every›")
        collector = statistics.StatisticsCollector(model, ranges=True)
        with differentiable(model, parameters=False), buffers_kept(model), torch.no_grad(), collector:
            for _, args in self._passes:
                model(*args)
        saved = statistics.SavedStatistics.of(models.as_loaded(model), collector.totals)
        return replace(saved, source=replace(saved.source, preprocess="as in training"))
