"""Signals that wait until a piece of work is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
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
