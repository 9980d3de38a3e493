"""Losses that rise or leap, and those that only look so."""

from collections.abc import Sequence

import numpy as np
import pytest

from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.summary import TimedFinding


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
