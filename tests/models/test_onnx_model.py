"""Files of ONNX and of torch.export as models, judged by the runtime and by the model that was exported."""

import json
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper
from PIL import Image
from torch import Tensor, nn

from hookscope import capture, layer_graph, list_layers, load_model
from hookscope.cli.main import cli
from hookscope.errors import InputError, ModelError, NoMapError, UsageError
from hookscope.models.onnx_graph import Scopes, call_names
from tests.exports import deployed, to_onnx, to_pt2
from tests.helpers import Trap


def test_a_node_belongs_to_the_innermost_module_of_its_name() -> None:
    conv = helper.make_node("Conv", ["x", "w"], ["a"], "/layer1/layer1.0/conv1/Conv")
    add = helper.make_node("Add", ["a", "x"], ["b"], "/layer1/layer1.0/Add")
    own = helper.make_node("Mul", ["b", "b"], ["c"], "blocks/0/scale it")
    scopes = Scopes([conv, add, own])
    assert [scopes.leaf_of(node) for node in (conv, add, own)] == ["layer1.0.conv1", "", ""]
    assert [scopes.is_unknown(node) for node in (conv, add, own)] == [False, False, True]
    assert [scopes.name_of(node) for node in (add, add, own)] == ["layer1.0.Add", "layer1.0.Add_1", "blocks.0.scale_it"]


def test_equal_layers_of_a_name_are_calls_and_others_get_another_name() -> None:
    relu, leaky = helper.make_node("Relu", ["x"], ["y"]), helper.make_node("LeakyRelu", ["x"], ["y"], alpha=0.1)
    layers = [("relu", [relu]), ("relu_1", [relu]), ("relu", [leaky])]
    assert call_names(layers, ()) == ["relu", "relu", "relu_1"]


def test_layers_with_other_constants_are_other_layers() -> None:
    first, second = (helper.make_node("Conv", ["x", weight], ["y"]) for weight in ("a", "b"))
    assert call_names([("conv", [first]), ("conv", [second])], {"a", "b"}) == ["conv", "conv_1"]
    assert call_names([("conv", [first]), ("conv", [second])], ()) == ["conv", "conv"]


def test_no_layer_lies_in_a_layer() -> None:
    nodes = [helper.make_node(kind, ["x"], ["y"], name=kind) for kind in ("Relu", "Abs", "Exp")]
    names = call_names([("a", [nodes[0]]), ("a.b", [nodes[1]]), ("c.d", [nodes[2]]), ("c", [nodes[0]])], ())
    assert names == ["a", "a_b", "c.d", "c_1"]


