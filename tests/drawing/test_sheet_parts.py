"""The photograph beside the maps, and the box around what the middle unit sees."""

from __future__ import annotations

import numpy as np
from PIL import Image

from hookscope.drawing import colours
from hookscope.drawing.sheet_parts import photograph_cells
from hookscope.drawing.text import LABEL_HEIGHT


def test_each_photograph_has_a_cell_of_the_size_of_its_maps() -> None:
    frames = [[Image.new("RGB", (40, 20), "red")], [Image.new("RGB", (20, 20), name) for name in ("black", "blue")]]
    cells, table = photograph_cells([(0, 200), None, (1, 0), (2, 0)], frames, None)
    assert [cell is None for cell in cells] == [False, True, False, True]
    first, _, second, _ = cells
    assert first is not None and second is not None
    assert first.shape == (LABEL_HEIGHT + 100, 200) and second.shape[0] == LABEL_HEIGHT + 144
    shown = [tuple(map(int, table[int(cell[-1, 0]) - colours.PHOTOGRAPH])) for cell in (first, second)]
    assert shown == [(255, 0, 0), (0, 0, 255)]


def test_the_box_lies_on_its_shares_of_the_photograph() -> None:
    grey = [[Image.new("RGB", (200, 200), (128, 128, 128))]]
    (with_box,), _ = photograph_cells([(0, 200)], grey, (0.25, 0.5, 0.75, 1.0))
    (without,), _ = photograph_cells([(0, 200)], grey, None)
    assert with_box is not None and without is not None
    rows, columns = np.nonzero(with_box[LABEL_HEIGHT:] != with_box[-1, 0])
    assert (columns.min(), columns.max(), rows.min(), rows.max()) == (49, 150, 99, 199)
