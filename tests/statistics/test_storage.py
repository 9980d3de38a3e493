"""Saved statistics: equal when loaded, refused in one line when damaged or foreign."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookscope.errors import InputError
from hookscope.jobs import Progress, fingerprint_of
from hookscope.jobs.state_file import _digest
from hookscope.statistics import (
    RunningStatistics,
    SavedStatistics,
    Source,
    StatisticsCollector,
    load_statistics,
    merge_statistics,
    save_statistics,
)
from hookscope.statistics.storage import check_same_source
from tests.statistics import judge
from tests.statistics.judge import check_same

NAMES = judge.names(9)
SOURCE = Source("tiny", "random (seed 0)", "ab12", "resize 8", "every convolution", rank=True)


class Tiny(nn.Module):
    """Its BatchNorm has a name that a careless file format would take for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.array, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.array(self.conv(x)))


@cache
def measured(first: int, last: int) -> RunningStatistics:
    """The statistics of these of nine images, by a net whose weights never change."""
    images = judge.random(9, 3, 8, 8, seed=1)
    images[4, 1, 2, 2] = torch.nan
    net = Tiny().eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(parameter.shape)))
    with StatisticsCollector(net, rank=True) as collector, torch.no_grad():
        for at in range(first, last):
            collector.name_images([NAMES[at]])
            net(images[at : at + 1])
    return collector.totals


def saved(path: Path, first: int = 0, last: int = 9, **source: Any) -> Path:
    totals = RunningStatistics.from_state(measured(first, last).state_dict())
    totals.pictures.extend(range(first, last))
    progress = Progress.after(NAMES[first:], last - first)
    save_statistics(path, SavedStatistics(replace(SOURCE, **source), totals, progress))
    return path


def test_a_loaded_file_saves_the_same_bytes(tmp_path: Path) -> None:
    loaded = load_statistics(saved(tmp_path / "a.json"))
    assert loaded.source == SOURCE and loaded.progress == Progress.after(NAMES, 9)
    check_same(loaded.totals, measured(0, 9), rel=0)
    save_statistics(tmp_path / "b.json", loaded)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize("cuts", [(0, 4, 9), (0, 1, 9), (0, 3, 6, 9), (0, 0, 9)])
def test_merged_shards_equal_the_whole(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    paths = [saved(tmp_path / f"{number}.json", *shard) for number, shard in enumerate(pairwise(cuts))]
    for ordered in (paths, paths[::-1]):
        joined = merge_statistics(ordered)
        check_same(joined.totals, measured(0, 9), places=ordered is paths)  # a tanh reaches its bounds more than once
        assert joined.progress is None and joined.source == SOURCE
    assert merge_statistics(paths[:1]).progress == Progress.after(NAMES[: cuts[1]], cuts[1])


def test_an_empty_file_without_progress_adds_nothing(tmp_path: Path) -> None:
    save_statistics(tmp_path / "empty.json", SavedStatistics(SOURCE, RunningStatistics()))
    check_same(merge_statistics([tmp_path / "empty.json", saved(tmp_path / "a.json")]).totals, measured(0, 9))


def refusal(*paths: Path) -> str:
    with pytest.raises(InputError) as caught:
        merge_statistics(paths)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize("place", [0.0, 0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_flipped_bit_is_refused(tmp_path: Path, place: float) -> None:
    path = saved(tmp_path / "a.json", 0, 2)
    data = path.read_bytes()
    at = int(place * (len(data) - 2))
    for bit in (1, 0x80):
        path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        assert "damaged" in (text := refusal(path)) or "holds no saved statistics" in text or "has format" in text


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    path = saved(tmp_path / "a.json", 0, 1)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert "a.json' holds no saved statistics, or is damaged; give what `stats --save` wrote" in refusal(path)


OTHERS = [b"[]", b"null", b"3", b'"text"', b"{}", b'{"hookscope": "1"}', b'{"content": 1}', b"[" * 99_999]
OTHERS += [b"\x89PNG\r\n\x1a\n", b"\xff\xfe\x00", bytes(range(256))]


@pytest.mark.parametrize("data", OTHERS, ids=range(len(OTHERS)))
def test_other_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(data)
    assert "other.json' holds no saved statistics" in refusal(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "missing.json': No such file" in refusal(tmp_path / "missing.json")
    assert "Is a directory" in refusal(tmp_path)
    with pytest.raises(InputError, match="no saved statistics to merge"):
        merge_statistics([])


def test_another_format(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.json", 0, 1)
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"format": 2, "hookscope": "9.9"}))
    text = refusal(path)
    assert "was saved by hookscope 9.9" in text and "format 2, this version reads 1" in text


CONTENTS = [
    {},
    [],
    float("nan"),
    {"progress": None, "source": {}, "tally": {}},
    {"progress": None, "source": [], "tally": 3},
    {"progress": None, "source": asdict(SOURCE), "tally": {"images": 1}},
]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_other_content_with_the_right_digest(tmp_path: Path, content: Any) -> None:
    digest = "" if isinstance(content, float) else _digest(content)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"hookscope": "1", "format": 1, "sha256": digest, "content": content}))
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
def test_damaged_parts_with_the_right_digest(tmp_path: Path, key: str, value: Any) -> None:
    path = saved(tmp_path / "a.json", 0, 1)
    whole = json.loads(path.read_text())
    whole["content"]["tally"][key] = value
    path.write_text(json.dumps(whole | {"sha256": _digest(whole["content"])}))
    assert "a.json' is damaged" in refusal(path)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("model", "other", "model tiny and other"),
        ("weights", "DEFAULT", "weights random (seed 0) and DEFAULT"),
        ("fingerprint", "ff00", "were measured on different weights of tiny"),
        ("preprocess", "resize 9", "preprocess resize 8 and resize 9"),
        ("layers", "conv1", "layers every convolution and conv1"),
        ("rank", False, "rank True and False"),
    ],
)
def test_other_sources_are_refused(tmp_path: Path, field: str, value: Any, text: str) -> None:
    paths = saved(tmp_path / "a.json", 0, 1), saved(tmp_path / "b.json", 1, 2, **{field: value})
    error = refusal(*paths)
    assert text in error and "a.json" in error and "b.json" in error
    with pytest.raises(InputError, match="this run"):
        check_same_source(SOURCE, replace(SOURCE, **{field: value}), "a.json", "this run")
    check_same_source(SOURCE, replace(SOURCE), "a.json", "this run")


