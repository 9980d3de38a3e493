"""Models of the package timm, where it is installed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, nearest
from hookscope.models.model_source import MadeSource

if TYPE_CHECKING:
    from torch import nn


class TimmSource(MadeSource):
    """``timm:NAME``."""

    prefix = "timm:"
    has_trained = True

    def make(self, pretrained: bool, **kwargs: Any) -> Any:
        from hookscope.models.run import quiet_log

        timm = self.imported("timm")
        if not timm.is_model(self.name):
            raise ModelError(f"no timm model '{self.name}'", nearest(self.name, timm.list_models()))
        try:
            with quiet_log("huggingface_hub"):  # it tells of each new attempt
                net = timm.create_model(self.name, pretrained=pretrained, **kwargs)
        except Exception as error:
            if not pretrained:
                raise
            self.missing = (str(error).splitlines() or [type(error).__name__])[0][:120].strip(" .")
            return None
        if pretrained:
            self.label = "timm pretrained"
        return net

    def load(self, net: nn.Module, path: str) -> nn.Module:
        from hookscope.models.checkpoint_files import read_checkpoint
        from hookscope.models.checkpoints import fitted, fitting_kwargs

        state, _ = fitted(net, read_checkpoint(path))
        kwargs = fitting_kwargs(functools.partial(self.make, False), [{}], state)  # another number of classes
        return super().load(self.make(False, **kwargs) or net if kwargs else net, path)
