"""Findings on logs that are written by hand, so that it is known what is in them and from when on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.summary import TimedFinding
from tests.training.watched import log

Row = dict[str, Any]

NO_WEIGHTS = dict.fromkeys(
    ("gradient_norm", "gradient_non_finite", "weight_norm", "weight_non_finite", "update_to_weight", "frozen")
)
NO_GRADIENT: Row = {"gradient_norm": None, "gradient_non_finite": None, "update_to_weight": None}
DEAD: Row = {"dead_channels": 64, "zero_share": 1.0}
NEAR = {"running_mean_shift": 0.1, "running_var_ratio": 1.0}


def findings_of(*arguments: Any, **more: Any) -> list[TimedFinding]:
    return findings_over_time(log(*arguments, **more))


def in_layer(name: str, change: Row, begin: int = 0, end: int = 1000) -> Callable[[int, str], Row]:
    """The change in one layer, from one step to before another."""
    return lambda step, layer: change if layer == name and begin <= step < end else {}


def slow_end(step: int, layer: str) -> Row:
    """Small updates at the end of a schedule."""
    rate = 0.1 * (1 - step / 450) ** 8
    return {"learning_rate": rate, "update_to_weight": 1e-9 if rate < 1e-3 else 1e-3}


def layer_scale(step: int, layer: str) -> Row:
    """A block whose layer scale grows from 1e-6."""
    if layer == "block":
        return {"weight_norm": 1e-5 + 1e-4 * step, "gradient_norm": 0.1, "update_to_weight": 10.0 / (1 + step)}
    return {"gradient_norm": 1e-9, "update_to_weight": 1e-10} if layer == "block.conv" and step < 100 else {}


def not_always_used(step: int, layer: str) -> Row:
    """A layer that runs in every tenth sampled step."""
    return NO_GRADIENT | {"index": None} if layer == "b" and step % 500 else {}


LEARNED = {"loss": 1e-6, "gradient_norm": 1e-9, "update_to_weight": 1e-9}
SOUND = {
    "a dropout that drops channels": log(in_layer("b", {"dead_channels": 40, "type": "Dropout"})),
    "a pooling behind dead channels": log(in_layer("b", DEAD | {"type": "MaxPool2d"})),
    "few values for each channel": log(in_layer("b", {"dead_channels": 40, "channel_values": 16})),
    "a layer scale of almost 0": log(layer_scale, ["block.conv", "block", "head"]),
    "a gradient that Adam makes long steps of": log(gradient_norm=1e-12, update_to_weight=1e-3),
    "a sum of losses that Adam makes short steps of": log(gradient_norm=1e5, update_to_weight=1e-3),
    "a loss as a layer": log(in_layer("b", {"activation_std": None, "channels": None, "zero_share": 0.0})),
    "a layer that is seldom used": log(not_always_used, steps=range(0, 5000, 50)),
    "as it is": log(),
    "empty": Run({}),
    "a weight that grows from 0": log(lambda step, layer: {"weight_norm": 1e-4 * step}, update_to_weight=1.0),
    "a schedule": log(slow_end),
    "a loss of almost 0": log(lambda step, layer: LEARNED if step > 200 else {}),
    "a normalisation with a small gradient": log(in_layer("b", {"gradient_norm": 1e-12}), type="BatchNorm2d"),
    "a teacher beside the model": log(in_layer("teacher", NO_GRADIENT | {"model": 1}), layers=["a", "teacher"]),
    "three sampled steps": log(steps=[0, 50, 100]),
    "missing metrics": Run({}, [{"step": step, "layer": "a"} for step in range(5)]),
    "damaged lines": Run({}, [{"layer": "a"}, {"step": "x", "layer": "a"}, {"step": 3}, {"step": True, "layer": "a"}]),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_log_has_no_finding(name: str) -> None:
    assert findings_over_time(SOUND[name]) == []


def test_gammas_and_rates_that_start_at_0_are_no_finding_of_the_first_step() -> None:
    gamma = {"conv": {"gradient_norm": 0.0}, "norm": DEAD | {"weight_norm": 0.0}}
    rate = {key: {"learning_rate": 0.0, "update_to_weight": 0.0} for key in gamma}
    for change in (gamma, rate):
        [few] = findings_over_time(log(lambda _, layer, own=change: own[layer], ["conv", "norm"], [0]))
        assert few.finding == "few-samples"


def test_dead_channels_that_become_more() -> None:
    dead = dict(zip(range(0, 500, 50), [3, 3, 5, 9, 14, 20, 25, 30, 36, 40], strict=True))
    [finding] = findings_of(lambda step, layer: {"dead_channels": dead[step]} if layer == "b" else {})
    assert finding.evidence == (
        "from step 200 (20 s) to the end: 14 of 64 channels are 0 for the whole batch; at its worst, step 450, 40 of 64"
        " channels are 0 for the whole batch"
    )
    assert (finding.finding, finding.layer, finding.time) == ("dead-channels", "b", 20.0)
    assert (finding.step, finding.last_step) == (200, 450)
    assert finding.numbers == {"worst": 0.625, "worst_step": 450, "layers": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"dead_channels": 40},
        {"zero_share": 1.0},
        {"gradient_norm": 1e-12, "update_to_weight": 1e-12},
        {"gradient_norm": 0.0},
        {"update_to_weight": 1e-9},
        {"update_to_weight": 0.9},
        {"activation_std": 1e6},
        {"running_mean_shift": 5.0},
    ],
    ids=str,
)
def test_one_odd_step_is_no_finding_and_three_in_a_row_are_one(change: Row) -> None:
    assert findings_of(in_layer("b", change, 200, 250), **NEAR) == []
    apart = (100, 200, 300, 400)
    assert findings_of(lambda step, layer: change if layer == "b" and step in apart else {}, **NEAR) == []
    [finding] = findings_of(in_layer("b", change, 200, 350), **NEAR)
    assert (finding.layer, finding.step, finding.last_step, finding.lasts) == ("b", 200, 300, False)
    assert finding.evidence.startswith("steps 200 (20 s) to 300: ")


def test_what_comes_and_goes_is_one_finding() -> None:
    [finding] = findings_of(
        lambda step, layer: {"dead_channels": 30} if layer == "b" and step not in (150, 200) else {}
    )
    assert finding.evidence.startswith("from step 0 (0 s) to the end, in 8 of 10 sampled steps: 30 of 64")


def test_sixty_layers_are_one_finding() -> None:
    names = [f"layer{at}" for at in range(60)]

    def shrink(step: int, layer: str) -> Row:
        size = 1e-20 * 10.0 ** int(layer[5:]) if int(layer[5:]) < 10 else 0.1
        return {"gradient_norm": size, "update_to_weight": min(size, 1e-3)}

    [finding] = findings_of(shrink, layers=names)
    assert (finding.finding, finding.layer, finding.layers) == ("vanishing-gradient", "layer9", tuple(names[:10]))
    assert finding.evidence == (
        "from step 0 (0 s) to the end: its gradient has norm 1e-11, 1e-11 of the weight's norm; 9 more layers too, from"
        " 'layer0' to 'layer9', worst in 'layer0' at step 0: its gradient has norm 1e-20, 1e-20 of the weight's norm"
    )


def test_layers_that_begin_at_many_times_are_three_findings_at_most() -> None:
    names = [f"layer{at}" for at in range(12)]
    findings = findings_of(
        lambda step, layer: {"dead_channels": 32} if step >= 250 * int(layer[5:]) else {}, names, range(0, 5000, 50)
    )
    assert [(finding.step, len(finding.layers)) for finding in findings] == [(0, 1), (250, 1), (500, 10)]


def test_findings_are_in_order_of_time_and_as_grave_as_what_follows_from_them() -> None:
    dead, large = in_layer("a", {"dead_channels": 32}, 300), in_layer("c", {"update_to_weight": 0.5}, 100)
    first, second = findings_of(lambda step, layer: dead(step, layer) | large(step, layer))
    assert (first.finding, first.step) == ("update-too-large", 100)
    assert (second.finding, second.step) == ("dead-channels", 300)
    large, dead = in_layer("b", {"update_to_weight": 0.9}, 50, 200), in_layer("b", DEAD, 200)
    first, second = findings_of(lambda step, layer: large(step, layer) | dead(step, layer))
    assert (first.finding, first.severity) == ("update-too-large", "error")
    assert (second.finding, second.severity) == ("dead-layer", "error")


def test_a_gradient_explodes_in_a_single_step() -> None:
    assert findings_of(in_layer("b", {"gradient_norm": 5e3}, 200, 250)) == []  # Adam's step is short nevertheless
    [finding] = findings_of(in_layer("b", {"gradient_norm": 5e3, "update_to_weight": 0.5}, 200, 250))
    assert (finding.finding, finding.layer) == ("exploding-gradient", "b")
    assert finding.evidence == "at step 200 (20 s): its gradient has norm 5e+03, 5e+03 of the weight's norm"
    [finding] = findings_of(in_layer("b", {"gradient_norm": None}, 200, 250))
    assert finding.evidence.endswith("the norm of its gradient overflows")
    assert finding.numbers["worst"] is None


def test_running_statistics_have_fifty_steps_to_warm_up() -> None:
    cold = {"running_mean_shift": 0.0, "running_var_ratio": 0.1, "type": "BatchNorm2d"}
    warm = cold | {"running_var_ratio": 1.1}
    assert findings_of(lambda step, _: cold if step < 50 else warm, steps=range(0, 120, 10)) == []
    [finding] = findings_of(lambda step, _: cold, steps=range(0, 120, 10))
    assert (finding.finding, finding.layer, finding.step) == ("batchnorm-drift", "a", 50)
    assert len(finding.layers) == 3


@pytest.mark.parametrize(
    ("kind", "mean", "std", "is_saturated"),
    [
        ("Sigmoid", 0.5, 0.4999, True),
        ("Sigmoid", 0.5, 0.2, False),
        ("Sigmoid", 0.999, 0.001, True),
        ("Tanh", 0.0, 0.999, True),
        ("Tanh", 0.0, 0.6, False),
        ("ReLU", 0.0, 0.999, False),
    ],
)
def test_moments_show_whether_a_function_is_at_its_bounds(
    kind: str, mean: float, std: float, is_saturated: bool
) -> None:
    findings = findings_of(**{"type": kind, "activation_mean": mean, "activation_std": std} | NO_WEIGHTS)
    assert [finding.finding for finding in findings] == ["saturated"] * is_saturated


@pytest.mark.parametrize(
    ("mean", "std", "name"),
    [(3.0, 1e-7, "constant-output"), (1e-6, 1e-6, "vanishing-activations"), (0.0, 1e6, "exploding-activations")],
)
def test_the_size_of_an_activation(mean: float, std: float, name: str) -> None:
    [finding] = findings_of(activation_mean=mean, activation_std=std)
    assert (finding.finding, finding.layer, len(finding.layers)) == (name, "a", 3)
    assert finding.evidence.endswith("; all 2 other layers too")


@pytest.mark.parametrize(
    ("values", "dead", "layers"), [(32, 50, []), (32, 60, ["b"]), (200, 30, []), (200, 40, ["b"]), (4096, 30, ["b"])]
)
def test_channels_with_few_values_may_be_0(values: int, dead: int, layers: list[str]) -> None:
    findings = findings_of(in_layer("b", {"dead_channels": dead, "channel_values": values}))
    assert [finding.layer for finding in findings] == layers


def test_what_follows_a_dead_layer_is_part_of_its_finding() -> None:
    dead, after = in_layer("b", DEAD, 200), in_layer("c", {"dead_channels": 20}, 200)
    [finding] = findings_of(lambda step, layer: dead(step, layer) | after(step, layer))
    assert (finding.finding, finding.layer, finding.step) == ("dead-layer", "b", 200)
    assert finding.evidence.endswith("for the whole batch; this explains dead-channels in 'c'")


def test_only_weights_behind_a_dead_layer_that_stand_still_while_others_change_are_explained_by_it() -> None:
    def dying(step: int, layer: str) -> Row:
        dead = DEAD if layer == "b" else {}
        return dead | {"update_to_weight": 1e-3 if layer == "last" else 0.0, "gradient_norm": 1e-5}

    for layers, words in (("abcd", "'c' and 'd'"), ("abcde", "3 layers from 'c' to 'e'")):
        [finding] = findings_of(dying, layers=[*layers, "last"])
        assert finding.evidence.endswith(f"; this explains no-update in {words}")
    findings = findings_of(lambda step, layer: dying(step, layer) | {"update_to_weight": 0.0}, layers="abcde")
    assert "no-update in" not in "".join(finding.evidence for finding in findings)


def test_layers_without_a_gradient_at_first_or_ever() -> None:
    [finding] = findings_of(in_layer("a", NO_GRADIENT, 0, 250))
    assert (finding.finding, finding.layer, finding.last_step, finding.lasts) == ("no-gradient", "a", 200, False)
    absent = dict.fromkeys(("index", "activation_mean", "activation_std", "zero_share", "dead_channels", "channels"))
    [finding] = findings_of(in_layer("b", NO_GRADIENT | absent))
    assert (finding.finding, finding.layer, finding.severity) == ("no-gradient", "b", "warning")
    assert finding.evidence.endswith("it did not run in a pass with gradients, and no gradient arrives")


def test_of_two_optimizers_each_layer_is_judged_at_the_steps_of_its_own() -> None:
    rows = []
    for optimizer in (0, 1):
        for row in log(layers=["g", "d"], optimizer=optimizer).rows:
            model = int(row["layer"] == "d")
            rows.append(row | {"model": model, "update_to_weight": 1e-3 if model == optimizer else 0.0})
    assert findings_over_time(Run({}, rows)) == []
    for row in rows:
        if row["layer"] == "d" and row["optimizer"] == 1:
            row.update(gradient_norm=1e-12, update_to_weight=1e-12)
    [finding] = findings_over_time(Run({}, rows))
    assert (finding.finding, finding.layer) == ("vanishing-gradient", "d of model 1")
    assert (finding.model, finding.optimizer) == (1, 1)


def test_calls_of_one_layer_share_their_parameters_and_not_their_outputs() -> None:
    small = {"gradient_norm": 1e-12, "update_to_weight": 1e-12}
    rows = log(in_layer("b", {"call": 1, "dead_channels": 32}), ["a", "b"], **small).rows
    findings = findings_over_time(Run({}, [row | {"layer": "relu"} for row in rows]))
    assert {finding.finding: finding.layers for finding in findings} == {
        "vanishing-gradient": ("relu",), "dead-channels": ("relu#1",),
    }  # fmt: skip


@pytest.mark.parametrize("steps", [[0], [0, 50]])
def test_of_few_steps_all_must_show_it(steps: list[int]) -> None:
    finding, few = findings_of(steps=steps, layers=["a"], **DEAD, **NO_WEIGHTS)
    assert (finding.finding, few.finding) == ("dead-layer", "few-samples")
    assert ("at step 0 (0 s), the only one sampled" in finding.evidence) == (len(steps) == 1)
    [few] = findings_of(lambda step, _: {"dead_channels": 64} if step else {}, steps=[0, 50])
    assert few.finding == "few-samples"


@pytest.mark.parametrize(
    ("steps", "end", "header", "words"),
    [
        ([0], {"step": 14}, {"command": ["a.py"]}, "1 sampled step of 15: too few for a trend; sample more often,"
         " every=1"),
        ([0, 50], {"step": 99}, {}, "2 sampled steps of 100: too few for a trend; sample more often, every=5"),
        ([0, 1], {"step": 1}, {}, "2 sampled steps of 2: too few for a trend; there were no more"),
        ([0], None, {}, "1 sampled step so far: too few for a trend"),
    ],
)  # fmt: skip
def test_few_samples_are_a_finding(steps: list[int], end: Row | None, header: Row, words: str) -> None:
    [few] = findings_over_time(Run(header, log(steps=steps).rows, [], end))
    assert (few.finding, few.evidence) == ("few-samples", words)


def test_thresholds_are_obeyed() -> None:
    run = log(dead_channels=3)
    assert findings_over_time(run) == []
    assert findings_over_time(run, {"dead_in_batch": 0.04})[0].finding == "dead-channels"
    assert findings_over_time(run, {"too_large": 1e-4})[0].finding == "update-too-large"


def test_of_values_that_are_not_finite_the_first_place_is_named() -> None:
    def spoil(step: int, layer: str) -> Row:
        if step == 200:
            return {"loss": None} | ({"non_finite": 7} if layer in "bc" else {})
        return {"non_finite": 64, "weight_non_finite": 9, "gradient_non_finite": 9, "loss": None} if step > 200 else {}

    [finding] = findings_of(spoil)
    assert (finding.layer, finding.layers, finding.lasts) == ("b", ("a", "b", "c"), True)
    assert finding.meaning.endswith("To name the first step, run Monitor(stop_on='non-finite').")
    assert finding.evidence == (
        "from step 200 (20 s) to the end: 7 values of its activation are NaN or Inf; 2 more layers too; the loss is not"
        " finite either; at step 150, sampled before, everything was finite"
    )


def test_masked_scores_are_a_note_and_hide_no_other_finding() -> None:
    mask = {"non_finite": 7, "infinite": True, "activation_mean": None, "activation_std": None}
    large = {"update_to_weight": 0.9}
    found, note = findings_of(lambda step, layer: mask if layer == "b" else large)
    assert found.finding == "update-too-large"
    assert (note.finding, note.severity, note.layers) == ("non-finite", "note", ("b",))
    assert note.evidence.endswith("7 values of its activation are Inf; loss, gradients and weights are finite")
    for worse in ({"infinite": False}, {"infinite": None}, {"gradient_non_finite": 1}):
        [finding] = findings_of(in_layer("b", mask | worse, 200))
        assert (finding.finding, finding.severity, finding.step) == ("non-finite", "error", 200)
    lost = in_layer("b", mask, 200)
    [finding] = findings_of(lambda step, layer: lost(step, layer) | {"loss": 1.0 if step < 200 else None})
    assert (finding.severity, finding.step) == ("error", 200)


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (NO_GRADIENT, "no-gradient", "no gradient arrives"),
        ({"gradient_norm": 0.0}, "no-gradient", "its gradient is 0 everywhere"),
        ({"update_to_weight": 0.0, "learning_rate": 0.0}, "no-update", "does not change its weight (learning rate 0)"),
        ({"update_to_weight": 0.0}, "no-update", "does not change its weight (learning rate 0.1)"),
    ],
)  # fmt: skip
def test_a_run_in_which_nothing_changes_is_an_error_of_all_layers(change: Row, name: str, words: str) -> None:
    [finding] = findings_of(lambda step, layer: change if step >= 100 or name == "no-update" else {})
    assert (finding.finding, finding.severity, len(finding.layers)) == (name, "error", 3)
    assert f"{words}; all 2 other layers too" in finding.evidence


def test_some_dead_channels_do_not_hide_that_the_model_guesses() -> None:
    for loss, expected in ((1.386, {"dead-channels", "loss-flat"}), (1.0, {"dead-channels"})):  # ln(4)
        run = log(lambda step, layer: {"loss": loss} | ({"dead_channels": 30} if layer == "b" else {}))  # noqa: B023
        found = findings_over_time(replace(run, facts=[{"step": 0, "optimizer": 0, "classes": 4}]))
        assert {each.finding for each in found} == expected


def test_a_warning_that_has_passed_while_the_loss_fell_is_a_note() -> None:
    sparse = in_layer("b", {"dead_channels": 30}, 0, 300)
    for last, severity in ((0.1, "note"), (1.0, "warning")):
        [finding] = findings_of(lambda step, layer: sparse(step, layer) | {"loss": 1.0 if step < 250 else last})  # noqa: B023
        assert (finding.finding, finding.severity, finding.lasts) == ("dead-channels", severity, False)


def test_many_findings_of_one_kind_become_one() -> None:
    def sparse(step: int, layer: str) -> Row:
        model = int(layer[-1])
        return {"model": model} | ({"dead_channels": 30} if step >= 500 * model else {})

    [finding] = findings_of(sparse, [f"net{n}" for n in range(5)], range(0, 5000, 50))
    assert (finding.finding, finding.step, len(finding.parts), len(finding.layers)) == ("dead-channels", 0, 5, 5)
    assert (finding.last_step, finding.lasts) == (4950, True)


def test_one_step_of_nan_is_enough_and_gradients_go_backwards() -> None:
    [finding] = findings_of(in_layer("c", {"weight_non_finite": 7}, 200))
    assert (finding.layer, finding.numbers["phase"], finding.numbers["values"]) == ("c", "weights", 7)
    bad = {"gradient_non_finite": 7}
    [finding] = findings_of(lambda step, layer: bad if layer in "ab" and step == 200 else {})
    assert (finding.layer, finding.numbers["phase"]) == ("b", "backward")
    assert (finding.last_step, finding.lasts) == (200, False)
    assert "and so is the gradient of 'c' after it" in finding.evidence


def test_what_begins_while_a_model_computes_nan_is_its_consequence() -> None:
    spoil = in_layer("b", {"non_finite": 7}, 200)
    [finding] = findings_of(lambda step, layer: spoil(step, layer) | ({"dead_channels": 60} if step >= 300 else {}))
    assert finding.finding == "non-finite"


def test_notes_of_the_log() -> None:
    text = "the first NaN is made by sqrt"
    stop = {"note": "non-finite", "step": 60, "time": 6.0, "layer": "b", "operation": "sqrt", "call": 1, "text": text}
    failed = {"note": "watcher-failed", "step": 70, "time": 7.0, "text": "OSError: no space"}
    other = {"note": "new", "text": "something"}
    second, first, third = findings_over_time(Run({}, log().rows, [failed, stop, other]))
    assert (first.finding, first.evidence, first.time) == ("new", "something", None)
    assert (second.finding, second.layer, second.step, second.severity) == ("non-finite", "b#1", 60, "error")
    assert second.evidence == f"at step 60 (6 s), where the run was stopped: {text}"
    assert (third.finding, third.evidence) == ("watcher-failed", "OSError: no space") and third.meaning
    [stopped] = findings_over_time(Run({}, log(steps=[0]).rows, [stop], {"reason": "stopped", "step": 1}))
    assert stopped.finding == "non-finite" and "--stop-on" not in stopped.meaning  # and few samples are no finding
