"""The formats of feature files: one function writes a file in constant memory, one reads its metadata."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from hookscope.errors import InputError, InstallationError, UsageError, nearest

Array = np.ndarray[Any, Any]

ROW_FIELDS = ("position", "path", "sha256", "label")
"""What is known of the image of each row; columns of tables, and the header of files of rows."""

RESERVED = (*ROW_FIELDS, "metadata")

_BLOCK = 1 << 24  # bytes of features that are held at once
_BLOCK_ROWS = 1 << 14  # their paths take memory too
_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


@dataclass(frozen=True, slots=True)
class Column:
    """Features of one column in a file of raw values, row after row.

    Attributes:
        file: The file.
        dtype: Their data type.
        shape: Shape of the values of one row.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class FeatureTable:
    """Rows to assemble: columns of raw values, the file of `ROW_FIELDS` with its header, and metadata."""

    rows: int
    columns: Mapping[str, Column]
    row_file: str
    metadata: Mapping[str, Any]

    @property
    def block_rows(self) -> int:
        """Rows of all columns that are held at once."""
        rows = _BLOCK // sum(column.row_bytes for column in self.columns.values())
        return max(1, min(self.rows, rows, _BLOCK_ROWS))

    def blocks(self, column: Column) -> Iterator[Array]:
        """The values of a column, ``(block_rows, ...)`` and the rest."""
        with open(column.file, "rb") as stream:
            for first in range(0, self.rows, self.block_rows):
                count = min(self.block_rows, self.rows - first)
                values = np.fromfile(stream, column.dtype, count * math.prod(column.shape))
                yield values.reshape(count, *column.shape)

    def fields(self) -> Iterator[list[Array]]:
        """An array for each of `ROW_FIELDS`, of the rows of each block."""
        with open(self.row_file, encoding="utf-8", newline="") as stream:
            records = itertools.islice(csv.reader(stream, csv.excel_tab), 1, self.rows + 1)
            while block := list(itertools.islice(records, self.block_rows)):
                positions, *texts = zip(*block, strict=True)
                yield [np.array(positions, np.int64), *(np.array(text, object) for text in texts)]

    @property
    def text(self) -> str:
        """The metadata as JSON."""
        return json.dumps(self.metadata)


def _write_npy(path: str, table: FeatureTable) -> None:
    (column,) = table.columns.values()
    with open(path, "wb") as stream:
        _write_array(stream, np.dtype(column.dtype), (table.rows, *column.shape), table.blocks(column))


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
    widths = [1] * len(ROW_FIELDS)
    for _, *texts in table.fields():
        widths[1:] = [max(width, *map(len, text)) for width, text in zip(widths[1:], texts, strict=True)]
    with zipfile.ZipFile(path, "w") as archive:

        def add(name: str, dtype: Any, shape: tuple[int, ...], blocks: Iterator[Array], kind: int) -> None:
            member = zipfile.ZipInfo(name + ".npy")
            member.compress_type = kind
            with archive.open(member, "w", force_zip64=True) as stream:
                _write_array(stream, np.dtype(dtype), shape, blocks)

        for number, name in enumerate(ROW_FIELDS):
            blocks = (fields[number] for fields in table.fields())
            add(name, f"<U{widths[number]}" if number else "<i8", (table.rows,), blocks, zipfile.ZIP_DEFLATED)
        for name, column in table.columns.items():
            add(name, column.dtype, (table.rows, *column.shape), table.blocks(column), zipfile.ZIP_STORED)
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
        for column in table.columns.values():
            with open(column.file, "rb") as values:
                shutil.copyfileobj(values, stream, _BLOCK)


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
    blocks = [table.blocks(column) for column in table.columns.values()]
    # A dictionary or a range of values helps where values repeat, and features do not.
    settings = {"use_dictionary": ["label"], "write_statistics": list(ROW_FIELDS)}
    with open(path, "wb") as stream, parquet.ParquetWriter(stream, schema, **settings) as writer:
        for texts, *features in zip(table.fields(), *blocks, strict=True):
            arrays = [pa.array(text) for text in texts]
            for block in features:
                flat = pa.array(block.reshape(-1))
                size = math.prod(block.shape[1:])
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, size) if block.ndim > 1 else flat)
            writer.write_table(pa.table(arrays, schema=schema))


