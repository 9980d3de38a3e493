"""Every command line does what it did when the golden files were written.

A deliberate change is written with `python -m tests.golden --write [PATTERN]`, and its diff reviewed.
"""

import pytest

from tests.golden import golden_files
from tests.golden.commands import CASES, REFUSALS
from tests.golden.comparison import differences
from tests.golden.recording import record


@pytest.mark.parametrize(("group", "case"), [(group, case) for group in CASES for case in CASES[group]])
def test_command_line_does_what_it_did(group, case):
    now = record(CASES[group][case])

    moved = []
    for kind in golden_files.KINDS:
        golden = golden_files.read(kind, group)
        assert case in golden, f"new: run python -m tests.golden '{group}/*' --write"
        moved += [f"{kind}{line}" for line in differences(golden[case], now[kind])]
    assert not moved, "\n".join([CASES[group][case], *moved[:30]])


def test_golden_files_hold_the_cases_and_no_others():
    for kind in golden_files.KINDS:
        assert {path.stem for path in (golden_files.HERE / kind).iterdir()} == CASES.keys()
        assert all(list(golden_files.read(kind, group)) == list(CASES[group]) for group in CASES)


def test_a_refusal_is_one_line_after_notes_and_writes_nothing():
    facts, texts = (golden_files.read(kind, "refusals") for kind in golden_files.KINDS)
    for line in REFUSALS:
        status, [printed] = facts[line]["steps"][0]["status"], texts[line]
        assert facts[line] == {"steps": [{"command": line, "status": status}]} and status in (1, 2), line
        *notes, error = printed["stderr"]
        assert list(printed) == ["stderr"] and error.startswith("Error: "), line
        assert all(note.startswith("Note: ") for note in notes), line
