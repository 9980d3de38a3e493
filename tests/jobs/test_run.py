"""The progress of a run, and when it is saved."""

import pytest

from hookscope.jobs import Progress, SaveTimer, run


def test_progress_identifies_images_by_name() -> None:
    paths = ["a.jpg", "b\n.jpg", "caf\udce9.jpg", "d.jpg"]
    assert Progress.after(paths, 3, skipped=1) == Progress.after([*paths[:3], "other.jpg"], 3, skipped=1)
    assert Progress.after(paths, 3) != Progress.after(paths[::-1], 3)
    assert Progress.after(["a", "b"], 2).names != Progress.after(["ab", ""], 2).names
    assert Progress.after(paths, 0) == Progress.after([], 0)


def test_a_save_is_due_after_ten_seconds_or_twenty_times_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(run.time, "monotonic", lambda: now)
    timer, due = SaveTimer(), []
    for seconds in (0.25, 2.0):
        with timer.saving():
            now += seconds
        for wait in (9.0, 2.0, 28.0, 2.0):
            now += wait
            due.append(timer.is_due)
    assert due == [False, True, True, True, False, False, False, True]
