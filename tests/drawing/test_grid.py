"""The fast grid against a slow one, and where everything lies in it."""

import math
from itertools import product

import numpy as np
import pytest
import torch

import hookscope
from hookscope.drawing import colours, grid as grids
from hookscope.drawing.grid import MOST_PIXELS, draw_grids, lay_out, strongest
from hookscope.drawing.scale import Scale
from hookscope.drawing.text import number_pixels
from hookscope.drawing.tiles import ChannelChoice, reduce_maps


def slow_grid(values: torch.Tensor, columns: int, zoom: int) -> np.ndarray:
    """The RGB picture of a plain grid, map by map."""
    rows, (_, height, width) = math.ceil(len(values) / columns), values.shape
    page = np.full((rows * (height * zoom + 2) - 2, columns * (width * zoom + 2) - 2, 3), 255, np.uint8)
    for at, channel in enumerate(values.double().numpy()):
        levels = np.rint((channel - channel.min()) / np.ptp(channel) * (colours.LEVELS - 1)).astype(int)
        picture = np.kron(colours.palette("viridis")[levels], np.ones((zoom, zoom, 1), np.uint8))
        y, x = at // columns * (height * zoom + 2), at % columns * (width * zoom + 2)
        page[y : y + height * zoom, x : x + width * zoom] = picture
    return page


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (6, 3), (7, 3), (5, 5), (5, 9), (4, 1)])
@pytest.mark.parametrize(("size", "cell"), [((4, 6), 1), ((4, 6), 8), ((3, 2), 5)])
def test_the_fast_grid_is_the_slow_one(count: int, columns: int, size: tuple[int, int], cell: int) -> None:
    values = torch.manual_seed(1) and torch.randn(count, *size, dtype=torch.float64)
    picture = hookscope.draw_sheet(values, columns=columns, cell=cell, plain=True)
    expected = slow_grid(values, min(columns, count), math.ceil(cell / min(size)))
    assert picture.mode == "P"
    assert np.array_equal(np.asarray(picture.convert("RGB")), expected)


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (3, 40), (40, 3), (1, 5000), (5000, 1), (112, 112), (2, 2)])
def test_nothing_overlaps(size: tuple[int, int]) -> None:
    label = 33
    for case in product([1, 2, 7, 64, 1200], [None, 5], [None, 1, 30]):
        count, columns, cell = case
        layout = lay_out(count, *size, columns, cell, label_width=label)
        least = min(layout.map_height, layout.map_width)
        assert (layout.map_height, layout.map_width) == (size[0] * layout.zoom, size[1] * layout.zoom), case
        assert layout.step_x >= max(layout.map_width, label) + 2, case
        assert layout.step_y >= layout.label + layout.map_height + layout.bar + 2, case
        assert (layout.rows - 1) * layout.columns < count <= layout.rows * layout.columns, case
        assert layout.width == (layout.columns - 1) * layout.step_x + layout.cell_width, case
        assert cell is None or least >= cell or size[0] * size[1] * cell**2 > MOST_PIXELS, case
        assert cell is None or least < cell + min(size), case
        assert columns is None or layout.columns == min(columns, count), case


@pytest.mark.parametrize(("count", "size"), [(64, 112), (512, 7), (64, 28), (1152, 1), (24, 14)])
def test_a_grid_is_about_three_to_two(count: int, size: int) -> None:
    layout = lay_out(count, size, size, label_width=30)
    assert 0.75 < layout.width / layout.height < 2


@pytest.mark.parametrize("size", [(7, 7), (112, 112), (65, 98), (98, 65)])
def test_no_map_is_alone_in_the_last_row_and_squares_are_full(size: tuple[int, int]) -> None:
    for count in range(2, 70):
        layout = lay_out(count, *size, label_width=14)
        empty = layout.columns * layout.rows - count
        assert layout.rows == 1 or layout.columns == 1 or empty < layout.columns - 1, count
        if size[0] == size[1] and count in (4, 9, 16, 64):
            assert layout.columns == layout.rows == math.isqrt(count), count


def test_the_magnification_is_a_whole_number_that_fills_a_screen_and_one_map_alone_keeps_to_the_limit() -> None:
    assert lay_out(64, 112, 112).zoom == 1
    assert lay_out(512, 7, 7).map_width == 56
    assert lay_out(1, 7, 7).map_width == 224
    assert lay_out(8, 1, 5000).zoom == 1
    assert lay_out(3, 1, 1).map_width == 28
    layout = lay_out(1, 1, 5000, cell=4096)
    assert layout.map_height * layout.map_width <= MOST_PIXELS


def drawn(values: torch.Tensor, **more: object) -> grids.Grid:
    scale = Scale.parse(str(more.pop("scale", "channel")))
    return draw_grids([reduce_maps(values, scale=scale)], **more)[0]  # type: ignore[arg-type]


def label_of(grid: grids.Grid, at: int) -> np.ndarray:
    layout = grid.layout
    y, x = at // layout.columns * layout.step_y, at % layout.columns * layout.step_x
    return grid.pixels[y : y + layout.label, x : x + layout.step_x]


def has(label: np.ndarray, text: str, bold: bool = False) -> bool:
    """Whether ``label`` shows ``text`` whole and nothing else."""
    letters = number_pixels(text, bold)
    rest = label[:, letters.shape[1] :]
    return np.array_equal(label[:, : letters.shape[1]], letters) and bool((rest == colours.BACKGROUND).all())


