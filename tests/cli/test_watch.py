"""A watched script does and says what it does and says with Python alone; and what its log is told to show."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import hookscope
from hookscope.training.log.file import RunLog, read_runs
from tests.training.logs import row

ROOT = Path(hookscope.__file__).parents[1]
NEEDS_POSIX = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
SLOW = pytest.mark.slow
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONSAFEPATH")
} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

NET = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 3)
)
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

def train(steps):
    for step in range(steps):
        images, labels = torch.randn(8, 3, 8, 8), torch.randint(3, (8,))
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, loss.item()

def weights():
    import hashlib
    values = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    return hashlib.sha256(values).hexdigest(), torch.rand(1).item()
"""
# A training run of 12 steps; the first argument is a statement that it executes in step 3.
TRAIN = f"""
import sys
print(sys.argv[2:])
{NET}
for step, loss in train(12):
    print(step, loss.hex())
    if step == 3: exec(sys.argv[1])
print(*weights())
"""


def ended(folder: Path, *words: str, **more: Any) -> tuple[int, str, str]:
    answer = subprocess.run(
        [sys.executable, *words], cwd=folder, env=ENVIRONMENT | more, capture_output=True, timeout=120,
        encoding="utf-8", errors="surrogateescape",
    )  # fmt: skip
    return answer.returncode, answer.stdout, answer.stderr


def watched(folder: Path, *words: str, **more: Any) -> tuple[int, str, str, list[str]]:
    """Status, output, errors without hookscope's own lines, and these."""
    status, output, errors = ended(folder, "-m", "hookscope", "watch", *words, **more)
    notes = [line for line in errors.splitlines(True) if line.startswith("Note: ")]
    return status, output, "".join(line for line in errors.splitlines(True) if line not in notes), notes


def both(folder: Path, *words: str, options: Sequence[str] = ("--every", "5", "--")) -> tuple[int, str, str, list[str]]:
    """What comes of a script, the same plain and watched; and hookscope's own lines."""
    plain = ended(folder, *words)
    *same, notes = watched(folder, *options, *words)
    assert tuple(same) == plain
    return *plain, notes


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return name


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str]:
    """Status, output and errors of TRAIN with Python alone."""
    folder = tmp_path_factory.mktemp("plain")
    return ended(folder, script(folder, TRAIN), "0", *WORDS)


WORDS = ("--layer", "x", "--help", "--", "-m")


def test_a_watched_script_trains_to_the_same_bits_and_each_rank_has_its_log(
    tmp_path: Path, trained: tuple[int, str, str]
) -> None:
    words = (script(tmp_path, TRAIN), "0", *WORDS)
    options = ("--every", "5", "--log", "run.ndjson", "--layer", "0,2,5", "--")
    *same, [note] = watched(tmp_path, *options, *words, RANK="1", WORLD_SIZE="2")
    status, output, errors = trained
    assert tuple(same) == trained and (status, errors, len(output.splitlines())) == (0, "", 14)
    assert [path.name for path in tmp_path.glob("*.ndjson")] == ["run.rank1.ndjson"]
    [run] = read_runs(tmp_path / "run.rank1.ndjson")
    assert run.header["command"] == list(words) and run.header["every"] == 5 and run.end["reason"] == "done"
    assert (run.header["rank"], run.header["world_size"]) == (1, 2)
    assert [(row["step"], row["layer"]) for row in run.rows] == [
        (step, layer) for step in (0, 5, 10) for layer in ("0", "2", "5")
    ]
    losses = [float.fromhex(line.split()[1]) for line in output.splitlines()[1:13:5]]
    assert [row["loss"] for row in run.rows[::3]] == pytest.approx(losses, rel=1e-6)
    assert note.startswith("Note: 3 of 12 steps sampled, 9 lines in run.rank1.ndjson, ")
    assert note.endswith("; see `hookscope watch --show run.rank1.ndjson`\n")


