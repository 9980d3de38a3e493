"""No line of a table is longer than the terminal, whatever the names are."""

from pathlib import Path

import pytest
import wcwidth

from hookscope.cli.main import COMMANDS
from tests.cli.helpers import ROOT, Run

NETS = '''

class Long(nn.Module):
    """`Small` under names of 70 characters."""

    def __init__(self):
        super().__init__()
        inner = nn.ModuleDict({"encoder_layers": nn.ModuleDict({"11": Small()})})
        self.vision_language_model_for_classification = inner

    def forward(self, x):
        return self.vision_language_model_for_classification["encoder_layers"]["11"](x)


class Sick(Long):
    def __init__(self):
        super().__init__()
        small = self.vision_language_model_for_classification["encoder_layers"]["11"]
        nn.init.zeros_(small.conv1.weight[:2])
        nn.init.constant_(small.conv1.bias, -1)
'''
FOLDER = "写真のフォルダー/" + "a_folder_with_a_long_name/" * 2
PICTURES = {"猫の写真.png": (32, 32), "dog.png": (32, 32)}
LINES = [
    "list-layers MODEL",
    "list-layers MODEL --type all",
    "list-layers MODEL --ops",
    "list-layers MODEL --total",
    "list-models",
    "inspect MODEL CAT dog.png --categories names.txt -o FOLDER",
    "visualize MODEL CAT --type all --layer all -o FOLDER",
    "graph MODEL",
    "find-nan MODEL CAT",
    "compare-maps MODEL CAT --methods gradcam -o FOLDER",
    "trace MODEL CAT",
    "trace MODEL CAT --values --max-values 1000",
    "trace MODEL CAT --events --type all --layer all",
    "stats MODEL CAT",
    "stats MODEL CAT dog.png --type all --layer all --ops --rank",
    "stats MODEL CAT --per-channel --layer 0",
    "check MODEL CAT --max-abs 0.1 --no-nan --max-dead 0 --min-rank 90%",
    "weights MODEL",
    "verify MODEL CAT",
    "extract MODEL CAT dog.png --layer 0,1 -o x.npz",
    "exemplars MODEL CAT dog.png --layer 0,1",
    "predict MODEL CAT dog.png --categories names.txt",
    "cam MODEL CAT dog.png --target top:2 --layer 0,1 -o FOLDER --categories names.txt",
    "saliency MODEL CAT dog.png -o FOLDER --method integrated-gradients",
    "gradients MODEL CAT",
    "gradients MODEL CAT --parameters --clip-norm 0.1 --freeze re:conv1$",
    "intervene MODEL CAT --at 0 zero --categories names.txt",
    "intervene MODEL CAT --at 0 zero --classes",
    "ablate MODEL CAT --layer 0,1 --categories names.txt",
    "show-run run.ndjson",
    "compare MODEL MODEL CAT --weights-b none --categories names.txt",
    "plan MODEL --train --memory 1GB",
]


def command_line(line: str, model: str) -> list[str]:
    paths = {"MODEL": f"nets.py:{model}", "CAT": f"{FOLDER}猫の写真.png", "FOLDER": FOLDER}
    return [*(paths.get(word, word) for word in line.split()), "--format", "table"]


def widest(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, columns: int, line: str, model: str) -> int:
    (here / FOLDER).mkdir(parents=True)
    (here / "猫の写真.png").rename(here / FOLDER / "猫の写真.png")
    (here / "names.txt").write_text("a class with a rather long name, such as those of ImageNet\n猫\nthree\nfour\n")
    (here / "run.ndjson").write_text((ROOT / "tests/golden/inputs/run.ndjson").read_text())
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, errors = run(line, model)
    assert status in (0, 3), errors
    assert len(out.splitlines()) > 2
    return max(map(wcwidth.width, out.splitlines()))


def test_every_command_with_a_table_is_tested() -> None:
    assert {line.split()[0] for line in LINES} == {*COMMANDS} - {"attention", "merge", "watch", "help", "completion"}


@pytest.mark.parametrize("line", LINES)
def test_a_line_fits_eighty_columns(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    assert widest(run, here, monkeypatch, 80, line, "Long") <= 80


@pytest.mark.parametrize(
    "line", ["inspect MODEL CAT", "stats MODEL CAT", "check MODEL CAT --max-dead 0", "weights MODEL"]
)
def test_findings_fit_a_narrow_terminal(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    assert widest(run, here, monkeypatch, 40, line, "Sick") <= 40
