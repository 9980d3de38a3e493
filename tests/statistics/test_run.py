"""Runs over many images: measured and lost images, resumed runs, and what a signal or a refusal leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
from array import array
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.errors import HookscopeError, InputError
from hookscope.jobs import Progress, fingerprint_of
from hookscope.jobs.state_file import _digest
from hookscope.models import load_model
from hookscope.statistics import (
    RunningStatistics,
    SavedStatistics,
    StatisticsCollector,
    StatisticsSource,
    load_statistics,
    measure_images,
    merge_statistics,
)
from tests.helpers import ignore, settings
from tests.statistics import judge
from tests.statistics.judge import check_same

NAMES = judge.names(9)
SOURCE = StatisticsSource("tiny", "random (seed 0)", "ab12", "resize 8", "every convolution", rank=True)


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
    SavedStatistics(replace(SOURCE, **source), totals, progress).save(path)
    return path


def test_a_loaded_file_saves_the_same_bytes(tmp_path: Path) -> None:
    loaded = load_statistics(saved(tmp_path / "a.json"))
    assert loaded.source == SOURCE and loaded.progress == Progress.after(NAMES, 9)
    check_same(loaded.totals, measured(0, 9), rel=0)
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize("cuts", [(0, 4, 9), (0, 1, 9), (0, 3, 6, 9), (0, 0, 9)])
@pytest.mark.filterwarnings("ignore:no pass of")  # compiled code of an earlier test
def test_merged_shards_equal_the_whole(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    paths = [saved(tmp_path / f"{number}.json", *shard) for number, shard in enumerate(pairwise(cuts))]
    for ordered in (paths, paths[::-1]):
        joined = merge_statistics(ordered)
        check_same(joined.totals, measured(0, 9), places=ordered is paths)  # a tanh reaches its bounds more than once
        assert joined.progress is None and joined.source == SOURCE
    assert merge_statistics(paths[:1]).progress == Progress.after(NAMES[: cuts[1]], cuts[1])


def test_an_empty_file_without_progress_adds_nothing(tmp_path: Path) -> None:
    SavedStatistics(SOURCE, RunningStatistics()).save(tmp_path / "empty.json")
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


READABLE = [b"[]", b"null", b"3", b'"text"', b"{}", b'{"hookscope": "1"}', b'{"content": 1}']
OTHERS = [*READABLE, b"[" * 99_999, b"\x89PNG\r\n\x1a\n", b"\xff\xfe\x00", bytes(range(256)), 0.0, 0.01, 0.5, 0.99]


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_other_files_and_shares_of_one(tmp_path: Path, other: bytes | float) -> None:
    path = saved(tmp_path / "a.json", 0, 1)
    data = path.read_bytes()
    path.write_bytes(other if isinstance(other, bytes) else data[: int(other * len(data))])
    damaged = "" if other in READABLE else ", or is damaged"
    do = "give what SavedStatistics.save wrote"
    assert f"a.json' holds no saved statistics{damaged}; {do}" in refusal(path)


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


CONTENTS: list[Any] = [
    {},
    [],
    float("nan"),
    {"progress": None, "source": {}, "tally": {}},
    {"progress": None, "source": [], "tally": 3},
    {"progress": None, "source": asdict(SOURCE), "tally": {"images": 1}},
    ("images", {"float": "inf"}),  # else in the place of a part
    ("layers", 3),
    ("layers", [{}]),
    ("batch_norms", {"a": 1}),
    ("images", {"array": "object", "shape": [1], "data": ""}),
    ("images", {"array": "int64", "shape": [5], "data": "eJwDAAAAAAE="}),
    ("images", {"array": "int64", "shape": [1], "data": "no"}),
]


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_other_content_with_the_right_digest(tmp_path: Path, content: Any) -> None:
    path = saved(tmp_path / "a.json", 0, 1)
    whole = json.loads(path.read_text())
    if isinstance(content, tuple):
        whole["content"]["tally"][content[0]] = content[1]
    else:
        whole["content"] = content
    digest = "" if isinstance(content, float) else _digest(whole["content"])
    path.write_text(json.dumps(whole | {"sha256": digest}))
    assert "a.json' is damaged" in refusal(path)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("model", "other", "model tiny, not other"),
        ("weights", "DEFAULT", "weights random (seed 0), not DEFAULT"),
        ("fingerprint", "ff00", "other weights of tiny"),
        ("preprocess", "resize 9", "preprocessing resize 8, not resize 9"),
        ("layers", "conv1", "layers every convolution, not conv1"),
        ("rank", False, "rank True, not False"),
    ],
)
def test_other_sources_are_refused(tmp_path: Path, field: str, value: Any, text: str) -> None:
    paths = saved(tmp_path / "a.json", 0, 1), saved(tmp_path / "b.json", 1, 2, **{field: value})
    error = refusal(*paths)
    assert text in error and "a.json" in error and "b.json" in error
    with pytest.raises(InputError, match=f"^cannot resume 'a.json'; it was made with {re.escape(text)}"):
        SOURCE.check_resumed_by(replace(SOURCE, **{field: value}), "a.json")
    SOURCE.check_resumed_by(replace(SOURCE), "a.json")


def test_a_fingerprint_covers_every_parameter_and_buffer() -> None:
    net = Tiny()
    before = fingerprint_of(net)
    assert before == fingerprint_of(net)
    net.array.running_var[1] += 1e-6
    assert (after := fingerprint_of(net)) != before
    net.conv.bias.data[0] = -net.conv.bias.data[0]
    assert fingerprint_of(net) != after


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch warns once in a process
def test_a_fingerprint_covers_any_kind_of_number_and_packed_weights() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        net = nn.Module()
        for name, value in (("held", torch.ones(2, 3).T), ("nothing", torch.zeros(0)), ("scalar", torch.tensor(3))):
            net.register_buffer(name, value.to(dtype))
        assert fingerprint_of(net) != fingerprint_of(nn.Module())
    linear = torch.ao.nn.quantized.Linear(3, 2)
    before = fingerprint_of(linear)
    linear.set_weight_bias(torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 0, torch.qint8), None)
    assert fingerprint_of(linear) != before


def test_overlapping_files_are_refused_and_named(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.json", 0, 4), saved(tmp_path / "b.json", 4, 9)
    overlapping = saved(tmp_path / "c.json", 3, 6)
    both = tmp_path / "both.json"
    merge_statistics([a, b]).save(both)
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


NETS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 7, stride=3), nn.ReLU())
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    for number in range(7):
        Image.effect_noise((24, 20), 60 + 9 * number).convert("RGB").save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_text("no picture")
    Image.new("RGB", (5, 5)).save(tmp_path / "tiny.png")
    return tmp_path


PATHS = [f"{number}.png" for number in range(7)]


def measure(*paths: str, preprocess: str = "none", input_size: Any = None, **options: Any) -> SavedStatistics:
    """Measure with batches of 2; images are skipped unless ``skipped`` says otherwise."""
    model = load_model("nets.py:net", preprocess=preprocess, input_size=input_size)
    files = {name: options.pop(name) for name in ("save", "resume") if name in options}
    run = settings(**{"batch_size": 2, "skipped": ignore, **options})
    return measure_images(model, [path if "//" in path else Path(path) for path in paths or PATHS], **files, run=run)


def progress_of(saved: SavedStatistics) -> tuple[int, int, int]:
    """Images measured, images done, images lost."""
    assert saved.progress is not None
    return saved.totals.images, saved.progress.done, saved.progress.skipped


def counts(saved: SavedStatistics) -> list[tuple[int, float | None, float | None]]:
    return [(layer.items, layer.min, layer.max) for layer in saved.totals.statistics()]


def test_every_image_is_counted() -> None:
    saved = measure()
    assert progress_of(saved) == (7, 7, 0)
    assert saved.source.model == "nets.py:net"
    assert saved.source.fingerprint == "", "it takes time, and only saved files need it"


def test_a_file_that_cannot_be_read_is_counted_and_named_and_raises_by_default() -> None:
    paths = ["0.png", "bad.png", "1.png", "missing.png"]
    lost: list[tuple[int, str]] = []
    steps: list[int] = []
    saved = measure(*paths, skipped=lambda position, name, error: lost.append((position, name)), progress=steps.append)
    assert (progress_of(saved), sum(steps)) == ((2, 4, 2), 4)
    assert lost == [(1, "bad.png"), (3, "missing.png")]
    with pytest.raises(HookscopeError, match="bad\\.png"):
        measure_images(load_model("nets.py:net", preprocess="none"), paths)


def test_no_readable_image_is_an_error() -> None:
    with pytest.raises(InputError, match="no image could be used; 2 were tried"):
        measure("bad.png", "bad.png", save="s.json")
    assert not os.path.exists("s.json")


@pytest.mark.parametrize("paths", [["tiny.png", "0.png", "1.png"], ["0.png", "tiny.png", "1.png"]])
def test_an_image_that_the_model_refuses_is_lost_alone(paths: list[str]) -> None:
    errors: list[str] = []
    saved = measure(*paths, batch_size=16, skipped=lambda position, name, error: errors.append(str(error)))
    assert progress_of(saved) == (2, 3, 1)
    assert errors[0].startswith(
        "tiny.png: nets.py:net: layer '0' (Conv2d) needs a larger input; forward() failed on 1x3x5x5: "
    )
    assert counts(saved) == counts(measure("0.png", "1.png"))


def test_a_model_that_refuses_the_first_image_of_a_fixed_size_is_an_error() -> None:
    with pytest.raises(InputError, match=r"forward\(\) failed on 2x3x5x5"):
        measure(preprocess="stretch", input_size=(5, 5), skipped=lambda *lost: pytest.fail(f"{lost}"))


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Interrupt the pass after so many."""
    passes = iter(range(after))
    forward = torch.nn.ReLU.forward

    def stop(self: torch.nn.ReLU, inputs: torch.Tensor) -> torch.Tensor:
        if next(passes, None) is None:
            raise KeyboardInterrupt
        return forward(self, inputs)

    monkeypatch.setattr(torch.nn.ReLU, "forward", stop)


