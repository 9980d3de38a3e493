"""Where features are written: what is there already, and how far a run is."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hookscope.errors import InputError, UsageError, WriteError, check_whole, first_line
from hookscope.extraction.formats import FOLDER, FORMATS, Column, FeatureFormat, FeatureTable, format_of, shards_in
from hookscope.findings import counted
from hookscope.jobs import StateKind, read_state, write_state
from hookscope.system import StrPath, check_folder, check_writable


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


DEFAULT_SHARD = 10_000
"""Rows of each file in a folder."""

_WORK = re.compile(r"\d+\.npz|old|whole(\.\w+)?|_progress\.json|\.(json|rows\.tsv|lost\.tsv)|\.hookscope-.*")
_KIND = StateKind("progress of an extraction", "give the output of `extract`", 2, "features")


@dataclass(frozen=True, slots=True)
class Output:
    """Where features are written."""

    path: str
    target: str  # the path without links
    suffix: str
    shard: int  # rows of each file in a folder, 0 for one file

    @property
    def format(self) -> FeatureFormat:
        return FOLDER if self.shard else FORMATS[self.suffix]

    @property
    def work(self) -> str:
        return os.path.join(os.path.dirname(self.target), f".{os.path.basename(self.target)}.parts")

    @property
    def state(self) -> str:
        return self.work_file("_progress.json")

    def work_file(self, name: str) -> str:
        return os.path.join(self.work, name)

    def begun(self) -> bool:
        return os.path.isfile(self.state)

    def beside(self, ending: str, path: str = "") -> str:
        """The path of a file beside the output, or in its folder, where readers leave out what begins with _."""
        path = path or self.path
        return os.path.join(path, "_" + ending[1:]) if self.shard else path + ending

    def endings(self) -> list[str]:
        beside = self.format.rows_beside
        return [".lost.tsv", *([".rows.tsv"] if beside else []), *([".json"] if self.suffix == ".npy" else [])]

    def clear_work(self) -> None:
        """Remove what a run left in the folder of parts, but its lock and files of others."""
        for name in os.listdir(self.work) if os.path.isdir(self.work) else ():
            if _WORK.fullmatch(name):
                remove(self.work_file(name))

    def is_there(self) -> bool:
        if self.shard:
            return os.path.isdir(self.target) and bool(shards_in(self.target))
        return os.path.exists(self.target)

    def publish(self, whole: str, old: str) -> None:
        """Give the assembled files in the folder of parts their names."""
        if self.shard:
            os.makedirs(self.target, exist_ok=True)
            for name in reversed(shards_in(self.target)):
                remove(os.path.join(self.target, name))
            for name in shards_in(whole):
                os.replace(os.path.join(whole, name), os.path.join(self.target, name))
        elif os.path.lexists(self.target):
            os.replace(self.target, old)  # it must not stand beside the files of another run
        for ending in self.endings():
            remove(self.beside(ending, self.target))
            if os.path.exists(made := self.work_file(ending)):
                os.replace(made, self.beside(ending, self.target))
        if not self.shard:
            os.replace(whole, self.target)
        os.unlink(self.state)  # first: a folder without it is what a complete run left
        self.clear_work()

    def leave_work(self) -> None:
        remove(self.work_file(".lock"))
        with contextlib.suppress(OSError):  # it holds parts, or files of others
            os.rmdir(self.work)


def check_output(
    path: StrPath, shard: int | None = None, *, overwrite: bool = False, resume: bool = False, columns: int = 1
) -> Output:
    """Where `Extraction.save` would write ``columns`` or more, or the error that it would raise at once."""
    name = os.fspath(path)
    if overwrite and resume:
        asked = "‹overwrite|--overwrite› starts again and ‹resume|--resume› continues"
        raise UsageError(asked, do="choose one of them")
    suffix = os.path.splitext(name.rstrip(os.sep))[1].lower()
    folder = shard is not None or name.endswith(os.sep) or not suffix or (os.path.isdir(name) and suffix != ".zarr")
    is_folder = os.path.isdir(name)
    special = os.path.exists(name) and not is_folder and (folder or not os.path.isfile(name))
    if name in ("", "-") or special:  # standard output, a pipe, a file without suffix
        asked = f"cannot write features to '{name}'"
        raise UsageError(asked, do=f"name a file that ends in {', '.join(FORMATS)}, or a folder")
    if folder and suffix in FORMATS and suffix != ".parquet":
        raise UsageError(f"a folder holds .parquet files, and '{name}' is to be one file", do="name a folder")
    check_whole("‹shard|--shard›", shard, optional=True)
    suffix = ".parquet" if folder else suffix
    output = Output(name, os.path.realpath(name), suffix, (shard or DEFAULT_SHARD) if folder else 0)
    check_columns(output, columns, format_of(suffix, name))
    if folder:
        check_folder(name)
        _check_files_in(output)
    if resume and folder and shard is None and (output.begun() or output.is_there()):
        about = FeatureState.load(output).about if output.begun() else metadata_of(output)
        output = replace(output, shard=about["shard"])
    if not folder:
        check_writable(output.target + ".lost.tsv" if is_folder else output.target)
        if is_folder and not _is_ours(output):
            raise WriteError(f"cannot write {name}: it holds no features of hookscope", do="name another file")
    _check_nothing_there(output, overwrite, resume)
    return output


def check_columns(output: Output, columns: int, format: FeatureFormat) -> None:
    if format.one_column and columns > 1:
        others = ", ".join(suffix for suffix, other in FORMATS.items() if not other.one_column)
        asked = f"{output.suffix} holds the features of one layer, and the run gives {columns} columns"
        raise UsageError(asked, do=f"choose one layer, or one of {others}")


def _is_ours(output: Output) -> bool:
    with contextlib.suppress(InputError):
        return bool(metadata_of(output))
    return False


def _check_nothing_there(output: Output, overwrite: bool, resume: bool) -> None:
    if resume or overwrite:
        return
    if output.begun():
        state = FeatureState.load(output)
        asked = f"'{output.path}' is the output of a run that did not end: {state.done_words()} are done"
        do = "continue it with ‹resume=True|--resume›, or start again with ‹overwrite=True|--overwrite›"
        raise WriteError(asked, do=do)
    beside = [] if output.shard else list(map(output.beside, output.endings()))
    for path in [output.path] * output.is_there() + list(filter(os.path.lexists, beside)):
        raise WriteError(f"'{path}' exists", do="add ‹overwrite=True|--overwrite›, or name another output")


def _check_files_in(output: Output) -> None:
    """Refuse files of others: they would be replaced, or read as rows of the run."""
    names = os.listdir(output.target) if os.path.isdir(output.target) else []
    names = sorted(name for name in names if name[0] not in "._")
    shards = shards_in(output.target) if names else []
    others = [
        name for name in shards if not _is_ours(replace(output, target=os.path.join(output.target, name), shard=0))
    ]
    if others or (names and not shards):
        others = others or names
        asked = f"the folder '{output.path}' holds other files"
        raise WriteError(asked, f"{others[0]} is one of {len(others)}", "name a new folder")


@dataclass(frozen=True, slots=True)
class FeatureState:
    """What a run has saved."""

    about: dict[str, Any]  # its identity, the list of images, and the versions and the time when it began
    done: int = 0  # images from the beginning of the list that are used or skipped
    rows: int = 0
    skipped: tuple[tuple[int, str, str], ...] = ()  # position, name and error
    columns: dict[str, Column] = field(default_factory=dict)
    parts: tuple[int, ...] = ()  # number of rows of each part
    last: tuple[str, str] = ("", "")  # name and SHA-256 of the last image used

    @classmethod
    def load(cls, output: Output) -> FeatureState:
        def restored(content: dict[str, Any]) -> FeatureState:
            columns = {name: Column(dtype, tuple(shape)) for name, (dtype, shape) in content["columns"].items()}
            tuples = {name: tuple(content[name]) for name in ("parts", "last")}
            skipped = tuple(map(tuple, content["skipped"]))
            return cls(**content | tuples | {"columns": columns, "skipped": skipped})

        return read_state(output.state, _KIND, restored)

    def save(self, output: Output) -> None:
        columns = {name: (column.dtype, column.shape) for name, column in self.columns.items()}
        write_state(output.state, _KIND, {name: getattr(self, name) for name in self.__slots__} | {"columns": columns})

    def done_words(self) -> str:
        total = self.about["images"]
        return counted(self.done, "image") if total is None else f"{self.done} of {counted(total, 'image')}"

    def table(self, output: Output) -> FeatureTable:
        columns = {name: asdict(column) for name, column in self.columns.items()}
        metadata = {**self.about, "columns": columns, "rows": self.rows, "lost": len(self.skipped)}
        parts = [(output.work_file(f"{number}.npz"), rows) for number, rows in enumerate(self.parts)]
        return FeatureTable(parts, self.columns, metadata)


def metadata_of(output: Output) -> dict[str, Any]:
    try:
        metadata = output.format.metadata(output.target)
        return {"shard": 0, "columns": metadata["columns"], **metadata}
    except Exception as error:  # whatever the reader of the format raises
        exists = first_line(error)
        raise InputError(f"'{output.path}' holds no features of hookscope, or is damaged", exists) from error
