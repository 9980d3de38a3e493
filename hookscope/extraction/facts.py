"""Features of one batch, and where they come from. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hookscope.display import Cells, Shown

if TYPE_CHECKING:
    from torch import Tensor

POOLS = ("none", "mean", "max", "cls", "flatten")
"""How the output of a layer becomes the features of an image."""


@dataclass(frozen=True, slots=True, repr=False)
class FeatureBatch(Shown):
    """The features of some images, one row for each, in the order of the list.

    Attributes:
        positions: Positions of the images in the list, from 0.
        names: Their paths, or numbers for tensors.
        sha256: Hexadecimal SHA-256 of the bytes of each file, empty for tensors.
        labels: The name of the folder of each image, or the label that a data set gives; empty if there is none.
        features: Tensors ``(N, ...)`` on the CPU by column: the key of the call, ``layer4`` or ``layer4.0.relu#1``,
            with the part of an output of several, ``backbone out``; ``logits`` and ``probability CLASS`` if wanted.
        overflowed: How many finite values of each column became Inf in the data type of the features.
    """

    positions: tuple[int, ...]
    names: tuple[str, ...]
    sha256: tuple[str, ...]
    labels: tuple[str, ...]
    features: Mapping[str, Tensor] = field(default_factory=dict)
    overflowed: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.positions)

    def _cells(self) -> Cells:
        return {"images": self.count, **{name: tuple(tensor.shape) for name, tensor in self.features.items()}}


@dataclass(frozen=True, slots=True, repr=False)
class WrittenFeatures(Shown):
    """What `Extraction.save` wrote.

    Attributes:
        path: The file, or the folder of parts.
        rows: Number of images in it, over all runs.
        skipped: Number of images that could not be used.
        columns: Shape of the features of one image, by column.
        earlier: Number of images that an earlier run had done, used or skipped.
        was_complete: Whether there was nothing left to do.
        dtypes: Data type of the features, by column.
        skipped_file: The file that names the skipped images; empty if there are none.
        beside: Files beside the output with the names of its rows and its metadata, where the format does not hold
            them.
    """

    path: str
    rows: int
    skipped: int
    columns: Mapping[str, tuple[int, ...]]
    earlier: int = 0
    was_complete: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    skipped_file: str = ""
    beside: tuple[str, ...] = ()

    def _cells(self) -> Cells:
        return {"path": self.path, "rows": self.rows, "skipped": self.skipped or None, **self.columns}
