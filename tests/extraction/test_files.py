"""Runs that write features: interrupted, killed and resumed, refused, out of space."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pandas
import pytest
import torch

from hookscope.errors import InputError, LayerError, UsageError, WriteError
from hookscope.extraction import FeatureBatch, check_output
from hookscope.jobs import Part
from tests.extraction.runs import NAMES, features, parts, write

USED = [position for position in range(23) if position not in (0, 5, 6, 22)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def positions(path: str) -> list[int]:
    """The positions in an output, whose features belong to them."""
    if path.endswith("/"):
        tables = [pandas.read_parquet(part) for part in sorted(Path(path).glob("*.parquet"))]
        table = pandas.concat(tables) if tables else pandas.DataFrame({"position": [], "backbone out": []})
        found, values = list(table["position"]), [value[0] for value in table["backbone out"]]
    elif path.endswith(".npy"):
        table = pandas.read_csv(path + ".rows.tsv", sep="\t")
        found, values = list(table["position"]), list(np.load(path)[:, 0])
    else:
        with np.load(path) as arrays:
            found, values = list(arrays["position"]), list(arrays["backbone out"][:, 0])
    assert found == values
    return found


def lost(path: str) -> list[int]:
    return list(pandas.read_csv(path + ("_lost.tsv" if path.endswith("/") else ".lost.tsv"), sep="\t")["position"])


def left_over() -> list[str]:
    """Files and folders of the work, which a complete run removes."""
    return [str(path) for path in Path().rglob("*") if path.name.startswith(".")]


def first_only(position: int) -> dict[str, torch.Tensor]:
    return {"backbone out": features(position)["backbone out"]}


CASES: dict[str, dict[str, Any]] = {"a.npy": {}, "a.npz": {}, "out/": {"shard": 5}}


def arguments(name: str, **more: Any) -> dict[str, Any]:
    return {"of": first_only if name.endswith(".npy") else features, **more}


@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_run_is_resumed_without_a_row_lost_or_twice(name: str) -> None:
    told: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        write(name, arguments(name, stop=14), **CASES[name], listener={"interrupt": told.append})
    assert told == [12] and not Path(name).exists()
    with pytest.raises(WriteError, match=r"did not end: 12 of 23 images are done; continue it with resume=True"):
        write(name, arguments(name), **CASES[name])
    with pytest.raises(KeyboardInterrupt):
        write(name, arguments(name, stop=18, size=3), **CASES[name], resume=True, listener={"start": told.append})
    written = write(name, arguments(name, size=5), **CASES[name], resume=True, listener={"start": told.append})
    assert told == [12, 12, 18] and (written.rows, written.skipped, written.earlier) == (19, 4, 18)
    assert positions(name) == USED and lost(name) == [0, 5, 6, 22] and not left_over()


@pytest.mark.parametrize("name", CASES)
def test_a_complete_run_has_nothing_left_to_do(name: str) -> None:
    first = write(name, arguments(name), **CASES[name])
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    again = write(name, lambda done: pytest.fail("it ran again"), **CASES[name], resume=True)
    assert again.was_complete and (again.rows, again.skipped, again.earlier) == (19, 4, 23)
    assert again.columns == first.columns and not first.was_complete
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def in_child(work: Callable[[], object]) -> int:
    """The status of a forked process that does ``work``; its buffers are lost when it is killed."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(event: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in a process that is killed at this event of a file, counted from 0; whether it was killed."""

    def killing() -> None:
        count = 0

        def hook(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            changes = name in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "fcntl.lockf")
            if changes or (name == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wa"):
                count += 1
                if count > event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    status = in_child(killing)
    assert status in (0, -signal.SIGKILL)
    return status != 0


pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")


def kill_and_resume(name: str, event: int, size: int) -> bool:
    """Kill a run at an event, resume it, and remove what it wrote; whether it was killed.

    An earlier output of other features stands there in every second round.
    """
    old, wanted = event % 4 < 2, arguments(name, size=size)
    if old:
        write(name, wanted, **CASES[name], source={"pool": "max"})
    killed = killed_at(event, lambda: write(name, wanted, **CASES[name], overwrite=old))
    if Path(name).exists():
        found = positions(name)
        assert found == USED[: len(found)], "whole files, in order"
        assert name.endswith("/") or len(found) == len(USED)
    refused = ""
    try:
        write(name, wanted, **CASES[name], resume=True)
    except InputError as error:
        refused = str(error)
        write(name, wanted, **CASES[name], overwrite=True)
    assert not refused or (old and "pool max, not mean" in refused), "killed before the old output was touched"
    assert positions(name) == USED and lost(name) == [0, 5, 6, 22] and not left_over()
    for path in Path().iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return killed


@pytest.fixture
def saves_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.jobs.run._SAVE_EVERY", 0.0)
    monkeypatch.setattr("hookscope.jobs.run._SAVE_SHARE", 0.0)
    monkeypatch.setattr(os, "fsync", lambda number: None)  # it takes time, and this machine stays on


@pytest.mark.usefixtures("saves_always")
@pytest.mark.parametrize("step", [14, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_at_a_change_of_a_file_goes_on_and_leaves_whole_files(name: str, step: int) -> None:
    event = 0
    while kill_and_resume(name, event, 4) | kill_and_resume(name, event + 2, 4):  # with and without an older output
        event += step
    assert event > 14


OTHER = {
    "model": ("other", "model net, not other"),
    "weights": ("other.pth", r"weights random \(seed 0\), not other\.pth"),
    "fingerprint": ("e" * 64, "other weights of net"),
    "preprocess": ("crop 4", "preprocessing resize 8, not crop 4"),
    "layers": ("a", "layers a, b, not a"),
    "pool": ("max", "pool mean, not max"),
    "dtype": ("float16", "dtype none, not float16"),
    "targets": ((), "targets cat, not none"),
    "logits": (True, "logits False, not True"),
}


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("name", ["a.npz", "out/"])
def test_a_run_of_something_else_is_not_resumed(name: str, complete: bool) -> None:
    if complete:
        write(name, **CASES[name])
    else:
        with pytest.raises(KeyboardInterrupt):
            write(name, {"stop": 14}, **CASES[name])
    for field, (value, words) in OTHER.items():
        with pytest.raises(InputError, match=f"^cannot resume '{name}'; it was made with {words}; give what it"):
            write(name, resume=True, source={field: value})
    lists = [(NAMES[:-1], "list of images: 23 images, not 22"), (NAMES[::-1], "list of images; ")]
    others = [({"names": names}, f"from another {words}") for names, words in lists]
    for options, words in others + [({"shard": 6}, "with shard 5, not 6")] * (name == "out/"):
        with pytest.raises(InputError, match=f"it was made {words}"):
            write(name, resume=True, **options)
    assert write(name, resume=True).rows == 19


def test_an_image_that_has_changed_since_is_noticed() -> None:
    names = [f"{number}.png" for number in range(8)]
    for name in names:
        Path(name).write_text(name)
    with pytest.raises(KeyboardInterrupt):
        write("a.npz", {"names": names, "lost": (), "stop": 6})
    Path("3.png").write_text("another image")
    with pytest.raises(InputError, match=r"cannot resume 'a\.npz': the image '3\.png' has changed since"):
        write("a.npz", {"names": names, "lost": ()}, resume=True)


@pytest.mark.parametrize("file", ["0.npz", "_progress.json"])
@pytest.mark.parametrize("name", ["a.npz", "out/"])
def test_a_file_cut_short_is_noticed(name: str, file: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(name, {"stop": 14}, **CASES[name])
    path = Path(f".{name.strip('/')}.parts", file)
    os.truncate(path, path.stat().st_size - 9)
    with pytest.raises(InputError) as error:
        write(name, resume=True)
    assert "damaged" in str(error.value) and "\n" not in str(error.value)
    assert write(name, overwrite=True, **CASES[name]).rows == 19


@pytest.mark.parametrize("name", ["a.npz", "a.parquet", "a.npy", "a.safetensors", "a.zarr"])
def test_names_that_are_not_utf8_have_escapes_that_turn_back(name: str) -> None:
    names, notes = [os.fsdecode(b"caf\xe9.png"), "100%41.png", "caf\u00e9.png", os.fsdecode(b"\xff.png")], list[str]()
    about, told = arguments(name, names=names, lost=(3,), size=2), {"note": lambda *note: notes.append(note[1])}
    with pytest.raises(KeyboardInterrupt):
        write(name, {**about, "stop": 3}, listener=told)
    write(name, about, resume=True, listener=told)
    rows = rows_of(name)
    assert [os.fsdecode(unquote_to_bytes(path)) for path in rows] == names[:3]
    assert rows[:3] == ["caf%E9.png", "100%2541.png", "caf\u00e9.png"]
    assert notes == 2 * ["paths have escapes such as %E9, because some are not UTF-8"]
    assert "%FF.png" in Path(name + ".lost.tsv").read_text()


def rows_of(name: str) -> list[str]:
    if name.endswith(".npz"):
        return np.load(name)["path"].tolist()
    if name.endswith(".parquet"):
        return pandas.read_parquet(name)["path"].tolist()
    if name.endswith(".zarr"):
        return list(pytest.importorskip("zarr").open_group(name, mode="r")["path"][:])
    return pandas.read_csv(name + ".rows.tsv", sep="\t")["path"].tolist()


def test_a_part_in_place_of_another_is_noticed() -> None:
    with pytest.raises(KeyboardInterrupt):
        write("a.npz", {"stop": 14})
    parts = sorted(Path(".a.npz.parts").glob("*.npz"))
    with np.load(parts[0]) as part:
        np.savez(parts[0], **{**part, "position": part["position"] + 1})
    with pytest.raises(InputError, match="do not hold the first 12 images, each once; start again"):
        write("a.npz", resume=True)
    parts[0].unlink()
    os.mkfifo(parts[0])
    with pytest.raises(InputError, match=r"its file '0\.npz' is damaged"):
        write("a.npz", resume=True)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".parquet"])
def test_a_complete_file_that_was_cut_short_is_noticed(suffix: str) -> None:
    name = "a" + suffix
    write(name, arguments(name))
    os.truncate(name, os.path.getsize(name) - 1)
    with pytest.raises(InputError, match=rf"^'a\{suffix}' holds no features of hookscope, or is damaged"):
        write(name, arguments(name), resume=True)
    Path(name).write_text("something else")
    with pytest.raises(InputError, match=rf"^'a\{suffix}' holds no features of hookscope, or is damaged") as error:
        write(name, arguments(name), resume=True)
    assert "pickle" not in str(error.value)  # whose advice is not safe


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 500, 1700])
@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors", "a.parquet", "a.zarr", "out/"])
def test_a_full_disk_is_one_line_and_the_run_is_resumed_when_there_is_space(
    name: str, limit: int, file_limit: Callable[[int], None]
) -> None:
    shard = CASES.get(name, {})
    file_limit(limit)
    failed = ""
    try:
        write(name, arguments(name, size=2), **shard)
    except WriteError as error:
        failed = str(error)
    finally:
        file_limit(resource.RLIM_INFINITY)
    assert failed or limit == 1700
    if failed:
        assert failed.startswith("cannot write") and "File too large" in failed and "\n" not in failed
        assert not Path(name).is_file(), "no file that is not whole"
        assert write(name, arguments(name), **shard, resume=True).rows == 19
    if name in CASES:
        assert positions(name) == USED
    assert not left_over()


