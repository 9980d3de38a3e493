"""Write features to files: in constant memory, in order, and so that a killed run can be resumed.

Rows wait in numbered parts in a folder; a part is written whole, and then the state that counts it. The parts become
the file when the last row is done, or one file of a folder when they have enough rows.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import IO, Any, Self

from torch import Tensor

from hookscope.errors import InputError, LayerError, WriteError
from hookscope.extraction import formats
from hookscope.extraction.facts import FeatureBatch, WrittenFeatures
from hookscope.extraction.formats import RESERVED, Column, FeatureTable, as_text, check_dtype, tsv, write_part
from hookscope.extraction.job import check_alike
from hookscope.extraction.output import FeatureState, Output, check_columns, metadata_of, remove
from hookscope.jobs import AGAIN, Part, Progress, RunIdentity, SavedRun, hash_of_names, picture_of, pictures_in
from hookscope.models import package_versions
from hookscope.system import StrPath, make_folder, replacement, signals_held, write_atomically, write_errors

try:
    import fcntl
except ImportError:  # Windows has no locks of this kind
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class FeatureSource(RunIdentity):
    """What features were made from, which their files say.

    Attributes:
        pool: One of `POOLS`.
        dtype: Data type of the features; empty for the data type of the layer.
        targets: Classes whose probabilities are columns.
        logits: Whether the logits are a column.
    """

    pool: str = "none"
    dtype: str = ""
    targets: tuple[str, ...] = ()
    logits: bool = False

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The source that a file or a saved run names."""
        return cls(**{each.name: metadata.get(each.name, "") for each in fields(cls)})


