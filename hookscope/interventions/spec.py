"""Interventions as the command line spells them: ``dropblock:p=0.1,block_size=7``."""

from __future__ import annotations

import dataclasses
import os
import typing
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hookscope.interventions.elementwise
import hookscope.interventions.regularisers  # noqa: F401  (each adds its words to WORDS)
from hookscope.errors import UsageError, WeightsError, nearest
from hookscope.hooks import capture, map_tensors, tensors_in
from hookscope.images import InputImage, find_pictures, read_picture
from hookscope.interventions.base import WORDS as WORDS, Intervention, Spelled
from hookscope.models import LoadedModel, load_content, model_errors_as_input_errors

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_CONVERTERS: dict[type, tuple[Callable[[str], Any], str]] = {  # the first that the annotation allows
    bool: (lambda text: _BOOLEANS[text.lower()], "true or false"),
    float: (float, "a number"),
    int: (int, "a whole number"),
}


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter on the command line; a value from a file is called ``from`` there."""

    name: str
    field: dataclasses.Field[Any]
    types: tuple[Any, ...]

    @property
    def from_file(self) -> str:
        return str(self.field.metadata.get("from_file", ""))

    @property
    def example(self) -> str:
        """A valid value: the field's, else its default."""
        return str(self.field.metadata.get("example") or _text(self.field.default))

    def convert(self, word: str, text: str) -> Any:
        if text.lower() == "none" and NoneType in self.types:
            return None
        convert, meaning = next((_CONVERTERS[kind] for kind in _CONVERTERS if kind in self.types), (str, "a text"))
        try:
            return convert(text)
        except (ValueError, KeyError):
            raise UsageError(f"{self.name}='{text}' of {word} is not {meaning}") from None


def _text(value: Any) -> str:
    """A default value as text, empty for None and where there is none."""
    if value is None or value is dataclasses.MISSING:
        return ""
    return f"{value:g}" if isinstance(value, float) else f"{value}".lower()


def _parameters(kind: type[Spelled]) -> dict[str, _Parameter]:
    hints = typing.get_type_hints(kind)
    parameters = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, hint = "from" if field.metadata.get("from_file") else field.name, hints[field.name]
        parameters[name] = _Parameter(name, field, typing.get_args(hint) or (hint,))
    return parameters


@dataclass(frozen=True, slots=True)
class InterventionSpec:
    """An intervention parsed from text; values from a file are still missing.

    Attributes:
        text: The text.
        word: One of `WORDS`.
        values: The given parameters as values, those from a file excepted.
        source: The file of ``from=``, None without it.

    Example:
        >>> spec = InterventionSpec.parse("zero:channels=0-2,7,on=input")
        >>> spec.word, str(spec.build())
        ('zero', 'Zero(channels=0-2,7, on=input)')
    """

    text: str
    word: str
    values: Mapping[str, Any]
    source: str | None

    @classmethod
    def parse(cls, text: str, one_image: bool = False) -> InterventionSpec:
        """Parse ``WORD`` or ``WORD:PARAMETER=VALUE,...``; a part without ``=`` belongs to the value before it.

        ``one_image`` refuses an intervention that has no effect on a batch of one image.
        """
        word, _, rest = text.partition(":")
        word = word.strip()
        if word not in WORDS:
            exists = nearest(word, list(WORDS)) or f"there are {', '.join(sorted(WORDS))}"
            raise UsageError(f"no intervention '{word}'", exists)
        parameters = _parameters(WORDS[word])
        texts = _split(text, word, rest, parameters)
        source = texts.pop("from", None)
        spec = cls(text, word, {name: parameters[name].convert(word, texts[name]) for name in texts}, source)
        for name, parameter in parameters.items():
            value = source if parameter.from_file else texts.get(name)
            is_missing = value is None and parameter.field.default is dataclasses.MISSING
            if is_missing or (value == "" and parameter.from_file):
                what = "from=FILE" if parameter.from_file else f"{name}="
                raise UsageError(f"{word} needs {what}", do=f"such as {word}:{name}={parameter.example}")
        built = spec.build(... if source is not None else None)  # checks ranges of values
        if one_image:
            built.check_one_image()
        return spec

    @property
    def kind(self) -> type[Spelled]:
        return WORDS[self.word]

    @property
    def from_file(self) -> str:
        """What the file of ``from=`` gives: ``tensor``, ``image`` or ``images``; empty where none is read."""
        return _parameters(self.kind)["from"].from_file if self.source is not None else ""

    def build(self, source: Any = None, one_pass: bool = False) -> Any:
        """The intervention, with the content of its file; in ``one_pass`` dropout acts in eval mode too."""
        values = {**(self.kind.one_pass if one_pass else {}), **self.values}
        if source is not None:
            values[_parameters(self.kind)["from"].field.name] = source
        return self.kind(**values)


