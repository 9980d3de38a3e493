"""What is asked about, before a model and an image are known: classes, boxes and regions; and names of classes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import TYPE_CHECKING, Any

from hookscope import images
from hookscope.errors import CategoriesError, InputError, TargetError, UsageError, kind_of, nearest

if TYPE_CHECKING:
    from PIL import Image

_MOST_NAMED = 5
_POINT = re.compile(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*")
_BOX = re.compile(r"\s*box:([0-9]{1,4})(:class)?\s*")
_FUNCTION = re.compile(r"(?!(top|box):)[^,]*(\.py|\w):[^\W\d]\w*")


ClassNames = Sequence[str] | None
"""The names of classes in the order of a model's scores; None if they are not known."""


@dataclass(frozen=True, slots=True)
class Target:
    """The classes that a target names.

    ``text`` is an index (``281``), a name or a part of one (``tabby``), ``top:3`` (the highest scores), or several of
    these, separated by commas. A name that contains commas is written whole.
    """

    text: str = "top:1"

    def __post_init__(self) -> None:
        for term in self.text.split(","):
            if not term.strip():
                raise UsageError("the target is empty", do="give a class number, a class name or top:K")
            if term.strip().startswith("top:") and not _top(term):
                raise UsageError(f"bad target '{term.strip()}'", do="write top:K with K from 1, such as top:3")

    @classmethod
    def of(cls, target: Any) -> Target:
        """A target from a text, an index (an integer, or a tensor or array that holds one), or a list of them."""
        if isinstance(target, Target):
            return target
        if isinstance(target, str):
            return cls(target)
        if isinstance(target, (list, tuple)) and target:
            return cls(",".join(str(cls.of(part)) for part in target))
        try:
            return cls(str(as_index(target)))
        except TypeError:
            asked, do = f"a target cannot be {kind_of(target)}", "give a class number, a class name or top:K"
            raise UsageError(asked, do=do) from None

    def __str__(self) -> str:
        return self.text

    @property
    def count(self) -> int:
        """The largest number of classes that it can name."""
        return sum(_top(term) or 1 for term in self.text.split(","))

    @property
    def has_top(self) -> bool:
        """Whether it asks for the highest scores, and not only for named classes."""
        return any(_top(term) for term in self.text.split(","))

    def check(self, categories: ClassNames) -> None:
        """Raise a `TargetError` before a forward pass if an index or a name fits none of ``categories``."""
        for term in self._terms(categories):
            if _top(term):
                continue
            if not _is_index(term):
                _by_name(term, categories)
            elif categories:
                _by_index(term, len(categories))

    def indices(self, scores: Sequence[float | None], categories: ClassNames) -> tuple[int, ...]:
        """The indices of the classes, each once, in the order of the terms; ``top:K`` by descending score.

        ``top:K`` leaves out a class whose score is None.
        """
        classes: dict[int, None] = {}
        for term in self._terms(categories):
            if top := _top(term):
                known = {at: score for at, score in enumerate(scores) if score is not None}
                ranks = {at: -math.inf if math.isnan(score) else score for at, score in known.items()}
                classes |= dict.fromkeys(sorted(ranks, key=lambda at: (-ranks[at], at))[:top])
            else:
                classes[_by_index(term, len(scores)) if _is_index(term) else _by_name(term, categories)] = None
        return tuple(classes)

    def _terms(self, categories: ClassNames) -> tuple[str, ...]:
        """The terms between commas; the longest run of them that is a class name counts as one."""
        parts, names = self.text.split(","), {name.lower() for name in categories or () if "," in name}
        terms, at = [], 0
        while at < len(parts):
            runs = ((end, ",".join(parts[at:end])) for end in range(len(parts), at, -1))
            at, term = next((end, run) for end, run in runs if end == at + 1 or run.strip().lower() in names)
            terms.append(term)
        return tuple(terms)


def _top(term: str) -> int | None:
    """The K of ``top:K``, None for another term or K = 0."""
    match = re.fullmatch(r"\s*top:([0-9]{1,6})\s*", term)
    return int(match[1]) or None if match else None


def _is_index(text: str) -> bool:
    return re.fullmatch(r"\s*[0-9]+\s*", text) is not None


def _by_index(text: str, classes: int) -> int:
    digits = text.strip().lstrip("0") or "0"
    if len(digits) > len(str(classes)) or int(digits) >= classes:
        shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
        raise TargetError(f"no class {shown}", f"the model has {classes} classes: 0 to {classes - 1}")
    return int(digits)


def _by_name(text: str, categories: ClassNames) -> int:
    """The only class called ``text``, in the same case or in any case, or the only one whose name contains it."""
    if not categories:
        do = "give a number, or the names of the classes (categories)"
        raise TargetError(f"no class '{text}'", "the class names are unknown", do)
    # ImageNet has a dog called Cardigan, a cardigan, and two classes called crane.
    name, lower = text.strip(), text.strip().lower()
    equal = [at for at, category in enumerate(categories) if category == name]
    equal = equal or [at for at, category in enumerate(categories) if category.lower() == lower]
    fitting = equal or [at for at, category in enumerate(categories) if lower in category.lower()]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        near = nearest(text, list(categories), _MOST_NAMED) or f"there are {len(categories)}: {categories[0]}, ..."
        raise TargetError(f"no class '{text}'", near, "give a name, a number or top:K")
    fitting.sort(key=lambda at: lower not in categories[at].lower().split())  # "tiger cat" before "oystercatcher"
    some = ", ".join(f"{at} {categories[at]}" for at in fitting[:_MOST_NAMED])
    more = ", ..." if len(fitting) > _MOST_NAMED else ""
    how = "the name of" if equal else "in the names of"
    raise TargetError(f"'{text}' is {how} {len(fitting)} classes", some + more, "give one of the numbers")


