"""Each format, read by the programs it is for, without hookscope."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import polars
import pyarrow
import pytest
import safetensors
import safetensors.torch
import torch
import zarr
from pyarrow import dataset, parquet

from hookscope.errors import InputError, InstallationError
from hookscope.extraction import FORMATS, files, formats
from tests.extraction.runs import NAMES, SOURCE, features, write

USED = [position for position in range(23) if position not in (0, 5, 6, 22)]
PATHS = [NAMES[position] for position in USED]
LABELS = [path.split("/")[0] for path in PATHS]
WANTED = {name: np.stack([features(position)[name].numpy() for position in USED]) for name in features(0)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_metadata(metadata: dict[str, Any], rows: int = 19) -> None:
    assert (metadata["model"], metadata["weights"], metadata["fingerprint"]) == ("net", "random (seed 0)", "f" * 64)
    assert (metadata["preprocess"], metadata["pool"], metadata["layers"]) == ("resize 8", "mean", "a, b")
    assert metadata["torch"] == torch.__version__ and metadata["date"].startswith("20")
    assert metadata["columns"]["backbone out"] == {"dtype": "float32", "shape": [3]}
    assert (metadata["rows"], metadata["images"]) == (rows, 23)


def only(name: str) -> dict[str, Any]:
    return {"of": lambda position: {name: features(position)[name]}}


def test_npy_is_read_by_numpy_with_rows_beside_it() -> None:
    write("a.npy", only("layer4.0.relu#1"))
    values = np.load("a.npy", mmap_mode="r", allow_pickle=False)
    assert np.array_equal(values, WANTED["layer4.0.relu#1"])
    rows = pandas.read_csv("a.npy.rows.tsv", sep="\t")
    assert (list(rows["path"]), list(rows["label"]), list(rows["position"])) == (PATHS, LABELS, USED)
    metadata = json.loads(Path("a.npy.json").read_text())
    assert metadata["columns"] == {"layer4.0.relu#1": {"dtype": "float32", "shape": [2, 3]}}
    assert (metadata["rows"], metadata["lost"]) == (19, 4)


def test_lost_images_are_listed_beside_the_file_and_only_if_there_are_any() -> None:
    write("a.npz")
    lost = pandas.read_csv("a.npz.lost.tsv", sep="\t")
    assert list(lost["position"]) == [0, 5, 6, 22] and list(lost["path"]) == [NAMES[p] for p in (0, 5, 6, 22)]
    assert lost["error"][1] == r"cat/5.png: bad\tfile"
    write("b.npz", {"lost": ()})
    assert {path.name for path in Path().iterdir()} == {"a.npz", "a.npz.lost.tsv", "b.npz"}


@pytest.mark.parametrize("name", ["a.parquet", "out/"])
def test_parquet_is_read_by_pyarrow_pandas_polars_and_duckdb_as_a_file_and_as_a_folder(name: str) -> None:
    write(name, shard=None if name == "a.parquet" else 7)
    first, rows = (name, 19) if name == "a.parquet" else ("out/part-00000.parquet", 7)
    files = name if name == "a.parquet" else "out/*.parquet"
    schema = parquet.read_schema(first)
    check_metadata(json.loads(schema.metadata[b"hookscope"]), rows)
    assert schema.field("layer4.0.relu#1").type == pyarrow.list_(pyarrow.float32(), 6)
    assert json.loads(schema.field("layer4.0.relu#1").metadata[b"shape"]) == [2, 3]
    assert dataset.dataset(name).count_rows() == 19

    table = pandas.read_parquet(name)
    assert list(table["path"]) == PATHS and list(table["label"]) == LABELS
    assert np.array_equal(np.stack(table["layer4.0.relu#1"]).reshape(-1, 2, 3), WANTED["layer4.0.relu#1"])

    frame = polars.read_parquet(files)
    assert frame["layer4.0.relu#1"].dtype == polars.Array(polars.Float32, 6)
    assert np.array_equal(frame["layer4.0.relu#1"].to_numpy().reshape(-1, 2, 3), WANTED["layer4.0.relu#1"])
    assert frame["position"].to_list() == USED

    found = duckdb.sql(f"select path, \"backbone out\"[1], \"probability cat\" from '{files}' where label = 'cat'")
    assert found.fetchall() == [
        (path, float(position), pytest.approx(position / 100, rel=1e-6))
        for path, position in zip(PATHS, USED, strict=True)
        if position % 2
    ]


def test_a_folder_holds_parts_of_the_wanted_number_of_rows() -> None:
    write("out", {"size": 8}, shard=6)
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "_lost.tsv",
        *(f"part-0000{number}.parquet" for number in range(4)),
    ]
    assert [parquet.read_metadata(f"out/part-0000{number}.parquet").num_rows for number in range(4)] == [6, 6, 6, 1]
    assert len(pandas.read_csv("out/_lost.tsv", sep="\t")) == 4


def values_in(name: str, column: str) -> Any:
    """A column of a file, by the program that the format is for."""
    if name.endswith(".npy"):
        return np.load(name)
    if name.endswith(".npz"):
        return np.load(name)[column]
    if name.endswith(".zarr"):
        return zarr.open_group(name, mode="r")[column][:]
    if name.endswith(".parquet"):
        return np.stack(pandas.read_parquet(name)[column])
    return safetensors.torch.load_file(name)[column].numpy()


KINDS = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64]
OF_COLUMNS = pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.parquet", "a.zarr"])


@OF_COLUMNS
def test_numbers_keep_their_type(name: str) -> None:
    write(name, {"of": lambda p: {str(kind): torch.tensor([p, 1 / 3, 1]).to(kind) for kind in KINDS}})
    for kind in KINDS:
        wanted = np.stack([torch.tensor([p, 1 / 3, 1]).to(kind).numpy() for p in USED])
        found = values_in(name, str(kind))
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if name == "a.parquet":
        half = np.float16(1 / 3)
        assert duckdb.sql(f"select \"torch.float16\"[2] from '{name}'").fetchall()[0] == (float(half),)
        assert polars.read_parquet(name)["torch.float16"].dtype == polars.Array(polars.Float16, 3)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.zarr"])
def test_complex_features_are_written_where_the_format_has_them(name: str) -> None:
    write(name, {"of": lambda p: {"x": torch.tensor([p + 1j])}})
    assert list(values_in(name, "x")[:, 0]) == [p + 1j for p in USED]
    with pytest.raises(InputError, match=r"^\.parquet cannot hold x, which is complex64; choose another dtype"):
        write("a.parquet", {"of": lambda p: {"x": torch.tensor([p + 1j])}})
    assert not Path("a.parquet").exists() and not Path(".a.parquet.parts").exists()


@OF_COLUMNS
def test_a_layer_that_is_called_like_a_field_of_the_row_gets_another_name(name: str) -> None:
    one = torch.tensor([1.0])
    written = write(name, {"of": lambda p: {"path": one, "Label": one, "a/b": one, "sha256": one, "metadata": one}})
    assert list(written.columns) == ["path (layer)", "Label (layer)", "a/b", "sha256 (layer)", "metadata (layer)"]
    assert values_in(name, "path (layer)").shape == (19, 1)
    if name == "a.zarr":
        assert zarr.open_group(name, mode="r")["a%2Fb"].attrs["layer"] == "a/b"
    elif name == "a.parquet":
        assert duckdb.sql("select path, \"path (layer)\"[1] from 'a.parquet'").fetchall()[0] == (PATHS[0], 1.0)

    with pytest.raises(InputError, match=r"two columns are called 'path \(layer\)'"):
        write("b.npz", {"of": lambda p: {"path": one, "path (layer)": one}})


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.parquet", "a.zarr"])
def test_odd_names_of_files_are_written_as_text(name: str) -> None:
    names = ['a\tb\n"c".png', "\udcff.png", "x\r.png", "ü,;.png"]
    quiet = {"note": lambda *note: None}
    write(name, {"names": names, "lost": (), **only("backbone out")}, listener=quiet)
    found = pandas.read_csv("a.npy.rows.tsv", sep="\t")["path"] if name == "a.npy" else values_in(name, "path")
    assert list(found) == [names[0], "%FF.png", *names[2:]]


def metadata_in(name: str) -> dict[str, Any]:
    """What a file says of itself, by the program that the format is for."""
    if name.endswith(".zarr"):
        return dict(zarr.open_group(name, mode="r").attrs["hookscope"])
    if name.endswith(".npz"):
        return json.loads(str(np.load(name, allow_pickle=False)["metadata"]))
    if name.endswith(".parquet"):
        return json.loads(parquet.read_schema(name).metadata[b"hookscope"])
    with safetensors.safe_open(name, "np") as file:
        assert set(file.keys()) == set(WANTED)
        return json.loads(file.metadata()["hookscope"])


@OF_COLUMNS
@pytest.mark.parametrize("block", [200, formats.BLOCK_BYTES])
def test_a_table_is_read_by_the_program_of_its_format(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "BLOCK_BYTES", block)
    write(name)
    check_metadata(metadata_in(name))
    for column, wanted in WANTED.items():
        assert np.array_equal(values_in(name, column).reshape(wanted.shape), wanted)
    if name == "a.parquet":
        assert parquet.read_metadata(name).num_row_groups == (4 if block == 200 else 1)
    if name == "a.safetensors":
        assert list(pandas.read_csv("a.safetensors.rows.tsv", sep="\t")["path"]) == PATHS
    else:
        rows = [list(values_in(name, field)) for field in ("path", "label", "position")]
        assert rows == [PATHS, LABELS, USED] and len(values_in(name, "sha256")[0]) == 64


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("a.parquet", "pyarrow", "parquet"), ("a.zarr", "zarr", "zarr")]
)
def test_a_missing_package_is_one_line_that_names_the_extra(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InstallationError) as error:
        write(name)
    asked = f".{extra} needs {package}, which is not installed; pip install 'hookscope[{extra}]'"
    assert str(error.value) == asked and not list(Path().iterdir())


def test_the_packages_of_extras_are_imported_only_for_their_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow", "zarr"):
        monkeypatch.setitem(sys.modules, package, None)
    for file in (files, formats):
        runpy.run_path(str(file.__file__))


def test_every_format_is_tested_here() -> None:
    assert list(FORMATS) == [".npy", ".npz", ".safetensors", ".parquet", ".zarr"]
    assert SOURCE.model == "net"