EVERYTHING = """
import atexit, io, os, pickle, signal, sys, warnings

class Numbers:
    def __len__(self): return 4
    def __getitem__(self, at): return float(at)

def main():
    print(sys.argv, sys.path, __name__, __file__, __spec__ and __spec__.name, sys.modules["__main__"].main is main)
    print("torch" in sys.modules, sys.stdout.errors, sys.stderr.errors, sys.stdout.line_buffering, warnings.filters)
    print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)])
    print(warnings.showwarning.__module__, sys.warnoptions, sys.flags)
    print(sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getrecursionlimit(), sorted(os.environ))
    import torch
    from torch.utils.data import DataLoader
    for how in ("fork", "spawn"):
        print([x.tolist() for x in DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context=how)])
    child = os.fork()
    if not child:
        print("in a child")
        sys.exit(5)
    print(os.waitpid(child, 0)[1])
    warnings.warn("look")
    torch.manual_seed(0)
    net = Net(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    os.chdir("deep")
    for _ in range(3):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save((net, optimizer.state_dict()), file)
    file.seek(0)
    print(type(torch.load(file, weights_only=False)[0]) is Net, pickle.loads(pickle.dumps(net)), torch.rand(1))
    print(torch.__spec__.name, torch.__loader__ is torch.__spec__.loader, vars(torch.__loader__))
    print([getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path])
    atexit.register(print, "at exit")
    try:
        fails(net)
    finally:
        print("finally")

def fails(net):
    import torch
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return 2 * x
        @staticmethod
        def backward(ctx, gradient): raise RuntimeError("no way back")
    Twice.apply(net(torch.ones(1, 2))).sum().backward()

if __name__ == "__main__":
    from torch import nn
    class Net(nn.Linear): pass
    main()
"""


@NEEDS_POSIX
def test_a_watched_script_finds_nothing_changed_and_its_exception_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    options = ("--every", "1", "--")  # with all hooks on
    status, output, errors, [note] = both(tmp_path, script(tmp_path, EVERYTHING), "a b", options=options)
    assert status == 1 and output.endswith("finally\nat exit\n") and "in a child" in output
    assert "UserWarning: look" in errors and errors.endswith("RuntimeError: no way back\n")
    assert "3 of 3 steps sampled" in note
    log = lines(tmp_path / "hookscope.ndjson")
    assert len(log) == 2 + 3 and log[-1]["reason"] == "exception"  # nothing of the child


@SLOW
def test_a_module_is_watched(tmp_path: Path) -> None:
    script(tmp_path, TRAIN, "package/train.py")
    assert both(tmp_path, "-m", "package.train", "0", "-m", "x", options=["--every", "5"])[0] == 0


CHEAP = {
    "status": "import sys; print('x'); sys.exit(3)",
    "text": "import sys; sys.exit('that is all')",
    "at once": "import os; os._exit(7)",
    "error": "def f():\n    1 / 0\nf()",
    "syntax": "print('a')\nx = = 2\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print(a[1], a[2].tb_next)\n1/0",
    "interrupt": "try: raise KeyboardInterrupt\nfinally: print('finally')",
    "terminated": "import os, signal\ntry: os.kill(os.getpid(), signal.SIGTERM)\nfinally: print('no')",
    "hung up": "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)",
    "warning": "import warnings\nwarnings.warn('look')\nwarnings.warn('old', DeprecationWarning)",
    "surrogate": "print('\\udcff')",
    "own error": "from hookscope.errors import NonFiniteError\nraise NonFiniteError('mine')",
    "closed": "import sys\nsys.stdout.close()",
    "end": "import atexit, threading, time\n"
    "class A:\n    def __del__(self): print('deleted', flush=True)\n"
    "a = A()\natexit.register(print, 'at exit')\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')",
}


@NEEDS_POSIX
@pytest.mark.parametrize("name", CHEAP)
def test_a_script_ends_as_without(tmp_path: Path, name: str) -> None:
    notes = both(tmp_path, script(tmp_path, CHEAP[name]))[-1]
    killed = name in ("at once", "terminated", "hung up")
    assert (tmp_path / "hookscope.ndjson").exists() == killed
    assert notes == ["Note: train.py did not import torch: there was nothing to watch\n"] * (not killed)


