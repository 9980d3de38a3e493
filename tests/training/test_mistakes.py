"""Common mistakes in training scripts are named by their cause, and watching them changes nothing."""

from pathlib import Path

import pytest

from hookscope.training import Monitor, findings_over_time, read_runs
from tests.training.mistakes import MISTAKES


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_by_its_cause_before_its_symptoms(name: str, tmp_path: Path) -> None:
    with Monitor(every=5, log=tmp_path / "log", on_trouble=lambda text: None) as monitor:
        MISTAKES[name][0]()
    assert monitor.trouble is None or "watching has ended" not in monitor.trouble
    findings = findings_over_time(read_runs(tmp_path / "log")[-1])
    place = next((at for at, finding in enumerate(findings) if finding.finding in MISTAKES[name][1]), 99)
    assert place <= (2 if name == "the_first_batch_again_and_again" else 0), findings  # there it is a note
