"""The plot of a plan: its panels, and bars where the numbers are."""

import itertools

import pytest
from torch import nn

from hookscope.drawing import draw_rows, figure_bytes
from hookscope.planning import plan, plan_plot
from tests.drawing.rows import ends, spans, titles
from tests.nets import named

NET = named(conv=nn.Conv2d(3, 8, 3), act=nn.Sigmoid(), pool=nn.AvgPool2d(2))


def test_panels_of_training_and_bars_of_the_numbers() -> None:
    found = plan(NET, 2, (9, 9), train=True, optimizer="adam")
    plot = plan_plot(found)
    assert titles(plot) == ["memory so far (kB)", "kept (kB)", "MACs (thousand)", "bytes moved (kB)"]
    held = sum(getattr(found.memory, kind) for kind in ("parameters", "buffers", "optimizer", "input"))
    kept = [held + size for size in itertools.accumulate(call.saved for call in found.calls)]
    so_far = [high for _, _, high in spans(plot, "memory", "bar", "#009e73")]
    assert so_far == pytest.approx([end / 1000 for end in kept])
    assert list(ends(plot, "kept", "bar").values()) == [call.saved / 1000 for call in found.calls]
    assert sorted(ends(plot, "MACs", "bar").values()) == sorted(call.macs / 1000 for call in found.calls)
    assert figure_bytes(draw_rows(plot, lines=["a line"]), ".png").startswith(b"\x89PNG")


def test_inference_has_no_memory_panels_and_times_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.planning.timing.speed", lambda *where: (2e9, 1e9))
    found = plan(NET, 2, (9, 9), measure=True, repeats=2, warm_up=0)
    plot = plan_plot(found)
    *others, time = titles(plot)
    assert others == ["MACs (thousand)", "bytes moved (kB)"]
    forward = [call.forward.median for call in found.calls if call.forward]
    unit = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[time.split("(")[1].rstrip(")")]
    assert [end * unit for _, _, end in spans(plot, "time", "bar")] == pytest.approx(forward)
