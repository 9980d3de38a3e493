"""How often both sides name the same classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookscope.comparison.facts import Agreement, ChangedImage
from hookscope.models import LoadedModel
from hookscope.scores import class_label, class_scores, probabilities, without_scores


@dataclass
class AgreementSums:
    """The agreement so far; none once the outputs of a batch are no scores of the same classes."""

    a: LoadedModel
    b: LoadedModel
    categories: Sequence[str] | None = None
    images: int = 0
    same: int = 0
    shared: float = 0.0
    changed: list[ChangedImage] = field(default_factory=list)
    has_scores: bool = True

    def add(self, output_a: Any, output_b: Any, positions: Sequence[int], names: Sequence[str]) -> None:
        """Add the outputs of both sides for a batch."""
        if not self.has_scores:
            return
        sides = (output_a, self.a), (output_b, self.b)
        if any(without_scores(output, net.family, net.name) for output, net in sides):
            self.has_scores = False
            return
        a, b = (class_scores(output, net.name).detach().cpu().double() for output, net in sides)
        if a.shape != b.shape or len(a) != len(positions) or a.shape[1] < 2:
            self.has_scores = False
            return
        best_a, best_b = _best(a), _best(b)
        most = min(5, a.shape[1] - 1)
        top_a, top_b = (scores.argsort(dim=1, descending=True, stable=True)[:, :most] for scores in (a, b))
        common = (top_a[:, :, None] == top_b[:, None]).any(2).double().mean(1)
        shares_a, shares_b = probabilities(a), probabilities(b)
        for at in range(len(positions)):
            one, two = int(best_a[at]), int(best_b[at])
            self.images += 1
            self.same += one == two
            self.shared += float(common[at])
            if one != two:
                self.changed.append(
                    ChangedImage(
                        positions[at],
                        names[at],
                        self._class_name(one, self.a),
                        self._class_name(two, self.b),
                        float(shares_a[at, one]),
                        float(shares_b[at, two]),
                    )
                )

    def _class_name(self, index: int, net: LoadedModel) -> str:
        if index < 0:
            return "not finite"
        return class_label(index, self.categories or net.categories) or f"class {index}"

    def result(self) -> Agreement | None:
        if not self.has_scores or not self.images:
            return None
        return Agreement(self.images, self.same / self.images, self.shared / self.images, tuple(self.changed))


def _best(scores: Tensor) -> Tensor:
    """The best class of each image, −1 where a score is NaN."""
    return torch.where(scores.isnan().any(1), -1, scores.argmax(1))
