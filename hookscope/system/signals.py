"""Signals that wait until a piece of work is whole, and the last work before a process is terminated."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Deliver SIGINT, SIGTERM and SIGHUP after the block, so that no sum is saved half added up."""
    held: list[int] = []
    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and callable(signal.getsignal(number)):
                old[number] = signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    for number in held[:1]:
        signal.raise_signal(number)


def before_termination(then: Callable[[], None]) -> None:
    """Call ``then()`` when SIGTERM is about to end this process, in a thread of its own; then the process ends by it.

    Nothing is done if a program has set a handler of its own, now or later. A handler in Python would be seen by such
    programs, and would wait as long as the main thread is in a library. So `faulthandler` handles the signal: it
    writes to a pipe, from which the thread reads.
    """
    number = getattr(signal, "SIGTERM", None)
    if number is None or not hasattr(faulthandler, "register") or signal.getsignal(number) is not signal.SIG_DFL:
        return
    reader, writer = os.pipe()

    def unregister() -> None:
        if signal.getsignal(number) is signal.SIG_DFL:  # else this would take the handler of the program away
            faulthandler.unregister(number)

    def wait() -> None:
        arrived = b""
        with contextlib.suppress(OSError):
            arrived = os.read(reader, 1)  # nothing: the program has closed the pipe
        try:
            if arrived:
                then()
        finally:
            unregister()
            if arrived:
                os.kill(os.getpid(), number)

    faulthandler.register(number, file=writer, all_threads=False)
    os.register_at_fork(after_in_child=unregister)
    _thread.start_new_thread(wait, ())
