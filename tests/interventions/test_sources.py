"""Directions from files, and refusals of files without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hookscope.errors import WeightsError
from hookscope.interventions.sources import read_direction


def test_a_direction_in_each_kind_of_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    direction = torch.tensor([1.0, -2.0])
    np.save(tmp_path / "a.npy", direction.numpy())
    torch.save(direction, tmp_path / "a.pt")
    torch.save({"direction": direction}, tmp_path / "a.anything")
    save_file({"direction": direction}, tmp_path / "a.safetensors")
    for path in tmp_path.iterdir():
        assert torch.equal(read_direction(str(path)), direction)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "photo.png",
            b"no picture",
            "no direction in photo.png; give a .npy, .pt or .safetensors file",
        ),
        ("notes", b"", "no direction in notes; give a .npy,"),
        ("a.pt", b"damaged, as it seems", "cannot read weights a.pt: damaged, incomplete or not a checkpoint"),
        ("a.npz", b"PK\x03\x04 cut off", "a.npz is not a NumPy file of numbers; save one with numpy.save"),
        ("a.npy", b"damaged, as it seems", "a.npy is not a NumPy file of numbers; save one with numpy.save"),
        ("a.png", None, "cannot read a.png: No such file or directory; name a file that exists"),
        ("a.pt", None, "cannot read a.pt: No such file or directory; name a file that exists"),
        ("a.npy", None, "cannot read a.npy: No such file or directory; name a file that exists"),
    ],
)
def test_files_without_a_direction_are_refused(
    name: str, content: bytes | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        read_direction(name)
    assert str(caught.value).startswith(says)


def test_several_tensors_and_values_that_are_not_finite(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "two.pt")
    torch.save(torch.tensor([torch.nan]), tmp_path / "nan.pt")
    with pytest.raises(WeightsError, match="is not a single tensor; it holds 2: a, b"):
        read_direction(str(tmp_path / "two.pt"))
    with pytest.raises(WeightsError, match="holds NaN or Inf"):
        read_direction(str(tmp_path / "nan.pt"))