def help_rows() -> Iterator[tuple[str, str]]:
    shared = {field.name for field in dataclasses.fields(Intervention)}
    for word, kind in sorted(WORDS.items(), key=lambda item: (not issubclass(item[1], Intervention), item[0])):
        own = [p for p in _parameters(kind).values() if p.name not in shared and p.name not in kind.one_pass]
        defaults = {p.name: "FILE" if p.from_file else _text(p.field.default) for p in own}
        shown = " ".join(f"{name}={value}" if value else name for name, value in defaults.items())
        yield word, kind.summary + (f"  [{shown}]" if shown else "")


def _split(text: str, word: str, rest: str, parameters: Mapping[str, _Parameter]) -> dict[str, str]:
    values: dict[str, str] = {}
    last = None
    for part in rest.split(",") if rest.strip() else []:
        key, equals, value = part.partition("=")
        key = key.strip()
        if equals and key in parameters:
            if key in values:
                raise UsageError(f"'{key}' appears twice in '{text}'")
            last, values[key] = key, value.strip()
        elif not equals and key in parameters and last != "from":
            raise UsageError(f"{key} needs a value: {key}={parameters[key].example}")
        elif last is not None and not equals:
            values[last] += f",{part.rstrip()}"  # a file may be called `a, b.jpg`
        else:
            has = f"{word} has {', '.join(parameters) or 'none'}"
            if not equals:
                raise UsageError(f"'{part.strip()}' is not PARAMETER=VALUE", has)
            raise UsageError(f"no parameter '{key}' of {word}", has, nearest(key, [*parameters]))
    return values


def read_source(
    net: LoadedModel,
    where: str,
    spec: InterventionSpec,
    types: Iterable[Any] | None = None,
    on_image: Callable[[InputImage], object] = lambda image: None,
) -> Any:
    """Read the file or folder that ``from=`` names, for an intervention at the layers ``where``; None without it."""

    def activations(paths: Iterable[str]) -> Iterator[dict[str, Any]]:
        on_input = spec.values.get("on") == "input"
        if where in dict(net.model.named_parameters(remove_duplicate=False)):
            asked = f"{spec.word} needs a layer, and {where} is a parameter"
            raise UsageError(asked, do=f"name its layer: {where.rpartition('.')[0]}")
        for path in paths:
            image = read_picture(path, frames=net.preprocess.frames)
            on_image(image)
            tensor = net.prepare(image)
            capturing = capture(net.model, where, types, inputs=on_input)
            with model_errors_as_input_errors(net.name, tensor), torch.no_grad(), capturing as kept:
                net.model(*map_tensors(net.inputs(tensor), torch.clone))
            values = kept.inputs if on_input else kept
            yield {key: values[key] for key in values}

    if spec.source is None:
        return None
    if spec.from_file == "tensor":
        return read_direction(spec.source)
    if spec.from_file == "image":
        return next(activations([spec.source]))
    return mean_at(activations(find_pictures([spec.source])))


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
