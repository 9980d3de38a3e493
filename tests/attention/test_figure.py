"""The page of attention: what it says, where its maps lie, what its file holds."""

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hookscope.attention import figure
from hookscope.attention.figure import draw_attention
from hookscope.attention.run import AttentionMap
from hookscope.errors import UsageError
from hookscope.hooks.calls import Call


def attention(heads: int = 2, layer: str = "block.attn", **more: Any) -> AttentionMap:
    values = np.zeros((heads, 2, 2), np.float32)
    values[:, 0, 0] = 0.9
    facts: dict[str, Any] = {"query": "class token", "at": None, "windows": 1, "seen": (64, 64)}
    return AttentionMap(Call(layer, "Attention", 0, 3), values, np.full(heads, 0.1, np.float32), **facts | more)


PHOTOGRAPH = Image.new("RGB", (120, 100), (90, 120, 150))


def drawn(monkeypatch: pytest.MonkeyPatch, maps: list[AttentionMap], **options: Any) -> Any:
    pages: list[Any] = []
    whole = figure.draw_heat_page
    monkeypatch.setattr(figure, "draw_heat_page", lambda *args: (pages.append(args), whole(*args))[1])
    page = draw_attention(maps, PHOTOGRAPH, **options)
    return page, *pages[0][1:3]


def test_a_row_for_each_layer_has_a_map_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = attention(20, "b", windows=9)
    page, heading, rows = drawn(monkeypatch, [attention(), windows])
    assert heading.words[0] == "attention of 2 calls: class token" and heading.scale == "share of the map's highest"
    assert [len(row.panels) for row in rows] == [2, 10, 10]
    assert rows[0].words == ["3  block.attn", "Attention, 2 heads of 2×2, class token, 10 % on no position"]
    assert "in 9 windows" in rows[1].words[1] and rows[2].words == ()
    assert rows[2].panels[9].words == ["head 19", "up to 0.9", "1 positions"]
    assert page.width < 12 * 150
    facts = json.loads(page.info["hookscope"])["attention"]
    assert [(each["layer"], each["windows"], each["high"][0]) for each in facts] == [
        ("block.attn", 1, pytest.approx(0.9)),
        ("b", 9, pytest.approx(0.9)),
    ]


def test_the_query_is_marked_and_the_map_lies_over_what_the_network_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    _, heading, rows = drawn(monkeypatch, [attention(at=(0.25, 0.75), query="position")], cell=200, columns=1)
    heat = rows[0].panels[0].heat
    assert heat.box == (0, 0, 240, 200) and heat.peak == (180, 50) and heat.top == pytest.approx(0.9)
    assert len(rows) == 2 and heading.words[0] == "attention of 1 call: position"
    page = np.asarray(draw_attention([attention()], PHOTOGRAPH, cell=200, cmap="gray"))
    left = (page.shape[1] - 2 * 14 - 12) // 2 + 14
    panel = page[:, 14:left].astype(int).sum(2)
    assert panel.shape[1] == 240


def test_no_map_and_a_colour_map_that_does_not_exist_are_refused_and_nan_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="no map of attention to draw"):
        draw_attention([], PHOTOGRAPH)
    with pytest.raises(UsageError, match="colour map"):
        draw_attention([attention()], PHOTOGRAPH, cmap="nothing")
    broken = attention()
    broken.values[0] = np.nan
    _, _, rows = drawn(monkeypatch, [broken])
    assert [panel.alarm for panel in rows[0].panels] == ["NaN or Inf", ""]


def test_a_clip_is_drawn_as_the_sum_over_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.full((1, 4, 2, 2), 1 / 16, np.float32)
    clip = AttentionMap(Call("a", "A", 0, 0), values, np.zeros(1, np.float32), "mean", None, 1, (64, 64))
    _, _, rows = drawn(monkeypatch, [clip])
    assert "sum of 4 frames" in rows[0].words[1] and rows[0].panels[0].heat.top == 0.25
    assert clip.effective_positions == pytest.approx(16)
