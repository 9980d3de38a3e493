"""Programs of torch.export as MODEL: the same layers and values as before the export, and no code that runs."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope import capture, list_layers, load_model
from hookscope.errors import InputError, ModelError, UsageError
from tests.exports import deployed, to_pt2
from tests.helpers import Trap


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return to_pt2(deployed(), tmp_path_factory.mktemp("pt2") / "net.pt2")


def test_layers_and_values_are_those_of_the_exported_model(file: str) -> None:
    net, x = load_model(file), torch.rand(3, 3, 16, 16)
    layers = [(row.name, row.call, row.type, row.macs) for row in list_layers(deployed(), (16, 16), ["all"])]
    assert [
        (row.name, row.call, row.type, row.macs) for row in list_layers(net.model, inputs=(x[:1],), types=["all"])
    ] == layers
    with torch.no_grad(), capture(net.model, "all") as found, capture(deployed(), "all") as expected:
        assert torch.equal(net.model(x), deployed()(x))
    assert [*found] == [*expected] and all(torch.equal(found[key], expected[key]) for key in expected)
    assert (net.weights, net.preprocess.input_shape, type(net.model).__name__) == ("net.pt2", (3, 16, 16), "Deployed")


def test_gradients_flow(file: str) -> None:
    x, twin = (torch.full((1, 3, 16, 16), 0.5, requires_grad=True) for _ in range(2))
    load_model(file).model(x)[0, 2].backward()
    deployed()(twin)[0, 2].backward()
    assert torch.equal(x.grad, twin.grad)


def test_a_pass_that_ended_early_does_not_spoil_the_next(file: str) -> None:
    net, x = load_model(file).model, torch.rand(2, 3, 16, 16)
    expected = net(x)
    with capture(net, "relu#0"):
        net(x)
    assert torch.equal(net(x), expected)


def test_another_input_and_other_weights_are_refused(file: str, tmp_path: Path) -> None:
    net = load_model(file).model
    with pytest.raises(InputError, match=r"net\.pt2 takes anyx3x16x16; the input is 1x3x8x8; give that input_size"):
        net(torch.rand(1, 3, 8, 8))
    with pytest.raises(UsageError, match="holds its own weights"):
        load_model(file, weights="other.pth")
    flat = nn.Linear(4, 2).eval()
    with pytest.raises(ModelError, match=r"does not take one batch of pictures .*; it takes float32 2x4"):
        load_model(to_pt2(flat, tmp_path / "flat.pt2", size=(2, 4), free=False))


def changed(source: str, target: Path, change: Callable[[Any], Any]) -> str:
    """A copy of an archive; ``change`` gets the content of its parts by name, and may return others."""
    with zipfile.ZipFile(source) as old:
        parts = {name.partition("/")[2]: old.read(name) for name in old.namelist()}
    content = {name: json.loads(data) if name.endswith(".json") else data for name, data in parts.items()}
    content |= change(content) or {}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for name, data in content.items():
            new.writestr(f"net/{name}", data if isinstance(data, bytes) else json.dumps(data))
    return str(target)


def graph(content: Any) -> Any:
    return content["models/model.json"]["graph_module"]["graph"]


def size(content: Any) -> Any:
    """A size of a tensor that is an expression."""
    sizes = (size for value in graph(content)["tensor_values"].values() for size in value["sizes"])
    return next(size["as_expr"] for size in sizes if "as_expr" in size)


def node(content: Any) -> Any:
    return graph(content)["nodes"][0]


def weight(content: Any) -> Any:
    return next(iter(content["data/weights/model_weights_config.json"]["config"].values()))


CALL = "__import__('os').system('touch sprung')"
STACK = "L__self__,,a.B;L__self__x,x\"+open('sprung').name+\",a.C"
EVIL: dict[str, Callable[[Any], Any]] = {
    r"the target 'torch\.os\.system'": lambda content: node(content).update(target="torch.os.system"),
    "the target 'torch.ops.aten.__class__": lambda content: node(content).update(target="torch.ops.aten.__class__.mro"),
    "the expr_str .__import__": lambda content: size(content).update(
        expr_str="__import__('os').system('touch sprung')"
    ),
    "the name .x = open": lambda content: node(content).update(name="x = open('sprung', 'w') #"),
    "the nn_module_stack 'L__self__": lambda content: node(content)["metadata"].update(nn_module_stack=STACK),
    "pickled tensors or objects": lambda content: weight(content).update(use_pickle=True),
    "sample inputs that are not tensors": lambda content: {"data/sample_inputs/model.pt": pickle.dumps(Trap("sprung"))},
    "compiled code": lambda content: {"data/aotinductor/model/x.so": b"code"},
}


@pytest.mark.parametrize("what", EVIL)
def test_a_file_that_could_run_code_is_refused(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = changed(file, tmp_path / "evil.pt2", EVIL[what])
    with pytest.raises(ModelError, match=rf"evil\.pt2 holds {what}.*, which could run code: it is not loaded"):
        load_model(path)
    assert [each.name for each in tmp_path.iterdir()] == ["evil.pt2"]


def test_a_copy_that_is_not_changed_is_read(file: str, tmp_path: Path) -> None:
    x = torch.rand(1, 3, 16, 16)
    net = load_model(changed(file, tmp_path / "copy.pt2", lambda content: None)).model
    assert torch.equal(net(x), deployed()(x))


@pytest.mark.parametrize("content", [b"", b"no archive", "truncated", "state dict"])
def test_other_files_are_an_error_of_one_line(file: str, tmp_path: Path, content: Any) -> None:
    path = tmp_path / "bad.pt2"
    if content == "state dict":
        torch.save({"weight": Tensor([1.0])}, path)
    else:
        path.write_bytes(Path(file).read_bytes()[:3000] if content == "truncated" else content)
    with pytest.raises(ModelError, match=r"bad\.pt2") as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
