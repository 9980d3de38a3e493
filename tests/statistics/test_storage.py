"""Saved statistics: equal when loaded, refused in one line when damaged or foreign."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookscope.errors import InputError
from hookscope.statistics.collector import StatisticsCollector
from hookscope.statistics.storage import (
    FORMAT,
    Progress,
    SavedStatistics,
    Source,
    _digest,
    check_same_source,
    fingerprint_of,
    load_statistics,
    merge_statistics,
    save_statistics,
)
from hookscope.statistics.totals import RunningStatistics

SOURCE = Source("tiny", "random (seed 0)", "ab12", "resize 8", "every convolution", rank=True)


class Tiny(nn.Module):
    """Its BatchNorm has a name that a careless file format would take for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.array, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.array(self.conv(x)))


def measured(first: int, last: int) -> RunningStatistics:
    """What is counted of these of nine images, by a net whose weights never change."""
    images = torch.randn(9, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    images[4, 1, 2, 2] = torch.nan
    net = Tiny().eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(parameter.shape)))
    with StatisticsCollector(net, rank=True) as collector, torch.no_grad():
        for at in range(first, last):
            collector.name_images([f"{at}.jpg"])
            net(images[at : at + 1])
    return collector.totals


def saved(path: Path, first: int = 0, last: int = 9, **source: Any) -> Path:
    progress = Progress.after([f"{at}.jpg" for at in range(9)], last)
    save_statistics(path, SavedStatistics(replace(SOURCE, **source), measured(first, last), progress))
    return path


def same(one: RunningStatistics, other: RunningStatistics, rel: float = 1e-12, places: bool = True) -> None:
    assert one.images == other.images
    for a, b in zip(one.statistics(), other.statistics(), strict=True):
        for field in ("call", "items", "shape", "min", "max", "zeros", "nan", "inf", "quantiles", "dead_channels"):
            assert getattr(a, field) == getattr(b, field), field
        assert (a.duplicate_channels, a.saturated) == (b.duplicate_channels, b.saturated)
        if places:
            assert (a.low_at, a.high_at, a.nonfinite_at) == (b.low_at, b.high_at, b.nonfinite_at)
        assert (a.mean, a.std, a.rms) == pytest.approx((b.mean, b.std, b.rms), rel=rel)
        assert a.rank == pytest.approx(b.rank, rel=1e-5)
    for c, d in zip(one.drifts(), other.drifts(), strict=True):
        assert (c.layer, c.items, c.updated) == (d.layer, d.items, d.updated)
        np.testing.assert_allclose(c.shift, d.shift, rtol=1e-9)
        np.testing.assert_allclose(c.ratio, d.ratio, rtol=1e-9)


def test_it_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    found = load_statistics(saved(tmp_path / "a.json"))
    assert found.source == SOURCE and found.progress == Progress.after([f"{at}.jpg" for at in range(9)], 9)
    same(found.totals, measured(0, 9), rel=0)
    save_statistics(tmp_path / "b.json", found)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize("cuts", [(4,), (1,), (8,), (3, 6)])
def test_shards_merged_in_any_order_are_the_whole(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    edges = [0, *cuts, 9]
    paths = [saved(tmp_path / f"{a}.json", a, b) for a, b in pairwise(edges)]
    for ordered in (paths, paths[::-1]):
        joined = merge_statistics(ordered)
        same(joined.totals, measured(0, 9), places=ordered is paths)  # a tanh reaches its bounds more than once
        assert joined.progress is None and joined.source == SOURCE
    alone = merge_statistics(paths[:1])
    assert alone.progress == Progress.after([f"{at}.jpg" for at in range(9)], edges[1])


def test_one_that_has_counted_nothing_adds_nothing(tmp_path: Path) -> None:
    save_statistics(tmp_path / "empty.json", SavedStatistics(SOURCE, RunningStatistics()))
    same(merge_statistics([tmp_path / "empty.json", saved(tmp_path / "a.json")]).totals, measured(0, 9))


def test_a_run_taken_up_again_ends_as_one_that_was_not_cut_short(tmp_path: Path) -> None:
    totals = load_statistics(saved(tmp_path / "a.json", 0, 5)).totals
    totals.merge(measured(5, 9))
    same(totals, measured(0, 9))


def test_progress_knows_its_images_by_their_names() -> None:
    paths = ["a.jpg", "b\n.jpg", "caf\udce9.jpg", "d.jpg"]
    assert Progress.after(paths, 3, lost=1) == Progress.after([*paths[:3], "other.jpg"], 3, lost=1)
    assert Progress.after(paths, 3) != Progress.after(paths[::-1], 3)
    assert Progress.after(["a", "b"], 2).names != Progress.after(["ab", ""], 2).names
    assert Progress.after(paths, 0) == Progress.after([], 0)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refusal(*paths: Path) -> str:
    with pytest.raises(InputError) as caught:
        merge_statistics(paths)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize("place", [0.0, 0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
@pytest.mark.parametrize("bit", [1, 0x80])
def test_a_flipped_bit_anywhere_is_seen(tmp_path: Path, place: float, bit: int) -> None:
    path = saved(tmp_path / "a.json", 0, 2)
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 2))] ^= bit
    path.write_bytes(data)
    assert "damaged" in (text := refusal(path)) or "holds no saved statistics" in text or "has format" in text


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_file_cut_short(tmp_path: Path, share: float) -> None:
    path = saved(tmp_path / "a.json", 0, 1)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert "a.json' holds no saved statistics, or is damaged; give what `stats --save` wrote" in refusal(path)


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", '"text"', "{}", '{"hookscope": "1"}', '{"content": 1}', "[" * 99_999]
)
def test_other_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert "other.json' holds no saved statistics" in refusal(path)


