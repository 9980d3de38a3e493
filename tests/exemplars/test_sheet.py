"""Crops and the sheet of a layer: pixels that a unit sees, rows, cells, pages, and files that are gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hookscope.exemplars import CELL, cut_crops, draw_exemplars, field_words, fitted, lost_words, times_best
from hookscope.geometry import ReceptiveField
from tests.exemplars.example import WIDE, layer_in, picture, shapes


def test_a_crop_has_the_pixels_of_the_box(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    crops = cut_crops(shapes(), [layer])
    first, _, corner = layer.channels[0].most
    assert first.box == (29, 13, 44, 28) and corner.box == (0, 0, 12, 12)  # start -3 + place * 8, 15 pixels
    for exemplar in (first, corner):
        left, top, right, bottom = exemplar.box
        crop = crops[layer.key, exemplar]
        expected = picture(exemplar.position)[top:bottom, left:right].astype(int)
        assert crop.image is not None and np.abs(np.asarray(crop.image).astype(int) - expected).max() <= 1
        assert crop.zoom == CELL // 15 and crop.dot is None  # one scale for the layer, whatever the edge cuts off
        drawn = crop.drawn()
        assert drawn is not None and drawn.size == crop.size == ((right - left) * 6, (bottom - top) * 6)
        assert (np.asarray(drawn)[::6, ::6] == np.asarray(crop.image)).all()


def test_where_a_unit_sees_most_of_the_input_all_of_it_is_shown_with_the_centre(tmp_path: Path) -> None:
    layer = layer_in(tmp_path, WIDE)
    crops = cut_crops(shapes(), [layer])
    first, _, corner = layer.channels[0].most
    factor = CELL / 128
    for exemplar, centre in ((first, (-40 + 64 + 47.5, -40 + 32 + 47.5)), (corner, (7.5, 7.5))):
        crop = crops[layer.key, exemplar]
        assert crop.image is not None and crop.size == (CELL, CELL)
        assert crop.dot == pytest.approx((centre[0] * factor, centre[1] * factor))
        drawn = np.asarray(crop.drawn()).astype(int)
        changed = np.argwhere((drawn != np.asarray(crop.image).astype(int)).any(-1))
        middle = (changed.min(0) + changed.max(0)) / 2
        assert middle == pytest.approx(crop.dot[::-1], abs=1.5)  # type: ignore[index]


@pytest.mark.parametrize(
    "field", [ReceptiveField("whole", (128, 128)), ReceptiveField("whole", (0, 0), reason="attention")]
)
def test_a_unit_that_sees_everything_has_no_centre(tmp_path: Path, field: ReceptiveField) -> None:
    layer = layer_in(tmp_path, field)
    crops = cut_crops(shapes(), [layer])
    assert {(crop.size, crop.dot) for crop in crops.values()} == {((CELL, CELL), None)}


def test_each_file_is_read_once(tmp_path: Path) -> None:
    layers = [layer_in(tmp_path, channels=7), layer_in(tmp_path, WIDE, name="features.9")]
    seen: list[tuple[int, int]] = []
    crops = cut_crops(shapes(), layers, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)] and len(crops) == 6


def test_a_file_that_is_gone_or_changed_is_said(tmp_path: Path) -> None:
    layer = layer_in(tmp_path, images=4)
    (tmp_path / "0.png").unlink()
    (tmp_path / "1.png").write_bytes((tmp_path / "2.png").read_bytes())
    pipe = replace(layer.channels[0].most[3], name="-")
    channel = replace(layer.channels[0], most=(*layer.channels[0].most[:3], pipe), least=())
    layer = replace(layer, channels=(channel,))
    crops = cut_crops(shapes(), [layer])
    assert [crops[layer.key, each].missing for each in channel.most] == [
        "file not found", "the file has changed", "", "cannot be read again",
    ]  # fmt: skip
    words = lost_words(crops)
    assert (
        words.startswith("3 exemplar images cannot be drawn: ") and f"{tmp_path}/1.png (the file has changed)" in words
    )
    assert lost_words({}) == ""


def found_at(page: np.ndarray, part: np.ndarray) -> list[tuple[int, int]]:
    """Row and column of each place where ``part`` stands in ``page``."""
    first = np.argwhere((page == part[0, 0]).all(-1))
    height, width = part.shape[:2]
    return [(y, x) for y, x in first.tolist() if np.array_equal(page[y : y + height, x : x + width], part)]


def test_a_row_has_its_crops_in_order(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    crops = cut_crops(shapes(), [layer])
    [page] = draw_exemplars(layer, shapes(), crops)
    pixels, places = np.asarray(page), []
    for exemplar in layer.channels[0].most:
        drawn = crops[layer.key, exemplar].drawn()
        places.append(found_at(pixels, np.asarray(drawn)))
    rows = [[y for y, _ in found] for found in places]
    assert [len(found) for found in places] == [2, 2, 4]  # the last is the weakest too
    assert places[0][0][1] < places[1][0][1] < places[2][0][1] < places[2][1][1]
    assert rows[0][1] - rows[0][0] == rows[1][1] - rows[1][0] > CELL
    teal = found_at(pixels, np.asarray(fitted(layer.channels[0].synthesized[0].image)))
    assert len(teal) == 1 and teal[0][1] > places[2][1][1]


def test_the_provenance_has_every_exemplar(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    [page] = draw_exemplars(layer, shapes())
    facts = json.loads(page.info["hookscope"])
    assert (facts["model"], facts["weights"], facts["layer"], facts["images"]) == (
        "shapes", "shapes.safetensors", "features.3", 3,
    )  # fmt: skip
    assert facts["field"]["size"] == [15, 15] and facts["measure"] == "max"
    first = facts["channels"][0]
    assert (first["selectivity"], first["classes"]) == (0.25, {"ring": 2, "star": 1})
    exemplar = layer.channels[0].most[0]
    assert first["most"][0] == {
        "value": 9.5, "name": exemplar.name, "sha256": exemplar.sha256, "label": "star", "place": [2, 4],
        "box": [29, 13, 44, 28],
    }  # fmt: skip
    assert first["synthesized"] == [{"value": 19.0, "best": 9.5, "seed": 3}]


def test_many_channels_have_several_pages(tmp_path: Path) -> None:
    pages = draw_exemplars(layer_in(tmp_path, channels=70), shapes())
    numbers = [[row["channel"] for row in json.loads(page.info["hookscope"])["channels"]] for page in pages]
    assert [len(each) for each in numbers] == [32, 32, 6] and numbers[2] == [*range(64, 70)]
    assert len({page.width for page in pages}) == 1


def test_random_weights_are_said_in_red_and_a_missing_file_is_a_marked_cell(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    trained, untrained = (
        np.asarray(draw_exemplars(layer, replace(shapes(), weights=weights))[0])
        for weights in ("shapes.safetensors", "random (seed 0)")
    )
    red = [((page[:80] == (200, 56, 10)).all(-1)).any() for page in (trained, untrained)]
    assert red == [False, True]
    (tmp_path / "0.png").unlink()
    [page] = draw_exemplars(layer, shapes())
    marked = (np.asarray(page) == (200, 56, 10)).all(-1)
    assert marked.sum() > 2 * 4 * (CELL - 2)  # the frames of two cells


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (ReceptiveField("computed", (31, 47), (8, 8)), "47×31 pixels of the input, one unit every 8; computed from"),
        (ReceptiveField("measured", (5, 5), (2, 1), reason="a"), "one unit every 2 down and 1 to the right; measured"),
        (ReceptiveField("whole", (9, 9), reason="attention"), "receptive field: the whole input: attention"),
    ],
)
def test_the_receptive_field_in_words(field: ReceptiveField, words: str) -> None:
    assert words in field_words(field)


def test_a_synthesized_image_is_compared_with_the_best(tmp_path: Path) -> None:
    made = layer_in(tmp_path).channels[0].synthesized[0]
    assert times_best(made) == "2.00 × the best"
    assert times_best(replace(made, best=-0.5)) == "best -0.5"
    assert times_best(replace(made, best=None)) == "no exemplar"
