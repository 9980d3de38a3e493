"""Run a command line in a folder of its own, and describe all that came of it: facts apart from texts.

Facts are exit statuses, rows, numbers, option names and files. Texts are standard error, tables, help, and the fields
of rows that hold sentences.
"""

import base64
import contextlib
import csv
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import unittest.mock
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hookscope.cli.main import main

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PICTURES = ("star.png", "ring.png", "square.png", "circle.png")
PROSE_FIELDS = ("reason", "evidence", "meaning", "advice", "note")
LOG_CHANGES = ("time", "started", "pid", "hookscope", "torch")
VERSIONS = ("hookscope", "torch", "torchvision")
HEADER_LINE = re.compile(r" *[a-z_]+(  +[a-z_0-9]+){2,}$")  # of a table
OPTION_LINE = re.compile(r"^  (-.*?)(?:  +.*)?$")
THUMBNAIL = 16


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def record(command_lines: str) -> dict[str, Any]:
    """Facts and texts of some command lines, one a line, that run one after the other in the same new folder.

    ``< FILE`` at the end of a line is standard input. ``TERMINAL`` before it makes standard output a terminal.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / "work"
        _fill(folder)
        inputs = _names(folder)
        steps = []
        with surroundings(folder):
            for line in command_lines.strip().splitlines():
                steps.append(_run(line, folder))
        names = _names(folder) - inputs
        facts: dict[str, Any] = {"steps": [step["facts"] for step in steps]}
        if names:
            facts["files"] = {_plain_name(name): _describe(folder / name, folder) for name in sorted(names)}
        return {"facts": facts, "texts": [step["texts"] for step in steps]}


def _fill(folder: Path) -> None:
    folder.mkdir()
    for name in PICTURES:
        shutil.copyfile(ROOT / "samples" / "shapes" / name, folder / name)
    for path in sorted((HERE / "inputs").iterdir()):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    (folder / "notes.txt").write_text("no picture\n")
    (folder / "cut.png").write_bytes((folder / "star.png").read_bytes()[:300])
    (folder / "photos").mkdir()
    for name in PICTURES[:2]:
        shutil.copyfile(folder / name, folder / "photos" / name)
    (folder / "empty").mkdir()


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[None]:
    """An environment that depends on nothing outside: an empty cache, a known width, no network, Python's warnings."""
    before = dict(os.environ)
    os.environ["MPLCONFIGDIR"] = os.path.join(before.get("XDG_CACHE_HOME", tempfile.gettempdir()), "matplotlib")
    os.environ["XDG_CACHE_HOME"] = os.environ["TORCH_HOME"] = str(folder.parent / "cache")
    os.environ["COLUMNS"] = "110"
    os.environ["SHELL"] = "/bin/bash"
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in [name for name in os.environ if name.startswith("HOOKSCOPE_")]:
        del os.environ[name]
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ[name] = "http://127.0.0.1:9"
    for name in ("RANK", "WORLD_SIZE", "PYTHONSAFEPATH", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "LINES"):
        os.environ.pop(name, None)
    modules, threads = set(sys.modules), torch.get_num_threads()
    program = sys.modules["__main__"], sys.argv, [*sys.path]  # a watched script takes their places
    if "OMP_NUM_THREADS" not in before:
        torch.set_num_threads(1)  # passes this small gain nothing from two, and lose much where others work beside them
    try:
        with contextlib.chdir(folder), warnings.catch_warnings():
            warnings.simplefilter("default")
            for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = program
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(before)
        for name in {"nets", "train"} & (sys.modules.keys() - modules):  # the next folder has its own
            del sys.modules[name]


def _run(line: str, folder: Path) -> dict[str, Any]:
    words = shlex.split(line)
    terminal, stdin = words[0] == "TERMINAL", b""
    words = words[terminal:]
    if "<" in words:
        stdin = (folder / words[words.index("<") + 1]).read_bytes()
        words = words[: words.index("<")]
    status, stdout, stderr = run_here(words, stdin, terminal)
    facts: dict[str, Any] = {"command": line.strip(), "status": status}
    texts: dict[str, Any] = {}
    if stdout:
        _read_stdout(stdout, facts, texts, folder)
    if stderr:
        texts["stderr"] = _plain(stderr.decode(), folder).splitlines()
    return {"facts": facts, "texts": texts}


def run_here(words: list[str], stdin: bytes, terminal: bool, together: bool = False) -> tuple[int, bytes, bytes]:
    """Status, output and errors of hookscope in this process; `together` puts the errors into the output."""
    out, err = io.BytesIO(), io.BytesIO()
    stdout = (_Terminal if terminal else io.TextIOWrapper)(out, encoding="utf-8", write_through=True)
    stderr = io.TextIOWrapper(out if together else err, encoding="utf-8", write_through=True)
    before = sys.stdin, [*sys.path], [*sys.argv]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), _exit_handlers_run():
            try:
                main(words)
            except SystemExit as end:
                status = end.code
    finally:
        sys.stdin, sys.path[:], sys.argv[:] = before
    stdout.flush()
    stderr.flush()
    assert isinstance(status, int)
    return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _exit_handlers_run() -> Iterator[None]:
    """Run the exit handlers that are registered in the block at its end, as those of a process."""
    handlers: list[Callable[[], None]] = []
    with unittest.mock.patch("atexit.register", handlers.append):
        yield
    for handler in reversed(handlers):
        handler()


