"""What a source of models provides, the text of weights as a type, and the kinds of sources: made, files, Python."""

from __future__ import annotations

import importlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, ClassVar

from hookscope.errors import HookscopeError, ModelError, UsageError, WeightsError, is_out_of_memory
from hookscope.models.metadata import WeightsMetadata

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookscope.models.loaded import LoadedModel

_LEAST_SCORE = 0.05  # of a detection, where the model itself does not choose; as torchvision does
_SUFFIXES = (".pth", ".pt", ".ckpt", ".bin", ".tar", ".safetensors", ".index.json")


class WeightsKind(Enum):
    """What a `WeightsChoice` asks for; the first three are also the words that users write."""

    AUTO = "auto"
    DEFAULT = "default"
    NONE = "none"
    NAME = "a weights name"
    FILE = "a file"


WEIGHTS_WORDS = (WeightsKind.AUTO.value, WeightsKind.DEFAULT.value, WeightsKind.NONE.value)
OTHER_WEIGHTS = "use ‹weights='none'|--weights none›, or a checkpoint file"

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
        if (word := text.lower()) in WEIGHTS_WORDS:  # even if a file has this name
            return cls(WeightsKind(word), word)
        is_file = "/" in text or os.sep in text or text.endswith(_SUFFIXES) or os.path.exists(text)
        return cls(WeightsKind.FILE if is_file else WeightsKind.NAME, text)

    def refuse_names(self, model: str) -> None:
        """Raise a `UsageError` for ``default`` and for a weights name, which ``model`` lacks."""
        if self.kind in (WeightsKind.DEFAULT, WeightsKind.NAME):
            do = "use auto, none or a checkpoint file"
            raise UsageError(f"{model} has no torchvision weights '{self.text}'", do=do)


Progress = Callable[[int, int | None], None]
"""Called with the bytes downloaded so far and their total, None if the total is unknown."""


