"""The selection grammar, derived by hand on a list of calls, and what it says when nothing fits."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookscope import tracing
from hookscope.errors import LayerError, SelectionError
from hookscope.hooks.activations import capture
from hookscope.hooks.calls import Call, call_key
from hookscope.hooks.selection import Selection, layer_text

# ten calls as a pass would show them: (name, call, index)
CALLS = [
    ("conv1", 0, 0),
    ("bn1", 0, None),
    ("layer1.0.conv1", 0, 1),
    ("layer1.0.conv2", 0, 2),
    ("layer1.0", 0, None),
    ("layer10.conv1", 0, 3),
    ("head.conv", 0, 4),
    ("head.conv", 1, 5),
    ("head.conv", 2, 6),
    ("", 0, None),
]
NAMES = list(dict.fromkeys(name for name, _, _ in CALLS))
TOTAL = 7


CONVS = ["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer10.conv1", "head.conv", "head.conv#1", "head.conv#2"]


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ("all", CONVS),
        ("layer1….conv1", ["layer1.0.conv1", "layer10.conv1"]),
        ("hea…nv#1", ["head.conv#1"]),
        (3, ["layer10.conv1"]),
        ("3", ["layer10.conv1"]),
        ("+3", ["layer10.conv1"]),
        (-1, ["head.conv#2"]),
        ("-7", ["conv1"]),
        ("-2", ["head.conv#1"]),
        ("0:2", CONVS[:2]),
        ("5:", CONVS[5:]),
        (":2", CONVS[:2]),
        (":", CONVS),
        ("0:7:3", ["conv1", "layer10.conv1", "head.conv#2"]),
        ("1::3", ["layer1.0.conv1", "head.conv"]),
        ("-3:", CONVS[-3:]),
        (":-5", CONVS[:2]),
        ("-3:-1", CONVS[-3:-1]),
        ("::-3", ["conv1", "layer10.conv1", "head.conv#2"]),
        ("5:100", CONVS[5:]),
        (f"0:{10**12},{10**30}", CONVS),
        ("conv1", ["conv1"]),
        ("layer1.0", ["layer1.0"]),
        ("head.conv", ["head.conv", "head.conv#1", "head.conv#2"]),
        ("head.conv#0", ["head.conv"]),
        ("head.conv#1", ["head.conv#1"]),
        ("head.*#2", ["head.conv#2"]),
        ("layer1.*", ["layer1.0.conv1", "layer1.0.conv2", "layer1.0"]),
        ("layer1*.conv1", ["layer1.0.conv1", "layer10.conv1"]),
        ("*.conv[2-9]", ["layer1.0.conv2"]),
        ("?n1", ["bn1"]),
        ("re:conv\\d$", ["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer10.conv1"]),
        ("re:^conv", ["conv1"]),
        ("re:(?i)CONV2", ["layer1.0.conv2"]),
        ("re:bn1|conv2", ["bn1", "layer1.0.conv2"]),
        ("re:n{1,2}1", ["bn1"]),
        ("0, bn1 ,-1", ["conv1", "bn1", "head.conv#2"]),
        ("0,re:bn,x|conv2", ["conv1", "layer1.0.conv2"]),
        (["0", "bn1"], ["conv1", "bn1"]),
        ((0, "bn1", -1), ["conv1", "bn1", "head.conv#2"]),
        (["0,1", "re:a{1,2}y"], ["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer1.0", "layer10.conv1"]),
        ("conv1,conv1,0", ["conv1"]),
    ],
)
def test_what_a_selection_selects(layers: Any, wanted: list[str]) -> None:
    selection = Selection(layers)
    chosen = [call_key(name, call) for name, call, index in CALLS if selection.wants(name, call, index, TOTAL)]
    assert chosen == wanted


@pytest.mark.parametrize("layers", ["all", "3", "0:2", "5:", "0:7:3", "1::3", "conv1", "head.conv#1", "layer1.*"])
def test_the_selection_during_a_pass_is_that_at_its_end(layers: str) -> None:
    selection = Selection(layers)
    assert not selection.from_the_end
    for name, call, index in CALLS:
        assert selection.wants(name, call, index) == selection.wants(name, call, index, TOTAL)
        assert not selection.may_want(index, TOTAL)


@pytest.mark.parametrize("layers", ["-1", "-3:", "-3:-1", ":-5", "::-3", "5::-1", "0,-2"])
def test_calls_counted_from_the_end_are_never_dropped_too_early(layers: str) -> None:
    selection = Selection(layers)
    assert selection.from_the_end
    for at, (name, call, index) in enumerate(CALLS):
        if not selection.wants(name, call, index, TOTAL):
            continue
        for later in CALLS[at:]:
            if later[2] is not None:
                assert selection.wants(name, call, index) or selection.may_want(index, later[2] + 1)


def test_only_as_many_of_the_latest_calls_as_may_be_wanted_are_held() -> None:
    assert [Selection("-2").may_want(index, 5) for index in range(5)] == [False, False, False, True, True]
    assert [Selection("-3:-1").may_want(index, 5) for index in range(5)] == [False, False, True, True, True]
    assert all(Selection(":-2").may_want(index, 5) for index in range(5))
    assert not Selection("-1").may_want(None, 5)


def test_a_call_and_a_row_of_one_select_it_and_no_other() -> None:
    relu = nn.ReLU()
    net = nn.Sequential(nn.Conv2d(1, 2, 1), relu, nn.Conv2d(2, 2, 1), relu)
    x = torch.rand(1, 1, 4, 4)
    rows = tracing.list_layers(net, types="all", inputs=x)
    assert [(row.name, row.call) for row in rows] == [("0", 0), ("1", 0), ("2", 0), ("1", 1)]
    for layers, wanted in [
        (rows[3], ["1#1"]),
        (rows[:2], ["0", "1"]),
        (rows[2:], ["2", "1#1"]),
        ([rows[0], "name:2"], ["0", "2"]),
    ]:
        with capture(net, layers) as activations:
            net(x)
        assert list(activations) == wanted
        with capture(net, list(activations.calls)) as again:
            net(x)
        assert list(again) == wanted
    assert Selection([np.int64(2), 3]) == Selection("2,3")


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("", "empty layer selection"),
        (" , ", "empty layer selection"),
        ([], "empty layer selection"),
        ("1:2:3:4", r"bad range '1:2:3:4'; write start:stop or start:stop:step"),
        ("0:9:0", r"bad range '0:9:0'"),
        ("1--2:3", r"bad range"),
        ("re:[", r"bad regular expression '\['"),
        ("conv1#x", r"bad call in 'conv1#x'; write `name#1`"),
        ("conv1#", r"bad call in 'conv1#'"),
        ("conv1#-1", r"bad call in 'conv1#-1'"),
        ("conv1#²", r"bad call in 'conv1#²'"),
        (None, "a selection of layers cannot be None; give a name, an index"),
        ([1.5], "a selection of layers cannot be float"),
        ([nn.Conv2d(1, 1, 1)], "a selection of layers cannot be Conv2d"),
        (nn.Sequential(nn.ReLU()), "a selection of layers cannot be ReLU"),
    ],
)
def test_selections_that_cannot_be_parsed_are_refused(layers: Any, says: str) -> None:
    with pytest.raises(SelectionError, match=says):
        Selection(layers)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (
            "layer1.0.conv3",
            r"no layer 'layer1.0.conv3' in Net; nearest: layer1.0.conv\d, .*; list them with list_layers",
        ),
        ("0,con1", r"no layer 'con1' in Net; nearest: conv1"),
        ("con1#1", r"no layer 'con1' in Net; nearest: conv1"),
        ("stage*", r"no layer 'stage\*' in Net"),
        ("re:^x", r"no layer 're:\^x' in Net"),
        ("zzzzzzzz", r"it has 7 layers: conv1, bn1, layer1.0.conv1, \.\.\."),
    ],
)
def test_the_error_for_an_unknown_name_has_the_nearest_names(layers: str, says: str) -> None:
    with pytest.raises(LayerError, match=says):
        Selection(layers).check_names(NAMES, "Net")


@pytest.mark.parametrize("layers", ["all", "99", "-99", "conv1,layer1.*,re:head", "head.conv#9", "*"])
def test_names_that_exist_and_indices_pass_the_check_of_names(layers: str) -> None:
    Selection(layers).check_names(NAMES)


RAN = [(("conv1",), 1), (("head.conv", "alias.conv"), 3), (("idle",), 0)]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("7", r"no index 7; there are 7 Conv2d calls: 0 to 6"),
        ("0,-8", r"no index -8; there are 7 Conv2d calls: 0 to 6"),
        ("7:9", r"no range 7:9; there are 7 Conv2d calls: 0 to 6"),
        (
            "5:2",
            r"the range 5:2 is empty; there are 7 Conv2d calls: 0 to 6; the start comes first, and the stop is not",
        ),
        ("-2:3", r"no range -2:3"),
        ("head.conv#3", r"no call 'head.conv#3'; the layer ran 3 times: #0 to #2"),
        ("conv1#1", r"no call 'conv1#1'; the layer ran once"),
        ("idle#0", r"no call 'idle#0'; the layer did not run"),
    ],
)
def test_the_error_for_a_term_without_a_call_says_which_calls_ran(layers: str, says: str) -> None:
    with pytest.raises(LayerError, match=says):
        Selection(layers).check_ran(RAN, 7, ["Conv2d"])


def test_after_a_pass_without_any_call_of_the_types() -> None:
    with pytest.raises(LayerError, match="no range :; no Conv2d/Linear ran"):
        Selection(":").check_ran(RAN, 0, ["Conv2d", "Linear"])


@pytest.mark.parametrize("layers", ["6", "-7", "0:99", "all", "head.conv#2", "alias.conv#2", "idle", "*.conv#2"])
def test_terms_with_a_call_are_no_error_after_a_pass(layers: str) -> None:
    Selection(layers).check_ran(RAN, 7, ["Conv2d"])


@pytest.mark.parametrize(
    ("layers", "needed"),
    [
        ("3", {3}),
        ("0:3", {2}),
        ("0:8:3", {6}),
        (f"0:{10**12},{10**30}", {10**12 - 1, 10**30}),
        ("1,5,0:2", {1, 5}),
        ("conv1", {("conv1", 0)}),
        ("head.conv#2", {("head.conv", 2)}),
        ("alias.conv#2", {("head.conv", 2)}),
        ("3,alias.conv", {3, ("head.conv", 0)}),
        ("*conv*", {("conv1", 0), ("head.conv", 0)}),
        ("all", None),
        ("-1", None),
        ("3:", None),
        ("0,-1", None),
        ("conv1,:-1", None),
        ("2:2", None),
    ],
)
def test_what_must_have_run_before_a_pass_may_stop(layers: str, needed: set[Any] | None) -> None:
    selection = Selection(layers)
    named = [names for names, _ in RAN if selection.calls_by_name(names)]
    assert selection.required(named) == needed


@pytest.mark.parametrize(
    ("layers", "known"),
    [("3", True), ("0:3", True), ("a#1", True), ("3,a#0", True), ("a", False), ("a*#1", False), ("3:", False),
     ("all", False), ("-1", False), ("re:a", False), ("3,a", False)],
)  # fmt: skip
def test_whether_the_selection_alone_determines_the_last_call(layers: str, known: bool) -> None:
    assert Selection(layers).end_is_known is known


def test_calls_by_name_looks_at_every_name_of_a_layer() -> None:
    selection = Selection("a#1,b,c*#3,0")
    assert selection.calls_by_name(["a"]) == {1}
    assert selection.calls_by_name(["a", "c1"]) == {1, 3}
    assert selection.calls_by_name(["x", "b"]) == {None}
    assert selection.calls_by_name(["x"]) == frozenset()
    assert selection.counts and not Selection("a").counts


def test_a_selection_stays_itself_and_joins_others() -> None:
    selection = Selection("0:3,fc")
    assert Selection.of(selection) is selection
    assert Selection.of("0:3,fc") == selection == Selection(["0:3", "fc"]) == Selection(["0:3", Selection("fc")])
    assert hash(Selection("0:3,fc")) == hash(selection)
    assert selection != Selection("fc,0:3") and selection != "0:3,fc"
    assert (str(selection), repr(selection)) == ("0:3,fc", "Selection('0:3,fc')")
    assert Selection("a, re:x,y").terms == (Selection("a"), Selection("re:x,y"))


@pytest.mark.parametrize(("call", "wanted"), [(None, ["0", "0#1", "[z]", "a,b"]), (1, ["0#1"])])
def test_exact_names_know_no_grammar(call: int | None, wanted: list[str]) -> None:
    selection = Selection.of_names(["0", "[z]", "a,b"], call)
    calls = [("0", 0, 0), ("0", 1, 1), ("1", 0, 2), ("z", 0, 3), ("[z]", 0, 4), ("a,b", 0, None), ("a", 0, None)]
    assert [call_key(*key) for *key, index in calls if selection.wants(*key, index, 5)] == wanted
    assert not selection.counts and selection.has_call_numbers is (call is not None)
    with pytest.raises(LayerError, match=r"no layer 'a,b' in Net") as raised:
        selection.check_names(["0", "[z]"], "Net")
    assert (raised.value.kind, raised.value.name) == ("layer", "a,b")


def test_an_empty_list_of_names_is_refused() -> None:
    with pytest.raises(SelectionError, match="empty layer selection"):
        Selection.of_names([])


@pytest.mark.parametrize(
    ("layers", "explicit"),
    [
        *[("head.conv", True), ("head.conv#1", True), ("head.conv#0", False), ("5", True), ("+5", True), ("-2", False)],
        *[("head.*", False), ("re:^head.conv$", False), ("5:6", False), ("all", False), ("conv1,5", True)],
    ],
)
def test_a_call_is_explicit_by_its_exact_name_or_index(layers: str, explicit: bool) -> None:
    assert Selection(layers).is_explicit(Call("head.conv", "Conv2d", 1, 5)) is explicit


@pytest.mark.parametrize(
    ("layers", "kind", "name"), [("9", "index", "9"), ("8:9", "range", "8:9"), ("head.conv#7", "call", "head.conv#7")]
)
def test_an_error_says_in_fields_what_is_missing(layers: str, kind: str, name: str) -> None:
    with pytest.raises(LayerError) as raised:
        Selection(layers).check_ran([(["head.conv"], 3)], TOTAL, ["Conv2d"])
    assert (raised.value.kind, raised.value.name) == (kind, name)
    assert vars(pickle.loads(pickle.dumps(raised.value))) == vars(raised.value)


@pytest.mark.parametrize(
    "name", ["conv1", "0", "-1", "0:3", "[z]", "a*", "a,b", "all", "re:x", "name:x", "a#b", "", "("]
)
def test_the_text_of_a_layer_selects_exactly_that_layer(name: str) -> None:
    text = layer_text(name)
    assert (text == name) == (name in ("conv1", "(")) and (name or text == "(model)")
    others = ["conv1", "0", "1", "z", "ab", "a", "b", "x", "", "2", "(", "a#1"]
    for selection in (Selection(text), Selection(["last", text])):
        assert selection.wants(name, 0, None) and selection.wants(name, 3, None)
        assert not [other for other in others if other != name and selection.wants(other, 0, 0)]
    assert Selection(f"{text}#2").wants(name, 2, None) and not Selection(f"{text}#2").wants(name, 0, None)
    assert Selection(layer_text("a#1")).wants("a#1", 0, None) and not Selection(layer_text("a#1")).wants("a", 1, None)


def test_a_name_takes_the_rest_of_its_text_and_one_of_digits_and_signs_is_no_range() -> None:
    selection = Selection("0:2, name:a,b")
    assert selection.plain_names == ("a,b",) and selection.wants("c", 0, 1) and not selection.wants("b", 0, None)
    assert Selection("1-2").wants("1-2", 0, None)


def test_all_is_no_index() -> None:
    selection = Selection("all")
    assert selection.has_all and not selection.counts and not selection.single_indices
    assert selection.wants("a", 0, None, in_all=True) and not selection.wants("a", 0, 3, in_all=False)
    assert selection.wants("a", 0, 3) and not selection.wants("a", 0, None)  # by default the calls with an index
    assert selection.calls_by_name(["a"], in_all=True) == {None} and not selection.calls_by_name(["a"])
    assert Selection("3,-1,0:5,all").single_indices == ("3", "-1")
