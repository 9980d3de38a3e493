"""The command visualize on small models: its sheets, rows, notes and refusals."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import hookscope
from hookscope.drawing.files import read_provenance
from tests.cli.helpers import POSIX, Run, files, one_error, rows

PICTURES = {"cat.jpg": (60, 40), "dog.png": (40, 60)}


def command_line(
    *words: str, model: str = "nets.py:Small", format: str = "ndjson", command: str = "visualize"
) -> list[str]:
    return [command, model, *words, "--format", format]


def test_a_row_is_of_the_values_in_the_sheet(run: Run, here: Path) -> None:
    status, out, errors = run("cat.jpg", "--layer", "1", "--preprocess", "none")
    [row] = rows(out)
    assert (status, errors, files(here)) == (0, "", ["cat-nets.py-Small-001-conv2.png"])
    assert (row["index"], row["name"], row["call"], row["file"]) == (1, "conv2", 0, files(here)[0])
    _, values = hookscope.read_sheet(here / row["file"])[""]
    assert (values.min(), values.max()) == pytest.approx((row["min"], row["max"]), rel=1e-6)
    assert row["shape"] == [1, *values.shape] and row["mean"] == pytest.approx(values.mean(), rel=1e-2)


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
def test_raw_activations_are_the_captured_ones(run: Run, here: Path, name: str) -> None:
    words = ["cat.jpg", "dog.png", "--layer", "conv1,relu", "--channels", "0", "--preprocess", "none"]
    assert run(*words, "--raw", name)[0] == 0
    arrays = dict(np.load(name)) if name == "x.npz" else load_file(name)
    net = hookscope.load_model("nets.py:Small", preprocess="none")
    for image in ("cat.jpg", "dog.png"):
        with hookscope.capture(net.model, layers="conv1,relu") as kept:
            net.model(net.preprocess(hookscope.open_image(image))[None])
        for layer in ("conv1", "relu"):  # relu works in place
            assert np.array_equal(arrays.pop(f"{image[:3]}/{layer}"), kept[layer].detach().numpy())
    assert not arrays
    one_error(run("cat.jpg", "--raw", "x.npy"), 2, "--raw x.npy takes one array; there are several")
    assert run("cat.jpg", "--layer", "0", "--raw", "x.npy")[0] == 0
    assert np.load("x.npy").shape[:2] == (1, 6)


def test_scores_with_names_of_classes_are_in_their_order(run: Run, here: Path) -> None:
    (here / "names.txt").write_text("cat\ndog\nhen\nfox\n")
    orders = []
    for words in ([], ["--categories", "names.txt"]):
        assert run("cat.jpg", "--layer", "fc", "-o", "fc.png", *words)[0] == 0
        channels, values = hookscope.read_sheet(here / "fc.png")[""]
        orders.append([value for _, value in sorted(zip(channels, values.ravel(), strict=True))])
        signed = values.ravel() if words else abs(values.ravel())
        assert signed.tolist() == sorted(signed, reverse=True)
    assert orders[0] == orders[1]


def test_two_images_of_one_name_do_not_overwrite_one_another(run: Run, here: Path) -> None:
    for folder, name in (("a", "cat.jpg"), ("b", "dog.png")):
        (here / folder).mkdir()
        (here / name).rename(here / folder / "cat.jpg")
    first, second = (row["file"] for row in rows(run("a/cat.jpg", "b/cat.jpg", "-o", "out", "--layer", "0")[1]))
    assert first != second
    assert read_provenance(first)["sha256"] != read_provenance(second)["sha256"]


def test_channels_that_do_not_fit_are_noted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.drawing.sheet.MOST_PIXELS", 20_000)
    status, _, errors = run("cat.jpg", "--layer", "0", "-o", "x.png")
    assert status == 0 and re.search(r"Note: conv1: \d+ channels left out of x.png; choose with --channels\n", errors)


def test_optical_flow_takes_two_pictures_and_video_the_frames_of_an_animation(run: Run, here: Path) -> None:
    status, out, _ = run("cat.jpg", "dog.png", "-o", "x.png", "--overlay", model="nets.py:Flow")
    assert (status, rows(out)[0]["shape"][0]) == (0, 2)
    provenance = read_provenance(here / "x.png")
    assert (provenance["image"], provenance["second"]["image"]) == ("cat.jpg", "dog.png")
    assert provenance["sha256"] != provenance["second"]["sha256"]
    message = "optical flow takes one or two images; 3 were given"
    one_error(run("cat.jpg", "dog.png", "cat.jpg", model="nets.py:Flow"), 2, message)
    assert run("cat.jpg", "-o", "y.png", model="nets.py:Flow")[0] == 0
    frames = [Image.new("RGB", (32, 32), (15 * number,) * 3) for number in range(16)]
    frames[0].save(here / "a.gif", save_all=True, append_images=frames[1:], duration=50)
    words = ["--type", "Conv3d", "--preprocess", "none", "-o", "x.png"]
    assert run("a.gif", *words, model="nets.py:Clip")[0] == 0
    _, values = hookscope.read_sheet(here / "x.png")[""]
    brightness = values[0].reshape(32, 16, 32)[5, :, 5]
    assert len(set(brightness.round(4))) > 10
    assert run("cat.jpg", *words, model="nets.py:Clip")[0] == 0


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A FIFO that nobody writes any more is waited for without end: fail after a minute."""

    def late(*rest: Any) -> None:
        raise TimeoutError("it waits for a FIFO")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@POSIX
