"""Every format writes every kind of value, and nothing is lost on the way."""

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from hookscope.cli.output import formats
from hookscope.cli.output.formats import FORMATS, Report, Section, default_format, note, terminal_columns, write_report
from hookscope.cli.output.table import shortened, text_width
from hookscope.columns import Column, Columns

FIELDS = ("index", "layer", "shape", "mean")
ROWS: list[dict[str, Any]] = [
    {"index": 0, "layer": "conv1", "shape": (1, 64, 112, 112), "mean": 0.1},
    {"index": 12345, "layer": "a\tb\\c\n\x1b]0;x\x07", "shape": None, "mean": 1 / 3},
    {"index": 2, "layer": "grün", "shape": [3], "mean": math.nan},
]


def written(rows: list[dict[str, Any]], format: str, fields: tuple[str, ...] = FIELDS, totals: Any = ()) -> str:
    stream = io.StringIO()
    write_report(Report([Section(rows, Columns(*fields))], totals=totals), format, stream)
    return stream.getvalue()


def one(value: Any, format: str) -> str:
    """The text of ``value`` as the only cell of the only row."""
    return written([{"f": value}], format, ("f",)).splitlines()[1]


def test_table_is_aligned_and_escaped() -> None:
    assert written(ROWS, "table", totals=["3 layers", "12 kB"]).split("\n") == [
        " index  layer                 shape           mean",
        "     0  conv1                 1x64x112x112     0.1",
        r"12,345  a\tb\c\n\x1b]0;x\x07  -             0.3333",
        "     2  grün                  3                nan",
        "",
        "3 layers",
        "12 kB",
        "",
    ]


def test_tsv_is_exact_and_one_line_a_row() -> None:
    assert written(ROWS, "tsv", totals=["left out"]).split("\n") == [
        "index\tlayer\tshape\tmean",
        "0\tconv1\t1x64x112x112\t0.1",
        "12345\ta\\tb\\\\c\\n\\x1b]0;x\\x07\t\t0.3333333333333333",
        "2\tgrün\t3\tnan",
        "",
    ]


def test_csv_is_read_back_by_the_csv_module_and_escaped_on_a_terminal() -> None:
    text = written(ROWS, "csv", totals=["left out"])
    assert "\r" not in text
    back = list(csv.DictReader(io.StringIO(text)))
    assert back[1] == {"index": "12345", "layer": ROWS[1]["layer"], "shape": "", "mean": "0.3333333333333333"}
    assert [row["index"] for row in back] == ["0", "12345", "2"]
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    write_report(Report([Section(ROWS, Columns(*FIELDS))]), "csv", screen)
    assert screen.getvalue().splitlines()[2] == r'12345,"a\tb\c\n\x1b]0;x\x07",,0.3333333333333333'
    assert len(screen.getvalue().splitlines()) == 1 + len(ROWS)


@pytest.mark.parametrize("format", ["json", "ndjson"])
def test_json_keeps_types_and_has_no_bare_nan(format: str) -> None:
    text = written(ROWS, format, totals=["left out"])
    assert text.endswith("\n") and text.isascii() and "\x1b" not in text
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()] if format == "ndjson" else []
    rows = lines or json.loads(text, parse_constant=pytest.fail)
    assert rows == [
        {"index": 0, "layer": "conv1", "shape": [1, 64, 112, 112], "mean": 0.1},
        {"index": 12345, "layer": ROWS[1]["layer"], "shape": None, "mean": 1 / 3},
        {"index": 2, "layer": "grün", "shape": [3], "mean": None},
    ]
    assert list(rows[0]) == list(FIELDS)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("json", "[]\n"),
        ("ndjson", ""),
        ("tsv", "index\tlayer\tshape\tmean\n"),
        ("csv", "index,layer,shape,mean\n"),
        ("table", "index  layer  shape  mean\n"),
    ],
)
def test_no_rows(format: str, text: str) -> None:
    assert written([], format) == text


