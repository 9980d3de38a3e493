"""Which class is asked about: an index, a name, or the classes with the highest scores. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import Any

from hookscope.errors import TargetError, UsageError, nearest

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Target:
    """A wish for classes, as ``--target`` spells it.

    Attributes:
        text: ``281`` (an index), ``tabby`` (a name or a part of one), ``top:3`` (the highest scores), or several of
            these with commas between; a name that holds commas itself is written whole.

    Raises:
        UsageError: for ``top:`` without a number above 0, or nothing between commas.

    Example:
        >>> Target("top:2").indices([0.1, 3.0, 2.0], None), Target("fox,0").indices([0, 0], ["cat", "red fox"])
        ((1, 2), (1, 0))
    """

    text: str = "top:1"

    def __post_init__(self) -> None:
        for term in self.text.split(","):
            if not term.strip():
                raise UsageError("the target is empty", do="give a class index, a class name or top:K")
            if term.strip().startswith("top:") and not _top(term):
                raise UsageError(f"bad target '{term.strip()}'", do="write top:K with K from 1, such as top:3")

    @classmethod
    def of(cls, wish: Any) -> Target:
        """A target from a text or anything that is an index: an integer, or a tensor or array that holds one.

        Raises:
            UsageError: for anything else.
        """
        if isinstance(wish, Target):
            return wish
        if isinstance(wish, str):
            return cls(wish)
        try:
            return cls(str(as_index(wish)))
        except TypeError:
            asked = f"no class is meant by a {type(wish).__name__}"
            raise UsageError(asked, do="give a class index, a class name or top:K") from None

    @property
    def count(self) -> int:
        """How many classes it asks for, at most."""
        return sum(_top(term) or 1 for term in self.text.split(","))

    def check(self, categories: Sequence[str] | None) -> None:
        """Raise a `TargetError` already now, before a forward pass, for what none of ``categories`` fits."""
        for term in self._terms(categories):
            if _top(term):
                continue
            if not _is_index(term):
                _by_name(term, categories)
            elif categories:
                _by_index(term, len(categories))

    def indices(self, scores: Sequence[float], categories: Sequence[str] | None) -> tuple[int, ...]:
        """The classes meant, each once: in the order asked for, those of ``top:K`` with the highest score first.

        Args:
            scores: One for each class.
            categories: Names of the classes, None where none are known.

        Raises:
            TargetError: no such class, or a name that fits several; says which there are.
        """
        found: dict[int, None] = {}
        for term in self._terms(categories):
            if top := _top(term):
                order = sorted(range(len(scores)), key=lambda at: (-_rank(scores[at]), at))
                found |= dict.fromkeys(order[:top])
            else:
                found[_by_index(term, len(scores)) if _is_index(term) else _by_name(term, categories)] = None
        return tuple(found)

    def _terms(self, categories: Sequence[str] | None) -> tuple[str, ...]:
        """What stands between the commas, but the longest run of it that is the name of a class in one piece."""
        parts, names = self.text.split(","), {name.lower() for name in categories or () if "," in name}
        found, at = [], 0
        while at < len(parts):
            runs = ((end, ",".join(parts[at:end])) for end in range(len(parts), at, -1))
            at, term = next((end, run) for end, run in runs if end == at + 1 or run.strip().lower() in names)
            found.append(term)
        return tuple(found)


def _top(term: str) -> int | None:
    """The K of ``top:K``, None for what is no such term or has no K above 0."""
    found = re.fullmatch(r"\s*top:([0-9]{1,6})\s*", term)
    return int(found[1]) or None if found else None


def _rank(score: float) -> float:
    return score if score == score else float("-inf")  # NaN is no high score


def _is_index(text: str) -> bool:
    return re.fullmatch(r"\s*[0-9]+\s*", text) is not None


def _by_index(text: str, classes: int) -> int:
    digits = text.strip().lstrip("0") or "0"
    if len(digits) > len(str(classes)) or int(digits) >= classes:
        shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
        raise TargetError(f"no class {shown}", f"the model has {classes} classes: 0 to {classes - 1}")
    return int(digits)


def _by_name(text: str, categories: Sequence[str] | None) -> int:
    """The one class called ``text``, in the same case or in any, or the one whose name holds it."""
    if not categories:
        raise TargetError(
            f"no class '{text}'", "no names are known", "give an index, or the names of the classes (categories)"
        )
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
