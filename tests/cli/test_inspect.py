"""`hookscope inspect`: the page, the rows, and about ten lines on a terminal."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import wcwidth
from click.testing import CliRunner
from PIL import Image

from hookscope import inspection
from hookscope.cli.commands.inspect import PLACES, in_words
from hookscope.cli.main import cli
from hookscope.cli.output.table import Page
from hookscope.errors import spelling_for_shell
from hookscope.models import load_model
from tests.cli.helpers import Run, files, one_error, rows

NETS = '''

class Nothing(nn.Module):
    """Layers without a map."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(x.mean((2, 3)))


def raising():
    raise RuntimeError("no such file")
'''
DENSE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.conv, self.answer = nn.Conv2d(3, 2, 3, padding=1), answer

    def forward(self, x):
        return self.answer(0 * self.conv(x))


def halves():
    left = (torch.arange(32) < 12).float()
    return Net(lambda maps: maps + torch.stack([left, 1 - left])[:, None])


def one_box():
    box = torch.tensor([[2.0, 3.0, 20.0, 30.0]])
    return Net(lambda maps: [{"boxes": box, "labels": torch.tensor([3]), "scores": torch.tensor([0.875])}])


def number():
    return Net(lambda maps: maps.mean((1, 2, 3)) + 7.5)
"""
SHAPES = Path(__file__).parents[2] / "samples" / "shapes"
PICTURES = {"cat.jpg": (40, 32), "dog.png": (32, 40)}


def command_line(*words: str, model: str = "nets.py:Small") -> list[str]:
    return ["inspect", model, *words, "--input-size", "32"]


def place(severity: str = "note", layer: str = "conv1", reason: str = "it is wide", **more: Any) -> inspection.Place:
    return inspection.Place("a-kind", severity, layer, reason, **more)


@pytest.fixture
def found(here: Path) -> inspection.Inspection:
    """An inspection of `Small` and both pictures."""
    net = replace(load_model("nets.py:Small", input_size=(32, 32)), weights="small.pth")
    return inspection.inspect(net, ["cat.jpg", "dog.png"])


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let every inspection find these places."""

    def finds(*places: inspection.Place) -> None:
        really = inspection.inspect
        monkeypatch.setattr(
            inspection, "inspect", lambda *words, **more: replace(really(*words, **more), places=places)
        )

    return finds


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("cat.jpg", "cat-nets.py-Small.html"),
        ("cat.jpg dog.png", "cat-dog-nets.py-Small.html"),
        ("cat.jpg dog.png -o mine.HTML", "mine.HTML"),
        ("cat.jpg -o pages/new", "pages/new/cat-nets.py-Small.html"),
    ],
)
def test_the_images_share_one_page(run: Run, here: Path, words: str, page: str) -> None:
    status, out, _ = run(*words.split(), "--format", "ndjson")
    assert (status, files(here)) == (0, [page])
    text = (here / page).read_text()
    assert text.startswith("<!doctype html>") and f"hookscope inspect nets.py:Small {words} --format ndjson" in text
    assert {row["file"] for row in rows(out)} <= {page}


def test_a_page_goes_to_a_pipe_without_rows_and_not_to_the_terminal(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(cli, command_line("cat.jpg", "dog.png", "-o", "-"))
    assert (result.exit_code, files(here)) == (0, [])
    assert result.stdout.startswith("<!doctype html>") and result.stdout.rstrip().endswith("</html>")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    one_error(run("cat.jpg", "-o", "-"), 2, "-o - would write a page to the terminal; send it to a file or a pipe")


def test_the_size_of_the_page_is_kept(run: Run, here: Path) -> None:
    whole = len((here / "a.html").read_bytes()) if run("cat.jpg", "-o", "a.html")[0] == 0 else 0
    assert run("cat.jpg", "-o", "b.html", "--max-size", f"{whole - 1}B")[0] == 0
    assert (here / "b.html").stat().st_size < whole
    one_error(run("cat.jpg", "-o", "c.html", "--max-size", "1kB"), 1, "the page does not fit into 1,000 bytes")
    assert files(here) == ["a.html", "b.html"]


def test_a_row_has_the_call_of_its_place(run: Run, finds: Any) -> None:
    finds(
        place(layer="conv2", channels=(2, 0), numbers={"share": 0.5}, image=1),
        place(layer="conv2.weight"),
        place(layer=""),
        place(layer="(model)"),
        place(layer="relu#1"),
    )
    status, out, _ = run("cat.jpg", "dog.png", "--format", "ndjson")
    of_conv, of_weight, of_all, of_model, of_unknown = found = rows(out)
    assert status == 0
    assert [list(row) for row in found] == [list(PLACES.flat)] * 5
    assert [row["rank"] for row in found] == [1, 2, 3, 4, 5]
    call = {"index": 1, "call": 0, "order": 2}
    assert of_conv.items() >= {**call, "layer": "conv2", "image": "dog.png", "numbers": {"share": 0.5}}.items()
    assert of_conv["channels"] == [2, 0]
    assert of_weight.items() >= {**call, "layer": "conv2.weight", "channels": None, "image": None}.items()
    assert of_all.items() >= {"layer": None, "index": None, "order": None}.items()
    assert (of_model["layer"], of_unknown["layer"]) == ("(model)", "relu#1")


def test_broken_images_are_named_and_the_others_inspected(run: Run, here: Path) -> None:
    (here / "bad\n.jpg").write_text("no picture")
    status, _, errors = run("bad\n.jpg", "cat.jpg", "none.png", "dog.png")
    assert (status, files(here)) == (1, ["bad\n.jpg", "cat-dog-nets.py-Small.html"])
    told = [line for line in errors.splitlines() if line.startswith("Error: ")]
    assert len(told) == 2 and "'bad\\n.jpg' is not an image" in told[0] and "no image 'none.png'" in told[1]
    (here / "cat-dog-nets.py-Small.html").unlink()
    status, out, errors = run("bad\n.jpg", "none.png")
    assert (status, out, errors.count("Error: "), files(here)) == (1, "", 2, ["bad\n.jpg"])


def test_a_page_has_eight_images_unless_limit_says_otherwise(run: Run, here: Path) -> None:
    (here / "photos").mkdir()
    for number in range(10):
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(here / f"photos/{number}.png")
    assert "Note: the page has 8 of 10 images" in run("photos", "-o", "a.html")[2]
    assert "8 of" not in run("photos", "-o", "b.html", "--limit", "9")[2]
    pages = [(here / name).read_text() for name in ("a.html", "b.html")]
    assert ["8.png" in page for page in pages] == [True, True]  # at equal distances: 0 1 2 3 5 6 7 8
    assert ["4.png" in page for page in pages] == [False, True]


@pytest.mark.parametrize("model", ["Nothing", "features", "Boxes", "Broken", "Dull", "Detached", "Blind"])
def test_a_model_without_a_usual_answer_has_a_page(run: Run, here: Path, model: str) -> None:
    status, out, errors = run("cat.jpg", "--format", "table", model=f"nets.py:{model}")
    assert (status, "Error" in errors, len(files(here))) == (0, False, 1)
    assert {"features": "of the pixels", "Boxes": "no scores of classes", "Broken": "NaN"}.get(model, "class ") in out


def words_of(found: inspection.Inspection, columns: int = 80, colours: bool = False) -> list[str]:
    return [*in_words(found, {"model": found.model, "weights": found.weights}, Page(columns, colours))]


def test_a_terminal_has_about_ten_lines_that_name_a_layer_once(found: inspection.Inspection) -> None:
    reason = "channels 30, 99 and 12 carry the answer: without them the score of star falls from 5.26 to 0.2"
    lines = words_of(replace(found, places=(place("error"), place("warning"), *[place(reason=reason)] * 10)))
    assert 8 <= len(lines) <= 11
    assert lines[0].startswith("cat.jpg: class ") and lines[1].startswith("dog.png: class ")
    assert lines[2] == "1 error, 1 warning, 10 notes"
    assert lines[3:5] == [" 1  error  conv1: it is wide", " 2  warning  conv1: it is wide"]
    assert [line for line in lines if re.fullmatch(r"    \d more places on the page", line)]
    carriers = [replace(place(reason=reason), kind="carries-answer")] * 3
    lines = words_of(replace(found, places=(*carriers, place("note"))))
    assert [line[:8] for line in lines[3:] if "note" in line or "more" in line] == [
        " 1  note",
        " 2  note",
        " 4  note",
        "    1 mo",
    ]
    lines = words_of(replace(found, places=(place(reason="Channel 3 of conv1 is dead."), place(reason="It is wide."))))
    assert lines[3:5] == [" 1  note  Channel 3 of conv1 is dead.", " 2  note  conv1: It is wide."]
    short = replace(place(reason="The head of conv1.2 is wide."), layer="h")
    lines = words_of(replace(found, places=(short, replace(short, layer="conv1"))))
    assert [line.split("  ")[-1].partition(":")[0] for line in lines[3:5]] == ["h", "conv1"], (
        "no name stands in the reason"
    )


@pytest.mark.parametrize(
    ("severities", "verdict"),
    [
        ((), "no place stands out"),
        (("note",), "1 note"),
        (("warning", "note", "note"), "1 warning, 2 notes"),
        (("error", "error"), "2 errors"),
    ],
)
def test_the_verdict_says_how_severe_it_is(
    found: inspection.Inspection, severities: tuple[str, ...], verdict: str
) -> None:
    assert verdict in words_of(replace(found, places=tuple(map(place, severities))))


def test_random_weights_are_said_first_loudly_and_once(found: inspection.Inspection) -> None:
    first = words_of(replace(found, weights="random (seed 3)"), colours=True)[0]
    assert "RANDOM WEIGHTS (seed 3): this network is not trained" in first and "\x1b[31m" in first
    assert "RANDOM" not in " ".join(words_of(replace(found, weights="mine.pth")))
    told = replace(place("error", ""), kind="random-weights", reason="The weights are random (seed 3).")
    found = replace(found, weights="random (seed 3)", places=(told,))
    assert [line for line in words_of(found) if "error" in line or "weights are" in line] == []
    lines = words_of(replace(found, places=(told, place())))
    assert lines[-4:-2] == ["1 error, 1 note", " 2  note  conv1: it is wide"]


@pytest.mark.parametrize("columns", [30, 40, 60, 80, 200])
def test_no_line_is_too_long(found: inspection.Inspection, columns: int) -> None:
    long = place("warning", "vision_language_model.encoder_layers.11.attention#12", "猫の写真 " * 30)
    images = tuple(replace(image, name="写真の/" * 20 + "猫.png\x1b[2J") for image in found.images)
    lines = words_of(replace(found, places=(long,) * 9, images=images), columns)
    assert max(map(wcwidth.width, lines)) <= columns
    assert not any("\x1b" in line for line in lines)


def test_an_image_that_is_given_twice_is_used_once(run: Run, here: Path) -> None:
    Image.linear_gradient("L").resize((8, 8)).convert("RGB").save(here / "one.png")
    (here / "again.png").write_bytes((here / "one.png").read_bytes())
    status, out, errors = run("one.png", "again.png", "--format", "json")
    assert status == 0 and "Note: again.png: left out: an earlier image has the same content" in errors
    assert "constant-output" not in out


def pasted(meaning: str) -> list[str]:
    """The words after ``hookscope`` of the command in a meaning, as a shell reads them."""
    return shlex.split(meaning.partition("hookscope ")[2])


def test_the_command_of_a_place_gives_the_numbers_of_its_row(here: Path) -> None:
    star, ring = here / "it's a star.png", here / "a ring.png"
    for path, source in ((star, "star.png"), (ring, "ring.png")):
        path.write_bytes((SHAPES / source).read_bytes())
    subject = [*(path.name for path in (star, ring)), "--mean", "0.4,0.5,0.5", "--std", "0.2", "--size", "96"]
    with spelling_for_shell():
        told = CliRunner().invoke(cli, ["inspect", "shapes", *subject, "-o", "page.html", "--format", "json"])
    carriers = [row for row in json.loads(told.stdout) if row["kind"] == "carries-answer"]
    assert {row["image"] for row in carriers} == {star.name, ring.name}
    for row in carriers:
        again = CliRunner().invoke(cli, [*pasted(row["meaning"]), "--format", "json"])
        [answer] = [each for each in json.loads(again.stdout)["classes"] if each["class"] == row["numbers"]["class"]]
        for name in ("probability", "probability_after"):
            assert answer[name] == pytest.approx(row["numbers"][name], rel=1e-4)


def test_commands_name_all_that_the_run_was_given_and_can_be_pasted(here: Path, finds: Any) -> None:
    weights = here / "my weights.pth"
    torch.save(load_model("nets.py:Small", input_size=(32, 32)).model.state_dict(), weights)
    commands = [
        "visualize MODEL IMAGE --layer conv1",
        "stats MODEL IMAGES --layer conv1",
        "intervene MODEL IMAGE --at conv1 zero",
    ]
    finds(*(place(meaning=f"See: hookscope {command}", image=1) for command in commands))
    words = ["cat.jpg", "dog.png", "--weights", weights.name, "--limit", "2", "--resize", "stretch"]
    told = CliRunner().invoke(cli, command_line(*words, "-o", "page.html", "--format", "json"))
    options = ["--weights", weights.name, "--resize", "stretch", "--input-size", "32"]
    read = [pasted(row["meaning"]) for row in json.loads(told.stdout)]
    assert [line[:-2] for line in read[:2]] == [
        ["visualize", "nets.py:Small", "dog.png", *options],
        ["stats", "nets.py:Small", "cat.jpg", "dog.png", *options[:2], "--limit", "2", *options[2:]],
    ]
    assert [CliRunner().invoke(cli, line).exit_code for line in read] == [0, 0, 0]
    page = (here / "page.html").read_text(encoding="utf-8")
    assert "hookscope visualize nets.py:Small dog.png --weights &#39;my weights.pth&#39;" in page


def test_the_title_of_the_page_is_the_name_of_the_model_and_no_path(here: Path) -> None:
    model = f"{here}/nets.py:Small"
    assert CliRunner().invoke(cli, command_line("cat.jpg", "-o", "page.html", model=model)).exit_code == 0
    page = (here / "page.html").read_text(encoding="utf-8")
    assert "<h1><bdi>nets.py:Small</bdi></h1>" in page and "<title>RANDOM WEIGHTS: nets.py:Small on cat.jpg" in page
    assert "graph of nets.py:Small" in page


def test_a_segmentation_of_the_user_and_a_detector_have_an_answer_in_words(here: Path) -> None:
    (here / "dense.py").write_text(DENSE, encoding="utf-8")
    told = {
        name: CliRunner().invoke(cli, command_line("cat.jpg", "--format", "table", model=f"dense.py:{name}")).stdout
        for name in ("halves", "one_box", "number")
    }
    assert "cat.jpg: class 1 62.5 %, class 0 37.5 % of the pixels" in told["halves"]
    assert "cat.jpg: 1 box: class 3 87.5 %" in told["one_box"]
    assert "cat.jpg: output 7.5" in told["number"]
