"""Models of the package timm, where it is installed."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, WeightsError, nearest
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress, WeightsChoice, WeightsKind, random_label

if TYPE_CHECKING:
    from hookscope.models.loaded import LoadedModel

_PREFIX = "timm:"


class TimmSource(ModelSource):
    """``timm:NAME``."""

    def matches(self, model: str) -> bool:
        return model.startswith(_PREFIX)

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        import torch

        from hookscope.models.checkpoint_files import read_checkpoint
        from hookscope.models.checkpoints import fitted, fitting_kwargs, load_checkpoint
        from hookscope.models.loaded import LoadedModel
        from hookscope.models.run import quiet_log
        from hookscope.models.stated import stated_transforms

        if weights.kind is WeightsKind.NAME:
            weights.refuse_names(model)
        try:
            timm: Any = importlib.import_module("timm")
        except ImportError:
            raise ModelError(f"{model} needs the package timm", do="pip install timm") from None
        name = model.removeprefix(_PREFIX)
        if not timm.is_model(name):
            raise ModelError(f"no timm model '{name}'", nearest(name, timm.list_models()))
        notes, missing = list[str](), ""
        built, label = None, "timm pretrained"
        if weights.kind in (WeightsKind.AUTO, WeightsKind.DEFAULT):
            try:
                with quiet_log("huggingface_hub"):  # it tells of each new attempt
                    built = timm.create_model(name, pretrained=True)
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0][:120].strip(" .")
                if weights.kind is WeightsKind.DEFAULT:
                    do = "use ‹weights='none'|--weights none›, or a checkpoint file"
                    raise WeightsError(f"timm gives no weights for {model}: {reason}", do=do) from error
                missing = f"weights of {model} are random (seed {seed}): {reason}"
        if built is None:
            torch.default_generator.manual_seed(seed)  # the failed attempt may have drawn numbers
            built, label = timm.create_model(name, pretrained=False), random_label(seed)
        if weights.kind is WeightsKind.FILE:
            state, _ = fitted(built, read_checkpoint(weights.text))
            make = functools.partial(timm.create_model, name, pretrained=False)
            if kwargs := fitting_kwargs(make, [{}], state):  # another number of classes
                built = make(**kwargs)
            label, notes = load_checkpoint(built, weights.text, model)
        metadata = WeightsMetadata(stated_transforms(built), notes=tuple(notes))
        return LoadedModel.of(built, model, label, metadata.without_weights(missing) if missing else metadata)
