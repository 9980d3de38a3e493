"""The model that ships, against pictures drawn anew: it knows them, its maps lie on them; untrained it does neither.

The notebook of samples/ is run cell by cell in IPython, as Jupyter runs it.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SAMPLES = Path(__file__).parents[1] / "samples"
FOLDER = SAMPLES / "shapes"
NOTEBOOK = json.loads((SAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def scripts():
    """The scripts ``draw`` and ``measure``, imported as they import each other."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("draw"), importlib.import_module("measure")
    finally:
        sys.path[:] = before
        for name in ("draw", "measure"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def boxes():
    return json.loads((FOLDER / "boxes.json").read_text())


def test_there_are_a_dozen_pictures_of_all_classes(boxes, scripts):
    draw, _ = scripts
    assert len(boxes) >= 12
    assert {facts["class"] for facts in boxes.values()} == set(draw.CLASSES)
    assert {path.name for path in FOLDER.glob("*.png")} == set(boxes)


def test_every_picture_and_box_follows_from_its_seed(boxes, scripts):
    draw, _ = scripts
    for name, facts in boxes.items():
        drawn = draw.draw(facts["seed"], facts["number"])
        assert np.array_equal(np.asarray(Image.open(FOLDER / name)), np.asarray(drawn.image)), name
        assert facts["box"] == list(drawn.box)
        assert facts["class"] == draw.CLASSES[drawn.label]


def test_a_box_is_around_its_object(scripts):
    draw, _ = scripts
    for number in range(30):
        left, top, right, bottom = draw.draw(9, number).box
        assert 0 <= left < right <= draw.SIDE and 0 <= top < bottom <= draw.SIDE
        assert 20 <= max(right - left, bottom - top) <= 80  # a radius is from 0.14 to 0.27 of the side


def test_classes_are_drawn_in_turn_or_as_asked(scripts):
    draw, _ = scripts
    assert [draw.draw(3, number).label for number in range(12)] == [*range(10), 0, 1]
    assert draw.draw(3, 0, label=7).label == 7


def test_the_file_is_small_and_says_what_was_measured():
    from hookscope.models.metadata import read_description

    file = FOLDER / "shapes.safetensors"
    assert file.stat().st_size <= 1.5e6
    assert read_description(str(file))["accuracy"] >= 0.95


def test_the_pointing_game_on_a_small_draw(scripts):
    _, measure = scripts
    numbers = range(1000, 1020)  # not the pictures behind the figures of the README
    trained, untrained = measure.measure("default", numbers), measure.measure("none", numbers)
    assert trained.accuracy >= 0.95
    assert trained.pointing >= 0.85
    assert untrained.pointing <= 0.3
    assert trained.chance < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gradcam", "gradcam++", "hirescam", "layercam", "xgradcam"])
def test_the_pointing_game_of_the_readme(scripts, method):
    _, measure = scripts
    assert measure.measure("default", range(200), method).pointing >= 0.85
    assert measure.measure("none", range(200), method).pointing <= 0.3


def test_the_map_measured_is_the_last_as_the_readme_says():
    import hookscope

    net = hookscope.load_model("shapes", device="cpu")
    picture = hookscope.open_image(str(FOLDER / "star.png"))
    [map] = hookscope.class_activation_maps(net.model, net.inputs(net.preprocess(picture)))
    assert map.call.name == "classifier.2"


def test_the_notebook_is_of_format_4_and_holds_no_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_every_cell_of_the_notebook_shows_something_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.chdir(SAMPLES)
    shell = interactive.InteractiveShell(user_ns={})
    shell.history_manager.enabled = False
    for cell in CODE:
        source = "".join(cell["source"])
        ran = shell.run_cell(source)
        ran.raise_error()
        assert ran.result is not None, source
        data = shell.display_formatter.format(ran.result)[0]
        shown = data.get("text/html") or data.get("image/png")
        assert shown and len(data["text/plain"].splitlines()) <= 16, source
        assert isinstance(ran.result, Image.Image) or len(shown) < 100_000, source
