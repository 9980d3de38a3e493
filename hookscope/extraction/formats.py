"""The formats of feature files: one function writes a file in constant memory, one reads its metadata."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from hookscope.errors import InputError, InstallationError, UsageError, nearest

Array = np.ndarray[Any, Any]

ROW_FIELDS = ("position", "path", "sha256", "label")
"""What is known of the image of each row; columns of tables, and the header of files of rows."""

RESERVED = (*ROW_FIELDS, "metadata")

BLOCK_BYTES = 1 << 23
"""Bytes of features that are held at once."""

_BLOCK_ROWS = 1 << 14  # their paths take memory too
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class FeatureTable:
    """Rows to assemble, from row ``first`` of the ``parts`` on."""

    parts: Sequence[tuple[str, int]]  # files of `write_part` with their numbers of rows
    columns: Mapping[str, Column]  # in the order of the arrays in a part
    metadata: Mapping[str, Any]  # with the number of rows
    first: int = 0

    @property
    def rows(self) -> int:
        return int(self.metadata["rows"])

    @property
    def block_rows(self) -> int:
        """Rows of all columns that make a block."""
        rows = BLOCK_BYTES // sum(column.row_bytes for column in self.columns.values())
        return max(1, min(self.rows, rows, _BLOCK_ROWS))

    def blocks(self, name: str) -> Iterator[Array]:
        """The values of a column or of one of `ROW_FIELDS`; a block has the same rows of every column."""
        key = name if name in ROW_FIELDS else str(list(self.columns).index(name))
        held, at = list[Array](), 0
        for path, rows in self.parts:
            begin, end, at = max(0, self.first - at), min(rows, self.first + self.rows - at), at + rows
            if begin >= end:
                continue
            with np.load(path) as part:
                held.append(part[key][begin:end])
            while sum(map(len, held)) >= self.block_rows:
                whole = np.concatenate(held)
                yield whole[: self.block_rows]
                held = [whole[self.block_rows :]]
        if sum(map(len, held)):
            yield np.concatenate(held)

    def fields(self) -> Iterator[tuple[Array, ...]]:
        """An array for each of `ROW_FIELDS`, of the rows of each block."""
        return zip(*map(self.blocks, ROW_FIELDS), strict=True)

    @property
    def text(self) -> str:
        return json.dumps(self.metadata)


def write_part(stream: IO[bytes], columns: Iterable[Array], fields: Sequence[Sequence[Any]]) -> None:
    """Write some rows: the values of each column, and of each of `ROW_FIELDS`."""
    position, *texts = fields
    named = {str(number): column for number, column in enumerate(columns)} | {"position": np.array(position, np.int64)}
    named |= {name: np.array(list(map(as_text, text))) for name, text in zip(ROW_FIELDS[1:], texts, strict=True)}
    np.savez(stream, **named)  # type: ignore[arg-type]
    os.fsync(stream.fileno())


def as_text(value: Any) -> str:
    """A text that UTF-8 can hold; names of files may be any bytes."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def escaped(path: str) -> str:
    """``path`` with %E9 for a byte that is not UTF-8, and %25 for %: `urllib.parse.unquote_to_bytes` turns it back."""
    return "".join(f"%{ord(c) & 0xFF:02X}" if c == "%" or "\udc80" <= c <= "\udcff" else c for c in path)


def tsv(rows: Iterable[Iterable[Any]]) -> bytes:
    text, rows = io.StringIO(), [[as_text(value) for value in row] for row in rows]
    has_returns = any("\r" in value for row in rows for value in row)  # which csv does not quote by itself
    dialect: Any = {"lineterminator": "\n", "quoting": csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL}
    csv.writer(text, csv.excel_tab, **dialect).writerows(rows)
    return text.getvalue().encode()


def _write_npy(path: str, table: FeatureTable) -> None:
    ((name, column),) = table.columns.items()
    with open(path, "wb") as stream:
        _write_array(stream, np.dtype(column.dtype), (table.rows, *column.shape), table.blocks(name))


