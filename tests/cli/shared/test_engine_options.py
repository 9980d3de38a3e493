"""The options that choose where the passes of a long run take place."""

from __future__ import annotations

import pytest

from hookscope import jobs
from hookscope.cli.shared.engine_options import EngineOptions
from tests.cli.helpers import Run, one_error


def command_line(*words: str) -> list[str]:
    return [*words]


@pytest.mark.parametrize("command", [["stats"], ["check", "--no-nan"]], ids=" ".join)
@pytest.mark.parametrize("option", [["--address", "auto"], ["--gpus-per-worker", "0.5"]], ids=" ".join)
def test_an_option_of_a_cluster_needs_one(run: Run, command: list[str], option: list[str]) -> None:
    one_error(run(command[0], "shapes", "cat.jpg", *command[1:], *option), 2, f"{option[0]} needs...--engine ray")


def test_statistics_that_are_merged_need_no_engine(run: Run) -> None:
    one_error(run("stats", "--merge", "a.json", "--engine", "local"), 2, "--engine cannot be used with --merge")


def test_the_engine_is_this_process_unless_a_cluster_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RayEngine", lambda *given: given, raising=False)
    assert isinstance(EngineOptions().make(), jobs.LocalEngine)
    assert EngineOptions("ray").make() == (None, 0.0)
    assert EngineOptions("ray", "auto", 0.25).make() == ("auto", 0.25)
