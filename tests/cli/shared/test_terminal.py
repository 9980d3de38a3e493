"""Pictures in the terminal: what it is asked, and that the pixels it gets are those of the picture."""

import base64
import io
import os
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hookscope.cli.shared import terminal
from tests.cli.helpers import POSIX, ROOT

COLOURS = ((200, 30, 10), (0, 160, 60), (20, 40, 220), (250, 250, 250))  # of the quarters
DRAW = """
import sys, termios, time
from PIL import Image
from hookscope.cli.shared import terminal

if len(sys.argv) > 2:  # a terminal that answers has all the time it needs
    terminal._SECONDS = float(sys.argv[2])
terminal.check_terminal()
before, start = termios.tcgetattr(1), time.monotonic()
screen = terminal.ask_terminal()
seconds = time.monotonic() - start
assert termios.tcgetattr(1) == before
print("SCREEN", screen.protocol, *screen.cell, f"{seconds:.3f}", flush=True)
print(terminal.draw(Image.open(sys.argv[1]), screen), end="END", flush=True)
"""
PATIENT = """
import sys
from hookscope.cli.main import main
from hookscope.cli.shared import terminal

terminal._SECONDS = 30  # a terminal that answers has all the time it needs
main(sys.argv[1:])
"""
ATTRIBUTES, SIXEL = (b"\x1b[c", b"\x1b[?62;22c"), (b"\x1b[c", b"\x1b[?62;4;22c")  # question, answer
CELL, KITTY = (b"\x1b[16t", b"\x1b[6;18;9t"), (b"\x1b_Gi=31", b"\x1b_Gi=31;OK\x1b\\")


