"""MODEL argument and weights to a model that is ready to run."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hookscope.errors import OutputNote, UsageError, kind_of, spelled
from hookscope.findings import listed
from hookscope.models.checkpoints import load_checkpoint
from hookscope.models.choices import AUTOCAST, DTYPES, PreprocessChoice, autocast_dtypes
from hookscope.models.factories import find_in_source, preprocess_of, return_only
from hookscope.models.loaded import LoadedModel, as_loaded, as_size, check_size, dtype_name
from hookscope.models.model_source import ModelSource, Progress, WeightsChoice, WeightsKind
from hookscope.models.preprocess import Preprocess
from hookscope.models.run import quiet_and_seeded
from hookscope.models.sources import find_source


def load_model(
    model: str | os.PathLike[str] | ModelSource | nn.Module,
    weights: Any = "auto",
    seed: int = 0,
    device: str = "auto",
    *,
    preprocess: Any = "weights",
    mean: Any = None,
    std: Any = None,
    range: Any = None,
    resize: Any = None,
    input_size: tuple[int, ...] | None = None,
    model_output: str | int | None = None,
    categories: Iterable[str] | Mapping[Any, Any] | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build a model in eval mode with its weights, and find the preprocessing and class names that belong to them.

    Args:
        model: A torchvision name, ``shapes`` (bundled and trained), ``package.module:factory``,
            ``path/to/file.py:factory``, ``timm:NAME``, ``ultralytics:NAME``, or ``quantized:NAME`` for layers that
            compute in 8 bits. A factory may have arguments, which are literals: ``net.py:make(width=2)``; the only one
            of a file need not be named. The names ``input_size``, ``preprocess`` and ``model_inputs`` next to a factory
            say what its model takes, see ``docs/howto/own-model.md``. A folder that transformers saved is a model too,
            and so are ``model.onnx`` and ``model.pt2`` of `torch.export.save`. A text that is parsed works too.
            A module stays as it is, in its mode and on its device: ``preprocess`` and ``categories`` say what belongs
            to it, and a checkpoint as ``weights`` is loaded into it.
        weights: ``auto`` (torchvision's default weights; seeded random weights if neither cache nor network has
            them, which ``notes`` says), ``default`` or a weights name (fail if unavailable), ``none``, or a checkpoint,
            a file or folder. A `WeightsChoice`, None and ``ResNet34_Weights.DEFAULT`` work too. A safetensors file can
            bring its own class names and transforms, see `hookscope.models.metadata`.
        seed: Seed of random weights; the global random state stays as it was.
        device: ``auto``, ``cpu``, ``cuda`` (``cuda:1``) or ``mps``.
        preprocess: ``weights`` (what belongs to the model), ``imagenet``, ``half``, ``stretch``, ``none``,
            ``file.py:function``, or a function from a PIL image to a tensor ``(C, H, W)``, such as transforms of
            torchvision or an image processor of transformers.
        mean: Subtracted from the colours in ``range``: one number, or one for each channel.
        std: Divides them afterwards, in the same form; goes with ``mean``.
        range: What black and white become, by default ``(0, 1)``; without ``mean`` there is no normalisation.
        resize: ``shorter`` (the shorter side to the input size, then crop the centre), ``shorter:256`` (the same with
            a larger side), ``stretch`` or ``pad``.
        input_size: ``(H, W)`` of the model's input, ``(D, H, W)`` of a clip or volume.
        model_output: Of several tensors that a model returns, the name or the position of the one to use.
        categories: Names of the classes, in the order of the scores, or a dictionary between number and name, such as
            ``id2label``; None for those that belong to the model.
        progress: Called with bytes done and total during a download.

    Raises:
        ModelError: no such model, or it cannot be built.
        WeightsError: no such weights, or they cannot be fetched, trusted or fitted.
        UsageError: an unknown device or preprocessing.

    Example:
        >>> net = load_model("squeezenet1_1", weights="none", seed=1)
        >>> net.weights, net.family, net.preprocess.describe()
        ('random (seed 1)', 'classification', 'resize 256, crop 224, ImageNet mean and std')
    """
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(model, str | ModelSource | nn.Module):
        do = f"give an instance, such as {model.__name__}()" if isinstance(model, type) else ""
        raise UsageError(f"model must be a name or a module, not {kind_of(model)}", do=do)
    choice = WeightsChoice.parse(weights)
    chosen = PreprocessChoice.parse(preprocess, mean, std, range, resize)
    input_size = None if input_size is None else tuple(as_size(input_size))
    chosen.check(input_size)
    names = None if categories is None else _names_of(categories)
    if isinstance(model, nn.Module):
        loaded = _of_module(model, choice)
        preprocess = _prepared(loaded, chosen, input_size, loaded.device)
        return replace(loaded, preprocess=preprocess, categories=names)
    source = find_source(model)
    where = "cpu" if source.cpu_only and device == "auto" else pick_device(device)
    if source.cpu_only and where != "cpu":
        asked = f"{source.text} cannot run on '{device}'"
        raise UsageError(asked, "it runs on the CPU only", "give ‹device='cpu'|--device cpu›")
    with quiet_and_seeded(seed):
        loaded = source.build(choice, seed, progress)
    as_loaded(replace(loaded, name=source.text)).model.eval().to(where)
    if model_output is not None:
        return_only(loaded.model, str(model_output), source.text)
    preprocess = _prepared(loaded, chosen, input_size, where)
    checkpoint = choice.text if choice.kind is WeightsKind.FILE else loaded.checkpoint
    if loaded.missing_weights:
        warnings.warn(spelled(f"{loaded.missing_weights}; its answers mean nothing"), OutputNote, stacklevel=2)
    of = {"device": where, "preprocess": preprocess, "checkpoint": checkpoint, "seed": seed}
    return replace(loaded, categories=names or loaded.categories, **of)


