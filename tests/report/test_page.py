"""Tests of the page of an inspection, without a browser."""

from dataclasses import replace

from hookscope.report import draw_page
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
    words = "1 place must be mended, 1 should be looked at, 1 is worth a look. The first is the most important."
    assert words in draw_page(example())


def test_an_image_without_a_name_is_told_by_its_position():
    found = example()
    page = draw_page(replace(found, images=(replace(found.images[0], name=""),)))
    assert "shapes on image 1" in page
    assert 'alt="image 1, as the network saw it"' in page
