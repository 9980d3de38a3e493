"""Every storage of a step: when it is allocated and freed, whether autograd keeps it, and the largest sum."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hookscope.planning.kernels import RESULTS
from hookscope.tracing import MacCounter


class StorageFollower(MacCounter):
    """Follows every storage that an operation allocates inside the ``with`` block, on the meta device or a real one.

    Args:
        count: As `MacCounter` calls it.
        on_moved: Called with the bytes of the inputs and outputs of each operation that is no view.
        on_saved: Called with the bytes of each storage that autograd keeps and did not keep before.
    """

    def __init__(
        self, count: Callable[[int, int], None], on_moved: Callable[[int], None], on_saved: Callable[[int], None]
    ) -> None:
        super().__init__(count)
        self._on_moved, self._on_saved = on_moved, on_saved
        self._alive: dict[int, tuple[int, Any]] = {}  # number of a storage by its address, and what tells of its end
        self._events: list[tuple[int, bool, Any]] = []
        self._sizes: list[int] = []
        self._kinds: dict[int, str] = {}
        self.place: Callable[[], Any] = str  # of the step, at a peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RESULTS and args[0].is_meta:
            output = RESULTS[func](*args)
        else:
            output = super().__torch_dispatch__(func, types, args, kwargs)
        results = list(_tensors([output]))
        for tensor in results:
            self.see(tensor)
        if not getattr(func, "is_view", False):
            given = list(_tensors([args, kwargs.values() if kwargs else ()]))
            self._on_moved(sum(map(_bytes, given)) + sum(map(_bytes, results)))
        return output

    def see(self, tensor: Tensor, kind: str = "") -> int | None:
        """The number of the storage of ``tensor``, which lives from now on if it was not known; None if it has none."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor has several
            return None
        size, (number, _) = storage.nbytes(), self._alive.get(storage._cdata, (None, None))
        if number is None or self._sizes[number] != size:
            if number is not None:
                self._events.append((number, False, self.place()))
            number = len(self._sizes)
            self._sizes.append(size)
            self._events.append((number, True, self.place()))
            self._alive[storage._cdata] = number, weakref.ref(storage, partial(self._freed, storage._cdata, number))
        if kind:
            self._kinds.setdefault(number, kind)
        return number

    def _freed(self, address: int, number: int, _: Any) -> None:
        if self._alive.get(address, (None, None))[0] == number:
            del self._alive[address]
            self._events.append((number, False, self.place()))

    def saving(self) -> saved_tensors_hooks:
        """A context whose operations tell of every tensor that autograd keeps."""

        def pack(tensor: Tensor) -> Tensor:
            number = self.see(tensor)
            if number is not None and number not in self._kinds:
                self._kinds[number] = "saved"
                self._on_saved(self._sizes[number])
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def mark(self, tensors: Iterable[Tensor], kind: str) -> int:
        """Say what ``tensors`` are, unless it is known; returns the bytes of all storages of this kind."""
        for tensor in tensors:
            self.see(tensor, kind)
        return self.total(kind)

    def total(self, kind: str) -> int:
        """The bytes of all storages of a kind."""
        return sum(self._sizes[number] for number, named in self._kinds.items() if named == kind)

    def peak(self) -> tuple[int, dict[str, int], Any]:
        """The largest sum of living storages, its parts by kind, and the place where it was reached."""
        now: Counter[str] = Counter()
        total, largest, parts, where = 0, 0, dict[str, int](), None
        for number, allocated, place in self._events:
            change = self._sizes[number] if allocated else -self._sizes[number]
            total += change
            now[self._kinds.get(number, "temporary")] += change
            if total > largest:
                largest, parts, where = total, dict(now), place
        return largest, {kind: size for kind, size in parts.items() if size}, where


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list) or type(value).__name__ == "dict_values":
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    """What a kernel reads or writes of ``tensor``: no more than its storage, which an expanded tensor has less of."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
