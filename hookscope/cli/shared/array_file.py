"""The file of ``--raw``: arrays are collected while pictures are drawn, and written at the end."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hookscope.cli.shared.output_paths import is_device, refuse_input
from hookscope.errors import UsageError
from hookscope.system import check_writable, write_atomically


@dataclass
class ArrayFile:
    """A ``.npy`` file for one array or a ``.npz`` file for any number; without a path no array is collected."""

    path: str | None
    arrays: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, path: str | None, images: Sequence[str], several: bool = False) -> ArrayFile:
        """Check the path before anything is computed; ``several`` says that an image makes several arrays."""
        file = cls(path)
        if path is None:
            return file
        if _suffix(path) not in (".npy", ".npz") and not is_device(path):
            asked = f"cannot write {path}"
            raise UsageError(asked, "--raw writes NumPy files", "name it .npy, or .npz for several maps")
        file.expect(2 if several or len(images) > 1 else 1)
        check_writable(path)
        refuse_input(path, images)
        return file

    def expect(self, count: int) -> None:
        """Refuse more than one array for a ``.npy`` file, before the first is drawn."""
        if self.path is not None and _suffix(self.path) != ".npz" and count > 1:
            raise UsageError(f"--raw {self.path} takes one map", "there are several", "name it .npz")

    def keep(self, key: str, values: Any) -> None:
        """Collect an array under ``key``, a path such as ``IMAGE/CLASS``."""
        if self.path is not None:
            self.arrays[key] = values

    def write(self) -> None:
        """Write the collected arrays; without arrays no file is written."""
        if self.path is None or not self.arrays:
            return
        import numpy as np

        stream = io.BytesIO()
        if _suffix(self.path) == ".npz":
            np.savez(stream, **self.arrays)
        else:
            [values] = self.arrays.values()
            np.save(stream, values)
        write_atomically(self.path, stream.getvalue())


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
