"""Torchvision's quantized models: with its quantized weights, or made from float weights on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.ao import quantization
from torch.nn import functional as F

from hookscope.errors import ModelError, WeightsError
from hookscope.models.inputs import is_quantized
from hookscope.models.loaded import LoadedModel
from hookscope.models.model_source import Progress, WeightsChoice, WeightsKind
from hookscope.models.torchvision_builders import load_from_torchvision, torchvision_models

_CELLS = (1, 2, 4, 8, 16, 32, 64, 128)
_PICTURES = 8


def load_quantized(
    model: str, builder: str, weights: WeightsChoice, seed: int, progress: Progress | None
) -> LoadedModel:
    """The model ``builder`` of torchvision, whose layers compute in 8 bits, under the name ``model``.

    Float weights (random, a checkpoint, weights of the float model) are quantized here, see `quantize`; ``auto`` and
    ``default`` mean torchvision's quantized weights, and ``auto`` falls back on weights of the float model.
    """
    engines = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
    if not engines:
        raise ModelError(f"cannot build {model}: this build of torch has no engine for quantized layers")
    own = WeightsChoice.parse(torchvision_models().get_model_weights(builder).DEFAULT)
    try:
        first = own if weights.kind in (WeightsKind.AUTO, WeightsKind.DEFAULT) else weights
        loaded = load_from_torchvision(builder, first, seed, progress)
    except WeightsError:
        if weights.kind is not WeightsKind.AUTO:
            raise
        loaded = load_from_torchvision(builder, weights, seed, progress)
    loaded = replace(loaded, name=model)
    return loaded if is_quantized(loaded.model) else quantize(loaded)


def quantize(loaded: LoadedModel) -> LoadedModel:
    """A quantizable float model of torchvision with its layers fused and quantized for this machine, in place.

    Ranges of activations are those on synthetic pictures: on photographs a random resnet18 is then 4 % off its float
    twin, 3 % if it is calibrated with the photographs themselves, and 67 % with torchvision's ``torch.rand``.
    """
    net: Any = loaded.model.eval()
    net.fuse_model(is_qat=False)
    net.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    quantization.prepare(net, inplace=True)
    with torch.no_grad():
        net(calibration_pictures(loaded))
    quantization.convert(net, inplace=True)
    note = f"{loaded.name} is quantized here from float weights, with ranges of {_PICTURES} synthetic pictures"
    return replace(loaded, notes=(*loaded.notes, note))


def calibration_pictures(loaded: LoadedModel) -> Tensor:
    """``(8, C, H, W)`` prepared pictures of noise at all scales, as photographs have it; always the same ones."""
    channels, height, width = loaded.preprocess.input_shape
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(_PICTURES, channels, height, width)
    for cells in _CELLS:
        noise = torch.randn(_PICTURES, channels, cells, cells, generator=generator)
        total += F.interpolate(noise, size=(height, width), mode="bilinear", align_corners=False)
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    values: Any = loaded.preprocess.transforms
    return torch.stack([values.values(picture) for picture in (total - low) / (high - low)])
