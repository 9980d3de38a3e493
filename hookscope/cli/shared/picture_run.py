"""One run from images to pages, and the file of ``--raw``: what ``visualize``, ``cam`` and ``saliency`` share."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar

from hookscope import drawing, images, system
from hookscope.cli import process
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared.model import caption_of
from hookscope.cli.shared.output_paths import OutputPath, is_device, refuse_input, write_picture
from hookscope.cli.shared.subject import OfImages
from hookscope.cli.shared.written import wrote_arrays
from hookscope.columns import Columns, Row
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


class PictureCommand(OfImages):
    """A command that writes a picture or page for each image to the place of ``-o``."""

    suffixes: ClassVar[tuple[str, ...]] = (".png",)
    printed: ClassVar[Columns]
    """The columns of a row."""
    totals: ClassVar[Sequence[str]] = ()
    """Lines under a table."""

    output: str | None = None
    raw: str | None = None

    @cached_property
    def place(self) -> OutputPath:
        """Where the pictures go; not to a terminal."""
        place = OutputPath.parse(self.output, self.images, *self.suffixes)
        if place.kind == "stdout" and process.standard_output().isatty():
            what = "page" if self.suffixes == (".html",) else "picture"
            raise UsageError(f"-o - would write a {what} to the terminal", do="send it to a file or a pipe")
        return place

    @cached_property
    def arrays(self) -> ArrayFile:
        file = ArrayFile(self.raw)
        file.expect(2 if len(self.images) > 1 else 1)
        return file

    def check(self) -> None:
        _ = self.place, self.arrays
        super().check()

    def draw(self, read: Sequence[images.InputImage]) -> Iterator[Any]:
        raise NotImplementedError

    def shown(self, rows: Iterable[Row]) -> Iterable[Row]:
        """The rows of a table."""
        return rows

    def run(self) -> int:
        """Draw the images of each forward pass, and print the rows as they come.

        No rows are printed if a page goes to standard output. All pages are drawn, even when the reader of the rows
        leaves.
        """
        with self.arrays:
            self.place.check_count(len(self.files.groups(self.net)))
            drawn = self.files.rows(self.net, self.draw)
            if self.place.kind != "stdout":
                rows = Section(drawn, self.printed, totals=self.totals, shown=self.shown(drawn))
                self.print(Report([rows], caption=caption_of(self.net)))
            deque(drawn, maxlen=0)
        return self.files.status

    @property
    def is_single(self) -> bool:
        return len(self.files.groups(self.net)) == 1

    def path(self, name: str, image: str, is_only: bool) -> str:
        """The path of the page ``name`` of ``image``; ``is_only`` if the run makes no other page."""
        path = self.place.path_for(name, self.files.words[image], self.net.name, is_only)
        refuse_input(path, self.images)
        return path

    def write(self, page: Any, path: str) -> None:
        """Write a page with its provenance to ``path``, or to standard output with ``-o -``."""
        if self.place.kind == "stdout":
            write_bytes(drawing.encode_png(page))
            return
        if folder := os.path.dirname(path):
            system.make_folder(folder)
        write_picture(path, page)


def write_bytes(data: bytes) -> None:
    stream = process.standard_output().buffer
    stream.write(data)
    stream.flush()
