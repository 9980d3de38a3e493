"""Names and versions read from source files, judged by torchvision itself; mixed packages; the bundled models."""

import time
import tomllib
from pathlib import Path

import matplotlib
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torchvision import models

import hookscope
from hookscope.errors import InstallationError, WeightsError
from hookscope.models import names as registry
from hookscope.models.metadata import count_parameters, read_description, read_header
from hookscope.models.names import BUNDLED, weights_path

ROOT = Path(__file__).parents[2]


def write_package(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_names_are_those_of_torchvision() -> None:
    # Not those that another test has registered.
    listed = (n for n in models.list_models() if models.get_model_builder(n).__module__.startswith("torchvision."))
    assert registry.torchvision_names() == tuple(listed)


def test_a_bundled_model_has_no_name_of_torchvision() -> None:
    assert not set(BUNDLED) & set(torchvision.models.list_models())


def test_versions_are_those_of_the_packages_and_of_the_build() -> None:
    assert registry.package_versions() == {
        "hookscope": registry.__version__,
        "torch": str(torch.__version__),
        "torchvision": torchvision.__version__,
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "hookscope/_version.py"


def test_names_come_within_thirty_milliseconds() -> None:
    def once() -> float:
        registry._scan.cache_clear()
        start = time.process_time()
        registry.torchvision_names()
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
    files = {"__init__.py": "", "models/a.py": source, "models/sub/b.py": "@register_model()\ndef b(): ..."}
    write_package(package, files)
    monkeypatch.setattr(registry, "_package_folder", {"torchvision": str(package)}.get)
    assert registry.torchvision_names() == ("b", "plain", "quantized_x", "y2")


def test_class_names_are_those_of_torchvisions_weights() -> None:
    compared = 0
    for name in registry.torchvision_names():
        known = [entry.meta["categories"] for entry in models.get_model_weights(name) if entry.meta.get("categories")]
        names = registry.torchvision_class_names(name)
        if names:
            assert all(list(names) == list(categories) for categories in known), name
            compared += len(known)
        else:
            assert models.get_model_builder(name).__module__.split(".")[2] in ("detection", "optical_flow"), name
    assert compared > 100
    assert registry.torchvision_class_names("no_such_model") == ()


def test_class_names_without_torchvisions_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_package_folder", lambda package: str(tmp_path))
    assert registry.torchvision_class_names("resnet18") == ()
    write_package(tmp_path, {"__init__.py": "", "models/a.py": "@register_model()\ndef resnet18(): ..."})
    registry._scan.cache_clear()
    assert registry.torchvision_class_names("resnet18") == ()
    for meta in ("_OTHER = ['a']", "_IMAGENET_CATEGORIES = [", "_IMAGENET_CATEGORIES = read()"):
        write_package(tmp_path, {"models/_meta.py": meta})
        assert registry.torchvision_class_names("resnet18") == ()
    write_package(tmp_path, {"models/_meta.py": "import os\n_IMAGENET_CATEGORIES = ['a', 'b']"})
    assert registry.torchvision_class_names("resnet18") == ("a", "b")
    monkeypatch.setattr(registry, "_package_folder", lambda package: None)
    assert registry.torchvision_class_names("resnet18") == ()


@pytest.mark.parametrize(
    ("installed", "error", "version"),
    [
        (False, "torchvision is not installed; pip install torch torchvision", "missing"),
        (True, "cannot read the names", "unknown"),
    ],
)
def test_a_torchvision_that_is_missing_or_has_no_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool, error: str, version: str
) -> None:
    monkeypatch.setattr(registry, "_package_folder", lambda package: str(tmp_path) if installed else None)
    with pytest.raises(InstallationError, match=error):
        registry.torchvision_names()
    assert registry.package_versions()["torchvision"] == version


NMS = "operator torchvision::nms does not exist"


@pytest.fixture
def fixed_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"hookscope": "1.0", "torch": "2.13.0+cpu", "torchvision": "0.29.2"}
    monkeypatch.setattr(registry, "package_versions", lambda: known)


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
    assert str(registry.broken_pair(error)) == (
        "torch and torchvision were not built for one another; installed: torch 2.13.0+cpu, torchvision 0.29.2; "
        "install both from the same place: pip install --force-reinstall torch torchvision"
    )


