"""Every way a run can end has its status, and at most one line of words."""

import io
import logging
import os
import re
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest

from hookscope.cli import main as main_module
from hookscope.cli.command import TOPICS, Command, GroupedCommand, own_options, shared_options
from hookscope.cli.main import COMMANDS, MOVED, cli, main
from hookscope.cli.output.formats import Output, note
from hookscope.cli.process import quiet_matplotlib, signals_as_exits, with_large_stack
from hookscope.cli.shared.options import threshold_rows
from hookscope.errors import LayerError, UsageError
from tests.cli.helpers import POSIX, ROOT

FAKE = '''
import sys, time, warnings
from hookscope.cli.command import Command
from hookscope.cli.fields import argument
from hookscope.cli.output.formats import Report, Section
from hookscope.columns import Columns
from hookscope.cli.output.formats import write_report
from hookscope.errors import LayerError

class Fake(Command):
    """Do as told."""
    what: str = argument("WHAT")
    def run(self):
        do(self.what)

def do(what):
    if what == "rows":
        write_report(Report([Section(({"i": i} for i in range(100_000)), Columns("i"))]), "tsv")
    if what == "json":
        write_report(Report([Section(({"i": i} for i in range(100_000)), Columns("i"))]), "json")
    if what == "print":
        print("x")
    if what == "fail":
        print("x")
        raise LayerError("no layer 'a'")
    if what == "otherpipe":
        raise BrokenPipeError(32, "Broken pipe")
    if what == "sleep":
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("finally", file=sys.stderr)
    if what == "native":
        import ctypes, os
        from hookscope.system import replacement
        with replacement(os.environ["PLACE"] + "/picture.png"):
            if not os.fork():  # its signals are its own
                time.sleep(0.1)
                os.kill(os.getpid(), 15)
            mutex = ctypes.create_string_buffer(64)
            lock = ctypes.CDLL(None).pthread_mutex_lock
            print("ready", flush=True)
            lock(mutex), lock(mutex)  # a mutex waits for ever for itself, and for no signal
'''
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from hookscope.cli import main
main.COMMANDS["fake"] = "fake_command"
main.main()
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Make a function the command ``fake``, in place of all others."""

    def install(function: Callable[[], Any]) -> None:
        module = types.ModuleType("fake_command")
        about = {"__doc__": "Do as told.\n\nAnd more.", "__module__": "fake_command", "run": lambda self: function()}
        module.Fake = type("Fake", (Command,), about)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setattr(main_module, "COMMANDS", {"fake": "fake_command"})

    return install


@pytest.fixture
def run(fake: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run hookscope on the words with a function as its command ``fake``: status, output, errors."""

    def run(function: Callable[[], Any], *words: str, alone: bool = False) -> tuple[int, str, str]:
        fake(function)
        with pytest.raises(SystemExit) as caught:
            main([] if alone else words or ["fake"])
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capsys.readouterr()

    return run