@pytest.mark.parametrize("name", CASES)
def test_an_output_that_exists_is_refused_and_replaced_only_if_wanted(name: str) -> None:
    write(name, arguments(name, lost=()), **CASES[name])
    with pytest.raises(WriteError, match=rf"^'{name}' exists; add overwrite=True, or name another output$"):
        write(name, lambda done: pytest.fail("a pass"))
    assert positions(name) == list(range(23))
    write(name, arguments(name), **CASES[name], overwrite=True)
    assert positions(name) == USED and lost(name) == [0, 5, 6, 22]
    write(name, arguments(name, lost=()), **CASES[name], overwrite=True)
    assert positions(name) == list(range(23))
    assert not Path("a.npy.lost.tsv").exists() and not Path("out/_lost.tsv").exists(), "nothing was lost"


def test_the_old_output_and_files_of_others_beside_a_new_one_stay() -> None:
    Path("a.npy.json").write_text("mine")
    with pytest.raises(WriteError, match=r"'a\.npy\.json' exists"):
        write("a.npy", arguments("a.npy"))
    assert Path("a.npy.json").read_text() == "mine"
    Path("a.npy.json").unlink()
    for name in CASES:
        write(name, arguments(name), **CASES[name])
        with pytest.raises(KeyboardInterrupt):
            write(name, arguments(name, stop=0), **CASES[name], overwrite=True)
        assert positions(name) == USED and not left_over()


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_of_something_else_is_left_alone(options: dict[str, bool]) -> None:
    for folder in ("out", "a.zarr"):
        Path(folder).mkdir()
        Path(folder, "part-00000.parquet").write_text("mine")
    with pytest.raises(WriteError, match=r"^the folder 'out/' holds other files; part-00000\.parquet is one of 1;"):
        write("out/", **options)
    with pytest.raises(WriteError, match=r"a\.zarr: it holds no features of hookscope"):
        write("a.zarr", **options)
    assert [path.read_text() for path in sorted(Path().rglob("*.parquet"))] == ["mine", "mine"]
    assert len(list(Path().rglob("*"))) == 4


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}])
def test_files_of_others_that_are_named_as_those_of_a_run_are_not_replaced(options: dict[str, bool]) -> None:
    write("out", shard=9)
    Path("out/README").write_text("mine")
    write("out", shard=5, overwrite=True)
    assert Path("out/README").read_text() == "mine" and positions("out/") == USED
    Path("out/part-00007.parquet").write_text("mine")
    with pytest.raises(WriteError, match=r"^the folder 'out' holds other files; part-00007\.parquet is one of 1"):
        write("out", shard=5, **options)
    for work, name in ((".a.npz.parts", "a.npz"), ("new/.parts", "new/")):
        Path(work).mkdir(parents=True)
        Path(work, "mine").write_text("mine")
        write(name, **options)
    assert [path.read_text() for path in Path().rglob("*mine")] == ["mine", "mine"]
    assert Path("out/part-00007.parquet").read_text() == "mine" and Path("out/part-00000.parquet").exists()