@pytest.mark.parametrize(("size", "cell"), [(1, None), (7, 7), (7, 1), (1, 1), (7, None)])
def test_four_digits_are_readable_however_small_the_maps(size: int, cell: int | None) -> None:
    values = torch.manual_seed(0) and torch.randn(1025, size, size)
    grid = drawn(values, cell=cell)
    bold = set(strongest(grid.tiles))
    for at in (0, 9, 10, 999, 1000, 1024, *bold):
        assert has(label_of(grid, at), str(at), at in bold), at


def test_labels_mark_constant_maps_nan_and_inf() -> None:
    values = torch.manual_seed(0) and torch.randn(12, 14, 14)
    values[1], values[2], values[3], values[4, 0, 0], values[5] = 0, 7, -1.2345e-5, math.nan, math.inf
    grid = drawn(values)
    bold = set(strongest(grid.tiles))
    for at, text in enumerate(["0", "1 =0", "2 =7", "3 =-1.23e-05", "4 !", "5 !", "6"]):
        assert has(label_of(grid, at), text, at in bold), text
    shared = drawn(values, scale="layer")
    assert has(label_of(shared, 2), "2 const")


def test_a_value_that_does_not_fit_is_left_out_whole() -> None:
    values = torch.full((300, 7, 7), -1.2345e-5)
    grid = drawn(values, cell=7)
    assert has(label_of(grid, 299), "299")
    assert (grid.tiles.levels == colours.CONSTANT).all()


def test_bars_are_as_long_as_the_ranges() -> None:
    values = torch.zeros(4, 8, 8)
    values[0, 0, 0], values[1, 0, 0], values[2, 0, 0] = 10, 5, 0.01
    grid = drawn(values, columns=4)
    layout = grid.layout
    row = grid.pixels[layout.label + layout.map_height + 1]
    lengths = [int((row[at * layout.step_x :][: layout.step_x] == colours.BAR).sum()) for at in range(4)]
    assert lengths == [layout.map_width, layout.map_width // 2, 1, 0]


def test_the_strongest_are_those_with_the_widest_ranges() -> None:
    values = torch.arange(40.0)[:, None, None] * torch.tensor([[0.0, 1.0]])
    assert strongest(reduce_maps(values)) == [39, 38, 37, 36, 35, 34, 33, 32]
    assert strongest(reduce_maps(values[:12])) == [11, 10, 9]  # a quarter: the others are no background to all
    assert strongest(reduce_maps(torch.ones(30, 2, 2))) == []
    assert strongest(reduce_maps(values, ChannelChoice(top=30))) == []  # their order is the emphasis


def test_a_gap_separates_the_frames_of_a_clip() -> None:
    values = torch.manual_seed(0) and torch.randn(3, 4, 15)
    grid = drawn(values, frames=3, cell=8)
    layout = grid.layout
    assert layout.map_width == 3 * 10 + 2 * 2
    row = grid.pixels[layout.label, : layout.map_width]
    assert np.flatnonzero(row == colours.BACKGROUND).tolist() == [10, 11, 22, 23]
    assert np.delete(row, [10, 11, 22, 23])[::2].tolist() == grid.tiles.levels[0, 0].tolist()


def test_channels_beyond_the_limit_of_pixels_are_left_out() -> None:
    values = torch.manual_seed(0) and torch.randn(100, 10, 10)
    grid = drawn(values, cell=10, most=5000, columns=3)
    assert 0 < grid.left_out < 100
    assert grid.pixels.size <= 5000 + 3 * grid.layout.step_x * grid.layout.step_y
    assert drawn(values, cell=10).left_out == 0
    assert drawn(values[:1], cell=100, most=5000).left_out == 0


def test_grids_to_compare_have_one_layout_and_one_measure_of_bars() -> None:
    values = torch.zeros(12, 8, 8)
    values[:, 0, 0] = torch.arange(12.0)
    broken = values / 2
    broken[3, 0, 0] = math.nan  # its mark takes room
    whole, nan = draw_grids([reduce_maps(values), reduce_maps(broken)], cell=8, bold=[5])
    assert whole.layout == nan.layout
    assert whole.pixels.shape == nan.pixels.shape
    assert has(label_of(nan, 3), "3 !")
    assert has(label_of(whole, 5), "5", bold=True)
    assert has(label_of(whole, 11), "11")

    def bar(grid: grids.Grid) -> int:
        row, column = divmod(11, grid.layout.columns)
        y = row * grid.layout.step_y + grid.layout.label + grid.layout.map_height + 1
        return int((grid.pixels[y, column * grid.layout.step_x :][: grid.layout.map_width] == colours.BAR).sum())

    assert (bar(whole), bar(nan)) == (8, 4)


def test_names_stand_beside_the_numbers_and_are_cut_off_at_the_cell() -> None:
    values = torch.manual_seed(0) and torch.randn(3, 7, 7)
    [grid] = draw_grids([reduce_maps(values)], cell=7, names=["cat", "dog", "a very long name of a class, indeed"])
    cat, dog, long = (label_of(grid, at) for at in range(3))
    assert (cat != dog).any() and grid.layout.cell_width < 150
    assert (long[:, grid.layout.cell_width :] == colours.BACKGROUND).all()
    [bare] = draw_grids([reduce_maps(values)], cell=7)
    assert (cat != colours.BACKGROUND).sum() > (label_of(bare, 0) != colours.BACKGROUND).sum()
