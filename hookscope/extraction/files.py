"""Write features to files: in constant memory, in order, and so that a killed run can be resumed."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import IO, Any

import torch
from torch import Tensor

from hookscope.errors import InputError, LayerError, WriteError
from hookscope.extraction.facts import FeatureBatch, FeatureSource, WrittenFeatures
from hookscope.extraction.formats import RESERVED, ROW_FIELDS, FeatureTable, check_dtype
from hookscope.extraction.job import check_alike
from hookscope.extraction.output import (
    Output,
    Progress,
    append_to,
    check_columns,
    check_output,
    metadata_of,
    part_numbers,
    remove,
    sync,
    tsv,
)
from hookscope.jobs import LostImage, Part, SaveTimer, hash_of_names, picture_of, pictures_in
from hookscope.models import package_versions
from hookscope.system import StrPath, make_folder, write_atomically, write_errors


def columns_of(batch: FeatureBatch) -> dict[str, Tensor]:
    """The features by column; a layer that is called as a field of the row gets another name."""
    named: dict[str, Tensor] = {}
    for name, value in batch.features.items():
        column = f"{name} (layer)" if name.lower() in RESERVED else name
        if column in named:
            raise InputError(f"two columns are called '{column}'", do="choose one of the layers")
        named[column] = value
    return named


def storable(output: Output, name: str, value: Tensor) -> Tensor:
    """The values as they are written, of a type that the format has."""
    if not value[0].numel():
        raise InputError(f"{name} has no values", f"its shape is {tuple(value.shape)}", "choose another layer")
    check_dtype(output.format, output.suffix, name, dtype_of(value))
    return value.detach().cpu().contiguous()


def dtype_of(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def bytes_of(value: Tensor) -> Any:
    return value.reshape(-1).view(torch.uint8).numpy().data


def check_same_columns(columns: dict[str, tuple[str, tuple[int, ...]]], values: dict[str, Tensor], name: str) -> None:
    """Refuse an image whose features do not fit those of earlier images, also of a run that is resumed."""
    check_alike({column: shape for column, (_, shape) in columns.items()}, values, name)
    for column, (dtype, _) in columns.items():
        if (other := dtype_of(values[column])) != dtype:
            raise LayerError(f"{name}: {column} is {other}, and {dtype} for earlier images", do="give ‹dtype|--dtype›")


try:
    import fcntl
except ImportError:  # Windows has no locks of this kind
    fcntl = None  # type: ignore[assignment]

_LOST_FIELDS = ("position", "path", "error")
_LOCK = ".lock"
_SPARE = 1 << 17  # bytes

Batches = Callable[[int], Generator[Part[FeatureBatch]]]


def write_features(
    source: FeatureSource,
    batches: Batches,
    path: StrPath,
    names: Sequence[str] | None = None,
    *,
    count: int | None = None,
    shard: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    columns: int = 1,
    on_start: Callable[[int], None] = lambda done: None,
    on_interrupt: Callable[[int], None] = lambda done: None,
) -> WrittenFeatures:
    """Write a row for each image to one file, or to a folder of ``.parquet`` files of ``shard`` rows.

    Rows wait in the folder ``.NAME.parts`` beside the file, from which a later run with ``resume`` continues. The file
    appears whole when the last row is done.

    Args:
        source: What the features are made from.
        batches: Gives the parts of the run from a position in the list on.
        path: The file or folder, see `check_output`.
        names: The list of images; None for tensors.
        count: Number of images without names; None if it is not known.
        shard: Rows of each file in a folder.
        overwrite: Replace an output that exists.
        resume: Go on where an interrupted run of the same source stopped.
        columns: The least number of columns, as far as it is known.
        on_start: Gets the number of images that an earlier run has done.
        on_interrupt: Gets the number of images that are saved, 0 for none, when an exception ends the run.

    Raises:
        InputError: No image could be used, or the output belongs to another run or is damaged.
        LayerError: Rows have different shapes.
        UsageError: There is no such format, or it holds one column alone.
        WriteError: The output exists or cannot be written.
        InstallationError: The format needs a package that is not installed.
    """
    output = check_output(path, shard, overwrite=overwrite, resume=resume, columns=columns)
    run = _Run(output, _about(source, output, names, count))
    with contextlib.closing(run):
        if resume and (complete := run.resume()):
            on_start(complete.earlier)
            return complete
        earlier = run.progress.done
        on_start(earlier)
        try:
            with contextlib.closing(batches(earlier)) as parts:
                for part in parts:
                    run.add(part)
            return replace(run.finish(), earlier=earlier)
        except BaseException:
            on_interrupt(run.stop())
            raise


def _about(source: FeatureSource, output: Output, names: Sequence[str] | None, count: int | None) -> dict[str, Any]:
    about = {
        **package_versions(),
        **asdict(source),
        "images": count if names is None else len(names),
        "images_sha256": hash_of_names(names or ()),
        "shard": output.shard,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return dict(json.loads(json.dumps(about)))


def _check_same(output: Output, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to resume the run of another source, list of images or size of files."""
    do = "give what it was made with, or start again with ‹overwrite=True|--overwrite›"
    for name, new in wanted.items():
        old = saved.get(name)
        if old == new or name in ("date", *package_versions()):
            continue
        asked = f"cannot resume '{output.path}'"
        if name == "fingerprint":
            raise InputError(asked, f"it was made with other weights of {saved['model']}", do)
        if name in ("images", "images_sha256"):
            count = f": {old} images, not {new}" if name == "images" else ""
            raise InputError(asked, f"it was made from another list of images{count}", do)
        words = {"preprocess": "preprocessing", "shard": "‹shard|--shard›", "targets": "targets"}.get(name, name)
        raise InputError(asked, f"it was made with {words} {_shown(old)}, not {_shown(new)}", do)


