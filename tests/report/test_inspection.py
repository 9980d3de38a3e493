"""The page of an inspection, and the small picture of it."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from hookscope.drawing import palette
from hookscope.report import draw_overview, draw_page
from tests.report.example import HOSTILE, example


def test_names_are_text_on_the_page():
    page = draw_page(example(name=HOSTILE))
    assert "<img src=x" not in page
    assert page.count("</script>") == 1 + page.count('<script type="application/json"')


def test_what_an_inspection_lacks_is_said():
    found = example()
    image = replace(found.images[0], predictions=(), cam=None, without_cam="The model gives boxes.")
    page = draw_page(replace(found, images=(image,), places=(), findings=(), layers=(), calls=(), provenance={}))
    for words in (
        "No place stands out.",
        "The model gives no scores of classes.",
        "No Grad-CAM: The model gives boxes.",
    ):
        assert words in page


def test_scores_of_nan_have_no_classes():
    found = example()
    unknown = replace(found.images[0].predictions[0], probability=float("nan"))
    page = draw_page(replace(found, images=(replace(found.images[0], predictions=(unknown,)),)))
    assert "The scores are NaN." in page and "nan %" not in page


def test_places_are_counted_by_severity():
    words = "1 error, 1 warning, 1 note. The first is the most important."
    assert words in draw_page(example())


def test_an_image_without_a_name_is_told_by_its_position():
    found = example()
    page = draw_page(replace(found, images=(replace(found.images[0], name=""),)))
    assert "shapes on image 1" in page
    assert 'alt="image 1, as the network saw it"' in page


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
