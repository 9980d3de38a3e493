"""Parts of a job: they cover the list without gap, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from hookscope import load_model
from hookscope.errors import InputError
from hookscope.jobs import LocalEngine
from hookscope.models import Batch, LoadedModel


class Positions:
    """A job that gives the positions of each batch."""

    workers = 0

    def __init__(self, batch_size: int, refuse: Sequence[int] = ()) -> None:
        self.batch_size, self.refuse = batch_size, refuse

    @contextmanager
    def open(self, net: LoadedModel) -> Iterator[Callable[[Batch], list[int]]]:
        def measure(batch: Batch) -> list[int]:
            if set(self.refuse).intersection(batch.positions):
                raise ValueError("refused")
            with torch.no_grad():
                net.model(*batch.inputs)
            return list(batch.positions)

        yield measure

    def merge(self, values: Sequence[list[int]]) -> list[int]:
        return [position for value in values for position in value]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    names = [str(tmp_path / f"{number}.png") for number in range(9)]
    for number, name in enumerate(names):
        Image.new("RGB", (64 + 32 * (number == 4), 64), (number, 0, 0)).save(name)
    Path(names[2]).write_bytes(b"no image")
    Path(names[8]).write_bytes(b"no image")
    return names


@pytest.mark.parametrize("first", [0, 3, 9])
@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_parts_cover_the_list_in_order(paths: list[str], batch_size: int, first: int) -> None:
    net = load_model("shapes", preprocess="none")
    parts = list(LocalEngine().run(Positions(batch_size), net, paths, first))
    used = [n for n in range(first, 9) if n not in (2, 8)]
    assert [position for part in parts for position in part.positions] == used
    assert [each.position for part in parts for each in part.lost] == [n for n in (2, 8) if n >= first]
    finished = first
    for part in parts:
        here = sorted([*part.positions, *(each.position for each in part.lost)])
        assert here == list(range(finished, part.done))
        assert part.value == (list(part.positions) or None)
        finished = part.done
    assert not parts or finished == 9


def test_a_batch_that_the_model_refuses_is_lost(paths: list[str]) -> None:
    net = load_model("shapes", preprocess="none")
    parts = list(LocalEngine().run(Positions(2, refuse=[3]), net, paths))
    assert [each.position for part in parts for each in part.lost] == [2, 3, 8]  # image 4 has another size
    net = load_model("shapes")
    with pytest.raises(InputError, match="refused"):  # all images have one size: it would refuse every other one
        list(LocalEngine().run(Positions(2, refuse=[0]), net, paths))