def _write_array(stream: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...], blocks: Iterator[Array]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    for block in blocks:
        stream.write(block.astype(dtype, copy=False).tobytes())


def _npy_metadata(path: str) -> Any:
    np.lib.format.open_memmap(path, mode="r")  # an error if the file is cut short
    with open(path + ".json", "rb") as stream:
        return json.load(stream)


def _write_npz(path: str, table: FeatureTable) -> None:
    with zipfile.ZipFile(path, "w") as archive:

        def add(name: str, dtype: Any, shape: tuple[int, ...], blocks: Iterator[Array], kind: int) -> None:
            member = zipfile.ZipInfo(name + ".npy")
            member.compress_type = kind
            with archive.open(member, "w", force_zip64=True) as stream:
                _write_array(stream, np.dtype(dtype), shape, blocks)

        for name in ROW_FIELDS:
            dtype = max((block.dtype for block in table.blocks(name)), key=lambda dtype: dtype.itemsize)
            add(name, dtype, (table.rows,), table.blocks(name), zipfile.ZIP_DEFLATED)
        for name, column in table.columns.items():
            add(name, column.dtype, (table.rows, *column.shape), table.blocks(name), zipfile.ZIP_STORED)
        text = np.array(table.text)
        add("metadata", text.dtype, (), iter([text]), zipfile.ZIP_STORED)


def _npz_metadata(path: str) -> Any:
    with open(path, "rb") as stream, np.lib.npyio.NpzFile(stream) as arrays:
        return json.loads(str(arrays["metadata"]))


