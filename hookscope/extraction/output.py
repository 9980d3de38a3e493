"""Where features are written: what is there already, and how far a run is."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hookscope.errors import InputError, UsageError, WriteError, printable
from hookscope.extraction.formats import FORMATS, Column, FeatureFormat, format_of
from hookscope.findings import counted
from hookscope.jobs import StateKind, read_state, write_state
from hookscope.system import StrPath, check_folder, check_writable


def append_to(name: str, data: Any) -> None:
    with open(name, "ab") as stream:  # not kept open: there may be more columns than a process may have files
        stream.write(data)


def sync(name: str) -> None:
    with open(name, "rb") as stream:
        os.fsync(stream.fileno())


def tsv(rows: Iterable[Iterable[Any]]) -> bytes:
    text, rows = io.StringIO(), [[str(value) for value in row] for row in rows]
    # csv does not quote \r where lines end with \n.
    has_returns = any("\r" in value for row in rows for value in row)
    lines = csv.writer(
        text, csv.excel_tab, lineterminator="\n", quoting=csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL
    )
    lines.writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def remove(path: str) -> None:
    """Remove a file or a folder that may be missing."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


DEFAULT_SHARD = 10_000
"""Rows of each file in a folder."""

_PROGRESS = "_progress.json"  # readers of folders leave out what begins with _
_PART = re.compile(r"part-(\d{5,})\.parquet")
_WORK = re.compile(r"\d+\.bin|old|whole\.\w+|_progress\.json|\.(lock|json|spare|rows\.tsv|lost\.tsv)|\.hookscope-.*")
_KIND = StateKind("progress of an extraction", "give the output of `extract`", name="features")


@dataclass(frozen=True, slots=True)
class Output:
    """Where features are written.

    Attributes:
        path: The file or folder as it was named.
        target: The same without links.
        suffix: The suffix of the format.
        shard: Rows of each file in a folder; 0 for one file.
    """

    path: str
    target: str
    suffix: str
    shard: int

    @property
    def format(self) -> FeatureFormat:
        return FORMATS[self.suffix]

    @property
    def work(self) -> str:
        """The folder of rows that are in no file yet."""
        if self.shard:
            return os.path.join(self.target, ".parts")
        return os.path.join(os.path.dirname(self.target), f".{os.path.basename(self.target)}.parts")

    @property
    def progress(self) -> str:
        return os.path.join(self.target if self.shard else self.work, _PROGRESS)

    @property
    def lost(self) -> str:
        """The file of lost images during the run."""
        return os.path.join(self.target, "_lost.tsv") if self.shard else os.path.join(self.work, ".lost.tsv")

    def begun(self) -> bool:
        return os.path.isfile(self.progress)

    def endings(self) -> list[str]:
        """What is added to the name of the file for the files beside it."""
        beside = self.format.rows_beside
        return [".lost.tsv", *([".rows.tsv"] if beside else []), *([".json"] if self.suffix == ".npy" else [])]

    def part(self, number: int) -> str:
        return os.path.join(self.target, f"part-{number:05}{self.suffix}")


def check_output(
    path: StrPath, shard: int | None = None, *, overwrite: bool = False, resume: bool = False, columns: int = 1
) -> Output:
    """Where `write_features` would write, or the error that it would raise before the first pass.

    Args:
        path: The file, whose suffix names the format, or a folder.
        shard: Rows of each file in a folder.
        overwrite: Whether an output that exists may be replaced.
        resume: Whether an interrupted run is continued.
        columns: The least number of columns, as far as it is known.

    Raises:
        UsageError: There is no such format, or it holds one column alone.
        InstallationError: The format needs a package that is not installed.
        WriteError: The output exists, or cannot be written.
    """
    name = os.fspath(path)
    if overwrite and resume:
        raise UsageError(
            "‹overwrite|--overwrite› starts again and ‹resume|--resume› continues", do="choose one of them"
        )
    suffix = os.path.splitext(name.rstrip(os.sep))[1].lower()
    folder = shard is not None or name.endswith(os.sep) or not suffix or (os.path.isdir(name) and suffix != ".zarr")
    is_folder = os.path.isdir(name)
    special = os.path.exists(name) and not is_folder and (folder or not os.path.isfile(name))
    if name in ("", "-") or special:  # standard output, a pipe, a file without suffix
        asked = f"cannot write features to '{name}'"
        raise UsageError(asked, do=f"name a file that ends in {', '.join(FORMATS)}, or a folder")
    if folder and suffix in FORMATS and suffix != ".parquet":
        raise UsageError(f"a folder holds .parquet files, and '{name}' is to be one file", do="name a folder")
    if shard is not None and shard < 1:
        raise UsageError(f"‹shard|--shard› must be at least 1, not {shard}")
    suffix = ".parquet" if folder else suffix
    output = Output(name, os.path.realpath(name), suffix, (shard or DEFAULT_SHARD) if folder else 0)
    if resume and folder and shard is None and output.begun():
        output = replace(output, shard=Progress.load(output).about["shard"])
    check_columns(output, columns, format_of(suffix, name))
    if folder:
        check_folder(name)
    else:
        check_writable(output.target + ".lost.tsv" if is_folder else output.target)
        if is_folder and not _is_ours(output):
            raise WriteError(f"cannot write {name}: it holds no features of hookscope", do="name another file")
    _check_nothing_there(output, overwrite, resume)
    return output


