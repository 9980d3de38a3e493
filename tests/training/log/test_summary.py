"""The totals of a run, and how it ended."""

from typing import Any

import pytest

from hookscope.training.log.file import Run
from hookscope.training.log.summary import summary

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
