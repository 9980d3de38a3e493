"""The ``weights`` argument and ``--weights`` as a type, parsed once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from hookscope.errors import UsageError

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
