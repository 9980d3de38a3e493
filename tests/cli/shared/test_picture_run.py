"""Arrays kept for one file."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hookscope.cli.shared.picture_run import ArrayFile, check_arrays
from hookscope.errors import UsageError, WriteError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["x.npy", "X.NPY"])
def test_one_array(name: str) -> None:
    file = ArrayFile(name)
    values = np.random.default_rng(0).random((3, 4)).astype(np.float32)
    with file:
        file.keep("a/b/1", values)
    written = np.load(name)
    assert written.dtype == np.float32 and np.array_equal(written, values)


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
def test_any_number_by_name(name: str) -> None:
    file = ArrayFile(name)
    keys = ["a/conv1/2", "a/relu#1/2", "b~2/layers.0 + layers.1/0", "a/../x/0"]
    with file:
        for at, key in enumerate(keys):
            file.keep(key, np.full((2, 2), at))
        file.keep(keys[0], np.zeros(1))  # the image is named twice
    arrays = np.load(name) if name.endswith("z") else load_file(name)
    assert sorted(arrays) == sorted(keys)
    assert [int(arrays[key][0, 0]) for key in keys] == list(range(4))


def test_an_archive_is_written_as_it_grows_and_nothing_without_a_path(here: Path) -> None:
    file = ArrayFile("x.npz")
    file.keep("a/1", np.zeros(1000))
    assert file.arrays == {} and len(os.listdir(here)) == 1
    file.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert os.listdir(here) == []
    file = ArrayFile(None)
    file.expect(9)
    file.keep("x", np.zeros(3))
    assert file.arrays == {}


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors", None])
def test_nothing_is_no_file(here: Path, name: str | None) -> None:
    with ArrayFile(name):
        pass
    assert os.listdir(here) == []


@pytest.mark.parametrize("name", ["x.txt", "x", ""])
def test_a_name_of_another_format_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--raw writes arrays; name it .npy \(one\), .npz or .safetensors"):
        check_arrays(name)


@pytest.mark.parametrize("name", ["x.npy", "/dev/null"])
def test_several_of_one_picture_are_refused_before_the_first_is_drawn(name: str) -> None:
    check_arrays(name)
    file = ArrayFile(name)
    file.expect(1)
    with pytest.raises(UsageError, match=f"--raw {name} takes one array; there are several; name it .npz or .safe"):
        file.expect(2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("size", [3, 100_000])  # the error comes when the file is closed, or before and then too
def test_a_full_disk(size: int, here: Path) -> None:
    (here / "full.npz").symlink_to("/dev/full")
    file = ArrayFile("full.npz")
    with pytest.raises(WriteError, match=r"cannot write full\.npz: No space left"), file:
        file.keep("a", np.zeros(size))
