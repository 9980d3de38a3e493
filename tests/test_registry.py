"""The registry, judged by torchvision itself."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from hookscope import registry
from hookscope.errors import InstallationError

ROOT = Path(__file__).parents[1]


def write_package(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_names_are_those_of_torchvision() -> None:
    # Asked in a fresh process: a test of this session may have registered a model of its own.
    code = "import json, torchvision.models as m; print(json.dumps(m.list_models()))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert list(registry.model_names()) == json.loads(answer.stdout)


def test_versions_are_those_of_the_packages() -> None:
    import torch
    import torchvision

    assert registry.package_versions() == {
        "hookscope": registry.VERSION,
        "torch": str(torch.__version__),
        "torchvision": torchvision.__version__,
    }


def test_neither_imports_torch_nor_importlib_metadata() -> None:
    code = (
        "import sys; from hookscope import registry; assert registry.model_names(); registry.package_versions();"
        "print([m for m in ('torch', 'torchvision', 'importlib.metadata') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    assert answer.stdout.strip() == "[]"


def test_names_come_within_thirty_milliseconds() -> None:
    def once() -> float:
        registry._scan.cache_clear()
        start = time.process_time()
        registry.model_names()
        return time.process_time() - start

    assert min(once() for _ in range(5)) < 0.03


def test_names_from_every_form_of_decorator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
def register_model(name=None): ...
@register_model()
@other(weights=("pretrained", None))
def plain(*, weights=None): ...
@register_model(name="quantized_x")
def x(): ...
@register_model('y2')
def y(): ...
def not_registered(): ...
"""
    package = tmp_path / "torchvision"
    write_package(
        package, {"__init__.py": "", "models/a.py": source, "models/sub/b.py": "@register_model()\ndef b(): ..."}
    )
    monkeypatch.setattr(registry, "_package_folder", {"torchvision": str(package)}.get)
    assert registry.model_names() == ("b", "plain", "quantized_x", "y2")


def test_without_torchvision_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_package_folder", lambda package: None)
    with pytest.raises(InstallationError, match="torchvision is not installed; pip install torch torchvision"):
        registry.model_names()
    assert registry.package_versions()["torch"] == "missing"


def test_without_sources_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_package_folder", lambda package: str(tmp_path))
    with pytest.raises(InstallationError, match="cannot be read"):
        registry.model_names()
    assert registry.package_versions()["torchvision"] == "unknown"


def test_an_absent_package_has_no_folder() -> None:
    assert registry._package_folder("no_such_package_of_anyone") is None


def test_the_package_is_built_with_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "hookscope/registry.py"


def test_a_wrong_name_is_told_without_importing_torch():
    code = (
        "import sys; from hookscope.errors import ModelError; from hookscope.registry import check_model_name\n"
        "try: check_model_name('resnet35')\n"
        "except ModelError as error: print(error, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("no model 'resnet35'; nearest: ")
    assert "resnet34" in answer.stdout and answer.stdout.endswith("list-models` False\n")
