"""What interventions bring in from files: another picture's activations, a mean over pictures, a direction."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.errors import HookscopeError, UsageError, WeightsError
from hookscope.hooks import capture, map_tensors, tensors_in
from hookscope.models import load_content

Inputs = tuple[Any, ...]
_SUFFIXES = (".pt", ".pth", ".safetensors")


def activations_at(
    model: nn.Module, inputs: Inputs, where: str, types: Iterable[Any] = ("Conv2d",), on: str = "output"
) -> dict[str, Any]:
    """What the calls that ``where`` selects put out, or were given, in a pass on ``inputs``; by key.

    Args:
        model: In the mode in which it shall run.
        inputs: Its positional inputs.
        where: A layer selection.
        types: Class names that indices count.
        on: ``output`` or ``input``.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.ReLU())
        >>> list(activations_at(net, (torch.ones(1, 1, 2, 2),), "0"))
        ['0']
    """
    with torch.no_grad(), capture(model, where, types, inputs=on == "input") as kept:
        model(*map_tensors(inputs, lambda tensor: tensor.clone()))
    found = kept.inputs if on == "input" else kept
    return {key: found[key] for key in found}


def mean_at(found: Iterable[dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """The mean of the activations of several passes, each over its own images; by key and part.

    Args:
        found: What `activations_at` gave for each; only sums are kept.

    Raises:
        UsageError: for calls or shapes that differ, of pictures of different sizes.

    Example:
        >>> import torch
        >>> mean_at([{"fc": torch.zeros(1, 2)}, {"fc": torch.ones(1, 2)}])["fc"][""].tolist()
        [[0.5, 0.5]]
    """
    sums: dict[str, dict[str, Tensor]] = {}
    images: dict[tuple[str, str], int] = {}
    for one in found:
        for key, value in one.items():
            for part, tensor in tensors_in(value).items():
                values = (tensor.dequantize() if tensor.is_quantized else tensor).double().sum(0, keepdim=True)
                before = sums.setdefault(key, {}).get(part)
                if before is not None and before.shape != values.shape:
                    shapes = " and ".join("x".join(map(str, shape[1:])) for shape in (before.shape, values.shape))
                    raise UsageError(
                        f"no mean at '{key}': its activations are {shapes}", do="take pictures of one size"
                    )
                sums[key][part] = values if before is None else before + values
                images[key, part] = images.get((key, part), 0) + len(tensor)
    return {key: {part: total / images[key, part] for part, total in parts.items()} for key, parts in sums.items()}


def read_direction(path: str) -> Tensor:
    """The one tensor in a ``.npy``, ``.pt``, ``.pth`` or ``.safetensors`` file.

    Raises:
        WeightsError: for a file that cannot be read, and one that holds more or something else.

    Example:
        >>> import numpy as np, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(folder + "/direction.npy", np.ones(3, np.float32))
        ...     read_direction(folder + "/direction.npy").tolist()
        [1.0, 1.0, 1.0]
    """
    reader: Callable[[str], Any] = _read_array if path.lower().endswith((".npy", ".npz")) else _read_tensors
    found = tensors_in(reader(path))
    if len(found) != 1:
        exists = f"it holds {len(found)}" + (f": {', '.join(list(found)[:4])}" if found else "")
        raise WeightsError(f"{path} is no single tensor", exists, "save the direction alone")
    (tensor,) = found.values()
    if not tensor.is_floating_point():
        tensor = tensor.float()
    if not bool(tensor.isfinite().all()):
        raise WeightsError(f"{path} holds NaN or Inf", do="give a finite direction")
    return tensor


def _read_tensors(path: str) -> Any:
    try:
        return load_content(path)
    except WeightsError as error:
        reason = error.__cause__
        if isinstance(reason, OSError):
            asked = f"cannot read {path}: {reason.strerror or 'it is damaged'}"
            raise WeightsError(asked, do=_nearby(path)) from error
        if path.lower().endswith(_SUFFIXES):  # what is wrong with it is told
            raise
        do = "give a .npy, .pt or .safetensors file with one tensor"
        raise WeightsError(f"no direction in {path}", do=do) from error


def _read_array(path: str) -> Any:
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    except OSError as error:
        reason = error.strerror or "it is damaged"
        raise WeightsError(f"cannot read {path}: {reason}", do=_nearby(path)) from error
    except (ValueError, TypeError, EOFError, HookscopeError) as error:
        raise WeightsError(f"{path} is no NumPy file of numbers", do="save one with numpy.save") from error


def _nearby(path: str) -> str:
    return "" if os.path.exists(path) else "name a file that exists"
