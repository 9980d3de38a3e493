"""Which calls made the values of each tensor, followed through the operations of a pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.hooks import storage_key, tensors_in

Sources = frozenset[int]
"""Numbers of calls, and `hookscope.tracing.facts.INPUT`."""

_NOTHING: Sources = frozenset()


class SourceTracker(TorchDispatchMode):
    """Follows which calls made the values of each tensor, while operations run inside the block.

    ``running`` returns the number of the call that now makes values, and what it read so far; None where what runs only
    hands values on.
    """

    supports_higher_order_operators = True

    def __init__(self, running: Callable[[], tuple[int, set[int]] | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = running
        self._made = WeakTensorKeyDictionary()  # the sources, and how many writes to the storage these know of
        self._writes: defaultdict[int | None, list[tuple[int, int, Sources]]] = defaultdict(list)

    def of(self, value: Any) -> Sources:
        """The calls that made the values of all tensors in ``value``."""
        return _NOTHING.union(*map(self._of, tensors_in(value).values()))

    def made(self, value: Any, sources: Iterable[int]) -> None:
        """Note that ``sources`` made all tensors in ``value``."""
        for tensor in tensors_in(value).values():
            self._made[tensor] = frozenset(sources), len(self._writes[storage_key(tensor)])

    def _of(self, tensor: Tensor) -> Sources:
        known: tuple[Sources, int] = self._made.get(tensor, (_NOTHING, 0))
        sources, seen = known
        writes = self._writes.get(storage_key(tensor), [])
        if len(writes) > seen:
            begin, end = _extent(tensor)
            for first, last, writer in writes[seen:]:
                if first < end and begin < last:
                    sources = writer if first <= begin and end <= last else sources | writer
        return sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read, running = self.of((args, kwargs)), self._running()
        output = func(*args, **(kwargs or {}))
        if running is not None:
            number, reads = running
            reads |= read - {number}
            read = frozenset((number,))
        for at, name in _written(func):
            for tensor in tensors_in(args[at] if at < len(args) else (kwargs or {}).get(name)).values():
                self._writes[storage_key(tensor)].append((*_extent(tensor), read))
        self.made(output, read)
        return output


@lru_cache(maxsize=4096)
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments that ``function`` writes to."""
    arguments = function._schema.arguments if getattr(function, "_schema", None) else ()
    return tuple(
        (at, each.name) for at, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor has, and the one after its last."""
    if not tensor.numel():
        return 0, 0
    begin = int(tensor.storage_offset())
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + int(last) + 1) * tensor.itemsize
