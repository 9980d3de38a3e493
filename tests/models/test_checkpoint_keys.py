"""Checkpoints whose keys, state dicts or BatchNorm buffers are not those of the model: what is found, named or refused.

The judge is `nn.Module.load_state_dict` with the state dict of the same architecture.
"""

import argparse
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import WeightsError
from hookscope.models.checkpoints import load_checkpoint
from hookscope.models.load import load_model
from tests.helpers import Trap, refused

State = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.fc = nn.Linear(4, classes)


def values(seed: int = 1, classes: int = 4) -> State:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {key: torch.rand(value.shape) for key, value in Net(classes).state_dict().items()}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., tuple[nn.Module, list[str]]]:
    def load(content: Any, model: nn.Module | None = None) -> tuple[nn.Module, list[str]]:
        torch.save(content, tmp_path / "own.pth")
        net = model or Net()
        return net, load_checkpoint(net, str(tmp_path / "own.pth"), "nets.py:Net")[1]

    return load


def is_as_loaded(net: nn.Module, state: State) -> bool:
    judge = Net()
    judge.load_state_dict(state)
    return all(torch.equal(value, judge.state_dict()[key]) for key, value in net.state_dict().items())


PREFIXES = [
    "module.",
    "_orig_mod.",
    "backbone.",
    "model.net.",
    "student.",
    "ema.",
    "module._orig_mod.model.",
    "fc.",
    "stem.0.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_is_found_taken_off_and_named(load: Callable[..., Any], prefix: str) -> None:
    net, notes = load({"state_dict": prefixed(prefix, values())})
    assert is_as_loaded(net, values())
    assert notes == [f"own.pth: keys had the prefix {prefix}: taken off"]


@pytest.mark.parametrize(
    ("content", "inner", "notes"),
    [
        (values(), "backbone", ["keys lacked the prefix backbone.: added"]),
        (prefixed("model.", values()), "backbone", ["keys began with model. instead of backbone.: renamed"]),
        (
            {**prefixed("model.", values()), "loss.weight": torch.ones(4)},
            "",
            ["keys had the prefix model.: taken off", "left out 1 key without this prefix: loss.weight"],
        ),
        # keys that fit go before a copy with a prefix
        (
            {**prefixed("ema.", values(2)), **values()},
            "",
            ["left out 16 keys that the model does not have: ema.stem.0.weight, "],
        ),
        (
            {**prefixed("student.", values()), **prefixed("teacher.", values(2))},
            "",
            [
                "keys had the prefix student.: taken off",
                "left out 16 keys without this prefix: teacher.stem.0.weight, ",
            ],
        ),
    ],
)
def test_what_is_done_to_other_keys_is_said(
    load: Callable[..., Any], content: State, inner: str, notes: list[str]
) -> None:
    net, said = load(content, nn.ModuleDict({inner: Net()}) if inner else None)
    assert is_as_loaded(net[inner] if inner else net, values())
    assert [note.startswith(f"own.pth: {begin}") for note, begin in zip(said, notes, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("content", "taken", "note"),
    [
        ({"ema": values(2), "model": values(1)}, 1, "own.pth holds model, ema: model is taken"),
        ({"generator": values(2), "critic": {"a": torch.ones(1)}}, 2, ""),
        (
            {"critic": values(1, classes=9) | {"more": torch.ones(2)}, "actor": values(2)},
            2,
            "own.pth holds actor, critic: actor is taken",
        ),
        ({"epoch": {"mean": torch.ones(1)}, "deep": {"inner": {"net": values(2)}}}, 2, ""),
        ({"optimizer": {"state": {0: {"a": torch.ones(1)}}, "param_groups": []}, "mine": values(1)}, 1, ""),
        (OrderedDict(values(1)), 1, ""),
        ({"state_dict": values(1), "epoch": 3, "optimizer": {"lr": 0.1}}, 1, ""),
        ({"model": {"state_dict": values(1)}}, 1, ""),
        ({"model_ema": values(1), "args": None}, 1, ""),
        ({"n_averaged": torch.tensor(3), **prefixed("module.", values(1))}, 1, "had the prefix module.: taken off"),
    ],
)
def test_which_state_dict_is_taken_is_said(load: Callable[..., Any], content: Any, taken: int, note: str) -> None:
    net, notes = load(content)
    assert is_as_loaded(net, values(taken))
    assert len(notes) == bool(note) and note in " ".join(notes)


def test_batch_norms_without_statistics_keep_theirs(load: Callable[..., Any]) -> None:
    state = {key: value for key, value in values().items() if "running" not in key and "num_batches" not in key}
    net, notes = load(state)
    judge = Net()
    judge.load_state_dict(state, strict=False)
    assert all(torch.equal(net.state_dict()[key], judge.state_dict()[key]) for key in state)
    assert torch.equal(net.stem[1].running_mean, torch.zeros(4)) and torch.equal(net.stem[1].running_var, torch.ones(4))
    assert len(notes) == 1
    assert notes[0].endswith("own.pth lacks the running statistics of 2 BatchNorms: left as built (stem.1, block.1)")
    net, notes = load(prefixed("net.", {key: value for key, value in values().items() if "stem.1.running" not in key}))
    assert notes[0] == "own.pth: keys had the prefix net.: taken off"
    assert notes[1].endswith("lacks the running statistics of 1 BatchNorm: left as built (stem.1)")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {key: values()[key] for key in list(values())[:-2]},
            "14 of 16 keys of the model match, and the file has 14; 2 missing: fc.weight, fc.bias",
        ),
        (
            values() | {"head.weight": torch.ones(2)},
            "16 of 16 keys of the model match, and the file has 17; 1 unexpected: head.weight",
        ),
        (values(classes=7), "2 other shapes: fc.weight is 7x4 in the file and 4x4 in the model, fc.bias is 7 in "),
        (
            values(classes=7),
            "build the model as in training, with 7 classes: file.py:make, or such as 'file.py:make(classes=7)'",
        ),
        (
            prefixed("model.", {key: values()[key] for key in list(values())[:-1]}),
            "16 missing: ... nearest: 15 match if keys had the prefix model.: taken off",
        ),
        (
            {"a": torch.ones(3)},
            "0 of 10 keys of the model match, and the file has 1;"
            " 10 missing: stem.0.weight, stem.0.bias and 8 more; 1 unexpected: a",
        ),
    ],
)
def test_what_fits_in_part_is_refused_with_every_difference(load: Callable[..., Any], state: State, words: str) -> None:
    net = Net()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    first, _, rest = words.partition("16 missing: ... ")
    with refused(WeightsError, rest or first, part="holds"):
        load(state, net)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_the_arguments_of_a_training_script_are_no_danger(load: Callable[..., Any], tmp_path: Path) -> None:
    net, notes = load({"model": values(), "args": argparse.Namespace(lr=0.1, out="runs"), "epoch": 3})
    assert is_as_loaded(net, values()) and notes == []
    trap = tmp_path / "sprung"
    with pytest.raises(WeightsError, match=r"would run code \(posix.mkdir\)"):
        load({"model": values(), "args": argparse.Namespace(lr=Trap(trap))})
    assert not trap.exists()


def test_a_prefix_and_another_number_of_classes_for_torchvision(tmp_path: Path) -> None:
    net = load_model("squeezenet1_1", weights="none").model
    state = {f"module.{key}": torch.rand_like(value) for key, value in net.state_dict().items()}
    state |= {"module.classifier.1.weight": torch.ones(10, 512, 1, 1), "module.classifier.1.bias": torch.ones(10)}
    torch.save(state, tmp_path / "own.pth")
    loaded = load_model("squeezenet1_1", weights=str(tmp_path / "own.pth"))
    assert loaded.notes == ("own.pth: keys had the prefix module.: taken off",) and loaded.categories is None
    assert all(torch.equal(value, state[f"module.{key}"]) for key, value in loaded.model.state_dict().items())
