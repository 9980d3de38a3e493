"""What a well-behaved process sees to around its work: its streams, its signals, its warnings."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO

from hookscope.cli.output.rows import note
from hookscope.errors import WriteError

# Torch's threads (GNU's OpenMP) wait for work by spinning, for milliseconds beside all that one thread does alone. A
# thousand turns last from one parallel part of a network to the next: passes take as long, and less processor time.
_SPIN_COUNT = "1000"


def standard_output() -> TextIO:
    """Standard output, ready for any name; also a standard error that is always there."""
    if sys.stderr is None:  # `2>&-`: without this the next file opened is number 2, and libraries write into it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (open to the end of the process)
    if sys.stdout is None:
        raise WriteError("standard output is closed", do="run without `>&-`, or send it to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name may hold what the terminal's encoding does not
            stream.reconfigure(errors="backslashreplace")
    return sys.stdout


def streams_as_now() -> Callable[[], None]:
    """What puts standard output and standard error back as they are now, before `standard_output` readies them."""
    stdout, stderr = sys.stdout, sys.stderr
    errors = [(stream, stream.errors) for stream in (stdout, stderr) if hasattr(stream, "reconfigure")]

    def put_back() -> None:
        sys.stdout, sys.stderr = stdout, stderr
        for stream, how in errors:
            stream.reconfigure(errors=how)

    return put_back


def reader_is_gone() -> bool:
    """Whether the broken pipe is standard output: one to a server or a worker is no quiet end."""
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
    """A reader of standard output that has seen enough ends what is written, not the run and its exit status."""
    try:
        yield
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        drop_output()


def drop_output(stream: TextIO | None = None) -> None:
    """Let a stream (standard output) lead nowhere, or the interpreter flushes it at its end and exits with 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, (stream or sys.stdout).fileno())
        os.close(nowhere)


def settle_output() -> None:
    """Bring out what is still held back; where that fails, let it go: what went wrong has been told."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            drop_output(stream)


def import_torch() -> None:
    """Import torch and torchvision with the garbage collector paused.

    Importing makes hundreds of thousands of objects that stay; looking through them again and again takes a seventh
    of the import's processor time.
    """
    if "torchvision" in sys.modules:
        return
    spins = "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if spins:
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
    paused = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torchvision")
    finally:
        if paused:
            gc.enable()
        if spins:  # read when torch's library was loaded; what a person's model starts need not inherit it
            del os.environ["GOMP_SPINCOUNT"]


@contextlib.contextmanager
def prints_to_standard_error() -> Iterator[None]:
    """What a person's model prints while it is built or runs goes to standard error: standard output is for results.

    The descriptor is turned too, for what a subprocess or a C library writes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with contextlib.suppress(OSError, ValueError, AttributeError):
            number = sys.__stdout__.fileno()  # type: ignore[union-attr]
            kept = os.dup(number)
            stack.callback(os.close, kept)
            os.dup2(sys.stderr.fileno(), number)
            stack.callback(os.dup2, kept, number)
        yield


def leave(status: int) -> NoReturn:
    """End the process without taking the interpreter apart object by object.

    With torch loaded that costs as much processor time as a forward pass, and the system frees it all at once.
    Exit handlers run, and what was printed has been flushed.
    """
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    settle_output()
    os._exit(status)


@contextlib.contextmanager
def signals_as_exits() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as an exit, so that every ``finally`` runs and no temporary file stays."""
    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores it: leave it so
                old[number] = signal.signal(number, _exit_by_signal)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _exit_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Python warnings as one line on standard error, each text once, without the file and line of some library."""
    seen: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if text not in seen:
            seen.add(text)
            note(f"Warning: {text}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
