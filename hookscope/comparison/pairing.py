"""Which call of A belongs to which call of B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hookscope.hooks import Call, Shape


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A call of one side, as pairing sees it.

    Attributes:
        call: The call; its ``order`` counts all calls.
        shape: Of its output for one image, without the batch axis.
        parameters: Shapes of the parameters that the layer holds itself, by name.
        folds: Number of following calls of the other side whose work this layer does too, where its class says so:
            2 for a quantized ``ConvReLU2d`` with a folded BatchNorm.
    """

    call: Call
    shape: Shape
    parameters: Mapping[str, tuple[int, ...]]
    folds: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two calls that stand for each other; ``how`` as in `PairedCall`. ``first`` is the first call of A that a layer of
    B does the work of, where that is a run of calls that ends with ``a``."""

    a: Call
    b: Call
    how: str
    first: Call | None = None


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs in order of execution of A, and the calls of each side without a partner."""

    pairs: tuple[Pair, ...]
    only_a: tuple[Call, ...] = ()
    only_b: tuple[Call, ...] = ()


def pair_calls(a: Sequence[SeenCall], b: Sequence[SeenCall], names: Mapping[str, str] | None = None) -> Pairing:
    """The pairs of two passes: by ``names`` (A to B) where given, else by the same key and shape.

    Raises:
        LayerError: ``names`` has a layer that did not run.
    """
    by_key = {seen.call.key: seen for seen in b}
    pairs, used = [], set()
    for seen in a:
        name = (names or {}).get(seen.call.key, seen.call.key)
        other = by_key.get(name)
        if other is not None and (names or seen.shape == other.shape):
            pairs.append(Pair(seen.call, other.call, "map" if names else "name"))
            used.add(name)
    paired = {pair.a.key for pair in pairs}
    only_a = tuple(seen.call for seen in a if seen.call.key not in paired)
    return Pairing(tuple(pairs), only_a, tuple(seen.call for seen in b if seen.call.key not in used))
