"""What a plot of rows draws, read from the data that every backend draws."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from hookscope.drawing import DrawnPanel, RowPlot, draw_rows
from hookscope.drawing.panels import Span


def page_of(
    labels: Sequence[str],
    panels: Mapping[str, float],
    title: str,
    lines: Sequence[tuple[str, str]] = (),
    marked: Mapping[int, str] | None = None,
) -> Figure:
    """A page with empty panels of these titles and widths."""
    empty = [DrawnPanel(name, width, (), "linear", (0.0, 1.0)) for name, width in panels.items()]
    return draw_rows(RowPlot(labels, empty, marked or {}, lines, ()), title)


def panel_of(plot: RowPlot, title: str = "") -> DrawnPanel:
    """The first panel whose title begins with ``title``."""
    return next(panel for panel in plot.panels if panel.title.startswith(title))


def spans(plot: RowPlot, title: str, kind: str, colour: str = "") -> list[Span]:
    """What the marks of a kind, and of a colour, draw in a panel."""
    marks = panel_of(plot, title).marks
    return [span for mark, drawn in marks if mark.kind == kind and colour in ("", mark.colour) for span in drawn]


def ends(plot: RowPlot, title: str, kind: str, colour: str = "") -> dict[float, float]:
    """The right end of each span, by row."""
    return {at: high for at, _, high in spans(plot, title, kind, colour)}


def titles(plot: RowPlot) -> list[str]:
    return [panel.title for panel in plot.panels]


def texts(plot: RowPlot, title: str) -> dict[float, str]:
    """What is written into the rows of a panel."""
    return {at: words for at, _, words, _ in panel_of(plot, title).texts}
