"""What a comparison of two sides found: a row for each pair of calls, the answer, and their columns. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hookscope.columns import Column, Columns, Row
from hookscope.comparison.similarities import SIMILARITIES, Similarity
from hookscope.display import Cells, RowTuple, Shown
from hookscope.hooks import Call, Shape
from hookscope.models import short_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TIMES_NOISE = 10
"""A difference above so many times the noise is more than noise."""

INPUT = "(input)"
"""What the input of the model is called as the first call of a comparison."""


@dataclass(frozen=True, slots=True)
class LargestDifference:
    """The largest absolute difference of two outputs, and where it is.

    Attributes:
        value: The difference; inf where one side is Inf, or NaN, and the other is not.
        image: Position in `Comparison.names`; None where the output is not of single images, such as proposals.
        place: Index in the output of this image, such as ``(channel, row, column)``.
        a: The value of A there.
        b: The value of B there.
    """

    value: float
    image: int | None
    place: tuple[int, ...]
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the values of B are from the values of A, over all images.

    Attributes:
        values: Number of compared values.
        equal: Number of values that are the same to the bit; a NaN equals a NaN, and 0 equals −0.
        relative_l2: Norm of B − A divided by the norm of A, from 0. Inf where A is 0 everywhere and B is not; None
            where NaN or Inf are on one side only, and without finite values.
        largest: The largest absolute difference; None if all values are the same to the bit.
        cosine: Of A and B, −1 to 1; None if one of them is 0, or ``relative_l2`` is None.
        nonfinite_a: Number of values that are NaN or Inf in A and finite in B.
        nonfinite_b: Values that are not finite in B but are in A.
    """

    values: int
    equal: int
    relative_l2: float | None
    largest: LargestDifference | None
    cosine: float | None
    nonfinite_a: int = 0
    nonfinite_b: int = 0

    @property
    def is_same(self) -> bool:
        """Whether all values are the same to the bit."""
        return self.equal == self.values

    @property
    def nonfinite(self) -> int:
        """Number of values that are NaN or Inf on one side only."""
        return self.nonfinite_a + self.nonfinite_b


@dataclass(frozen=True, slots=True, repr=False)
class PairedCall(Shown):
    """A call of A, the call of B that stands for it, and how far their outputs are apart.

    Attributes:
        a: The call of A; ``(input)`` and ``(model)`` are the names of the model's input and output.
        b: The call of B.
        part: Name of the tensor, where the output has several.
        paired_by: ``name``, ``order``, ``map``, or ``folded``: one layer of a side does the work of
            several layers of the other, whose last call is in the pair.
        shape_a: Of the output for one image, without the batch axis.
        shape_b: The same of B.
        difference: Of the outputs; None where shapes differ.
        noise: Relative L2 difference of A from itself, when it runs again and when its input changes by rounding. It
            is at least the unit roundoff of the data type, 6e-8 for float32.
        isolated_l2: Relative L2 difference of A and B when the layer of B runs on the inputs of A; None if not
            measured, inf where NaN or Inf are on one side only.
        rounding_l2: Relative L2 difference of A's output and the same in the 8-bit steps of B's; None without steps.
        similarities: By name, such as ``cka``; None where one is not defined.
        dead_a: Share of channels that are dead in A and not in B, from 0 to 1; None without channels.
        dead_b: The same in B and not in A.
        parameters: Relative L2 change of the layer's own parameters, from 0; None if they do not pair or are none.
        buffers: The same of its own buffers, such as the running mean and variance of BatchNorm.
    """

    a: Call
    b: Call
    part: str
    paired_by: str
    shape_a: Shape
    shape_b: Shape
    difference: Difference | None
    noise: float | None = None
    isolated_l2: float | None = None
    rounding_l2: float | None = None
    similarities: Mapping[str, float | None] = field(default_factory=dict)
    dead_a: float | None = None
    dead_b: float | None = None
    parameters: float | None = None
    buffers: float | None = None

    @property
    def cka(self) -> float | None:
        """Linear CKA over the images, at most 1; an unbiased estimate, which may be below 0 with few images.

        None with fewer than four images, and where a layer is constant or not finite.
        """
        return self.similarities.get("cka")

    @property
    def differs(self) -> bool:
        """Whether the outputs differ by more than ten times the noise, in NaN or Inf, or in shape."""
        return self.difference is None or self.difference.nonfinite > 0 or self.is_beyond_noise(self.relative_l2)

    @property
    def is_same(self) -> bool:
        """Whether the outputs are the same to the bit; outputs of different shapes are not."""
        return self.difference is not None and self.difference.is_same

    @property
    def relative_l2(self) -> float | None:
        """Relative L2 difference of the outputs; None where shapes differ, or NaN or Inf are on one side only."""
        return self.difference.relative_l2 if self.difference else None

    def is_beyond_noise(self, relative_l2: float | None) -> bool:
        """Whether a relative L2 difference is more than ten times the noise of this pair."""
        return relative_l2 is not None and relative_l2 > TIMES_NOISE * (self.noise or 0.0)

    @property
    def key(self) -> str:
        """The key of the call of A, and the part if there are several."""
        return f"{self.a.key} {self.part}" if self.part else self.a.key

    @property
    def key_b(self) -> str:
        """The same of B."""
        return f"{self.b.key} {self.part}" if self.part else self.b.key

    def _columns(self) -> Columns:
        return PAIRS