def test_a_fingerprint_covers_every_parameter_and_buffer() -> None:
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


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch warns once in a process
def test_a_fingerprint_covers_packed_weights() -> None:
    linear = torch.ao.nn.quantized.Linear(3, 2)
    before = fingerprint_of(linear)
    linear.set_weight_bias(torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 0, torch.qint8), None)
    assert fingerprint_of(linear) != before


def test_overlapping_files_are_refused_and_named(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.json", 0, 4), saved(tmp_path / "b.json", 4, 9)
    overlapping = saved(tmp_path / "c.json", 3, 6)
    both = tmp_path / "both.json"
    save_statistics(both, merge_statistics([a, b]))
    (tmp_path / "copy.json").write_bytes(a.read_bytes())
    assert merge_statistics([both]).totals.pictures.tolist() == list(range(9))
    for one, other, text in [
        (both, b, "5 images would count twice, the first is number 1 of"),
        (a, both, "4 images would count twice, the first is number 1 of"),
        (a, tmp_path / "copy.json", "4 images would count twice"),
        (a, overlapping, "1 image would count twice, the first is number 1 of"),
        (overlapping, a, "1 image would count twice, the first is number 4 of"),
        (both, both, "9 images would count twice"),
    ]:
        error = refusal(one, other)
        assert text in error and one.name in error and other.name in error and "leave one of them out" in error
    assert f"'{b}' and" in refusal(a, b, saved(tmp_path / "d.json", 5, 7))


def test_statistics_do_not_merge_with_themselves(tmp_path: Path) -> None:
    totals = load_statistics(saved(tmp_path / "a.json", 0, 2)).totals
    with pytest.raises(InputError, match="they have 2 images in common"):
        totals.merge(load_statistics(tmp_path / "a.json").totals)
    unknown = measured(0, 2)
    with pytest.raises(InputError, match="the same statistics"):
        unknown.merge(unknown)
    assert totals.images == unknown.images == 2


def test_files_of_version_0_1_0_are_read_and_say_what_is_unknown(tmp_path: Path) -> None:
    paths = [saved(tmp_path / "a.json", 0, 4), saved(tmp_path / "b.json", 4, 9)]
    whole = json.loads(paths[0].read_text())
    del whole["content"]["tally"]["pictures"]
    paths[0].write_text(json.dumps(whole | {"sha256": _digest(whole["content"])}))
    notes: list[tuple[str, str]] = []
    joined = merge_statistics(paths, lambda *note: notes.append(note))
    check_same(joined.totals, measured(0, 9), places=False)
    assert notes == [(str(paths[0]), "it does not identify 4 images, which may count twice")]
    (tmp_path / "copy.json").write_bytes(paths[0].read_bytes())
    with pytest.raises(InputError, match="hold the same images; their names are the same"):
        merge_statistics([paths[0], tmp_path / "copy.json"], lambda *note: None)