LAYERS = {"conv1": "Conv", "relu": "Relu", "conv2": "Conv", "Add": "Add", "up": "Resize"}
LAYERS |= {"head.0": "Conv", "head.1": "Relu", "fc": "Gemm", "fc2": "Gemm"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return to_onnx(deployed(), tmp_path_factory.mktemp("onnx") / "net.onnx")


@pytest.fixture
def pictures() -> Tensor:
    return torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def layers_of(net: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in net.named_modules() if not [*module.children()]}


def judged(path: str, names: list[str], pictures: Any) -> list[Tensor]:
    """What onnxruntime itself puts out for inner values, which are made outputs of the file."""
    model = onnx.load(path)
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return [torch.from_numpy(each) for each in session.run(names, {session.get_inputs()[0].name: pictures.numpy()})]


def test_layers_have_the_names_of_the_exported_modules(file: str) -> None:
    net = load_model(file)
    assert LAYERS.items() <= layers_of(net.model).items()
    assert not {"bn1", "bn2"} & layers_of(net.model).keys()  # the exporter folds them into the convolutions
    assert (net.weights, net.preprocess.input_shape, net.categories) == ("net.onnx", (3, 16, 16), None)
    assert torch.equal(net.model.fc.weight, deployed().fc.weight)
    with torch.no_grad(), capture(net.model, "all", types=["Relu"]) as kept:
        net.model(torch.rand(1, 3, 16, 16))
    assert [*kept] == ["relu", "relu#1", "head.1"]  # one layer that runs twice


def test_values_are_those_of_the_runtime(file: str, pictures: Tensor) -> None:
    net, nodes = load_model(file), onnx.load(file).graph.node
    values = {node.name: node.output[0] for node in nodes}
    names = [values[name] for name in ("/conv1/Conv", "/Add", "/up/Resize", "/fc/Gemm")]
    with capture(net.model, ["conv1", "Add", "up", "fc"]) as kept:
        output = net.model(pictures)
    for found, expected in zip(kept.values(), judged(file, names, pictures), strict=True):
        torch.testing.assert_close(found, expected)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert torch.equal(output, torch.from_numpy(session.run(None, {"input": pictures.numpy()})[0]))
    torch.testing.assert_close(output, deployed()(pictures))


def test_a_graph_has_the_lines_of_the_file(file: str) -> None:
    graph = layer_graph(load_model(file).model, (1, 3, 16, 16))
    names = [node.name or node.kind for node in graph.nodes]
    edges = {(names[edge.source], names[edge.target]) for edge in graph.edges}
    assert {("input", "conv1"), ("conv1", "relu"), ("conv2", "Add")} <= edges
    assert [edge.target for edge in graph.edges if not edge.shapes] == []
    assert {target for _, target in edges} == {*names} - {"input"}


def test_a_layer_runs_alone(file: str) -> None:
    net, maps = load_model(file), torch.rand(2, 8, 8, 8)
    net.model(torch.rand(2, 3, 16, 16))
    torch.testing.assert_close(net.model.up(maps), deployed().up(maps))
    torch.testing.assert_close(net.model.get_submodule("head.0")(maps), deployed().get_submodule("head.0")(maps))


def test_a_hook_that_runs_a_layer_again_leaves_the_output_to_the_runtime(file: str, pictures: Tensor) -> None:
    net = load_model(file).model
    up, session, ran = net.get_submodule("up"), net._session, list[Any]()
    net._session = SimpleNamespace(run=lambda names, feed: ran.append(names) or session.run(names, feed))
    up.register_forward_hook(lambda module, args, output: ran.append(module.forward(args[0] + 1)))
    net(pictures)
    assert len([each for each in ran if isinstance(each, list)]) == 1


@pytest.mark.parametrize("how", ["hook", "weight"])
def test_what_is_changed_inside_flows_on(file: str, pictures: Tensor, how: str) -> None:
    outputs = []
    for net in (load_model(file).model, deployed()):
        first, fc = net.get_submodule("head.0"), net.get_submodule("fc")
        before = fc.weight.detach().clone()
        hook: Any = first.register_forward_hook(lambda module, args, output: output * 2) if how == "hook" else None
        with torch.no_grad():
            if hook is None:
                fc.weight.mul_(3)
            outputs.append(net(pictures))
            fc.weight.copy_(before)
        if hook is not None:
            hook.remove()
    torch.testing.assert_close(*outputs)
    assert not torch.allclose(outputs[1], deployed()(pictures))


@pytest.mark.parametrize(
    "export",
    [
        {"free": False},
        {"opset_version": 13},
        {"opset_version": 20},
        pytest.param({"dynamo": True}, marks=pytest.mark.slow),
        pytest.param({"dynamo": True, "free": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fixed_batches_opsets_and_the_newer_exporter(tmp_path: Path, pictures: Tensor, export: dict[str, Any]) -> None:
    net = load_model(to_onnx(deployed(), tmp_path / "net.onnx", **export)).model
    assert LAYERS.items() <= layers_of(net).items()
    with capture(net, "all", types=["Relu", "Resize", "Gemm"]) as kept:
        torch.testing.assert_close(net(pictures), deployed()(pictures))
    assert [name for name in kept if name not in ("up", "fc", "fc2")] == ["relu", "relu#1", "head.1"]
    assert {tensor.shape[0] for tensor in kept.values()} == {3}  # a fixed batch of one runs image by image
    net.batch = 2
    with pytest.raises(
        InputError, match="it takes batches of 2, and got 3; give a multiple of 2 images with batch_size=2"
    ):
        net(pictures)


def test_a_file_of_half_precision(tmp_path: Path) -> None:
    half = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).half().eval()
    net = load_model(to_onnx(half, tmp_path / "half.onnx"))
    assert net.preprocess.dtype == torch.float16
    x = torch.rand(2, 3, 16, 16).half()
    torch.testing.assert_close(net.model(x), half(x), atol=2e-3, rtol=2e-3)
    with pytest.raises(ModelError, match=r"half\.onnx computes in the data types of the file, and cannot be float32"):
        net.model.float()


def a_file(path: Path, nodes: list[Any], takes: dict[str, Any], constants: dict[str, Tensor], **model: Any) -> str:
    """An ONNX file of nodes; ``takes`` are data type and shape of its inputs; the last value is its output."""
    inputs = [helper.make_tensor_value_info(name, *about) for name, about in takes.items()]
    output = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
    tensors = [onnx.numpy_helper.from_array(value.numpy(), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "net", inputs, [output], tensors)
    opsets = [helper.make_opsetid(domain, 17) for domain in ("", *{node.domain for node in nodes} - {""})]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path, **model)
    return str(path)


FLOAT, PICTURE = TensorProto.FLOAT, {"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}


def test_channels_last_of_tensorflow(tmp_path: Path) -> None:
    weight = torch.rand(4, 3, 3, 3)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2], name="net/in"),
        helper.make_node("Conv", ["t", "w"], ["y"], name="net/conv2d/Conv2D"),
    ]
    net = load_model(a_file(tmp_path / "tf.onnx", nodes, {"x": (FLOAT, ["n", 8, 8, 3])}, {"w": weight}))
    assert any("takes (N, H, W, C)" in note for note in net.notes) and net.preprocess.input_shape == (3, 8, 8)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(net.model(x), nn.functional.conv2d(x, weight))
    assert layers_of(net.model) == {"net.in": "Transpose", "net.conv2d.Conv2D": "Conv"}


def test_weights_in_a_file_beside_it(tmp_path: Path) -> None:
    weight = torch.rand(4, 3, 3, 3)
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    outside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    path = a_file(tmp_path / "net.onnx", nodes, PICTURE, {"w": weight}, **outside)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(load_model(path).model(x), nn.functional.conv2d(x, weight))
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"\Acannot read .*weights\.bin.*\Z"):
        load_model(path)


def conv(**settings: Any) -> list[Any]:
    return [helper.make_node(settings.pop("op", "Conv"), ["x", "w"], ["y"], **settings)]


def two_inputs(path: Path) -> None:
    a_file(path, conv(), PICTURE | {"ids": (TensorProto.INT64, ["n"])}, {"w": torch.rand(4, 3, 3, 3)})


def truncated(path: Path) -> None:
    a_file(path, conv(), PICTURE, {"w": torch.rand(4, 3, 3, 3)})
    path.write_bytes(path.read_bytes()[:200])


def of(nodes: list[Any], takes: dict[str, Any] = PICTURE) -> Callable[[Path], Any]:
    return lambda path: a_file(path, nodes, takes, {"w": torch.rand(4, 3, 3, 3)})


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            two_inputs,
            r"takes 2 inputs, .*; x \(float, nx3x8x8\), ids \(int64, n\); export the part that takes images",
        ),
        (
            of(conv(), {"x": (TensorProto.INT64, ["n", 3, 8, 8])}),
            r"takes no images .*; it takes x \(int64, nx3x8x8\)",
        ),
        (of([helper.make_node("Identity", ["x"], ["y"])], {"x": (FLOAT, ["n", 5])}), r"takes no images .*x \(float"),
        (of(conv(op="Bar", domain="com.foo")), "onnxruntime has no operator com.foo:Bar"),
        (of(conv(op="Konv")), "onnxruntime has no operator Konv"),
        (truncated, "it is damaged, or not an ONNX file"),
        (lambda path: path.write_text("not a model"), "it is damaged, or not an ONNX file"),
        (lambda path: path.write_bytes(b""), "has no nodes: it is damaged"),
    ],
)
def test_bad_files_are_an_error_of_one_line(tmp_path: Path, write: Callable[[Path], Any], message: str) -> None:
    write(tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(tmp_path / "bad.onnx"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_other_weights_and_what_the_runtime_cannot_do_are_refused(file: str, pictures: Tensor) -> None:
    with pytest.raises(UsageError, match="holds its own weights and takes no others; leave weights out"):
        load_model(file, weights="IMAGENET1K_V1")
    with pytest.raises(ModelError, match=r"^no file 'none.onnx'$"):
        load_model("none.onnx")
    net = load_model(file).model
    with pytest.raises(
        ModelError,
        match=r"no gradient can flow through .*net\.onnx: onnxruntime computes no gradients; use a method without",
    ):
        net(pictures.requires_grad_())
    with pytest.raises(InputError, match="it takes 3x16x16, and the input is 3x8x8; try another input_size"):
        net(torch.rand(1, 3, 8, 8))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_without_the_packages_it_says_what_to_install(file: str, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [name for name in sys.modules if name.startswith("hookscope.models.onnx_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys.modules["hookscope.models"], "onnx_model", None, raising=False)
    monkeypatch.delattr("hookscope.models.onnx_model")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"needs the package {package}; pip install 'hookscope\[onnx\]'"):
        load_model(file)


def test_commands_take_a_file(file: str, tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), "orange").save(tmp_path / "plain.png")
    run = CliRunner()
    layers = run.invoke(cli, ["list-layers", file, "--format", "tsv"])
    rows = [line.split("\t") for line in layers.stdout.splitlines()]
    assert [row[1] for row in rows[1:]] == ["conv1", "conv2", "head.0"]
    for name in ("receptive_field", "macs"):
        assert {row[rows[0].index(name)] for row in rows[1:]} == {""}  # the runtime does not say
    stats = run.invoke(cli, ["stats", file, str(tmp_path / "plain.png"), "--layer", "Add", "--format", "tsv"])
    assert re.search(r"^\S*\tAdd\tAdd\t", stats.stdout.splitlines()[1])
    cam = run.invoke(cli, ["cam", file, str(tmp_path / "plain.png"), "-o", str(tmp_path / "cam.png")])
    assert isinstance(cam.exception, NoMapError) or "no gradient reaches a map" in cam.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return to_pt2(deployed(), tmp_path_factory.mktemp("pt2") / "net.pt2")


def test_layers_and_values_are_those_of_the_exported_model(program: str) -> None:
    net, x = load_model(program), torch.rand(3, 3, 16, 16)
    layers = [(row.name, row.call, row.type, row.macs) for row in list_layers(deployed(), (16, 16), ["all"])]
    assert [
        (row.name, row.call, row.type, row.macs) for row in list_layers(net.model, inputs=(x[:1],), types=["all"])
    ] == layers
    with torch.no_grad(), capture(net.model, "all") as found, capture(deployed(), "all") as expected:
        assert torch.equal(net.model(x), deployed()(x))
    assert [*found] == [*expected] and all(torch.equal(found[key], expected[key]) for key in expected)
    assert (net.weights, net.preprocess.input_shape, type(net.model).__name__) == ("net.pt2", (3, 16, 16), "Deployed")


def test_gradients_flow(program: str) -> None:
    x, twin = (torch.full((1, 3, 16, 16), 0.5, requires_grad=True) for _ in range(2))
    load_model(program).model(x)[0, 2].backward()
    deployed()(twin)[0, 2].backward()
    assert torch.equal(x.grad, twin.grad)


def test_a_pass_that_ended_early_does_not_spoil_the_next(program: str) -> None:
    net, x = load_model(program).model, torch.rand(2, 3, 16, 16)
    expected = net(x)
    with capture(net, "relu#0"):
        net(x)
    assert torch.equal(net(x), expected)


def test_another_input_and_other_weights_are_refused(program: str, tmp_path: Path) -> None:
    net = load_model(program).model
    with pytest.raises(InputError, match=r"net\.pt2 takes anyx3x16x16; the input is 1x3x8x8; give that input_size"):
        net(torch.rand(1, 3, 8, 8))
    with pytest.raises(UsageError, match="holds its own weights"):
        load_model(program, weights="other.pth")
    flat = nn.Linear(4, 2).eval()
    with pytest.raises(ModelError, match=r"does not take one batch of images .*; it takes float32 2x4"):
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
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = changed(program, tmp_path / "evil.pt2", EVIL[what])
    with pytest.raises(ModelError, match=rf"evil\.pt2 holds {what}.*, which could run code: it is not loaded"):
        load_model(path)
    assert [each.name for each in tmp_path.iterdir()] == ["evil.pt2"]


def test_a_wrong_operator_is_one_line(program: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = changed(
        program, tmp_path / "wrong.pt2", lambda content: node(content).update(target="torch.ops.aten.none.x")
    )
    with pytest.raises(ModelError, match="torch lacks one of its operators, or one does not fit"):
        load_model(path)
    assert capfd.readouterr() == ("", "")


def test_a_copy_that_is_not_changed_is_read(program: str, tmp_path: Path) -> None:
    x = torch.rand(1, 3, 16, 16)
    net = load_model(changed(program, tmp_path / "copy.pt2", lambda content: None)).model
    assert torch.equal(net(x), deployed()(x))


@pytest.mark.parametrize("content", [b"", b"no archive", "truncated", "state dict"])
def test_other_files_are_an_error_of_one_line(program: str, tmp_path: Path, content: Any) -> None:
    path = tmp_path / "bad.pt2"
    if content == "state dict":
        torch.save({"weight": Tensor([1.0])}, path)
    else:
        path.write_bytes(Path(program).read_bytes()[:3000] if content == "truncated" else content)
    with pytest.raises(ModelError, match=r"bad\.pt2") as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
