"""A watched script does what it does with Python alone; and the log of a run is shown."""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookscope.cli.main import main
from hookscope.cli.shared.watch_run import WatchRun
from hookscope.errors import NonFiniteError, WriteError
from hookscope.training.log.file import read_runs
from hookscope.training.sinks import SinkChoice, TensorBoard
from tests.cli.helpers import ROOT

ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONSAFEPATH")
} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}

RUN = (ROOT / "tests/golden/inputs/run.ndjson").read_text()


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
    assert notes[0].startswith("Note: watching ")
    return status, output, "".join(line for line in errors.splitlines(True) if line not in notes), notes[1:]


def both(folder: Path, *words: str, options: tuple[str, ...] = ("--every", "5", "--")) -> tuple[Any, ...]:
    """Status, output and errors of a script, the same plain and watched; and hookscope's own lines."""
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(ended, folder, *words)
        *same, notes = watched(folder, *options, *words)
        assert tuple(same) == plain.result()
    return *same, notes


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return name


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
    print([x.tolist() for x in DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context="fork")])
    child = os.fork()
    if not child:
        print("in a child")
        sys.exit(5)
    print(os.waitpid(child, 0)[1])
    warnings.warn("look")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Flatten(), Net(144, 3)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    os.chdir("deep")
    for step in range(6):
        images, labels = torch.randn(8, 3, 8, 8), torch.randint(3, (8,))
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item().hex())
    print(*(value.numpy().tobytes().hex() for value in net.state_dict().values()), torch.get_num_threads())
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
    Twice.apply(net(torch.ones(2, 3, 8, 8))).sum().backward()

if __name__ == "__main__":
    from torch import nn
    class Net(nn.Linear): pass
    main()
"""


def test_a_watched_script_trains_to_the_same_bits_and_finds_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    monkeypatch.setitem(ENVIRONMENT, "RANK", "1")
    monkeypatch.setitem(ENVIRONMENT, "WORLD_SIZE", "2")
    options = ("--every", "2", "--log", "run.ndjson", "--type", "all", "--layer", "0,2,5", "--")
    words = (script(tmp_path, EVERYTHING), "a b", "--layer", "x", "--help", "--", "-m")
    status, output, errors, [note] = both(tmp_path, *words, options=options)  # its exception ends a pass with all hooks
    assert status == 1 and output.endswith("finally\nat exit\n") and "in a child" in output
    assert output.startswith(f"{list(words)} ") and "\nFalse " in output  # no torch yet
    assert "UserWarning: look" in errors and errors.endswith("RuntimeError: no way back\n")
    assert [path.name for path in tmp_path.glob("**/*.ndjson")] == ["run.rank1.ndjson"]
    [run] = read_runs(tmp_path / "run.rank1.ndjson")
    assert run.header["command"] == list(words) and run.header["every"] == 2 and run.end["reason"] == "exception"
    assert (run.header["rank"], run.header["world_size"]) == (1, 2)
    assert [(row["step"], row["layer"]) for row in run.rows] == [  # nothing of the child
        (step, layer) for step in (0, 1, 2, 4) for layer in ("0", "2", "5")
    ]
    losses = [float.fromhex(value) for value in re.findall("^loss (.*)$", output, re.MULTILINE)]
    assert [row["loss"] for row in run.rows[::3]] == pytest.approx([losses[step] for step in (0, 1, 2, 4)], rel=1e-6)
    assert note.startswith("Note: 4 of 6 steps sampled, 12 lines in run.rank1.ndjson; ")
    assert note.endswith("; see `hookscope show-run run.rank1.ndjson`\n")


WITHOUT_TORCH = {
    "text": "import sys; sys.exit('that is all')",
    "at once": "import os; os._exit(7)",
    "interrupt": "try: raise KeyboardInterrupt\nfinally: print('finally')",
    "terminated": "import os, signal\ntry: os.kill(os.getpid(), signal.SIGTERM)\nfinally: print('no')",
    "surrogate": "print('\\udcff')",
    "own error": "from hookscope.errors import NonFiniteError\nraise NonFiniteError('mine')",
    "closed": "import sys\nsys.stdout.close()",
    "end": "import atexit, threading, time\n"
    "class A:\n    def __del__(self): print('deleted', flush=True)\n"
    "a = A()\natexit.register(print, 'at exit')\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')",
}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_a_script_ends_as_it_does_unwatched(tmp_path: Path, name: str) -> None:
    notes = both(tmp_path, script(tmp_path, WITHOUT_TORCH[name]))[-1]
    is_killed = name in ("at once", "terminated")
    assert (tmp_path / "hookscope.ndjson").exists() == is_killed
    assert notes == ["Note: train.py did not import torch: there was nothing to watch\n"] * (not is_killed)


def test_a_module_has_all_words_after_its_name(tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(sys.argv, __package__)", "package/train.py")
    status, output, *_ = both(tmp_path, "-m", "package.train", "0", "-m", "x", options=("--every", "5"))
    assert status == 0 and output.endswith("'0', '-m', 'x'] package\n")


class FunctionAsScript:
    name = "train.py"

    def __init__(self, run: Callable[[], object], *arguments: str) -> None:
        self.run, self.words = run, ("train.py", *arguments)


def watched_here(log: Path, script: FunctionAsScript, *sinks: SinkChoice, **options: Any) -> WatchRun:
    """A run that was watched in this process, with all that happens at its exit."""
    settings = {
        "every": 1,
        "layers": ("all",),
        "types": ("all",),
        "stop_on": None,
        "reference": None,
        "histograms": None,
    } | options
    run = WatchRun(script, str(log), sinks, settings, 0, 1)
    try:
        run.run()
    finally:
        atexit.unregister(run._end)
        run._end()
    return run


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What a run in this process has said after its first line."""
    first, _, rest = capsys.readouterr().err.partition("\n")
    assert first.startswith("Note: watching train.py, log in ")
    return rest


