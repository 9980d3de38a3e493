"""The streams, signals and warnings of the process, its progress bars, and its quick start and end."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO

from hookscope.cli.output.formats import Output, note
from hookscope.cli.progress import ERASE, SHOW_CURSOR, is_terminal
from hookscope.errors import OutputNote, WriteError
from hookscope.system import remove_unfinished

# Limits the spin-waiting of OpenMP threads: a pass takes the same wall time and less processor time.
_SPIN_COUNT = "1000"
_OBJECTS_BEFORE_A_SCAN = 200_000


def standard_output() -> TextIO:
    """Standard output, which accepts any character; a closed standard error becomes the null device."""
    if sys.stderr is None:  # `2>&-`: else the next open file is number 2, and libraries write errors into it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (open to the end of the process)
    if sys.stdout is None:
        raise WriteError("standard output is closed", do="run without `>&-`, or send it to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # the encoding of the terminal may lack characters of a name
            stream.reconfigure(errors="backslashreplace")
    return sys.stdout


def command_line() -> str:
    """The command line of this run, for a shell."""
    return shlex.join(["hookscope", *Output.now.argv])


def streams_as_now() -> Callable[[], None]:
    """A function that restores standard output and standard error to what they are now."""
    stdout, stderr = sys.stdout, sys.stderr
    errors = [(stream, stream.errors) for stream in (stdout, stderr) if hasattr(stream, "reconfigure")]

    def put_back() -> None:
        sys.stdout, sys.stderr = stdout, stderr
        for stream, how in errors:
            stream.reconfigure(errors=how)

    return put_back


def reader_is_gone() -> bool:
    """Whether standard output is the broken pipe; another broken pipe is an error."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return True
    import select

    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let the run and its exit status go on when the reader closes standard output."""
    try:
        yield
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        drop_output()


def drop_output(stream: TextIO | None = None) -> None:
    """Send a stream (standard output) to the null device; else the interpreter fails to flush it and exits with 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, (stream or sys.stdout).fileno())
        os.close(nowhere)


def settle_output() -> None:
    """Flush both streams; a stream that cannot be written is dropped, because its error has been reported."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            drop_output(stream)


def start_quickly() -> Callable[[], None]:
    """Make the import of torch and short parallel steps cheaper; returns a function that restores the settings.

    The import creates hundreds of thousands of permanent objects. The garbage collector would scan them repeatedly,
    which takes a seventh of the processor time of the import.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BEFORE_A_SCAN)
    spins = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if spins:
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT

    def put_back() -> None:
        gc.set_threshold(*thresholds)
        if spins:
            os.environ.pop("GOMP_SPINCOUNT", None)

    return put_back


def with_large_stack(call: Callable[..., Any], *args: Any) -> Any:
    """Call ``call`` with room for the frames of all nested calls.

    Python keeps frames in chunks of 16 KiB, and maps and unmaps a chunk whenever a call crosses its end. An import of
    torch at an unlucky depth does so 20,000 times, which takes 0.1 s. A frame that needs more gets a chunk of 1 MiB.
    """
    return call(*args)


with_large_stack.__code__ = with_large_stack.__code__.replace(co_stacksize=70_000)


@contextlib.contextmanager
def prints_to_standard_error() -> Iterator[None]:
    """Send what a model prints to standard error, because standard output is for results.

    The file descriptor is redirected too, for subprocesses and C libraries.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with contextlib.suppress(OSError, ValueError, AttributeError):
            number = sys.__stdout__.fileno()  # type: ignore[union-attr]
            saved = os.dup(number)
            stack.callback(os.close, saved)
            os.dup2(sys.stderr.fileno(), number)
            stack.callback(os.dup2, saved, number)
        yield


def leave(status: int) -> NoReturn:
    """Run the exit handlers, flush the output and end the process without freeing each object.

    With torch loaded, that would cost as much processor time as a forward pass.
    """
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    settle_output()
    os._exit(status)


_PATIENCE = 1.5  # seconds that the main thread may take to see a signal
_seen = threading.Event()  # a handler has run
_pipes: list[int] = []  # where Python writes the number of each signal at once
ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def signals_as_exits() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit, so that every ``finally`` runs and no temporary file stays.

    Python runs handlers between two instructions of the main thread. If a library keeps it inside one call, such as a
    pass of onnxruntime, a thread ends the process.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return
    guarded = os.name == "posix"  # elsewhere a pipe cannot be told not to block
    old: dict[int, Any] = {}
    usual = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(ENDING_SIGNALS, signal.SIG_DFL)}
    for number, handler in usual.items():
        if signal.getsignal(number) is handler:  # `nohup` ignores SIGHUP, and still does
            old[number] = signal.signal(number, _end_by_signal)
    if guarded:
        _seen.clear()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        _pipes.append(writer)
        threading.Thread(target=_end_if_unseen, args=(reader,), daemon=True).start()
    try:
        yield
    finally:
        if guarded:
            signal.set_wakeup_fd(before)
            os.close(_pipes.pop())
        for number, handler in old.items():
            signal.signal(number, handler)


def _end_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    _seen.set()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _end_if_unseen(reader: int) -> None:
    """Read the number of each signal; end the process if none of the handlers runs in time."""
    with open(reader, "rb", buffering=0) as signals:
        while arrived := signals.read(1):
            # a library may have set its own handler, and `signals_held` sends the signal again
            if signal.getsignal(arrived[0]) is not _end_by_signal:
                continue
            if _seen.wait(_PATIENCE):
                _seen.clear()
            else:
                remove_unfinished()
                if is_terminal(sys.stderr):
                    os.write(2, f"{ERASE}{SHOW_CURSOR}".encode())
                os._exit(128 + arrived[0])


if hasattr(os, "register_at_fork"):  # signals of a process that was forked off do not concern its parent
    os.register_at_fork(after_in_child=lambda: _pipes and signal.set_wakeup_fd(-1))


@contextlib.contextmanager
def quiet_matplotlib() -> Iterator[None]:
    """Drop the two lines in which matplotlib says that it cannot write in the user's home: it works without."""
    if os.access(os.path.expanduser("~"), os.W_OK):
        yield
        return
    import logging  # takes 4 ms

    def is_shown(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("mkdir -p failed", "Matplotlib created a temporary"))

    logging.getLogger("matplotlib").addFilter(is_shown)
    try:
        yield
    finally:
        logging.getLogger("matplotlib").removeFilter(is_shown)


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print each Python warning once, in one line on standard error, without file and line."""
    texts: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if text not in texts:
            texts.add(text)
            note(f"{'Note' if isinstance(message, OutputNote) else 'Warning'}: {text}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", OutputNote)
        warnings.filterwarnings("ignore", "Using a non-tuple sequence")  # for tensor["name"], which fails then
        warnings.showwarning = show
        yield
