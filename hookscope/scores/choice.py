"""What the options of ``cam`` and ``saliency`` say is explained, before a model and a photograph are known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookscope.errors import UsageError
from hookscope.scores.target import Target

if TYPE_CHECKING:
    from hookscope.images import InputImage
    from hookscope.models import LoadedModel

_FUNCTION = re.compile(r"(?!(top|box):).*(\.py|\w):[^\W\d]\w*")


def parse_target(text: str) -> Target | str:
    """Classes as a `Target`; ``file.py:function`` and ``package.module:function`` stay texts."""
    return text if _FUNCTION.fullmatch(text) and "," not in text else Target(text)


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """What ``--target`` and the options beside it name.

    Attributes:
        target: What `parse_target` returns; None for the best class.
        against: The class whose score is subtracted.
    """

    target: Target | str | None = None
    against: Target | None = None

    def __post_init__(self) -> None:
        if isinstance(self.target, str) and self.against:
            raise UsageError(f"--target {self.target} takes no --against", do="leave one of them out")
        if self.against is not None and (self.against.count != 1 or self.against.has_top):
            raise UsageError(f"--against {self.against} is not one class", do="give a class number or name")

    @property
    def classes(self) -> Target | None:
        """The classes that are explained; None if it is something else."""
        if isinstance(self.target, str):
            return None
        return self.target or Target()

    @property
    def count(self) -> int:
        """The largest number of maps of one image."""
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
        from hookscope.scores.logits import check_family
        from hookscope.scores.objectives import DifferenceTarget, FunctionTarget

        if isinstance(self.target, str):
            function = FunctionTarget(find_in_source(self.target)[0])
            return lambda image, classes=None: function
        check_family(net.family, net.name)
        for classes in (self.classes, self.against):
            if classes is not None:
                classes.check(categories)

        def target(image: InputImage, classes: Target | None = None) -> Any:
            chosen = classes or self.classes
            return chosen if self.against is None else DifferenceTarget(chosen, self.against)

        return target