def quarters(size: tuple[int, int] = (320, 240)) -> Image.Image:
    picture = Image.new("RGB", size)
    wide, high = size[0] // 2, size[1] // 2
    for number, colour in enumerate(COLOURS):
        picture.paste(colour, (wide * (number % 2), high * (number // 2), *size))
    return picture


def in_terminal(
    *words: str,
    answers: tuple[tuple[bytes, bytes], ...] = (),
    delay: float = 0.0,
    size: tuple[int, int, int, int] = (24, 80, 0, 0),
    stdin: Any = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> tuple[str, bytes]:
    """Run Python with ``words`` in a terminal that gives ``answers``; what it got, and the input that nobody read."""
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    leader, line = os.openpty()
    fcntl.ioctl(line, termios.TIOCSWINSZ, struct.pack("HHHH", *size))
    tells = ("TMUX", "COLUMNS", "LINES", "NO_COLOR", "COLORTERM")
    environment = {name: value for name, value in os.environ.items() if name not in tells}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT), **(env or {})}
    program = [
        sys.executable,
        "-c",
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(1, termios.TIOCSCTTY, 0);"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    ]
    process = subprocess.Popen(
        [*program, *words], stdin=line if stdin is None else stdin, stdout=line, stderr=line, env=environment, cwd=cwd
    )
    got, left, due, asked, end = b"", b"", [], set(), time.monotonic() + 60
    try:
        while (ready := select.select([leader], [], [], 0.01)[0]) or process.poll() is None:
            assert time.monotonic() < end, got
            got += os.read(leader, 65536) if ready else b""
            new = [pair for pair in answers if pair[0] in got and pair not in asked]
            asked.update(new)
            due += [(time.monotonic() + delay, answer) for _, answer in new]
            for moment, answer in [pair for pair in due if pair[0] <= time.monotonic()]:
                os.write(leader, answer)
                due.remove((moment, answer))
        mode = termios.tcgetattr(line)
        mode[3] &= ~termios.ICANON
        termios.tcsetattr(line, termios.TCSANOW, mode)
        while select.select([line], [], [], 0)[0]:
            left += os.read(line, 1024)
    finally:
        process.kill()
        process.wait()
        os.close(leader)
        os.close(line)
    return got.decode().replace("\r\n", "\n"), left


def drawn(tmp_path: Path, picture: Image.Image | None = None, **more: Any) -> tuple[list[str], str]:
    """What a terminal was found to be, and what it was sent for a picture."""
    (picture or quarters()).save(tmp_path / "a.png")
    seconds = ("30",) if any(question == ATTRIBUTES[0] for question, _ in more.get("answers", ())) else ()
    got, left = in_terminal("-c", DRAW, str(tmp_path / "a.png"), *seconds, **more)
    assert left == b"" and got.endswith("END"), got
    found = re.search(r"SCREEN (.*)\n", got)
    assert found is not None
    return found[1].split(), got[found.end() : -len("END")]


def of_blocks(text: str) -> Image.Image:
    """The pixels of half blocks: the colour of the sign above, that of its ground below."""
    rows = [
        [
            tuple(map(int, colours))
            for colours in re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m▀", line)
        ]
        for line in text.splitlines()
    ]
    cells = np.array(rows, np.uint8).reshape(len(rows), -1, 2, 3)
    return Image.fromarray(cells.swapaxes(1, 2).reshape(2 * len(rows), -1, 3))


def of_sixels(text: str) -> Image.Image:
    """The pixels of a sixel picture, by the manual of the VT340."""
    match = re.search(r'\x1bP[\d;]*q"1;1;(\d+);(\d+)(.*?)\x1b\\', text, re.DOTALL)
    assert match is not None
    pixels = np.zeros((int(match[2]) + 6, int(match[1]), 3))
    palette, colour, x, y = {}, np.zeros(3), 0, 0
    for token in re.finditer(r"#(\d+)(?:;2;(\d+);(\d+);(\d+))?|!(\d+)([?-~])|([?-~])|(\$)|(-)", match[3]):
        number, *percents, count, repeated, single, _, down = token.groups()
        if number:
            if percents[0]:
                palette[number] = np.array(percents, float) * 2.55
            colour = palette[number]
        elif sign := repeated or single:
            for bit in range(6):
                if (ord(sign) - 63) >> bit & 1:
                    pixels[y + bit, x : x + int(count or 1)] = colour
            x += int(count or 1)
        else:
            x, y = 0, y + (6 if down else 0)
    return Image.fromarray(pixels[: int(match[2])].round().astype(np.uint8))


def of_kitty(text: str) -> tuple[Image.Image, dict[str, str], str]:
    """The pixels of a kitty picture, the keys of its placement, and the text with its cells."""
    messages = re.findall(r"\x1b_G([^;\x1b]*);?([^\x1b]*)\x1b\\", text)
    keys = [dict(pair.split("=") for pair in words.split(",")) for words, _ in messages]
    assert all(each.get("t", "d") == "d" and each["q"] == "2" for each in keys)  # the bytes, no path; no answers
    data = base64.b64decode("".join(payload for _, payload in messages), validate=True)
    assert all(len(payload) <= 4096 for _, payload in messages)
    return Image.open(io.BytesIO(data)), keys[-1], text[text.rindex("\x1b\\") + 2 :]


def check_quarters(picture: Image.Image, tolerance: int = 0) -> None:
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    high, wide = pixels.shape[0] // 2, pixels.shape[1] // 2
    for number, colour in enumerate(COLOURS):
        rows, columns = slice(1, high - 1), slice(1, wide - 1)
        rows = slice(high + 1, None) if number // 2 else rows
        columns = slice(wide + 1, None) if number % 2 else columns
        assert abs(pixels[rows, columns] - colour).max() <= tolerance


@POSIX
def test_a_terminal_without_pictures_draws_half_blocks(tmp_path: Path) -> None:
    found, text = drawn(tmp_path, answers=(ATTRIBUTES,))
    picture = of_blocks(text)
    assert found[:3] == ["blocks", "10", "20"] and picture.size == (56, 42)
    check_quarters(picture)


@POSIX
@pytest.mark.parametrize("way", ["asked", "told", "kitty-too", "late", "in-tmux", "no-stdin"])
def test_a_terminal_with_sixel_gets_sixels(tmp_path: Path, way: str) -> None:
    answers = (*((CELL,) if way == "asked" else ()), *((KITTY,) if way == "kitty-too" else ()), SIXEL)
    size = (24, 80, 720, 432) if way == "told" else (24, 80, 0, 0)
    delay, env = (0.15 if way == "late" else 0), {"TMUX": "/tmp/tmux,1,0"} if way == "in-tmux" else {}
    stdin = subprocess.DEVNULL if way == "no-stdin" else None
    found, text = drawn(tmp_path, answers=answers, size=size, delay=delay, env=env, stdin=stdin)
    wide, high = (9, 18) if way in ("asked", "told") else (10, 20)
    picture = of_sixels(text)
    assert found[:3] == ["sixel", str(wide), str(high)]
    assert picture.width % wide == picture.height % high == 0
    assert 0 <= picture.width - 320 < wide and 0 <= picture.height - 240 < high
    assert text.count("\n") == picture.height / high  # the lines that the picture covers
    check_quarters(picture.crop((0, 0, 320, 240)), tolerance=2)  # percents
    assert (np.asarray(picture)[240:, 320:] > 240).all()  # the rest of the last cells is like the last pixel


@POSIX
@pytest.mark.parametrize("env", [{"TERM": "xterm-kitty"}, {"COLORTERM": "", "NO_COLOR": "1", "SSH_TTY": "/dev/pts/1"}])
def test_kitty_gets_the_pixels_and_the_cells_that_show_them(tmp_path: Path, env: dict[str, str]) -> None:
    found, text = drawn(tmp_path, answers=(KITTY, CELL, ATTRIBUTES), env=env)
    picture, placed, cells = of_kitty(text)
    columns, rows = int(placed["c"]), int(placed["r"])
    assert found[:3] == ["kitty", "9", "18"] and picture.size == (columns * 9, rows * 18)
    assert np.array_equal(np.asarray(picture)[:240, :320], np.asarray(quarters()))
    assert cells.count("\U0010eeee") == columns * rows and cells.count("\n") == rows
    number, (red, green, blue) = int(placed["i"]), map(int, re.search(r"38;2;(\d+);(\d+);(\d+)m", cells).groups())
    assert (red << 16 | green << 8 | blue) == number & 0xFFFFFF  # all colours, whatever the terminal says of colours


@POSIX
def test_a_silent_terminal_costs_less_than_half_a_second(tmp_path: Path) -> None:
    found, text = drawn(tmp_path)
    assert found[0] == "blocks" and terminal._SECONDS < 0.5 and 0.3 < float(found[3]) < 1
    check_quarters(of_blocks(text))


@POSIX
def test_a_terminal_in_tmux_and_on_linux_console_is_not_asked_for_kitty() -> None:
    ask = "from hookscope.cli.shared import terminal; print(terminal.ask_terminal())"
    for env in ({"TMUX": "x"}, {"TERM": "tmux-256color"}, {"TERM": "screen"}, {"TERM": "linux"}):
        got, _ = in_terminal("-c", ask, answers=(ATTRIBUTES,), env=env)
        assert "\x1b[c" in got and "\x1b_G" not in got
    assert "\x1b_G" in in_terminal("-c", ask, answers=(ATTRIBUTES,))[0]


@POSIX
def test_in_the_background_nothing_is_asked() -> None:
    ask = "import os; os.setpgid(0, 0); from hookscope.cli.shared import terminal; print(terminal.ask_terminal())"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"
    got, _ = in_terminal("-c", starts, answers=(SIXEL,))
    assert got == "Screen(protocol='blocks', cell=(10, 20))\n"


@pytest.mark.parametrize("size", [(80, 24), (250, 60), (400, 30), (20, 5), (1, 1)])
def test_a_picture_fits_the_terminal_and_keeps_its_shape(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    monkeypatch.setenv("COLUMNS", str(size[0]))
    monkeypatch.setenv("LINES", str(size[1]))
    pictures = [(128, 128), (1300, 5000), (5000, 90), (1, 1), (900, 640)]
    for case in product(pictures, ["blocks", "sixel", "kitty"], [(10, 20), (7, 15), (16, 33)]):
        picture, protocol, cell = case
        columns, rows, scale = terminal.fit(Image.new("L", picture), terminal.Screen(protocol, cell))
        assert 1 <= columns <= min(size[0], 297) and 1 <= rows <= max(1, size[1] - 3) and 0 < scale <= 1, case
        wide, high = (1, 2) if protocol == "blocks" else cell
        if rows > 9 and columns > 9:
            assert columns * wide / (rows * high) == pytest.approx(picture[0] / picture[1], rel=0.15), case
            assert rows * high == pytest.approx(picture[1] * scale, abs=high), case


def test_the_library_gets_no_terminal_and_the_environment_is_put_back() -> None:
    stdout, environment = sys.__stdout__, dict(os.environ)
    text = terminal.draw(quarters(), terminal.Screen("sixel"))
    check_quarters(of_sixels(text).crop((0, 0, 320, 240)), tolerance=2)
    assert sys.__stdout__ is stdout and dict(os.environ) == environment


@POSIX
def test_a_run_in_a_terminal_with_sixel_draws_the_file_that_it_wrote(tmp_path: Path) -> None:
    words = ["cam", "shapes", "samples/shapes/star.png", "-o", str(tmp_path / "a.png"), "--show"]
    got, left = in_terminal("-c", PATIENT, *words, answers=(CELL, SIXEL), size=(60, 100, 0, 0), cwd=ROOT)
    drawn, written = of_sixels(got), Image.open(tmp_path / "a.png").convert("RGB")
    off = np.abs(np.asarray(drawn, int)[: written.height, : written.width] - np.asarray(written, int))
    assert off.mean() < 6 and left == b""  # 256 colours
    assert got.rstrip().endswith(f"open it: xdg-open {tmp_path / 'a.png'}") or sys.platform != "linux"