def test_resume_begins_where_there_is_nothing_in_an_empty_folder_and_behind_a_link_which_stays() -> None:
    Path("out").mkdir()
    assert write("out", resume=True).rows == 19 and positions("out/") == USED
    Path("far").mkdir()
    os.symlink("far/a.npz", "a.npz")
    write("a.npz", resume=True)
    assert os.path.islink("a.npz") and positions("far/a.npz") == USED


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("a.npy", {"columns": 2}, r"^\.npy holds the features of one layer, and the run gives 2 columns; choose one"),
        ("a.npz", {"overwrite": True, "resume": True}, "^overwrite starts again and resume continues"),
        ("a.npz", {"shard": 5}, r"^a folder holds \.parquet files, and 'a\.npz' is to be one file"),
        ("out", {"shard": 0}, "^shard must be an integer of at least 1, not 0"),
        ("-", {}, "^cannot write features to '-'; name a file"),
        ("a.csv", {}, r"^no format for 'a\.csv'"),
        ("a.parquet.gz", {}, r"^no format for 'a\.parquet\.gz'"),
    ],
)
def test_wrong_usage_is_refused_before_the_first_pass(name: str, options: dict[str, Any], words: str) -> None:
    for call in (check_output, lambda name, **options: write(name, lambda done: pytest.fail("a pass"), **options)):
        with pytest.raises(UsageError, match=words):
            call(name, **options)
    assert not list(Path().iterdir())


