"""Checkpoints: state dicts read without running code, compared with a model, and loaded completely or not at all."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from hookscope.errors import WeightsError, first_line, nearest
from hookscope.findings import counted, listed
from hookscope.models.loaded import dtype_name

# Names of state dicts in a checkpoint, those that are looked for first. Others are taken where none of these is there.
_USUAL: tuple[str, ...] = (
    "state_dict",
    "model_state_dict",
    "model",
    "model_ema",
    "net",
    "ema",
    "state_dict_ema",
    "ema_state_dict",
)
_USUAL += ("network", "module", "params_ema", "params", "weights", "student", "teacher", "encoder", "backbone")
_DEEPEST = 3  # state dicts lie at most this deep in others
# The weights in a folder of transformers, accelerate, diffusers, timm and OpenCLIP.
_IN_FOLDERS = tuple(
    stem + end
    for end in (".safetensors.index.json", ".safetensors", ".bin.index.json", ".bin")
    for stem in ("model", "pytorch_model", "diffusion_pytorch_model", "open_clip_model", "open_clip_pytorch_model")
)
_SUFFIXES = (".safetensors", ".ckpt", ".pth", ".pt", ".bin", ".tar")
_NOT_WEIGHTS = ("optimizer", "scheduler", "scaler", "training_args", "random_states", "rng_state", "sampler")
_MOST_SWELLING = 32  # bytes in a zip for one of the file: torch packs nothing, and packed weights halve at best
_ALWAYS_ALLOWED = 1 << 26  # bytes in a zip, whatever the file has
_LARGEST_HEADER = 1 << 26  # bytes of a pickle or of a safetensors header: each makes a Python object


@dataclass(frozen=True)
class Checkpoint:
    """The state dicts in the file ``path``, or behind the index ``path``, by their place in it; the usual one first.

    ``label`` is the name of the file, after the folder that was given.
    """

    path: str
    label: str
    states: Mapping[str, dict[str, Tensor]]


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The state dicts in a file, or in a folder of transformers, accelerate, timm or Lightning; no code in it runs.

    A WeightsError says that a file is missing, damaged, without state dict, or a pickle that would run code.
    """
    file, label = os.fspath(path), Path(path).name
    if os.path.isdir(file):
        file = _weights_in(file)
        label = f"{Path(path).resolve().name}/{Path(file).name}"
    if file.endswith(".index.json"):
        return Checkpoint(file, label, {"": _read_shards(file)})
    content = load_file(file)
    states = dict(_state_dicts(content))
    if not states:
        keys = ", ".join(map(str, list(content)[:5])) or "nothing"
        raise WeightsError(f"no state dict in {file}", f"it holds {keys}", "save model.state_dict()")
    return Checkpoint(file, label, states)


