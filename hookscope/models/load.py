"""MODEL argument and weights to a model that is ready to run, with all that belongs to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import ModelError, UsageError
from hookscope.images import InputImage
from hookscope.models.download import Progress
from hookscope.models.from_python import BuiltModel, load_from_elsewhere
from hookscope.models.from_torchvision import load_from_torchvision, quiet_and_seeded
from hookscope.models.inputs import CLIP_FRAMES, as_inputs, family_of, in_channels, native_size
from hookscope.models.preprocess import MODES, Preprocess, made_for, usual_transforms


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, in eval mode, and what belongs to it.

    Attributes:
        model: The module, on ``device``.
        name: As it was asked for.
        weights: What the weights are, such as ``IMAGENET1K_V1``, ``random (seed 0)`` or a file's name.
        preprocess: Photograph to tensor ``(3, H, W)``.
        categories: Class names, None where none are known.
        family: ``classification``, ``segmentation``, ``detection``, ``video`` or ``optical_flow``.
        device: Where the model is.
        notes: What the person should know, such as why the weights are random.
    """

    model: nn.Module
    name: str
    weights: str
    preprocess: Preprocess
    categories: tuple[str, ...] | None
    family: str
    device: str
    notes: tuple[str, ...] = ()

    def prepare(self, picture: InputImage) -> Tensor:
        """What the model is shown of a picture that was read: ``(3, H, W)``, of a clip ``(3, T, H, W)``."""
        return self.preprocess(picture.frames if len(picture.frames) > 1 else picture.image)

    def inputs(self, *pictures: Tensor) -> tuple[Any, ...]:
        """The positional inputs of one pass for prepared pictures ``(3, H, W)``, as the family takes them."""
        return as_inputs(self.family, pictures)


def load_model(
    model: str,
    weights: Any = "auto",
    seed: int = 0,
    device: str = "auto",
    *,
    preprocess: str = "weights",
    input_size: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build a model, give it weights and eval mode, and find the preprocessing and class names that go with them.

    Args:
        model: A torchvision name, ``shapes`` (which ships, trained), ``package.module:factory``,
            ``path/to/file.py:factory`` or ``timm:NAME``.
        weights: ``auto`` (torchvision's default weights, or seeded random ones where neither cache nor network has
            them, which ``notes`` says), ``default`` or a weights name (these or none), ``none``, or a checkpoint;
            torchvision's own None and ``ResNet34_Weights.DEFAULT`` are understood too. A safetensors checkpoint can
            bring class names and transforms of its own, see `hookscope.models.metadata`.
        seed: Seed of random weights; the global random state is left as it was.
        device: ``auto``, ``cpu``, ``cuda`` (``cuda:1``) or ``mps``.
        preprocess: ``weights``, ``stretch`` or ``none``, see `Preprocess`.
        input_size: ``(H, W)`` of the picture the model sees.
        progress: Called with bytes done and total during a download.

    Raises:
        ModelError: no such model, or it cannot be built.
        WeightsError: no such weights, or they cannot be had, trusted or fitted.
        UsageError: for a device or a preprocessing that does not exist.

    Example:
        >>> net = load_model("squeezenet1_1", weights="none", seed=1)
        >>> net.weights, net.family, net.preprocess.describe()
        ('random (seed 1)', 'classification', 'ImageClassification resize 256 crop 224')
    """
    if not isinstance(model, str):
        raise UsageError(f"a model is named, not a {type(model).__name__}", do="hooks need no loading: capture(model)")
    # as torchvision spells them: None, and the members of its enumerations
    weights = "none" if weights is None else weights if isinstance(weights, str) else getattr(weights, "name", weights)
    if preprocess not in MODES:
        raise UsageError(f"no preprocessing '{preprocess}'", f"there are {', '.join(MODES)}")
    if preprocess == "none" and input_size is not None:
        raise UsageError("preprocess none keeps the picture's own size", do="leave the input size out, or use stretch")
    where = pick_device(device)
    with quiet_and_seeded(seed):
        if ":" in model:
            made = load_from_elsewhere(model, weights, seed)
        else:
            made = load_from_torchvision(model, weights, seed, progress)
    if any(parameter.is_meta for parameter in made.model.parameters()):
        raise ModelError(f"{model} is on the meta device: it has shapes and no values", do="build it on the cpu")
    made.model.eval().to(where)
    return LoadedModel(
        model=made.model,
        name=model,
        weights=made.weights,
        preprocess=_preprocess(made, preprocess, input_size, where),
        categories=made.categories,
        family=family_of(made.model),
        device=where,
        notes=tuple(made.notes),
    )


def pick_device(device: str) -> str:
    """``device`` as torch spells it; ``auto`` is the fastest there is.

    Raises:
        UsageError: for a device this machine or torch does not have.
    """
    have = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    if device == "auto":
        return have[-1]
    found = re.fullmatch(r"(cpu|cuda|mps)(?::([0-9]{1,3}))?", device)
    if found is None or found[1] not in have or (found[2] and found[1] != "cuda"):
        raise UsageError(f"no device '{device}'", f"this machine has {', '.join(have)}")
    if found[2] and int(found[2]) >= torch.cuda.device_count():
        raise UsageError(f"no device '{device}'", f"there are {torch.cuda.device_count()} CUDA devices")
    return device


def _preprocess(made: BuiltModel, mode: str, size: tuple[int, int] | None, device: str) -> Preprocess:
    family = family_of(made.model)
    transforms = made.transforms or usual_transforms(family)
    native = native_size(made.model)
    # a ViT without weights may be made for another size than the default weights are (vit_h_14)
    if size is None and native is not None and mode == "weights" and made_for(transforms) != native:
        size = native
    return Preprocess(
        family=family,
        transforms=transforms,
        mode=mode,
        size=size,
        default_size=native or made_for(transforms),
        channels=in_channels(made.model),
        device=device,
        frames=CLIP_FRAMES if family == "video" else 1,
        dtype=_dtype_of(made.model),
    )


def _dtype_of(model: nn.Module) -> Any:
    """The floating-point type that the model calculates in: that of its first parameter."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