@NEEDS_POSIX
def test_what_a_script_sets_before_torch_counts_and_a_log_may_be_a_pipe(tmp_path: Path) -> None:
    text = (
        "import os, sys\nassert 'torch' not in sys.modules\nos.environ['OMP_NUM_THREADS'] = '2'\n"
        f"{NET}\nprint(torch.get_num_threads())\nfor _ in train(12): pass"
    )
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", "pipe"], cwd=tmp_path, stdout=subprocess.PIPE) as reader:
        status, output, _, [note] = watched(tmp_path, "--every", "5", "--log", "pipe", script(tmp_path, text))
        read, _ = reader.communicate(timeout=60)
    assert (status, output) == (0, "2\n") and len(read.splitlines()) == 2 + 3 * 6
    assert note == "Note: 3 of 12 steps sampled, in pipe\n"  # nobody can show it from there


def test_a_script_without_steps_says_so_and_names_options_that_went_to_it(tmp_path: Path) -> None:
    from hookscope.cli.commands.watch_run import WatchRun
    from hookscope.system import Script

    options = {"every": 1, "layers": ("all",), "types": ("all",), "stop_on": None}
    for words, hint in (
        ((), ""),
        (("-v", "--every=5"), "; --every=5 went to the script: options of watch go before it"),
    ):
        run = WatchRun(Script(("train.py", *words), "file", "train.py"), str(tmp_path / "log"), None, options, 0, 1)
        run._enter()
        assert run._close() == f"Note: no optimizer of torch took a step in train.py: there was nothing to watch{hint}"


STOPS = f"""
import atexit
{NET}
atexit.register(print, "at exit")
try:
    for step, loss in train(12):
        print(step)
        if step == 6:
            with torch.no_grad():
                net[0].weight[0] = float("nan")
finally:
    print("finally")
"""


def test_a_run_stops_at_the_first_nan(tmp_path: Path) -> None:
    options = ("--every", "5", "--stop-on", "non-finite")
    status, output, errors, _ = watched(tmp_path, *options, script(tmp_path, STOPS))
    assert status == 3 and output.split()[-3:] == ["finally", "at", "exit"]
    [line] = errors.splitlines()
    assert line.startswith("Error: ") and "0" in line
    assert lines(tmp_path / "hookscope.ndjson")[-1]["reason"] == "stopped"


CAUGHT = f"""
{NET}
net[0].weight.data[0] = float("nan")
for step in range(3):
    try:
        list(train(1))
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_script_that_catches_everything_ends_with_the_status_of_a_stop(tmp_path: Path) -> None:
    status, output, errors, _ = watched(tmp_path, "--stop-on", "non-finite", script(tmp_path, CAUGHT))
    assert (status, output) == (3, "NonFiniteError\n" * 3)
    assert errors.startswith("Error: step 0: ") and errors.count("\n") == 1


ENDLESS = f"""
import itertools
{NET}
for step, loss in train(10**9):
    print(step, flush=True)