def test_places_that_cannot_be_written_are_refused() -> None:
    Path("file").write_text("")
    os.mkfifo("a.npz")
    for name in ("missing/a.npz", "file/a.npz", "file/", "n" * 300 + ".npz"):
        with pytest.raises(WriteError):
            write(name)
    for name in ("a.npz", "file", "/dev/stdout", "/dev/null", "-"):
        with pytest.raises(UsageError, match=f"^cannot write features to '{name}'; name a file that ends in "):
            write(name)


def test_more_columns_than_a_process_may_have_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        write("a.npz", {"of": lambda position: {f"{number}": torch.ones(1) for number in range(100)}, "size": 23})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with np.load("a.npz") as arrays:
        assert len(arrays.files) == 105


def test_shapes_and_columns_that_differ_between_images_or_are_too_many_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^\.npy holds the features of one layer, and the run gives 3 columns"):
        write("a.npy")
    assert not list(Path().iterdir())

    def grows(position: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(3, 7 if position < 9 else 9)}

    with pytest.raises(LayerError, match=r"^x has rows of different shapes; it has 3x9 for cat/9\.png after 3x7; pool"):
        write("a.npz", {"of": grows, "size": 1})
    with pytest.raises(LayerError, match=r"^only some images have features of y"):
        write("b.npz", {"of": lambda p: {"x": torch.ones(1)} | ({"y": torch.ones(1)} if p < 9 else {}), "size": 1})
    with pytest.raises(InputError, match=r"x has no values"):
        write("c.npz", {"of": lambda p: {"x": torch.zeros(0, 3)}})


