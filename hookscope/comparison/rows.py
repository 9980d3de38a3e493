"""The rows of a comparison: what is added up for each pair of calls, and each part of what they put out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.comparison.cka import PairCka
from hookscope.comparison.facts import INPUT, PairedCall
from hookscope.comparison.inputs import PairedBatch
from hookscope.comparison.pairing import Pair
from hookscope.comparison.side import Side
from hookscope.comparison.sums import DifferenceSums, PartSums, shape_for_one
from hookscope.hooks import MODEL, Call, as_plain, by_channel, tensors_in


class RowSums:
    """The sums of all rows so far, by key of the call of A and part."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = {pair.a.key: pair for pair in pairs}
        self._sums: dict[str, dict[str, PartSums]] = {key: {} for key in (INPUT, *self._pairs, MODEL)}
        self._cka: dict[tuple[str, str], PairCka] = {}

    def add(
        self, key: str, modules: tuple[Any, Any], outputs: tuple[Any, Any], batch: PairedBatch, listed: bool = False
    ) -> None:
        """Add what the modules of A and B put out for a batch; ``listed`` as `parts_of` takes it."""
        size = batch.size
        for part, a, b, images in parts_of(*outputs, batch.positions, listed):
            sums = self._sums[key].setdefault(part, PartSums())
            shapes = shape_for_one(a, len(images)), shape_for_one(b, len(images))
            if a.dim() > 1 and len(a) == len(b) == len(images):
                self._cka.setdefault((key, part), PairCka()).add(a, b)
            if a.shape != b.shape:
                if not sums.shapes_differ:
                    sums.shape_a, sums.shape_b = shapes
                sums.shapes_differ = True
                continue
            if not sums.shapes_differ:
                sums.shape_a, sums.shape_b = shapes
            sums.difference.add(a, b, images)
            if a.dim() > 1 and len(a) == len(images):
                for side, constant, module in ((a, sums.dead_a, modules[0]), (b, sums.dead_b, modules[1])):
                    layer = module if isinstance(module, nn.Module) else None
                    if side.is_floating_point() or side.is_quantized:
                        constant.add(by_channel(as_plain(side), layer, size))

    def add_alone(self, key: str, output: Any, alone: Any) -> None:
        """Add what the layer of B puts out on the inputs of A."""
        for part, a, b, images in parts_of(output, alone, (0,), False):
            if a.shape == b.shape and part in self._sums[key]:
                self._sums[key][part].alone.add(a, b, images)

    def add_noise(self, key: str, output: Any, again: Any, batch: PairedBatch, listed: bool = False) -> None:
        """Add what A put out in another pass over the same batch."""
        found: dict[str, DifferenceSums] = {}
        rounding: dict[str, float] = {}
        for part, a, b, images in parts_of(output, again, batch.positions, listed):
            sums = found.setdefault(part, DifferenceSums())
            if a.shape == b.shape:
                sums.add(a, b, images)
            else:
                sums.moved = np.inf  # as many boxes as rounding decides
            if a.is_floating_point() and key != INPUT:  # one rounding of another kernel, whatever the input
                rounding[part] = torch.finfo(a.dtype).eps / 2
        for part, sums in found.items():
            row = self._sums[key].setdefault(part, PartSums())
            measured = np.inf if sums.moved == np.inf else sums.relative_l2 or 0.0
            row.noise = max(row.noise or 0.0, measured, rounding.get(part, 0.0))

    def rows(self, a: Side, b: Side) -> Iterator[PairedCall]:
        """The rows in order of execution of A, with the changes of the parameters of both sides."""
        modules = dict(a.net.model.named_modules()), dict(b.net.model.named_modules())
        for key, parts in self._sums.items():
            pair = self._pairs.get(key)
            if pair is None:
                kinds = ("" if key == INPUT else type(side.net.model).__name__ for side in (a, b))
                pair = Pair(Call(key, next(kinds), 0, None), Call(key, next(kinds), 0, None), "name")
            for part, sums in parts.items():
                cka = self._cka.get((key, part))
                yield PairedCall(
                    pair.a,
                    pair.b,
                    part,
                    pair.how,
                    sums.shape_a,
                    sums.shape_b,
                    None if sums.shapes_differ else sums.difference.difference(),
                    sums.noise,
                    sums.alone_relative,
                    None if cka is None else cka.value,
                    sums.only_dead_in(sums.dead_a, sums.dead_b),
                    sums.only_dead_in(sums.dead_b, sums.dead_a),
                    _change(pair, modules, "named_parameters"),
                    _change(pair, modules, "named_buffers"),
                )


def parts_of(
    a: Any, b: Any, positions: Sequence[int], listed: bool
) -> Iterator[tuple[str, Tensor, Tensor, Sequence[int]]]:
    """The tensors of both outputs that belong together, and the images that they are of.

    ``listed`` outputs are lists with an item for each image, such as those of a detector. Parts belong together by
    name, or by position if no name is on both sides.
    """
    if listed and isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == len(positions):
        for one, two, position in zip(a, b, positions, strict=True):
            yield from parts_of(one, two, (position,), False)
        return
    of_a, of_b = tensors_in(a), tensors_in(b)
    common = [name for name in of_a if name in of_b]
    if common:
        yield from ((name, of_a[name], of_b[name], positions) for name in common)
        return
    for (name, one), two in zip(of_a.items(), of_b.values(), strict=False):
        yield name, one, two, positions


def _change(pair: Pair, modules: tuple[Mapping[str, Any], Mapping[str, Any]], what: str) -> float | None:
    """How far the parameters or buffers are apart that both layers hold themselves, with the same names and shapes."""
    names = ("" if call.name == MODEL else call.name for call in (pair.a, pair.b))
    layers = [side.get(name) for side, name in zip(modules, names, strict=True)]
    if layers[0] is None or layers[1] is None or pair.how == "folded":
        return None
    a, b = (dict(getattr(layer, what)(recurse=False)) for layer in layers)
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return None
    sums = DifferenceSums()
    for name in a:
        sums.add(a[name], b[name], (0,))
    return sums.relative_l2 if sums.values else None