@pytest.mark.parametrize(("after", "images", "done"), [(1, 1, 2), (2, 3, 4)])
def test_an_interrupted_run_is_resumed(monkeypatch: pytest.MonkeyPatch, after: int, images: int, done: int) -> None:
    paths = ["0.png", "bad.png", "1.png", "2.png", "3.png", "bad.png", "4.png", "5.png"]
    whole = measure(*paths)
    interrupted: list[int] = []
    started: list[int] = []
    with monkeypatch.context() as patch:
        stopping(patch, after)
        with pytest.raises(KeyboardInterrupt):
            measure(*paths, save="s.json", interrupt=interrupted.append)
    assert progress_of(load_statistics("s.json")) == (images, done, 1)
    resumed = measure(*paths, save="s.json", resume=True, start=started.append)
    assert interrupted == started == [done]
    assert progress_of(whole) == progress_of(resumed) == (6, 8, 2)
    assert counts(resumed) == counts(whole)


def test_lost_images_ahead_of_measured_ones_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes in a batch: both passes come after the loss between them."""
    Image.effect_noise((30, 30), 80).convert("RGB").save("large.png")
    paths = ["0.png", "bad.png", "large.png", "1.png"]
    with monkeypatch.context() as patch:
        stopping(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            measure(*paths, save="s.json", batch_size=16)
    assert progress_of(load_statistics("s.json")) == (1, 2, 1)
    assert progress_of(measure(*paths, save="s.json", resume=True)) == (3, 4, 1)


def test_a_run_that_measured_nothing_leaves_an_earlier_file(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(save="s.json")
    before = Path("s.json").read_bytes()
    with monkeypatch.context() as patch:
        stopping(patch, 0)
        with pytest.raises(KeyboardInterrupt):
            measure(save="s.json")
    assert Path("s.json").read_bytes() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_continues_with_a_longer_list_and_adds_nothing_to_a_finished_one(workers: int) -> None:
    measure(*PATHS[:3], save="s.json", workers=workers)
    whole = measure(save="s.json", resume=True, workers=workers)
    assert counts(whole) == counts(measure())
    before = Path("s.json").read_bytes()
    again = measure(save="s.json", resume=True)
    assert (counts(again), progress_of(again)) == (counts(whole), (7, 7, 0))
    assert Path("s.json").read_bytes() == before


def test_the_file_is_written_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr("hookscope.jobs.run._SAVE_EVERY", -1.0)
    monkeypatch.setattr("hookscope.jobs.run._SAVE_SHARE", 0.0)

    plain = SavedStatistics.save

    def save(saved: SavedStatistics, path: str) -> None:
        written.append(saved.totals.images)
        plain(saved, path)

    monkeypatch.setattr(SavedStatistics, "save", save)
    measure(save="s.json")
    assert written == [2, 4, 6, 7, 7]


@pytest.fixture
def mine() -> Iterator[None]:
    """Handlers that raise, as the program has them."""
    old = signal.signal(signal.SIGTERM, lambda number, frame: (_ for _ in ()).throw(SystemExit(143)))
    yield
    signal.signal(signal.SIGTERM, old)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_a_batch_is_added_up_waits(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]
) -> None:
    """Or some layers would have counted the batch that a resumed run counts again."""
    merge, times = RunningStatistics.merge, iter(range(99))

    def interrupted(self: RunningStatistics, other: RunningStatistics) -> None:
        if other.images and self.images == 2 and next(times) == 0:
            signal.raise_signal(number)
        merge(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(RunningStatistics, "merge", interrupted)
        with pytest.raises(error):
            measure(save="s.json")
    assert progress_of(load_statistics("s.json")) == (4, 4, 0)
    saved = measure(save="s.json", resume=True)
    assert counts(saved) == counts(measure())


def test_a_resumed_run_checks_the_content_of_its_images() -> None:
    measure(*PATHS[:3], save="s.json")
    os.replace("3.png", "1.png")
    with pytest.raises(InputError, match="was measured on other images; 1 of the first 3 are not of this run"):
        measure(*PATHS[:3], "4.png", save="s.json", resume=True)
    with pytest.raises(InputError, match="2 of the first 3 are not"):
        measure("0.png", save="s.json", resume=True)


def test_an_image_is_the_same_under_another_name() -> None:
    measure("0.png", "bad.png", "1.png", save="s.json")
    os.mkdir("moved")
    for name in ("0.png", "1.png", "2.png", "bad.png"):
        os.replace(name, f"moved/{name}")
    notes: list[tuple[str, str]] = []
    paths = [f"moved/{name}" for name in ("0.png", "bad.png", "1.png", "2.png", "0.png")]
    saved = measure(*paths, save="s.json", resume=True, note=lambda *note: notes.append(note))
    assert notes == [("moved/0.png", "counted twice: an earlier image has the same content")]
    assert progress_of(saved) == (4, 5, 1) and len(set(saved.totals.pictures)) == 3


@pytest.mark.parametrize("names", [["1.png", "0.png"], ["0.png", "1.png"]])
def test_a_file_without_identities_is_resumed_by_names(names: list[str]) -> None:
    saved = measure("0.png", "1.png", save="s.json")
    saved.totals.pictures = array("q")
    saved.save("s.json")
    notes: list[str] = []

    def resume() -> SavedStatistics:
        return measure(*names, "2.png", save="s.json", resume=True, note=lambda name, text: notes.append(text))

    if names == ["0.png", "1.png"]:
        assert progress_of(resume()) == progress_of(resume()) == (3, 3, 0), "the file knows one image of three"
    else:
        with pytest.raises(InputError, match="measured on other images"):
            resume()
    assert set(notes) == {"it was saved without the identity of its images: only their names are compared"}


def test_a_resumed_run_compares_remote_images_by_name(here: Path) -> None:
    remote = [f"file://{here}/{name}" for name in PATHS]
    measure(*remote[:4], save="s.json")
    notes: list[str] = []
    resumed = measure(*remote, save="s.json", resume=True, note=lambda name, text: notes.append(text))
    assert (progress_of(resumed), notes) == ((7, 7, 0), ["its images are remote: only their names are compared"])
    with pytest.raises(InputError, match="measured on other images"):
        measure(*reversed(remote), save="s.json", resume=True, note=lambda *note: None)
