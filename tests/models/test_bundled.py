"""The bundled models: where their files are, and what the files hold."""

import tomllib
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file

import hookscope
from hookscope.errors import WeightsError
from hookscope.models import names as module
from hookscope.models.metadata import count_parameters, read_description, read_header
from hookscope.models.names import BUNDLED, weights_path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "samples" / "shapes" / "shapes.safetensors"
SHAPES = BUNDLED["shapes"]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where an installation has the file, and where a checkout has it."""
    monkeypatch.setattr(module, "package_folder", lambda: str(tmp_path / "hookscope"))
    installed, checkout = tmp_path / "hookscope", tmp_path / "samples" / "shapes"
    for folder in (installed, checkout):
        folder.mkdir(parents=True)
    return installed / SHAPES.file, checkout / SHAPES.file


def test_the_package_comes_before_the_checkout(places: tuple[Path, Path]) -> None:
    installed, checkout = places
    checkout.write_text("")
    assert weights_path(SHAPES) == str(checkout)
    installed.write_text("")
    assert weights_path(SHAPES) == str(installed)


def test_a_missing_file_is_an_error_with_a_cure(places: tuple[Path, Path]) -> None:
    installed, checkout = places
    installed.mkdir()  # no file
    with pytest.raises(WeightsError) as caught:
        weights_path(SHAPES)
    assert str(caught.value) == (
        "the weights of shapes are missing from the installation;"
        f" no shapes.safetensors in {installed.parent} or {checkout.parent};"
        " reinstall hookscope, or use weights='none'"
    )


def test_a_wheel_has_the_file_where_it_is_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    into = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert into == {f"{bundled.folder}/{bundled.file}": f"hookscope/{bundled.file}" for bundled in BUNDLED.values()}
    assert Path(module.package_folder()) == ROOT / "hookscope"
    assert any(line.startswith("safetensors>=") for line in project["project"]["dependencies"])


@pytest.mark.parametrize("bundled", BUNDLED.values(), ids=lambda bundled: bundled.name)
def test_the_facts_make_a_model_of_torchvision(bundled: module.BundledModel) -> None:
    assert BUNDLED[bundled.name] is bundled
    assert bundled.name not in torchvision.models.list_models()
    model = torchvision.models.get_model(bundled.architecture, num_classes=bundled.classes).eval()
    assert model(torch.zeros(1, 3, bundled.side, bundled.side)).shape == (1, bundled.classes)


def test_the_real_file_is_described_as_the_catalogue_has_it() -> None:
    assert Path(weights_path(SHAPES)) == FILE
    assert FILE.stat().st_size < 2_000_000
    description = read_description(FILE)
    assert description is not None
    assert description.model == SHAPES.architecture
    assert len(description.categories) == len(set(description.categories)) == SHAPES.classes
    assert (description.resize_size, description.crop_size) == (SHAPES.side, SHAPES.side)
    assert description.held_out is not None and description.held_out >= 1000
    assert description.accuracy is not None and description.accuracy > 0.9
    model = torchvision.models.get_model(SHAPES.architecture, num_classes=SHAPES.classes)
    assert count_parameters(read_header(FILE)) == sum(parameter.numel() for parameter in model.parameters())


def test_the_real_file_loads_whole_and_finite() -> None:
    net = hookscope.load_model("shapes", device="cpu")
    assert (net.weights, net.notes) == ("shapes.safetensors", ())
    written = load_file(FILE)
    assert {value.dtype for value in written.values()} == {torch.float16}
    assert all(torch.equal(value, written[key].float()) for key, value in net.model.state_dict().items())
    assert net.preprocess.describe() == "resize 128, crop 128, ImageNet mean and std"


def test_the_real_weights_classify_new_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of another stream than training and held-out ones: nine of ten are right."""
    monkeypatch.syspath_prepend(str(FILE.parent))
    import draw

    net = hookscope.load_model("shapes", device="cpu")
    assert net.categories == tuple(draw.CLASSES)
    drawn = [draw.draw(2000, number) for number in range(50)]
    with torch.inference_mode():
        scores = net.model(torch.stack([net.preprocess(each.image) for each in drawn]))
    right = (scores.argmax(1) == torch.tensor([each.label for each in drawn])).float().mean()
    assert right >= 0.9
