"""The options that choose where the passes of a long run take place."""

import pytest

from hookscope import jobs
from hookscope.cli.shared.engine_options import EngineOptions, torchrun_rank
from hookscope.errors import UsageError
from tests.cli.helpers import Run


def command_line(*words: str) -> list[str]:
    return [*words]


def test_the_engine_is_this_process_unless_a_cluster_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RayEngine", lambda *given: given, raising=False)
    assert isinstance(EngineOptions().make(), jobs.LocalEngine)
    assert EngineOptions(engine="ray").make() == (None, 0.0)
    assert EngineOptions(engine="ray", address="auto", gpus_per_worker=0.25).make() == ("auto", 0.25)


def under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)


def test_torchrun_divides_the_work_of_stats_and_check_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchrun_rank() is None
    under_torchrun(monkeypatch, "1", "3")
    engine = EngineOptions().make(divides=True)
    assert isinstance(engine, jobs.TorchrunEngine) and (engine.rank, engine.size) == (1, 3)
    with pytest.raises(UsageError, match="torchrun divides the work of stats and check only"):
        EngineOptions().make()
    with pytest.raises(UsageError, match="--engine ray cannot be used under torchrun"):
        EngineOptions(engine="ray")


@pytest.mark.parametrize(("rank", "size"), [("0", "1"), ("", "2"), ("x", "2"), ("0", "")])
def test_a_process_alone_is_not_one_of_torchrun(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    under_torchrun(monkeypatch, rank, size)
    assert torchrun_rank() is None
    assert isinstance(EngineOptions().make(), jobs.LocalEngine)


def test_another_rank_serves_and_prints_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    under_torchrun(monkeypatch, "1", "2")
    monkeypatch.setattr(jobs.TorchrunEngine, "serve", lambda self, net: served.append(net.name))
    done = run("stats", "shapes", "missing.png", "--save", "nowhere/a.json")
    assert (*done, served) == (0, "", "", ["shapes"])
