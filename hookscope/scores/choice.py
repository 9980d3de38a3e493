"""What the options of ``cam`` and ``saliency`` say is explained, before a model and a photograph are known."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from hookscope.errors import InputError, ModelError, UsageError
from hookscope.images import InputImage, read_mask
from hookscope.scores.target import Target

if TYPE_CHECKING:
    from hookscope.models import LoadedModel

_POINT = re.compile(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*")
_BOX = re.compile(r"\s*box:([0-9]{1,4})(:class)?\s*")
_FUNCTION = re.compile(r"(?!(top|box):)[^,]*(\.py|\w):[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Boxes:
    """The detected boxes that a target names; ``fit`` as in `BoxTarget`."""

    indices: tuple[int, ...]
    fit: bool = True

    @classmethod
    def parse(cls, text: str) -> Boxes:
        """Read ``box:0`` or ``box:0:class``, or several of one of them."""
        terms = [(term, _BOX.fullmatch(term)) for term in text.split(",")]
        found = [match for _, match in terms if match]
        if len(found) < len(terms):
            term = next(term for term, match in terms if not match)
            raise UsageError(f"bad target '{term.strip()}' for a box", do="write box:K with K from 0, or box:K:class")
        of_class = {bool(match[2]) for match in found}
        if len(of_class) > 1:
            raise UsageError(f"the target {text} mixes box:K and box:K:class", do="write one of them for all boxes")
        return cls(tuple(dict.fromkeys(int(match[1]) for match in found)), not of_class.pop())

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
        mask = read_mask(text)
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
                sizes = ["x".join(map(str, each)) for each in (self.mask.size, size)]
                asked = f"the mask {self.text} is {sizes[0]}, and the image {sizes[1]}"
                raise InputError(asked, do="give a mask of the image's size")
            return self.mask
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
    similar_to: Callable[[int], InputImage] | None = None

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

    def for_model(self, net: LoadedModel, categories: tuple[str, ...] | None) -> Callable[..., Any]:
        """Check it against ``net`` before a forward pass, and return the function from a photograph to its target.

        The target is what `class_activation_maps` takes. A second argument replaces the classes, where it is about
        classes. Functions are imported and pictures are embedded once.

        Raises:
            ModelError: the family of ``net`` has no such scores, or there is no such function.
            TargetError: no such class.
        """
        from hookscope.models import find_in_source
        from hookscope.scores.logits import EXPLAIN_SIMILARITY, check_family
        from hookscope.scores.objective import ScoreTarget
        from hookscope.scores.score_targets import DifferenceTarget, RegionTarget, SimilarityTarget

        if isinstance(self.target, str):
            found = find_in_source(self.target)
            if not isinstance(found, ScoreTarget) and not callable(found):
                raise ModelError(f"{self.target} is not a function but {type(found).__name__}", do="name a function")
            return _always(found)
        if isinstance(self.target, Boxes):
            from hookscope.scores.score_targets import BoxTarget

            return _always(BoxTarget(self.target.indices, self.target.fit))
        if self.similar_to:
            check_family(net.family, net.name, "embedding")
            return _always(SimilarityTarget.of_picture(net, self.similar_to(net.preprocess.frames)))
        check_family(net.family, net.name, boxes=True)
        if getattr(net.model, "num_classes", None) == 0:  # so timm says that there is no classifier
            raise ModelError(f"{net.name} gives an embedding, no score for each class", do=EXPLAIN_SIMILARITY)
        for classes in (self.classes, self.against):
            if classes is not None:
                classes.check(categories)

        def target(image: InputImage, classes: Target | None = None) -> Any:
            chosen: Any = classes or self.classes
            if self.against is not None:
                chosen = DifferenceTarget(chosen, self.against)
            if self.region is None:
                return chosen
            photograph, _ = net.preprocess.shown(image.image, net.prepare(image))
            region = net.preprocess.region(self.region.drawn(photograph.size))
            if not region.any():
                asked = f"the network does not see the region {self.region.where}"
                raise InputError(
                    asked,
                    "the preprocessing cuts it off",
                    "choose other pixels, or ‹resize='stretch'|--resize stretch›",
                )
            return RegionTarget(region, chosen, self.region.where)

        return target


def _always(target: Any) -> Callable[..., Any]:
    return lambda image, classes=None: target
