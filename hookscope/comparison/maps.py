"""The maps of both sides for chosen pairs of calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from hookscope.comparison.facts import ComparedMaps, Comparison, how_different
from hookscope.comparison.inputs import PairedBatch
from hookscope.errors import NoMapError
from hookscope.hooks import Call, maps_or_vectors

_CHANNELS = 16  # of a pair, whose maps are kept


def compared_maps(
    key: str, modules: tuple[Any, Any], outputs: tuple[Any, Any], batch: PairedBatch
) -> Iterator[ComparedMaps]:
    """The maps of the first image of a batch, of the channels that changed most."""
    layers = (module if isinstance(module, nn.Module) else None for module in modules)
    try:
        sides = [maps_or_vectors(output, layer, batch.size) for output, layer in zip(outputs, layers, strict=True)]
    except NoMapError:
        return
    for a, b in zip(*sides, strict=False):
        if a.item or a.values.shape != b.values.shape:
            continue
        one, two = a.values.cpu(), b.values.cpu()
        moved = (two.double() - one.double()).nan_to_num(nan=np.inf).flatten(1)
        changes = torch.linalg.vector_norm(moved, dim=1)
        channels = changes.argsort(dim=0, descending=True, stable=True)[:_CHANNELS]
        label = f"{key} {a.part}" if a.part else key
        one, two = (side[channels].float() for side in (one, two))
        drawn = np.asarray(one), np.asarray(two), np.asarray(changes[channels])
        yield ComparedMaps(label, batch.positions[0], tuple(channels.tolist()), drawn[0], drawn[1], drawn[2])


def calls_to_draw(found: Comparison) -> list[Call]:
    """The first call that differs and the one that adds most.

    Where only the input adds a difference, it is the call that differs most.
    """
    differing = [pair for pair in found.calls[1:-1] if pair.differs]
    chosen = [pair.a for pair in differing if pair.key in (found.answer.first, found.answer.most)]
    return chosen or [pair.a for pair in sorted(differing, key=how_different, reverse=True)[:1]]
