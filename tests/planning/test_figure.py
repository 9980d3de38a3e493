"""The plot of a plan: its panels, and bars where the numbers are."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from hookscope.drawing import figure_bytes
from hookscope.planning import plan, plot_plan
from tests.nets import named

NET = named(conv=nn.Conv2d(3, 8, 3), act=nn.Sigmoid(), pool=nn.AvgPool2d(2))


def test_panels_of_training_and_bars_of_the_numbers() -> None:
    found = plan(NET, 2, (9, 9), train=True, optimizer="adam")
    figure = plot_plan(found, lines=["a line"])
    titles = [axes.texts[0].get_text() for axes in figure.axes]
    assert titles == ["memory so far (kB)", "kept (kB)", "MACs (thousand)", "bytes moved (kB)"]
    so_far, kept, macs, _ = figure.axes
    held = sum(getattr(found.memory, kind) for kind in ("parameters", "buffers", "optimizer", "input"))
    ends = [held + size for size in itertools.accumulate(call.saved for call in found.calls)]
    bars = [bar for bar in so_far.patches if bar.get_height() == 1 and bar.get_x() > 0]
    assert [1000 * (bar.get_x() + bar.get_width()) for bar in bars[-3:]] == pytest.approx(ends)
    assert [bar.get_width() for bar in kept.patches[-3:]] == [call.saved / 1000 for call in found.calls]
    assert [bar.get_width() for bar in macs.patches[-3:]] == [call.macs / 1000 for call in found.calls]
    assert figure_bytes(figure, ".png").startswith(b"\x89PNG")


def test_inference_has_no_memory_panels_and_times_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.planning.timing.speed", lambda *where: (2e9, 1e9))
    found = plan(NET, 2, (9, 9), measure=True, repeats=2, warm_up=0)
    *others, times = plot_plan(found).axes
    assert [axes.texts[0].get_text() for axes in others] == ["MACs (thousand)", "bytes moved (kB)"]
    forward = [call.forward.median for call in found.calls if call.forward]
    unit = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[times.texts[0].get_text().split("(")[1].rstrip(")")]
    assert [bar.get_width() * unit for bar in times.patches[-6:-3]] == pytest.approx(forward)