@dataclass
class FeatureRun(SavedRun[FeatureBatch]):
    """A run that extracts features, and writes them if it has an output."""

    output: Output | None = None
    source: FeatureSource | None = None
    count: int | None = None  # images, if known
    state: FeatureState | None = field(default=None, init=False)
    columns: dict[str, Column] = field(default_factory=dict, init=False)
    waiting: list[FeatureBatch] = field(default_factory=list, init=False)  # in no part yet
    skips: list[tuple[int, str, str]] = field(default_factory=list, init=False)
    overflowed: Counter[str] = field(default_factory=Counter, init=False)
    rows: int = field(default=0, init=False)
    begun: bool = field(default=False, init=False)

    @property
    def images(self) -> int:
        return self.rows

    def written(self, resume: bool = False) -> WrittenFeatures:
        """Do the images that are not done yet, and write the features.

        Raises:
            InputError: No image could be used, or the output belongs to another run or is damaged.
            LayerError: Rows have different shapes.
            WriteError: The output cannot be written, or another run writes to it.
        """
        output = self._output
        if resume and (complete := self._complete()):
            self.settings.listener.start(complete.earlier)
            return complete
        make_folder(output.work)
        with open(output.work_file(".lock"), "wb") as lock:
            _lock(lock, output)
            try:
                self.do(resume)
            finally:
                if self.begun and self.state is None:
                    self._remove()
                output.leave_work()
        return _written(output, self.rows, len(self.skips), self.columns, self.earlier)

    @property
    def _output(self) -> Output:
        assert self.output is not None
        return self.output

    @property
    def _source(self) -> FeatureSource:
        assert self.source is not None
        return self.source

    def _complete(self) -> WrittenFeatures | None:
        """What an earlier run wrote, if it is complete."""
        output = self._output
        if output.shard and output.begun():
            state = FeatureState.load(output)
            if not state.complete:
                return None
            self._check_same(state.about)
            _check_shards(output, state)
            rows, skipped, columns = state.rows, len(state.skipped), state.columns
        elif not output.begun() and not output.shard and os.path.exists(output.target):
            metadata = metadata_of(output)
            self._check_same(metadata)
            rows, skipped = metadata["rows"], metadata["lost"]
            columns = {name: Column(each["dtype"], tuple(each["shape"])) for name, each in metadata["columns"].items()}
        else:
            return None
        output.clear_work()  # what a run left that was killed at its very end
        output.leave_work()
        return replace(_written(output, rows, skipped, columns, rows + skipped), was_complete=True)

    def load(self, file: StrPath) -> Progress:
        output, state = self._output, FeatureState.load(self._output)
        self._check_same(state.about)
        _check_shards(output, state)
        for path, _ in state.table(output).parts:
            try:
                formats.check_part(path)
            except (OSError, zipfile.BadZipFile) as error:
                raise _damaged(output, path, str(error)) from error
        name, sha256 = state.last
        if sha256 and pictures_in([name]) not in ([None], [picture_of(sha256)]):
            asked = f"cannot resume '{output.path}': the image '{name}' has changed since"
            raise InputError(asked, do="start again with ‹overwrite=True|--overwrite›")
        self.state, self.rows, self.columns, self.skips = state, state.rows, state.columns, list(state.skipped)
        return Progress.after(self.paths, state.done, len(state.skipped))

    def _about(self) -> dict[str, Any]:
        about = {
            **package_versions(),
            **asdict(self._source),
            "images": self.count,
            "images_sha256": hash_of_names(self.paths),
            "shard": self._output.shard,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return dict(json.loads(json.dumps(about)))

    def _check_same(self, saved: Mapping[str, Any]) -> None:
        """Refuse to resume the run of another source, list of images or size of files."""
        path, wanted = self._output.path, self._about()
        FeatureSource.from_metadata(saved).check_resumed_by(self._source, path)
        old, new = saved.get("images"), wanted["images"]
        if old != new or saved.get("images_sha256") != wanted["images_sha256"]:
            count = "" if old == new else f": {old} images, not {new}"
            raise InputError(f"cannot resume '{path}'", f"it was made from another list of images{count}", AGAIN)
        if saved["shard"] != wanted["shard"]:
            exists = f"it was made with ‹shard|--shard› {saved['shard']}, not {wanted['shard']}"
            raise InputError(f"cannot resume '{path}'", exists, AGAIN)

    def report(self, part: Part[FeatureBatch]) -> None:
        super().report(part)
        self.skips += [(image.position, as_text(image.name), as_text(image.error)) for image in part.skipped]

    def merge(self, part: Part[FeatureBatch], value: FeatureBatch) -> None:
        features = dict(value.features) if self.output is None else self._storable(value.features)
        self.columns = self.columns or {name: _column(rows) for name, rows in features.items()}
        _check_same_columns(self.columns, features, value.names[0])
        if self.output is not None:
            self.waiting.append(replace(value, features=features))
        self.overflowed.update(value.overflowed)
        self.rows += value.count

    def _storable(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The features by column; a layer that is called as a field of the row gets another name."""
        output, named = self._output, dict[str, Tensor]()
        for name, rows in features.items():
            column = f"{name} (layer)" if name.lower() in RESERVED else name
            if column in named:
                raise InputError(f"two columns are called '{column}'", do="choose one of the layers")
            if not rows[0].numel():
                raise InputError(f"{name} has no values", f"its shape is {tuple(rows.shape)}", "choose another layer")
            check_dtype(output.format, output.suffix, column, _column(rows).dtype)
            named[column] = rows
        check_columns(output, len(named), output.format)
        return named

    @property
    def is_save_due(self) -> bool:
        if self.output is None:
            return False
        waiting = sum(batch.count for batch in self.waiting)
        pending = waiting + (self.state.pending if self.state else 0)
        is_large = waiting * sum(column.row_bytes for column in self.columns.values()) >= formats.BLOCK_BYTES
        return super().is_save_due or is_large or 0 < self.output.shard <= pending

    def write(self, file: StrPath) -> None:
        """Make parts of the rows that wait, and say so; after an exception all of it can be done again."""
        output = self._output
        if self.state is not None and self.state.complete:
            return
        with write_errors(output.path):
            state = self.state or self._begin()
            if self.waiting:
                batch, first = self.job.merge(self.waiting), 0
                while first < batch.count:
                    room = output.shard - state.pending % output.shard if output.shard else batch.count
                    last = min(batch.count, first + room)
                    state = self._with_part(state, batch, first, last)
                    first = last
            skipped = tuple(image for image in self.skips if image[0] < self.done)
            state = replace(state, done=self.done, rows=self.rows, skipped=skipped)
            state.save(output)
            with signals_held():
                self.state, self.waiting = state, []
            while output.shard and self.state.pending >= output.shard:
                self._close_shard(self.state)

    def _begin(self) -> FeatureState:
        """Remove what an earlier run left, and say that this one has begun."""
        output, state = self._output, FeatureState(self._about(), columns=self.columns)
        if self.begun or not output.shard or output.begun():
            self._remove()
        self.begun = True
        state.save(output)
        return state

    def _remove(self) -> None:
        output = self._output
        for number in reversed(output.shard_numbers() if output.shard else []):
            remove(output.shard_file(number))
        remove(output.state)
        output.clear_work()

    def _with_part(self, state: FeatureState, batch: FeatureBatch, first: int, last: int) -> FeatureState:
        """The state with a part of some rows."""
        columns = (batch.features[name][first:last].numpy() for name in state.columns)
        facts = (batch.positions, batch.names, batch.sha256, batch.labels)
        with replacement(self._output.work_file(f"{state.made}.npz")) as stream:
            write_part(stream, columns, [each[first:last] for each in facts])
        parts = (*state.parts, (state.made, last - first))
        name, sha256 = batch.names[last - 1], batch.sha256[last - 1]
        return replace(state, made=state.made + 1, parts=parts, last=(as_text(name), sha256))

    def _close_shard(self, state: FeatureState) -> None:
        """Make the next file of the folder from the first parts; parts end where it ends."""
        output, count, rows = self._output, 0, 0
        while count < len(state.parts) and rows < output.shard:
            rows += state.parts[count][1]
            count += 1
        closed, rest = state.parts[:count], state.parts[count:]
        whole = _assembled(output, replace(state, parts=closed).table(output))
        size = os.path.getsize(whole)
        os.replace(whole, output.shard_file(len(state.shards)))
        self.state = replace(state, parts=rest, shards=(*state.shards, size))
        self.state.save(output)
        for number, _ in closed:
            remove(output.work_file(f"{number}.npz"))

    def finish(self) -> None:
        for column, number in self.overflowed.items():
            text = f"{number:,} finite values are too large for {self.columns[column].dtype} and became Inf"
            self.settings.listener.note(column, text)
        if self.output is None:
            return
        self.save()
        assert self.state is not None
        with write_errors(self.output.path):
            if self.output.shard:
                self._finish_folder(self.output, self.state)
            else:
                self._publish(self.output, self.state)

    def _finish_folder(self, output: Output, state: FeatureState) -> None:
        for name in glob.glob(os.path.join(glob.escape(output.target), ".hookscope-*.tmp")):
            remove(name)  # a killed run left it
        _write_skipped(output.skipped, self.skips)
        if state.parts:
            self._close_shard(state)
        with signals_held():
            self.state = replace(self.state or state, complete=True)
            self.state.save(output)
            output.clear_work()

    def _publish(self, output: Output, state: FeatureState) -> None:
        """Assemble the file and give it its name; a run that is killed here does it again."""
        table = state.table(output)
        whole, old = _assembled(output, table), output.work_file("old")
        _write_skipped(output.work_file(".lost.tsv"), self.skips)
        if output.format.rows_beside:
            formats.write_rows(output.work_file(".rows.tsv"), table)
        write_atomically(output.work_file(".json"), json.dumps(table.metadata, indent=1).encode())
        remove(old)
        with signals_held():
            if os.path.lexists(output.target):
                os.replace(output.target, old)  # it must not stand beside the files of another run
            for ending in output.endings():
                remove(output.target + ending)
                if os.path.exists(made := output.work_file(ending)):
                    os.replace(made, output.target + ending)
            os.replace(whole, output.target)
            self.state = replace(state, complete=True)
            os.unlink(output.state)  # first: a folder without it is what a complete run left
            output.clear_work()


def _assembled(output: Output, table: FeatureTable) -> str:
    """A file of these rows that has no name yet."""
    whole = output.work_file("whole" + output.suffix)
    remove(whole)
    output.format.write(whole, table)
    if os.path.isfile(whole):
        with open(whole, "rb") as stream:
            os.fsync(stream.fileno())
    return whole


def _write_skipped(path: str, skips: list[tuple[int, str, str]]) -> None:
    if skips:
        write_atomically(path, tsv([("position", "path", "error"), *skips]))
    else:
        remove(path)


def _written(output: Output, rows: int, skipped: int, columns: Mapping[str, Column], earlier: int) -> WrittenFeatures:
    shapes = {name: column.shape for name, column in columns.items()}
    dtypes = {name: column.dtype for name, column in columns.items()}
    beside = (os.path.join(output.path, "_lost.tsv") if output.shard else f"{output.path}.lost.tsv") if skipped else ""
    return WrittenFeatures(output.path, rows, skipped, shapes, earlier, dtypes=dtypes, skipped_file=beside)


def _column(rows: Tensor) -> Column:
    return Column(str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))


def _check_same_columns(columns: Mapping[str, Column], features: dict[str, Tensor], name: str) -> None:
    """Refuse an image whose features do not fit earlier images, also of a run that is resumed."""
    check_alike({column: each.shape for column, each in columns.items()}, features, name)
    for column, rows in features.items():
        here, there = _column(rows).dtype, columns[column].dtype
        if here != there:
            raise LayerError(f"{name}: {column} is {here}, and {there} for earlier images", do="give ‹dtype|--dtype›")


def _lock(lock: IO[bytes], output: Output) -> None:
    """Keep other runs away; the lock ends with this process in any case."""
    try:
        if fcntl is not None:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which workers would inherit
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # else the file system has no locks
            raise WriteError(f"another run writes to '{output.path}'", do="wait until it ends") from None


def _check_shards(output: Output, state: FeatureState) -> None:
    for number, size in enumerate(state.shards):
        path = output.shard_file(number)
        found = os.path.getsize(path) if os.path.exists(path) else 0
        if found != size:
            raise _damaged(output, path, f"it has {found:,} bytes of {size:,}")


def _damaged(output: Output, path: str, exists: str) -> InputError:
    asked = f"cannot resume '{output.path}': its file '{os.path.basename(path)}' is damaged"
    return InputError(asked, exists, "start again with ‹overwrite=True|--overwrite›")