def test_other_files(tmp_path: Path) -> None:
    for data in (b"\x89PNG\r\n\x1a\n", b"\xff\xfe\x00", bytes(range(256))):
        (tmp_path / "x.json").write_bytes(data)
        assert "holds no saved statistics" in refusal(tmp_path / "x.json")
    assert "missing.json': No such file" in refusal(tmp_path / "missing.json")
    assert "Is a directory" in refusal(tmp_path)
    with pytest.raises(InputError, match="no saved statistics to merge"):
        merge_statistics([])


def test_another_format(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.json", 0, 1)
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"format": FORMAT + 1, "hookscope": "9.9"}))
    text = refusal(path)
    assert "was saved by hookscope 9.9" in text and f"format {FORMAT + 1}, this version reads {FORMAT}" in text


NOT_OURS = [
    {},
    [],
    float("nan"),
    {"progress": None, "source": {}, "tally": {}},
    {"progress": None, "source": [], "tally": 3},
    {"progress": None, "source": SOURCE.__dict__ if hasattr(SOURCE, "__dict__") else {}, "tally": {"images": 1}},
]


@pytest.mark.parametrize("content", NOT_OURS)
def test_content_with_the_right_digest_that_is_none_of_ours(tmp_path: Path, content: Any) -> None:
    digest = "" if isinstance(content, float) else _digest(content)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"hookscope": "1", "format": FORMAT, "sha256": digest, "content": content}))
    assert "a.json' is damaged" in refusal(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("images", {"float": "inf"}),
        ("layers", 3),
        ("layers", [{}]),
        ("batch_norms", {"a": 1}),
        ("images", {"array": "object", "shape": [1], "data": ""}),
        ("images", {"array": "int64", "shape": [5], "data": "eJwDAAAAAAE="}),
        ("images", {"array": "int64", "shape": [1], "data": "no"}),
    ],
)
def test_parts_that_cannot_be(tmp_path: Path, key: str, value: Any) -> None:
    path = saved(tmp_path / "a.json", 0, 1)
    whole = json.loads(path.read_text())
    whole["content"]["tally"][key] = value
    path.write_text(json.dumps(whole | {"sha256": _digest(whole["content"])}))
    assert "a.json' is damaged" in refusal(path)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "other", "model tiny and other"),
        ("weights", "DEFAULT", "weights random (seed 0) and DEFAULT"),
        ("fingerprint", "ff00", "were measured on different weights of tiny"),
        ("preprocess", "resize 9", "preprocess resize 8 and resize 9"),
        ("layers", "conv1", "layers every convolution and conv1"),
        ("rank", False, "rank True and False"),
    ],
)
def test_other_sources_are_refused_by_what_differs(tmp_path: Path, field: str, value: Any, said: str) -> None:
    paths = saved(tmp_path / "a.json", 0, 1), saved(tmp_path / "b.json", 1, 2, **{field: value})
    text = refusal(*paths)
    assert said in text and "a.json" in text and "b.json" in text
    with pytest.raises(InputError, match="this run"):
        check_same_source(SOURCE, replace(SOURCE, **{field: value}), "a.json", "this run")
    check_same_source(SOURCE, replace(SOURCE), "a.json", "this run")


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_a_fingerprint_knows_every_parameter_and_buffer() -> None:
    torch.manual_seed(0)
    net = Tiny()
    before = fingerprint_of(net)
    assert before == fingerprint_of(net)
    net.array.running_var[1] += 1e-6
    assert (after := fingerprint_of(net)) != before
    net.conv.bias.data[0] = -net.conv.bias.data[0]
    assert fingerprint_of(net) != after


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_fingerprint_of_any_kind_of_number(dtype: torch.dtype) -> None:
    net = nn.Module()
    net.register_buffer("held", torch.ones(2, 3).to(dtype).T)
    net.register_buffer("nothing", torch.zeros(0).to(dtype))
    net.register_buffer("scalar", torch.tensor(3).to(dtype))
    assert fingerprint_of(net) != fingerprint_of(nn.Module())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch says it once, to whoever comes first
def test_a_fingerprint_sees_into_packed_weights() -> None:
    linear = torch.ao.nn.quantized.Linear(3, 2)
    before = fingerprint_of(linear)
    linear.set_weight_bias(torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 0, torch.qint8), None)
    assert fingerprint_of(linear) != before


def test_the_same_images_are_not_counted_twice(tmp_path: Path) -> None:
    saved = SavedStatistics(SOURCE, RunningStatistics(), Progress.after(["a.jpg"], 1))
    for name in ("a.json", "copy.json"):
        save_statistics(tmp_path / name, saved)
    with pytest.raises(InputError, match="hold the same images"):
        merge_statistics([tmp_path / "a.json", tmp_path / "copy.json"])