def _parquet_metadata(path: str) -> Any:
    from pyarrow import parquet

    return json.loads(parquet.read_schema(path).metadata[b"hookscope"])


def _write_zarr(path: str, table: FeatureTable) -> None:
    import zarr

    group = zarr.create_group(path, attributes={"hookscope": dict(table.metadata)})
    size = table.block_rows
    arrays = [
        group.create_array(name, shape=(table.rows,), chunks=(size,), dtype=str if number else "int64")
        for number, name in enumerate(ROW_FIELDS)
    ]
    for number, fields in enumerate(table.fields()):
        for array, values in zip(arrays, fields, strict=True):
            array[number * size : number * size + len(values)] = values
    for name, column in table.columns.items():
        array = group.create_array(
            name.replace("/", "%2F"),  # which would make a group
            shape=(table.rows, *column.shape),
            chunks=(size, *column.shape),
            dtype=column.dtype,
            attributes={"layer": name},
        )
        for number, block in enumerate(table.blocks(column)):
            array[number * size : number * size + len(block)] = block


def _zarr_metadata(path: str) -> Any:
    import zarr

    return zarr.open_group(path, mode="r").attrs["hookscope"]


@dataclass(frozen=True, slots=True)
class FeatureFormat:
    """A format of feature files.

    Attributes:
        write: Writes a new file, or a folder.
        metadata: Reads the metadata of such a file.
        package: The package that it needs, if any.
        extra: The extra of hookscope that installs the package.
        one_column: Whether a file holds one array alone.
        rows_beside: Whether the rows are in a file beside it.
        without: Data types that it does not have.
    """

    write: Callable[[str, FeatureTable], None]
    metadata: Callable[[str], Any]
    package: str = ""
    extra: str = ""
    one_column: bool = False
    rows_beside: bool = False
    without: tuple[str, ...] = ()


FORMATS = {
    ".npy": FeatureFormat(_write_npy, _npy_metadata, one_column=True, rows_beside=True),
    ".npz": FeatureFormat(_write_npz, _npz_metadata),
    ".safetensors": FeatureFormat(_write_safetensors, _safetensors_metadata, rows_beside=True, without=("complex128",)),
    ".parquet": FeatureFormat(
        _write_parquet, _parquet_metadata, "pyarrow", "parquet", without=("complex64", "complex128")
    ),
    ".zarr": FeatureFormat(_write_zarr, _zarr_metadata, "zarr", "zarr"),
}
"""The formats by the suffix of their files."""


def format_of(suffix: str, name: str) -> FeatureFormat:
    """The format of a suffix of the file ``name``; its package is imported.

    Raises:
        UsageError: There is no such format.
        InstallationError: The package is missing.
    """
    if suffix not in FORMATS:
        asked = f"no format for '{name}'"
        raise UsageError(
            asked, nearest(suffix, list(FORMATS)), f"end the name in {', '.join(FORMATS)}, or name a folder"
        )
    format = FORMATS[suffix]
    try:
        if format.package:
            importlib.import_module(format.package)
    except ImportError as error:
        asked = f"{suffix} needs {format.package}, which is not installed"
        raise InstallationError(asked, do=f"pip install 'hookscope[{format.extra}]'") from error
    return format


def check_dtype(format: FeatureFormat, suffix: str, name: str, dtype: str) -> None:
    """Refuse a data type that the format does not hold."""
    if dtype not in (*_SAFETENSORS, "complex128") or dtype in format.without:
        raise InputError(
            f"{suffix} cannot hold {name}, which is {dtype}", do="choose another ‹dtype|--dtype› or format"
        )