def raising(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def nothing() -> None:
    """Do nothing."""


def around() -> list[Any]:
    """What hookscope sets up around a command."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return [*handlers, warnings.showwarning, sys.stdout, sys.stdout.errors, sys.stderr, sys.stderr.errors]


def test_what_a_command_returns_runs_when_all_is_put_back(run: Any) -> None:
    states: list[list[Any]] = []

    def command() -> Callable[[], None]:
        states.append(around())
        return lambda: states.append(around())

    before = around()
    assert run(command) == (0, "", "")
    assert len(states) == 2 and states[0] != before and states[1] == before
    assert run(lambda: lambda: sys.exit(7)) == (7, "", "")
    with pytest.raises(LayerError):
        run(lambda: raising(LayerError("its own")))


def test_nothing_is_run_afterwards_when_the_output_is_lost(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        status, _, errors = run(lambda: raising(AssertionError("it ran")))
    assert (status, errors) == (1, "Error: cannot write standard output: No space left on device\n")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (LayerError("no layer 'a'", "nearest: b", "see list"), 1, "Error: no layer 'a'; nearest: b; see list"),
        (LayerError("no layer 'a\x1b[2J\n'"), 1, "Error: no layer 'a\\x1b[2J\\n'"),
        (UsageError("cannot read '1:2:3:4'"), 2, "Error: cannot read '1:2:3:4'"),
        (TypeError("first\nsecond"), 1, "Error: unexpected TypeError: first; run again with --traceback and report it"),
        (ZeroDivisionError(), 1, "Error: unexpected ZeroDivisionError; run again with --traceback and report it"),
        (
            PermissionError(13, "Permission denied", "a.txt"),
            1,
            "Error: unexpected PermissionError: [Errno 13] Permission denied: 'a.txt'; "
            "run again with --traceback and report it",
        ),
        (OSError(28, "No space left on device"), 1, "Error: cannot write standard output: No space left on device"),
        (MemoryError(), 1, "Error: out of memory; try a smaller image, a smaller model or fewer layers"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: ..."),
            1,
            "Error: out of memory; try a smaller image, a smaller model or fewer layers",
        ),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            1,
            "Error: the package torch is not installed; pip install torch",
        ),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
        (click.exceptions.Exit(3), 3, ""),
        (SystemExit(143), 143, "Error: ended by SIGTERM"),
        (
            RecursionError("maximum"),
            1,
            "Error: something here is nested too deeply for Python, or holds itself; make it flatter",
        ),
        (SystemExit(None), 0, ""),
        (SystemExit("stopped"), 1, "stopped"),
    ],
)
def test_each_error_has_its_status_and_one_line(run: Any, error: BaseException, status: int, line: str) -> None:
    assert run(raising(error)) == (status, "", line + "\n" if line else "")


def test_ten_images_that_fail_have_a_line_and_the_others_a_sum(run: Any) -> None:
    def function() -> int:
        for number in range(20):
            Output.now.image_error(f"image {number}")
        return 1

    lines = [f"Error: image {number}\n" for number in range(10)]
    assert run(function) == (1, "", "".join(lines) + "Error: 10 more images could not be used\n")


def test_a_traceback_shows_control_characters_as_escapes(run: Any) -> None:
    status, _, errors = run(raising(ValueError("a\x1b[2Jb")), "fake", "--traceback")
    assert status == 1 and "ValueError: a\\x1b[2Jb\n" in errors and "\x1b" not in errors


def test_a_broken_pair_is_named_and_a_long_text_cut(run: Any) -> None:
    status, _, errors = run(raising(RuntimeError("operator torchvision::nms does not exist")))
    assert status == 1
    assert errors.count("\n") == 1
    assert "pip install --force-reinstall torch torchvision" in errors
    _, _, errors = run(raising(RuntimeError("x" * 13_000)))
    assert len(errors) < 400


@pytest.mark.parametrize("words", [["--traceback", "fake"], ["fake", "--traceback"]])
def test_traceback_is_shown_wherever_it_is_asked_for(run: Any, words: list[str]) -> None:
    status, _, errors = run(raising(LayerError("no layer 'a'")), *words)
    assert status == 1
    assert errors.startswith("Traceback (most recent call last):\n")
    assert errors.endswith("\nError: no layer 'a'\n")


def test_the_version_names_three_packages_and_traceback_is_added_once(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        _, output, _ = run(nothing, "fake", "--help")
        assert output.count("--traceback") == 1
    versions = {"hookscope": "1.2", "torch": "2.15.0", "torchvision": "missing"}
    monkeypatch.setattr(main_module, "package_versions", lambda: versions)
    assert run(nothing, "--version") == (0, "hookscope 1.2 (torch 2.15.0, torchvision missing)\n", "")


@pytest.mark.parametrize("words", [["-h"], ["--help"], []])
def test_the_help_of_the_program_is_one_screen(run: Any, words: list[str]) -> None:
    status, output, errors = run(nothing, *words, alone=not words)
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert sum(line.startswith("  hookscope ") for line in lines) == 3
    assert all(f"  {title:<8} {', '.join(commands)}" in lines for title, commands in main_module.GROUPS.items())


def test_topics_list_each_command_and_threshold_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["help", "commands"])
    output = capsys.readouterr().out
    for group, commands in main_module.GROUPS.items():
        assert f"{group}:\n" in output
        for name in commands:
            (text,) = re.findall(rf"^  {name} +(.+)$", output, re.MULTILINE)
            assert len(text) <= 60
    with pytest.raises(SystemExit, match="0"):
        main(["help", "findings"])
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name, _ in threshold_rows())


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_explains_each_shared_option(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["help", topic])
    output = capsys.readouterr().out
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for option in shared_options(command.params).get(topic, ()):
            word = max(option.opts, key=len)
            if option.get_help_record(click.Context(command)) is None:  # another option speaks for it
                continue
            assert re.search(rf"^  (?:-\S+, )*{word}\b", output, re.MULTILINE), word


@pytest.mark.parametrize(("name", "word"), [(name, word) for name, words in MOVED.items() for word in words])
def test_an_old_spelling_names_the_new_one(capsys: pytest.CaptureFixture[str], name: str, word: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([name, f"--{word}"])
    new = MOVED[name][word]
    assert (
        capsys.readouterr().err == f"Error: hookscope {name} --{word} is now `{new}`; see `hookscope {name} --help`\n"
    )
    command, option = (
        new.split()[1] if new.startswith("hookscope") else name,
        re.search(r"(?<= )-[-\w]+$|^-[-\w]+$", new),
    )
    options = [] if option is None else [option[0]]
    made = cli.get_command(click.Context(cli), command)
    assert made is not None and set(options) <= {text for parameter in made.params for text in parameter.opts}


def test_help_shows_the_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capsys.readouterr()

    assert printed("help", "graph") == printed("graph", "--help")
    status, whole, _ = printed("help", "cam")
    short = printed("cam", "--help")[1]
    assert status == 0 and short.endswith("\n`hookscope help cam` says more.\n")
    assert "  --smooth            Average the maps of six variants of the image.\n" in short
    assert "  --smooth            Average the maps of six variants of the image: it and\n" in whole
    assert "    hirescam            gradient of each position, without ReLU\n" in whole
    assert "\n  Methods: gradcam, gradcam++, hirescam, " in short
    assert printed("help") == printed("--help")
    assert printed("help", "cma") == (2, "", "Error: no command 'cma'; nearest: cam, compare; see `hookscope --help`\n")


@pytest.mark.parametrize("words", [["fake", "-q"], ["--quiet", "fake"]])
def test_quiet_silences_notes_and_warnings_but_no_error(
    run: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def speak() -> None:
        note("Note: dark")
        warnings.simplefilter("always")
        warnings.warn("take care", stacklevel=1)
        click.echo("a result")
        raise LayerError("no layer 'a'")

    assert run(speak, *words) == (1, "a result\n", "Error: no layer 'a'\n")
    assert run(speak)[2] == "Note: dark\nWarning: take care\nError: no layer 'a'\n"


def test_warnings_are_one_line_each_and_foreign_names_are_escaped(run: Any) -> None:
    def warn() -> None:
        warnings.simplefilter("always")
        for text in ("take\n care\x1b[0m", "take\n care\x1b[0m", "other"):
            warnings.warn(text, stacklevel=1)

    before = warnings.showwarning
    assert run(warn) == (0, "", "Warning: take care\\x1b[0m\nWarning: other\n")
    assert warnings.showwarning is before
    assert run(lambda: click.echo("caf\udce9")) == (0, "caf\\udce9\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_examples_and_fits_eighty_columns_and_two_screens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parent = click.Context(cli, help_option_names=["-h", "--help"])
    command = cli.get_command(parent, name)
    assert command is not None
    assert isinstance(command, GroupedCommand)
    context = click.Context(command, parent=parent, info_name=name)
    short, whole = command.get_help(context), command.whole_help(context)
    assert len(short.splitlines()) <= 48  # two screens of a terminal with 24 lines
    for text in (short, whole):
        _, _, examples, *others = text.split("\n\n")
        assert examples.startswith("  Examples:\n")
        lines = [line for text in others for line in text.splitlines() if not line.startswith("  --method [")]
        assert [line for line in lines if len(line) > 80] == []
    assert len(own_options(command)) <= 20
    told = [option for option in own_options(command) if option.get_help_record(context)]
    assert [option.name for option in told if option.opts[-1] not in short] == []


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start hookscope with the command ``fake`` as a process of its own."""
    (tmp_path / "fake_command.py").write_text(FAKE)
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, shell: str = '"$@"', **more: Any) -> subprocess.Popen[str]:
        command = ["bash", "-c", f"set -o pipefail; {shell}", "-", sys.executable, "-c", PROGRAM, str(tmp_path), *words]
        if shell == '"$@"':  # no shell between: a signal must reach the program itself
            command = command[4:]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        env |= {"PYTHONPATH": str(ROOT), **more}
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


