"""A function of torch that another stands in for, for a while."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class Replaced:
    """Has ``instead(original, *args, **kwargs)`` called where ``owner.name`` is called, while it is `on`.

    Example:
        >>> import math
        >>> doubled = Replaced(math, "sqrt", lambda original, value: 2 * original(value))
        >>> doubled.on(); math.sqrt(9.0); doubled.off(); math.sqrt(9.0)
        6.0
        3.0
    """

    def __init__(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self._owner, self._name, self._instead = owner, name, instead
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def on(self) -> None:
        """Stand in for it from now on."""
        if self._ours is not None:
            return
        original, instead = getattr(self._owner, self._name), self._instead

        @wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if self._ours is not ours:  # it is over, and somebody who wrapped this one calls it still
                return original(*args, **kwargs)
            return instead(original, *args, **kwargs)

        self._original, self._ours = original, ours
        setattr(self._owner, self._name, ours)

    def off(self) -> None:
        """Put back what was there; what somebody has put over it since then stays."""
        if self._ours is not None and getattr(self._owner, self._name, None) is self._ours:
            setattr(self._owner, self._name, self._original)
        self._original = self._ours = None