@pytest.mark.parametrize(
    ("words", "hint"),
    [((), "")]
    + [
        (words, "; --every=5 went to the script: options of watch go before it")
        for words in (("--every=5",), ("-v", "--every=5"))
    ],
)
def test_a_script_without_steps_says_so_and_names_options_that_went_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], hint: str
) -> None:
    watched_here(tmp_path / "log", FunctionAsScript(lambda: None, *words))
    note = f"Note: no optimizer of torch took a step in train.py: there was nothing to watch{hint}\n"
    assert said(capsys) == note


def test_a_script_that_catches_the_error_of_a_stop_ends_with_its_status_and_does_not_train_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, steps = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def only_runs() -> None:
        for value in (float("nan"), 1.0, 1.0):
            with pytest.raises(NonFiniteError):
                net(torch.full((1, 1), value))

    def trains() -> None:
        for value in (1.0, float("nan"), 1.0, 1.0):
            try:
                net(torch.full((1, 1), value)).sum().backward()
                optimizer.step()
                steps.append(value)
            except Exception:
                continue

    for number, function in enumerate((only_runs, trains)):
        with pytest.raises(SystemExit) as caught:
            watched_here(tmp_path / f"{number}", FunctionAsScript(function), stop_on="non-finite")
        assert caught.value.code == 3 and steps == [1.0] * number
        text = said(capsys)
        assert text.startswith(f"Error: step {number}: NaN in the input of the model")
        assert ("Note: train.py was stopped before its first step" in text) == (number == 0)
        assert read_runs(tmp_path / f"{number}")[0].end["reason"] == "stopped"


def test_a_run_that_never_steps_points_to_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(1, 1)
    trains = FunctionAsScript(lambda: [net(torch.randn(4, 1)).sum().backward() for _ in range(12)])
    watched_here(tmp_path / "log", trains)
    note = said(capsys)
    assert note.startswith("Note: no optimizer of torch took a step in train.py, ") and "no-step" in note


def three_steps() -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return [parameter.item() for parameter in net.parameters()]


def test_a_sink_that_does_not_open_or_end_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise WriteError("cannot write runs: No space left on device")

    monkeypatch.setattr(TensorBoard, "__init__", fail)
    watched_here(tmp_path / "log", FunctionAsScript(three_steps), SinkChoice.parse(f"tensorboard:{tmp_path / 'runs'}"))
    note = "Note: tensorboard gets no lines, the log goes on: cannot write runs: No space left on device\n"
    assert said(capsys).startswith(note) and len(read_runs(tmp_path / "log")[0].rows) == 3

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorBoard, "close", interrupt)
    watched_here(tmp_path / "log", FunctionAsScript(three_steps), SinkChoice.parse(f"tensorboard:{tmp_path / 'runs'}"))
    assert len(read_runs(tmp_path / "log")[0].rows) == 3 and "Traceback" not in capsys.readouterr().err


def test_a_log_may_be_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, lines = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: lines.extend(pipe.read_text().splitlines()))
    reader.start()
    watched_here(pipe, FunctionAsScript(three_steps))
    reader.join()
    assert [json.loads(line)["row"] for line in lines] == ["run", *["layer", "facts"] * 3, "end"]
    assert said(capsys) == f"Note: 3 of 3 steps sampled, in {pipe}\n"  # nobody can show it from there


WAITS = """
import time, torch
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
print("ready", flush=True)
time.sleep(60)
"""
ENDS = {signal.SIGKILL: None, signal.SIGINT: ("stopped", None), signal.SIGTERM: ("exit", 143)}


def test_what_was_sampled_is_in_the_log_at_once(tmp_path: Path) -> None:
    log, steps = tmp_path / "log", []
    looks = FunctionAsScript(lambda: [three_steps(), steps.extend(row["step"] for row in read_runs(log)[0].rows)])
    watched_here(log, looks)
    assert steps == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("number", ENDS)