def class_label(index: int, categories: ClassNames) -> str | None:
    """The name of class ``index``, None if unknown."""
    return categories[index] if categories and index < len(categories) else None


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
        from hookscope.models import class_names_of

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


@dataclass(frozen=True, slots=True)
class Boxes:
    """The detected boxes that a target names; ``fit`` as in `BoxTarget`."""

    indices: tuple[int, ...]
    fit: bool = True

    @classmethod
    def parse(cls, text: str) -> Boxes:
        """Read ``box:0`` or ``box:0:class``, or several of one of them."""
        terms = [(term, _BOX.fullmatch(term)) for term in text.split(",")]
        matches = [match for _, match in terms if match]
        if len(matches) < len(terms):
            term = next(term for term, match in terms if not match)
            raise UsageError(f"bad target '{term.strip()}' for a box", do="write box:K with K from 0, or box:K:class")
        of_class = {bool(match[2]) for match in matches}
        if len(of_class) > 1:
            raise UsageError(f"the target {text} mixes box:K and box:K:class", do="write one of them for all boxes")
        return cls(tuple(dict.fromkeys(int(match[1]) for match in matches)), not of_class.pop())

    def __str__(self) -> str:
        return ",".join(f"box:{index}" + ("" if self.fit else ":class") for index in self.indices)


def parse_target(text: str) -> Target | Boxes | str:
    """Classes as a `Target`, boxes as `Boxes`; ``file.py:function`` and ``package.module:function`` stay texts."""
    if any(term.strip().startswith("box:") for term in text.split(",")):
        return Boxes.parse(text)
    if ".py" in text and not _FUNCTION.fullmatch(text):
        raise UsageError(f"the target {text} names no function", do="write file.py:function, without other targets")
    return text if _FUNCTION.fullmatch(text) else Target(text)


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a photograph: ``point`` ``(x, y)``, or a ``mask`` that is not 0 there; ``text`` is how it was named."""

    text: str
    point: tuple[int, int] | None = None
    mask: Image.Image | None = None

    @classmethod
    def parse(cls, text: str) -> Region:
        """Read ``X,Y``, or the name of a file with a mask.

        Raises:
            ImageError: the mask cannot be read.
            UsageError: the mask is empty.
        """
        if match := _POINT.fullmatch(text):
            return cls(text, (int(match[1]), int(match[2])))
        if not re.search(r"[^\d\s.,-]", text):
            raise UsageError(f"bad point '{text}'", do="write X,Y: column and row of a pixel, from 0")
        mask = images.read_mask(text)
        if mask.getbbox() is None:
            raise UsageError(f"the mask {text} is empty", "all its pixels are 0", "make the pixels of the region white")
        return cls(text, mask=mask)

    @property
    def where(self) -> str:
        """The words for it: ``at 20,30`` or ``in mask.png``."""
        return f"at {self.text}" if self.point else f"in {os.path.basename(self.text)}"

    def drawn(self, size: tuple[int, int]) -> Image.Image:
        """A mask ``(W, H)``, 0 outside the region; InputError for a region of another photograph."""
        if self.mask is not None:
            if self.mask.size != size:
                sizes = ["x".join(map(str, sides)) for sides in (self.mask.size, size)]
                asked = f"the mask {self.text} is {sizes[0]}, and the image {sizes[1]}"
                raise InputError(asked, do="give a mask of the image's size")
            return self.mask
        from PIL import Image

        assert self.point is not None
        if self.point[0] >= size[0] or self.point[1] >= size[1]:
            exists = f"x is 0 to {size[0] - 1}, y 0 to {size[1] - 1}"
            raise InputError(f"the point {self.text} is outside the image", exists)
        mask = Image.new("L", size)
        mask.putpixel(self.point, 255)
        return mask


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """What a target and the choices beside it name.

    Attributes:
        target: What `parse_target` returns; None for the best class.
        region: The pixels of a segmentation that count.
        against: The class whose score is subtracted.
        similar_to: From a number of frames to the photograph or clip to whose embedding the similarity is explained.
    """

    target: Target | Boxes | str | None = None
    region: Region | None = None
    against: Target | None = None
    similar_to: Callable[[int], images.InputImage] | None = None

    def __post_init__(self) -> None:
        if self.classes is None:
            what = "‹similar_to|--similar-to›" if self.similar_to else f"‹target={self.target}|--target {self.target}›"
            given: dict[str, Any] = {"‹region|--region›": self.region, "‹against|--against›": self.against}
            given |= {"‹target|--target›": self.target} if self.similar_to else {}
            if others := [option for option, value in given.items() if value]:
                raise UsageError(f"{what} takes no {others[0]}", do="leave one of them out")
        if self.against is not None and (self.against.count != 1 or self.against.has_top):
            raise UsageError(
                f"‹against={self.against}|--against {self.against}› is not one class", do="give a class number or name"
            )

    @property
    def classes(self) -> Target | None:
        """The classes that are explained; None if it is something else."""
        if isinstance(self.target, Boxes | str) or self.similar_to:
            return None
        return self.target or Target()

    @property
    def count(self) -> int:
        """The largest number of maps of one image."""
        if isinstance(self.target, Boxes):
            return len(self.target.indices)
        return self.classes.count if self.classes else 1
