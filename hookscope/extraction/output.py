"""Where features are written: what is there already, and how far a run is."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hookscope.errors import InputError, UsageError, WriteError, printable
from hookscope.extraction.formats import FORMATS, Column, FeatureFormat, FeatureTable, format_of
from hookscope.findings import counted
from hookscope.jobs import StateKind, read_state, write_state
from hookscope.system import StrPath, check_folder, check_writable


def remove(path: str) -> None:
    """Remove a file or a folder that may be missing."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


DEFAULT_SHARD = 10_000
"""Rows of each file in a folder."""

_STATE = "_progress.json"  # readers of folders leave out what begins with _
_SHARD = re.compile(r"part-(\d{5,})\.parquet")
_WORK = re.compile(r"\d+\.npz|old|whole\.\w+|_progress\.json|\.(lock|json|rows\.tsv|lost\.tsv)|\.hookscope-.*")
_KIND = StateKind("progress of an extraction", "give the output of `extract`", 2, "features")


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
    def state(self) -> str:
        return os.path.join(self.target if self.shard else self.work, _STATE)

    @property
    def skipped(self) -> str:
        """The file of skipped images."""
        return os.path.join(self.target, "_lost.tsv") if self.shard else f"{self.target}.lost.tsv"

    def begun(self) -> bool:
        return os.path.isfile(self.state)

    def endings(self) -> list[str]:
        """What is added to the name of the file for the files beside it."""
        beside = self.format.rows_beside
        return [".lost.tsv", *([".rows.tsv"] if beside else []), *([".json"] if self.suffix == ".npy" else [])]

    def shard_file(self, number: int) -> str:
        return os.path.join(self.target, f"part-{number:05}{self.suffix}")

    def shard_numbers(self) -> list[int]:
        """The shards that are there."""
        return sorted(int(found[1]) for name in os.listdir(self.target) if (found := _SHARD.fullmatch(name)))

    def work_file(self, name: str) -> str:
        return os.path.join(self.work, name)

    def clear_work(self) -> None:
        """Remove what a run left in the folder of rows, but its lock and files of others."""
        for name in os.listdir(self.work) if os.path.isdir(self.work) else ():
            if name != ".lock" and _WORK.fullmatch(name):
                remove(self.work_file(name))

    def leave_work(self) -> None:
        """Remove the lock, and the folders that nothing is in."""
        remove(self.work_file(".lock"))
        with contextlib.suppress(OSError):  # it holds parts, or files of others
            os.rmdir(self.work)
        with contextlib.suppress(OSError):
            os.rmdir(self.target)


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
        output = replace(output, shard=FeatureState.load(output).about["shard"])
    check_columns(output, columns, format_of(suffix, name))
    if folder:
        check_folder(name)
    else:
        check_writable(output.target + ".lost.tsv" if is_folder else output.target)
        if is_folder and not _is_ours(output):
            raise WriteError(f"cannot write {name}: it holds no features of hookscope", do="name another file")
    _check_nothing_there(output, overwrite, resume)
    return output


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
    if output.begun():
        _check_shards(output)
        if resume or overwrite:
            return
        state = FeatureState.load(output)
        if not state.complete:
            asked = f"'{output.path}' is the output of a run that did not end: {state.done_words()} are done"
            raise WriteError(
                asked, do="continue it with ‹resume=True|--resume›, or start again with ‹overwrite=True|--overwrite›"
            )
    elif output.shard:
        others = os.listdir(output.target) if os.path.isdir(output.target) else []
        others = [name for name in others if name[0] != "." and name != os.path.basename(output.skipped)]
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


def _check_shards(output: Output) -> None:
    """Refuse files of others that have the names of shards: they would be replaced, or read as rows of the run."""
    if not output.shard or not (numbers := output.shard_numbers()):
        return
    with contextlib.suppress(InputError):  # nobody knows which files belong to a run whose state is damaged
        if numbers[-1] > len(FeatureState.load(output).shards):  # a killed run may have made one that it did not count
            name = os.path.basename(output.shard_file(numbers[-1]))
            raise WriteError(f"'{name}' in '{output.path}' is no file of its run", do="move it, or name a new folder")


@dataclass(frozen=True, slots=True)
class FeatureState:
    """What a run has saved.

    Attributes:
        about: What the run does: its identity, the list of images, and the versions and the time when it began.
        done: Number of images from the beginning of the list that are used or skipped.
        rows: Number of images used.
        skipped: Position, name and error of each skipped image.
        columns: Data type and shape of each column.
        made: Number of parts that were ever written.
        parts: Number and rows of each part that is in no file yet.
        shards: Bytes of each file in the folder.
        last: Name and SHA-256 of the last image used.
        complete: Whether all rows are in their files.
    """

    about: dict[str, Any]
    done: int = 0
    rows: int = 0
    skipped: tuple[tuple[int, str, str], ...] = ()
    columns: dict[str, Column] = field(default_factory=dict)
    made: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    shards: tuple[int, ...] = ()
    last: tuple[str, str] = ("", "")
    complete: bool = False

    @classmethod
    def load(cls, output: Output) -> FeatureState:
        def restored(content: dict[str, Any]) -> FeatureState:
            columns = {name: Column(dtype, tuple(shape)) for name, (dtype, shape) in content.pop("columns").items()}
            lists: dict[str, Any] = {name: tuple(map(tuple, content.pop(name))) for name in ("skipped", "parts")}
            lists |= {name: tuple(content.pop(name)) for name in ("shards", "last")}
            return cls(columns=columns, **lists, **content)

        return read_state(output.state, _KIND, restored)

    def save(self, output: Output) -> None:
        columns = {name: (column.dtype, column.shape) for name, column in self.columns.items()}
        write_state(output.state, _KIND, {name: getattr(self, name) for name in self.__slots__} | {"columns": columns})

    @property
    def pending(self) -> int:
        """Number of rows that are in no file yet."""
        return sum(rows for _, rows in self.parts)

    def done_words(self) -> str:
        total = self.about["images"]
        return counted(self.done, "image") if total is None else f"{self.done} of {counted(total, 'image')}"

    def table(self, output: Output) -> FeatureTable:
        """The rows that are in no file yet."""
        columns = {name: asdict(column) for name, column in self.columns.items()}
        metadata = {**self.about, "columns": columns, "rows": self.pending}
        if not output.shard:
            metadata["lost"] = len(self.skipped)
        return FeatureTable([(output.work_file(f"{at}.npz"), rows) for at, rows in self.parts], self.columns, metadata)


def metadata_of(output: Output) -> dict[str, Any]:
    """The metadata of a complete file."""
    try:
        metadata = output.format.metadata(output.target)
        return {"shard": 0, "columns": metadata["columns"], **metadata}
    except Exception as error:  # whatever the reader of the format raises
        exists = printable(str(error).partition("\n")[0])
        raise InputError(f"'{output.path}' holds no features of hookscope, or is damaged", exists) from error
