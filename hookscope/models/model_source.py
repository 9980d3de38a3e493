"""What a source of models provides; `hookscope.models.sources` lists the sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hookscope.models.weights_choice import WeightsChoice

if TYPE_CHECKING:  # a source answers `matches` and `names` without torch
    from torch import nn

    from hookscope.models.loaded import LoadedModel

Progress = Callable[[int, int | None], None]
"""Called with the bytes downloaded so far and their total, None if the total is unknown."""


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, with shapes and without values.

    Attributes:
        model: The module, in eval mode.
        size: ``(H, W)`` of the input that the model is made for.
    """

    model: nn.Module
    size: tuple[int, int]


class ModelSource(ABC):
    """One kind of MODEL argument. A new source overrides `matches` and `build`, the rest is optional.

    The file of a source imports torch and other heavy packages inside `build` and `skeleton` only, so that names are
    completed and checked without them. ``cpu_only`` says that its models run on the CPU alone,
    ``own_weights`` that a model is a file with its weights.
    """

    cpu_only: ClassVar[bool] = False
    own_weights: ClassVar[bool] = False

    @abstractmethod
    def matches(self, model: str) -> bool:
        """Whether the text ``model`` names a model of this source."""

    @abstractmethod
    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        """The model on the CPU with its weights, see `LoadedModel.of`; random numbers are seeded with ``seed`` already.

        Raises:
            ModelError: no such model, or it cannot be built.
            WeightsError: no such weights, or they cannot be fetched, trusted or fitted.
            UsageError: weights that this source never has.
        """

    def names(self) -> tuple[str, ...]:
        """The names of all models, for completion and near misses; empty if they cannot be listed without torch."""
        return ()

    def class_names(self, model: str) -> tuple[str, ...]:
        """The class names of the default weights, for completion; empty if they are not known without torch."""
        return ()

    def skeleton(self, model: str) -> Skeleton | None:
        """The model without values, if ``model`` always means the same layers; its list of layers is then cached."""
        return None
