"""The log of a run: lines whole or absent, whatever was there and whatever happens."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookscope.errors import InputError, WriteError
from hookscope.training.log.file import RunLog, read_runs

HEADER = {"row": "run", "every": 1}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ndjson"


@pytest.fixture
def log(path: Path) -> Iterator[RunLog]:
    """A log with its header."""
    log = RunLog(path)
    log.write([HEADER])
    yield log
    log.close()


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def write(path: Path, *rows: dict[str, object]) -> None:
    log = RunLog(path)
    log.write(rows)
    log.close()


def test_runs_are_read_back_with_their_rows_notes_and_end(path: Path) -> None:
    layer, note, end = {"row": "layer", "step": 0}, {"row": "note", "step": 1}, {"row": "end", "step": 2}
    write(path, HEADER, layer, {"row": "of the future"}, note, end)
    write(path, HEADER | {"every": 2}, layer | {"field": "of the future"})
    first, second = read_runs(path)
    assert (first.header, first.rows, first.notes, first.end) == (HEADER, [layer], [note], end)
    assert second.header["every"] == 2 and second.rows[0]["field"] == "of the future" and second.end is None


def test_lines_are_ascii_json_without_nan_and_others_are_passed_over(path: Path) -> None:
    write(path, HEADER | {"a": float("nan"), "b": float("-inf"), "c": "sch\u00f6n\n\udc80"})
    (line,) = lines(path)
    assert line.isascii() and line.endswith(b"\n")
    assert json.loads(line) == HEADER | {"a": None, "b": None, "c": "sch\u00f6n\n\udc80"}
    path.write_bytes(json.dumps(HEADER).encode() + b'\n[1]\n\xff\n\n7\n{"row": "layer"}\n' + b"[" * 100_000 + b"\n")
    (run,) = read_runs(path)
    assert run.rows == [{"row": "layer"}]


@pytest.mark.parametrize("rest", [b'{"row": "lay', b"{", b'{"row": "layer", "x": "' + b"y" * 200_000])
def test_what_was_cut_off_is_dropped_by_the_reader_and_by_the_next_run(path: Path, rest: bytes) -> None:
    write(path, HEADER, {"row": "layer", "step": 0})
    whole = path.read_bytes()
    path.write_bytes(whole + rest)
    (run,) = read_runs(path)
    assert len(run.rows) == 1
    write(path, HEADER)
    assert path.read_bytes() == whole + json.dumps(HEADER).encode() + b"\n"
    assert len(read_runs(path)) == 2


@pytest.mark.parametrize("start", [b"", b'{"ro', b'{"row": "run", "sta', json.dumps(HEADER).encode()])
def test_a_first_line_is_ended_if_it_is_whole_and_else_dropped(path: Path, start: bytes) -> None:
    path.write_bytes(start)
    runs = len(read_runs(path))
    write(path, HEADER)
    assert runs == start.endswith(b"}") and len(lines(path)) == len(read_runs(path)) == runs + 1


@pytest.mark.parametrize("content", [b"precious\n", b'{"row": "layer"}\n', b"\x00" * 9])
def test_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    with pytest.raises(WriteError, match="it holds something else"):
        RunLog(path)
    with pytest.raises(InputError, match="is not the log of a run"):
        read_runs(path)
    assert path.read_bytes() == content


def test_places_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="Is a directory"):
        RunLog(tmp_path)
    with pytest.raises(WriteError, match="its folder does not exist"):
        RunLog(tmp_path / "no" / "run.ndjson")
    with pytest.raises(InputError, match=r"no log '.*': No such file or directory; give a log of"):
        read_runs(tmp_path / "none")
    with pytest.raises(InputError, match="Is a directory"):
        read_runs(tmp_path)


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path / "run.ndjson", HEADER)
    finally:
        os.umask(old)
    assert (tmp_path / "run.ndjson").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("closes", [False, True])
def test_a_short_write_is_taken_back_if_it_can_be(
    path: Path, log: RunLog, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    real = os.write

    def short(number: int, data: bytes) -> int:
        written = real(number, data[:5])
        if closes:
            os.close(number)
        return written

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(WriteError, match="No space left"):
        log.write([{"row": "layer", "step": 0}])
    monkeypatch.undo()
    if not closes:
        log.write([{"row": "layer", "step": 1}])
        assert [row["step"] for row in read_runs(path)[0].rows] == [1] and len(lines(path)) == 2


def test_two_processes_cannot_write_to_one(path: Path, log: RunLog) -> None:
    code = "import sys; from hookscope.training.log.file import RunLog; RunLog(sys.argv[1])"
    child = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, cwd=ROOT)
    assert "another run is writing to it" in child.stderr
    log.close()
    assert subprocess.run([sys.executable, "-c", code, path], cwd=ROOT).returncode == 0


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    path, read = tmp_path / "fifo", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write(path, HEADER, {"row": "layer", "x": "y" * 300_000})
    reader.join()
    assert len(read[0].splitlines()) == 2


def test_a_forked_child_writes_nothing_and_a_program_that_is_started_has_no_log(path: Path, log: RunLog) -> None:
    assert not os.get_inheritable(log._descriptor)
    child = os.fork()
    if not child:
        log.write([{"row": "layer"}])
        os._exit(0)
    os.waitpid(child, 0)
    log.close()
    log.close()
    log.write([HEADER])  # goes nowhere
    assert len(lines(path)) == 1


@pytest.mark.parametrize("kind", ["file", "pipe", "device"])
@pytest.mark.parametrize("number_is_reused", [False, True])
def test_a_descriptor_that_somebody_closed(tmp_path: Path, path: Path, kind: str, number_is_reused: bool) -> None:
    other = tmp_path / "precious"
    if kind == "pipe":
        os.mkfifo(path)
        reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = RunLog("/dev/null" if kind == "device" else path)
    log.write([HEADER])
    number = log._descriptor
    os.close(number)
    if number_is_reused:
        spare = os.open(other, os.O_WRONLY | os.O_CREAT)
        os.dup2(spare, number)
        if spare != number:
            os.close(spare)
    with pytest.raises(WriteError, match="somebody closed it"):
        log.write([{"row": "layer", "step": 0}])
    log.close()
    log.write([HEADER])  # goes nowhere
    if number_is_reused:
        os.write(number, b"mine")  # it is open still
        os.close(number)
        assert other.read_bytes() == b"mine"
    if kind == "file":
        assert len(lines(path)) == 1
    if kind == "pipe":
        os.close(reading)