@dataclass(frozen=True)
class Skeleton:
    """A model in eval mode on the meta device, with shapes and without values, and ``(H, W)`` of its input."""

    model: nn.Module
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Detections:
    """What a detector found in one image, by descending score.

    Attributes:
        boxes: ``(n, 4)``: left, top, right and bottom.
        labels: ``(n,)`` numbers of classes.
        scores: ``(n,)``, 0 to 1, in the graph of the output.
        shares: Whether the boxes are shares of the input's width and height, 0 to 1, and not pixels.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    shares: bool = False

    def at(self, places: Tensor) -> Detections:
        """Those at these places."""
        return Detections(self.boxes[places], self.labels[places], self.scores[places], self.shares)

    @property
    def by_score(self) -> Detections:
        """The same by descending score."""
        return self.at(self.scores.argsort(descending=True, stable=True))

    @property
    def chosen(self) -> Detections:
        """Those with a score of at least 0.05."""
        return self.at(self.scores >= _LEAST_SCORE)


class ModelSource(ABC):
    """One kind of MODEL text; an instance is one such text, parsed.

    A new source is a `MadeSource`, which overrides `make`; this class is for models that are files. The file of a
    source imports torch and other heavy packages inside methods only: names are completed and checked without them.

    Attributes:
        prefix: What the texts of this source begin with.
        cpu_only: Its models run on the CPU alone.
        own_weights: A model is a file with its weights.
        text: The MODEL text.
        name: The text without the prefix.
    """

    prefix: ClassVar[str] = ""
    cpu_only: ClassVar[bool] = False
    own_weights: ClassVar[bool] = False

    def __init__(self, text: str) -> None:
        self.text = text
        self.name = text.removeprefix(self.prefix)

    @classmethod
    def matches(cls, text: str) -> bool:
        """Whether ``text`` names a model of this source."""
        return bool(cls.prefix) and text.startswith(cls.prefix)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all models, for completion and near misses; empty if they cannot be listed without torch."""
        return ()

    @classmethod
    def detections(cls, output: Any) -> list[Detections] | None:
        """What a detector of this source found in each image, None if ``output`` has another form."""
        return None

    @abstractmethod
    def build(self, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        """The model on the CPU with its weights, see `LoadedModel.of`; random numbers are seeded with ``seed`` already.

        Raises:
            ModelError: no such model, or it cannot be built.
            WeightsError: no such weights, or they cannot be fetched, trusted or fitted.
            UsageError: weights that this source never has.
        """

    def class_names(self) -> tuple[str, ...]:
        """The class names of the default weights, for completion; empty if they are not known without torch."""
        return ()

    def skeleton(self) -> Skeleton | None:
        """The model without values, if the text always means the same layers; its list of layers is then cached."""
        return None

    def imported(self, module: str, install: str = "") -> Any:
        """The module of a package; a ModelError says how to install the package."""
        try:
            return importlib.import_module(module)
        except ImportError:
            package = module.partition(".")[0]
            do = f"pip install {install or package}"
            raise ModelError(f"{self.text} needs the package {package.replace('_', '-')}", do=do) from None


class MadeSource(ModelSource):
    """Models that code makes and a checkpoint may fill: override `make`, the rest is optional.

    Attributes:
        has_trained: Whether ``make(pretrained=True)`` may give trained weights.
        family: The family of its models, empty to tell it by the class of the module, see `family_of`.

    The others are of one `build`: ``label`` and ``checkpoint``, file or folder, of the weights; ``missing`` says why
    there are no trained ones, ``notes`` what the user should know.
    """

    has_trained: ClassVar[bool] = False
    family: ClassVar[str] = ""
    seed: int
    label: str
    checkpoint: str
    missing: str
    notes: list[str]

    @abstractmethod
    def make(self, pretrained: bool) -> nn.Module | None:
        """The module with random weights, or with trained ones; None, with the reason in ``missing``, without such.

        Raises:
            ModelError: no such model, or it cannot be built.
            WeightsError: the trained weights are there, but damaged.
        """

    def load(self, net: nn.Module, path: str) -> nn.Module:
        """``net`` with the weights of the file or folder ``path``."""
        from hookscope.models.checkpoints import load_checkpoint

        self.label, notes = load_checkpoint(net, path, self.text)
        self.checkpoint = path
        self.notes += notes
        return net

    def transforms(self, net: nn.Module) -> Any:
        """How pictures become inputs, `Transforms` or `OwnTransforms`; None for the usual way of the family."""
        from hookscope.models.published import published_transforms

        return published_transforms(net, [self.checkpoint] if self.checkpoint else [])

    def record(self, net: nn.Module, metadata: WeightsMetadata) -> LoadedModel:
        """The record of the model."""
        from hookscope.models.loaded import LoadedModel

        return LoadedModel.of(net, self.text, self.label, metadata, self.family or None)

    def build(self, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        import torch

        from hookscope.models.published import published_class_names

        if weights.kind is WeightsKind.NAME or not self.has_trained:
            weights.refuse_names(self.text)
        self.seed, self.label, self.checkpoint, self.missing, self.notes = seed, "pretrained", "", "", []
        net, missing = None, ""
        if self.has_trained and weights.kind in (WeightsKind.AUTO, WeightsKind.DEFAULT):
            net = self.make(pretrained=True)
            missing = "" if net is not None else f"weights of {self.text} are random (seed {seed}): {self.missing}"
            if missing and weights.kind is WeightsKind.DEFAULT:
                raise WeightsError(f"no weights for {self.text}: {self.missing}", do=OTHER_WEIGHTS)
        if net is None:
            torch.default_generator.manual_seed(seed)  # a failed attempt may have drawn numbers
            self.label = random_label(seed)
            net = self.make(pretrained=False)
            assert net is not None
        if weights.kind is WeightsKind.FILE:
            net = self.load(net, weights.text)
        names = self.class_names() or published_class_names(net)
        metadata = WeightsMetadata(self.transforms(net), names, tuple(self.notes))
        loaded = self.record(net, metadata.without_weights(missing) if missing else metadata)
        return replace(loaded, checkpoint=self.checkpoint)


class FileSource(ModelSource):
    """A file with the end ``ending``, which ``load`` of the module ``reader`` reads with ``packages`` of an extra.

    The module that it returns has ``input_shape`` (C, H, W), 0 for any length, and ``input_dtype``. ``CAUSES`` of the
    reader say what errors of other libraries mean, by a pattern of their text.
    """

    own_weights = True
    ending: ClassVar[str]
    reader: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""

    @classmethod
    def matches(cls, text: str) -> bool:
        return text.endswith(cls.ending)

    def build(self, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        if not os.path.isfile(self.text):
            raise ModelError(f"no file '{self.text}'")
        if weights.kind in (WeightsKind.NAME, WeightsKind.FILE):  # where none are needed, its own do no harm
            asked = f"{self.text} holds its own weights and takes no others"
            raise UsageError(asked, do="leave ‹weights|--weights› out for this model")
        from hookscope.models.loaded import LoadedModel

        for package in self.packages:
            self.imported(package, f"'hookscope[{self.extra}]'")
        net = self._read()
        shape, note = net.input_shape, f"{self.text} takes (N, H, W, C): the axes of images are moved for it"
        notes = (note,) if getattr(net, "channels_last", False) else ()
        metadata = WeightsMetadata(input_size=shape if all(shape) else None, notes=notes)
        loaded = LoadedModel.of(net, self.text, os.path.basename(self.text), metadata, "classification")
        preprocess = replace(loaded.preprocess, channels=shape[0] or 3, dtype=net.input_dtype)
        return replace(loaded, preprocess=preprocess, checkpoint=self.text)

    def _read(self) -> Any:
        reader = importlib.import_module(self.reader)
        try:
            return reader.load(self.text)
        except HookscopeError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            text = " ".join(str(error).split())
            for pattern, asked in reader.CAUSES.items():
                if match := re.search(pattern, text):
                    raise ModelError(f"{self.text}: {asked.format(*match.groups())}") from error
            raise ModelError(f"cannot read {self.text}: {type(error).__name__}: {text[:200]}") from error


_MODULE = re.compile(r"\w+(\.\w+)+")


def _is_module_name(text: str) -> bool:
    """Whether ``text`` is a dotted name whose first part can be imported; nothing is imported."""
    if not _MODULE.fullmatch(text):
        return False
    spec = PathFinder.find_spec(text.partition(".")[0], [*sys.path, os.getcwd()])
    return spec is not None and spec.loader is not None


class PythonSource(MadeSource):
    """``package.module:factory`` and ``path/to/file.py:factory``; a factory is a function, a class or a module.

    Its arguments are literals, ``file.py:factory(width=2)``. Where there is one factory, it need not be named.
    """

    @classmethod
    def matches(cls, text: str) -> bool:
        return ":" in text or text.endswith(".py") or (_is_module_name(text) and not os.path.isfile(text))

    def make(self, pretrained: bool) -> nn.Module:
        from hookscope.models.factories import build

        self._factory, net, self._declared, self._again = build(self.text)
        if self.text == self._factory.source:
            taken = f"{self.text}:{self._factory.name}"
            self.notes.append(f"{self.text} has one factory: {taken} is taken")
            self.text = taken
        self.label = f"from factory (seed {self.seed}): untrained unless it loads its own"
        if "_orig_mod" in net._modules:
            self.notes.append(f"{self.text} is compiled by torch.compile: this is the eager model inside")
            return net.get_submodule("_orig_mod")
        return net

    def record(self, net: nn.Module, metadata: WeightsMetadata) -> LoadedModel:
        from hookscope.models.factories import random_tensors, with_declared_input

        metadata, choice = with_declared_input(net, metadata, self._declared, self._factory.source)
        if not self.checkpoint and (counts := random_tensors(net, self._again, self.seed)):
            differ, count = counts
            self.label = f"from factory: {differ} of {count} tensors are random (seed {self.seed})"
            if differ in (0, count):
                self.label = random_label(self.seed) if differ else "from factory: the same for every seed"
        loaded = super().record(net, metadata)
        return replace(loaded, preprocess=loaded.preprocess.changed(choice))