def _read_stdout(stdout: bytes, facts: dict[str, Any], texts: dict[str, Any], folder: Path) -> None:
    if stdout.startswith(b"\x89PNG"):
        facts["picture"] = _picture(io.BytesIO(stdout))
        return
    text = _plain(stdout.decode(), folder)
    prose: dict[str, Any] = {}
    if text.startswith("Usage:"):
        facts["options"] = [
            match[1] for match in map(OPTION_LINE.match, text.partition("\nOptions:\n")[2].splitlines()) if match
        ]
        texts["help"] = text.splitlines()
    elif text[0] in "[{":
        facts["json"] = _values(text, prose)
    elif "\t" in text.split("\n")[0]:
        facts["tsv"] = _table(list(csv.reader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)), prose)
    elif re.match(r"[a-z_0-9]+(,[a-z_0-9]+)+$", text.split("\n")[0]):
        facts["csv"] = _table(list(csv.reader(io.StringIO(text))), prose)
    else:
        headers = [line.split() for line in text.splitlines() if HEADER_LINE.match(line)]
        if headers:
            facts["columns"] = headers
        texts["stdout"] = text.splitlines()
    if prose:
        texts["fields"] = prose


def _values(text: str, prose: dict[str, Any], changing: Collection[str] = ()) -> Any:
    """JSON, or a list of the lines of NDJSON, with sentences moved to `prose` and no values of `changing` fields."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = {"lines": [json.loads(line) for line in text.splitlines()]}
    return _without_prose(value, "", prose, changing)


def _without_prose(value: Any, place: str, prose: dict[str, Any], changing: Collection[str] = ()) -> Any:
    if isinstance(value, list):
        return [_without_prose(item, f"{place}[{number}]", prose, changing) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return _short(value)
    facts = {}
    for name, item in value.items():
        here = f"{place}.{name}".lstrip(".")
        if name in PROSE_FIELDS and isinstance(item, str) and " " in item:
            prose[here] = item
            facts[name] = "(text)"
        elif name in changing:
            facts[name] = f"({name})"
        else:
            facts[name] = _without_prose(item, here, prose, changing)
    return facts


def _table(lines: list[list[str]], prose: dict[str, Any]) -> list[list[str]]:
    header = lines[0]
    for column, name in enumerate(header):
        if name in PROSE_FIELDS:
            for number, line in enumerate(lines[1:]):
                if line[column]:
                    prose[f"[{number}].{name}"] = line[column]
                    line[column] = "(text)"
        elif name == "time":  # of a run that was watched just now
            for line in lines[1:]:
                line[column] = "(time)"
    return [[_short(cell) for cell in line] for line in lines]


def _short(value: Any) -> Any:
    """A float, or the text of one, with no more digits than are compared."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str) and re.fullmatch(r"-?\d+\.\d{3,}(e[+-]?\d+)?", value):
        return f"{float(value):.6g}"
    return value


def _plain(text: str, folder: Path) -> str:
    for path, name in ((folder, "<folder>"), (folder.parent, "<scratch>"), (ROOT, "<root>")):
        text = text.replace(str(path), name)
    text = re.sub(r"hookscope \S+ \(torch \S+, torchvision \S+\)", "hookscope V (torch V, torchvision V)", text)
    text = re.sub(r"\(\d[\d.]* s\)", "(N s)", text)  # when a finding of a training was
    return _plain_name(text)


def _plain_name(name: str) -> str:
    return re.sub(r"events\.out\.tfevents\.[\w.+-]+", "events.out.tfevents", name)


def _names(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "__pycache__" not in name}


def _describe(path: Path, folder: Path) -> Any:
    kind = path.suffix
    if kind == ".png":
        return _picture(path)
    if kind == ".npy":
        return _array(np.load(path))
    if kind == ".npz":
        with np.load(path) as arrays:
            return {name: _array(arrays[name]) for name in arrays.files}
    if kind == ".svg":
        text = path.read_text()
        size = re.search(r'<svg[^>]*?height="([^"]+)"[^>]*?width="([^"]+)"', text)
        return {"size": list(size.groups()) if size else None, "starts": text.lstrip()[:5]}
    if kind == ".xml":
        return _plain(path.read_text(), folder).splitlines()
    if kind == ".json":
        return {"keys": list(json.loads(path.read_text()))}
    if kind == ".ndjson":
        return _values(path.read_text(), {}, LOG_CHANGES)
    return {"starts": path.read_bytes()[:5].decode("ascii", "replace")} if kind == ".pdf" else "(file)"


def _array(values: np.ndarray) -> dict[str, Any]:
    if values.dtype.kind == "U":
        return {"shape": list(values.shape), "dtype": "text"}
    numbers = values.astype(np.float64)
    return {
        "shape": list(values.shape),
        "dtype": str(values.dtype),
        "mean": _short(float(numbers.mean())),
        "std": _short(float(numbers.std())),
    }


def _picture(file: Any) -> dict[str, Any]:
    """Size, mode, what `hookscope` says in it; a thumbnail, the shares of light and dark, how sharp it is.

    The thumbnail shows where something is, the shares show colours of thin lines and letters, and the mean difference
    of neighbours along rows and columns shows their forms.
    """
    with Image.open(file) as image:
        facts: dict[str, Any] = {"size": list(image.size), "mode": image.mode}
        pixels = image.convert("RGB")
        text = image.info.get("hookscope")
    if text is not None:
        facts["provenance"] = {
            name: _without_prose(item, "", {}) for name, item in json.loads(text).items() if name not in VERSIONS
        }
    small = pixels.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    facts["thumbnail"] = base64.b64encode(small.tobytes()).decode()
    values = np.asarray(pixels).astype(np.int16)
    counts = [np.bincount(values[..., colour].ravel() // 32, minlength=8) for colour in range(3)]
    facts["shares"] = [[round(float(count) / values[..., 0].size, 4) for count in levels] for levels in counts]
    facts["edges"] = [round(float(np.abs(np.diff(values, axis=axis)).mean()), 3) for axis in (0, 1)]
    return facts
