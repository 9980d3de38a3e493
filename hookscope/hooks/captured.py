"""Values by call: what a pass left of each layer call, found by name, by call or by index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import index as as_index
from typing import Any

from hookscope.errors import LayerError, nearest
from hookscope.hooks.observer import PassProgress
from hookscope.hooks.selection import Call


class CallMapping(Mapping[str, Any]):
    """Values by call: ``values["name"]``, ``values["name#1"]`` or, by index, ``values[30]``; in order of execution."""

    def __init__(self, progress: PassProgress) -> None:
        self._values: dict[str, Any] = {}
        self._calls: dict[str, Call] = {}
        self._names: dict[str, str] = {}
        self._progress = progress

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls that are kept, in order of execution."""
        return tuple(self._calls.values())

    def __getitem__(self, key: str | int) -> Any:
        """What is kept of a call; an index counts calls of the chosen types, also from the end of the pass."""
        return self._values[self._find_name(key) if isinstance(key, str) else self._find_index(as_index(key))]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except (LayerError, TypeError):
            return False
        return True

    def get(self, key: str | int, default: Any = None) -> Any:
        """What is kept of a call, or ``default``."""
        return self[key] if key in self else default

    def _add(self, call: Call, value: Any) -> None:
        key = call.key
        self._values[key] = value
        self._calls[key] = call

    def _drop(self, key: str) -> None:
        self._values.pop(key, None)
        self._calls.pop(key, None)

    def _find_name(self, key: str) -> str:
        exact = key if key in self._values else self._exact(key)
        if exact not in self._values:
            raise LayerError(f"nothing kept of '{key}'", nearest(key, list(self._values)) or self._what_is())
        return exact

    def _exact(self, key: str) -> str:
        """``key`` as values are kept: under the first name of the layer, without a number for its first call."""
        name, _, call = key.partition("#")
        name = self._names.get(name, name)
        return f"{name}#{call}" if call not in ("", "0") else name

    def _find_index(self, index: int) -> str:
        wanted = index + self._progress.total if index < 0 else index
        for key, call in self._calls.items():
            if call.index == wanted:
                return key
        raise LayerError(f"nothing kept at index {index}", self._what_is())

    def _what_is(self) -> str:
        indices = [call.index for call in self._calls.values() if call.index is not None]
        if not self._values:
            return "nothing was kept: no forward pass reached a wanted layer"
        span = f" (indices {min(indices)} to {max(indices)})" if indices else ""
        return f"kept are {len(self._values)} calls{span}: {', '.join(list(self._values)[:3])}, ..."
