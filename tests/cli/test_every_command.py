"""The manners of every command: pipes, terminals, errors in one line, memory that runs out and interrupts."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from hookscope.cli import progress
from hookscope.cli.main import COMMANDS, cli
from hookscope.drawing.files import read_provenance, write_png
from hookscope.explain.cam_methods import CAM_METHODS, CamMethod, gradcam
from hookscope.explain.saliency_methods import SALIENCY_METHODS, SaliencyMethod, vanilla
from tests.cli.helpers import POSIX, Run, Terminal, files, one_error, rows

PICTURES = {"cat.jpg": (40, 32), "dog.png": (32, 40)}
WORDS = {
    "visualize": "cat.jpg",
    "inspect": "cat.jpg --input-size 32",
    "predict": "cat.jpg",
    "cam": "cat.jpg --input-size 32",
    "compare-maps": "cat.jpg --input-size 32 --methods gradcam",
    "saliency": "cat.jpg --input-size 32",
    "gradients": "cat.jpg --input-size 32",
    "intervene": "cat.jpg --input-size 32 --at conv1 zero",
    "stats": "cat.jpg dog.png --input-size 32 --preprocess stretch",
    "check": "cat.jpg dog.png --input-size 32 --preprocess stretch --max-abs 1e9",
    "exemplars": "cat.jpg dog.png --input-size 32 --preprocess stretch --top 1",
    "extract": "cat.jpg dog.png --input-size 32 --preprocess stretch --logits -o x.npz --overwrite",
    "compare": "nets.py:Small cat.jpg dog.png --input-size 32 --preprocess stretch",
    "verify": "cat.jpg",
    "ablate": "cat.jpg --input-size 32",
    "trace": "cat.jpg",
    "find-nan": "cat.jpg",
    "weights": "",
    "plan": "",
    "list-layers": "",
    "graph": "",
}
WITHOUT_PASS = {"weights"}  # commands that run no forward pass
OF_A_PICTURE = [name for name, words in WORDS.items() if words]
OF_LAYERS = [name for name in OF_A_PICTURE if name not in ("predict", "saliency", "find-nan")]
OF_CLASSES = ["inspect", "cam", "saliency", "gradients", "intervene", "predict"]
DRAWING = ["visualize", "cam", "saliency"]
OF_MANY = ["inspect", *DRAWING, "predict", "stats", "check", "compare", "exemplars", "extract"]
PLOTTING = ["gradients", "stats", "weights", "plan", "compare"]
every_command = pytest.mark.parametrize("command", WORDS)
drawing_command = pytest.mark.parametrize("command", DRAWING)
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


def command_line(command: str, *words: str, model: str = "nets.py:Small") -> list[str]:
    layer = ["--layer", "0"] if command == "visualize" and "--layer" not in words else []
    return [command, model, *WORDS[command].split(), *layer, *words]


def test_the_table_has_every_command_of_a_model() -> None:
    assert set(WORDS) == set(COMMANDS) - {
        "attention",
        "watch",
        "show-run",
        "merge",
        "list-models",
        "help",
        "completion",
    }


@pytest.mark.parametrize("command", [name for name in WORDS if name not in WITHOUT_PASS])
def test_an_exception_in_forward_is_told_with_its_file_and_line(run: Run, command: str) -> None:
    status, out, errors = run(command, model="nets.py:Raises")
    assert (status, out) == (1, "")
    assert re.search(
        r"^Error: nets\.py:Raises: forward\(\) failed on [0-9x]+: RuntimeError: no way on, at nets\.py:\d+ in ", errors
    )
    assert errors.endswith(" in forward; --traceback shows all\n")


@contextlib.contextmanager
def output_to(monkeypatch: pytest.MonkeyPatch, target: str | int) -> Iterator[None]:
    """Make a file or a descriptor standard output."""
    with monkeypatch.context() as patch, open(target, "w", buffering=1) as stream:
        patch.setattr(sys, "stdout", stream)
        yield


def pipe_without_a_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@POSIX
@every_command
def test_a_reader_that_leaves_ends_the_output_and_not_the_run(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    expected = run(command)
    pictures = files(here)
    for name in pictures:
        (here / name).unlink()
    with output_to(monkeypatch, pipe_without_a_reader()):
        assert run(command) == (0, "", expected[2])
    assert files(here) == pictures


@POSIX
def test_a_reader_that_leaves_does_not_open_the_gate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with output_to(monkeypatch, pipe_without_a_reader()):
        status, out, errors = run("check", "--max-abs", "0")
    assert (status, out) == (3, "")
    assert errors.startswith("Note: ") and "break a limit" in errors


@FULL
@every_command
def test_a_full_disk_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    with output_to(monkeypatch, "/dev/full"):
        status, _, errors = run(command)
    assert (status, errors.splitlines()[-1:]) == (1, ["Error: cannot write standard output: No space left on device"])
    assert errors.count("Error: ") == 1


@drawing_command
def test_a_picture_is_not_written_to_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    status, _, errors = run(command, "-o", "-")
    assert (status, errors) == (2, "Error: -o - would write a picture to the terminal; send it to a file or a pipe\n")


@every_command
def test_it_succeeds_and_what_a_model_prints_is_no_row(run: Run, command: str) -> None:
    status, expected, errors = run(command)
    assert (status, "Error" in errors) == (0, False) and expected
    status, out, errors = run(command, model="nets.py:Loud")
    assert (status, out.replace("Loud", "Small")) == (0, expected)
    assert "a word of the factory" in errors and ("a word of the model" in errors or command in WITHOUT_PASS)


@pytest.mark.parametrize(
    ("command", "words", "bar"),
    [
        ("cam", ["--method", "ablationcam"], "passes"),
        ("stats", ["--batch-size", "1"], "images/s"),
        ("inspect", ["dog.png"], "images/s"),
        ("inspect", ["dog.png"], "finding where to look ..."),
        ("visualize", ["dog.png", "-o", "out/"], "image 2 of 2 ..."),
    ],
)
def test_a_terminal_has_a_bar(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, words: list[str], bar: str
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_SILENT", 0.0)
    status, out, _ = run(command, *words)
    assert (status, bar in terminal.getvalue(), bar in out) == (0, True, False)


WRONG: list[tuple[Iterable[str], list[str], int, str]] = [
    (OF_LAYERS, ["--layer", "conv9"], 1, "no layer 'conv9' in ...; nearest: conv"),
    (OF_LAYERS, ["--layer", "re:("], 2, "bad regular expression"),
    (OF_LAYERS, ["--layer", ""], 2, "empty layer selection"),
    (OF_LAYERS, ["--layer", "99"], 1, "no index 99; there are ...calls: 0 to "),
    (OF_LAYERS, ["--layer", "1:2:3:4"], 2, "bad range '1:2:3:4'"),
    (
        [*(name for name in OF_LAYERS if name not in ("cam", "compare-maps")), "list-layers"],
        ["--type", "Conv3d"],
        1,
        "no layer of type Conv3d; the model has ",
    ),
    (OF_LAYERS, ["--layer", "all", "--type", "Conv3d"], 1, "no layer of type Conv3d; the model has "),
    (WORDS, ["--format", "xml"], 2, "'xml' is not one of "),
    (WORDS, ["--no-such-option"], 2, "has no option --no-such-option"),
    (OF_A_PICTURE, ["--device", "abacus"], 2, "no device 'abacus'"),
    (OF_A_PICTURE, ["--input-size", "x"], 2, "'x'"),
    (DRAWING, ["--cmap", "virids"], 2, "no colour map 'virids'; nearest: viridis"),
    (DRAWING, ["dog.png", "-o", "x.png"], 2, "-o x.png takes one picture; there are several images"),
    (["inspect", "predict", *DRAWING], ["-", "-"], 2, "standard input is named more than once; it can be"),
    (OF_CLASSES, ["--target", "4"], 1, "no class 4; the model has 4 classes: 0 to 3"),
    (OF_CLASSES, ["--target", "top:0"], 2, "bad target 'top:0'"),
]


WRONG_FILES: list[tuple[Iterable[str], list[str], int, str]] = [
    (DRAWING, ["-o", "x.jpg"], 2, "cannot write x.jpg; ...PNG files"),
    (DRAWING, ["-o", "no/x.png"], 1, "its folder does not exist"),
    (["cam", "saliency"], ["--raw", "x.txt"], 2, "cannot write x.txt; --raw writes arrays"),
    (["cam", "saliency"], ["--raw", "no/x.npy"], 1, "its folder does not exist"),
    (["cam", "saliency"], ["dog.png", "--raw", "x.npy"], 2, "--raw x.npy takes one array; there are several; name it"),
    (PLOTTING, ["--plot", "x.jpg"], 2, "cannot write x.jpg; plots are PNG, SVG or PDF files"),
    (PLOTTING, ["--plot", "no/x.png"], 1, "its folder does not exist"),
    (["stats"], ["--plot", "dog.png"], 1, "it is the image dog.png itself"),
    (["inspect"], ["-o", "no/x.html"], 1, "its folder does not exist"),
    (["stats"], ["--save", "no/x.json"], 1, "its folder does not exist"),
    (["check"], ["--junit", "no/x.xml"], 1, "its folder does not exist"),
    (["check"], ["--junit", "dog.png"], 1, "it is the image dog.png itself"),
    (["weights"], ["--kernels", "no/x.png"], 1, "its folder does not exist"),
    (["intervene"], ["--grid", "no/x.png"], 1, "its folder does not exist"),
    (["intervene"], ["--grid", "-"], 2, "cannot write -; sheets are PNG files; name it .png"),
    (OF_CLASSES, ["--categories", "nope.txt"], 1, "no file 'nope.txt' with class names"),
    (OF_CLASSES, ["--categories", "dog.png"], 1, "dog.png is not UTF-8 text"),
]


# a wrong file is an error before the model is loaded
TABLES = {"nets.py:Small": WRONG, "no_such_model": WRONG_FILES}
CASES = [
    (model, command, *case) for model, table in TABLES.items() for commands, *case in table for command in commands
]


@pytest.mark.parametrize(("model", "command", "words", "status", "message"), CASES)
def test_what_is_wrong_is_said_in_one_line(
    run: Run, here: Path, model: str, command: str, words: list[str], status: int, message: str
) -> None:
    one_error(run(command, *words, model=model), status, message)
    assert files(here) == []


@every_command
def test_a_model_that_does_not_exist_has_near_misses(run: Run, command: str) -> None:
    one_error(run(command, model="resnet35"), 1, "no model 'resnet35'; nearest: ")
    one_error(run(command, model="nets.py:Smal"), 1, "no 'Smal' in nets.py; nearest: Small")


@pytest.mark.parametrize("command", OF_A_PICTURE)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jpg", "no image 'none.jpg'"),
        ("bad.jpg", "'bad.jpg' is not an image"),
        ("empty.jpg", "'empty.jpg' is empty"),
    ],
)
def test_a_wrong_picture_is_the_error(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, message: str
) -> None:
    (here / "bad.jpg").write_text("no picture")
    (here / "empty.jpg").write_text("")
    monkeypatch.setitem(WORDS, command, WORDS[command].replace("cat.jpg", name).replace("dog.png", "").strip())
    one_error(run(command), 1, message)
    assert files(here) == ["bad.jpg", "empty.jpg"]


@pytest.mark.parametrize("command", [name for name in OF_MANY if name != "inspect"])
def test_broken_pictures_are_named_and_the_others_done(run: Run, here: Path, command: str) -> None:
    folder = ["-o", "out"] if command in DRAWING else []
    others = {"dog.png"} - {*WORDS[command].split()}
    _, expected, _ = run(command, *others, *folder)
    pictures = files(here)
    (here / "evil\x1b]0;x\n.jpg").write_bytes(b"")
    status, out, errors = run(command, "evil\x1b]0;x\n.jpg", "none.jpg", *others, *folder)
    assert (status, out) == (1, expected)
    lines = [line.split(";")[0] for line in errors.splitlines() if line.startswith("Error: ")]
    assert lines == ["Error: 'evil\\x1b]0", "Error: no image 'none.jpg'"]
    assert [name for name in files(here) if "evil" not in name and ".lost." not in name] == pictures


@pytest.mark.parametrize("command", ["cam", "saliency", "gradients", "predict"])
@pytest.mark.parametrize(
    ("model", "output"),
    [
        ("ssdlite320_mobilenet_v3_large", "boxes, labels and scores of objects"),
        ("raft_small", "the flow of pixels"),
        ("nets.py:features", "1x4x32x32 values"),
    ],
)
def test_a_model_without_classes_has_other_commands(
    run: Run, here: Path, command: str, model: str, output: str
) -> None:
    words = [] if ":" in model else ["--weights", "none"]
    if (command, model) == ("predict", "nets.py:features"):
        pytest.skip("each map is a class of pixels")
    status, out, errors = run(command, *words, *(["--input-size", "32"] if command == "predict" else []), model=model)
    assert (status, out, errors.count("Error: ")) == (1, "", 1)
    works = "inspect, visualize, stats and `gradients --loss mse` work on it"
    if model.startswith("ssdlite"):
        works += "; cam and saliency explain a box: --target box:0"
    message = f"no score for each class; {works}"
    name = "Conv2d" if ":" in model else model
    hint = "; for a segmentation, cam, saliency and inspect take a class: try --target 1"
    more = hint if ":" in model else ""
    assert errors.splitlines()[-1] == f"Error: {name} gives {output}, {message}{more}"
    assert files(here) == []


@drawing_command
def test_an_input_is_not_written_over(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setitem(WORDS, command, "dog.png")
    before = (here / "dog.png").read_bytes()
    one_error(run(command, "-o", "dog.png", model="no_such_model"), 1, "it is the image")
    assert (here / "dog.png").read_bytes() == before


@FULL
@pytest.mark.parametrize("command", ["inspect", *DRAWING])
def test_a_full_disk_for_a_picture_is_one_line(run: Run, command: str) -> None:
    status, _, errors = run(command, "-o", "/dev/full")
    assert (status, errors.count("\n"), "cannot write /dev/full: No space left" in errors) == (1, 1, True)


@FULL
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("stats", "--plot"),
        ("check", "--junit"),
        ("cam", "--raw"),
        ("gradients", "--plot"),
        ("weights", "--plot"),
        ("weights", "--kernels"),
    ],
)
def test_a_full_disk_for_another_file_costs_no_row(run: Run, command: str, option: str) -> None:
    expected = run(command)
    status, out, errors = run(command, option, "/dev/full")
    assert (status, out) == (1, expected[1])
    assert errors.removeprefix(expected[2]).startswith("Error: cannot write /dev/full: No space left on device;")


@POSIX
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("inspect", "-o"),
        ("visualize", "-o"),
        ("cam", "-o --raw --sheet"),
        ("saliency", "-o --raw"),
        ("weights", "--plot --kernels"),
    ],
)
def test_devices_are_written_to(run: Run, here: Path, command: str, options: str) -> None:
    assert run(command, *(word for option in options.split() for word in (option, "/dev/null")))[0] == 0
    assert files(here) == [] and not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("command", "methods", "toy"),
    [
        ("cam", CAM_METHODS, CamMethod(gradcam, "a toy method")),
        ("saliency", SALIENCY_METHODS, SaliencyMethod(vanilla, "a toy method", "a toy caption")),
    ],
)
def test_a_method_of_the_registry_is_in_the_help_and_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, methods: dict[str, Any], toy: Any
) -> None:
    monkeypatch.setitem(methods, "toy", toy)
    text = CliRunner().invoke(cli, ["help", command]).output
    assert [name for name in methods if f"\n    {name} " not in text] == []
    status, out, _ = run(command, "--method", "toy", "--format", "ndjson")
    assert (status, rows(out)[0]["method"]) == (0, "toy")


@drawing_command
def test_random_weights_are_in_the_row_and_in_the_picture(run: Run, here: Path, command: str) -> None:
    words = ("--weights", "none", "--seed", "3", "-o", "x.png", "--format", "ndjson")
    status, out, _ = run(command, *words, model="squeezenet1_1")
    (row,) = rows(out)
    assert (status, row["weights"]) == (0, "random (seed 3)")
    assert row.get("label", "visualize has no classes")
    assert read_provenance(here / "x.png")["weights"] == "random (seed 3)"


@pytest.mark.parametrize("command", OF_A_PICTURE)
def test_a_picture_is_read_from_a_pipe(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    _, expected, _ = run(command)
    monkeypatch.setitem(WORDS, command, WORDS[command].replace("cat.jpg", "-"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((here / "cat.jpg").read_bytes())))
    status, out, _ = run(command)
    assert status == 0
    named = out.replace("stdin-", "cat-").replace("image:-", "image:cat.jpg")
    assert re.sub(r"(?<=[\n\t])-(?=\t)", "cat.jpg", named) == expected


@drawing_command
def test_a_picture_is_written_to_a_pipe(run: Run, here: Path, command: str) -> None:
    result = CliRunner().invoke(cli, command_line(command, "-o", "-"))
    assert (result.exit_code, files(here)) == (0, [])
    assert read_provenance(result.stdout_bytes)["image"] == "cat.jpg"


@pytest.mark.parametrize("command", OF_A_PICTURE)
def test_memory_that_runs_out_is_one_line(run: Run, here: Path, command: str) -> None:
    one_error(run(command, model="nets.py:TooLarge"), 1, "out of memory; try a smaller ")
    assert files(here) == []


@every_command
def test_an_interrupt_is_silent(run: Run, here: Path, command: str) -> None:
    for model in ("nets.py:interrupted", "nets.py:Interrupted"):
        if command not in WITHOUT_PASS or model == "nets.py:interrupted":
            began = command == "extract" and model == "nets.py:Interrupted"
            note = "Note: interrupted before an image was saved in x.npz\n" if began else ""
            assert run(command, model=model) == (130, "", note)
    assert files(here) == []


@pytest.mark.parametrize("command", OF_MANY)
def test_images_are_named_in_the_same_ways(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    photos, runs = here / "photos", []
    photos.mkdir()
    for name in ("cat.jpg", "dog.png"):
        (here / name).rename(photos / name)
    write_png(Image.new("P", (4, 4)), photos / "drawn.png", {})
    (here / "list").write_bytes(b"photos/cat.jpg\0photos/dog.png\0")
    monkeypatch.setitem(WORDS, command, WORDS[command].replace("cat.jpg", "").replace("dog.png", ""))
    for words in (["photos"], ["photos/*[!n].*g"], ["--files0-from", "list"], ["photos/cat.jpg", "photos/dog.png"]):
        status, out, errors = run(command, *words, "--format", "json")
        assert status == 0, errors
        assert ("photos/drawn.png is skipped" in errors) == (words == ["photos"])
        runs.append(out)
    assert len(set(runs)) == 1
    status, out, _ = run(command, "photos", "--limit", "1", "--format", "json")
    assert status == 0 and (command == "check" or out != runs[0])


@every_command
def test_an_image_in_the_place_of_the_model_is_recognised(run: Run, command: str) -> None:
    are, models = "argument is the model", "MODEL"
    if command == "compare":
        are, models = "two arguments are the models", "MODEL_A MODEL_B"
    line = f"Error: 'cat.jpg' is an image, but the first {are}; write `hookscope {command} {models}"
    status, out, errors = run(command, model="cat.jpg")
    assert (status, out) == (2, "") and errors.startswith(line)
    assert (f"{models} cat.jpg`" in errors) == bool(WORDS[command])