def test_broken_pair_looks_at_the_causes_and_leaves_other_errors_alone() -> None:
    outer, hidden = ValueError("no model"), ValueError("while handling")
    outer.__cause__ = hidden.__context__ = RuntimeError(NMS)
    assert registry.broken_pair(outer) is not None and registry.broken_pair(hidden) is not None
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert registry.broken_pair(first) is None
    assert registry.broken_pair(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert registry.broken_pair(ValueError(NMS)) is None  # quotes the text
    assert registry.broken_pair(ImportError("No module named 'timm'")) is None


def test_missing_package_gives_the_name_to_install() -> None:
    pillow = ModuleNotFoundError("No module named 'PIL'", name="PIL")
    assert str(registry.missing_package(pillow)) == "the package pillow is not installed; pip install pillow"
    safetensors = ModuleNotFoundError("No module named 'safetensors'", name="safetensors")
    assert str(registry.missing_package(safetensors)).endswith("; pip install safetensors")
    assert registry.missing_package(ModuleNotFoundError("No module named 'their_net'", name="their_net")) is None
    assert registry.missing_package(ImportError("cannot import name 'x'", name="torch")) is None


def test_settings_that_matplotlib_cannot_decode_are_named(tmp_path: Path) -> None:
    path = tmp_path / "matplotlibrc"
    path.write_bytes(b"image.lut: \xff")
    with pytest.raises(UnicodeDecodeError) as of_matplotlib:
        matplotlib.rc_params_from_file(path)
    error = registry.unreadable_settings(of_matplotlib.value)
    assert str(error) == "matplotlib cannot read its file matplotlibrc: it is not UTF-8; repair or remove it"
    with pytest.raises(UnicodeDecodeError) as of_another_file:
        path.read_text("utf-8")
    assert registry.unreadable_settings(of_another_file.value) is None


FILE = ROOT / "samples" / "shapes" / "shapes.safetensors"
SHAPES = BUNDLED["shapes"]


def test_the_package_comes_before_the_checkout_and_a_missing_file_has_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "package_folder", lambda: str(tmp_path / "hookscope"))
    installed, checkout = tmp_path / "hookscope" / SHAPES.file, tmp_path / "samples" / "shapes" / SHAPES.file
    installed.mkdir(parents=True)  # no file
    checkout.parent.mkdir(parents=True)
    with pytest.raises(WeightsError) as caught:
        weights_path(SHAPES)
    assert str(caught.value) == (
        "the weights of shapes are missing from the installation;"
        f" no shapes.safetensors in {installed.parent} or {checkout.parent};"
        " reinstall hookscope, or use weights='none'"
    )
    checkout.write_text("")
    assert weights_path(SHAPES) == str(checkout)
    installed.rmdir()
    installed.write_text("")
    assert weights_path(SHAPES) == str(installed)


def test_a_wheel_has_the_file_where_it_is_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    into = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert into == {f"{bundled.folder}/{bundled.file}": f"hookscope/{bundled.file}" for bundled in BUNDLED.values()}
    assert Path(registry.package_folder()) == ROOT / "hookscope"
    assert any(line.startswith("safetensors>=") for line in project["project"]["dependencies"])


def test_the_real_file_is_described_as_the_catalogue_has_it() -> None:
    assert Path(weights_path(SHAPES)) == FILE
    assert FILE.stat().st_size < 2_000_000
    description = read_description(FILE)
    assert description["model"] == SHAPES.architecture
    assert len(description["categories"]) == len(set(description["categories"])) == SHAPES.classes
    assert (description["resize_size"], description["crop_size"]) == (SHAPES.side, SHAPES.side)
    assert description["held_out"] >= 1000 and description["accuracy"] > 0.9
    model = torchvision.models.get_model(SHAPES.architecture, num_classes=SHAPES.classes)
    assert count_parameters(read_header(FILE)) == sum(parameter.numel() for parameter in model.parameters())


def test_the_real_file_loads_whole_and_classifies_new_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of another stream than training and held-out ones: nine of ten are right."""
    net = hookscope.load_model("shapes", device="cpu")
    assert (net.weights, net.notes) == ("shapes.safetensors", ())
    written = load_file(FILE)
    assert {value.dtype for value in written.values()} == {torch.float16}
    assert all(torch.equal(value, written[key].float()) for key, value in net.model.state_dict().items())
    assert net.preprocess.describe() == "resize 128, crop 128, ImageNet mean and std"
    monkeypatch.syspath_prepend(str(FILE.parent))
    import draw

    assert net.categories == tuple(draw.CLASSES)
    drawn = [draw.draw(2000, number) for number in range(50)]
    with torch.inference_mode():
        scores = net.model(torch.stack([net.preprocess(each.image) for each in drawn]))
    right = (scores.argmax(1) == torch.tensor([each.label for each in drawn])).float().mean()
    assert right >= 0.9
