"""What a shell, a reader of the help and a repeated listing get without the seconds that torch costs."""

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hookscope.cli.commands import cam, intervene, saliency
from hookscope.cli.main import main
from tests.cli.helpers import ROOT

PROGRAM = """
import contextlib, io, json, os, sys
from hookscope.cli.main import main

def run(words, **environment):
    os.environ.update(environment)
    printed = io.TextIOWrapper(io.BytesIO(), write_through=True)  # completion writes bytes
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(words)
    return printed.buffer.getvalue().decode()

def complete(line):
    place = str(len(line.split(" ")) - 1)
    return run([], _HOOKSCOPE_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=place).split()

light = [run(words) for words in (["--help"], ["--version"])]
names = {"torch", "torchvision", "numpy", "PIL", "matplotlib", "importlib.metadata", "textual_image", "rich"}
heavy = sorted(names & set(sys.modules))
listings, lines = json.load(sys.stdin)
printed = [run(words.split()) for words in listings]
offered = {line: complete(line) for line in lines}
json.dump([heavy, printed, offered, sorted({"torch", "torchvision"} & set(sys.modules))], sys.stdout)
"""
LISTINGS = [
    "list-layers squeezenet1_1 --type all",
    "list-models --format json",
    "cam --help",
    "saliency --help",
    "intervene --help",
]
OFFERED = {
    "hookscope list-": ["list-layers", "list-models"],
    "hookscope list-layers squeezenet": ["squeezenet1_0", "squeezenet1_1"],
    "hookscope visualize squeezenet1_1 cat.jpg --layer classifier": [
        "classifier",
        *(f"classifier.{n}" for n in range(4)),
    ],
    "hookscope list-layers squeezenet1_1 --type Fi": ["Fire"],
    "hookscope list-layers squeezenet1_1 --format j": ["json"],
    "hookscope predict resnet34 cat.jpg --target tabb": ["tabby"],
    "hookscope cam resnet34 --me": ["--method", "--mean"],
    "hookscope saliency resnet34 --method guided": ["guided-backprop", "guided-gradcam"],
}


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME names the cache folder on Linux")
def test_help_completion_and_repeated_listings_do_not_import_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    first = []
    for words in LISTINGS:
        with pytest.raises(SystemExit, match="0"):
            main(words.split())
        first.append(capsys.readouterr().out)
    with monkeypatch.context() as patches:  # as in a process without torch, which keeps the tables of help
        patches.delitem(sys.modules, "torch")
        for rows in (cam.cam_methods, saliency.Saliency.table, intervene.Intervene.table):
            assert rows()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([LISTINGS, [*OFFERED]]),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    heavy, printed, offered, torch = json.loads(done.stdout)
    assert (heavy, torch) == ([], [])
    difference = difflib.unified_diff("".join(first).splitlines(), "".join(printed).splitlines(), n=0)
    assert printed == first, "\n".join(difference)
    assert offered == {line: [f"plain,{word}" for word in words] for line, words in OFFERED.items()}