def _write_safetensors(path: str, table: FeatureTable) -> None:
    header: dict[str, Any] = {"__metadata__": {"hookscope": table.text}}
    end = 0
    for name, column in table.columns.items():
        begin, end = end, end + table.rows * column.row_bytes
        shape = [table.rows, *column.shape]
        header[name] = {"dtype": _SAFETENSORS[column.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for block in itertools.chain.from_iterable(map(table.blocks, table.columns)):
            stream.write(block.tobytes())


def _safetensors_metadata(path: str) -> Any:
    with open(path, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        if stream.tell() + end != os.fstat(stream.fileno()).st_size:
            raise ValueError("it is cut short")
    return json.loads(header["__metadata__"]["hookscope"])


def _write_parquet(path: str, table: FeatureTable) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    fields = [pa.field(name, pa.string() if number else pa.int64()) for number, name in enumerate(ROW_FIELDS)]
    for name, column in table.columns.items():
        value = pa.from_numpy_dtype(np.dtype(column.dtype))
        kind = pa.list_(value, math.prod(column.shape)) if column.shape else value
        fields.append(pa.field(name, kind, metadata={"shape": json.dumps(column.shape)}))
    schema = pa.schema(fields, {"hookscope": table.text})
    blocks = map(table.blocks, table.columns)
    # A dictionary or a range of values helps where values repeat, and features do not.
    settings = {"use_dictionary": ["label"], "write_statistics": list(ROW_FIELDS)}
    with open(path, "wb") as stream, parquet.ParquetWriter(stream, schema, **settings) as writer:
        for texts, *features in zip(table.fields(), *blocks, strict=True):
            arrays = [pa.array(text.astype(object) if number else text) for number, text in enumerate(texts)]
            for block in features:
                flat = pa.array(block.reshape(-1))
                size = math.prod(block.shape[1:])
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, size) if block.ndim > 1 else flat)
            writer.write_table(pa.table(arrays, schema=schema))


def _write_folder(path: str, table: FeatureTable) -> None:
    os.mkdir(path)
    shard = table.metadata["shard"]
    for number, first in enumerate(range(0, table.rows, shard)):
        metadata = {**table.metadata, "rows": min(shard, table.rows - first)}
        _write_parquet(os.path.join(path, f"part-{number:05}.parquet"), replace(table, metadata=metadata, first=first))


def shards_in(path: str) -> list[str]:
    """The names of the files in a folder that are named as the files of a run."""
    return sorted(filter(re.compile(r"part-\d{5,}\.parquet").fullmatch, os.listdir(path)))


def _parquet_metadata(path: str) -> Any:
    from pyarrow import parquet

    return json.loads(parquet.read_schema(path).metadata[b"hookscope"])


def _folder_metadata(path: str) -> Any:
    shards = [_parquet_metadata(os.path.join(path, name)) for name in shards_in(path)]
    return {**shards[0], "rows": sum(metadata["rows"] for metadata in shards)}


def _write_zarr(path: str, table: FeatureTable) -> None:
    import zarr

    group = zarr.create_group(path, attributes={"hookscope": dict(table.metadata)})
    arrays: dict[str, tuple[Any, tuple[int, ...], Any]]
    arrays = {name: ("int64" if name == "position" else str, (), None) for name in ROW_FIELDS}
    arrays |= {name: (column.dtype, column.shape, {"layer": name}) for name, column in table.columns.items()}
    for name, (dtype, shape, attributes) in arrays.items():
        array = group.create_array(
            name.replace("/", "%2F"),  # which would make a group
            shape=(table.rows, *shape),
            chunks=(table.block_rows, *shape),
            dtype=dtype,
            attributes=attributes,
        )
        first = 0
        for block in table.blocks(name):
            array[first : first + len(block)] = block.astype(object) if dtype is str else block
            first += len(block)


def _zarr_metadata(path: str) -> Any:
    import zarr

    return zarr.open_group(path, mode="r").attrs["hookscope"]


@dataclass(frozen=True, slots=True)
class FeatureFormat:
    """A format of feature files: it writes a new file or folder, and reads the metadata of one."""

    write: Callable[[str, FeatureTable], None]
    metadata: Callable[[str], Any]
    package: str = ""
    extra: str = ""  # the extra of hookscope that installs the package
    one_column: bool = False  # whether a file holds one array alone
    rows_beside: bool = False  # whether the rows are in a file beside it
    without: tuple[str, ...] = ()  # data types that it does not have


_COMPLEX = ("complex64", "complex128")
FORMATS = {
    ".npy": FeatureFormat(_write_npy, _npy_metadata, one_column=True, rows_beside=True),
    ".npz": FeatureFormat(_write_npz, _npz_metadata),
    ".safetensors": FeatureFormat(_write_safetensors, _safetensors_metadata, rows_beside=True, without=_COMPLEX[1:]),
    ".parquet": FeatureFormat(_write_parquet, _parquet_metadata, "pyarrow", "parquet", without=_COMPLEX),
    ".zarr": FeatureFormat(_write_zarr, _zarr_metadata, "zarr", "zarr"),
}
"""The formats by the suffix of their files."""

FOLDER = replace(FORMATS[".parquet"], write=_write_folder, metadata=_folder_metadata)
"""A folder of .parquet files."""


def format_of(suffix: str, name: str) -> FeatureFormat:
    """The format of a suffix of the file ``name``; its package is imported."""
    if suffix not in FORMATS:
        do = f"end the name in {', '.join(FORMATS)}, or name a folder"
        raise UsageError(f"no format for '{name}'", nearest(suffix, list(FORMATS)), do)
    format = FORMATS[suffix]
    try:
        if format.package:
            importlib.import_module(format.package)
    except ImportError as error:
        asked = f"{suffix} needs {format.package}, which is not installed"
        raise InstallationError(asked, do=f"pip install 'hookscope[{format.extra}]'") from error
    return format


def check_dtype(format: FeatureFormat, suffix: str, name: str, dtype: str) -> None:
    if dtype not in (*_SAFETENSORS, "complex128") or dtype in format.without:
        asked = f"{suffix} cannot hold {name}, which is {dtype}"
        raise InputError(asked, do="choose another ‹dtype|--dtype› or format")
