"""Write features to files: in constant memory, in order, and so that a killed run can be resumed.

Rows wait in numbered parts in a folder; a part is written whole, and then the state that counts it. The parts become
the output when the last row is done.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from torch import Tensor

from hookscope.errors import InputError, LayerError, WriteError, first_line
from hookscope.extraction import formats
from hookscope.extraction.facts import FeatureBatch, WrittenFeatures
from hookscope.extraction.formats import RESERVED, ROW_FIELDS, Column, as_text, check_dtype, escaped, tsv, write_part
from hookscope.extraction.job import check_alike
from hookscope.extraction.output import FeatureState, Output, check_columns, metadata_of, remove
from hookscope.jobs import AGAIN, Part, Progress, RunIdentity, SavedRun, hash_of_names, picture_of, pictures_in
from hookscope.models import package_versions
from hookscope.system import (
    StrPath,
    is_locked_by_another,
    make_folder,
    replacement,
    signals_held,
    write_atomically,
    write_errors,
)


@dataclass(frozen=True)
class FeatureSource(RunIdentity):
    """What features were made from, which their files say."""

    pool: str = "none"
    dtype: str = ""  # empty for the data type of the layer
    targets: tuple[str, ...] = ()  # classes whose probabilities are columns
    logits: bool = False  # whether they are a column


@dataclass
class FeatureRun(SavedRun[FeatureBatch]):
    """A run that extracts features, and keeps none."""

    columns: dict[str, Column] = field(default_factory=dict, init=False)
    overflowed: Counter[str] = field(default_factory=Counter, init=False)

    def merge(self, part: Part[FeatureBatch], value: FeatureBatch) -> None:
        self.columns = self.columns or {name: _column(rows) for name, rows in value.features.items()}
        check_alike({column: layout.shape for column, layout in self.columns.items()}, value.features, value.names[0])
        for column, rows in value.features.items():
            if (here := _column(rows).dtype) != (there := self.columns[column].dtype):
                asked = f"{value.names[0]}: {column} is {here}, and {there} for earlier images"
                raise LayerError(asked, do="give ‹dtype|--dtype›")
        self.overflowed.update(value.overflowed)

    def finish(self) -> None:
        for column, number in self.overflowed.items():
            text = f"{number:,} finite values are too large for {self.columns[column].dtype} and became Inf"
            self.settings.listener.note(column, text)


@dataclass
class WritingRun(FeatureRun):
    """A run that writes features; ``count`` is the number of images, if it is known."""

    output: Output
    source: FeatureSource
    count: int | None
    state: FeatureState = field(init=False)
    waiting: list[FeatureBatch] = field(default_factory=list, init=False)  # in no part yet
    skips: list[tuple[int, str, str]] = field(default_factory=list, init=False)

    def written(self, resume: bool = False) -> WrittenFeatures:
        output, self.state = self.output, FeatureState(self._about())
        if self._escapes:
            self.settings.listener.note(output.path, "paths have escapes such as %E9, because some are not UTF-8")
        make_folder(output.work)
        with open(output.work_file(".lock"), "wb") as lock:
            if is_locked_by_another(lock.fileno()):
                raise WriteError(f"another run writes to '{output.path}'", do="wait until it ends")
            try:
                if resume and not output.begun() and (complete := self._complete()):
                    self.settings.listener.start(complete.earlier)
                    return complete
                if not resume:
                    output.clear_work()
                self.do(resume)
            finally:
                if not output.begun():
                    output.clear_work()
                output.leave_work()
        return _written(output, self.images, len(self.skips), self.columns, self.earlier)

    def _complete(self) -> WrittenFeatures | None:
        if not (output := self.output).is_there():
            return None
        metadata = metadata_of(output)
        self._check_same(metadata)
        rows, skipped = metadata["rows"], metadata["lost"]
        columns = {name: Column(facts["dtype"], tuple(facts["shape"])) for name, facts in metadata["columns"].items()}
        return replace(_written(output, rows, skipped, columns, rows + skipped), was_complete=True)

    def load(self, file: StrPath) -> Progress:
        output, state = self.output, FeatureState.load(self.output)
        self._check_same(state.about)
        positions = [image[0] for image in state.skipped]
        for path, rows in state.table(output).parts:
            file = os.path.basename(path)
            try:
                if not os.path.isfile(path):  # a pipe would wait for ever
                    raise OSError("no such file")
                with zipfile.ZipFile(path) as part:  # the list of its arrays is at its end
                    with part.open("position.npy") as stream:
                        positions += np.lib.format.read_array(stream).tolist()
                    for number, (name, column) in enumerate(state.columns.items()):
                        with part.open(f"{number}.npy") as stream:
                            np.lib.format.read_magic(stream)
                            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
                        if (*shape, dtype.name) != (rows, *column.shape, column.dtype):
                            raise ValueError(f"it holds other values of {name}")
            except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
                asked = f"cannot resume '{output.path}': its file '{file}' is damaged"
                raise InputError(asked, first_line(error), "start again with ‹overwrite=True|--overwrite›") from error
        if sorted(positions) != [*range(state.done)]:
            asked = f"cannot resume '{output.path}': its parts do not hold the first {state.done} images, each once"
            raise InputError(asked, do="start again with ‹overwrite=True|--overwrite›")
        name, sha256 = state.last
        name = os.fsdecode(unquote_to_bytes(name)) if self._escapes else name
        if sha256 and pictures_in([name]) not in ([None], [picture_of(sha256)]):
            asked = f"cannot resume '{output.path}': the image '{name}' has changed since"
            raise InputError(asked, do="start again with ‹overwrite=True|--overwrite›")
        self.state, self.columns, self.skips = state, state.columns, list(state.skipped)
        return Progress.after(self.paths, state.done, len(state.skipped))

    @cached_property
    def _escapes(self) -> bool:
        return any(path != as_text(path) for path in self.paths)

    def _about(self) -> dict[str, Any]:
        about = {
            **({"paths": "percent-encoded"} if self._escapes else {}),
            **package_versions(),
            **asdict(self.source),
            "images": self.count,
            "images_sha256": hash_of_names(self.paths),
            "shard": self.output.shard,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return dict(json.loads(json.dumps(about)))

    def _check_same(self, saved: Mapping[str, Any]) -> None:
        """Refuse to resume the run of another source, list of images or size of files."""
        path, wanted = self.output.path, self.state.about
        source = FeatureSource(**{entry.name: saved.get(entry.name, "") for entry in fields(FeatureSource)})
        source.check_resumed_by(self.source, path)
        old, new = saved.get("images"), wanted["images"]
        if old != new or saved.get("images_sha256") != wanted["images_sha256"]:
            count = "" if old == new else f": {old} images, not {new}"
            raise InputError(f"cannot resume '{path}'", f"it was made from another list of images{count}", AGAIN)
        if saved["shard"] != wanted["shard"]:
            exists = f"it was made with ‹shard|--shard› {saved['shard']}, not {wanted['shard']}"
            raise InputError(f"cannot resume '{path}'", exists, AGAIN)

    def report(self, part: Part[FeatureBatch]) -> None:
        super().report(part)
        as_path = escaped if self._escapes else as_text
        self.skips += [(image.position, as_path(image.name), as_text(image.error)) for image in part.skipped]

    def merge(self, part: Part[FeatureBatch], value: FeatureBatch) -> None:
        names = tuple(map(escaped, value.names)) if self._escapes else value.names
        value = replace(value, features=self._storable(value.features), names=names)
        super().merge(part, value)
        self.waiting.append(value)

    def _storable(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The features by column; a layer that is called as a field of the row gets another name."""
        output, named = self.output, dict[str, Tensor]()
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
        waiting = sum(rows.nbytes for batch in self.waiting for rows in batch.features.values())
        return super().is_save_due or waiting >= formats.BLOCK_BYTES

    def write(self, file: StrPath) -> None:
        """Make a part of the rows that wait, and say so; after an exception it can be done again."""
        state, skipped = self.state, tuple(image for image in self.skips if image[0] < self.done)
        state = replace(state, done=self.done, rows=self.images, skipped=skipped, columns=self.columns)
        with write_errors(self.output.path):
            if self.waiting:
                batch: FeatureBatch = self.job.merge(self.waiting)
                columns = (batch.features[name].numpy() for name in self.columns)
                facts = (batch.positions, batch.names, batch.sha256, batch.labels)
                with replacement(self.output.work_file(f"{len(state.parts)}.npz")) as stream:
                    write_part(stream, columns, facts)
                last = (as_text(batch.names[-1]), batch.sha256[-1])
                state = replace(state, parts=(*state.parts, batch.count), last=last)
            state.save(self.output)
        with signals_held():
            self.state, self.waiting = state, []

    def finish(self) -> None:
        """Assemble the output and give it its name; a run that is killed here does it again."""
        super().finish()
        self.save()
        output, table = self.output, self.state.table(self.output)
        whole, old = output.work_file("whole" + output.suffix), output.work_file("old")
        with write_errors(output.path):
            remove(whole)
            output.format.write(whole, table)
            if os.path.isfile(whole):
                with open(whole, "rb") as stream:
                    os.fsync(stream.fileno())
            if self.skips:
                lines = tsv([("position", "path", "error"), *self.skips])
                write_atomically(output.work_file(".lost.tsv"), lines)
            if output.format.rows_beside:
                with open(output.work_file(".rows.tsv"), "wb") as stream:
                    stream.write(tsv([ROW_FIELDS]))
                    for fields_of_block in table.fields():
                        stream.write(tsv(zip(*fields_of_block, strict=True)))
            write_atomically(output.work_file(".json"), json.dumps(table.metadata, indent=1).encode())
            remove(old)
            with signals_held():
                output.publish(whole, old)
                self.file = None  # which is gone


def _written(output: Output, rows: int, skipped: int, columns: Mapping[str, Column], earlier: int) -> WrittenFeatures:
    shapes = {name: column.shape for name, column in columns.items()}
    dtypes = {name: column.dtype for name, column in columns.items()}
    lost, *beside = map(output.beside, output.endings())
    lost = lost if skipped else ""
    return WrittenFeatures(output.path, rows, skipped, shapes, earlier, False, dtypes, lost, tuple(beside))


def _column(rows: Tensor) -> Column:
    return Column(str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))
