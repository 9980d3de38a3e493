"""The small picture of an inspection: what the network saw, Grad-CAM, and maps of the first places."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from hookscope.drawing import palette
from hookscope.report import draw_overview
from tests.report.example import example


def test_a_row_has_the_image_its_cam_and_the_maps_of_the_first_places() -> None:
    found = example()
    pixels = np.asarray(draw_overview(found))
    assert pixels.shape == (256, 3 * 256 + 2 * 8, 3)
    seen = np.asarray(found.images[0].seen)
    assert (pixels[::4, :256:4] == seen).all() and (pixels[:, 256:264] == 128).all()
    # the Grad-CAM is 1 on a diagonal: bright there, the darkened image elsewhere
    cam = pixels[:, 264:520].astype(int).sum(-1)
    assert cam[32, 32] > cam[32, 224] + 100 and cam[224, 224] > cam[224, 32] + 100
    first = found.layers[0].images[0].tiles
    assert first.levels.shape[1:] == (16, 16)
    expected = palette("viridis")[first.levels[first.channels.index(3)]]
    assert (pixels[:124, 528:652][3::8, 3::8][:15, :15] == expected[:15, :15]).mean() > 0.9  # 124 / 16 is not whole
    assert (pixels[132:, 528:] == 128).all()  # two places have maps


def test_images_have_rows_and_their_own_places() -> None:
    found = example(images=5)
    pixels = np.asarray(draw_overview(found))
    assert pixels.shape[0] == 3 * 256 + 2 * 8
    own = [pixels[at : at + 256, 660:] for at in (0, 264, 528)]
    assert not (own[0][:124] == 128).all()  # the second place is about the first image
    assert (own[1] == 128).all() and (own[2] == 128).all()


@pytest.mark.parametrize("size", [(64, 16), (16, 64), (1, 1), (700, 300)])
def test_images_of_any_shape_are_whole_and_keep_it(size: tuple[int, int]) -> None:
    found = example()
    image = replace(found.images[0], seen=Image.new("RGB", size, (250, 0, 0)), cam=None, without_cam="no scores")
    pixels = np.asarray(draw_overview(replace(found, images=(image,), places=())))
    red = (pixels == (250, 0, 0)).all(-1)
    assert pixels.shape == (256, 256, 3) and ((pixels == 128).all(-1) | red).all()
    high, wide = red.any(1).sum(), red.any(0).sum()
    assert max(high, wide) == 256 and wide / high == pytest.approx(size[0] / size[1], rel=0.01)