def how_different(pair: PairedCall) -> tuple[float, float]:
    """What the layer alone adds beyond the noise, then how far apart the outputs are; inf for NaN or another shape."""
    alone = pair.isolated_l2 if pair.is_beyond_noise(pair.isolated_l2) else None
    return alone or 0.0, math.inf if pair.differs and pair.relative_l2 is None else pair.relative_l2 or 0.0


@dataclass(frozen=True, slots=True)
class ChangedImage:
    """An image whose best class differs: its position in `Comparison.names` and name, and each side's best class with
    its probability."""

    position: int
    name: str
    class_a: str
    class_b: str
    probability_a: float
    probability_b: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often both sides give the same answer.

    Attributes:
        images: Number of images.
        top1: Share of images with the same best class, from 0 to 1.
        top5: Mean share of the five best classes that both sides name, from 0 to 1; of fewer classes all but one.
        changed: The images whose best class differs.
        best: How many best classes ``top5`` counts.
    """

    images: int
    top1: float
    top5: float
    changed: tuple[ChangedImage, ...]
    best: int = 5


@dataclass(frozen=True, slots=True, repr=False)
class Answer(Shown):
    """Where the two sides part.

    Attributes:
        kind: What is behind it, as far as the numbers show: ``same`` (to the bit), ``noise`` (at most ten
            times the noise), ``nonfinite``, ``input``, ``models`` (two models), ``parameters``, ``buffers``,
            ``precision``, ``chance``, ``unpaired`` (a call without a partner), or ``layer`` (none of these).
        first: Key of the first pair with NaN or Inf on one side only, else of the first that differs beyond the noise;
            empty if none does.
        most: Key of the pair that adds most difference; empty if none adds any.
        same_before: Number of pairs before ``first`` that are the same to the bit.
        sentence: The answer in one sentence with its numbers, the cause first.
        advice: What to do about it; empty if there is nothing to say.
    """

    kind: str
    first: str
    most: str
    same_before: int
    sentence: str
    advice: str = ""

    def _cells(self) -> Cells:
        return {"answer": self.sentence, "first": self.first, "most": self.most}


@dataclass(frozen=True, repr=False)
class CkaMatrix(Shown):
    """Linear CKA of every layer of A against every layer of B.

    Attributes:
        names_a: Keys of the calls of A, in order of execution.
        names_b: The same of B.
        values: ``(len(names_a), len(names_b))`` at most 1; an unbiased estimate, so with few images it may be below
            0. NaN where a layer is constant or not finite.
        images: Number of images.
    """

    names_a: tuple[str, ...]
    names_b: tuple[str, ...]
    values: NDArray[np.float64]
    images: int

    def _cells(self) -> Cells:
        return {"matrix": f"{len(self.names_a)}x{len(self.names_b)}", "images": self.images}


@dataclass(frozen=True, repr=False)
class ComparedMaps(Shown):
    """The feature maps of one pair of calls for one image, of the channels that changed most.

    Attributes:
        key: Of the pair.
        image: Position of the image in `Comparison.names`.
        channels: The channels, the one that changed most first.
        a: ``(len(channels), h, w)`` maps of A in float32.
        b: The same of B.
        changes: ``(len(channels),)`` norm of B − A of each channel.
    """

    key: str
    image: int
    channels: tuple[int, ...]
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    changes: NDArray[np.float64]

    def _cells(self) -> Cells:
        return {"layer": self.key, "image": self.image, "channels": self.channels}


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What a side was: MODEL, label of the weights, data type, device, preprocessing in words, and what else it
    runs with (autocast, `torch.compile`, interventions)."""

    model: str
    weights: str
    dtype: str
    device: str
    preprocess: str
    special: str = ""


