"""Findings on logs that are written by hand, so that it is known what is in them and from when on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.rules import TrainingThresholds
from hookscope.training.log.summary import TimedFinding
from tests.training.logs import log

NO_WEIGHTS = dict.fromkeys(
    ("gradient_norm", "gradient_non_finite", "weight_norm", "weight_non_finite", "update_to_weight", "frozen")
)

NEAR = {"running_mean_shift": 0.1, "running_var_ratio": 1.0}


def found(*arguments: Any, **more: Any) -> list[TimedFinding]:
    return findings_over_time(log(*arguments, **more))


def test_a_sound_log_has_none_nor_has_an_empty_one() -> None:
    assert found() == [] and findings_over_time(Run({})) == []


def test_dead_channels_that_become_more() -> None:
    dead = dict(zip(range(0, 500, 50), [3, 3, 5, 9, 14, 20, 25, 30, 36, 40], strict=True))
    [one] = found(lambda step, layer: {"dead_channels": dead[step]} if layer == "b" else {})
    assert one.evidence == (
        "from step 200 (20 s) to the end: 14 of 64 channels are 0 for the whole batch; at its worst, step 450, 40 of 64"
        " channels are 0 for the whole batch"
    )
    assert (one.finding, one.layer, one.step, one.last_step, one.time) == ("dead-channels", "b", 200, 450, 20.0)
    assert one.numbers == {"worst": 0.625, "worst_step": 450, "layers": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"dead_channels": 40},
        {"zero_share": 1.0},
        {"gradient_norm": 1e-12},
        {"gradient_norm": 0.0},
        {"update_to_weight": 1e-9},
        {"update_to_weight": 0.9},
        {"activation_std": 1e6},
        {"running_mean_shift": 5.0},
    ],
    ids=str,
)
def test_one_odd_step_is_no_finding_and_three_in_a_row_are_one(change: dict[str, Any]) -> None:
    assert found(lambda step, layer: change if (step, layer) == (200, "b") else {}, **NEAR) == []
    assert found(lambda step, layer: change if layer == "b" and step in (100, 200, 300, 400) else {}, **NEAR) == []
    [one] = found(lambda step, layer: change if layer == "b" and 200 <= step <= 300 else {}, **NEAR)
    assert (one.layer, one.step, one.last_step, one.lasts) == ("b", 200, 300, False)
    assert one.evidence.startswith("steps 200 (20 s) to 300: ")


def test_what_comes_and_goes_is_one_finding() -> None:
    [one] = found(lambda step, layer: {"dead_channels": 30} if layer == "b" and step not in (150, 200) else {})
    assert one.evidence.startswith("from step 0 (0 s) to the end, in 8 of 10 sampled steps: 30 of 64")


def test_sixty_layers_are_told_in_one_line() -> None:
    names = [f"layer{at}" for at in range(60)]

    def shrink(step: int, layer: str) -> dict[str, Any]:
        return {"gradient_norm": 1e-20 * 10.0 ** int(layer[5:]) if int(layer[5:]) < 10 else 0.1}

    [one] = found(shrink, layers=names)
    assert (one.finding, one.layer, one.layers) == ("vanishing-gradient", "layer9", tuple(names[:10]))
    assert one.evidence == (
        "from step 0 (0 s) to the end: its gradient has norm 1e-11, 1e-11 of the weight's norm; 9 more layers too, from"
        " 'layer0' to 'layer9', worst in 'layer0' at step 0: its gradient has norm 1e-20, 1e-20 of the weight's norm"
    )


def test_layers_that_begin_at_many_times_are_three_findings_at_most() -> None:
    names = [f"layer{at}" for at in range(12)]
    some = found(
        lambda step, layer: {"dead_channels": 32} if step >= 250 * int(layer[5:]) else {}, names, range(0, 5000, 50)
    )
    assert [(one.step, len(one.layers)) for one in some] == [(0, 1), (250, 1), (500, 10)]


def test_findings_are_in_order_of_time() -> None:
    def change(step: int, layer: str) -> dict[str, Any]:
        if layer == "a" and step >= 300:
            return {"dead_channels": 32}
        return {"update_to_weight": 0.5} if layer == "c" and step >= 100 else {}

    assert [(one.finding, one.step) for one in found(change)] == [("update-too-large", 100), ("dead-channels", 300)]


def test_a_gradient_explodes_in_a_single_step() -> None:
    [one] = found(lambda step, layer: {"gradient_norm": 5e3} if (step, layer) == (200, "b") else {})
    assert (one.finding, one.layer) == ("exploding-gradient", "b")
    assert one.evidence == "at step 200 (20 s): its gradient has norm 5e+03, 5e+03 of the weight's norm"
    [one] = found(lambda step, layer: {"gradient_norm": None} if (step, layer) == (200, "b") else {})
    assert one.evidence.endswith("the norm of its gradient is beyond what numbers can hold")
    assert one.numbers["worst"] is None


def test_a_weight_that_grows_from_0_does_not_explode() -> None:
    weights = {step: 1e-4 * step for step in range(0, 500, 50)}
    assert found(lambda step, layer: {"weight_norm": weights[step], "update_to_weight": 1.0}) == []


def test_the_smallest_rates_of_a_schedule_are_not_news() -> None:
    rates = {step: 0.1 * (1 - step / 450) ** 8 for step in range(0, 500, 50)}
    small = {"update_to_weight": 1e-9}
    assert found(lambda step, _: {"learning_rate": rates[step]} | (small if rates[step] < 1e-3 else {})) == []


def test_of_a_loss_that_is_next_to_nothing_no_small_update_and_gradient_is_news() -> None:
    def learned(step: int, layer: str) -> dict[str, Any]:
        return {"loss": 1e-6, "gradient_norm": 1e-9, "update_to_weight": 1e-9} if step > 200 else {}

    assert found(learned) == []


def test_normalisations_are_not_accused_of_small_gradients() -> None:
    assert found(lambda step, layer: {"gradient_norm": 1e-12} if layer == "b" else {}, type="BatchNorm2d") == []


def test_running_statistics_have_fifty_steps_to_warm_up() -> None:
    cold = {"running_mean_shift": 0.0, "running_var_ratio": 0.1, "type": "BatchNorm2d"}
    warm = cold | {"running_var_ratio": 1.1}
    assert found(lambda step, _: cold if step < 50 else warm, steps=range(0, 120, 10)) == []
    [one] = found(lambda step, _: cold, steps=range(0, 120, 10))
    assert (one.finding, one.layer, one.step, len(one.layers)) == ("batchnorm-drift", "a", 50, 3)


@pytest.mark.parametrize(
    ("kind", "mean", "std", "told"),
    [
        ("Sigmoid", 0.5, 0.4999, True),
        ("Sigmoid", 0.5, 0.2, False),
        ("Sigmoid", 0.999, 0.001, True),
        ("Tanh", 0.0, 0.999, True),
        ("Tanh", 0.0, 0.6, False),
        ("ReLU", 0.0, 0.999, False),
    ],
)
def test_moments_tell_whether_a_function_is_at_its_bounds(kind: str, mean: float, std: float, told: bool) -> None:
    some = found(**{"type": kind, "activation_mean": mean, "activation_std": std} | NO_WEIGHTS)
    assert [one.finding for one in some] == (["saturated"] if told else [])


@pytest.mark.parametrize(
    ("mean", "std", "finding"),
    [
        (3.0, 1e-7, "constant-output"),
        (1e-6, 1e-6, "vanishing-activations"),
        (0.0, 1e6, "exploding-activations"),
    ],
)
def test_the_size_of_an_activation(mean: float, std: float, finding: str) -> None:
    [one] = found(activation_mean=mean, activation_std=std)
    assert (one.finding, one.layer, len(one.layers)) == (finding, "a", 3)
    assert one.evidence.endswith("; all 2 other layers too")


@pytest.mark.parametrize(("values", "dead", "told"), [(32, 30, []), (32, 40, ["b"]), (4096, 30, ["b"])])
def test_units_with_one_value_an_image_may_rest(values: int, dead: int, told: list[str]) -> None:
    some = {"dead_channels": dead, "channel_values": values}
    assert [one.layer for one in found(lambda step, layer: some if layer == "b" else {})] == told


def test_what_follows_a_dead_layer_is_not_told() -> None:
    def dying(step: int, layer: str) -> dict[str, Any]:
        if step < 200:
            return {}
        return {"a": {}, "b": {"dead_channels": 64, "zero_share": 1.0}, "c": {"dead_channels": 20}}[layer]

    [one] = found(dying)
    assert (one.finding, one.layer, one.step) == ("dead-layer", "b", 200)
    assert one.evidence.endswith("for the whole batch; this explains dead-channels in 'c'")


def test_a_weight_that_stands_still_behind_a_dead_layer_is_told_there_and_one_before_it_is_not() -> None:
    def dying(step: int, layer: str) -> dict[str, Any]:
        dead = {"dead_channels": 64, "zero_share": 1.0} if layer == "b" else {}
        return dead | {"update_to_weight": 1e-3 if layer == "e" else 0.0, "gradient_norm": 1e-5}

    [one] = found(dying, layers="abcde")
    assert one.evidence.endswith("; this explains no-update in 'c' and 'd'")
    still = found(lambda step, layer: dying(step, layer) | {"update_to_weight": 0.0}, layers="abcde")
    assert "no-update in" not in "".join(one.evidence for one in still)  # nothing at all is changed


def test_a_layer_that_gets_its_gradient_later_was_without_until_then() -> None:
    none = {"gradient_norm": None, "gradient_non_finite": None, "update_to_weight": None}
    [one] = found(lambda step, layer: none if layer == "a" and step < 250 else {})
    assert (one.finding, one.layer, one.last_step, one.lasts) == ("no-gradient", "a", 200, False)


def test_a_teacher_beside_the_model_is_no_layer_without_gradient() -> None:
    none = {"gradient_norm": None, "gradient_non_finite": None, "update_to_weight": None, "model": 1}
    assert found(lambda step, layer: none if layer == "teacher" else {}, layers=["a", "teacher"]) == []


def test_of_two_optimizers_each_layer_is_judged_at_the_steps_of_its_own() -> None:
    def change(step: int, layer: str) -> dict[str, Any]:
        model = int(layer == "d")
        return {"model": model, "update_to_weight": 1e-3 if model == optimizer else 0.0}

    rows = []
    for optimizer in (0, 1):
        rows += [row | {"optimizer": optimizer} for row in log(change, layers=["g", "d"]).rows]
    assert findings_over_time(Run({}, rows)) == []
    for row in rows:
        if row["layer"] == "d" and row["optimizer"] == 1:
            row["gradient_norm"] = 1e-12
    [one] = findings_over_time(Run({}, rows))
    assert (one.finding, one.layer, one.model, one.optimizer) == ("vanishing-gradient", "d of model 1", 1, 1)


def test_calls_of_one_layer_share_their_parameters_and_not_what_they_put_out() -> None:
    rows = log(lambda step, layer: {"layer": "relu", "call": int(layer == "b")}, layers=["a", "b"]).rows
    for row in rows:
        row["gradient_norm"] = 1e-12
        row["dead_channels"] = 32 if row["call"] else 0
    some = {one.finding: one.layers for one in findings_over_time(Run({}, rows))}
    assert some == {"vanishing-gradient": ("relu",), "dead-channels": ("relu#1",)}


@pytest.mark.parametrize("steps", [[0], [0, 50]])
def test_of_few_steps_all_must_show_it(steps: list[int]) -> None:
    one, few = found(steps=steps, dead_channels=64, zero_share=1.0, layers=["a"], **NO_WEIGHTS)
    assert (one.finding, few.finding) == ("dead-layer", "few-samples")
    assert ("at step 0 (0 s), the only one sampled" in one.evidence) == (len(steps) == 1)
    [few] = found(lambda step, _: {"dead_channels": 64} if step else {}, steps=[0, 50])
    assert few.finding == "few-samples"


@pytest.mark.parametrize(
    ("steps", "end", "header", "words"),
    [
        ([0], {"step": 14}, {"command": ["a.py"]}, "1 sampled step of 15: too few for a trend; sample more often,"
         " --every 1"),
        ([0, 50], {"step": 99}, {}, "2 sampled steps of 100: too few for a trend; sample more often, every=5"),
        ([0, 1], {"step": 1}, {}, "2 sampled steps of 2: too few for a trend; there were no more"),
        ([0], None, {}, "1 sampled step so far: too few for a trend"),
    ],
)  # fmt: skip
def test_that_there_are_few_samples_is_told(
    steps: list[int], end: dict[str, Any] | None, header: dict[str, Any], words: str
) -> None:
    [few] = findings_over_time(Run(header, log(steps=steps).rows, [], end))
    assert (few.finding, few.evidence) == ("few-samples", words)
    assert found(steps=[0, 50, 100]) == []


def test_of_a_run_that_was_stopped_no_more_samples_are_wanted() -> None:
    note = {"note": "non-finite", "step": 1, "text": "the loss is NaN"}
    [stop] = findings_over_time(Run({}, log(steps=[0]).rows, [note], {"reason": "stopped", "step": 1}))
    assert stop.finding == "non-finite" and "--stop-on" not in stop.meaning


def test_thresholds_are_obeyed() -> None:
    run = log(dead_channels=3)
    assert findings_over_time(run) == []
    assert findings_over_time(run, TrainingThresholds(dead=0.04))[0].finding == "dead-channels"
    assert findings_over_time(run, TrainingThresholds(too_large=1e-4))[0].finding == "update-too-large"


def test_what_the_log_lacks_is_passed_over() -> None:
    rows: list[dict[str, Any]] = [{"step": step, "layer": "a"} for step in range(5)]
    rows += [{"layer": "a"}, {"step": "x", "layer": "a"}, {"step": 3}, {"step": True, "layer": "a"}]
    assert findings_over_time(Run({}, rows)) == []


def nan_in(figure: str, layer: str, begin: int = 200, end: int = 1000) -> Callable[[int, str], dict[str, Any]]:
    return lambda step, name: {figure: 7} if name == layer and begin <= step < end else {}


def test_of_values_that_are_not_finite_the_first_place_is_told() -> None:
    def spoil(step: int, layer: str) -> dict[str, Any]:
        if step == 200:
            return {"loss": None} | ({"non_finite": 7} if layer in "bc" else {})
        return {"non_finite": 64, "weight_non_finite": 9, "gradient_non_finite": 9, "loss": None} if step > 200 else {}

    [one] = found(spoil)
    assert (one.layer, one.layers, one.lasts) == ("b", ("a", "b", "c"), True)
    assert one.meaning.endswith("To name the operation, run watch --stop-on non-finite.")
    assert one.evidence == (
        "from step 200 (20 s) to the end: 7 values of its activation are NaN or Inf; 2 more layers too; the loss is not"
        " finite either; at step 150 everything was finite"
    )


def test_one_step_of_nan_is_enough_and_the_gradient_goes_backwards() -> None:
    change = nan_in("gradient_non_finite", "a", 200, 250), nan_in("gradient_non_finite", "b", 200, 250)
    [one] = found(lambda step, layer: change[0](step, layer) | change[1](step, layer))
    assert (one.layer, one.numbers["phase"], one.last_step, one.lasts) == ("b", "backward", 200, False)
    assert "and so is the gradient of 'c' after it" in one.evidence


def test_weights_alone() -> None:
    [one] = found(nan_in("weight_non_finite", "c"))
    assert (one.layer, one.numbers["phase"], one.numbers["values"]) == ("c", "weights", 7)


def test_what_begins_while_a_model_computes_nan_is_its_consequence() -> None:
    spoil = nan_in("non_finite", "b")
    assert [
        one.finding
        for one in found(lambda step, layer: spoil(step, layer) | ({"dead_channels": 60} if step >= 300 else {}))
    ] == ["non-finite"]


def test_notes_of_the_log() -> None:
    text = "the first NaN is made by sqrt"
    stop = {"note": "non-finite", "step": 60, "time": 6.0, "layer": "b", "operation": "sqrt", "call": 1, "text": text}
    failed = {"note": "watcher-failed", "step": 70, "time": 7.0, "text": "OSError: no space"}
    other = {"note": "new", "text": "something"}
    first, second, third = findings_over_time(Run({}, log().rows, [failed, stop, other]))
    assert (first.finding, first.evidence, first.time) == ("new", "something", None)
    assert (second.finding, second.layer, second.step) == ("non-finite", "b#1", 60)
    assert second.evidence == f"at step 60 (6 s), where the run was stopped: {text}"
    assert (third.finding, third.evidence) == ("watcher-failed", "OSError: no space")
    assert third.meaning