NO_SPACE = "Error: cannot write standard output: No space left on device\n"
CLOSED = "Error: standard output is closed; run without `>&-`, or send it to /dev/null\n"


@POSIX
@pytest.mark.parametrize(
    ("words", "shell", "status", "output", "errors"),
    [
        (["rows"], '"$@" | head -n 1', 0, "i\n", ""),
        (["json"], '"$@" | head -n 1', 0, "[\n", ""),
        (["print"], '"$@" | exec true', 0, "", ""),
        (["rows"], '"$@" > /dev/full', 1, "", NO_SPACE),
        (["print"], '"$@" > /dev/full', 1, "", NO_SPACE),  # which only the last flush finds out
        (["fail"], '"$@" > /dev/full', 1, "", "Error: no layer 'a'\n"),
        (["--version"], '"$@" > /dev/full', 1, "", NO_SPACE),
        (["print"], '"$@" >&-', 1, "", CLOSED),
        (["print"], '"$@" 2>&-', 0, "x\n", ""),
        (["fail"], '"$@" 2> /dev/full', 1, "x\n", ""),
        (["--nonsense"], '"$@" 2> /dev/full', 2, "", ""),
        (["otherpipe"], '"$@" | cat', 1, "", "unexpected BrokenPipeError"),
    ],
)
def test_streams_that_fail(process: Any, words: list[str], shell: str, status: int, output: str, errors: str) -> None:
    if "/dev/full" in shell and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    command = words if words[0].startswith("-") else ["fake", *words]
    child = process(*command, shell=shell)
    printed, notes = child.communicate(timeout=60)
    assert (child.returncode, printed) == (status, output)
    assert notes == errors if not errors.startswith("unexpected") else errors in notes