@pytest.mark.parametrize(
    ("value", "text", "table", "loaded"),
    [
        (None, "", "-", None),
        (True, "true", "true", True),
        (2048, "2048", "2048", 2048),
        (-25_557_032, "-25557032", "-25,557,032", -25_557_032),
        (0.1, "0.1", "0.1", 0.1),
        (2 / 3, "0.6666666666666666", "0.6667", 2 / 3),
        (1e-9, "1e-09", "1e-09", 1e-9),
        (math.inf, "inf", "inf", None),
        ((1, 1024), "1x1024", "1x1024", [1, 1024]),
        ((), "", "", []),
        ({"0": (1, 2), 1: (3, 40000)}, "0:1x2 1:3x40000", "0:1x2 1:3x40000", {"0": [1, 2], "1": [3, 40000]}),
        (((1, 2), (3,)), "1x2 3", "1x2 3", [[1, 2], [3]]),
        (["inplace", "shared"], "inplace,shared", "inplace,shared", ["inplace", "shared"]),
        ([0.5, math.nan], "0.5,nan", "0.5,nan", [0.5, None]),
        (Path("a/b.png"), "a/b.png", "a/b.png", "a/b.png"),
        (np.float32(0.1), "0.10000000149011612", "0.1", float(np.float32(0.1))),
        (np.int64(7), "7", "7", 7),
        (Fraction(1, 4), "0.25", "0.25", 0.25),
    ],
)
def test_each_kind_of_value(value: Any, text: str, table: str, loaded: Any) -> None:
    assert one(value, "tsv") == text
    assert one(value, "table").strip() == table
    assert next(csv.reader([one(value, "csv")]))[0] == text if text or "," in text else True
    assert json.loads(written([{"f": value}], "json", ("f",))) == [{"f": loaded}]
    assert json.loads(written([{"f": value}], "ndjson", ("f",))) == {"f": loaded}


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0])
def test_floats_survive_text(value: float) -> None:
    assert float(one(value, "tsv")).hex() == value.hex()


def test_wide_long_and_foreign_names_keep_the_columns() -> None:
    rows = [{"a": "猫", "b": "x"}, {"a": "e\u0301", "b": "y"}, {"a": "abc", "b": "z"}]
    assert written(rows, "table", ("a", "b")) == "a    b\n猫   x\ne\u0301    y\nabc  z\n"
    assert f"{'n' * 49}…{'n' * 50}\n" in written([{"f": "n" * 500}], "table", ("f",))
    assert one("caf\udce9", "tsv") == "caf\\udce9"
    assert one("\u202egnp", "table") == "\\u202egnp"


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_field_is_empty_and_an_unknown_field_is_an_error(format: str) -> None:
    assert written([{"index": 1}], format)
    with pytest.raises(ValueError, match="unknown fields \\['mena'\\]; there are index, layer"):
        written([{"index": 1, "mena": 2.0}], format)


def test_an_unknown_type_and_format_are_errors() -> None:
    with pytest.raises(TypeError, match="a value of type object"):
        written([{"index": object()}], "tsv")
    with pytest.raises(ValueError, match="no format 'xml'; there are table, tsv"):
        written([], "xml")


