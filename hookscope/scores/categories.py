"""Class names from a file: one a line, or JSON in one of its usual forms; or the names of ImageNet."""

from __future__ import annotations

import json
import os
from typing import Any

from hookscope.errors import CategoriesError
from hookscope.models import class_names_of

IMAGENET = "imagenet"
"""The name of ImageNet's class names, in the order in which torchvision, timm and transformers have them."""
MAX_BYTES = 4_000_000
"""The largest file that is read; the 21,841 classes of ImageNet take half a megabyte."""

_FORMS = 'a list of names, {"0": "tench", ...} or {"0": ["n01440764", "tench"], ...}'


def read_categories(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The class names in the file ``path``, in order of the model's outputs; ``imagenet`` for ImageNet's 1,000 classes.

    The file has one name a line in UTF-8, with optional blank lines at the end; or it is JSON: a list of names, or an
    object from index to name or to ``[identifier, name]``, as in torchvision's tutorials and Keras.
    """
    if os.fspath(path) == IMAGENET and not os.path.exists(path):
        return class_names_of("resnet50")
    text = _text(path)
    if not text.strip():
        raise CategoriesError(f"{path} holds no class names: it is empty", do="write one name a line")
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
        do = "give a file, or imagenet for the classes of ImageNet"
        raise CategoriesError(f"no file '{os.fspath(path)}' with class names", do=do) from None
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise CategoriesError(f"cannot read the class names in '{os.fspath(path)}': {reason}") from None
    if len(data) > MAX_BYTES:
        raise CategoriesError(f"{path} is too large for class names", f"the limit is {MAX_BYTES // 10**6} MB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CategoriesError(f"{path} is not UTF-8 text", do="write one class name a line") from None
    if "\0" in text:
        raise CategoriesError(f"{path} is not text", do="write one class name a line")
    return text


def _from_json(text: str, path: str | os.PathLike[str]) -> list[str]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) if isinstance(error, ValueError) else "it is nested too deep"
        raise CategoriesError(f"{path} is not valid JSON: {reason}") from None
    names = _in_order(content) if isinstance(content, dict) else content
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CategoriesError(f"{path} is JSON of another form", f"class names are {_FORMS}")
    if not names:
        raise CategoriesError(f"{path} holds no class names: it is empty", f"class names are {_FORMS}")
    return names


def _in_order(names_by_index: dict[str, Any]) -> list[Any] | None:
    """The names in order of their indices; None if an index is missing or another key is there."""
    try:
        names = [names_by_index[str(index)] for index in range(len(names_by_index))]
    except KeyError:
        return None
    return [name[-1] if isinstance(name, list) and len(name) == 2 else name for name in names]
