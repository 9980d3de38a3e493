"""Tests of the page of an inspection, without a browser."""

from hookscope.report import draw_page
from tests.report.example import HOSTILE, example


def test_names_are_text_on_the_page():
    page = draw_page(example(name=HOSTILE))
    assert "<img src=x" not in page
    assert page.count("</script>") == 1 + page.count('<script type="application/json"')
