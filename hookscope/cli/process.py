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
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

import click

from hookscope.cli.output.formats import Output, note, terminal_columns
from hookscope.errors import OutputNote, WriteError, printable
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
                if _is_terminal(sys.stderr):
                    os.write(2, f"{_ERASE}{_SHOW_CURSOR}".encode())
                os._exit(128 + arrived[0])


if hasattr(os, "register_at_fork"):  # signals of a process that was forked off do not concern its parent
    os.register_at_fork(after_in_child=lambda: _pipes and signal.set_wakeup_fd(-1))


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
        warnings.showwarning = show
        yield


_ERASE = "\r\x1b[2K"
_SHOW_CURSOR = "\x1b[?25h"


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _shows_bars() -> bool:
    return _is_terminal(sys.stderr) and not Output.now.quiet


@contextlib.contextmanager
def download_progress() -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield ``show(done, total)`` for a bar of bytes, which appears with the first of them; None off a terminal."""
    if not _shows_bars():
        yield None
        return
    bar: Any = None
    counts = False

    def show(done: int, total: int | None) -> None:
        nonlocal bar, counts
        Output.now.begin("")
        if not total:  # a bar of unknown length would be full at once
            counts = True
            click.echo(f"\rweights  {done / 1e6:,.1f} MB", nl=False, err=True)
            return
        bar = bar or click.progressbar(length=total, label="weights", file=sys.stderr, show_eta=True)
        bar.update(done - bar.pos)

    try:
        yield show
    finally:
        if bar is not None:
            bar.render_finish()
        if counts:
            click.echo(err=True)


@contextlib.contextmanager
def pass_progress(unit: str = "passes") -> Iterator[Callable[[int, int], None] | None]:
    """Yield ``on_progress(done, total)`` for a bar that appears with the first of several; None off a terminal.

    A bar disappears at its end: an image may need several, and there may be many images.
    """
    if not _shows_bars():
        yield None
        return
    with contextlib.ExitStack() as stack:
        advance: Callable[[int], None] | None = None
        before, expected, start = 0, 0, time.monotonic()

        def on_progress(done: int, total: int) -> None:
            nonlocal advance, before, expected, start
            if total == 1:
                return
            if advance is None or total != expected or done < before:
                stack.close()
                start = start if advance is None else time.monotonic()
                advance = stack.enter_context(image_progress(total, unit, start, keep=False))
                before, expected = 0, total
            advance(done - before)
            before = done

        yield on_progress


_SILENT = 2.0  # seconds


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Show what ``Output.now.begin`` says, once the run has taken two seconds; nothing off a terminal.

    The words stand on one line, which other lines and bars replace.
    """
    if not _shows_bars():
        yield
        return
    line, run = _PhaseLine(sys.stderr), Output.now
    timer = threading.Timer(_SILENT, line.appear)
    timer.daemon = True
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, run, "begin", run.begin)
        stack.callback(line.begin, "")
        stack.callback(timer.join)
        stack.callback(timer.cancel)
        _hide_before_others(stack, line.hide)
        run.begin = line.begin
        timer.start()
        yield


class _PhaseLine:
    """A line of words that is replaced by the next words, by a bar, or by what is printed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._words = stream, ""
        self._appears = self._is_shown = False

    def begin(self, words: str) -> None:
        self.hide()
        self._words = words
        if self._appears and words:
            self._is_shown = True
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(f"{printable(words)[: terminal_columns(self._stream, 80) - 5]} ...")
                self._stream.flush()

    def appear(self) -> None:
        self._appears = True
        self.begin(self._words)

    def hide(self) -> None:
        if self._is_shown:
            self._is_shown = False
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(_ERASE)
                self._stream.flush()


def _hide_before_others(stack: contextlib.ExitStack, hide: Callable[[], None]) -> None:
    """Until ``stack`` ends, hide a line before anything else is written to the terminal."""
    stack.enter_context(contextlib.redirect_stderr(cast(TextIO, _HidesBar(sys.stderr, hide))))
    if _is_terminal(sys.stdout):
        stack.enter_context(contextlib.redirect_stdout(cast(TextIO, _HidesBar(sys.stdout, hide))))


@contextlib.contextmanager
def image_progress(
    total: int, unit: str = "images", start: float | None = None, keep: bool = True
) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(count)`` for a bar of ``total`` images with its speed since ``start``; nothing off a terminal.

    Lost images count too. A line that is printed inside the ``with`` block, on standard error or on a standard output
    that is the same terminal, replaces the bar; the next image draws the bar below it. At the end the bar stays, unless
    ``keep`` is false.
    """
    if not _shows_bars():
        yield lambda count: None
        return
    bar = _ImageBar(total, sys.stderr, unit, time.monotonic() if start is None else start)
    with contextlib.ExitStack() as stack:
        stack.callback(bar.finish if keep else bar.hide)
        _hide_before_others(stack, bar.hide)
        yield bar.advance


class _ImageBar:
    """A bar that can be hidden. A terminal that closes meanwhile does not lose a result."""

    def __init__(self, total: int, stream: TextIO, unit: str, start: float) -> None:
        self._stream, self._unit = stream, unit
        self._is_shown = False
        self._start = start
        self._bar: Any = click.progressbar(
            length=total,
            label=unit,
            file=stream,
            show_pos=True,
            show_eta=True,
            item_show_func=self._speed,
            width=_bar_width(stream, total),
        )

    def _speed(self, item: Any) -> str:
        seconds = time.monotonic() - self._start
        return f"{self._bar.pos / seconds:.1f} {self._unit}/s" if seconds > 0 else ""

    def advance(self, count: int) -> None:
        Output.now.begin("")
        self._is_shown = True
        with contextlib.suppress(OSError, ValueError):
            self._bar.update(count)

    def hide(self) -> None:
        if self._is_shown:
            self._is_shown = False
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(_ERASE + _SHOW_CURSOR)
                self._stream.flush()

    def finish(self) -> None:
        if self._is_shown:
            with contextlib.suppress(OSError, ValueError):
                self._bar.render_finish()


def _bar_width(stream: TextIO, total: int) -> int:
    """The columns that position, time and speed leave: a bar longer than a line cannot be erased."""
    return max(1, min(36, terminal_columns(stream, 80) - 45 - 2 * len(str(total))))


class _HidesBar:
    """A stream that hides the bar before it writes."""

    def __init__(self, stream: TextIO, hide: Callable[[], None]) -> None:
        self._stream, self._hide = stream, hide

    def write(self, text: str) -> int:
        self._hide()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