@pytest.mark.usefixtures("no_waiting")
def test_fifos_are_read_and_written(run: Run, here: Path) -> None:
    picture = (here / "cat.jpg").read_bytes()
    for name in ("in.fifo", "out.fifo"):
        os.mkfifo(here / name)
    writer = threading.Thread(target=lambda: (here / "in.fifo").write_bytes(picture))
    writer.start()
    assert run("in.fifo", "--layer", "0", "-o", "x.png")[0] == 0
    writer.join(10)
    assert read_provenance(here / "x.png")["image"] == "in.fifo"
    sheets: list[bytes] = []
    reader = threading.Thread(target=lambda: sheets.append((here / "out.fifo").read_bytes()))
    reader.start()
    assert run("cat.jpg", "--layer", "0", "-o", "out.fifo")[0] == 0
    reader.join(10)
    assert read_provenance(sheets[0])["layer"] == "conv1"


def test_a_variable_chooses_every_index_and_infinite_values_are_drawn(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, errors = run("cat.jpg", "-o", "x.png", "--layer", "0", "--range", "0..1e39")
    assert (status, "Warning" in errors) == (0, False)
    monkeypatch.setenv("HOOKSCOPE_LAYER", " ")
    status, out, errors = run("cat.jpg", "-o", "out/", "--format", "ndjson")
    assert status == 0, errors
    assert [row["index"] for row in rows(out)] == list(range(len(rows(out)))) and rows(out)


def test_attention_is_a_page_for_each_image_and_a_row_for_each_head(run: Run, here: Path) -> None:
    words = ["--raw", "x.npz", "--size", "32x48", "--resize", "stretch"]
    status, out, errors = run("cat.jpg", *words, model="nets.py:Looks", command="attention")
    first, second = rows(out)
    name = "cat-nets.py-Looks-attention.png"
    assert (status, errors, files(here)) == (0, "", [name, "x.npz"])
    assert (first["name"], first["type"], first["index"]) == ("attention", "MultiheadAttention", 0)
    assert (first["query"], first["shape"], first["head"], second["head"]) == ("class token", [4, 6], 0, 1)
    assert read_provenance(name)["attention"][0]["layer"] == "attention"
    values = np.load("x.npz")["cat/attention"]
    assert second["max"] == values[1].max()
    assert first["non_patch_weight"] == pytest.approx(1 - values[0].sum(), abs=1e-6)
    row, column = divmod(int(values[0].argmax()), 6)  # cells of 10x10 pixels of the photograph
    assert (first["peak_x"], first["peak_y"]) == (column * 10 + 5, row * 10 + 5)


def test_a_table_of_attention_has_one_head_and_a_model_without_attention_is_refused(run: Run) -> None:
    few, many = sorted(
        rows(run("cat.jpg", model="nets.py:Looks", command="attention")[1]), key=lambda row: row["effective_positions"]
    )
    _, out, _ = run("cat.jpg", model="nets.py:Looks", format="table", command="attention")
    assert few["effective_positions"] < many["effective_positions"]
    assert f"head: {few['head']};" in out or f"  {few['head']}  " in out.splitlines()[1]
    assert "the head that looks at the fewest positions; --format tsv has all heads" in " ".join(out.split())
    one_error(run("cat.jpg", command="attention"), 1, "Small has no attention; in its pass no softmax weighs values")


def test_the_query_of_attention_is_a_position_in_pixels_of_the_image(run: Run, here: Path) -> None:
    net = hookscope.load_model("nets.py:Looks", preprocess="stretch", input_size=(32, 48))
    picture = net.prepare(hookscope.open_image("cat.jpg"))[None]
    [expected] = hookscope.attention_maps(net.model, picture, query=(2.5 / 4, 5.5 / 6))
    words = ["--preprocess", "stretch", "--size", "32x48", "--raw", "x.npy", "-o", "x.png"]
    assert run("cat.jpg", "--query", "59,21", *words, model="nets.py:Looks", command="attention")[0] == 0
    assert np.array_equal(np.load("x.npy"), expected.values)
    assert run("cat.jpg", "--query", "18", *words, model="nets.py:Looks", command="attention")[0] == 0
    assert np.array_equal(np.load("x.npy"), expected.values)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--query", "1,2,3"], 2, "--query 1,2,3 cannot be read; give class, mean, X,Y in pixels"),
        (["--query", "70,3"], 2, "the model does not see the position 70,3; it sees 0,0 to 60,40"),
        (["--query", "25"], 1, "attention has no single query 25; it has 25: 0 to 24"),
        (["--layer", "fc"], 1, "no attention in fc; the model has 1 call of attention: 0 (attention)"),
    ],
)
def test_what_attention_cannot_draw_is_said_in_a_line(run: Run, words: list[str], status: int, text: str) -> None:
    sized = ["--preprocess", "stretch", "--size", "32x48"]
    one_error(run("cat.jpg", *words, *sized, model="nets.py:Looks", command="attention"), status, text)
