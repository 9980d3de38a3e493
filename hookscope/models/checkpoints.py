"""Checkpoint files: read without executing anything, held against a model, loaded into it whole or not at all."""

from __future__ import annotations

import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_ema", "net")
_PREFIXES = ("module.", "_orig_mod.")


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The state dict in a checkpoint file, with wrappers and prefixes taken off; nothing in the file is executed.

    Understood are ``.safetensors`` and what ``torch.save`` writes, told apart by content; ``state_dict``, ``model``,
    ``model_state_dict`` and ``model_ema`` wrappers; ``module.`` and ``_orig_mod.`` prefixes.

    Raises:
        WeightsError: missing, damaged, not a state dict, or a pickle that wants to run code.
    """
    content = load_file(path)
    wrapped = ("model.",) if "pytorch-lightning_version" in content else ()
    for _ in _WRAPPERS:
        inner = next((content[w] for w in _WRAPPERS if isinstance(content.get(w), Mapping)), None)
        if inner is None:
            break
        content = inner
    state = _tensors_of(content)
    if not state:
        keys = ", ".join(map(str, list(content)[:5])) or "nothing"
        raise WeightsError(f"no state dict in {path}", f"it holds {keys}", "save model.state_dict()")
    return _without_prefixes(state, _PREFIXES + wrapped)


def _tensors_of(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    import torch

    found = {key: value for key, value in content.items() if isinstance(value, torch.Tensor) and isinstance(key, str)}
    found.pop("n_averaged", None)  # what an averaged model carries beside its weights
    return found


def _without_prefixes(state: dict[str, Tensor], prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    while prefix := next((p for p in prefixes if all(key.startswith(p) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def load_file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The mapping in a checkpoint file, read without executing anything."""
    content = load_content(path)
    if not isinstance(content, Mapping):
        held = type(content).__name__
        raise WeightsError(f"no state dict in {path}", f"it holds a {held}", "save model.state_dict()")
    return content


def load_content(path: str | os.PathLike[str]) -> Any:
    """Whatever tensors a file of torch or safetensors holds, read without executing anything."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"cannot read weights {path}: {reason}") from error
    if not head:
        raise WeightsError(f"cannot read weights {path}: the file is empty")
    return _load_safetensors(path) if head[8:9] == b"{" else _load_torch(path, head)


def _load_safetensors(path: str | os.PathLike[str]) -> Any:
    try:
        from safetensors.torch import load_file as load
    except ImportError:
        raise WeightsError(
            f"{path} is a safetensors file and the package is missing", do="pip install safetensors"
        ) from None
    try:
        return load(path)
    except Exception as error:
        raise WeightsError(f"cannot read weights {path}: {_first_line(error)}", "damaged or cut short") from error


def _load_torch(path: str | os.PathLike[str], head: bytes) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        danger = _danger(str(error), head)
        if danger:
            asked = f"{path} is more than weights: loading it {danger}; refused"
            raise WeightsError(asked, do="save model.state_dict()") from error
        raise WeightsError(f"cannot read weights {path}: damaged, cut short or no checkpoint") from error


def _danger(text: str, head: bytes) -> str:
    """What a refused file would have done; empty for one that is merely damaged or no checkpoint.

    torch's own text is long and advises the unsafe switch: it is read here and never shown.
    """
    if refused := re.search(r"GLOBAL ([\w.]+)", text):
        return f"would run code ({refused[1]})"
    if "TorchScript" in text:
        return "would run code (TorchScript)"
    return "could run code" if "weights_only" in text and head[:1] == b"\x80" else ""  # 0x80: a pickle begins


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _is_optional(key: str) -> bool:
    return key.endswith("num_batches_tracked")  # old checkpoints have none


def mismatches(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """The keys that are missing, left over or of another shape when ``state`` is loaded into ``model``."""
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    given = {key: tuple(value.shape) for key, value in state.items()}
    wrong = (key for key in sorted(own.keys() | given.keys()) if own.get(key) != given.get(key))
    return [key for key in wrong if key in given or not _is_optional(key)]


def load_into(model: nn.Module, state: Mapping[str, Tensor], path: str) -> list[str]:
    """Load a state dict that has no `mismatches` into ``model``, and return what is to be noted of it.

    Raises:
        WeightsError: where a tensor cannot become what the model holds, such as one of 8-bit integers.
    """
    own = model.state_dict()
    missing = {key: value for key, value in own.items() if key not in state}
    whole: OrderedDict[str, Any] = OrderedDict(**missing, **state)
    # the keys are those of this layout: without its versions, MNASNet and others refuse or rename them
    whole._metadata = own._metadata  # type: ignore[attr-defined]
    try:
        model.load_state_dict(whole)
    except (RuntimeError, ValueError, TypeError) as error:
        raise WeightsError(f"{path} does not fit {type(model).__name__}: {_first_line(error)}") from error
    return non_finite_note(path, state)


def load_checkpoint(model: nn.Module, path: str, name: str) -> tuple[str, list[str]]:
    """Load the file ``path`` into ``model``, called ``name``; return the label of the weights and the notes.

    Raises:
        WeightsError: the file cannot be read or does not fit.
    """
    state = read_state_dict(path)
    if mismatches(model, state):
        raise fitting_error(path, name, model, state, None)
    return Path(path).name, load_into(model, state, path)


def non_finite_note(path: str, state: Mapping[str, Tensor]) -> list[str]:
    """One note when weights hold NaN or infinite values, none otherwise."""
    import torch

    bad = sum(int((~torch.isfinite(v)).sum()) for v in state.values() if v.is_floating_point())
    return [f"{path} holds {bad} values that are NaN or infinite"] if bad else []


def fitting_error(
    path: str, name: str, model: nn.Module, state: Mapping[str, Tensor], fits: str | None
) -> WeightsError:
    """The one line for a checkpoint of another architecture: how many keys match, and which model would fit."""
    wrong = mismatches(model, state)
    own = model.state_dict()
    matching = sum(key in own and own[key].shape == value.shape for key, value in state.items())
    missing = [key for key in wrong if key not in state]
    unknown = [key for key in wrong if key not in own]
    other = [f"{key} has another shape" for key in wrong if key in own and key in state]
    found = [f"{keys[0]} is {what}" for keys, what in ((missing, "missing"), (unknown, "unknown to the model")) if keys]
    exists = ", ".join([f"{matching} of {len(own)} keys match", *found, *other[:1]])
    return WeightsError(f"{Path(path)} does not fit {name}", exists, f"it would fit {fits}" if fits else "")


def fitting_kwargs(
    build: Callable[..., nn.Module], tries: Iterable[dict[str, Any]], state: Mapping[str, Tensor]
) -> dict[str, Any] | None:
    """The first of ``tries`` with which ``build`` makes a model that ``state`` fits; None if nothing helps.

    A checkpoint that was tuned to another number of classes fits with that number.
    """
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
    """The classes of a fine-tuned head: every key is there, and what differs does so in its first size alone."""
    own = model.state_dict()
    sizes: set[int] = set()
    for key in wrong:
        if key not in own or key not in state or not own[key].dim() or own[key].shape[1:] != state[key].shape[1:]:
            return None
        sizes.add(int(state[key].shape[0]))
    return min(sizes) if sizes else None
