"""Values of interventions from files: another image's activations, a mean over images, a direction."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.errors import UsageError, WeightsError
from hookscope.hooks import Layers, capture, map_tensors, tensors_in
from hookscope.images import InputImage, find_pictures, read_picture
from hookscope.interventions.spec import InterventionSpec
from hookscope.models import LoadedModel, load_content, model_errors_as_input_errors


def read_source(
    net: LoadedModel,
    where: str,
    spec: InterventionSpec,
    types: Iterable[Any] | None = None,
    on_image: Callable[[InputImage], object] = lambda image: None,
) -> Any:
    """Read the file or folder that ``from=`` names, for an intervention at the layers ``where``; None without it."""

    def activations(paths: Iterable[str]) -> Iterator[dict[str, Any]]:
        if where in dict(net.model.named_parameters(remove_duplicate=False)):
            asked = f"{spec.word} needs a layer, and {where} is a parameter"
            raise UsageError(asked, do=f"name its layer: {where.rpartition('.')[0]}")
        for path in paths:
            image = read_picture(path, frames=net.preprocess.frames)
            on_image(image)
            tensor = net.prepare(image)
            with model_errors_as_input_errors(net.name, tensor):
                yield activations_at(net.model, net.inputs(tensor), where, types, spec.values.get("on", "output"))

    if spec.source is None:
        return None
    if spec.from_file == "tensor":
        return read_direction(spec.source)
    if spec.from_file == "image":
        return next(activations([spec.source]))
    return mean_at(activations(find_pictures([spec.source])))


def activations_at(
    model: nn.Module, inputs: tuple[Any, ...], where: Layers, types: Iterable[Any] | None = None, on: str = "output"
) -> dict[str, Any]:
    """Capture the outputs, or the inputs, of the calls at ``where`` in a pass on ``inputs``, by key."""
    with torch.no_grad(), capture(model, where, types, inputs=on == "input") as activations:
        model(*map_tensors(inputs, torch.clone))
    values = activations.inputs if on == "input" else activations
    return {key: values[key] for key in values}


def mean_at(activations: Iterable[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Average activations over all images of several passes, by key and part; only sums are kept."""
    sums: dict[str, dict[str, Tensor]] = {}
    images: dict[tuple[str, str], int] = {}
    for of_pass in activations:
        for key, value in of_pass.items():
            for part, tensor in tensors_in(value).items():
                values = (tensor.dequantize() if tensor.is_quantized else tensor).double().sum(0, keepdim=True)
                before = sums.setdefault(key, {}).get(part)
                if before is not None and before.shape != values.shape:
                    shapes = " and ".join("x".join(map(str, shape[1:])) for shape in (before.shape, values.shape))
                    asked = f"no mean at '{key}': its activations are {shapes}"
                    raise UsageError(asked, do="use images of one size")
                sums[key][part] = values if before is None else before + values
                images[key, part] = images.get((key, part), 0) + len(tensor)
    return {key: {part: total / images[key, part] for part, total in parts.items()} for key, parts in sums.items()}


def read_direction(path: str) -> Tensor:
    """Read the only tensor in a ``.npy``, ``.pt``, ``.pth`` or ``.safetensors`` file."""
    tensors = tensors_in(_read_content(path))
    if len(tensors) != 1:
        exists = f"it holds {len(tensors)}" + (f": {', '.join(list(tensors)[:4])}" if tensors else "")
        raise WeightsError(f"{path} is not a single tensor", exists, "save the direction alone")
    (tensor,) = tensors.values()
    if not tensor.is_floating_point():
        tensor = tensor.float()
    if not bool(tensor.isfinite().all()):
        raise WeightsError(f"{path} holds NaN or Inf", do="give a finite direction")
    return tensor


def _read_content(path: str) -> Any:
    try:
        return _read_arrays(path) if path.lower().endswith((".npy", ".npz")) else load_content(path)
    except (OSError, WeightsError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if isinstance(reason, OSError):
            do = "" if os.path.exists(path) else "name a file that exists"
            raise WeightsError(f"cannot read {path}: {reason.strerror or 'it is damaged'}", do=do) from error
        if path.lower().endswith((".npy", ".npz", ".pt", ".pth", ".safetensors")):
            raise
        do = "give a .npy, .pt or .safetensors file with one tensor"
        raise WeightsError(f"no direction in {path}", do=do) from error


def _read_arrays(path: str) -> dict[str, Tensor]:
    try:
        with open(path, "rb") as file:  # numpy does not close a damaged .npz file that it opened itself
            loaded = np.load(file, allow_pickle=False)
            arrays = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path} is not a NumPy file of numbers", do="save one with numpy.save") from error
