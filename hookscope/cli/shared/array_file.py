"""The file of ``--raw``: the numbers behind the pictures of a run."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from hookscope.cli.shared.output_paths import is_device
from hookscope.cli.shared.written import wrote_arrays
from hookscope.errors import UsageError, WriteError
from hookscope.system import replacement, write_atomically

_SUFFIXES = (".npy", ".npz", ".safetensors")


@dataclass
class ArrayFile:
    """A ``.npy`` file for one array, a ``.npz`` or ``.safetensors`` file for any number; no file without a path.

    The file is complete at the end of a ``with`` block, and does not exist if the block raises. Arrays for ``.npz`` go
    to the disk at once, others stay in memory until then.
    """

    path: str | None
    arrays: dict[str, Any] = field(default_factory=dict)
    _keys: set[str] = field(default_factory=set)
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _archive: zipfile.ZipFile | None = None

    def expect(self, count: int) -> None:
        """Refuse more than one array for a ``.npy`` file, before the first is drawn."""
        if self.path is not None and _suffix(self.path) not in _SUFFIXES[1:] and count > 1:
            asked = f"--raw {self.path} takes one array"
            raise UsageError(asked, "there are several", "name it .npz or .safetensors")

    def keep(self, key: str, values: Any) -> None:
        """Keep an array under ``key``, a path such as ``IMAGE/CLASS``."""
        if self.path is None or key in self._keys:
            return
        self._keys.add(key)
        if _suffix(self.path) == ".npz":
            with self._write_errors():
                self._append(key, values)
        else:
            self.arrays[key] = values

    def _append(self, key: str, values: Any) -> None:
        import numpy as np

        if self._archive is None:
            assert self.path is not None
            self._archive = zipfile.ZipFile(self._open.enter_context(replacement(self.path)), "w")
            self._open.enter_context(self._archive)
        with self._archive.open(f"{key}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.asanyarray(values), allow_pickle=False)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(f"cannot write {self.path}: {error.strerror or error}") from error

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(OSError):  # the disk that was full before; the first error says which file
                self._open.__exit__(kind, error, where)
            return
        with self._write_errors():
            self._open.close()
        if self.path is not None and self.arrays:
            write_atomically(self.path, _content(self.path, self.arrays))
        if self._keys and self.path is not None:
            wrote_arrays(self.path)


def check_arrays(path: str) -> None:
    """Refuse a ``--raw`` of another format."""
    if _suffix(path) not in _SUFFIXES and not is_device(path):
        raise UsageError(f"cannot write {path}", "--raw writes arrays", "name it .npy (one), .npz or .safetensors")


def as_array(tensor: Any) -> Any:
    """A tensor as NumPy's array; float32 for the number types that NumPy lacks."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.float().numpy()


def _content(path: str, arrays: dict[str, Any]) -> bytes:
    import numpy as np

    if _suffix(path) == ".safetensors":
        from safetensors.numpy import save

        return save({key: np.ascontiguousarray(values) for key, values in arrays.items()})
    stream = io.BytesIO()
    [values] = arrays.values()
    np.save(stream, values)
    return stream.getvalue()


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
