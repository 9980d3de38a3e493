"""Files that would fill the memory are refused in one line, in a process that may take only little of it."""

import base64
import json
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from hookscope.jobs.state_file import BEGINNING, _digest

PROGRAM = """
import resource, sys
import hookscope.models.load
from hookscope import HookscopeError
from hookscope.models.checkpoints import load_content
from hookscope.statistics.run import load_statistics
from hookscope.training.log.file import read_runs

used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + (150 << 20),) * 2)
readers = {"checkpoint": load_content, "statistics": load_statistics, "log": read_runs}
for line in sys.stdin:
    kind, path = line.rstrip().split(" ", 1)
    try:
        readers[kind](path)
        print("read", flush=True)
    except HookscopeError as error:
        print(error, flush=True)
"""
SIZE = 1 << 28


def zip_of(name: str, size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file, file.open(name, "w") as entry:
            for _ in range(size >> 20):
                entry.write(bytes(1 << 20))

    return write


@cache
def packed_zeros(size: int) -> str:
    packer = zlib.compressobj(1)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return base64.b64encode(b"".join([*parts, packer.flush()])).decode()


def statistics_of(shape: list[int], size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        tally = {"images": {"array": "float64", "shape": shape, "data": packed_zeros(size)}, "layers": []}
        content = {"source": dict.fromkeys(SOURCE, ""), "progress": None, "tally": tally | {"batch_norms": []}}
        whole = {"hookscope": "1", "format": 1, "sha256": _digest(content), "content": content}
        path.write_text(json.dumps(whole))

    return write


SOURCE = ("model", "weights", "fingerprint", "preprocess", "layers")


def many_calls(path: Path) -> None:
    rows = [{"row": "run"}, *({"row": "layer", "step": 0, "layer": str(number)} for number in range(20_001))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def safetensors_header(path: Path) -> None:
    path.write_bytes((100 << 20).to_bytes(8, "little") + b"{" + b" " * 100)


def sparse(beginning: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(beginning)
            file.truncate(300 * SIZE)

    return write


BOMBS = [
    ("checkpoint", zip_of("archive/data/0", SIZE), "would unpack to 268,435,456; save model.state_dict()"),
    ("checkpoint", zip_of("archive/data.pkl", 65 << 20), "its list of tensors has 68,157,440 bytes"),
    ("checkpoint", safetensors_header, "its list of tensors has 104,857,600 bytes"),
    ("checkpoint", sparse(b""), "damaged, incomplete or not a checkpoint"),
    ("checkpoint", "/dev/zero", "it is a pipe or a device; give a file"),
    ("statistics", statistics_of([SIZE >> 3], SIZE), "its arrays are far larger than the file"),
    ("statistics", statistics_of([1], SIZE), "is damaged"),
    ("statistics", lambda path: path.write_bytes(BEGINNING + b"[]," * 2_000_000), "is too large for saved statistics"),
    ("statistics", sparse(b""), "holds no saved statistics"),
    ("statistics", sparse(BEGINNING), "holds no saved statistics, or is damaged"),
    ("statistics", "/dev/zero", "holds no saved statistics"),
    ("log", many_calls, "a run has more than 20,000 layer calls"),
    ("log", sparse(b""), "is not the log of a run"),
    ("log", "/dev/zero", "is not the log of a run"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="the memory in use is read from /proc")
def test_files_that_swell_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    lines = []
    for number, (kind, content, _) in enumerate(BOMBS):
        path = content if isinstance(content, str) else str(tmp_path / str(number))
        if not isinstance(content, str):
            content(Path(path))
        lines.append(f"{kind} {path}")
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=120, check=True)
    answers = ended.stdout.splitlines()
    assert len(answers) == len(BOMBS), ended.stderr
    for answer, (kind, _, text) in zip(answers, BOMBS, strict=True):
        assert text in answer, (kind, answer)
