"""Arrays that are collected while pictures are drawn, and written as one NumPy file at the end."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookscope.cli.shared.output_paths import refuse_input
from hookscope.errors import UsageError
from hookscope.system import check_writable, write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass
class ArrayFile:
    """A ``.npy`` file for one array or a ``.npz`` file for any number; without a path no array is collected.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = ArrayFile.parse(folder + "/maps.npz", ["cat.jpg"])
        ...     file.keep("cat/layer4/281", np.ones((7, 7)))
        ...     file.write()
        ...     np.load(file.path)["cat/layer4/281"].shape
        (7, 7)
    """

    path: str | None
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def parse(cls, path: str | None, images: Sequence[str], several: bool = False) -> ArrayFile:
        """Refuse what cannot work before anything is computed.

        Args:
            path: A name with suffix, or a device; None for no file.
            images: The pictures of the run, none of which may be the file.
            several: Whether there will be more than one array.

        Raises:
            UsageError: for another suffix, or several arrays into a ``.npy`` file.
            WriteError: for a place that cannot be written.
        """
        if path is None:
            return cls(None)
        device = os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
        if _suffix(path) not in (".npy", ".npz") and not device:
            asked = f"cannot write {path}"
            raise UsageError(asked, "--raw writes NumPy files", "name it .npy, or .npz for several maps")
        file = cls(path)
        if several or len(images) > 1:
            file.expect(2)
        check_writable(path)
        refuse_input(path, images)
        return file

    def expect(self, count: int) -> None:
        """Refuse so many arrays, of one picture, before the first is drawn.

        Raises:
            UsageError: there is more than one, for a ``.npy`` file.
        """
        if self.path is not None and _suffix(self.path) != ".npz" and count > 1:
            raise UsageError(f"--raw {self.path} takes one map", "there are several", "name it .npz")

    def keep(self, key: str, values: NDArray[Any]) -> None:
        """Remember ``values`` under ``key``, a path such as ``IMAGE/CLASS``."""
        if self.path is not None:
            self.arrays[key] = values

    def write(self) -> None:
        """Write the collected arrays; without arrays no file is written.

        Raises:
            WriteError: it cannot be written.
        """
        if self.path is None or not self.arrays:
            return
        import numpy as np

        stream = io.BytesIO()
        if _suffix(self.path) == ".npz":
            np.savez(stream, **self.arrays)  # type: ignore[arg-type]  # of older numpy: it takes any name
        else:
            [values] = self.arrays.values()
            np.save(stream, values)
        write_atomically(self.path, stream.getvalue())


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
