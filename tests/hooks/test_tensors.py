"""Calls and their types, tensors in any value, and statistics of their values, which NumPy judges."""

import collections
import dataclasses
import itertools
import math
import types
from collections import Counter
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torchvision.models.detection.image_list import ImageList

from hookscope.errors import SelectionError
from hookscope.hooks import tensors as moments
from hookscope.hooks.calls import Call, call_key, describe_types, matches_type, select_types, usual_types
from hookscope.hooks.tensors import (
    map_tensors,
    shape_of,
    shares_storage,
    storage_key,
    storage_keys,
    tensors_in,
    value_numbers,
)


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


ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0, 2.0])


class Pair(NamedTuple):
    left: Any
    right: Any


Plain, Frozen, Slots, FrozenSlots = (
    dataclasses.make_dataclass(f"Data{number}", ["left", "right"], frozen=frozen, slots=slots)
    for number, (slots, frozen) in enumerate(itertools.product([False, True], repeat=2))
)


class OwnTuple(tuple):
    """A tuple whose constructor takes its parts one by one."""

    def __new__(cls, left: Any, right: Any) -> Self:
        return super().__new__(cls, (left, right))


class OwnList(list):
    def __init__(self, left: Any, right: Any) -> None:
        super().__init__([left, right])
        self.mark = "kept"


class OwnDict(dict):
    mark = ""

    def marked(self) -> Self:
        self.mark = "kept"
        return self


