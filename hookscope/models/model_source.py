"""What a source of models provides; `hookscope.models.sources` lists the sources."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from hookscope.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from hookscope.models.loaded import LoadedModel

_SUFFIXES = (".pth", ".pt", ".ckpt", ".bin", ".tar", ".safetensors", ".index.json")


class WeightsKind(Enum):
    """What a `WeightsChoice` asks for; the first three are also the words that users write."""

    AUTO = "auto"
    DEFAULT = "default"
    NONE = "none"
    NAME = "a weights name"
    FILE = "a file"


WEIGHTS_WORDS = (WeightsKind.AUTO.value, WeightsKind.DEFAULT.value, WeightsKind.NONE.value)

_RANDOM = "random (seed "


def random_label(seed: int) -> str:
    """The label of random weights."""
    return f"{_RANDOM}{seed})"


def is_random(label: str) -> bool:
    """Whether weights with this label are random; a file may be called ``random.pth``."""
    return label == "random" or label.startswith(_RANDOM)


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """Which weights a model gets.

    Attributes:
        kind: ``AUTO``: trained weights if available, else random; ``DEFAULT`` or ``NAME``: fail if unavailable;
            ``NONE``: random; ``FILE``: a checkpoint, a file or a folder.
        text: The word, the name or the path.
    """

    kind: WeightsKind
    text: str

    @classmethod
    def parse(cls, weights: object) -> WeightsChoice:
        """Read a word, a weights name, a path, None (random weights) or a member of a torchvision enumeration."""
        if isinstance(weights, WeightsChoice):
            return weights
        if isinstance(weights, os.PathLike):
            return cls(WeightsKind.FILE, os.fsdecode(weights))
        text = "none" if weights is None else weights.name if isinstance(weights, Enum) else weights
        if not isinstance(text, str):
            raise UsageError(f"weights must be a word, a name or a file, not {type(weights).__name__}")
        if text in WEIGHTS_WORDS:  # even if a file has this name
            return cls(WeightsKind(text), text)
        is_file = "/" in text or os.sep in text or text.endswith(_SUFFIXES) or os.path.exists(text)
        return cls(WeightsKind.FILE if is_file else WeightsKind.NAME, text)

    def refuse_names(self, model: str) -> None:
        """Raise a `UsageError` for ``default`` and for a weights name, which the source of ``model`` lacks."""
        if self.kind in (WeightsKind.DEFAULT, WeightsKind.NAME):
            do = "use auto, none or a checkpoint file"
            raise UsageError(f"{model} has no torchvision weights '{self.text}'", do=do)


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