@pytest.mark.parametrize("name", CASES)
def test_no_usable_image_is_an_error_and_leaves_nothing(name: str) -> None:
    with pytest.raises(InputError, match=r"^no image could be used; 23 were tried; see"):
        write(name, {"lost": tuple(range(23))}, **CASES[name])
    assert not list(Path().iterdir())


def test_two_runs_do_not_write_to_one_output() -> None:
    def other(part: Any) -> None:
        def run() -> None:
            with pytest.raises(WriteError, match=r"^another run writes to 'a\.npz'; wait until it ends$"):
                write("a.npz", resume=True)

        assert in_child(run) == 0

    def batches(first: int) -> Any:
        for part in parts(first):
            yield part
            other(part)

    assert write("a.npz", batches).rows == 19
    assert positions("a.npz") == USED


def test_a_list_of_unknown_length_is_resumed() -> None:
    def batches(first: int) -> Any:
        return parts(first, stop=14 if not first else None)

    with pytest.raises(KeyboardInterrupt):
        write("a.npz", batches, (), count=None)
    with pytest.raises(WriteError, match="did not end: 12 images are done"):
        write("a.npz", batches, (), count=None)
    assert write("a.npz", batches, (), count=None, resume=True).rows == 19
    assert positions("a.npz") == USED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors", "a.parquet", "a.zarr", "out/"])
def test_memory_does_not_grow_with_the_number_of_images(name: str) -> None:
    def batches(count: int) -> Any:
        for begin in range(0, count, 50):
            at = tuple(range(begin, begin + 50))
            names = tuple(f"the/name/of/a/folder/{number}.jpg" for number in at)
            features = {"x": torch.full((50, 1024), float(begin))}
            yield Part(FeatureBatch(at, names, ("0" * 64,) * 50, ("",) * 50, features), begin + 50)

    used = []
    for count in (1000, 100_000):

        def run(count: int = count) -> None:
            write(name, lambda first: batches(count), (), count=count, overwrite=True)
            Path("used").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))

        assert in_child(run) == 0
        used.append(int(Path("used").read_text()))
    assert used[1] - used[0] < 100, "MiB"


def test_progress_is_saved_about_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seen: list[int] = []

    def batches(first: int) -> Any:
        for part in parts(first):
            yield part
            now[0] += 4.0
            state = Path(".a.npz.parts/_progress.json")
            seen.append(json.loads(state.read_text())["content"]["done"] if state.exists() else 0)

    write("a.npz", batches)
    assert seen == [0, 0, 0, 16, 16, 16]
