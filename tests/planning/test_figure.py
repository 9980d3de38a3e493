"""The plot of a plan: its panels, and bars where the numbers are."""

import itertools
from typing import Any

import pytest
from matplotlib.collections import PolyCollection
from torch import nn

from hookscope.drawing import figure_bytes
from hookscope.planning import plan, plot_plan
from tests.nets import named

NET = named(conv=nn.Conv2d(3, 8, 3), act=nn.Sigmoid(), pool=nn.AvgPool2d(2))


def ends_of(axes: Any) -> list[float]:
    """The right ends of the bars, colour after colour."""
    bars = [group for group in axes.collections if isinstance(group, PolyCollection)]
    return [float(path.vertices[:, 0].max()) for group in bars for path in group.get_paths()]


def test_panels_of_training_and_bars_of_the_numbers() -> None:
    found = plan(NET, 2, (9, 9), train=True, optimizer="adam")
    figure = plot_plan(found, lines=["a line"])
    titles = [axes.texts[0].get_text() for axes in figure.axes]
    assert titles == ["memory so far (kB)", "kept (kB)", "MACs (thousand)", "bytes moved (kB)"]
    so_far, kept, macs, _ = figure.axes
    held = sum(getattr(found.memory, kind) for kind in ("parameters", "buffers", "optimizer", "input"))
    ends = [held + size for size in itertools.accumulate(call.saved for call in found.calls)]
    assert ends_of(so_far)[-3:] == pytest.approx([end / 1000 for end in ends])
    assert ends_of(kept) == [call.saved / 1000 for call in found.calls]
    assert sorted(ends_of(macs)) == sorted(call.macs / 1000 for call in found.calls)
    assert figure_bytes(figure, ".png").startswith(b"\x89PNG")


def test_inference_has_no_memory_panels_and_times_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.planning.timing.speed", lambda *where: (2e9, 1e9))
    found = plan(NET, 2, (9, 9), measure=True, repeats=2, warm_up=0)
    *others, times = plot_plan(found).axes
    assert [axes.texts[0].get_text() for axes in others] == ["MACs (thousand)", "bytes moved (kB)"]
    forward = [call.forward.median for call in found.calls if call.forward]
    unit = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[times.texts[0].get_text().split("(")[1].rstrip(")")]
    assert [end * unit for end in ends_of(times)] == pytest.approx(forward)
