"""The names of calls, and the types that choose them."""

from collections import Counter

import pytest
import torch

from hookscope.errors import SelectionError
from hookscope.hooks.calls import Call, call_key, describe_types, matches_type, select_types, usual_types


def test_the_key_of_a_call() -> None:
    assert [call_key("a.b", call) for call in range(3)] == ["a.b", "a.b#1", "a.b#2"]
    assert Call("a.b", "Conv2d", 2, 7).key == "a.b#2" and Call("", "Conv2d", 0, 0).key == ""


def test_a_model_of_clips_counts_convolutions_of_three_axes() -> None:
    assert usual_types([["Conv3DSimple", "Conv3d", "_ConvNd"], ["ReLU"]]) == ("Conv3d",)
    assert usual_types([["Conv3d"], ["Conv2d"]]) == usual_types([["ReLU"]]) == ("Conv2d",)


def test_types_are_listed_most_frequent_first_up_to_a_limit() -> None:
    assert describe_types(Counter({"ReLU": 1, "Conv2d": 3})) == "Conv2d (3), ReLU (1)"
    assert describe_types(Counter("abc"), most=2) == "a (1), b (1), ..."


class TestTypes:
    MRO = ("QuantizedConv2d", "Conv2d", "_ConvNd")

    @pytest.mark.parametrize(
        ("types", "leaf", "fits"),
        [
            (["Conv2d"], True, True),
            (["Conv2d"], False, True),
            (["_ConvNd"], True, True),
            (["conv2d"], True, False),
            (["Linear", "Q*"], True, True),
            (["Linear"], True, False),
            (["all"], True, True),
            (["all"], False, False),
            (["all", "Conv*"], False, True),
            ([], True, False),
        ],
    )
    def test_fits_by_any_class_name_or_glob_or_as_a_leaf(self, types: list[str], leaf: bool, fits: bool) -> None:
        assert matches_type(self.MRO, types, leaf) is fits

    def test_classes_and_single_names_are_taken_and_an_empty_list_is_refused(self) -> None:
        assert select_types("Conv2d") == ("Conv2d",)
        assert select_types(torch.nn.Conv2d) == ("Conv2d",)
        assert select_types([torch.nn.Conv2d, "Lin*"]) == ("Conv2d", "Lin*")
        with pytest.raises(SelectionError, match="no layer type given; name one, such as Conv2d, or `all`"):
            select_types([])