@POSIX
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_run_the_finally_blocks(process: Any, number: int, status: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("ignored where these tests run, as by nohup, and so by what they start")
    child = process("fake", "sleep")
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    last = "" if number == signal.SIGINT else f"Error: ended by {signal.Signals(number).name}\n"
    assert child.communicate(timeout=60) == ("", f"finally\n{last}")
    assert child.returncode == status


@POSIX
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a mutex")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_call_that_does_not_come_back(process: Any, tmp_path: Path, number: int, status: int) -> None:
    child = process("fake", "native", PLACE=str(tmp_path))
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=2)  # though the process that it forked off got a signal
    child.send_signal(number)
    child.communicate(timeout=4)
    assert child.returncode == status
    assert not list(tmp_path.glob(".hookscope-*"))


def test_the_shell_is_answered_in_silence_when_a_command_is_broken(process: Any, tmp_path: Path) -> None:
    (tmp_path / "fake_command.py").write_text("raise RuntimeError('broken')")
    child = process(_HOOKSCOPE_COMPLETE="bash_complete", COMP_WORDS="hookscope fake ", COMP_CWORD="2")
    assert child.communicate(timeout=60) == ("", "")
    assert child.returncode == 1


def test_calls_of_a_run_share_one_chunk_of_the_stack() -> None:
    assert with_large_stack(divmod, 7, 2) == (3, 1)
    words = with_large_stack.__code__.co_stacksize
    assert words * 8 > 2**19  # more than half of 1 MiB, to which CPython rounds up


@POSIX
def test_signals_end_a_run_by_an_exit_where_a_handler_may_be_set() -> None:
    def changed() -> list[bool]:
        with signals_as_exits():
            return [signal.getsignal(number) is not handler for number, handler in handlers.items()]

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_IGN}  # nohup ignores the second
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        assert changed() == [True, False]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(changed).result() == [False, False]
        assert [signal.getsignal(number) for number in handlers] == [*handlers.values()]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@POSIX
def test_matplotlib_does_not_complain_of_a_home_where_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    logger = logging.getLogger("matplotlib")
    with quiet_matplotlib():
        logger.warning("mkdir -p failed for path %s: %s", "/nowhere/.config/matplotlib", "no such folder")
        logger.warning("bad key in file matplotlibrc")
    logger.warning("Matplotlib created a temporary cache directory")
    assert capsys.readouterr().err == "bad key in file matplotlibrc\nMatplotlib created a temporary cache directory\n"
