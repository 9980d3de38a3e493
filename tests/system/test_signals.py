"""Signals held during a block."""

import signal

import pytest

from hookscope.system import signals_held


def test_signals_held_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals_held():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ValueError, match="own"), signals_held():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is before
