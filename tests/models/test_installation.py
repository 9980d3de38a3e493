"""Mixed and missing packages are named in one line."""

from pathlib import Path

import matplotlib
import pytest

from hookscope.models import names as installation
from hookscope.models.names import broken_pair, missing_package, unreadable_settings

NMS = "operator torchvision::nms does not exist"


@pytest.fixture
def fixed_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"hookscope": "1.0", "torch": "2.13.0+cpu", "torchvision": "0.29.2"}
    monkeypatch.setattr(installation, "package_versions", lambda: known)


@pytest.mark.usefixtures("fixed_versions")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(NMS),
        ImportError(f"cannot import torchvision: {NMS}"),
        AttributeError("partially initialized module 'torchvision' has no attribute 'extension' (most likely ...)"),
        RuntimeError("Couldn't load custom C++ ops. This can happen if your PyTorch and torchvision ..."),
    ],
)
def test_broken_pair_names_both_versions_and_the_cure(error: Exception) -> None:
    assert str(broken_pair(error)) == (
        "torch and torchvision were not built for one another; installed: torch 2.13.0+cpu, torchvision 0.29.2; "
        "install both from the same place: pip install --force-reinstall torch torchvision"
    )


def test_broken_pair_looks_at_the_causes() -> None:
    outer, hidden = ValueError("no model"), ValueError("while handling")
    outer.__cause__ = hidden.__context__ = RuntimeError(NMS)
    assert broken_pair(outer) is not None and broken_pair(hidden) is not None
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert broken_pair(first) is None


def test_broken_pair_leaves_other_errors_alone() -> None:
    assert broken_pair(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert broken_pair(ValueError(NMS)) is None  # quotes the text
    assert broken_pair(ImportError("No module named 'timm'")) is None


def test_missing_package_gives_the_name_to_install() -> None:
    pillow = ModuleNotFoundError("No module named 'PIL'", name="PIL")
    assert str(missing_package(pillow)) == "the package pillow is not installed; pip install pillow"
    safetensors = ModuleNotFoundError("No module named 'safetensors'", name="safetensors")
    assert str(missing_package(safetensors)).endswith("; pip install safetensors")
    assert missing_package(ModuleNotFoundError("No module named 'their_net'", name="their_net")) is None
    assert missing_package(ImportError("cannot import name 'x'", name="torch")) is None


def test_settings_that_matplotlib_cannot_decode_are_named(tmp_path: Path) -> None:
    path = tmp_path / "matplotlibrc"
    path.write_bytes(b"image.lut: \xff")
    with pytest.raises(UnicodeDecodeError) as of_matplotlib:
        matplotlib.rc_params_from_file(path)
    error = unreadable_settings(of_matplotlib.value)
    assert str(error) == "matplotlib cannot read its file matplotlibrc: it is not UTF-8; repair or remove it"
    with pytest.raises(UnicodeDecodeError) as of_another_file:
        path.read_text("utf-8")
    assert unreadable_settings(of_another_file.value) is None
