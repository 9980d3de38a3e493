"""Checkpoint files: read without running code, compared with a model, loaded completely or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hookscope.errors import WeightsError

_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_ema", "net")
_PREFIXES = ("module.", "_orig_mod.")
_MOST_SWELLING = 32  # bytes in a zip for one of the file: torch packs nothing, and packed weights halve at best
_ALWAYS_ALLOWED = 1 << 26  # bytes in a zip, whatever the file has
_LARGEST_HEADER = 1 << 26  # bytes of a pickle or of a safetensors header: each makes a Python object


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The state dict in a checkpoint file, without wrappers and prefixes; no code in the file runs.

    A WeightsError says that the file is missing, damaged, not a state dict, or a pickle that would run code.
    """
    content = load_file(path)
    wrapped = ("model.",) if "pytorch-lightning_version" in content else ()
    for _ in _WRAPPERS:
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    state = {key: value for key, value in content.items() if isinstance(value, Tensor) and isinstance(key, str)}
    state.pop("n_averaged", None)  # the counter of an averaged model is not a weight
    if not state:
        keys = ", ".join(map(str, list(content)[:5])) or "nothing"
        raise WeightsError(f"no state dict in {path}", f"it holds {keys}", "save model.state_dict()")
    while prefix := next((p for p in _PREFIXES + wrapped if all(key.startswith(p) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def load_file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The mapping in a checkpoint file; no code in the file runs."""
    content = load_content(path)
    if not isinstance(content, Mapping):
        exists = f"it holds a {type(content).__name__}"
        raise WeightsError(f"no state dict in {path}", exists, "save model.state_dict()")
    return content


def load_content(path: str | os.PathLike[str]) -> Any:
    """The content of a torch or safetensors file, told apart by its first bytes; no code in the file runs."""
    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            # a pipe cannot be read twice, a device may never end
            raise WeightsError(f"cannot read weights {path}", "it is a pipe or a device", "give a file")
        with open(path, "rb") as file:
            head = file.read(9)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"cannot read weights {path}: {reason}") from error
    if not head:
        raise WeightsError(f"cannot read weights {path}: the file is empty")
    _check_size(path, head)
    return _load_safetensors(path) if head[8:9] == b"{" else _load_torch(path, head)


def _check_size(path: str | os.PathLike[str], head: bytes) -> None:
    """Refuse a file whose content would take far more memory than the file itself."""
    size, header = os.path.getsize(path), int.from_bytes(head[:8], "little") if head[8:9] == b"{" else 0
    content = 0
    if head[:2] == b"PK":
        with contextlib.suppress(zipfile.BadZipFile, ValueError, NotImplementedError), zipfile.ZipFile(path) as file:
            content = sum(entry.file_size for entry in file.infolist())
            header = max((entry.file_size for entry in file.infolist() if entry.filename.endswith(".pkl")), default=0)
    exists = f"it has {size:,} bytes and would unpack to {content:,}"
    if header > _LARGEST_HEADER:
        exists = f"its list of tensors has {header:,} bytes"
    elif content <= max(_ALWAYS_ALLOWED, _MOST_SWELLING * size):
        return
    raise WeightsError(f"cannot read weights {path}: too large", exists, "save model.state_dict()")


def _load_safetensors(path: str | os.PathLike[str]) -> Any:
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:
        raise WeightsError(f"cannot read weights {path}: {_first_line(error)}", "damaged or cut short") from error


def _load_torch(path: str | os.PathLike[str], head: bytes) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        danger = _danger(str(error), head)
        if danger:
            asked = f"{path} is more than weights: loading it {danger}; refused"
            raise WeightsError(asked, do="save model.state_dict()") from error
        raise WeightsError(f"cannot read weights {path}: damaged, cut short or not a checkpoint") from error


def _danger(text: str, head: bytes) -> str:
    """What a refused file would do; empty if it is only damaged or not a checkpoint.

    ``text`` is torch's refusal, which is long and recommends the unsafe switch: it is never shown.
    """
    if refused := re.search(r"GLOBAL ([\w.]+)", text):
        return f"would run code ({refused[1]})"
    if "TorchScript" in text:
        return "would run code (TorchScript)"
    return "could run code" if "weights_only" in text and head[:1] == b"\x80" else ""  # a pickle begins with 0x80


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def mismatches(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """The keys of ``state`` and ``model`` that are missing, unknown or of another shape."""
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    loaded = {key: tuple(value.shape) for key, value in state.items()}
    wrong = (key for key in sorted(own.keys() | loaded.keys()) if own.get(key) != loaded.get(key))
    return [key for key in wrong if key in loaded or not key.endswith("num_batches_tracked")]  # old files lack it


def load_into(model: nn.Module, state: Mapping[str, Tensor], path: str) -> list[str]:
    """Load a state dict without `mismatches` into ``model``, and return a note if it has NaN or infinite values."""
    own = model.state_dict()
    missing = {key: value for key, value in own.items() if key not in state}
    whole: OrderedDict[str, Any] = OrderedDict(**missing, **state)
    # Without the versions of this layout MNASNet and others refuse or rename the keys.
    whole._metadata = own._metadata  # type: ignore[attr-defined]
    _check_types(own, state, path)
    try:
        model.load_state_dict(whole)
    except (RuntimeError, ValueError, TypeError) as error:
        raise WeightsError(f"{path} does not fit {type(model).__name__}: {_first_line(error)}") from error
    bad = sum(int((~torch.isfinite(value)).sum()) for value in state.values() if value.is_floating_point())
    return [f"{path} holds {bad} values that are NaN or infinite"] if bad else []


def _check_types(own: Mapping[str, Tensor], state: Mapping[str, Tensor], path: str) -> None:
    """Refuse what a copy would change: floats in other types than floats, fractions in whole numbers."""
    wrong = [
        key
        for key, value in own.items()
        if isinstance(value, Tensor)
        and not key.endswith("num_batches_tracked")
        and not _is_kept(state.get(key, value), value)
    ]
    if wrong:
        first = f"{wrong[0]} is {_type_name(state[wrong[0]])} where the model has {_type_name(own[wrong[0]])}"
        exists = f"{first}, and so are {len(wrong) - 1} more" if len(wrong) > 1 else first
        raise WeightsError(f"{path} does not hold the weights as the model has them", exists, "save them as floats")


def _is_kept(value: Tensor, own: Tensor) -> bool:
    """Whether ``value`` has the same numbers, to the precision of floats, in the type of ``own``."""
    if value.is_quantized or own.is_quantized or value.is_complex() or own.is_complex():
        return value.dtype == own.dtype or (value.is_complex() and own.is_complex())
    if own.is_floating_point():
        return value.is_floating_point()
    return torch.equal(value.to(own.dtype).to(value.dtype), value)


def _type_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def load_checkpoint(model: nn.Module, path: str, name: str) -> tuple[str, list[str]]:
    """Load the file ``path`` into ``model``, called ``name``; return the label of the weights and the notes."""
    state = read_state_dict(path)
    if mismatches(model, state):
        raise fitting_error(path, name, model, state, None)
    return Path(path).name, load_into(model, state, path)


def fitting_error(
    path: str, name: str, model: nn.Module, state: Mapping[str, Tensor], fits: str | None
) -> WeightsError:
    """The error for a checkpoint of another architecture: how many keys match, and which model would fit."""
    wrong = mismatches(model, state)
    own = model.state_dict()
    matching = sum(key in own and own[key].shape == value.shape for key, value in state.items())
    missing = [key for key in wrong if key not in state]
    unknown = [key for key in wrong if key not in own]
    other = [f"{key} has another shape" for key in wrong if key in own and key in state]
    first = [f"{keys[0]} is {what}" for keys, what in ((missing, "missing"), (unknown, "unknown to the model")) if keys]
    exists = ", ".join([f"{matching} of {len(own)} keys match", *first, *other[:1]])
    return WeightsError(f"{Path(path)} does not fit {name}", exists, f"it would fit {fits}" if fits else "")


def fitting_kwargs(
    build: Callable[..., nn.Module], tries: Iterable[dict[str, Any]], state: Mapping[str, Tensor]
) -> dict[str, Any] | None:
    """The first of ``tries``, alone or with the number of classes of ``state``, that builds a model which it fits."""
    for kwargs in tries:
        model = build(**kwargs)
        wrong = mismatches(model, state)
        if not wrong:
            return kwargs
        classes = _other_number_of_classes(model, state, wrong)
        if classes is not None:
            kwargs = kwargs | {"num_classes": classes}
            if not mismatches(build(**kwargs), state):
                return kwargs
    return None


def _other_number_of_classes(model: nn.Module, state: Mapping[str, Tensor], wrong: Sequence[str]) -> int | None:
    """The number of classes of a fine-tuned head: no key is missing, and shapes differ in their first size only."""
    own = model.state_dict()
    sizes: set[int] = set()
    for key in wrong:
        if key not in own or key not in state or not own[key].dim() or own[key].shape[1:] != state[key].shape[1:]:
            return None
        sizes.add(int(state[key].shape[0]))
    return min(sizes) if sizes else None
