"""Losses that rise or leap, the totals of a run, and how it ended."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.summary import TimedFinding, summary


def told(
    losses: Sequence[float | None], optimizers: int = 1, classes: int | None = None, every: int = 10
) -> list[TimedFinding]:
    rows = [
        {"step": every * at, "time": float(at), "layer": "a", "loss": loss, "optimizer": at % optimizers}
        for at, loss in enumerate(losses)
    ]
    return findings_over_time(Run({}, rows, facts=[{"step": 0, "optimizer": 0, "classes": classes}]))


def noise(count: int, size: float = 0.1) -> np.ndarray:
    return size * np.random.default_rng(0).standard_normal(count)


FALLING = 2 * np.exp(-np.arange(60) / 20) + 0.2


@pytest.mark.parametrize(
    "losses",
    [
        FALLING,
        FALLING + noise(60),
        FALLING - 5,
        FALLING[::-1][:5],
        np.zeros(30),
        [None] * 30,
        1e-6 * FALLING[::-1] * (np.arange(60) > 20) + FALLING * (np.arange(60) <= 20),
    ],
    ids=range(7),
)
def test_sound_losses(losses: Sequence[float]) -> None:
    assert told([None if loss is None else float(loss) for loss in losses]) == []


@pytest.mark.parametrize(
    "losses",
    [1 + noise(60, 0.3), np.full(20, 2.0), 2 + noise(60, 0.01), np.r_[3.0, 2.99, np.full(20, 3.0)]],
    ids=["noise", "constant", "nearly constant", "a little better for one step"],
)
def test_a_loss_that_ends_where_it_began(losses: np.ndarray) -> None:
    [found] = told(losses.tolist())
    assert (found.finding, found.severity, found.step, found.lasts) == ("loss-flat", "warning", 0, True)
    assert found.numbers["last"] == pytest.approx(losses[-max(3, len(losses) // 4) :].mean())


@pytest.mark.parametrize(("classes", "is_chance"), [(8, True), (1000, False), (None, False)])
def test_a_loss_that_stays_at_the_logarithm_of_the_number_of_classes_is_that_of_guessing(
    classes: int | None, is_chance: bool
) -> None:
    [found] = told([2.07] * 30, classes=classes)
    assert ("guessing among 8 classes gives 2.079" in found.evidence) is is_chance  # ln(8)


@pytest.mark.parametrize("spread", [0.0, 0.004])
def test_a_loss_that_falls_slowly_past_that_of_guessing_is_not_flat(spread: float) -> None:
    """As of a small head on a frozen backbone; ln(4) is 1.386."""
    losses = np.linspace(1.403, 1.378, 40) + noise(40, spread)
    assert told(losses.tolist(), classes=4) == []


def test_a_loss_must_rise_for_good() -> None:
    rising = np.concatenate([FALLING[:40], np.linspace(FALLING[39], 3, 20)]) + noise(60, 0.02)
    [found] = told(rising.tolist())
    assert (found.finding, found.layer, found.lasts, found.last_step) == ("loss-rises", "", True, 590)
    assert 400 <= found.step <= 450
    assert f"at step 590 it is {found.numbers['last']:.4g} (median of the last)" in found.evidence
    bump = FALLING + 0.8 * np.exp(-(((np.arange(60) - 40) / 4) ** 2))
    assert "loss-rises" not in {found.finding for found in told(bump.tolist())}


def test_leaps_are_found_but_losses_of_two_optimizers_may_rise_and_few_steps_be_flat() -> None:
    losses = FALLING.tolist()
    losses[30] = 9.0
    [found] = told(losses)
    assert (found.finding, found.step, found.last_step, found.lasts) == ("loss-spike", 300, 300, False)
    assert found.evidence.startswith("at step 300 (30 s): the loss is 9, about 0.7")
    losses[45] = 7.0
    [found] = told(losses)
    assert (found.step, found.last_step, found.numbers["times"]) == (300, 450, 2)
    assert told(FALLING[::-1].tolist(), optimizers=2) == []
    assert told([2.0] * 30, every=1) == []


ROWS: list[dict[str, Any]] = [
    {"step": step, "time": float(step), "layer": layer, "loss": 4.0 - step / 50}
    for step in (0, 50, 100)
    for layer in "ab"
]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (None, "not ended: it still runs, or was killed"),
        ({"reason": "done", "status": 0}, "done"),
        ({"reason": "exception", "status": 1}, "ended by an exception with status 1"),
        ({"reason": "stopped", "status": None}, "stopped"),
        ({"reason": "exit", "status": 2}, "ended by sys.exit with status 2"),
        ({"reason": "struck by lightning"}, "struck by lightning"),
    ],
)
def test_how_it_ended(end: dict[str, Any] | None, words: str) -> None:
    found = summary(Run({}, ROWS, [], end))
    assert str(found) == f"101 steps, 6 sampled, of 2 layers in 1 min 40 s; loss 4 -> 2; {words}".replace("6", "3", 1)


def test_models_optimizers_losses_and_steps_that_are_not_seen() -> None:
    rows = [row | {"optimizer": at % 2, "model": at % 2, "loss": None} for at, row in enumerate(ROWS)]
    found = summary(Run({}, rows))
    assert (found.models, found.optimizers, found.sampled, found.first_loss) == (2, 2, 6, None)
    assert str(found).startswith(
        "101 steps, 6 sampled, of 2 layers in 2 models with 2 optimizers in 1 min 40 s; not ended"
    )
    found = summary(Run({"started": "today"}, ROWS, [], {"step": 140, "time": 7500.0, "reason": "done"}))
    assert (found.steps, found.sampled, found.duration, found.started) == (141, 3, 7500.0, "today")
    assert found.last_loss == 2.0


def spoiled(lost: set[int]) -> list[dict[str, Any]]:
    return [row | ({"loss": None, "gradient_non_finite": 3} if row["step"] in lost else {}) for row in ROWS]


def test_a_loss_is_lost_unless_it_comes_back_or_was_only_not_seen() -> None:
    found = summary(Run({}, spoiled({50, 100}), [], {"reason": "done"}))
    assert (found.last_loss, found.lost_at) == (None, 50)
    assert "; loss 4 -> nan or inf (from step 50 on); done" in str(found)
    found = summary(Run({}, spoiled({50})))
    assert (found.last_loss, found.lost_at) == (2.0, None)
    unseen = [row | {"loss": row["loss"] if row["step"] == 0 else None} for row in ROWS]
    assert summary(Run({}, unseen)).lost_at is None
    assert summary(Run({}, [row | {"loss": None, "non_finite": 1} for row in ROWS])).lost_at is None


def test_a_run_that_was_stopped_says_at_which_step_and_one_of_nothing_is_empty() -> None:
    note = {"note": "non-finite", "step": 105, "text": "the loss is NaN"}
    found = summary(Run({}, ROWS, [note], {"reason": "stopped", "step": 104}))
    assert (found.stopped_at, found.ended) == (105, "stopped at the first NaN or Inf, in step 105")
    assert str(summary(Run({}))) == "0 steps, 0 sampled, of 0 layers; not ended: it still runs, or was killed"
