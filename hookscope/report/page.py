"""The page of an inspection."""

from __future__ import annotations

from hookscope.inspection import Inspection
from hookscope.report.layers import layer_views
from hookscope.report.template import render


def draw_page(inspection: Inspection, *, max_size: int | None = None) -> str:
    """The page of an inspection: one file of HTML that asks for nothing else.

    Args:
        inspection: What `inspect` returns.
        max_size: The largest size of the page in bytes; the strongest channels of each layer are kept.
    """
    return render(
        "page.html",
        ("page.css", "layer.css"),
        ("page.js", "layer.js"),
        inspection=inspection,
        layers=layer_views(inspection, max_size=max_size),
    )
