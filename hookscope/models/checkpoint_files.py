"""Checkpoint files and folders: the state dicts in them, read without running code."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from hookscope.errors import WeightsError, nearest
from hookscope.findings import listed

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
    """The state dicts in a checkpoint.

    Attributes:
        path: The file that holds them, or the index of several.
        label: The name of that file, after the folder that was given.
        states: State dicts by their place in the file, such as ``model_ema``; the usual one first.
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
    usual = [key for key in _USUAL if key in inner]
    for key in usual:
        if place.count(".") < _DEEPEST:
            yield from _state_dicts(inner[key], f"{place}.{key}".lstrip("."))
    # the counter of an averaged model is not a weight
    names = (key for key, value in content.items() if isinstance(value, Tensor) and isinstance(key, str))
    state = {key: content[key] for key in names if key != "n_averaged"}
    if state:
        yield place, state
    elif not usual and place.count(".") < _DEEPEST:
        for key in inner:
            yield from _state_dicts(inner[key], f"{place}.{key}".lstrip("."))


def _weights_in(folder: str) -> str:
    """The file with the weights in a folder, or its index of several."""
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
    """The tensors that an index places in several files of its folder."""
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
        raise WeightsError(f"cannot read weights {path}: {first_line(error)}", "it is damaged or incomplete") from error


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
        raise WeightsError(f"cannot read weights {path}: damaged, incomplete or not a checkpoint") from error


def _danger(text: str, head: bytes) -> str:
    """What a refused file would do; empty if it is only damaged or not a checkpoint.

    ``text`` is torch's refusal, which is long and recommends the unsafe switch: it is never shown.
    """
    if refused := re.search(r"GLOBAL ([\w.]+)", text):
        return f"would run code ({refused[1]})"
    if "TorchScript" in text:
        return "would run code (TorchScript)"
    return "could run code" if "weights_only" in text and head[:1] == b"\x80" else ""  # a pickle begins with 0x80


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
