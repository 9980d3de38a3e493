"""Tensors in every container that a layer may return."""

import collections
import dataclasses
import itertools
import types
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torchvision.models.detection.image_list import ImageList

from hookscope.hooks.tensors import map_tensors, shape_of, shares_storage, storage_key, storage_keys, tensors_in

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
