"""A row of one command can be given to `--layer` of any other: by its index, its order, and its name."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookscope.cli.main import main
from hookscope.models import load_model
from hookscope.training import Monitor

NETS = '''
import torch
from torch import nn

class Block(nn.Module):
    """A convolution and the activation function that all blocks share, and a functional one."""

    def __init__(self, act):
        super().__init__()
        self.conv, self.act = nn.Conv2d(4, 4, 3, padding=1), act

    def forward(self, x):
        return torch.tanh(x + self.act(self.conv(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        act = nn.ReLU()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(act), Block(act))
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.add_module("[z]", nn.BatchNorm2d(4))
        self.add_module("a,b", nn.Conv2d(4, 4, 1))
        self.add_module("1", nn.Conv2d(4, 4, 3))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.twice(self.twice(self.blocks(self.first(x))))
        x = self.get_submodule("1")(self.get_submodule("a,b")(self.get_submodule("[z]")(x)))
        return self.head(self.pool(x).flatten(1))

class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return {"a": self.conv(x).mul(2), "b": self.conv(x).mul(3)}
'''
Call = tuple[str, int]
Place = tuple[int | None, int | None]
# the first call, the last of its type, one in the middle, repeated ones, the shared ReLU, other types, odd names
CHOSEN: list[Call] = [
    ("first", 0), ("blocks.0.act", 1), ("twice", 0), ("twice", 1),
    ("[z]", 0), ("a,b", 0), ("1", 0), ("head", 0),
]  # fmt: skip
WITHOUT_A_MAP = [("head", 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    here: Path = tmp_path_factory.mktemp("pasted")
    (here / "nets.py").write_text(NETS)
    Image.effect_noise((16, 16), 80).convert("RGB").save(here / "x.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        yield here


Rows = list[dict[str, Any]]
Print = Callable[..., Rows]


@pytest.fixture(scope="module")
def rows_of(folder: Path) -> Print:
    """The rows of a command; each command line runs once."""

    @cache
    def printed(*words: str) -> Rows:
        out = folder / "out.json"
        with pytest.MonkeyPatch.context() as patch, out.open("w") as stream:
            patch.setattr("sys.stdout", stream)
            with pytest.raises(SystemExit) as caught:
                main([*words, "--format", "json"])
        assert caught.value.code in (0, 3), words
        told = json.loads(out.read_text())
        return told if isinstance(told, list) else told.get("layers") or told["parameters"]

    return printed


MODEL = ("nets.py:Net", "--input-size", "16")
LINES = {
    "visualize": ["visualize", *MODEL, "x.png", "-o", "sheets"],
    "cam": ["cam", *MODEL, "x.png", "-o", "maps"],
    "stats": ["stats", *MODEL, "x.png"],
    "stats --ops": ["stats", *MODEL, "x.png", "--ops"],
    "stats --per-channel": ["stats", *MODEL, "x.png", "--per-channel"],
    "check": ["check", *MODEL, "x.png", "--max-abs", "0"],
    "gradients": ["gradients", *MODEL, "x.png"],
    "trace": ["trace", *MODEL, "x.png"],
    "trace --events": ["trace", *MODEL, "x.png", "--events"],
    "intervene": ["intervene", *MODEL, "x.png", "--at", "first", "zero"],
    "ablate": ["ablate", *MODEL, "x.png", "--top", "999"],
}


def calls_in(rows: Rows) -> dict[Call, Place]:
    """Index and order by name and call."""
    told = {}
    for row in rows:
        name, _, call = row.get("name", row.get("layer")).partition("#")
        told[name, row.get("call", int(call or 0))] = row["index"], row["order"]
    return told


@pytest.fixture(scope="module")
def asked(rows_of: Print) -> Callable[..., dict[Call, Place]]:
    """The calls that a command shows, those of `--layer` alone or every one."""

    def calls(command: str, layer: str, *types: str) -> dict[Call, Place]:
        line = [*LINES[command], *(f"--type={name}" for name in types)]
        return calls_in(rows_of(*line, "--layer", layer))

    return calls


@pytest.fixture(scope="module")
def watched(folder: Path) -> Callable[..., dict[Call, Place]]:
    def calls(layer: str, *types: str) -> dict[Call, Place]:
        net = load_model("nets.py:Net", device="cpu").model.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with Monitor(net, optimizer, every=1, layers=layer, types=types or None) as monitor:
            net(torch.rand(2, 3, 16, 16)).sum().backward()
            optimizer.step()
        return calls_in(monitor.rows)

    return calls


@pytest.fixture(scope="module")
def listed(rows_of: Print) -> dict[Call, Place]:
    """What list-layers says."""
    of_type = calls_in(rows_of("list-layers", *MODEL))
    every = calls_in(rows_of("list-layers", *MODEL, "--type", "all"))
    assert all(index == order for index, order in every.values())
    return {call: (of_type.get(call, (None,))[0], order) for call, (_, order) in every.items()}


def test_orders_and_indices_of_list_layers_are_taken(rows_of: Print, listed: dict[Call, Place]) -> None:
    assert [order for _, order in listed.values()] == list(range(len(listed)))
    assert [listed[call][0] for call in CHOSEN] == [0, None, 3, 4, None, 5, 6, None]

    def layers(*words: str) -> list[str]:
        return list(dict.fromkeys(row["name"].rpartition(".")[0] for row in parameters(rows_of, *words)))

    for (name, _), (index, _) in listed.items():
        assert index is None or layers("--layer", str(index)) == [name]
    assert layers("--layer", "-1,head") == ["1", "head"] and layers("--layer", "3:5") == ["twice"]


@pytest.mark.parametrize("command", [*(name for name in LINES if name != "stats --ops"), "watch"])
def test_all_is_every_call_of_every_layer_with_the_index_of_list_layers(
    command: str, asked: Any, watched: Any, listed: dict[Call, Place]
) -> None:
    found = watched("all") if command == "watch" else asked(command, "all")
    missing = {call: listed[call] for call in listed if call not in found}
    assert {call: listed[call] for call in found} == found
    assert not missing or (command in ("visualize", "cam") and {"pool", "head"} >= {name for name, _ in missing})
    shared = [("blocks.0.act", number) for number in (0, 1)]
    relu = {call: (index, listed[call][1]) for index, call in enumerate(shared)}
    assert (watched("all", "ReLU") if command == "watch" else asked(command, "all", "ReLU")) == relu


@pytest.mark.parametrize(
    "command", [*(name for name in LINES if name not in ("stats --per-channel", "trace --events")), "watch"]
)
@pytest.mark.parametrize("call", CHOSEN, ids=str)
def test_a_row_can_be_pasted(call: Call, command: str, asked: Any, watched: Any, listed: dict[Call, Place]) -> None:
    if command in ("visualize", "cam") and call in WITHOUT_A_MAP:
        pytest.skip("no map")
    name, number = call
    index, order = listed[call]
    calls = watched if command == "watch" else lambda *words: asked(command, *words)
    assert list(calls(f"name:{name}#{number}")) == [call]
    if "," not in name and "[" not in name:
        assert list(calls(f"{name}#{number}")) == [call]
    if index is not None:
        assert list(calls(str(index))) == [call]
    if command != "stats --ops":
        assert calls(str(order), "all") == {call: (order, order)}


def parameters(rows_of: Print, *words: str) -> Rows:
    return rows_of("weights", "nets.py:Net", *words)


@pytest.mark.parametrize("command", ["stats", "check", "trace", "list-layers"])
def test_rows_of_operations_can_be_pasted(command: str, rows_of: Print) -> None:
    told = calls_in(rows_of("list-layers", *MODEL, "--type", "all", "--ops"))
    operations = {call: order for call, (_, order) in told.items() if "::" in call[0]}
    assert ("blocks.0::tanh", 0) in operations and ("::flatten", 0) in operations
    if command == "list-layers":
        assert {call: order for call, (_, order) in calls_in(rows_of("list-layers", *MODEL, "--ops")).items()} == {
            call: order for call, (_, order) in told.items()
        }
        return
    for (name, number), order in operations.items():
        for words in (["--layer", f"{name}#{number}"], ["--layer", str(order), "--type", "all"]):
            found = calls_in(rows_of(*LINES[command], "--ops", *words))
            assert {call: place[1] for call, place in found.items()} == {(name, number): order}


@pytest.mark.parametrize("command", ["stats", "check", "trace", "gradients", "intervene"])
def test_the_row_of_the_model_can_be_pasted(command: str, rows_of: Print) -> None:
    assert list(calls_in(rows_of(*LINES[command], "--layer", "(model)"))) == [("(model)", 0)]


@pytest.mark.parametrize("command", ["stats", "check"])
def test_the_part_of_an_output_has_a_field_of_its_own(command: str, rows_of: Print) -> None:
    line = ["nets.py:Parts" if word == "nets.py:Net" else word for word in LINES[command]]
    rows = rows_of(*line, "--layer", "(model)")
    assert [(row.get("name", row.get("layer")), row["part"]) for row in rows] == [("(model)", "a"), ("(model)", "b")]
