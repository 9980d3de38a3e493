"""What `attention_maps` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.display import Cells, Picture, Shown
from hookscope.drawing import map_png
from hookscope.hooks import Call


@dataclass(frozen=True, repr=False)
class AttentionMap(Shown):
    """Where the heads of one call of attention look.

    Attributes:
        call: The place of the call: the module that computes it, and the index among all calls of attention.
        values: ``(heads, h, w)``, or ``(heads, T, h, w)`` for a clip: the attention weight of each position for the
            query, 0 to 1.
        elsewhere: ``(heads,)``, the weight of all keys without a position, such as the class token, and padding; with
            ``values`` it adds up to 1.
        query: What looks, such as ``class token`` or ``mean of 196 queries``.
        at: ``(y, x)`` of a query with a position, as shares 0..1 of the input's height and width; else None.
        windows: The number of windows that the attention is cut into; 1 where all positions meet.
        seen: ``(H, W)`` of the network's input.
        weights: ``(windows, heads, L, S)``, the weights of all ``L`` queries and ``S`` keys, if they were asked for.
    """

    call: Call
    values: NDArray[np.float32]
    elsewhere: NDArray[np.float32]
    query: str
    at: tuple[float, float] | None
    windows: int
    seen: tuple[int, int]
    weights: Tensor | None = field(default=None, compare=False)

    @property
    def heads(self) -> int:
        return len(self.values)

    @property
    def stills(self) -> NDArray[np.float32]:
        """The maps ``(heads, h, w)`` that are drawn: for a clip the sums over its frames."""
        values: NDArray[np.float32] = self.values.sum(1) if self.values.ndim == 4 else self.values
        return values

    @property
    def positions(self) -> NDArray[np.float32]:
        """``(heads,)``: how many positions a head looks at, as the exponential of the entropy of its map.

        It is 1 for one position, and ``h * w`` where all have the same weight.
        """
        flat = self.values.reshape(self.heads, -1).astype(np.float64)
        weights = flat / np.maximum(flat.sum(1, keepdims=True), np.finfo(float).tiny)
        entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(1)
        effective: NDArray[np.float32] = np.exp(entropy).astype(np.float32)
        return effective

    def _cells(self) -> Cells:
        cells = {"layer": self.call.key, "heads": self.heads, "query": self.query, "map": self.values.shape[1:]}
        cells |= {"windows": self.windows, "elsewhere": float(self.elsewhere.mean())}
        mean = self.stills.mean(0)
        return cells | {"picture": Picture(partial(map_png, mean), f"mean attention of {self.call.key}")}
