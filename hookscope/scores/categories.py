"""The names of a model's classes from a file: one a line, or JSON in one of the forms they are handed around in."""

from __future__ import annotations

import json
import os
from typing import Any

from hookscope.errors import CategoriesError

MAX_BYTES = 4_000_000
"""The largest file of names that is read: ImageNet with all its 21,841 classes takes half a megabyte."""

_FORMS = 'a list of names, {"0": "tench", ...} or {"0": ["n01440764", "tench"], ...}'


def read_categories(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The class names in the file ``path``, in order of the model's outputs.

    One name a line in UTF-8, where blank lines at the end do not count; or JSON: a list of names, or an object from
    index to name or to ``[identifier, name]``, as torchvision's tutorials and Keras have it.

    Raises:
        CategoriesError: it is missing, cannot be read, is too large, no text, or JSON of another form.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        ...     _ = file.write("cat\\nred fox\\n"), file.flush()
        ...     read_categories(file.name)
        ('cat', 'red fox')
    """
    text = _text(path)
    if not text.strip():
        raise CategoriesError(f"{path} holds no class names: it is empty", do="write one a line")
    names = _from_json(text, path) if text.lstrip()[0] in "[{" else [line.strip() for line in text.rstrip().split("\n")]
    nameless = next((at for at, name in enumerate(names) if not name.strip()), None)
    if nameless is not None:
        raise CategoriesError(f"{path} has no name for class {nameless}", f"there are {len(names)} classes")
    return tuple(names)


def _text(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise CategoriesError(f"no file '{os.fspath(path)}' with class names") from None
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise CategoriesError(f"cannot read the class names in '{os.fspath(path)}': {reason}") from None
    if len(data) > MAX_BYTES:
        raise CategoriesError(f"{path} is too large for class names", f"the limit is {MAX_BYTES // 10**6} MB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CategoriesError(f"{path} is no text in UTF-8", do="write one class name a line") from None
    if "\0" in text:
        raise CategoriesError(f"{path} is no text", do="write one class name a line")
    return text


def _from_json(text: str, path: str | os.PathLike[str]) -> list[str]:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) if isinstance(error, ValueError) else "it is nested too deep"
        raise CategoriesError(f"{path} begins like JSON and is none: {reason}") from None
    names = _in_order(held) if isinstance(held, dict) else held
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CategoriesError(f"{path} is JSON of another form than class names have", f"understood are {_FORMS}")
    if not names:
        raise CategoriesError(f"{path} holds no class names: it is empty", f"understood are {_FORMS}")
    return names


def _in_order(held: dict[str, Any]) -> list[Any] | None:
    """The names by their indices; None where an index from 0 on is missing or another key is there."""
    try:
        found = [held[str(index)] for index in range(len(held))]
    except KeyError:
        return None
    return [name[-1] if isinstance(name, list) and len(name) == 2 else name for name in found]