"""


@NEEDS_POSIX
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=SLOW), signal.SIGINT])
def test_a_run_that_is_killed_leaves_what_was_sampled(tmp_path: Path, number: int) -> None:
    words = [sys.executable, "-m", "hookscope", "watch", "--every", "1", script(tmp_path, ENDLESS)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, **streams) as process:  # type: ignore[call-overload]
        while process.stdout.readline() not in (b"20\n", b""):
            pass
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == -number
    [run] = read_runs(tmp_path / "hookscope.ndjson")
    steps = [row["step"] for row in run.rows]
    assert set(steps) >= set(range(20)) and steps.count(4) == 6  # whole lines of every layer
    assert (run.end is not None) == (number == signal.SIGINT)
    assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT) and b"hookscope/" not in errors


LOST = {
    "deleted": ("import os; os.remove('logs/run.ndjson')", "it was removed"),
    "closed and given out again": (
        "import os; os.closerange(3, 256); files = [open(f'mine{n}', 'w') for n in range(20)]",
        "somebody closed it",
    ),
    "closed": ("import os; os.closerange(3, 256)", "somebody closed it"),
    "folder gone": ("import shutil; shutil.rmtree('logs')", "it was removed"),
}


@NEEDS_POSIX
@pytest.mark.parametrize("how", [*list(LOST)[:2], *(pytest.param(how, marks=SLOW) for how in list(LOST)[2:])])
def test_a_script_that_takes_the_log_away_is_told_once_and_goes_on(
    tmp_path: Path, trained: tuple[int, str, str], how: str
) -> None:
    statement, reason = LOST[how]
    (tmp_path / "logs").mkdir()
    options = ("--every", "1", "--log", "logs/run.ndjson", "--")
    *same, notes = watched(tmp_path, *options, script(tmp_path, TRAIN), statement, *WORDS)
    assert tuple(same) == trained
    assert len([note for note in notes if "logs/run.ndjson" in note and reason in note]) == 1 and len(notes) <= 2
    assert not any(path.stat().st_size for path in tmp_path.glob("mine*"))


@NEEDS_POSIX
def test_a_log_that_another_run_holds_is_refused_before_anything_runs(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "hookscope.ndjson")
    status, output, errors, _ = watched(tmp_path, script(tmp_path, "print('it ran')"))
    log.close()
    assert (status, output, errors.count("\n")) == (1, "", 1) and "another run is writing to it" in errors


REFUSED = {
    "no script": (["trian.py"], 2, "cannot open the script trian.py: No such file or directory; nearest: train.py"),
    "no module": (["-m", "trian"], 1, "no module named trian; nearest: train"),
    "a launcher": (["--", "torchrun", "train.py"], 2, "torchrun would run the script unwatched"),
    "no words": ([], 2, "there is no script to watch; hookscope watch"),
    "no folder": (["--log", "no/run.ndjson", "train.py"], 1, "its folder does not exist"),
    "a folder": (["--log", "folder", "train.py"], 1, "cannot write folder: Is a directory"),
    "the script as log": (["--log", "train.py", "train.py"], 1, "train.py: it holds something else"),
    "a selection": (["--layer", "re:[", "train.py"], 2, "bad regular expression '['"),
    "never": (["--every", "0", "train.py"], 2, "0 is not in the range"),
    "both": (
        ["--show", "run.ndjson", "train.py"],
        2,
        "--show runs no script, but train.py is one; leave one of them out",
    ),
    "a plot of a script": (["--plot", "run.png", "train.py"], 2, "--plot needs --show"),
    "a plot of nothing": (["--plot", "run.png"], 2, "--plot needs --show"),
    "a log of a log": (["--show", "run.ndjson", "--every", "2"], 2, "--every needs a script"),
    "no log": (["--show", "rum.ndjson"], 1, "no log 'rum.ndjson': No such file or directory; there is run.ndjson"),
    "no log at all": (["--show", "train.py"], 1, "'train.py' is no log of a run"),
    "an empty log": (["--show", "empty.ndjson"], 1, "'empty.ndjson' holds no run yet"),
    "ranks": (["--show", "many.ndjson"], 1, "there is many.rank0.ndjson, many.rank1.ndjson"),
    "a strange plot": (["--show", "run.ndjson", "--plot", "run.txt"], 2, "plots are PNG, SVG or PDF files"),
    "a plot over a log": (["--show", "run.png", "--plot", "run.png"], 1, "it is the log run.png itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_told_in_one_line_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    from hookscope.cli.main import main

    words, status, told = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for file in ("empty.ndjson", "many.rank0.ndjson", "many.rank1.ndjson"):
        (tmp_path / file).touch()
    written(tmp_path / "run.ndjson")
    written(tmp_path / "run.png")
    text = script(tmp_path, "raise AssertionError('it ran')")
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as caught:
        main(["watch", *words])
    output, errors = capsys.readouterr()
    assert (caught.value.code, output, errors.count("\n")) == (status, "", 1) and told in errors, errors
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == before, text


HEADER = {
    "row": "run", "started": "2026-11-21T20:00:00+00:00", "hookscope": "0", "torch": "2", "every": 50, "rank": 0,
    "command": ["train.py", "--epochs", "3"], "world_size": 1, "pid": 1, "layers": ["all"], "types": ["all"],
}  # fmt: skip
END = {"row": "end", "step": 240, "time": 75.0, "sampled": 5, "reason": "exception", "status": 1}


def written(path: Path, *more: dict[str, Any], dead: bool = True) -> Path:
    """A log of five sampled steps and two layers, the second of which dies at step 100."""
    rows = [
        {"row": "layer"}
        | row(step, f"relu{at}", at, type="ReLU", activation_mean=0.5, channels=8, loss=2.0 - step / 200)
        | {"dead_channels": 8 * (dead and at == 1 and step >= 100)}
        for step in range(0, 250, 50)
        for at in (0, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [HEADER, *rows, *more]))
    return path


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints for words, when it is done with status 0."""
    from hookscope.cli.main import main

    def shown(*words: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["watch", "--show", *words])
        output, errors = capsys.readouterr()
        assert (caught.value.code, errors) == (0, "")
        return output

    return shown


