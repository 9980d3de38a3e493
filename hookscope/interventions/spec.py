"""Interventions as a shell spells them: ``dropblock:p=0.1,block_size=7``. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hookscope.errors import UsageError, nearest
from hookscope.interventions.base import Intervention
from hookscope.interventions.dropout import DropBlock, DropBlock2d, DropBlock3d, Dropout, Dropout2d
from hookscope.interventions.elementwise import Clamp, Noise, Permute, Quantize, Scale, Zero
from hookscope.interventions.parameters import Freeze, Prune
from hookscope.interventions.replacement import Mean, Patch, Steer

WORDS: Mapping[str, type[Intervention] | type[Prune] | type[Freeze]] = {
    "dropblock": DropBlock,
    "dropblock2d": DropBlock2d,
    "dropblock3d": DropBlock3d,
    "dropout": Dropout,
    "dropout2d": Dropout2d,
    "zero": Zero,
    "scale": Scale,
    "clamp": Clamp,
    "noise": Noise,
    "mean": Mean,
    "permute": Permute,
    "patch": Patch,
    "steer": Steer,
    "quantize": Quantize,
    "prune": Prune,
    "freeze": Freeze,
}
"""The interventions by the words that stand for them."""

_FILES = {"source": "from", "direction": "from"}
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class InterventionSpec:
    """One intervention as it was asked for.

    Attributes:
        text: The whole of it.
        name: One of `WORDS`.
        given: Its parameters as values; what comes from a file is missing.
        source: What ``from=`` names, None without it.

    Example:
        >>> word = InterventionSpec.parse("zero:channels=0-2,7,on=input")
        >>> word.name, str(word.build())
        ('zero', 'Zero(channels=0-2,7, on=input)')
    """

    text: str
    name: str
    given: Mapping[str, Any]
    source: str | None

    @classmethod
    def parse(cls, text: str) -> InterventionSpec:
        """``NAME`` or ``NAME:PARAMETER=VALUE,...``; a part without ``=`` belongs to the value before it.

        Raises:
            UsageError: for an intervention or a parameter that does not exist, or a value that cannot be read; it
                says which there are.
        """
        name, _, rest = text.partition(":")
        name = name.strip()
        if name not in WORDS:
            exists = nearest(name, list(WORDS)) or f"there are {', '.join(WORDS)}"
            raise UsageError(f"no intervention '{name}'", exists)
        parameters = _parameters(WORDS[name])
        given, source = {}, None
        for key, value in _split(text, rest, parameters).items():
            if key == "from":
                source = value
            else:
                given[key] = _converted(name, key, value, parameters[key])
        word = cls(text, name, given, source)
        word._check()
        return word

    @property
    def needs_source(self) -> bool:
        """Whether it cannot be without something from a file."""
        fields = dataclasses.fields(WORDS[self.name])
        return any(field.name in _FILES and field.default is dataclasses.MISSING for field in fields)

    def build(self, source: Any = None, **defaults: Any) -> Any:
        """The intervention.

        Args:
            source: What stands for ``from=``: activations for ``patch`` and ``mean``, a tensor for ``steer``.
            defaults: Other defaults of parameters, for those that it has.
        """
        kind = WORDS[self.name]
        names = {field.name for field in dataclasses.fields(kind)}
        values = {name: value for name, value in defaults.items() if name in names} | dict(self.given)
        if source is not None:
            values[next(name for name in _FILES if name in names)] = source
        return kind(**values)

    def _check(self) -> None:
        if self.source == "" or (self.needs_source and self.source is None):
            raise UsageError(f"{self.name} needs from=FILE", do=f"such as {_EXAMPLES[self.name]}")
        for field in dataclasses.fields(WORDS[self.name]):
            if field.default is dataclasses.MISSING and field.name not in {*_FILES, *self.given}:
                raise UsageError(f"{self.name} needs {field.name}=", do=f"such as {_EXAMPLES[self.name]}")
        self.build(source=... if self.source is not None else None)  # values out of range are told now


_EXAMPLES = {
    "mean": "mean:from=folder",
    "patch": "patch:from=other.jpg",
    "scale": "scale:factor=0.5",
    "steer": "steer:from=direction.npy,scale=2",
}

_VALUES = {
    "channels": "0-31",
    "dim": "0",
    "factor": "0.5",
    "from": "FILE",
    "max": "6",
    "min": "0",
    "positions": "0-9x5-14",
}


def _parameters(kind: type) -> dict[str, str]:
    """The parameters by name and what they take, as they are annotated; what holds tensors is ``from``, a file."""
    return {_FILES.get(field.name, field.name): str(field.type) for field in dataclasses.fields(kind)}


def _split(text: str, rest: str, parameters: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    last = None
    for part in rest.split(",") if rest.strip() else []:
        key, equals, value = part.partition("=")
        if equals and key.strip() in parameters:
            last = key.strip()
            if last in found:
                raise UsageError(f"'{last}' stands twice in '{text}'")
            found[last] = value.strip()
        elif not equals and key.strip() in parameters and last != "from":
            raise UsageError(f"{key.strip()} needs a value: {_such(text, key.strip())}")
        elif last is not None and not equals:
            found[last] += f",{part.rstrip()}"  # a file may be called `a, b.jpg`
        else:
            name = text.partition(":")[0].strip()
            exists = f"{name} has {', '.join(parameters) or 'none'}"
            if not equals:
                raise UsageError(f"'{part.strip()}' is no PARAMETER=VALUE", exists)
            asked = f"no parameter '{key.strip()}' of {name}"
            raise UsageError(asked, exists, nearest(key.strip(), [*parameters]))
    return found


def _such(text: str, parameter: str) -> str:
    """``parameter`` with a value that it takes: its default where that can be written, else one for example."""
    fields = dataclasses.fields(WORDS[text.partition(":")[0].strip()])
    default = next((field.default for field in fields if field.name == parameter), None)
    usual = f"{default}".lower() if isinstance(default, bool | int | float | str) else ""
    return f"{parameter}={_VALUES.get(parameter, usual)}"


def _converted(word: str, name: str, text: str, annotation: str) -> Any:
    """``text`` as the type of the parameter, told by the first word of its annotation."""
    kind = annotation.split("|")[0].split("[")[0].strip()
    converters: dict[str, Callable[[str], Any]] = {"float": float, "int": int, "bool": lambda t: _TRUTHS[t.lower()]}
    if text.lower() == "none" and "None" in annotation:
        return None
    try:
        return converters.get(kind, str)(text)
    except (ValueError, KeyError):
        wanted = {"float": "a number", "int": "a whole number", "bool": "true or false"}[kind]
        raise UsageError(f"{name}='{text}' of {word} is not {wanted}") from None
