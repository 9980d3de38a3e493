"""The command exemplars: rows, the folder with sheets and progress, the page, and inspect --exemplars."""

import json
from pathlib import Path

import pytest
from PIL import Image

from hookscope.exemplars import read_exemplars
from tests.cli.helpers import Run, files, one_error, rows

NAMES = [f"pics/{label}/{number}.png" for label in ("a", "b") for number in range(3)]
PICTURES = dict.fromkeys(NAMES, (32, 32))


def command_line(*words: str, command: str = "exemplars", format: str = "ndjson") -> list[str]:
    size = ["--input-size", "32", "--preprocess", "stretch"]
    return [command, "nets.py:Small", *size, "--weights", "none", "--format", format, *words]


def test_a_row_for_each_channel_has_its_best_image(run: Run) -> None:
    status, out, errors = run("pics", "--layer", "0,1", "--top", "2")
    assert (status, errors) == (0, "")
    found = rows(out)
    assert [(row["index"], row["name"], row["channel"]) for row in found] == [
        *[(0, "conv1", channel) for channel in range(6)],
        *[(1, "conv2", channel) for channel in range(4)],
    ]
    first = found[0]
    assert first["image"] in NAMES and first["label"] == Path(first["image"]).parent.name
    left, top, right, bottom = map(int, first["box"].split(","))
    assert right - left <= 5 and bottom - top <= 5  # conv1 is 5×5
    assert first["images"] == 6 and sum(int(part.split()[1]) for part in first["classes"].split(", ")) == 2
    assert first["synthesized"] is None and first["weights"] == "random (seed 0)"


def test_channels_are_chosen_and_a_lost_image_ends_with_1(run: Run, here: Path) -> None:
    _, most, _ = run("pics", "--layer", "0", "--channels", "1,3-4")
    assert [row["channel"] for row in rows(most)] == [1, 3, 4]
    _, mean, _ = run("pics", "--layer", "0", "--channels", "1,3-4", "--rank-by", "mean")
    pairs = zip(rows(most), rows(mean), strict=True)
    assert all(highest["value"] > lower["value"] for highest, lower in pairs)
    (here / "pics" / "a" / "0.png").write_text("no picture")
    status, out, errors = run("pics", "--layer", "0")
    assert status == 1 and rows(out)[0]["images"] == 5
    assert "Error: " in errors and "Note: 1 of 6 images skipped" in errors
    assert run("pics", "--layer", "0", "--strict")[:2] == (1, "")


def test_the_folder_has_sheets_and_what_a_later_run_needs(run: Run, here: Path) -> None:
    status, out, errors = run("pics", "--layer", "0,1", "--bottom", "-o", "found", "--html", "page.html")
    assert (status, errors) == (0, "")
    written = ["found/000-conv1.png", "found/001-conv2.png", "found/exemplars.json", "page.html"]
    assert [name for name in files(here) if not name.startswith("pics")] == written
    with Image.open("found/000-conv1.png") as sheet:
        facts = json.loads(sheet.info["hookscope"])
    assert len(facts["channels"]) == 6 and len(facts["channels"][0]["least"]) == 6
    assert Path("page.html").read_text().count("data-call") == 10

    one_error(run("pics", "--layer", "0,1", "-o", "found"), 1, "found/exemplars.json exists...--resume or --overwrite")
    status, again, errors = run("pics/", "--layer", "0,1", "--bottom", "-o", "found", "--resume")
    assert (status, again, errors) == (0, out, "Note: found/exemplars.json holds 6 of 6 images\n")
    one_error(run("pics", "--layer", "0", "--bottom", "-o", "found", "--resume"), 1, "cannot resume...made with layers")
    Path("found/007-mine.png").write_bytes(Path(NAMES[0]).read_bytes())
    assert run("pics", "--layer", "1", "-o", "found", "--overwrite")[0] == 0
    assert files(here / "found") == ["000-conv2.png", "007-mine.png", "exemplars.json"]  # no sheet of an earlier run


def test_synthesized_images_are_kept_for_a_later_run_and_inspect(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["pics", "--layer", "0", "--channels", "1,3", "-o", "found"]
    out = run(*words, "--synthesize", "1")[1]
    assert all(row["synthesized"] > 0 for row in rows(out))
    with monkeypatch.context() as patch:
        patch.setattr("hookscope.exemplars.add_synthesized", None)  # none is made again
        assert run(*words, "--synthesize", "1", "--resume")[1] == run(*words, "--resume")[1] == out
    [layer] = read_exemplars("found/exemplars.json")
    assert [each.synthesized[0].image.size for each in layer.channels] == [(32, 32)] * 2
    run(NAMES[0], "--exemplars", "found/exemplars.json", "-o", "page.html", command="inspect")
    assert Path("page.html").read_text().count("synthesized, seed ") >= 2


def test_inspect_shows_the_exemplars_of_these_weights_only(run: Run, here: Path) -> None:
    assert run("pics", "--layer", "relu", "-o", "found")[0] == 0
    (here / NAMES[0]).unlink()
    words = [NAMES[1], "--exemplars", "found/exemplars.json", "-o", "page.html"]
    status, _, errors = run(*words, command="inspect")
    page = Path("page.html").read_text()
    assert status == 0 and "1 exemplar image cannot be drawn: pics/a/0.png (file not found)" in errors
    assert "Exemplars of 6 channels among 6 images" in page  # relu is not drawn without exemplars
    one_error(run(*words, "--seed", "1", command="inspect"), 1, "no exemplars of nets.py:Small with these weights")
    one_error(run(*words[:1], "--exemplars", NAMES[2], command="inspect"), 1, "holds no saved exemplars")


def test_large_sheets_are_announced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.cli.commands.exemplars._MANY_CROPS", 35)
    quiet = run("pics", "--layer", "0", "--channels", "0-4", "-o", "few")[2]
    noted = run("pics", "--layer", "0", "-o", "many")[2]
    assert (quiet, noted.count("Note: sheets of 6 channels take up to 0.0 GB")) == ("", 1)
