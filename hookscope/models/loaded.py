"""A model that is ready to run, with its weights' preprocessing and class names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from PIL import Image
from torch import Tensor, nn

from hookscope.display import Cells, Shown
from hookscope.hooks import AnyModel, module_of
from hookscope.images import InputImage
from hookscope.models.inputs import CLIP_FRAMES, as_batch, family_of, first_channels, in_channels, native_size
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.preprocess import Preprocess
from hookscope.models.transforms import Transforms, made_for, usual_transforms


@dataclass(frozen=True, repr=False)
class LoadedModel(Shown):
    """A model ready to run, in eval mode, and what belongs to it.

    Attributes:
        model: The module, on ``device``.
        name: The MODEL argument.
        weights: Label of the weights, such as ``IMAGENET1K_V1``, ``random (seed 0)`` or a file name.
        preprocess: Photograph to tensor ``(3, H, W)``.
        categories: Class names, None if unknown.
        family: ``classification``, ``segmentation``, ``detection`` (takes a list of pictures), ``batched_detection``
            (takes a batch), ``video`` or ``optical_flow``.
        device: Device of the model.
        notes: What the user should know, such as why the weights are random.
        missing_weights: The one of ``notes`` that says why there are no trained weights, else empty.
        checkpoint: The file or folder of the weights, empty for random ones and where it is not known.
        seed: Seed of random weights, None if it is not known.
    """

    model: nn.Module
    name: str
    weights: str
    preprocess: Preprocess
    categories: tuple[str, ...] | None
    family: str
    device: str
    notes: tuple[str, ...] = ()
    missing_weights: str = ""
    checkpoint: str = ""
    seed: int | None = None

    def _cells(self) -> Cells:
        height, width = self.preprocess.default_size
        frames = (self.preprocess.frames,) if self.preprocess.frames > 1 else ()
        return {
            "model": self.name,
            "class": type(self.model).__name__,
            "weights": self.weights,
            "family": self.family,
            "classes": len(self.categories) if self.categories else None,
            "input": (self.preprocess.channels, *frames, height, width),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "device": self.device,
            "notes": "; ".join(self.notes),
        }

    @classmethod
    def of(
        cls, model: nn.Module, name: str, weights: str, metadata: WeightsMetadata, family: str | None = None
    ) -> LoadedModel:
        """The record of a model on the CPU, with the transforms of ``metadata`` or the usual ones of its family."""
        size = metadata.input_size or ()
        family = family or ("video" if len(size) == 4 else family_of(model))
        if family == "video" and len(size) == 3:  # the model's file says that it takes pictures
            family = "classification"
        transforms = metadata.transforms or usual_transforms(family)
        said_size = (size[-2], size[-1]) if size else native_size(model)
        default_size = said_size or made_for(transforms)
        if isinstance(transforms, Transforms):
            assumed = transforms.assumed
            if metadata.transforms is None and family not in ("detection", "optical_flow"):
                assumed = ("size", "values")
            assumed = tuple(part for part in assumed if part != "size" or not said_size)
            # A ViT without weights may be made for another size than its default weights (vit_h_14).
            other = made_for(transforms) != default_size
            resize = transforms.resize.sized(default_size) if other else transforms.resize
            transforms = replace(transforms, resize=resize, assumed=assumed)
        preprocess = Preprocess(
            family=family,
            transforms=transforms,
            default_size=default_size,
            channels=size[0] if len(size) > 2 else first_channels(model) if family == "video" else in_channels(model),
            frames=size[1] if len(size) == 4 else CLIP_FRAMES if family == "video" else 1,
            dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), None),
        )
        return cls(
            model, name, weights, preprocess, metadata.categories, family, "cpu", metadata.notes, metadata.missing
        )

    def prepare(self, picture: InputImage | Image.Image) -> Tensor:
        """The input tensor of a picture, ``(3, H, W)``, or of a clip, ``(3, T, H, W)``."""
        if not isinstance(picture, InputImage):
            return self.preprocess(picture.convert("RGB"))
        return self.preprocess(picture.frames if len(picture.frames) > 1 else picture.image)

    def inputs(self, *pictures: Tensor) -> tuple[Any, ...]:
        """The positional inputs of one forward pass for a prepared picture ``(3, H, W)``; optical flow may take two."""
        if self.family == "optical_flow" and len(pictures) == 2:
            return pictures[0][None], pictures[1][None]
        return as_batch(self.family, pictures[:1])


def as_loaded(net: AnyModel) -> LoadedModel:
    """``net`` itself, or the record of a module on its device with the usual preprocessing of its family."""
    if isinstance(net, LoadedModel):
        return net
    module = module_of(net)
    loaded = LoadedModel.of(module, type(module).__name__, "as given", WeightsMetadata())
    device = next((str(parameter.device) for parameter in module.parameters()), "cpu")
    return replace(loaded, device=device, preprocess=replace(loaded.preprocess, device=device))