def part_numbers(output: Output) -> list[int]:
    return sorted(int(found[1]) for name in os.listdir(output.target) if (found := _PART.fullmatch(name)))


def _check_parts(output: Output) -> None:
    """Refuse files of others that have the names of parts: they would be replaced, or read as rows of the run."""
    if not output.shard or not (numbers := part_numbers(output)):
        return
    with contextlib.suppress(InputError):  # nobody knows which files belong to a run whose progress is damaged
        if numbers[-1] > len(Progress.load(output).shards):  # a killed run may have made one that it did not count
            name = os.path.basename(output.part(numbers[-1]))
            raise WriteError(f"'{name}' in '{output.path}' is no file of its run", do="move it, or name a new folder")


def check_columns(output: Output, columns: int, format: FeatureFormat) -> None:
    if format.one_column and columns > 1:
        others = ", ".join(suffix for suffix, each in FORMATS.items() if not each.one_column)
        asked = f"{output.suffix} holds the features of one layer, and the run gives {columns} columns"
        raise UsageError(asked, do=f"choose one layer, or one of {others}")


def _is_ours(output: Output) -> bool:
    with contextlib.suppress(InputError):
        return bool(metadata_of(output))
    return False


def _check_nothing_there(output: Output, overwrite: bool, resume: bool) -> None:
    work = os.listdir(output.work) if os.path.isdir(output.work) else []
    if others := [name for name in work if not _WORK.fullmatch(name)]:
        raise WriteError(
            f"the folder '{output.work}' is no folder of a run", f"it holds {others[0]}", "name another output"
        )
    if output.begun():
        _check_parts(output)
        if resume or overwrite:
            return
        progress = Progress.load(output)
        if not progress.complete:
            asked = f"'{output.path}' is the output of a run that did not end: {progress.done_words()} are done"
            raise WriteError(
                asked, do="continue it with ‹resume=True|--resume›, or start again with ‹overwrite=True|--overwrite›"
            )
    elif output.shard:
        others = os.listdir(output.target) if os.path.isdir(output.target) else []
        others = [name for name in others if name[0] != "." and name != os.path.basename(output.lost)]
        if others:
            asked = f"the folder '{output.path}' holds other files"
            raise WriteError(asked, f"{sorted(others)[0]} is one of {len(others)}", "name a new folder")
        return
    if overwrite or resume:
        return
    for ending in ("", *output.endings()) if not output.shard else ("",):
        if os.path.lexists(output.target + ending):
            raise WriteError(
                f"'{output.path}{ending}' exists", do="add ‹overwrite=True|--overwrite›, or name another output"
            )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        about: What the run does: the source, the list of images, and the versions and the time when it began.
        done: Number of images from the beginning of the list that are used or lost.
        rows: Number of images used.
        lost: Number of images lost.
        pending: Number of rows that are in no file yet.
        columns: Data type and shape of each column.
        row_bytes: Bytes of the file of pending rows.
        lost_bytes: Bytes of the file of lost images.
        shards: Rows and bytes of each file in the folder.
        last: Name and SHA-256 of the last image used.
        complete: Whether all rows are in their files.
    """

    about: dict[str, Any]
    done: int = 0
    rows: int = 0
    lost: int = 0
    pending: int = 0
    columns: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    row_bytes: int = 0
    lost_bytes: int = 0
    shards: tuple[tuple[int, int], ...] = ()
    last: tuple[str, str] = ("", "")
    complete: bool = False

    @classmethod
    def load(cls, output: Output) -> Progress:
        def restored(content: dict[str, Any]) -> Progress:
            columns = {name: (dtype, tuple(shape)) for name, (dtype, shape) in content.pop("columns").items()}
            shards = tuple((rows, size) for rows, size in content.pop("shards"))
            name, sha256 = content.pop("last")
            return cls(columns=columns, shards=shards, last=(name, sha256), **content)

        return read_state(output.progress, _KIND, restored)

    def save(self, output: Output) -> None:
        write_state(output.progress, _KIND, {name: getattr(self, name) for name in self.__slots__})

    def done_words(self) -> str:
        total = self.about["images"]
        return counted(self.done, "image") if total is None else f"{self.done} of {counted(total, 'image')}"

    def column(self, output: Output, number: int) -> Column:
        dtype, shape = list(self.columns.values())[number]
        return Column(os.path.join(output.work, f"{number}.bin"), dtype, shape)

    def metadata(self, rows: int) -> dict[str, Any]:
        """The metadata of a file of ``rows`` rows."""
        columns = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.columns.items()}
        return {**self.about, "columns": columns, "rows": rows}


def metadata_of(output: Output) -> dict[str, Any]:
    """The metadata of a complete file."""
    try:
        metadata = output.format.metadata(output.target)
        return {"shard": 0, "columns": metadata["columns"], **metadata}
    except Exception as error:  # whatever the reader of the format raises
        exists = printable(str(error).partition("\n")[0])
        raise InputError(f"'{output.path}' holds no features of hookscope, or is damaged", exists) from error