class Watched(io.StringIO):
    """A stream that knows what had been flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


@pytest.mark.parametrize("format", ["tsv", "csv", "ndjson"])
def test_rows_are_flushed_as_they_come(format: str) -> None:
    stream = Watched()
    counts = []

    def rows() -> Iterator[Mapping[str, Any]]:
        for index in range(3):
            counts.append(stream.flushed.count("\n"))
            yield {"index": index}

    write_report(Report([Section(rows(), Columns("index"))]), format, stream)
    header = 0 if format == "ndjson" else 1
    assert counts == [0, header + 1, header + 2]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("before", [[], [{"index": 7}]], ids=["first row", "second row"])
def test_an_error_loses_no_row_and_leaves_nothing_else(format: str, before: list[dict[str, Any]]) -> None:
    def rows() -> Iterator[Mapping[str, Any]]:
        yield from before
        raise OSError("disk full")

    stream = io.StringIO()
    with pytest.raises(OSError, match="disk full"):
        write_report(Report([Section(rows(), Columns("index"))]), format, stream)
    assert stream.getvalue() == (written(before, format, ("index",)) if before else "")


@pytest.mark.parametrize("format", ["table", "json"])
def test_a_document_is_written_whole_and_not_row_by_row(format: str) -> None:
    stream = io.StringIO()

    def rows() -> Iterator[Mapping[str, Any]]:
        yield {"index": 1}
        assert stream.getvalue() == ""

    write_report(Report([Section(rows(), Columns("index"))]), format, stream)
    assert stream.getvalue()


def test_a_table_has_lines_above_and_below_it_and_some_of_the_rows() -> None:
    totals: list[str] = []

    def rows() -> Iterator[Mapping[str, Any]]:
        yield {"index": 1}
        totals.append("1 row")

    stream = io.StringIO()
    write_report(Report([Section(rows(), Columns("index"))], totals=totals), "table", stream)
    assert stream.getvalue() == "index\n    1\n\n1 row\n"
    rows = [{"name": name} for name in "abc"]
    section = Section(rows, Columns("name"), shown=rows[1:2])
    report = Report([section], lead=["word " * 20 + "end"], indent="  ")
    table, tsv = io.StringIO(), io.StringIO()
    write_report(report, "table", table)
    write_report(report, "tsv", tsv)
    lead = " ".join(["word"] * 20) + "\n  end\n"
    assert (table.getvalue(), tsv.getvalue()) == (f"{lead}\nname\nb\n", "name\na\nb\nc\n")


def test_the_stream_chooses_the_format_and_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    assert default_format(stream) == "tsv"
    monkeypatch.setattr(stream, "isatty", lambda: True)
    assert default_format(stream) == "table"
    assert default_format(None) == "tsv"
    assert terminal_columns(io.StringIO()) == 100
    assert terminal_columns(io.StringIO(), 80) == 80
    with open(os.devnull) as stream:
        assert terminal_columns(stream) == 100
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((70, 24)))
    for columns, expected in (("90", 90), ("0", 70), ("-3", 70), ("wide", 70), ("", 70)):
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal_columns(Terminal()) == expected


def test_a_note_is_one_line_and_outlives_a_closed_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    note("weights: random\x1b[31m\n(seed 0)")
    assert capsys.readouterr() == ("", "weights: random\\x1b[31m\\n(seed 0)\n")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    note("nobody hears this")
    monkeypatch.setattr(sys, "stderr", None)
    note("nor this")


WIDE = [{"name": "layer1.0.conv1", "shape": (1, 64, 56, 56), "mean": 0.25, "note": "call 1 of 2"}]
WIDE_FIELDS = ("name", "shape", "mean", "note")


class Terminal(io.StringIO):
    def fileno(self) -> int:
        return 7

    def isatty(self) -> bool:
        return True


def columns_on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int, columns: Columns) -> list[str]:
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((width, 24)))
    stream = Terminal()
    write_report(Report([Section(WIDE, columns)]), "table", stream)
    lines = stream.getvalue().splitlines()
    header = lines[0].split()
    assert max(map(len, lines)) <= max(20, width)
    return header


@pytest.mark.parametrize(
    ("width", "header"),
    [(80, ["name", "shape", "mean", "note"]), (40, ["name", "shape", "mean"]), (25, ["name"]), (3, ["name"])],
)
def test_the_least_needed_columns_go_first_and_only_where_they_must(
    monkeypatch: pytest.MonkeyPatch, width: int, header: list[str]
) -> None:
    columns = Columns(*WIDE_FIELDS).but(note={"need": 1}, shape={"need": 2}, mean={"need": 2})
    assert columns_on_a_terminal(monkeypatch, width, columns) == header


def table(report: Report) -> str:
    stream = io.StringIO()
    write_report(report, "table", stream)
    return stream.getvalue()


def test_a_caption_holds_what_is_the_same_in_every_row() -> None:
    rows = [{"layer": name, "weights": "none", "image": "a.png", "dead": 0} for name in ("conv1", "fc")]
    section = Section(rows, Columns("layer", "weights", "image", "dead"))
    assert table(Report([section], caption={"model": "net", "weights": "none"}, totals=["2 layers"])).split("\n") == [
        "layer  dead",
        "conv1     0",
        "fc        0",
        "",
        "model: net; weights: none; image: a.png",
        "2 layers",
        "",
    ]
    rows = [{"image": "a.png", "weights": "none"}, {"image": "b.png", "weights": "none"}]
    text = table(Report([Section(rows, Columns("image", "weights"))], caption={"weights": "default"}))
    assert text == "image  weights\na.png  none\nb.png  none\n\nweights: default\n"


@pytest.fixture
def no_colour_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("no_colour_settings")
@pytest.mark.parametrize(
    ("stream", "settings", "coloured"),
    [
        (Terminal, {}, True),
        (io.StringIO, {}, False),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"NO_COLOR": ""}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
        (io.StringIO, {"CLICOLOR_FORCE": "1"}, True),
        (io.StringIO, {"FORCE_COLOR": "0"}, False),
        (io.StringIO, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_only_a_table_on_a_terminal_has_colours(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], settings: dict[str, str], coloured: bool
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    section = Section([{"dead": 3, "weights": "random (seed 0)"}], Columns("dead", "weights"))
    for format in FORMATS:
        out = stream()
        write_report(Report([section]), format, out)
        assert ("\x1b[" in out.getvalue()) == (coloured and format == "table")


@pytest.mark.usefixtures("no_colour_settings")
def test_colours_change_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": "a", "findings": ["dead-layer"], "mean": math.nan}, {"name": "b", "findings": [], "mean": 1.5}]
    report = Report([Section(rows, Columns("name", "findings", "mean"))], caption={"weights": "random (seed 0)"})
    plain = table(report)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert table(report) != plain
    assert click.unstyle(table(report)) == plain


NAMES = {"name": "星形 \x9b31m \u202e\udce9 🐈.png"}
ESCAPED = r"星形 \u009b31m \u202e\udce9 🐈.png"


@pytest.mark.parametrize("format", ["json", "ndjson"])
@pytest.mark.parametrize(
    ("asked", "stream", "keeps"),
    [
        (None, Terminal, True),
        (None, io.StringIO, False),
        (True, io.StringIO, True),
        (False, Terminal, False),
    ],
)
def test_json_keeps_its_characters_on_a_terminal_or_on_request(
    monkeypatch: pytest.MonkeyPatch, format: str, asked: bool | None, stream: type[io.StringIO], keeps: bool
) -> None:
    monkeypatch.setattr(formats.Output.now, "utf8", asked)
    out = stream()
    write_report(Report([Section([NAMES], Columns("name"))]), format, out)
    assert (ESCAPED in out.getvalue(), out.getvalue().isascii()) == (keeps, not keeps)
    found = json.loads(out.getvalue())
    assert (found[0] if format == "json" else found) == NAMES


@pytest.mark.parametrize(("asked", "written"), [(None, rb'"\u661f"'), (True, '"星"'.encode())])
def test_json_of_a_terminal_without_utf8_is_escaped_unless_asked(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, written: bytes
) -> None:
    monkeypatch.setattr(formats.Output.now, "utf8", asked)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1", errors="backslashreplace")
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    write_report(Report([Section([{"name": "星"}], Columns("name"))]), "ndjson", stream)
    assert written in raw.getvalue()


def test_equal_columns_leave_first_and_the_line_under_the_table_says_what_else_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    rows = [
        {"name": f"layer{number}.conv", "mean": 0.1 * number, "dead": 0, "shape": (64, number)}
        for number in range(1, 4)
    ]
    columns = Columns("name", Column("mean", need=2), "dead", Column("shape", need=1), "zeros")
    section = Section([row | {"zeros": 1 / row["shape"][1]} for row in rows], columns)
    assert table(Report([section])).split("\n") == [
        "name         mean   zeros",
        "layer1.conv   0.1       1",
        "layer2.conv   0.2     0.5",
        "layer3.conv   0.3  0.3333",
        "",
        "dead: 0",
        "left out: shape; --format tsv",
        "has all",
        "",
    ]


def test_names_are_shortened_last_and_where_most_stay_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {f"field{number}": "x" * number for number in range(1, 30)}
    monkeypatch.setenv("COLUMNS", "50")
    text = table(Report([Section([row], Columns(*row))]))
    assert "left out" not in text and all(name in text for name in row)
    monkeypatch.setenv("COLUMNS", "60")
    rows = [{"name": "backbone.blocks.7.conv", "label": "a" * 30 + end, "file": "out/" + "b" * 30} for end in "xy"]
    header, first, *_ = table(Report([Section(rows, Columns("name", "label", "file"))])).splitlines()
    assert len(header) <= 60 and first.startswith("backbone.blocks.7.conv  aaa")
    names = [f"model.layers.{number}.self_attention.projection" for number in range(12)]
    assert len({*shortened(names, 24)}) == 12
    assert shortened(names, 24)[11].startswith("model.layers.11…")
    paths = [f"/data/shapes/drawn/{name}.png" for name in ("circle", "circle-2")]
    assert shortened(paths, 21, are_paths=True) == ["…/drawn/circle.png", "…/drawn/circle-2.png"]
    alike = [f"/data/{name}/1.png" for name in ("train", "valid")]
    assert len({*shortened(alike, 12, are_paths=True)}) == 2
    monkeypatch.setenv("COLUMNS", "60")
    rows = [{"image": path, "label": "a" * 30 + path[-5], "score": 1.5} for path in paths]
    assert "/circle-2.png  " in table(Report([Section(rows, Columns("image", "label", "score"))]))


@pytest.mark.parametrize("width", range(1, 30))
def test_a_shortened_text_has_its_width(width: int) -> None:
    texts = ["features.3.expand1x1", "写真のフォルダー/猫の写真.png", "กำลัง" * 6, "🐈" * 20, "x"]
    short = shortened(texts, width)
    assert all(text_width(text) <= width for text in short)
    assert [one for one, text in zip(short, texts, strict=True) if text_width(text) <= width] == [
        text for text in texts if text_width(text) <= width
    ]
    assert short[1].replace("…", "") in ("", texts[1]) or (
        texts[1].startswith(short[1].partition("…")[0]) and texts[1].endswith(short[1].partition("…")[2])
    )