def test_a_table_tells_the_run_and_its_findings(tmp_path: Path, shown: Any) -> None:
    text = shown(str(written(tmp_path / "run.ndjson", END)), "--format", "table")
    [head, line] = text.splitlines()[:2]
    assert head.split() == ["step", "last_step", "time", "finding", "layer"]
    assert line.split() == ["100", "200", "10", "dead-layer", "relu1"]
    assert "train.py --epochs 3, started 2026-11-21T20:00:00+00:00, every 50 steps\n" in text
    assert "241 steps, 5 sampled, of 2 layers in 1 min 15 s; loss 2 -> 1; ended by an exception with status 1\n" in text
    assert "1 finding\n  dead-layer  relu1: from step 100" in text


def test_a_run_without_findings(tmp_path: Path, shown: Any) -> None:
    log = str(written(tmp_path / "run.ndjson", END, dead=False))
    assert shown(log, "--format", "table").endswith("\n\nno findings\n")
    assert shown(log, "--format", "tsv").count("\n") == 1


def test_a_run_that_goes_on(tmp_path: Path, shown: Any) -> None:
    log = written(tmp_path / "run.ndjson")
    with log.open("a") as stream:
        stream.write('{"row": "layer", "st')
    os.utime(log, (time.time() - 90, time.time() - 90))
    text = shown(str(log), "--format", "table")
    assert re.search(r"it still runs, or was killed; last written to 1 min 3\d s ago\n", text)


def test_the_last_run_is_shown(tmp_path: Path, shown: Any) -> None:
    first, second = written(tmp_path / "a", END), written(tmp_path / "b", END, dead=False)
    log = tmp_path / "run.ndjson"
    log.write_text(first.read_text() + second.read_text())
    text = shown(str(log), "--format", "table")
    assert "the last of 2 runs in the log" in text and "no findings" in text


def test_the_formats_for_programs(tmp_path: Path, shown: Any) -> None:
    from hookscope.cli.commands.watch_show import FIELDS

    log = str(written(tmp_path / "run.ndjson", END))
    whole = json.loads(shown(log, "--format", "json"))
    assert whole["run"]["every"] == 50 and whole["run"]["status"] == 1
    assert [(layer["layer"], layer["step"], layer["dead_channels"]) for layer in whole["layers"]] == [
        ("relu0", 200, 0), ("relu1", 200, 8),
    ]  # fmt: skip
    [found] = whole["findings"]
    assert (found["finding"], found["step"], found["time"], found["layers"]) == ("dead-layer", 100, 10.0, ["relu1"])
    [line] = shown(log, "--format", "ndjson").splitlines()
    assert json.loads(line) == {name: found[name] for name in FIELDS}
    header, values = shown(log).splitlines()
    assert header.split("\t") == list(FIELDS) and values.split("\t")[:5] == ["100", "200", "10.0", "true", "dead-layer"]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_curves_are_drawn(tmp_path: Path, shown: Any, suffix: str) -> None:
    plot = tmp_path / f"run{suffix}"
    shown(str(written(tmp_path / "run.ndjson", END)), "--plot", str(plot))
    assert plot.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    if suffix == ".png":
        from hookscope.drawing.png import read_provenance

        told = read_provenance(plot)
        assert told["run"]["command"] == ["train.py", "--epochs", "3"]
        assert [found["layer"] for found in told["findings"]] == ["relu1"]


def test_showing_imports_no_torch(tmp_path: Path) -> None:
    log = written(tmp_path / "run.ndjson", END)
    code = (
        "import sys\nfrom hookscope.cli.main import main\ntry: main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    assert ended(tmp_path, "-c", code, "watch", "--show", str(log))[2] == "False\n"
