"""Crops: the pixels that a unit sees, magnified alike, and files that are gone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hookscope.exemplars import CELL, cut_crops, lost_words
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
