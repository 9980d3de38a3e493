"""The answer of a comparison: the cause that the numbers show, and never more; and which limits are broken."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hookscope.comparison import (
    Agreement,
    Answer,
    ChangedImage,
    Comparison,
    Difference,
    PairedCall,
    SideFacts,
    check_comparison,
    how_different,
)
from hookscope.comparison.answer import find_answer
from hookscope.comparison.inputs import InputChange
from hookscope.hooks import Call
from hookscope.statistics import junit_xml

FLOAT = SideFacts("net", "a.pth", "float32", "cpu", "resize 8")
SHAPE = (3, 8, 8)


def pair(name: str, distance: float | None = 0.0, *, order: int | None = None, **more: Any) -> PairedCall:
    """A pair of calls; ``distance`` is the relative L2 difference, None for different shapes."""
    a = Call(name, more.pop("type", "Conv2d"), 0, None, order)
    b = Call(name, more.pop("type_b", a.type), 0, None, more.pop("order_b", order))
    bad = {side: more.pop(side, 0) for side in ("nonfinite_a", "nonfinite_b")}
    equal = 0 if distance or any(bad.values()) else 10
    difference = None if distance is None else Difference(10, equal, distance, None, None, **bad)
    return PairedCall(a, b, "", more.pop("paired_by", "name"), SHAPE, more.pop("shape_b", SHAPE), difference, **more)


def side(**more: str) -> SideFacts:
    return SideFacts(**{**{name: getattr(FLOAT, name) for name in SideFacts.__slots__}, **more})


def change(a: torch.Tensor, b: torch.Tensor, **more: bool) -> InputChange:
    found = InputChange(**more)
    for half in (slice(0, 2), slice(2, 4)):
        found.add(a[half], b[half])
    return found


PICTURE = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MEAN, STD = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def test_the_same_to_the_bit() -> None:
    answer = find_answer([pair("(input)"), pair("conv1"), pair("(model)")], FLOAT, FLOAT)
    assert (answer.kind, answer.first, answer.most, answer.same_before) == ("same", "", "", 3)
    assert answer.sentence == "A and B are the same to the bit in all 3 pairs of calls."


def test_the_noise_of_repeating_is_no_difference() -> None:
    calls = [pair("(input)"), pair("conv1", 3e-7, noise=1e-7), pair("(model)", 9e-7, noise=1e-7)]
    answer = find_answer(calls, FLOAT, FLOAT)
    assert (answer.kind, answer.first, answer.same_before) == ("noise", "", 1)
    assert answer.sentence == (
        "A and B are the same except for noise: relative L2 9e-07 at most, where the noise is 1e-07, and a"
        " difference is more than 10 times that."
    )


def test_a_call_without_partner_is_counted_when_the_rest_is_the_same() -> None:
    answer = find_answer([pair("(input)")], FLOAT, FLOAT, [], [Call("aux", "Linear", 0, None)])
    assert answer.sentence.endswith("in the only pair of calls; 1 call has no partner.")


CASES: dict[str, tuple[Any, ...]] = {
    "NaN before all that follows from it": (
        [pair("(input)"), pair("conv1", 1e-3), pair("bn1", 0.0, nonfinite_b=7), pair("(model)", 1.0)],
        "nonfinite bn1: bn1 is the first layer with NaN or Inf in B: 7 values, finite in A; before it, conv1 is the"
        " first that differs: relative L2 0.001.",
    ),
    "NaN in A": (
        [pair("(input)"), pair("conv1", 0.0, nonfinite_a=1)],
        "nonfinite conv1: conv1 is the first layer with NaN or Inf in A: 1 value, finite in B.",
    ),
    "sizes of the input": (
        [pair("(input)", None, shape_b=(3, 9, 9)), pair("conv1", None)],
        "input (input): The inputs have different sizes: A gets 3x8x8 and B gets 3x9x9.",
    ),
    "other images": (
        [pair("(input)", 0.5), pair("conv1", 0.7, isolated_l2=0.0)],
        {"input_change": change(PICTURE, PICTURE.flip(2), other_images=True)},
        "input (input): The images differ: relative L2 0.5 of the inputs; no layer alone differs.",
    ),
    "BGR for RGB": (
        [pair("(input)", 0.5), pair("conv1", 0.7, isolated_l2=0.0)],
        {"input_change": change(PICTURE, PICTURE[:, [2, 1, 0]])},
        "input (input): Channels 0, 1, 2 of B's input are channels 2, 1, 0 of A's (RGB in one, BGR in the other); no"
        " layer alone differs.",
    ),
    "BGR before mean and std": (
        [pair("(input)", 0.5)],
        {"input_change": change((PICTURE - MEAN) / STD, (PICTURE[:, [2, 1, 0]] - MEAN) / STD)},
        "input (input): Channels 0, 1, 2 of B's input are channels 2, 1, 0 of A's (RGB in one, BGR in the other).",
    ),
    "missing normalisation": (
        [pair("(input)", 0.5)],
        {"input_change": change((PICTURE - MEAN) / STD, PICTURE)},
        "input (input): B's input is 0.229, 0.224, 0.225 times A's plus 0.485, 0.456, 0.406: B lacks the ImageNet mean"
        " and std of A.",
    ),
    "colours up to 255": (
        [pair("(input)", 254.0)],
        {"input_change": change(PICTURE, 255 * PICTURE)},
        "input (input): B's input is 255 times A's plus 0: B has colours 0..255 where A has 0..1.",
    ),
    "0..255 without normalisation": (
        [pair("(input)", 254.0)],
        {
            "input_change": change((PICTURE.double() - MEAN) / STD, 255 * PICTURE.double()),
            "b": side(preprocess="range 0..255"),
        },
        "input (input): B's input is 58.4, 57.12, 57.37 times A's plus 123.7, 116.3, 103.5: B lacks the ImageNet mean"
        " and std of A, and has colours 0..255 (A: resize 8; B: range 0..255).",
    ),
    "normalisation in B only": (
        [pair("(input)", 2.0)],
        {"input_change": change(PICTURE, (PICTURE - MEAN) / STD)},
        "input (input): B's input is 4.367, 4.464, 4.444 times A's plus -2.118, -2.036, -1.804: A lacks the ImageNet"
        " mean and std of B.",
    ),
    "grey": (
        [pair("(input)", 2.0)],
        {"input_change": change(PICTURE[:, :1], 2 * PICTURE[:, :1])},
        "input (input): B's input is 2 times A's plus 0.",
    ),
    "mean and std exchanged": (
        [pair("(input)", 2.0)],
        {"input_change": change((PICTURE - MEAN) / STD, (PICTURE - STD) / MEAN)},
        "input (input): B's input is 0.4722, 0.4912, 0.5542 times A's plus 0.5278, 0.5088, 0.4458.",
    ),
    "another way to resize": (
        [pair("(input)", 0.1)],
        {"input_change": change(PICTURE, PICTURE + 0.1 * PICTURE.roll(1, -1)), "b": side(preprocess="crop 8")},
        "input (input): The inputs differ: relative L2 0.1 (A: resize 8; B: crop 8).",
    ),
    "parameters of one layer": (
        [pair("(input)"), pair("conv1", parameters=0.0), pair("bn1", 0.3, isolated_l2=0.3, parameters=0.12)],
        "parameters bn1: The parameters of 1 of 2 layers differ, first in bn1 by 0.12.",
    ),
    "other weights": (
        [pair("(input)"), pair("conv1", 0.3, parameters=0.5), pair("bn1", 0.3, parameters=0.12)],
        "parameters conv1: A and B have different weights: the parameters of 2 of 2 layers differ, first in conv1 by"
        " 0.5.",
    ),
    "two models": (
        [pair("(input)"), pair("conv1", 0.3, parameters=0.5), pair("bn1", 0.3, parameters=0.12)],
        {"b": side(model="other"), "unpaired_a": [Call("fc", "Linear", 0, None)]},
        "models conv1: A and B are two models: 2 of 3 calls of A have a partner in B, and the parameters of 2 of 2"
        " layers differ. A and B differ first at conv1: relative L2 0.3.",
    ),
    "two models whose layers have other names": (
        [pair("(input)"), pair("conv1", 0.3, parameters=0.5), pair("bn1", 0.3, parameters=0.12, paired_by="order")],
        {"b": side(model="other"), "unpaired_a": [Call("fc", "Linear", 0, None)]},
        "models conv1: A and B are two models: 2 of 3 calls of A have a partner in B, 1 of them under another name, and"
        " the parameters of 2 of 2 layers differ. A and B differ first at conv1: relative L2 0.3.",
    ),
    "buffers of BatchNorm": (
        [pair("(input)"), pair("bn1", 0.3, parameters=0.0, buffers=0.2)],
        "buffers bn1: The buffers of bn1, such as its running mean and variance, differ by 0.2; its parameters do not.",
    ),
    "buffers of several BatchNorms": (
        [pair("bn1", 0.3, parameters=0.0, buffers=0.2), pair("bn2", 0.3, parameters=0.0, buffers=0.4)],
        "buffers bn1: The buffers of bn1 (and 1 more), such as its running mean and variance, differ by 0.2; its"
        " parameters do not.",
    ),
    "precision": (
        [
            pair("(input)", 0.0017),
            pair("conv1", 0.003, isolated_l2=0.002, parameters=0.0017),
            pair("fc", 0.01, isolated_l2=0.004, parameters=0.0017),
        ],
        {"b": side(dtype="bfloat16")},
        "precision (input): A computes in float32, B computes in bfloat16: relative L2 0.01 at fc; fc adds most, 0.004"
        " alone.",
    ),
    "parameters under precision": (
        [
            pair("(input)", 0.0017),
            pair("conv1", 0.3, isolated_l2=0.3, parameters=0.2),
            pair("fc", 0.4, parameters=0.0017),
        ],
        {"b": side(dtype="bfloat16")},
        "parameters (input): The parameters of 1 of 2 layers differ, first in conv1 by 0.2.",
    ),
    "a layer that no rounding explains": (
        [pair("(input)", 0.0017), pair("conv1", 0.9, isolated_l2=0.9, parameters=0.0017)],
        {"b": side(dtype="bfloat16")},
        "layer (input): A and B differ first at conv1: relative L2 0.9, 0.9 on the same inputs.",
    ),
    "a call without partner": (
        [pair("conv1", order=0), pair("fc", 0.4, isolated_l2=0.0, order=1, order_b=2)],
        {"unpaired_b": [Call("relu", "ReLU6", 0, None, 1)]},
        "unpaired fc: B has relu (ReLU6), and A does not. A and B differ first at fc: relative L2 0.4.",
    ),
    "an intervention": (
        [pair("conv1"), pair("relu", 0.4, isolated_l2=0.4)],
        {"b": side(special="Scale(factor=2) at relu")},
        "layer relu: B runs with Scale(factor=2) at relu; A and B differ first at relu: relative L2 0.4, 0.4 on the"
        " same inputs.",
    ),
    "an intervention on an operation": (
        [pair("conv1"), pair("relu", 0.4, isolated_l2=0.0)],
        {"b": side(special="Zero() at Add")},
        "layer relu: B runs with Zero() at Add; A and B differ first at relu: relative L2 0.4, but on the same inputs"
        " it gives the same.",
    ),
    "another class": (
        [pair("conv1"), pair("relu", 0.4, isolated_l2=0.4, parameters=None, type="ReLU", type_b="ReLU6")],
        "layer relu: A and B differ first at relu: relative L2 0.4, 0.4 on the same inputs; it is ReLU in A and ReLU6"
        " in B.",
    ),
    "a BatchNorm that is folded wrongly": (
        [pair("(input)"), pair("bn1", 0.4, isolated_l2=0.4, type="BatchNorm2d", type_b="Conv", paired_by="folded")],
        "layer bn1: A and B differ first at bn1: relative L2 0.4, 0.4 on the same inputs; bn1 of B does the work of"
        " several layers of A.",
    ),
    "an operation between": (
        [pair("conv1"), pair("fc", 0.4, isolated_l2=0.0)],
        "layer fc: A and B differ first at fc: relative L2 0.4, but on the same inputs it gives the same.",
    ),
    "another shape": (
        [pair("conv1"), pair("fc", None, shape_b=(5,))],
        "layer fc: A and B differ first at fc: its output is 3x8x8 in A and 5 in B.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer_names_the_cause(case: str) -> None:
    calls, *more, expected = CASES[case]
    answer = find_answer(calls, **{"a": FLOAT, "b": FLOAT, **dict(*more)})  # none, or one dictionary
    assert f"{answer.kind} {answer.first}: {answer.sentence}" == expected


def test_the_layer_that_adds_most_is_the_one_that_differs_most_alone() -> None:
    calls = [
        pair("conv1", 0.1, isolated_l2=0.1),
        pair("conv2", 0.9, isolated_l2=0.4, noise=0.1),
        pair("fc", 0.9, isolated_l2=0.3),
    ]
    assert find_answer(calls, FLOAT, FLOAT).most == "fc"  # conv2 alone is within the noise


def test_nan_that_no_layer_gives_comes_from_an_operation() -> None:
    assert find_answer([pair("fc"), pair("(model)", nonfinite_b=1)], FLOAT, FLOAT).advice.endswith("with ops=True.")


def test_only_the_input_adds_a_difference_when_no_layer_alone_does() -> None:
    assert find_answer([pair("(input)", 0.1), pair("fc", 0.3, isolated_l2=0.0)], FLOAT, FLOAT).most == "(input)"


def test_inputs_of_other_shapes_and_constant_ones_say_nothing() -> None:
    found = InputChange()
    found.add(torch.rand(2, 3, 4, 4), torch.rand(2, 3, 5, 5))
    found.add(torch.rand(2, 5), torch.rand(2, 5))
    assert found.words == ""
    found.add(torch.zeros(2, 3, 4, 4), torch.rand(2, 3, 4, 4))
    assert found.words == ""


def test_what_a_layer_adds_within_the_noise_does_not_rank_it() -> None:
    quiet = pair("fc", 0.2, noise=1e-7, isolated_l2=2e-7)
    far, adding = pair("pool", 0.3, noise=1e-7, isolated_l2=0.0), pair("conv", 0.1, noise=1e-7, isolated_l2=2e-6)
    assert sorted([quiet, far, adding], key=how_different, reverse=True) == [adding, far, quiet]


def found(difference: Difference | None, agreement: Agreement | None = None) -> Comparison:
    only = replace(pair("conv1", None, shape_b=SHAPE if difference else (5,)), difference=difference)
    return Comparison(FLOAT, FLOAT, ("a.png",), Answer("layer", "", "", 0, ""), (only,), agreement=agreement)


ONE_SIDE = "2 values of 9 NaN or Inf on one side only"
LIMIT_CASES: list[tuple[dict[str, float], Difference | None, str, float | None]] = [
    ({"max_relative": 0.1}, Difference(9, 0, 0.1, None, 0.9), "", None),
    ({"max_relative": 0.1}, Difference(9, 0, 0.2, None, 0.9), "relative L2 difference 0.2", 0.2),
    ({"max_relative": 0.1}, Difference(9, 9, 0.0, None, None), "", None),
    ({"max_relative": 0.1}, Difference(9, 9, None, None, None), "", None),  # the same NaN on both sides
    ({"max_relative": 0.1}, Difference(9, 7, 0.0, None, 1.0, 0, 2), ONE_SIDE, float("inf")),
    ({"max_relative": 0.1}, Difference(9, 8, None, None, None), "no value is finite on both sides", None),
    ({"max_relative": 0.1}, None, "the shapes differ: 3x8x8 in A and 5 in B", None),
    ({"min_cosine": 0.9}, Difference(9, 0, 0.1, None, 0.9), "", None),
    ({"min_cosine": 0.9}, Difference(9, 0, 0.1, None, 0.8), "cosine 0.8", 0.8),
    ({"min_cosine": 0.9}, Difference(9, 9, 0.0, None, None), "", None),
    ({"min_cosine": 0.9}, Difference(9, 0, 1.0, None, None), "one side is 0 everywhere", None),
    ({"min_cosine": 0.9}, None, "the shapes differ: 3x8x8 in A and 5 in B", None),
    ({"min_cosine": 0.9}, Difference(9, 7, 0.0, None, 1.0, 2), ONE_SIDE, None),
    ({"min_agreement": 0.9}, None, "the outputs are not scores of the same classes", None),
]


@pytest.mark.parametrize(("limits", "difference", "evidence", "value"), LIMIT_CASES)
def test_what_breaks_a_limit(limits: dict[str, Any], difference: Difference | None, evidence: str, value: Any) -> None:
    result = check_comparison(found(difference), **limits)
    assert [(each.evidence, each.value) for each in result.broken] == ([(evidence, value)] if evidence else [])
    assert len(result.calls) == (not evidence or value is not None)


def test_agreement_is_checked_on_the_output() -> None:
    agreement = Agreement(4, 0.75, 1.0, (ChangedImage(1, "a.png", "cat", "dog", 0.9, 0.6),))
    assert not check_comparison(found(None, agreement), min_agreement=0.75).broken
    result = check_comparison(found(None, agreement), min_agreement=0.8)
    assert [each.evidence for each in result.broken] == ["1 of 4 images changed class: 75 % agree"]
    assert result.verdict() == "of 1 call, 1 breaks a limit"


def test_junit_has_a_failure_for_what_was_not_measured() -> None:
    result = check_comparison(found(None), max_relative=0.1, min_cosine=0.5)
    text = junit_xml("hookscope compare net net", result).decode()
    assert 'tests="2" failures="2"' in text
    assert "not measured: the shapes differ: 3x8x8 in A and 5 in B" in text
