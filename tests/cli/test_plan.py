"""The command `plan`: its verdict, its rows, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hookscope.cli.commands.plan import plan_report, size_in_words, time_in_words, verdict
from hookscope.hooks import Call
from hookscope.planning import CallCost, Measured, MemoryPlan, Plan, Timing
from tests.cli.helpers import Run

CONV = CallCost(Call("conv", "Conv2d", 0, 0, 0), (2, 3, 8, 8), (2, 4, 8, 8), 112, 8000, 400, 0, "arithmetic")
RELU = CallCost(Call("relu", "ReLU", 0, None, 1), (2, 4, 8, 8), (2, 4, 8, 8), 0, 0, 600, 2048, "memory")


def command_line(*words: str) -> list[str]:
    return ["plan", "nets.py:Small", *words]


def planned(**changes: Any) -> Plan:
    at_peak = {"parameters": 400, "gradients": 400, "saved": 1200}
    memory = MemoryPlan(400, 0, 400, 0, 100, 2048, 300, 2000, at_peak, "backward", "conv")
    facts = {"limit": 10_000, "largest_batch": 9, **changes}
    return Plan("mine", (2, 3, 8, 8), "float32", "cpu", "adamw", ("relu",), (CONV, RELU), memory, **facts)


def test_the_verdict_says_what_fits_and_where_memory_goes() -> None:
    assert verdict(planned()) == [
        "mine, 2 x 3x8x8, float32, training with adamw, 1 block checkpointed: 2 kB at the peak, fits into 10 kB; the"
        " largest batch that fits is 9",
        "memory at the peak (in the backward pass of conv): activations kept for backward 1.2 kB (60 %), parameters 400"
        " bytes (20 %), gradients 400 bytes (20 %)",
        "8,000 MACs and 1 kB moved in the forward pass; 1 of 2 calls are bound by memory, with 60 % of the bytes",
    ]
    assert (
        "2 kB at the peak, does not fit into 1 kB; the largest batch that fits is 1"
        in verdict(planned(limit=1000, largest_batch=1))[0]
    )
    assert verdict(planned(limit=10, largest_batch=0))[0].endswith("; not even one image fits into 10 bytes")
    assert verdict(planned(limit=None, largest_batch=None))[0].endswith(": 2 kB at the peak")


def test_the_verdict_says_where_time_goes_and_how_far_the_plan_was_off() -> None:
    seconds = Timing(0.2, 0.1, 0.4)
    measured = Measured("cpu, 1 thread", 2560, 1600, Timing(0.3, 0.2, 0.4), Timing(0.5, 0.5, 0.5), seconds, 5, 1)
    calls = tuple(replace(call, forward=seconds, backward=seconds) for call in (CONV, RELU))
    found = replace(planned(), calls=calls, measured=measured)
    assert verdict(found)[3:] == [
        "time on cpu, 1 thread, median of 5: forward 300 ms (200 to 400), backward 500 ms (500 to 500), optimizer 200"
        " ms (100 to 400); most in conv (40 %), relu (40 %)",
        "measured: activations kept 2.56 kB, planned 2.05 kB (-20.0 %), peak 1.6 kB, planned 2 kB (+25.0 %)",
    ]
    [about] = plan_report(found, 1).sections[1].totals
    assert about == "1 of 2 calls, the most time first; --top N shows more, --format tsv all"


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (999_999, "1000 kB"), (24 * 10**9, "24 GB")]
)
def test_size_in_words(size: int, words: str) -> None:
    assert size_in_words(size) == words


def test_time_in_words() -> None:
    assert time_in_words(Timing(2.5, 2, 3)) == "2.5 s (2 to 3)"
    assert time_in_words(Timing(4e-5, 4e-5, 5e-5)) == "40 us (40 to 50)"


def test_measured_times_are_numbers_in_rows_and_totals(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.planning.timing.speed", lambda *where: (2e9, 1e9))
    words = ("--input-size", "32", "--time", "--repeats", "2", "--warm-up", "0")
    status, out, errors = run(*words, "--format", "json", "--plot", "plan.png")
    found = json.loads(out)
    assert status == 0 and Path("plan.png").read_bytes().startswith(b"\x89PNG"), errors
    assert all(call["forward_low"] <= call["forward"] <= call["forward_high"] for call in found["calls"])
    [total] = found["totals"]
    assert total["repeats"] == 2 and total["forward"] > 0 and total["backward"] is None
    assert total["measured_peak"] > 0 and total["macs_per_second"] == 2e9
