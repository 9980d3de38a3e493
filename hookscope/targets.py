"""Which class is asked about: an index, a name, or the classes with the highest scores. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hookscope.errors import TargetError, UsageError, nearest

__all__ = ["Target", "class_label"]

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Target:
    """A wish for classes, as ``--target`` spells it.

    Attributes:
        text: ``281`` (an index), ``tabby`` (a name or a part of one), ``top:3`` (the highest scores).

    Raises:
        UsageError: for ``top:`` without a number above 0.

    Example:
        >>> Target("top:2").indices([0.1, 3.0, 2.0], None), Target("fox").indices([0, 0], ["cat", "red fox"])
        ((1, 2), (1,))
    """

    text: str = "top:1"

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise UsageError("the target is empty", do="give a class index, a class name or top:K")
        if self.text.startswith("top:") and not self.top:
            raise UsageError(f"bad target '{self.text}'", do="write top:K with K from 1, such as top:3")

    @property
    def top(self) -> int | None:
        """How many of the highest scores are wanted; None for a class that is named."""
        found = re.fullmatch(r"top:(\d{1,6})", self.text)
        return int(found[1]) or None if found else None

    def check(self, categories: Sequence[str] | None) -> None:
        """Raise a `TargetError` already now, before a forward pass, for what none of ``categories`` fits."""
        if self.top is not None:
            return
        if not _is_index(self.text):
            _by_name(self.text, categories)
        elif categories:
            _by_index(self.text, len(categories))

    def indices(self, scores: Sequence[float], categories: Sequence[str] | None) -> tuple[int, ...]:
        """The classes meant, the highest score first.

        Args:
            scores: One for each class.
            categories: Names of the classes, None where none are known.

        Raises:
            TargetError: no such class, or a name that fits several; says which there are.
        """
        if self.top is not None:
            order = sorted(range(len(scores)), key=lambda at: (-_rank(scores[at]), at))
            return tuple(order[: self.top])
        if _is_index(self.text):
            return (_by_index(self.text, len(scores)),)
        return (_by_name(self.text, categories),)


def _rank(score: float) -> float:
    return score if score == score else float("-inf")  # NaN is no high score


def _is_index(text: str) -> bool:
    return re.fullmatch(r"\s*[0-9]+\s*", text) is not None


def _by_index(text: str, classes: int) -> int:
    digits = text.strip().lstrip("0") or "0"
    if len(digits) > len(str(classes)) or int(digits) >= classes:
        raise TargetError(f"no class {digits[:20]}", f"the model has {classes} classes: 0 to {classes - 1}")
    return int(digits)


def _by_name(text: str, categories: Sequence[str] | None) -> int:
    """The one class called ``text``, in the same case or in any, or the one whose name holds it."""
    if not categories:
        raise TargetError(f"no class '{text}'", "no names are known", "give an index, or the names with --categories")
    found, how = _fitting(text.strip(), categories)
    if len(found) == 1:
        return found[0]
    if not found:
        near = nearest(text, list(categories), _MOST_NAMED) or f"there are {len(categories)}: {categories[0]}, ..."
        raise TargetError(f"no class '{text}'", near, "an index or top:K will do too")
    some = ", ".join(f"{at} {categories[at]}" for at in found[:_MOST_NAMED])
    more = ", ..." if len(found) > _MOST_NAMED else ""
    raise TargetError(f"'{text}' is {how} {len(found)} classes", some + more, "give one of the indices")


def _fitting(text: str, categories: Sequence[str]) -> tuple[list[int], str]:
    """The classes that fit best, and how they do."""
    # ImageNet has a dog called Cardigan, a cardigan, and two that are called crane
    same = [at for at, name in enumerate(categories) if name == text]
    lower, names = text.lower(), [name.lower() for name in categories]
    same = same or [at for at, name in enumerate(names) if name == lower]
    return (
        (same, "the name of") if same else ([at for at, name in enumerate(names) if lower in name], "in the names of")
    )


def class_label(index: int, categories: Sequence[str] | None) -> str | None:
    """The name of class ``index``, None where it has none.

    Example:
        >>> class_label(1, ["cat", "dog"]), class_label(7, ["cat", "dog"])
        ('dog', None)
    """
    return categories[index] if categories and index < len(categories) else None
