"""Interventions as the command line spells them: ``dropblock:p=0.1,block_size=7``."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

# the classes of these files enter WORDS
import hookscope.interventions.dropout
import hookscope.interventions.elementwise
import hookscope.interventions.parameters
import hookscope.interventions.replacement  # noqa: F401
from hookscope.errors import UsageError, nearest
from hookscope.interventions.base import WORDS as WORDS, Intervention, Spelled

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
        """A valid value: that of the field, else its default."""
        return str(self.field.metadata.get("example") or _text(self.field.default))

    def convert(self, word: str, text: str) -> Any:
        if text.lower() == "none" and NoneType in self.types:
            return None
        converters = (_CONVERTERS[kind] for kind in _CONVERTERS if kind in self.types)
        convert, meaning = next(converters, (str, "a text"))
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
    """The parameters of a class by their names on the command line."""
    hints = typing.get_type_hints(kind)
    parameters = [
        _Parameter(
            "from" if field.metadata.get("from_file") else field.name,
            field,
            typing.get_args(hints[field.name]) or (hints[field.name],),
        )
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
    ]
    return {parameter.name: parameter for parameter in parameters}


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
    """Every intervention with its own parameters, and what it does; those of parameters last."""
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
