"""Where the passes of a long run take place, and what the run says of images that are skipped."""

import pytest

from hookscope import jobs
from hookscope.cli.shared.long_run import EngineOptions, ImageRun, torchrun_rank
from hookscope.errors import ImageError, UsageError
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


def image_run(strict: bool = False) -> ImageRun:
    return ImageRun(9, None, strict)


def test_skipped_images_are_named_and_counted_unless_strict(capsys: pytest.CaptureFixture[str]) -> None:
    run = image_run()
    run.listener.skipped(0, "a\n", ImageError("no image 'a\n'"))
    run.listener.skipped(4, "b", ImageError("'b' is empty", "0 bytes"))
    run.__exit__(None, None, None)
    assert run.skipped == 2
    assert capsys.readouterr() == ("", "Error: no image 'a\\n'\nError: 'b' is empty; 0 bytes\n")
    error = ImageError("no image 'a'")
    with pytest.raises(ImageError) as caught:
        image_run(strict=True).listener.skipped(0, "a", error)
    assert caught.value is error
    assert capsys.readouterr() == ("", "")
    run = image_run()
    for _ in range(4):
        run.listener.note("a.gif", "frame 1 of 3")
    run.__exit__(None, None, None)
    assert capsys.readouterr().err.splitlines()[-1] == "Note: 1 more note: frame 1 of 3 (1)"


def test_three_notes_are_shown_and_the_rest_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    run = image_run()
    for number in range(3):
        run.listener.note(f"{number}.gif", "frame 1 of 3")
    run.__exit__(None, None, None)
    shown = "".join(f"Note: {number}.gif: frame 1 of 3\n" for number in range(3))
    assert capsys.readouterr().err == shown
    for text, count in {"frame 1 of 3": 4, "dark": 2, "white": 3, "x": 1, "y": 1}.items():
        for _ in range(count):
            run.listener.note("more", text)
    assert capsys.readouterr().err == ""
    run.__exit__(None, None, None)
    assert capsys.readouterr().err == "Note: 11 more notes: frame 1 of 3 (4), white (3), dark (2), others (2)\n"
