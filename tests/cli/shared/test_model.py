"""The note about weights that are missing."""

from pathlib import Path

import pytest

from hookscope import load_model
from hookscope.cli.output.formats import Output
from hookscope.cli.shared import subject as module
from hookscope.cli.shared.subject import ModelOptions

NOTE = "Note: squeezenet1_1 has random weights: the trained ones are missing; --weights default says why\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def notes_of_a_run(capsys: pytest.CaptureFixture[str], model: str = "squeezenet1_1") -> str:
    net = ModelOptions(model=model).load()
    assert net.weights == "random (seed 0)"
    return capsys.readouterr().err


def test_the_note_comes_once_a_day_and_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [notes_of_a_run(capsys) for _ in range(3)] == [NOTE, "", ""]
    assert notes_of_a_run(capsys, "squeezenet1_0") == NOTE.replace("1_1", "1_0")
    monkeypatch.setattr(module.time, "strftime", lambda form: "2100-01-01")
    assert [notes_of_a_run(capsys) for _ in range(2)] == [NOTE, ""]


def test_without_a_cache_the_note_comes_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hookscope").write_text("no folder")
    assert [notes_of_a_run(capsys) for _ in range(2)] == [NOTE, NOTE]


def test_a_quiet_run_does_not_count(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Output.now, "quiet", True)
        assert notes_of_a_run(capsys) == ""
    assert notes_of_a_run(capsys) == NOTE


def test_the_reason_is_in_the_notes_of_the_library() -> None:
    net = load_model("squeezenet1_1")
    assert net.notes == (net.missing_weights,)
    assert net.missing_weights.startswith("weights of squeezenet1_1 are random (seed 0): cannot download https://")
    assert load_model("squeezenet1_1", weights="none").missing_weights == ""