def test_a_run_that_is_killed_leaves_what_was_sampled(tmp_path: Path, number: signal.Signals) -> None:
    words = ["-m", "hookscope", "watch", "--every", "1", script(tmp_path, WAITS)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=ENVIRONMENT, **streams) as process:
        while process.stdout.readline() not in (b"ready\n", b""):
            pass
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == -number
    [run] = read_runs(tmp_path / "hookscope.ndjson")
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    assert (run.end and (run.end["reason"], run.end["status"])) == ENDS[number]
    assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT) and b"hookscope/" not in errors


def test_a_script_that_closes_the_log_goes_on_with_one_note(tmp_path: Path) -> None:
    errors, unwatched = tmp_path / "errors", three_steps()

    def closes() -> None:
        assert three_steps() == unwatched
        os.closerange(3, 256)
        files = [open(tmp_path / f"mine{number}", "w") for number in range(20)]  # noqa: SIM115
        assert three_steps() == unwatched and len(files) == 20

    def child() -> None:
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
        watched_here(tmp_path / "log", FunctionAsScript(closes))

    process = get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0, errors.read_text()
    notes = errors.read_text().splitlines()
    assert len([note for note in notes if "log: somebody closed it" in note]) == 1 and len(notes) <= 3, notes
    mine = [path.read_text() for path in tmp_path.glob("mine*")]
    assert len(mine) == 20 and not any('"row"' in text for text in mine), mine


PROCESSES = """
import sys, time
import torch
from torch import multiprocessing, nn

def train(rank, folder, waits=False):
    torch.manual_seed(rank)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    open(f"{folder}/weights{rank}", "wb").write(net.weight.detach().numpy().tobytes())
    if waits:
        open(f"{folder}/ready", "w").close()
        time.sleep(60)

if __name__ == "__main__":
    import os
    context = multiprocessing.get_context("fork")
    child = context.Process(target=train, args=(7, sys.argv[1], True))
    child.start()
    context.Process(target=print, args=("no torch here",)).start()
    multiprocessing.spawn(train, args=(sys.argv[1],))
    while not os.path.exists(sys.argv[1] + "/ready"):
        time.sleep(0.1)
    child.terminate()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.slow
def test_processes_that_the_script_starts_have_a_log_each(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "watched").mkdir()
    name = script(tmp_path, PROCESSES)
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(ended, tmp_path, name, "plain")
        *same, notes = watched(tmp_path, "--every", "2", "--", name, "watched")
        assert tuple(same) == plain.result() and same[0] == 0
    for file in ("weights0", "weights7"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "watched" / file).read_bytes()
    logs = {path.name.split(".")[1]: read_runs(path)[0] for path in sorted(tmp_path.glob("hookscope.process*"))}
    assert {log: (run.end["reason"], run.end["status"]) for log, run in logs.items()} == {
        "process1": ("exit", 143), "process3": ("done", None),
    }  # fmt: skip
    assert all([row["step"] for row in run.rows] == [0, 1, 2] for run in logs.values())
    assert sum("hookscope.process" in note for note in notes) == 1


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command prints of a log, when it is done with status 0."""

    def shown(log: Path, format: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["show-run", str(log), "--format", format])
        output, errors = capsys.readouterr()
        is_flat = format in ("tsv", "csv")  # without the verdict
        assert (caught.value.code, errors.startswith("Note: "), errors.count("\n")) == (0, is_flat, is_flat)
        return output

    return shown


def test_a_missing_log_is_one_of_the_ranks_and_none_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        (tmp_path / f"many.rank{rank}.ndjson").touch()
    (tmp_path / "run.png").write_text(RUN)
    for words, message in (
        ("many.ndjson", f"there is {tmp_path}/many.rank0.ndjson, {tmp_path}/many.rank1.ndjson"),
        (f"run.png --plot {tmp_path}/run.png", f"it is the log {tmp_path}/run.png itself"),
    ):
        with pytest.raises(SystemExit):
            main(["show-run", *f"{tmp_path}/{words}".split()])
        assert message in capsys.readouterr().err and (tmp_path / "run.png").read_text() == RUN


def test_a_run_that_goes_on_is_shown_and_of_several_the_last(tmp_path: Path, shown: Any) -> None:
    log = tmp_path / "run.ndjson"
    log.write_text(RUN.rpartition('{"row": "end"')[0] + '{"row": "layer", "st')
    os.utime(log, (time.time() - 90, time.time() - 90))
    words = " ".join(shown(log, "table").split())
    assert re.search(r"it still runs, or was killed; last written to 1 min 3\d s ago ", words)
    log = tmp_path / "run.ndjson"
    log.write_text(RUN + RUN.splitlines()[0])
    text = shown(log, "table")
    assert "the last of 2 runs in the log" in " ".join(text.split())
    assert text.endswith("\n\nno errors and no warnings because no step was judged\n")
    assert shown(log, "tsv").count("\n") == 1
    with pytest.raises(SystemExit):
        main(["show-run", str(log), "--html", str(tmp_path / "run.html"), "-q"])
    assert ">no errors and no warnings because no step was judged" in (tmp_path / "run.html").read_text()
