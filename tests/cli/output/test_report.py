"""Rows and findings in every format, whole."""

import csv
import io
import json
import os
from typing import Any

import pytest

from hookscope.cli.output.formats import Report, Section, write_report
from hookscope.columns import Column, Columns
from hookscope.findings.finding import Finding

DEAD = Finding("dead-channels", "conv1", "1 of 8 channels never leaves 0: 3", "It is wasted.", channels=(3,))
MORE = Finding("dead-channels", "conv2", "2 of 8 channels never leave 0: 3, 4", "It is wasted.", channels=(3, 4))
FEW = Finding("few-images", "", "2 images", "Take more.", numbers={"images": 2, "share": float("nan")}, severity="note")
ROWS = [
    {"name": "conv1", "dead": 1, "mean": 0.5, "long": [3]},
    {"name": "a\tb\n", "dead": 0, "mean": float("nan"), "long": []},
]
FIELDS = ("name", "dead", "mean")
COLUMNS = Columns(*FIELDS, Column("long", where="nested"))


def written(
    format: str, findings: list[Finding], kind: str = "layer", stream: io.StringIO | None = None, **more: Any
) -> str:
    stream = stream or io.StringIO()
    section = Section(iter(ROWS), COLUMNS, kind)
    write_report(Report([section], findings, totals=["in all 2"], **more), format, stream)
    return stream.getvalue()


def test_a_table_has_rows_totals_and_findings_with_each_meaning_once() -> None:
    assert written("table", [DEAD, MORE, FEW]) == (
        "name    dead  mean\n"
        "conv1      1   0.5\n"
        "a\\tb\\n     0   nan\n"
        "\n"
        "in all 2\n"
        "\n"
        "warning  dead-channels  conv1: 1 of 8 channels never leaves 0: 3\n"
        "                        It is wasted.\n"
        "warning  dead-channels  conv2: 2 of 8 channels never leave 0: 3, 4\n"
        "note     few-images     2 images\n"
        "                        Take more.\n"
        "\n"
        "2 warnings, 1 note: look first at conv1 (dead-channels)\n"
    )
    assert written("table", []).endswith("in all 2\n\nno errors and no warnings\n")
    stream = io.StringIO()
    write_report(Report([Section([], COLUMNS, needs_rows=True)], [], totals=["in all 0"]), "table", stream)
    assert stream.getvalue() == "in all 0\n\nno errors and no warnings\n"


@pytest.mark.parametrize(("format", "between"), [("tsv", "\t"), ("csv", ",")])
def test_tsv_and_csv_hold_only_rows(format: str, between: str) -> None:
    lines = written(format, [DEAD]).split("\n", 2)
    assert lines[:2] == [between.join(FIELDS), between.join(["conv1", "1", "0.5"])]
    rows = list(csv.reader(io.StringIO(written("csv", [DEAD]))))
    assert rows[2:] == [["a\tb\n", "0", "nan"]]


def test_json_is_one_object_of_plain_ascii_with_all_its_lists() -> None:
    text = written("json", [DEAD, FEW])
    assert text.isascii()
    report = json.loads(text, parse_constant=pytest.fail)
    assert list(report) == ["layers", "findings", "verdict"]
    assert report["layers"] == [{**ROWS[0]}, {**ROWS[1], "mean": None}]
    assert report["findings"][0] == {
        "finding": "dead-channels",
        "severity": "warning",
        "layer": "conv1",
        "channels": [3],
        "evidence": DEAD.evidence,
        "meaning": DEAD.meaning,
        "numbers": {},
    }
    assert report["findings"][1]["numbers"] == {"images": 2, "share": None}
    stream = io.StringIO()
    write_report(Report([Section([], COLUMNS, "layer")], []), "json", stream)
    assert json.loads(stream.getvalue()) == {"layers": [], "findings": [], "verdict": "no errors and no warnings"}
    report = json.loads(written("json", [], kind="channel", about={"layers": [{"name": "conv1"}]}))
    assert list(report) == ["layers", "channels", "findings", "verdict"]


def test_every_line_of_ndjson_says_what_it_is() -> None:
    lines = [json.loads(line) for line in written("ndjson", [DEAD, FEW]).splitlines()]
    assert [line["row"] for line in lines] == ["layer", "layer", "finding", "finding"]
    assert [next(iter(line)) for line in lines] == ["row"] * 4
    assert lines[0] == {"row": "layer", **ROWS[0]}
    assert lines[2]["channels"] == [3]


def test_words_are_wrapped_and_escaped_and_names_are_whole() -> None:
    name = "features.3.block." + "x" * 75
    long = Finding("duplicate-channels", name, "word " * 40 + "the end", "to do " * 40 + "at last")
    lines = written("table", [long]).split("\n\n")[2].splitlines()
    assert lines[:2] == ["warning  duplicate-channels", f"    {name}:"]
    assert all(line.startswith("    ") for line in lines[1:])
    assert all(len(line) <= 100 for line in lines)
    assert " ".join(" ".join(lines).split()) == f"warning {long.finding} {name}: {long.evidence} {long.meaning}"
    evil = Finding("saturated", "a\x1b]0;x\n", "e\x07", "m")
    assert "a\\x1b]0;x\\n: e\\x07" in written("table", [evil])


def test_words_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def fileno(self) -> int:
            return 7

    for columns, most in ((80, 80), (200, 100), (40, 40), (10, 20), (0, 100)):
        monkeypatch.setattr(os, "get_terminal_size", lambda number, columns=columns: os.terminal_size((columns, 24)))
        stream = Terminal()
        written("table", [Finding("saturated", "a", "word " * 60, "Do.")], stream=stream)
        widest = max(len(line) for line in stream.getvalue().splitlines())
        assert most - 6 < widest <= most


def test_every_format_writes_its_sections() -> None:
    classes = Section([{"index": 1}], Columns("index"), "class", totals=["one class"], in_flat=False)
    layers = Section([{"name": "conv1"}], Columns("name"), "layer", needs_rows=True)
    texts = {}
    for format in ("table", "tsv", "json", "ndjson"):
        stream = io.StringIO()
        write_report(Report([classes, layers], about={"seed": 0}, totals=["done"]), format, stream)
        texts[format] = stream.getvalue()
    assert texts["table"] == "index\n    1\n\none class\n\nname\nconv1\n\ndone\n"
    assert texts["tsv"] == "name\nconv1\n"
    assert json.loads(texts["json"]) == {"seed": 0, "classes": [{"index": 1}], "layers": [{"name": "conv1"}]}
    assert texts["ndjson"].splitlines() == ['{"row": "class", "index": 1}', '{"row": "layer", "name": "conv1"}']


def test_a_note_says_what_flat_formats_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    for format, line in (("tsv", "Note: not here\n"), ("json", "")):
        written(format, [DEAD], flat_note="Note: not here")
        assert capsys.readouterr().err == line