def _of_module(model: nn.Module, choice: WeightsChoice) -> LoadedModel:
    """The record of a module of the user's, which gets the weights of a file, and keeps its mode."""
    loaded = as_loaded(model, on_meta=True)
    if choice.kind is WeightsKind.FILE:
        label, notes = load_checkpoint(model, choice.text, loaded.name)
        loaded = replace(loaded, weights=label, notes=(*loaded.notes, *notes), checkpoint=choice.text)
    elif choice.kind not in (WeightsKind.AUTO, WeightsKind.NONE):
        do = "give a checkpoint, or load them into the module"
        raise UsageError(f"{loaded.name} is a module, which has no weights called '{choice.text}'", do=do)
    if any(layer.training and isinstance(layer, _BatchNorm | _DropoutNd) for layer in model.modules()):
        text = f"{loaded.name} is in train mode: BatchNorm and dropout change its answers; call its eval()"
        warnings.warn(text, OutputNote, stacklevel=3)
    return loaded


def _names_of(categories: Any) -> tuple[str, ...]:
    """The names of the classes in a list, or in a dictionary between number and name."""
    if isinstance(categories, Mapping):
        pairs = [(str(key), str(value)) for key, value in categories.items()]
        class_to_idx, id2label = {value: key for key, value in pairs}, dict(pairs)  # of torchvision, of transformers
        for names in (class_to_idx, id2label):
            if names.keys() == set(map(str, range(len(pairs)))):
                return tuple(names[str(number)] for number in range(len(pairs)))
        raise UsageError("categories must number the classes from 0, each once", do="give a list of their names")
    if isinstance(categories, str) or not isinstance(categories, Iterable):
        raise UsageError(f"categories must be the names of the classes, not {kind_of(categories)}", do="give a list")
    return tuple(map(str, categories))


def _prepared(
    loaded: LoadedModel, choice: PreprocessChoice, input_size: tuple[int, ...] | None, device: str
) -> Preprocess:
    """The preprocessing of ``loaded`` with the changes of the caller."""
    check_size(loaded.model, input_size, loaded.family)
    size = None if input_size is None else (input_size[-2:][0], input_size[-1])  # one number is a square
    changed = loaded.preprocess.changed(_with_function(choice), size)
    frames = changed.frames if input_size is None or len(input_size) < 3 else input_size[0]
    return replace(changed, device=device, frames=frames)


def _with_function(choice: PreprocessChoice) -> PreprocessChoice:
    """``choice`` with what its function means, or the name of one in ``file.py:function``."""
    if isinstance(choice.base, str) and ":" not in choice.base:
        return choice
    function = find_in_source(choice.base) if isinstance(choice.base, str) else choice.base
    preprocess = preprocess_of(function, choice.name)
    if not isinstance(preprocess, PreprocessChoice):
        return replace(choice, base=preprocess)
    parts = {name: getattr(choice, name) for name in ("mean", "std", "range", "resize")}
    return replace(preprocess, **{name: part for name, part in parts.items() if part is not None})


def pick_device(device: str) -> str:
    """``device`` in torch's spelling; ``auto`` is the fastest that this machine has."""
    have = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    device = str(device)
    if device == "auto":
        return have[-1]
    match = re.fullmatch(r"(cpu|cuda|mps)(?::([0-9]{1,3}))?", device)
    if match is None or match[1] not in have or (match[2] and match[1] != "cuda"):
        raise UsageError(f"no device '{device}'", f"this machine has {', '.join(have)}")
    if match[2] and int(match[2]) >= torch.cuda.device_count():
        raise UsageError(f"no device '{device}'", f"there are {torch.cuda.device_count()} CUDA devices")
    return device


def parse_dtype(text: str, device: str) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The type of parameters and inputs, and the type of `torch.autocast`; one of them is None.

    ``text`` is one of `DTYPES`, ``autocast`` for the usual type of ``device``, or such as ``autocast:float16``.

    Raises:
        UsageError: no such type.
    """
    word, _, name = str(text).partition(":")
    if word == AUTOCAST:
        name = name or dtype_name(torch.get_autocast_dtype(torch.device(device).type))
        if name not in autocast_dtypes():
            exists = f"it takes {listed(autocast_dtypes())}"
            raise UsageError(f"autocast cannot compute in '{name}'", exists, "choose one")
        return None, getattr(torch, name)
    if text not in DTYPES:
        raise UsageError(f"no data type '{text}'", f"there are {listed([*DTYPES, AUTOCAST], 9)}", "choose one")
    return getattr(torch, text), None