@dataclass(frozen=True, repr=False)
class Comparison(Shown, rows="calls"):
    """What `compare` found.

    Attributes:
        a: The first side.
        b: The second side.
        names: Names of the images that could be used, in their order; A's names where both sides have their own.
        answer: Where the two sides part.
        calls: The pairs of calls in order of execution of A: first the model's input, last its output.
        unpaired_a: Calls of A without a partner.
        unpaired_b: The same of B.
        agreement: Of the best classes; None where the outputs are not scores of the same classes.
        matrix: CKA of all against all, if it was wanted.
        maps: Maps of the chosen pairs.
        provenance: Versions, both sides, SHA-256 of images and checkpoints; JSON.
        notes: What the reader should know, such as images that were lost.
    """

    a: SideFacts
    b: SideFacts
    names: tuple[str, ...]
    answer: Answer
    calls: RowTuple[PairedCall]
    unpaired_a: tuple[Call, ...] = ()
    unpaired_b: tuple[Call, ...] = ()
    agreement: Agreement | None = None
    matrix: CkaMatrix | None = None
    maps: tuple[ComparedMaps, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, str]:
        """The names of both models without folders, or from the folder on that tells them apart."""
        a, b = self.a.model, self.b.model
        if a != b and short_name(a) == short_name(b):
            shared = next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), 0)
            begin = a.rfind("/", 0, shared) + 1
            return a[begin:], b[begin:]
        return short_name(a), short_name(b)

    def _cells(self) -> Cells:
        return {"a": self.a.model, "b": self.b.model, "images": len(self.names), "answer": self.answer.sentence}


def _of(path: str, name: str = "", help: str = "", **more: Any) -> Column:
    """What ``path`` leads to, such as ``difference.largest.value``; None where a part of it is missing."""

    def value(fact: Any) -> Any:
        for part in path.split("."):
            fact = getattr(fact, part, None)
        return fact

    return Column(name or path.rpartition(".")[2], value, help, **more)


def _similarity(name: str, kind: Similarity) -> Column:
    return Column(name, lambda pair: pair.similarities.get(name), kind.help, kind.need, "unknown")


PAIRS = Columns(
    _of("a.index", need=1, hide="unknown"),
    _of("a.key", "layer"),
    Column("part", hide="zero", where="table"),
    Column("layer_b", lambda pair: "" if pair.key_b == pair.key else pair.key_b, hide="zero", where="table"),
    _of("a.type", need=7),
    _of("a.call", where="rows"),
    _of("a.order", where="rows"),
    Column("part", where="rows"),
    _of("b.key", "layer_b", where="rows"),
    _of("b.type", "type_b", where="rows"),
    Column("paired_by", help="name, order, map, or folded: one layer does the work of several", where="rows"),
    Column("shape", lambda pair: pair.shape_a, need=4),
    Column("shape_b", where="rows"),
    Column("relative_l2", help="norm of B - A, divided by the norm of A"),
    Column("isolated_l2", help="relative_l2 when B's layer runs on A's inputs: what it alone adds", hide="unknown"),
    Column("noise", help="relative_l2 of A against itself", where="rows"),
    Column("differs", help="true above ten times the noise, or if one side has NaN", where="rows"),
    _of("difference.cosine", help="of both outputs", need=5, hide="unknown"),
    *(_similarity(name, kind) for name, kind in SIMILARITIES.items()),
    _of(
        "difference.largest.value", "max_abs", "largest difference; image, place, value_a and value_b say where", need=2
    ),
    _of("difference.largest.image", "image", where="rows"),
    _of("difference.largest.place", "place", where="rows"),
    _of("difference.largest.a", "value_a", where="rows"),
    _of("difference.largest.b", "value_b", where="rows"),
    _of("difference.values", help="number of values", where="rows"),
    _of("difference.equal", help="number of values that are the same to the bit", where="rows"),
    _of("difference.nonfinite_a", help="values that are NaN or Inf in A only; nonfinite_b: in B only", hide="zero"),
    _of("difference.nonfinite_b", hide="zero"),
    Column("dead_a", help="share of channels that are dead in A only; dead_b: in B only", need=3, hide="zero"),
    Column("dead_b", need=3, hide="zero"),
    Column("parameters", help="relative change of the layer's parameters", need=9, hide="zero"),
    Column("buffers", help="relative change of the layer's buffers", need=6, hide="zero"),
    Column("rounding_l2", help="relative_l2 when A's output is rounded to the 8-bit steps of B's", where="rows"),
)
"""What ``compare`` says of a pair of calls, a `PairedCall`."""

ANSWER = Columns(
    *("kind", "sentence", "advice", "first", "most", "same_before", "images", "top1", "top5", "changed", "a", "b")
)
UNPAIRED = Columns("side", "index", Column("layer", lambda call: call.key), "type", "call", "order")
CHANGED_IMAGES = Columns(Column("image", lambda row: row.name), "class_a", "class_b", "probability_a", "probability_b")
BROKEN_LIMITS = Columns(
    *("limit", Column("index", need=1), "layer", "order", Column("part", hide="zero"), "value"),
    *(Column("allowed", need=2), "evidence"),
)


def pair_row(pair: PairedCall, names: Sequence[str]) -> Row:
    row = PAIRS.row(pair)
    return {**row, "image": None if row["image"] is None else names[row["image"]]}


def answer_row(found: Comparison) -> Row:
    changed = len(found.agreement.changed) if found.agreement else None
    sides = {"a": asdict(found.a), "b": asdict(found.b)}
    return ANSWER.row(found.answer, found.agreement, images=len(found.names), changed=changed, **sides)