PARTS = {"left": ONE, "right": TWO}
CONTAINERS: dict[str, tuple[Any, list[str]]] = {
    "tuple": ((ONE, TWO), ["0", "1"]),
    "list": ([ONE, TWO], ["0", "1"]),
    "dict": (dict(PARTS), ["left", "right"]),
    "numbered dict": ({0: ONE, 1: TWO}, ["0", "1"]),
    "OrderedDict": (collections.OrderedDict(PARTS), ["left", "right"]),
    "defaultdict": (collections.defaultdict(list, PARTS), ["left", "right"]),
    "read-only mapping": (types.MappingProxyType(PARTS), ["left", "right"]),
    "named tuple": (Pair(ONE, TWO), ["0", "1"]),
    "dataclass": (Plain(ONE, TWO), ["left", "right"]),
    "frozen dataclass": (Frozen(ONE, TWO), ["left", "right"]),
    "dataclass with slots": (Slots(ONE, TWO), ["left", "right"]),
    "frozen dataclass with slots": (FrozenSlots(ONE, TWO), ["left", "right"]),
    "namespace": (types.SimpleNamespace(**PARTS), ["left", "right"]),
    "tuple with its own constructor": (OwnTuple(ONE, TWO), ["0", "1"]),
    "list with its own constructor": (OwnList(ONE, TWO), ["0", "1"]),
    "dict with an attribute": (OwnDict(PARTS).marked(), ["left", "right"]),
    "nested": ({"a": [ONE, {"b": Pair("word", TWO)}], "n": None}, ["a.0", "a.1.b.1"]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_finds_every_tensor_by_its_part(kind: str) -> None:
    value, names = CONTAINERS[kind]
    tensors = tensors_in(value)
    assert list(tensors) == names
    assert [id(tensor) for tensor in tensors.values()] == [id(ONE), id(TWO)]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_rebuilds_the_container_and_leaves_the_old_one_alone(kind: str) -> None:
    value, names = CONTAINERS[kind]
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert type(doubled) is type(value)
    tensors = tensors_in(doubled)
    assert list(tensors) == names
    assert [tensor.tolist() for tensor in tensors.values()] == [[2], [4, 4]]
    assert [tensor.tolist() for tensor in tensors_in(value).values()] == [[1], [2, 2]]
    assert getattr(doubled, "mark", None) == getattr(value, "mark", None)


@pytest.mark.parametrize("leaf", [None, 3, "word", b"", len, Plain, object(), {1, 2}])
def test_a_value_without_tensors_is_itself(leaf: Any) -> None:
    assert tensors_in(leaf) == {} and shape_of(leaf) is None
    assert map_tensors(leaf, lambda tensor: None) is leaf


def test_what_is_not_a_tensor_stays_a_bare_tensor_has_no_name_and_shapes_are_by_part() -> None:
    assert map_tensors(Pair("word", [3, None, torch.Size([1, 2])]), lambda t: t) == Pair("word", [3, None, (1, 2)])
    assert tensors_in(TWO) == {"": TWO} and map_tensors(ONE, lambda tensor: tensor is ONE) is True
    assert shape_of(torch.zeros(1, 2)) == (1, 2)
    assert shape_of(torch.tensor(1.0)) == ()
    assert shape_of({"out": torch.zeros(1, 2), "aux": torch.zeros(3)}) == {"out": (1, 2), "aux": (3,)}
    assert shape_of((torch.zeros(1),)) == {"0": (1,)}


def test_pytorchs_own_containers() -> None:
    tensors = torch.tensor([[1.0, 5.0]]).max(1)
    doubled = map_tensors(tensors, lambda tensor: tensor * 2)
    assert type(doubled) is type(tensors) and (doubled.values.item(), doubled.indices.item()) == (10, 2)
    packed = map_tensors(pack_sequence([ONE]), lambda tensor: tensor + 1)
    assert type(packed).__name__ == "PackedSequence" and packed.data.tolist() == [2]
    images = map_tensors(ImageList(ONE, [(4, 5)]), lambda tensor: tensor + 1)
    assert type(images) is ImageList and images.tensors.tolist() == [2] and images.image_sizes == [(4, 5)]


def test_a_dataclass_field_that_was_never_set_is_no_part() -> None:
    @dataclasses.dataclass(slots=True)
    class Late:
        left: Any
        right: Any = dataclasses.field(init=False)

    assert list(tensors_in(Late(ONE))) == ["left"]


def test_views_share_storage_and_copies_do_not() -> None:
    base = torch.zeros(2, 3)
    held = storage_keys(base)
    for view in (base, base[0], base.t(), base.detach(), base.view(6), base.expand(4, 2, 3), torch.nn.Parameter(base)):
        assert shares_storage(view, held)
    for copy in (base.clone(), base + 0, base.to(torch.float64), torch.zeros(2, 3)):
        assert not shares_storage(copy, held)
    assert len(storage_keys([ONE], {"a": TWO}, ONE, None, "word")) == 2
    assert storage_keys() == set() and not shares_storage(ONE, set())
    sparse = torch.eye(2).to_sparse()
    assert storage_key(sparse) is None and storage_keys(sparse) == set()
    assert not shares_storage(sparse, storage_keys(ONE))


@pytest.mark.parametrize("piece", [7, 1 << 18])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_numbers_equal_those_of_numpy(monkeypatch: pytest.MonkeyPatch, piece: int, offset: float) -> None:
    monkeypatch.setattr(moments, "_PIECE", piece)
    raw = np.random.default_rng(0).normal(offset, 2, (6, 5, 3)).astype(np.float32)
    raw[1, 2, 0] = 0
    raw[3, 1] = [np.nan, np.inf, -np.inf]
    statistics = value_numbers(torch.from_numpy(raw))
    known = raw[np.isfinite(raw)].astype(np.float64)
    expected = {"mean": known.mean(), "std": known.std(), "norm": np.sqrt((known**2).sum())}
    for name, value in expected.items():
        assert statistics[name] == pytest.approx(value, rel=1e-12), name
    assert (statistics["min"], statistics["max"]) == (known.min(), known.max())
    assert (statistics["nan"], statistics["inf"], statistics["first_nonfinite"]) == (1, 2, (3, 1, 0))
    assert statistics["zeros"] == 1 / 90


@pytest.mark.parametrize("scale", [1e-300, 1e300, 5e-324])
def test_extremes_of_double_precision(scale: float) -> None:
    statistics = value_numbers(torch.tensor([scale, -scale, scale, -scale], dtype=torch.float64))
    assert (statistics["mean"], statistics["std"], statistics["norm"]) == (0, scale, 2 * scale)


def test_tensors_without_finite_values_or_without_values() -> None:
    for values, zeros, first in ((torch.full((2, 2), math.nan), 0.0, (0, 0)), (torch.zeros(0, 3), None, None)):
        statistics = value_numbers(values)
        assert [statistics[name] for name in ("mean", "std", "min", "max", "norm")] == [None] * 5
        assert (statistics["zeros"], statistics["first_nonfinite"]) == (zeros, first)
    assert value_numbers(torch.tensor(2.0))["mean"] == 2
    assert value_numbers(torch.tensor(math.inf))["first_nonfinite"] == ()
