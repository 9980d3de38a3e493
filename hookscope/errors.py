"""The errors that hookscope raises, one class for each cause."""

from __future__ import annotations

import contextlib
import difflib
import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

_SPELLINGS = re.compile("‹([^|›]*)\\|([^›]*)›")
_spells_for_shell = False
_Kind = TypeVar("_Kind")


class HookscopeError(Exception):
    """Base class of the errors that hookscope raises on purpose.

    ``str()`` is one line without control characters. ``exit_code`` is the exit status of the command. A part may hold
    advice in two spellings, see `spelled`.

    Args:
        asked: The request and why it fails, in one line.
        exists: What exists instead (names, a range, a count); may be empty.
        do: What to do about it; may be empty.

    Example:
        >>> str(HookscopeError("no model 'resnet35'", "nearest: resnet34", "see `hookscope list-models`"))
        "no model 'resnet35'; nearest: resnet34; see `hookscope list-models`"
    """

    exit_code = 1

    def __init__(self, asked: str, exists: str = "", do: str = "") -> None:
        super().__init__(asked, exists, do)

    @property
    def asked(self) -> str:
        """The request and why it fails."""
        return spelled(self.args[0])

    @property
    def exists(self) -> str:
        """What exists instead."""
        return spelled(self.args[1])

    @property
    def do(self) -> str:
        """What to do about it."""
        return spelled(self.args[2])

    def __str__(self) -> str:
        return printable("; ".join(filter(None, (self.asked, self.exists, self.do))))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: the lines of the user, and the error."""
        import traceback  # in a notebook only

        others = (os.path.dirname(__file__), os.path.dirname(os.__file__), "<frozen")
        frames = traceback.extract_tb(self.__traceback__)
        lines = [frame for frame in frames if not (frame.filename.startswith(others) or "-packages" in frame.filename)]
        for frame in lines:
            if "ipykernel_" in frame.filename or frame.filename.startswith("<ipython-input"):
                frame.filename = "cell"
        return [*traceback.format_list(lines), f"{type(self).__name__}: {self}"]


class UsageError(HookscopeError):
    """A wrong command line or wrong arguments, whatever the files hold."""

    exit_code = 2


class SelectionError(UsageError):
    """A layer or channel selection that cannot be read, such as ``re:[`` or ``1:2:3:4``."""


class LayerError(HookscopeError, LookupError):
    """A layer, call or index that the model does not have.

    Args:
        kind: What is missing: ``layer``, ``type``, ``index``, ``range`` or ``call``; empty for any other cause.
        name: The name, type or index as it was asked for; empty where there is not one alone.
    """

    def __init__(self, asked: str, exists: str = "", do: str = "", *, kind: str = "", name: str = "") -> None:
        super().__init__(asked, exists, do)
        self.kind = kind
        self.name = name


class NoMapError(HookscopeError):
    """An activation that is not a feature map, such as the vector of a classifier."""


class TargetError(HookscopeError, LookupError):
    """A class that the model does not have, or a name that fits several classes."""


class AbsentTargetError(TargetError):
    """A detected box, or a class of a segmentation, that this image does not have: another may have it."""


class NonFiniteError(HookscopeError):
    """The first NaN or Inf in a training run that stops there."""

    exit_code = 3


class CategoriesError(HookscopeError):
    """A file of class names that cannot be read, or that belongs to another model."""


class ModelError(HookscopeError):
    """A model that does not exist, cannot be built or takes no hooks."""


class WeightsError(HookscopeError):
    """Weights that cannot be found, downloaded or trusted, or do not fit the model."""


class ImageError(HookscopeError):
    """A file that is not an image, or an image that cannot be read correctly."""


class InputError(HookscopeError):
    """An input that the model refuses, such as an image below its smallest size."""


class WriteError(HookscopeError):
    """A result that cannot be written to the requested place."""


class InstallationError(HookscopeError):
    """A missing or broken package that hookscope needs."""


class OutputNote(UserWarning):
    """What to know of a model's answers: which output is taken, how it is computed, that the weights are random."""


@contextlib.contextmanager
def spelling_for_shell() -> Iterator[None]:
    """Inside, `spelled` gives the spelling of the command line: only the command line enters this block."""
    global _spells_for_shell
    before, _spells_for_shell = _spells_for_shell, True
    try:
        yield
    finally:
        _spells_for_shell = before


def spelled(text: str) -> str:
    """``text`` with one of the two spellings of each advice: the Python call, or the option of the command line.

    Example:
        >>> spelled("add ‹types='all'|--type all›")
        "add types='all'"
        >>> with spelling_for_shell():
        ...     spelled("add ‹types='all'|--type all›")
        'add --type all'
    """
    return _SPELLINGS.sub(r"\2" if _spells_for_shell else r"\1", text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory is full: ``MemoryError``, torch's class on a GPU, or its RuntimeError on the CPU."""
    torchs = type(error).__name__ == "OutOfMemoryError"  # torch need not be imported
    return isinstance(error, MemoryError) or torchs or "can't allocate memory" in str(error)


def printable(text: str) -> str:
    """``text`` with control, format and undecodable characters written as escapes, safe to show on a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def first_line(error: BaseException, longest: int = 200) -> str:
    """The first line of what an error says, safe to show; the name of its class if it says nothing."""
    return printable(next(iter(str(error).strip().splitlines()), type(error).__name__))[:longest]


def kind_of(value: object) -> str:
    """What a wrong argument is, in a word: ``None``, ``text``, ``the class X`` or the name of its class."""
    kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    return "None" if value is None else "text" if isinstance(value, str) else kind


def path_of(given: Any) -> str:
    """``given`` as the text of a path; a UsageError for what is not one."""
    if not isinstance(given, str | os.PathLike):
        raise UsageError(f"expected the path of a file, got {kind_of(given)}")
    return os.fspath(given)


def check_whole(name: str, number: Any, least: int = 1, optional: bool = False) -> None:
    """Raise a UsageError for what is not an integer of at least ``least``, nor None where it is ``optional``."""
    is_whole = hasattr(number, "__index__") and not isinstance(number, bool)
    if not (optional and number is None) and not (is_whole and operator.index(number) >= least):
        raise UsageError(f"{name} must be an integer of at least {least}, not {number!r}")


def all_of(kind: type[_Kind] | tuple[type[_Kind], ...], given: Any, made_by: str) -> list[_Kind]:
    """One result, or several, as a list; for anything else a UsageError names the function that makes such results."""
    values = list(given) if isinstance(given, Iterable) and not isinstance(given, (kind, str)) else [given]
    for value in values:
        if not isinstance(value, kind):
            name = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise UsageError(f"expected {name}, got {kind_of(value)}", do=f"give what hookscope.{made_by} returns")
    return values


def one_of(kind: type[_Kind], given: Any, made_by: str) -> _Kind:
    """One result, also as a list of it; raises as `all_of` does."""
    values = all_of(kind, given, made_by)
    if len(values) != 1:
        raise UsageError(
            f"expected one {kind.__name__}, got {len(values)}", do="give one of them, such as the first: [0]"
        )
    return values[0]


def near_misses(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The ``names`` nearest to ``name`` or with its letters as initials, at most ``count``, best first, in any case."""
    by_lower: dict[str, str] = {}
    for candidate in names:
        by_lower.setdefault(candidate.lower(), candidate)
    close = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.5)
    initials = [lower for lower in by_lower if "".join(re.findall(r"\b\w", lower)) == name.lower()]
    return [by_lower[lower] for lower in close or initials[:count]]


def nearest(name: str, names: Sequence[str], count: int = 3) -> str:
    """``nearest: a, b`` for an error's ``exists`` part, or an empty text when nothing is near."""
    near = near_misses(name, names, count)
    return "nearest: " + ", ".join(near) if near else ""