def _shown(value: Any) -> str:
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "none"


@dataclass
class _Run:
    """One run: what is written so far, and the open files."""

    output: Output
    about: dict[str, Any]
    progress: Progress = field(init=False)
    saved: Progress | None = None
    lock: IO[bytes] | None = None
    timer: SaveTimer = field(default_factory=SaveTimer)

    def __post_init__(self) -> None:
        self.progress = Progress(self.about)

    @property
    def row_file(self) -> str:
        return os.path.join(self.output.work, ".rows.tsv")

    @property
    def whole(self) -> str:
        """The assembled file before it gets its name."""
        return os.path.join(self.output.work, "whole" + self.output.suffix)

    def resume(self) -> WrittenFeatures | None:
        """Go on with an earlier run if there is one; what it wrote if it is complete."""
        output = self.output
        if not output.begun():
            if output.shard or not os.path.exists(output.target):
                return None
            metadata = metadata_of(output)
            _check_same(output, metadata, self.about)
            if os.path.exists(output.work):  # what a run left that was killed at its very end
                self._lock()
                shutil.rmtree(output.work)
            rows, lost = metadata["rows"], metadata["lost"]
            columns = {name: (column["dtype"], tuple(column["shape"])) for name, column in metadata["columns"].items()}
            return replace(_written(output, rows, lost, columns), earlier=rows + lost, was_complete=True)
        progress = Progress.load(output)
        _check_same(output, progress.about, self.about)
        if not (progress.complete and output.shard):
            self._lock()
            progress = Progress.load(output)
        self.progress = self.saved = progress
        for number, (_, size) in enumerate(progress.shards):
            _check_size(output, output.part(number), size, exact=True)
        if progress.complete:
            return replace(self._publish(), earlier=progress.done, was_complete=True)
        name, sha256 = progress.last
        if sha256 and pictures_in([name]) not in ([None], [picture_of(sha256)]):
            asked = f"cannot resume '{output.path}': the image '{name}' has changed since"
            raise InputError(asked, do="start again with ‹overwrite=True|--overwrite›")
        with write_errors(output.path):
            self._cut()
            if output.shard and progress.pending == output.shard:
                self._close_shard()
        return None

    def add(self, part: Part[FeatureBatch]) -> None:
        """Write the rows of a part; none of it counts as done before all of it is written."""
        with write_errors(self.output.path):
            if self.saved is None:
                self._begin()
            batch, lost, first = part.value, part.lost, 0
            count = 0 if batch is None else batch.count
            while True:
                room = self.output.shard - self.progress.pending if self.output.shard else count
                last = min(count, first + room)
                done = batch.positions[last] if batch is not None and last < count else part.done
                self._append(batch, first, last, [each for each in lost if each.position < done], done)
                lost, first = tuple(each for each in lost if each.position >= done), last
                if self.output.shard and self.progress.pending == self.output.shard:
                    self._close_shard()
                if first == count:
                    break
            if self.timer.is_due:
                self._save()

    def _begin(self) -> None:
        """Remove what an earlier run left, and make the folders."""
        output = self.output
        self._lock()
        if output.shard and output.begun():
            for number in reversed(part_numbers(output)):
                remove(output.part(number))
        remove(output.progress)
        for name in os.listdir(output.work):
            if name != _LOCK:
                remove(os.path.join(output.work, name))
        for name, header in ((self.row_file, ROW_FIELDS), (output.lost, _LOST_FIELDS)):
            write_atomically(name, tsv([header]))
        rows, lost = len(tsv([ROW_FIELDS])), len(tsv([_LOST_FIELDS]))
        self.progress = self.saved = replace(self.progress, row_bytes=rows, lost_bytes=lost)
        self.progress.save(output)
        with contextlib.suppress(OSError):  # without it a full disk costs some seconds of work
            append_to(self.spare, os.urandom(_SPARE))

    @property
    def spare(self) -> str:
        return os.path.join(self.output.work, ".spare")

    def _lock(self) -> None:
        """Make the folder of pending rows, and keep other runs away; the lock ends with this process in any case."""
        make_folder(self.output.work)
        self.lock = open(os.path.join(self.output.work, _LOCK), "wb")  # noqa: SIM115  (open to the end of the run)
        try:
            if fcntl is not None:
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which workers would inherit
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # else the file system has no locks
                raise WriteError(f"another run writes to '{self.output.path}'", do="wait until it ends") from None

    def _sizes(self) -> dict[str, int]:
        """The files of pending rows, and their bytes; they may have more after a run that was killed."""
        progress = self.progress
        columns = [progress.column(self.output, number) for number in range(len(progress.columns))]
        sizes = {column.file: progress.pending * column.row_bytes for column in columns}
        return {**sizes, self.row_file: progress.row_bytes, self.output.lost: progress.lost_bytes}

    def _cut(self) -> None:
        """Remove what was written after the progress was saved."""
        for name, size in self._sizes().items():
            _check_size(self.output, name, size)
            os.truncate(name, size)

    def _append(self, batch: FeatureBatch | None, first: int, last: int, lost: Sequence[LostImage], done: int) -> None:
        progress, count = self.progress, last - first
        rows = lines = b""
        if batch is not None and count:
            values = {name: storable(self.output, name, value[first:last]) for name, value in columns_of(batch).items()}
            if not progress.columns:
                check_columns(self.output, len(values), self.output.format)
                progress = replace(
                    progress,
                    columns={name: (dtype_of(value), tuple(value.shape[1:])) for name, value in values.items()},
                )
                for number in range(len(values)):
                    remove(progress.column(self.output, number).file)  # rows of a run that was killed unsaved
            check_same_columns(progress.columns, values, batch.names[first])
            for number, value in enumerate(values[name] for name in progress.columns):
                append_to(progress.column(self.output, number).file, bytes_of(value))
            fields = (batch.positions, batch.names, batch.sha256, batch.labels)
            rows = tsv(zip(*(each[first:last] for each in fields), strict=True))
            progress = replace(progress, last=(batch.names[last - 1], batch.sha256[last - 1]))
        if lost:
            lines = tsv((each.position, each.name, each.error) for each in lost)
        append_to(self.row_file, rows)
        append_to(self.output.lost, lines)
        self.progress = replace(
            progress,
            done=done,
            rows=progress.rows + count,
            lost=progress.lost + len(lost),
            pending=progress.pending + count,
            row_bytes=progress.row_bytes + len(rows),
            lost_bytes=progress.lost_bytes + len(lines),
        )

    def _save(self) -> None:
        """Make sure that all rows are on the disk, then say so."""
        with self.timer.saving():
            for name in self._sizes():
                sync(name)
            self.progress.save(self.output)
            self.saved = self.progress

    def _assemble(self, metadata: dict[str, Any]) -> None:
        """Write the pending rows to a file that has no name yet."""
        progress = self.progress
        columns = {name: progress.column(self.output, number) for number, name in enumerate(progress.columns)}
        remove(self.whole)
        self.output.format.write(self.whole, FeatureTable(progress.pending, columns, self.row_file, metadata))
        if os.path.isfile(self.whole):
            sync(self.whole)

    def _close_shard(self) -> None:
        self._save()
        progress = self.progress
        self._assemble(progress.metadata(progress.pending))
        size = os.path.getsize(self.whole)
        os.replace(self.whole, self.output.part(len(progress.shards)))
        header = len(tsv([ROW_FIELDS]))
        shards = (*progress.shards, (progress.pending, size))
        self.progress = replace(progress, shards=shards, pending=0, row_bytes=header)
        self._save()
        self._cut()

    def finish(self) -> WrittenFeatures:
        """Assemble the file, or the last one of the folder."""
        total = self.about["images"]
        if not self.progress.rows:
            raise InputError("no image could be used", f"{total or self.progress.lost} were tried")
        with write_errors(self.output.path):
            self.progress = replace(self.progress, done=total or self.progress.done)
            self._save()
            if not self.output.shard:
                metadata = {**self.progress.metadata(self.progress.rows), "lost": self.progress.lost}
                self._assemble(metadata)
                write_atomically(os.path.join(self.output.work, ".json"), json.dumps(metadata, indent=1).encode())
            elif self.progress.pending:
                self._close_shard()
            self.progress = self.saved = replace(self.progress, complete=True)
            self.progress.save(self.output)
            return self._publish()

    def _publish(self) -> WrittenFeatures:
        """Give the assembled files their names; a run that was killed here does the rest."""
        output, progress = self.output, self.progress
        if not output.shard:
            old, assembled = os.path.join(output.work, "old"), os.path.exists(self.whole)
            remove(old)
            if assembled and os.path.lexists(output.target):
                os.replace(output.target, old)  # it must not stand beside the files of another run
            for ending in output.endings():
                made = os.path.join(output.work, ending)
                if ending == ".lost.tsv" and not progress.lost:
                    remove(output.target + ending)
                elif os.path.exists(made):
                    os.replace(made, output.target + ending)
            if assembled:
                os.replace(self.whole, output.target)
            os.unlink(output.progress)  # first: a folder without it is what a complete run left
        else:
            for name in glob.glob(os.path.join(glob.escape(output.target), ".hookscope-*.tmp")):
                remove(name)  # a killed run left it
            if not progress.lost:
                remove(output.lost)
        shutil.rmtree(output.work, ignore_errors=True)
        return _written(output, progress.rows, progress.lost, progress.columns)

    def stop(self) -> int:
        """Save what is done when an exception ends the run; the number of images that are saved."""
        if self.saved is None or self.saved.complete:
            return 0
        with contextlib.suppress(WriteError, InputError, OSError):
            self._cut()
            remove(self.spare)  # so that there is space for the progress where the disk is full
            self._save()
        if not self.saved.rows:
            remove(self.output.progress)
            remove(self.output.lost)
            shutil.rmtree(self.output.work, ignore_errors=True)
            if self.output.shard:
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(self.output.target)
            return 0
        return self.saved.done

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def _written(
    output: Output, rows: int, lost: int, columns: Mapping[str, tuple[str, tuple[int, ...]]]
) -> WrittenFeatures:
    shapes = {name: shape for name, (_, shape) in columns.items()}
    dtypes = {name: dtype for name, (dtype, _) in columns.items()}
    lost_file = (os.path.join(output.path, "_lost.tsv") if output.shard else f"{output.path}.lost.tsv") if lost else ""
    return WrittenFeatures(output.path, rows, lost, shapes, dtypes=dtypes, lost_file=lost_file)


def _check_size(output: Output, name: str, size: int, exact: bool = False) -> None:
    found = os.path.getsize(name) if os.path.exists(name) else 0
    if found < size or (exact and found > size):
        asked = f"cannot resume '{output.path}': its file '{os.path.basename(name)}' is damaged"
        raise InputError(asked, f"it has {found:,} bytes of {size:,}", "start again with ‹overwrite=True|--overwrite›")
