"""A class over some pixels of a segmentation as a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookscope.errors import UsageError
from hookscope.scores.difference import DifferenceTarget
from hookscope.scores.logits import class_maps
from hookscope.scores.objective import Objective, ScoreTarget, Size, class_objectives
from hookscope.scores.target import Target


@dataclass(frozen=True, slots=True, eq=False)
class RegionTarget(ScoreTarget):
    """The mean logit of a class over some pixels of a segmentation.

    Args:
        region: A mask ``(H, W)`` of the network's input or of the logits, a tensor or an array of booleans or of
            weights from 0; it is averaged to the size of the logits. ``LoadedModel.preprocess.region`` makes it of a
            mask of the photograph.
        target: A class index, a class name or ``top:K``, the best in the region; or a `DifferenceTarget`.
        where: The words after the class, in tables and on pages.

    Raises:
        UsageError: the mask is empty, no mask of two dimensions, or of another size.
        ModelError: for a model that is not a segmentation model.

    Example:
        >>> import torch, hookscope
        >>> net, mask = torch.nn.Conv2d(3, 4, 3, padding=1), torch.zeros(8, 8)
        >>> mask[2:4, 5] = 1
        >>> [saliency] = hookscope.saliency_maps(net, torch.ones(1, 3, 8, 8), RegionTarget(mask, 2))
        >>> saliency.prediction.name, saliency.map.nonzero().amin(0).tolist()
        ('class 2 in the region', [1, 4])
    """

    region: Any
    target: Target | str | int | DifferenceTarget = "top:1"
    where: str = "in the region"

    def __post_init__(self) -> None:
        if not isinstance(self.region, Tensor):
            object.__setattr__(self, "region", torch.as_tensor(np.asarray(self.region)))
        if self.region.dim() != 2:
            shape = "x".join(map(str, self.region.shape))
            raise UsageError(f"a region is a mask (H, W), not {shape or 'one number'}")
        if not bool((self.region > 0).any()) or bool((self.region < 0).any()):
            raise UsageError("the region is empty", do="give a mask that is above 0 at one pixel at least")

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        maps = class_maps(output, bare=True)
        if size and maps is not None and self.region.shape not in (size, maps.shape[-2:]):
            shape, other = ("x".join(map(str, each)) for each in (self.region.shape, size))
            do = "give a mask of the network's input, such as preprocess.region makes"
            raise UsageError(f"the region is {shape}, and the input {other}", do=do)
        of = (
            self.target.in_region
            if isinstance(self.target, DifferenceTarget)
            else partial(class_objectives, self.target)
        )
        goals = of(self.region, output, categories, what)
        around = _bounds(self.region)
        return [
            replace(goal, score=replace(goal.score, target=f"{goal.score.name} {self.where}", box=around))
            for goal in goals
        ]


def _bounds(region: Tensor) -> tuple[float, float, float, float]:
    """``(left, top, right, bottom)`` of the box around the pixels of ``region`` ``(H, W)``."""
    (top, left), (bottom, right) = (limits.tolist() for limits in region.nonzero().aminmax(dim=0))
    return float(left), float(top), float(right + 1), float(bottom + 1)