def _state_dicts(content: Mapping[Any, Any], place: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Place and state dict of all mappings from names to tensors in ``content``, the usual one first."""
    inner = {
        key: value
        for key, value in content.items()
        if isinstance(key, str) and isinstance(value, Mapping) and "param_groups" not in value
    }
    # the counter of an averaged model is not a weight
    names = (key for key, value in content.items() if isinstance(value, Tensor) and isinstance(key, str))
    state = {key: content[key] for key in names if key != "n_averaged"}
    usual = [key for key in _USUAL if key in inner]
    for key in usual or ([] if state else inner):
        if place.count(".") < _DEEPEST:
            yield from _state_dicts(inner[key], f"{place}.{key}".lstrip("."))
    if state:
        yield place, state


def _weights_in(folder: str) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise WeightsError(f"cannot read weights {folder}: {error.strerror}") from error
    if usual := next((name for name in _IN_FOLDERS if name in names), None):
        return os.path.join(folder, usual)
    weights = [name for name in names if name.endswith(_SUFFIXES) and not name.startswith(_NOT_WEIGHTS)]
    if len(weights) == 1:
        return os.path.join(folder, weights[0])
    if weights:
        exists, do = f"it holds {listed(weights)}", f"name one, such as {os.path.join(folder, weights[-1])}"
        raise WeightsError(f"{folder} holds several checkpoints", exists, do)
    folders = [name for name in names if os.path.isdir(os.path.join(folder, name)) and not name.startswith(".")]
    exists = f"it holds {listed(names)}" if names else "it is empty"
    do = f"name a folder in it, such as {os.path.join(folder, folders[-1])}" if folders else ""
    raise WeightsError(f"no weights in the folder {folder}", exists, do)


def _read_shards(index: str) -> dict[str, Tensor]:
    try:
        if os.path.getsize(index) > _LARGEST_HEADER:
            raise ValueError("it is too large")
        with open(index, encoding="utf-8") as file:
            places = json.load(file)["weight_map"]
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError("weight_map is not an object from key to file")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f"cannot read weights {index}: it is not an index: {first_line(error)}") from error
    folder, state = os.path.dirname(index), {}
    for name in dict.fromkeys(places.values()):
        if os.path.basename(name) != name or name in ("", ".."):
            raise WeightsError(f"cannot read weights {index}: it names a file outside its folder", f"'{name}'")
        if not os.path.exists(os.path.join(folder, name)):
            raise WeightsError(f"cannot read weights {index}: it names {name}, which is missing")
        content = load_file(os.path.join(folder, name))
        for key in (key for key, place in places.items() if place == name):
            if not isinstance(content.get(key), Tensor):
                raise WeightsError(f"cannot read weights {index}: {name} lacks {key}", nearest(key, list(content)))
            state[key] = content[key]
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
        reason, do = getattr(error, "strerror", None) or error, "" if os.path.exists(path) else "check the path"
        raise WeightsError(f"cannot read weights {path}: {reason}", do=do) from error
    if not head:
        raise WeightsError(f"cannot read weights {path}: the file is empty")
    _check_size(path, head)
    if head[8:9] != b"{":
        return _load_torch(path, head)
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:
        raise WeightsError(f"cannot read weights {path}: {first_line(error)}", "it is damaged or incomplete") from error


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


_MODELS = {".onnx": "it is an ONNX file", ".pt2": "it is a program of torch.export"}


def _load_torch(path: str | os.PathLike[str], head: bytes) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments of many training scripts
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        danger = _danger(str(error), head)
        if danger:
            asked = f"{path} is more than weights: loading it {danger}; refused"
            raise WeightsError(asked, do="save model.state_dict()") from error
        kind = _MODELS.get(os.path.splitext(path)[1], "")
        asked = f"cannot read weights {path}: {kind or 'damaged, incomplete or not a checkpoint'}"
        raise WeightsError(asked, do="give it as MODEL" if kind else "") from error


def _danger(text: str, head: bytes) -> str:
    """What a refused file would do; empty if it is only damaged or not a checkpoint.

    ``text`` is torch's refusal, which is long and recommends the unsafe switch: it is never shown.
    """
    if refused := re.search(r"GLOBAL ([\w.]+)", text):
        return f"would run code ({refused[1]})"
    if "TorchScript" in text:
        return "would run code (TorchScript)"
    return "could run code" if "weights_only" in text and head[:1] == b"\x80" else ""  # a pickle begins with 0x80


# Buffers of a BatchNorm that keep their values where a checkpoint lacks them; old files lack the first.
_COUNTER = "num_batches_tracked"
_STATISTICS = ("running_mean", "running_var")
_MAY_LACK = (_COUNTER, *_STATISTICS)
_PIVOTS = 3  # keys of the model by which prefixes are looked for
_MOST_PREFIXES = 32  # that are tried for each of them


def fitted(model: nn.Module, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], list[str]]:
    """The first state dict of ``checkpoint`` that has all keys of ``model``, and what was done to its keys.

    A prefix is taken off or added where this makes all keys of the model fit. Where none has all keys, it is the
    first state dict as it is. One with the shapes of the model goes before the others. Keys that fit as they are
    go before a copy of them with a prefix, such as an average.
    """
    if not all(isinstance(value, Tensor) for value in model.state_dict().values()):
        asked = f"cannot load {checkpoint.label} into {type(model).__name__}"
        raise WeightsError(asked, "its state holds more than tensors, as if quantized", "let the factory load it")
    own = _shapes(model.state_dict())
    usable: list[tuple[dict[str, Tensor], list[str]]] = []
    for place, state in checkpoint.states.items():
        for prefix in [_AS_IT_IS, *_prefixes(own, state)]:
            renamed = prefix.applied(state)
            if all(key in renamed or key.endswith(_MAY_LACK) for key in own):
                usable.append((renamed, _notes(checkpoint, place, prefix, renamed)))
                if len(_fitting(own, renamed)) == len(renamed):
                    if prefix == _AS_IT_IS or len(_fitting(own, state)) < len(own):
                        return usable[-1]
                    left = [key for key in state if key not in own]  # the copy
                    without = f"left out {counted(len(left), 'key')} that the model does not have: {listed(left)}"
                    return {key: state[key] for key in own}, [f"{checkpoint.label}: {without}"]
    return usable[0] if usable else (next(iter(checkpoint.states.values())), [])


@dataclass(frozen=True)
class Prefix:
    """What the keys of a checkpoint begin with, ``off``, and what the keys of the model begin with instead, ``on``."""

    off: str
    on: str

    def applied(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors whose key has the prefix, by their key in the model."""
        return {self.on + key.removeprefix(self.off): state[key] for key in state if key.startswith(self.off)}

    def __str__(self) -> str:
        if self.off and self.on:
            return f"keys began with {self.off} instead of {self.on}: renamed"
        return f"keys had the prefix {self.off}: taken off" if self.off else f"keys lacked the prefix {self.on}: added"


_AS_IT_IS = Prefix("", "")


def _prefixes(own: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> list[Prefix]:
    """The prefixes with which some key of ``state`` is one of ``own``, those with most keys of equal shape first."""
    keys = [key for key in own if not key.endswith(_MAY_LACK)]
    prefixes: dict[Prefix, None] = {}
    for pivot in dict.fromkeys(keys[:: max(1, len(keys) // _PIVOTS)]):
        ends = {key: _common_end(pivot, key) for key in state}
        best = sorted((key for key in ends if ends[key]), key=lambda key: -ends[key].count("."))[:_MOST_PREFIXES]
        prefixes |= {Prefix(key.removesuffix(ends[key]), pivot.removesuffix(ends[key])): None for key in best}
    whole = [p for p in prefixes if not p.on or not p.off or all(key.startswith(p.off) for key in state)]
    return sorted(whole, key=lambda prefix: -len(_fitting(own, prefix.applied(state))))


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in state.items()}


def _fitting(own: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> list[str]:
    return [key for key, value in state.items() if own.get(key) == tuple(value.shape)]


def _common_end(name: str, other: str) -> str:
    """The last parts that two dotted names share: ``conv.weight`` of ``net.conv.weight`` and ``a.conv.weight``."""
    pairs = zip(reversed(name.split(".")), reversed(other.split(".")), strict=False)
    return ".".join(reversed([part for part, same in takewhile(lambda pair: pair[0] == pair[1], pairs)]))


def _notes(checkpoint: Checkpoint, place: str, prefix: Prefix, taken: Mapping[str, Tensor]) -> list[str]:
    """What was taken of a checkpoint that holds more, and how its keys were changed."""
    notes, name = [], checkpoint.label
    others = [other for other, state in checkpoint.states.items() if other != place and len(state) >= len(taken) / 2]
    if others:
        notes.append(f"{name} holds {listed([place, *others])}: {place} is taken")
    state = checkpoint.states[place]
    if prefix != _AS_IT_IS:
        notes.append(f"{name}: {prefix}")
    left = [key for key in state if not key.startswith(prefix.off)]
    if left:
        notes.append(f"{name}: left out {counted(len(left), 'key')} without this prefix: {listed(left)}")
    return notes


def mismatches(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """The keys of ``state`` and ``model`` that are missing, unknown or of another shape; BatchNorm's may be missing."""
    own = _shapes(model.state_dict())
    loaded = _shapes(state)
    wrong = (key for key in sorted(own.keys() | loaded.keys()) if own.get(key) != loaded.get(key))
    return [key for key in wrong if key in loaded or not key.endswith(_MAY_LACK)]


def load_into(model: nn.Module, state: Mapping[str, Tensor], path: str) -> list[str]:
    """Load a state dict without `mismatches` into ``model``, and return notes on NaN and on what is missing."""
    own = model.state_dict()
    missing = {key: value for key, value in own.items() if key not in state}
    whole: OrderedDict[str, Any] = OrderedDict(**missing, **state)
    # Without the versions of this layout MNASNet and others refuse or rename the keys.
    whole._metadata = own._metadata  # type: ignore[attr-defined]
    _check_types(own, state, path)
    try:
        model.load_state_dict(whole)
    except (RuntimeError, ValueError, TypeError) as error:
        raise WeightsError(f"{path} does not fit {type(model).__name__}: {first_line(error)}") from error
    bad = sum(int((~torch.isfinite(value)).sum()) for value in state.values() if value.is_floating_point())
    are = "is" if bad == 1 else "are"
    notes = [f"{path} holds {counted(bad, 'value')} that {are} NaN or infinite"] if bad else []
    if without := dict.fromkeys(key.rpartition(".")[0] for key in missing if key.endswith(_STATISTICS)):
        norms = counted(len(without), "BatchNorm")
        notes.append(f"{path} lacks the running statistics of {norms}: left as built ({listed(list(without), 3)})")
    return notes


def _check_types(own: Mapping[str, Tensor], state: Mapping[str, Tensor], path: str) -> None:
    """Refuse what a copy would change: floats in other types than floats, fractions in whole numbers."""
    wrong = [
        key
        for key, value in own.items()
        if isinstance(value, Tensor) and not key.endswith(_COUNTER) and not _is_kept(state.get(key, value), value)
    ]
    if wrong:
        held, wanted = (dtype_name(tensors[wrong[0]].dtype) for tensors in (state, own))
        first = f"{wrong[0]} is {held} where the model has {wanted}"
        exists = f"{first}, and so are {len(wrong) - 1} more" if len(wrong) > 1 else first
        raise WeightsError(f"{path} does not hold the weights as the model has them", exists, "save them as floats")


def _is_kept(value: Tensor, own: Tensor) -> bool:
    if value.is_quantized or own.is_quantized or value.is_complex() or own.is_complex():
        return value.dtype == own.dtype or (value.is_complex() and own.is_complex())
    if own.is_floating_point():
        return value.is_floating_point()
    return torch.equal(value.to(own.dtype).to(value.dtype), value)


def load_checkpoint(model: nn.Module, path: str, name: str) -> tuple[str, list[str]]:
    """Load a file or folder into ``model``, called ``name``; return the label of the weights and the notes."""
    checkpoint = read_checkpoint(path)
    state, notes = fitted(model, checkpoint)
    if mismatches(model, state):
        raise fitting_error(path, name, model, state, None)
    return checkpoint.label, notes + load_into(model, state, path)


def fitting_error(
    path: str, name: str, model: nn.Module, state: Mapping[str, Tensor], fits: str | None
) -> WeightsError:
    """The error for a checkpoint of another architecture: which keys differ, and which prefix or model would fit."""
    own = _shapes(model.state_dict())
    matching, needed = len(_fitting(own, state)), [key for key in own if key in state or not key.endswith(_MAY_LACK)]
    missing = [key for key in needed if key not in state]
    other = [key for key in own if key in state and tuple(state[key].shape) != own[key]]
    shapes = [f"{key} is {_size(state[key].shape)} in the file and {_size(own[key])} in the model" for key in other]
    parts = {"missing": missing, "unexpected": [key for key in state if key not in own], "other shapes": shapes}
    exists = [f"{matching} of {len(needed)} keys of the model match, and the file has {len(state)}"]
    exists += [f"{len(keys)} {what}: {listed(keys, 2)}" for what, keys in parts.items() if keys]
    for prefix in _prefixes(own, state)[:1]:
        if (count := len(_fitting(own, prefix.applied(state)))) > matching:
            exists.append(f"nearest: {count} match if {prefix}")
    do = f"it would fit {fits}" if fits else ""
    if shapes and matching and not (do or missing or parts["unexpected"]):
        classes = _other_number_of_classes(model, state, mismatches(model, state))
        do = "build the model as in training"
        do += f", with {classes} classes: file.py:make, or such as 'file.py:make(classes={classes})'" if classes else ""
    return WeightsError(f"{path} does not fit {name}", "; ".join(exists), do)


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


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
