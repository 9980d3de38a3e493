"""One side of a comparison: a model, and how it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hookscope.interventions import intervene
from hookscope.models import LoadedModel, as_loaded


@dataclass(frozen=True)
class Side:
    """A model, and how it runs in a comparison.

    Attributes:
        net: The model, on its device and in its data type; it prepares its own images.
        autocast: The data type of `torch.autocast` around each pass; None without it.
        changes: Interventions as `hookscope.intervene` takes them.
        compiled: Whether the model runs through `torch.compile`.
    """

    net: LoadedModel
    autocast: torch.dtype | None = None
    changes: Sequence[Any] = ()
    compiled: bool = False

    @classmethod
    def of(cls, side: Side | LoadedModel | nn.Module) -> Side:
        """``side`` itself, or a model that runs as it is."""
        return side if isinstance(side, Side) else cls(as_loaded(side))

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """What surrounds every pass of this side; hooks that look on are put on inside, and see what changes left."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(torch.device(self.net.device).type, self.autocast))
            if self.changes:
                stack.enter_context(intervene(self.net.model, self.changes))
            yield
